"""The options of a run, as plain values that need not fit together: what a dialect makes its requests of.

Floor 5 (ARCHITECTURE.md), pure Python. The readers, in this file and in counterd.units, parse the text of an option.
They raise a ValueError that says what was expected.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from counterd.units import seconds

if TYPE_CHECKING:
    from counterd.bench.takes import Take

PAIRS = "acquire-release"
CONNECTIONS = 50
BUFFER_SIZE = 100


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
        """Returns the form on the command line."""
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
    """The kinds of requests that are sent: alternately acquire and release, or any mix of requests."""

    text: str = PAIRS
    weights: dict[str, int] = field(default_factory=dict)  # empty: acquire and release in turn


@dataclass(frozen=True)
class Options:
    """The options of one run. Times are in seconds, rates per second. All numbers are the sums for all processes."""

    protocol: str
    host: str = "127.0.0.1"
    port: int = 0  # 0: the protocol's default port
    control_port: int = 0  # the port for control messages; 0: the port after `port`
    socket: str | None = None
    tls: bool = False
    cacert: str | None = None  # files for TLS; None: the system's authorities, no certificate, the key in cert
    cert: str | None = None
    key: str | None = None
    connections: int = CONNECTIONS
    producers: int = 1  # how many of the connections are producers, in a fan
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
    value_size: int | None = None  # of a buffer. With redis, get reads numbers unless this is given or there is a set
    number_type: str = "uint16"
    ttl: float = 0.1
    delay: int = 0  # of jobs
    hold: Hold | None = None
    take: Take | None = None  # None: acquires are no Takes
    churn: float = 0.0
    prefill: bool = False
    verify: bool = False
    seed: int = 1

    @property
    def buffer_size(self) -> int:
        return BUFFER_SIZE if self.value_size is None else self.value_size

    def fans(self) -> bool:
        return "fan" in self.work.weights

    def holds_permits(self) -> bool:
        """Returns False if acquires take units of rates only, so that there is nothing to release."""
        return self.take is None or self.take.items.permits > 0

    def waits(self) -> bool:
        """Returns True if acquires wait in the server's queue, so that later requests may be answered first."""
        return self.take is not None and self.take.wait > 0
