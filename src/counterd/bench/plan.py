"""What a run does: the options of counterbench, read and checked.

A side, pure Python. Readers, here and in counterd.units, take the text of an option and raise ValueError with what was
expected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from counterd.bench.flows import FLOWS_MAX
from counterd.units import seconds

PROTOCOLS = {  # and their ports
    "counter": 11215, "throttr": 9000, "sentinel": 18730, "beanstalk": 11300, "smockron": 10004,
    "redis": 6379, "redis-lua": 6379, "memcached": 11211,
}  # fmt: skip
PROTOCOL_HELP = """What the server speaks: counterd's five, of which beanstalk is beanstalkd's too, and for side by side
figures redis, which has a counterpart of all requests for counters and keys, redis-lua, its usual scripts for what a
sentinel room does, and memcached (incr, decr, get)."""
COUNTING = ("noop", "get", "acquire", "release")
KEEPING = ("query", "update", "insert", "purge", "set")
JOBS = ("put", "cycle", "fan")
MESSAGES = ("account", "control")
OPS = (*COUNTING, *KEEPING, "flow", "param", "keep", "counts", *JOBS, *MESSAGES)
OPS_OF = {
    "counter": COUNTING,
    "throttr": ("noop", "get", *KEEPING),
    "sentinel": ("noop", "acquire", "release", "flow", "param", "keep"),
    "beanstalk": ("noop", *JOBS),
    "smockron": ("noop", *MESSAGES),
    "redis": (*COUNTING, *KEEPING),
    "redis-lua": ("noop", "acquire", "release", "flow", "counts"),
    "memcached": COUNTING,
}
PAIRS = "acquire-release"
OPS_HELP = """acquire-release (in turn), acquire, release, get, noop, or mix:acquire=5,release=5,get=1. With throttr:
query, update (one up, one down), insert (a new name, with --ttl), purge (of those), set, get, noop, or a mix. With
sentinel: flow, param (a value), keep (of what was acquired), noop too. With redis-lua: acquire-release (a leased
semaphore), flow (a sliding window), counts (the same, estimated). With beanstalk: put (the jobs stay), cycle (put,
reserve and delete in turn), noop, a mix, or fan: some connections put, the others wait, and latency is from put to
RESERVED. With smockron: account (accounting messages; a PING behind each batch is answered once the batch has been
read), control (latency is from an accounting message to the control message about it), noop, or a mix without control.
[default: acquire-release; update with throttr; cycle with beanstalk; account with smockron]"""
NAMES_MAX = 1 << 30
PORT_MAX = 65535
NAME_SIZE_MAX = {
    "counter": 65535, "throttr": 255, "sentinel": 996, "beanstalk": 200, "smockron": 255,
    "redis": 65535, "redis-lua": 65535, "memcached": 250,
}  # fmt: skip
CONNECTIONS = 50
WORKERS = 500  # of a fan
BUFFER_SIZE = 100
BUFFER_SIZE_MAX = 1 << 19  # so that one fits into what is sent at once
NUMBER_SIZES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}  # bytes, of the throttr protocol
TTL_UNITS_NS = {6: 3_600_000_000_000, 5: 60_000_000_000, 4: 1_000_000_000, 3: 1_000_000, 2: 1_000, 1: 1}  # by TTL type
U32_MAX = 0xFFFFFFFF
I32_MAX = 0x7FFFFFFF
DIGITS_MAX = 8  # of a name's number, in hexadecimal
DEPTH_MAX = 1 << 20  # 32 MiB of what is known about each request, for each connection
TIME_MAX = 1e7  # seconds: what is counted in nanoseconds stays far from overflowing, whatever is drawn around it
RATE_MIN, RATE_MAX = 1e-6, 1e9  # a second; for the same reason, and one for each nanosecond
VERIFIED_MAX = 1 << 24  # 128 MiB that all load processes share
NUMBERED_SIZE = 8  # bytes of a body that has a job's number,
STAMPED_SIZE = 24  # and of one that has the time too


@dataclass(frozen=True)
class Keys:
    """How names are chosen."""

    kind: Literal["uniform", "zipf", "seq"] = "uniform"
    exponent: float = 0.0

    @classmethod
    def read(cls, text: str) -> Keys:
        if text in ("uniform", "seq"):
            return cls(text)  # type: ignore[arg-type]
        match = re.fullmatch(r"zipf:([0-9]+(?:\.[0-9]+)?)", text)
        if not match or not 0 < float(match[1]) <= 10:
            raise ValueError(f"expected uniform, seq or zipf:EXPONENT (such as zipf:1.03, at most 10), not {text!r}")
        return cls("zipf", float(match[1]))

    @property
    def text(self) -> str:
        """As the command line has it."""
        return f"zipf:{self.exponent:g}" if self.kind == "zipf" else self.kind


@dataclass(frozen=True)
class Hold:
    """How long a permit is held."""

    kind: Literal["fixed", "exp"]
    mean: float  # seconds

    @classmethod
    def read(cls, text: str) -> Hold:
        kind, _, time = text.partition(":")
        if kind not in ("fixed", "exp") or not time:
            raise ValueError(f"expected fixed:TIME or exp:MEAN, such as fixed:10ms, not {text!r}")
        return cls(kind, seconds(time))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Work:
    """What is asked: acquire and release in turn, or any mix of requests."""

    text: str = PAIRS
    weights: dict[str, int] = field(default_factory=dict)  # empty = in turn

    @classmethod
    def read(cls, text: str) -> Work:
        if text == PAIRS:
            return cls()
        if text in OPS:
            return cls(text, {text: 1})
        kind, _, shares = text.partition(":")
        pairs = [re.fullmatch(r"([a-z]+)=([0-9]{1,6})", share) for share in shares.split(",")]
        if kind != "mix" or not all(pairs):
            raise ValueError(f"expected {PAIRS}, {', '.join(OPS)} or mix:OP=SHARE,..., not {text!r}")
        weights = {match[1]: int(match[2]) for match in pairs if match}
        unknown = sorted(weights.keys() - set(OPS))
        if unknown or len(weights) < len(pairs) or not sum(weights.values()):
            raise ValueError(f"each of {', '.join(OPS)} may be in a mix once, with a share: not {text!r}")
        return cls(text, weights)


def work_of(protocol: str) -> str:
    """What is asked if nobody says."""
    return {"throttr": "update", "beanstalk": "cycle", "smockron": "account"}.get(protocol, PAIRS)


def connections_of(work: Work, producers: int) -> int:
    """How many there are if nobody says."""
    return WORKERS + producers if "fan" in work.weights else CONNECTIONS


def ttl_units(ttl: float, most: int) -> tuple[int, int]:
    """Seconds as a TTL type of the throttr protocol, and so many of it. ValueError if there are more than the most."""
    ttl_ns = round(ttl * 1e9)
    for ttl_type, unit_ns in TTL_UNITS_NS.items():
        if ttl_ns % unit_ns == 0 and 0 < ttl_ns // unit_ns <= most:
            return ttl_type, ttl_ns // unit_ns
    raise ValueError(f"a TTL of {ttl:g} s is not 1 to {most:,} of any unit")


def ttl_of(plan: Plan) -> tuple[int, int]:
    """What --ttl is in the throttr protocol, as ttl_units() says it."""
    return ttl_units(plan.ttl, plan.number_max)


@dataclass(frozen=True)
class Plan:
    """One run. Times are in seconds, rates per second, everything for all processes together."""

    protocol: str = "counter"
    host: str = "127.0.0.1"
    port: int = 0  # 0 = the protocol's
    control_port: int = 0  # of a smockron master; 0 = the next one
    socket: str | None = None
    tls: bool = False
    cacert: str | None = None  # files for TLS; None: whom this system trusts, no certificate of our own, the key in it
    cert: str | None = None
    key: str | None = None
    connections: int = CONNECTIONS
    producers: int = 1  # of those, in a fan
    depth: int = 1
    keep_alive: bool = True
    requests: int | None = None
    duration: float | None = 10.0
    warmup: float = 0.0
    processes: int = 1
    rate: float | None = None
    arrivals: str = "constant"
    work: Work = field(default_factory=Work)
    keys: Keys = field(default_factory=Keys)
    names: int = 1
    name_size: int = 16
    resources: int = 1
    maximum: int = 1_000_000
    value_size: int | None = None  # of a buffer; with redis, get reads numbers unless this or a set says otherwise
    number_type: str = "uint16"
    ttl: float = 0.1
    delay: int = 0  # of jobs
    hold: Hold | None = None
    churn: float = 0.0
    prefill: bool = False
    verify: bool = False
    seed: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be done together."""
        if self.port == 0:
            object.__setattr__(self, "port", PROTOCOLS[self.protocol])
        if self.control_port == 0 and self.port < PORT_MAX:
            object.__setattr__(self, "control_port", self.port + 1)
        if self.protocol == "memcached":
            object.__setattr__(self, "prefill", True)  # its incr makes no names
        for wrong, text in self._mistakes():
            if wrong:
                raise ValueError(text)

    @property
    def buffer_size(self) -> int:
        return BUFFER_SIZE if self.value_size is None else self.value_size

    @property
    def number_max(self) -> int:
        """The largest number of the throttr protocol."""
        return (1 << 8 * NUMBER_SIZES[self.number_type]) - 1

    def fetches(self) -> bool:
        """Whether a get is of a buffer, not of a number."""
        sized = self.value_size is not None or "set" in self.work.weights
        return self.protocol == "throttr" or (self.protocol == "redis" and sized)

    def fans(self) -> bool:
        return "fan" in self.work.weights

    def listens(self) -> bool:
        """Whether each load process has one more connection, for control messages."""
        return "control" in self.work.weights

    def makes_names(self) -> bool:
        """Whether there is anything that prefill can make: flows come from rules, scripts make what they need, jobs
        have no names, and identifiers are there as soon as they are spoken of.
        """
        return self.protocol not in {"sentinel", "redis-lua", "beanstalk", "smockron"}

    def needs_names(self) -> bool:
        """Whether there are requests for what has to exist."""
        wanted = {"query", "update", *(["get"] if self.fetches() else [])}
        return any(self.work.weights.get(op) for op in wanted)

    def _mistakes(self) -> list[tuple[bool, str]]:
        digits = min(self.name_size, DIGITS_MAX)
        pairs = not self.work.weights
        hold = self.hold.mean if self.hold else 0.0
        return [
            (self.tls and self.socket is not None, "there is no TLS on a Unix socket"),
            (not self.tls and any((self.cacert, self.cert, self.key)), "--cacert, --cert and --key are for --tls"),
            (self.key is not None and self.cert is None, "the --key needs its --cert"),
            (min(self.connections, self.processes) < 1, "there is at least one connection, and one thread"),
            (not 1 <= self.depth <= DEPTH_MAX, f"there are 1 to {DEPTH_MAX} requests in flight, not {self.depth}"),
            (self.requests is not None and self.requests < 0, "a number of requests is not negative"),
            (
                not all(0 <= time <= TIME_MAX for time in (self.duration or 0.0, self.warmup, hold)),
                f"a time is {TIME_MAX:g} seconds at most",
            ),
            (
                not all(rate is None or RATE_MIN <= rate <= RATE_MAX for rate in (self.rate, self.churn or None)),
                f"a rate is {RATE_MIN:g} to {RATE_MAX:g} a second",
            ),
            (self.verify and self.names > VERIFIED_MAX, f"--verify keeps count of {VERIFIED_MAX} names at most"),
            (self.requests is None and self.duration is None, "give --requests, --duration or both"),
            (
                self.processes > self.connections,
                f"{self.processes} threads need as many connections, not {self.connections}",
            ),
            (not 1 <= self.names <= NAMES_MAX, f"there can be 1 to {NAMES_MAX} names, not {self.names}"),
            (
                self.names > 16**digits,
                f"names of {self.name_size} bytes can be {16**digits} at most, not {self.names}: see --name-size",
            ),
            (
                not 1 <= self.name_size <= NAME_SIZE_MAX[self.protocol],
                f"a name has 1 to {NAME_SIZE_MAX[self.protocol]} bytes in the {self.protocol} protocol",
            ),
            (not 1 <= self.resources <= U32_MAX, f"resources are 1 to {U32_MAX}"),
            (self.maximum > U32_MAX, f"the maximum is {U32_MAX} at most"),
            (
                self.maximum < self.resources,
                f"each acquire asks for {self.resources}, and the maximum is {self.maximum}: none would be granted",
            ),
            (self.hold is not None and not pairs, f"--hold is for {PAIRS}"),
            (
                not self.keep_alive and self.depth > 1,
                "--keep-alive 0 opens a connection for each request, with one in flight: no --pipeline",
            ),
            (
                not self.keep_alive and self.rate is not None,
                "--keep-alive 0 opens a connection for each request, in a closed loop: no --rate",
            ),
            (not self.keep_alive and bool(self.hold or self.churn), "--hold and --churn need connections that stay"),
            (
                self.protocol not in {"counter", "sentinel", "beanstalk"} and bool(self.verify or self.churn),
                f"--verify and --churn are about what connections hold, which {self.protocol} does not know",
            ),
            (
                self.protocol in {"sentinel", "beanstalk"} and bool(self.churn),
                f"--churn looks what the server counts, which {self.protocol} does not tell",
            ),
            *self._mistakes_of_work(),
            *self._mistakes_of_flows(),
            *self._mistakes_of_jobs(),
            *self._mistakes_of_messages(),
        ]

    def _mistakes_of_flows(self) -> list[tuple[bool, str]]:
        """What the sentinel protocol has no room for."""
        ours = self.protocol == "sentinel"
        asked = self.work.weights.keys()
        return [
            (
                ours and self.names > FLOWS_MAX and asked != {"param"},
                f"there are {FLOWS_MAX} flows of a kind at most, not {self.names}; values of param can be more",
            ),
            (ours and self.resources > I32_MAX, f"resources are 1 to {I32_MAX} in the sentinel protocol"),
            (
                ours and self.verify and self.maximum >= I32_MAX,
                f"--verify asks for one more than the maximum, which has to be less than {I32_MAX}",
            ),
            (
                ours and self.verify and bool(asked) and "acquire" not in asked,
                "--verify is about what was acquired: with sentinel acquire has to be asked",
            ),
        ]

    def _mistakes_of_jobs(self) -> list[tuple[bool, str]]:
        ours = self.protocol == "beanstalk"
        numbered = NUMBERED_SIZE if self.verify else 0
        size_min = STAMPED_SIZE if self.fans() else numbered
        named = (self.names, self.name_size, self.keys) != (1, Plan.name_size, Keys())
        return [
            (self.delay > 0 and not ours, "--delay is for jobs, which only beanstalk has"),
            (not 0 <= self.delay <= TIME_MAX, f"a delay is 0 to {TIME_MAX:g} seconds"),
            (ours and named, "jobs have no names: no --names, --keys or --name-size with beanstalk"),
            (ours and not self.keep_alive, "jobs belong to connections that stay: no --keep-alive 0 with beanstalk"),
            (ours and self.buffer_size < size_min, f"what is known of a job by its body needs {size_min} bytes of it"),
            (self.fans() and len(self.work.weights) > 1, "a fan is not part of a mix"),
            (
                self.fans() and not self.processes <= self.producers < self.connections,
                f"a fan has a producer for each of {self.processes} threads at least, and workers besides: of "
                f"{self.connections} connections not {self.producers} are producers",
            ),
            (
                ours and self.verify and "put" in self.work.weights and (self.requests or 1 << 32) > VERIFIED_MAX,
                f"--verify knows {VERIFIED_MAX} jobs at most, and those of put stay: give --requests",
            ),
        ]

    def _mistakes_of_messages(self) -> list[tuple[bool, str]]:
        ours = self.protocol == "smockron"
        return [
            (ours and not self.keep_alive, "gatekeepers stay connected: no --keep-alive 0 with smockron"),
            (self.listens() and len(self.work.weights) > 1, "control is not part of a mix"),
            (self.listens() and self.socket is not None, "control needs two ports: no --socket"),
            (self.listens() and not self.control_port, f"there is no port behind {PORT_MAX}: give --control-port"),
            (
                self.listens() and self.name_size < DIGITS_MAX,
                f"identifiers are all new with control, for which they need {DIGITS_MAX} bytes: see --name-size",
            ),
        ]

    def _mistakes_of_work(self) -> list[tuple[bool, str]]:
        asked = self.work.weights.keys() or {"acquire", "release"}
        unknown = ", ".join(sorted(asked - set(OPS_OF[self.protocol])))
        size_max = min(self.number_max, BUFFER_SIZE_MAX) if self.protocol == "throttr" else BUFFER_SIZE_MAX
        ttl_wrong = ""
        if self.protocol == "throttr":
            try:
                ttl_of(self)
            except ValueError as error:
                ttl_wrong = str(error)
        return [
            (
                bool(unknown),
                f"the {self.protocol} protocol has {', '.join(OPS_OF[self.protocol])}, not {unknown}",
            ),
            (not 0 <= self.buffer_size <= size_max, f"a buffer has 0 to {size_max} bytes, not {self.buffer_size}"),
            (bool(ttl_wrong), ttl_wrong),
            (
                self.name_size <= DIGITS_MAX and len({self._kind_of(op) for op in asked - {"noop"}}) > 1,
                f"names of {self.name_size} bytes are all number: what is counted, set and inserted would have the "
                f"same, see --name-size",
            ),
            (
                self.protocol == "redis" and "insert" in asked and round(self.ttl * 1e9) % 1_000_000 != 0,
                "redis counts a TTL in milliseconds",
            ),
        ]

    def _kind_of(self, op: str) -> str:
        """Requests of different kinds have different names, but for the last digits: see words.names_of."""
        if op in ("insert", "purge"):
            return "inserted"
        return "buffer" if op == "set" or (op == "get" and self.fetches()) else "number"

    def as_options(self) -> dict[str, Any]:
        """For people and files: the options of the command line that matter here, by their names there."""
        asked = self.work.weights.keys()
        limits = {"requests": self.requests, "duration": _time(self.duration), "warmup": _time(self.warmup or None)}
        load = {
            "connections": self.connections, "pipeline": self.depth, "keep-alive": int(self.keep_alive),
            "threads": self.processes, "rate": self.rate, "arrivals": self.arrivals if self.rate else None,
            "ops": self.work.text, **self._named(),
            "value-size": self.buffer_size if self._sends_buffers() else None,
            "producers": self.producers if self.fans() else None, "delay": _time(self.delay or None),
            "number-type": self.number_type if self.protocol == "throttr" else None,
            "ttl": _time(self.ttl) if asked & {"insert", "set", "purge"} else None,
            "resources": self.resources if self.makes_grants() else None,
            "maximum": self.maximum if self.makes_grants() else None,
            "hold": f"{self.hold.kind}:{_time(self.hold.mean)}" if self.hold else None,
            "churn": self.churn or None, "prefill": self.prefill or None, "verify": self.verify or None,
            "seed": self.seed,
        }  # fmt: skip
        return {name: value for name, value in {**self._where(), **limits, **load}.items() if value is not None}

    def makes_grants(self) -> bool:
        """Whether permits are asked for."""
        return not self.work.weights or bool(self.work.weights.keys() & {"acquire", "release", "flow", "param"})

    def _sends_buffers(self) -> bool:
        asked = self.work.weights.keys()
        return bool(asked & {"set", *JOBS}) or ("get" in asked and self.fetches())

    def _named(self) -> dict[str, Any]:
        if self.protocol == "beanstalk":
            return {}
        return {"names": self.names, "keys": self.keys.text, "name-size": self.name_size}

    def _where(self) -> dict[str, Any]:
        server: dict[str, Any] = (
            {"host": self.host, "port": self.port} if self.socket is None else {"socket": self.socket}
        )
        if self.listens():
            server["control-port"] = self.control_port
        secured = {"tls": self.tls or None, "cacert": self.cacert, "cert": self.cert, "key": self.key}
        return {"protocol": self.protocol, **server, **secured}


def _time(seconds: float | None) -> str | None:
    """As the command line has it: 10s, 100ms, 250us."""
    if seconds is None:
        return None
    unit, size = next(each for each in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 0.0)) if seconds >= each[1])
    return f"{seconds / (size or 1e-9):.12g}{unit}"
