"""The plan of a run: options of counterbench that were checked, and what follows from them.

Floor 5 (ARCHITECTURE.md), pure Python.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from counterd.bench.dialect import DIGITS_MAX, NUMBERED_SIZE, SPECIAL, STAMPED_SIZE
from counterd.bench.dialects import DIALECTS, OPS
from counterd.bench.options import CONNECTIONS, PAIRS, Keys, Options, Work

if TYPE_CHECKING:
    from counterd.bench.dialect import Dialect, Op

PAIR = PAIRS.split("-")
NAMES_MAX = 1 << 30
PORT_MAX = 65535
WORKERS = 500  # connections of workers in a fan
BUFFER_SIZE_MAX = 1 << 19  # so that a buffer fits into the data that is sent together
U32_MAX = 0xFFFFFFFF
DEPTH_MAX = 1 << 20  # 32 MiB of data about requests, for each connection
TIME_MAX = 1e7  # seconds: a random time with this mean is far from overflowing when it is counted in nanoseconds
RATE_MIN, RATE_MAX = 1e-6, 1e9  # per second; the minimum for the same reason, the maximum is one per nanosecond
VERIFIED_MAX = 1 << 24  # 128 MiB of memory, which all load processes share


def read_work(text: str) -> Work:
    """Reads the kinds of requests of a load."""
    if text == PAIRS:
        return Work()
    if text in OPS:
        return Work(text, {text: 1})
    kind, _, shares = text.partition(":")
    pairs = [re.fullmatch(r"([a-z]+)=([0-9]{1,6})", share) for share in shares.split(",")]
    if kind != "mix" or not all(pairs):
        raise ValueError(f"expected {PAIRS}, {', '.join(OPS)} or mix:OP=SHARE,..., not {text!r}")
    weights = {match[1]: int(match[2]) for match in pairs if match}
    unknown = sorted(weights.keys() - set(OPS))
    if unknown or len(weights) < len(pairs) or not sum(weights.values()):
        raise ValueError(f"expected a mix with each of {', '.join(OPS)} at most once, with a share, not {text!r}")
    return Work(text, weights)


def connections_of(work: Work, producers: int) -> int:
    """Returns the default number of connections."""
    return WORKERS + producers if "fan" in work.weights else CONNECTIONS


@dataclass(frozen=True)
class Plan(Options):
    """The plan of one run: options that the protocol has, and that fit together."""

    protocol: str = next(iter(DIALECTS))

    def __post_init__(self) -> None:
        """Raises ValueError if a value is invalid, or if options cannot be used together."""
        if self.port == 0:
            object.__setattr__(self, "port", self.dialect.port)
        if self.control_port == 0 and self.port < PORT_MAX:
            object.__setattr__(self, "control_port", self.port + 1)
        if self.dialect.needs_fill:
            object.__setattr__(self, "prefill", True)
        for wrong, text in self._mistakes():
            if wrong:
                raise ValueError(text)

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.protocol]

    def asked(self) -> list[Op]:
        """Returns the kinds of requests of the load, without those that the protocol does not have."""
        known, dialect = self.dialect.all_ops(), self.dialect
        return [known[dialect.sent(self, op)] for op in self.work.weights or PAIR if op in dialect.ops]

    def asks(self, role: str) -> bool:
        """Returns whether there are requests with this role."""
        return any(op.role == role for op in self.asked())

    def fills(self) -> tuple[str, ...]:
        """Returns the requests that make a name exist: for numbers, for buffers, or both."""
        kinds = {op.names for op in self.asked()}
        numbers = self.dialect.fills.get("number", ()) if kinds != {"buffer"} and self.holds_permits() else ()
        return (*numbers, *(self.dialect.fills.get("buffer", ()) if "buffer" in kinds else ()))

    def has_unique_tokens(self) -> bool:
        """Returns True if the server tells a number with each grant that it never tells again."""
        return self.dialect.tokens == "granted" or (self.take is not None and self.dialect.tokens == "")

    def listens(self) -> bool:
        """Returns True if each load process has one more connection, for control messages."""
        return self.asks("control")

    def needs_names(self) -> bool:
        """Returns True if there are requests that need existing names."""
        shares = self.work.weights.values()
        return any(op.needs_name and share for op, share in zip(self.asked(), shares, strict=False))

    def _mistakes(self) -> list[tuple[bool, str]]:
        digits = min(self.name_size, DIGITS_MAX)
        pairs = not self.work.weights
        hold = self.hold.mean if self.hold else 0.0
        return [
            (self.tls and self.socket is not None, "a Unix socket cannot use TLS"),
            (not self.tls and any((self.cacert, self.cert, self.key)), "--cacert, --cert and --key need --tls"),
            (self.key is not None and self.cert is None, "--key needs --cert"),
            (min(self.connections, self.processes) < 1, "at least one connection and one thread are needed"),
            (not 1 <= self.depth <= DEPTH_MAX, f"there can be 1 to {DEPTH_MAX} requests in flight, not {self.depth}"),
            (self.requests is not None and self.requests < 0, "the number of requests must not be negative"),
            (
                not all(0 <= time <= TIME_MAX for time in (self.duration or 0.0, self.warmup, hold)),
                f"a time must be 0 to {TIME_MAX:g} seconds",
            ),
            (
                not all(rate is None or RATE_MIN <= rate <= RATE_MAX for rate in (self.rate, self.churn or None)),
                f"a rate must be {RATE_MIN:g} to {RATE_MAX:g} a second",
            ),
            (self.verify and self.names > VERIFIED_MAX, f"--verify can count at most {VERIFIED_MAX} names"),
            (self.requests is None and self.duration is None, "use --requests, --duration or both"),
            (
                self.processes > self.connections,
                f"{self.processes} threads need at least as many connections, not {self.connections}",
            ),
            (not 1 <= self.names <= NAMES_MAX, f"there can be 1 to {NAMES_MAX} names, not {self.names}"),
            (
                self.names > 16**digits,
                f"there are only {16**digits} names of {self.name_size} bytes, not {self.names}: see --name-size",
            ),
            (
                not 1 <= self.name_size <= self.dialect.name_size_max,
                f"a name must have 1 to {self.dialect.name_size_max} bytes in the {self.protocol} protocol",
            ),
            (not 1 <= self.resources <= U32_MAX, f"resources must be 1 to {U32_MAX}"),
            (self.maximum > U32_MAX, f"the maximum must be at most {U32_MAX}"),
            (
                self.maximum < self.resources,
                f"each acquire asks for {self.resources}, and the maximum is {self.maximum}: none would be granted",
            ),
            (self.hold is not None and not pairs, f"--hold can only be used with {PAIRS}"),
            (
                not self.keep_alive and self.depth > 1,
                "--keep-alive 0 opens a connection for each request, so --pipeline cannot be used with it",
            ),
            (
                not self.keep_alive and self.rate is not None,
                "--keep-alive 0 opens a connection for each request in a closed loop, so --rate cannot be used with it",
            ),
            (not self.keep_alive and bool(self.hold or self.churn), "--hold and --churn need --keep-alive 1"),
            (
                self.dialect.checks is None and bool(self.verify or self.churn),
                f"--verify and --churn check the holdings of connections, which {self.protocol} does not have",
            ),
            (
                bool(self.churn) and all(op.role != "count" for op in self.dialect.ops.values()),
                f"--churn reads how many permits are held, which {self.protocol} does not report",
            ),
            *self._mistakes_of_work(),
            *self._mistakes_of_takes(),
            *self._mistakes_of_jobs(),
            *self._mistakes_of_messages(),
            *self.dialect.mistakes(self),
        ]

    def _mistakes_of_jobs(self) -> list[tuple[bool, str]]:
        ours = self.dialect.kind == "jobs"
        numbered = NUMBERED_SIZE if self.verify else 0
        size_min = STAMPED_SIZE if self.fans() else numbered
        named = (self.names, self.name_size, self.keys) != (1, Plan.name_size, Keys())
        return [
            (self.delay > 0 and not ours, f"--delay is for jobs, which the {self.protocol} protocol does not have"),
            (not 0 <= self.delay <= TIME_MAX, f"a delay must be 0 to {TIME_MAX:g} seconds"),
            (ours and named, f"jobs have no names: do not use --names, --keys or --name-size with {self.protocol}"),
            (
                ours and not self.keep_alive,
                f"jobs belong to connections that stay open: do not use --keep-alive 0 with {self.protocol}",
            ),
            (ours and self.buffer_size < size_min, f"the body of a job must have {size_min} bytes to identify the job"),
            (self.fans() and len(self.work.weights) > 1, "a fan cannot be part of a mix"),
            (
                self.fans() and not self.processes <= self.producers < self.connections,
                f"a fan needs at least one producer for each of {self.processes} threads, and also workers: of "
                f"{self.connections} connections, {self.producers} cannot be producers",
            ),
            (
                ours and self.verify and self.asks("put") and (self.requests or 1 << 32) > VERIFIED_MAX,
                f"--verify can check at most {VERIFIED_MAX} jobs, and put does not delete its jobs: use --requests",
            ),
        ]

    def _mistakes_of_messages(self) -> list[tuple[bool, str]]:
        return [
            (self.listens() and len(self.work.weights) > 1, "control cannot be part of a mix"),
            (self.listens() and self.socket is not None, "control needs two ports: --socket cannot be used with it"),
            (self.listens() and not self.control_port, f"there is no port after {PORT_MAX}: use --control-port"),
            (
                self.listens() and self.name_size < DIGITS_MAX,
                f"with control each identifier is new, so identifiers need {DIGITS_MAX} bytes: see --name-size",
            ),
        ]

    def _mistakes_of_takes(self) -> list[tuple[bool, str]]:
        if self.take is None:
            return []
        has = self.dialect.options
        queued = self.take.wait > 0 or self.take.keys > 0
        return [
            (
                "items" not in has,
                f"the {self.protocol} protocol has no Take: --items and --wait cannot be used with it",
            ),
            (
                queued and "wait" not in has,
                f"{self.protocol} has no queue: --wait, --weights and --priorities need one",
            ),
            (not self.asks("acquire"), "the load has no acquire that could be a Take"),
            (
                not self.holds_permits() and (self.asks("release") or self.verify or self.hold is not None),
                "rates are not released: use -t acquire, without --hold and --verify",
            ),
            (
                self.take.limit is not None and not self.take.items.rates,
                "--limit is for rates: see --items",
            ),
            (
                self.take.burst is not None and not self.take.items.rates,
                "--burst is for rates: see --items",
            ),
            (self.waits() and not self.keep_alive, "--wait needs --keep-alive 1"),
            *self.take.mistakes(),
        ]

    def _mistakes_of_work(self) -> list[tuple[bool, str]]:
        unknown = ", ".join(sorted({*(self.work.weights or PAIR)} - self.dialect.ops.keys()))
        return [
            (
                bool(unknown),
                f"the {self.protocol} protocol has {', '.join(self.dialect.ops)}, not {unknown}",
            ),
            (
                not 0 <= self.buffer_size <= BUFFER_SIZE_MAX,
                f"a buffer must have 0 to {BUFFER_SIZE_MAX} bytes, not {self.buffer_size}",
            ),
            (
                self.name_size <= DIGITS_MAX and len({op.names for op in self.asked() if op.names}) > 1,
                f"names of {self.name_size} bytes contain only a number: counters, buffers and inserted keys would "
                f"have the same names, see --name-size",
            ),
        ]

    def as_options(self) -> dict[str, Any]:
        """Returns the options of the command line that matter for this plan, by name, for people and files."""
        limits = {"requests": self.requests, "duration": _time(self.duration), "warmup": _time(self.warmup or None)}
        load = {
            "connections": self.connections, "pipeline": self.depth, "keep-alive": int(self.keep_alive),
            "threads": self.processes, "rate": self.rate, "arrivals": self.arrivals if self.rate else None,
            "ops": self.work.text, "names": self.names, "keys": self.keys.text, "name-size": self.name_size,
            "value-size": self.buffer_size,
            "producers": self.producers if self.fans() else None, "delay": _time(self.delay or None),
            "number-type": self.number_type, "ttl": _time(self.ttl),
            "resources": self.resources, "maximum": self.maximum,
            "hold": f"{self.hold.kind}:{_time(self.hold.mean)}" if self.hold else None,
            "wait": _time(self.take.wait or None) if self.take else None,
            **(self.take.as_options() if self.take else {}),
            "churn": self.churn or None, "prefill": self.prefill or None, "verify": self.verify or None,
            "seed": self.seed,
        }  # fmt: skip
        unknown = SPECIAL.difference(self.dialect.options, *(op.options for op in self.asked()))
        options = {**self._where(), **limits, **load}.items()
        return {name: value for name, value in options if value is not None and name not in unknown}

    def _where(self) -> dict[str, Any]:
        server: dict[str, Any] = (
            {"host": self.host, "port": self.port} if self.socket is None else {"socket": self.socket}
        )
        if self.listens():
            server["control-port"] = self.control_port
        secured = {"tls": self.tls or None, "cacert": self.cacert, "cert": self.cert, "key": self.key}
        return {"protocol": self.protocol, **server, **secured}


def _time(seconds: float | None) -> str | None:
    """Formats a time as on the command line: 10s, 100ms, 250us."""
    if seconds is None:
        return None
    unit, size = next(each for each in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 0.0)) if seconds >= each[1])
    return f"{seconds / (size or 1e-9):.12g}{unit}"
