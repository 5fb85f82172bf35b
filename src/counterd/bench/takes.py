"""The options of a load of Takes: requests for several items at once, which may wait in the server's queue.

Floor 5 (ARCHITECTURE.md), pure Python. Each item is a number of permits, or a unit of a rate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from counterd.units import duration, several

ITEMS_MAX = 16  # of a Take
KEYS_MAX = 1000  # load processes have a request in memory for each
WEIGHT_MAX = 1000
PRIORITY_MAX = 255
WAIT_MAX = 1e6  # seconds: the server reads milliseconds, less than 2^32
RATE_LIMIT = 1_000_000  # units a second, by default
RATE_LIMIT_MAX = (1 << 31) - 1
BURST_MAX = (1 << 32) - 1

Mistakes = list[tuple[bool, str]]


@dataclass(frozen=True)
class Items:
    """The items of a Take: permits of several names, and a unit of several rates."""

    permits: int = 1
    rates: int = 0

    @classmethod
    def read(cls, text: str) -> Items:
        pairs = [re.fullmatch(r"(permits|rates)=([0-9]{1,2})", part) for part in text.split(",")]
        found = {pair[1]: int(pair[2]) for pair in pairs if pair}
        if not all(pairs) or len(found) < len(pairs) or not 1 <= sum(found.values()) <= ITEMS_MAX:
            raise ValueError(f"expected 1 to {ITEMS_MAX} items, such as permits=2,rates=2, not {text!r}")
        return cls(found.get("permits", 0), found.get("rates", 0))

    @property
    def text(self) -> str:
        """Returns the form on the command line."""
        counts = {"permits": self.permits, "rates": self.rates}
        return ",".join(f"{kind}={count}" for kind, count in counts.items() if count)

    def names(self, name: bytes) -> tuple[list[bytes], list[bytes]]:
        """Returns the names of the permits and of the rates, all of which contain `name`."""
        permits = [name, *(b"%b:%d" % (name, number) for number in range(1, self.permits))][: self.permits]
        return permits, [b"%b:r%d" % (name, number) for number in range(self.rates)]


def read_numbers(text: str) -> tuple[int, ...]:
    """Reads numbers with commas between them, one for each fairness key."""
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        raise ValueError(f"expected numbers such as 1,1,2, not {text!r}")
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True)
class Take:
    """The options of Takes. wait: how many seconds they wait; 0 means that they do not wait. limit: units a second of
    each rate; None means RATE_LIMIT. burst: units at once; None means the limit.

    weights, priorities: the values of each fairness key. The connections get the keys one after the other. If both are
    empty, each connection has its own key, with the same weight and priority.
    """

    wait: float = 0.0
    items: Items = Items()
    limit: int | None = None
    burst: int | None = None
    weights: tuple[int, ...] = ()
    priorities: tuple[int, ...] = ()

    @property
    def keys(self) -> int:
        """Returns how many fairness keys there are. 0 means one for each connection."""
        return max(len(self.weights), len(self.priorities))

    @property
    def per_second(self) -> int:
        """Returns how many units of a rate can be taken a second."""
        return RATE_LIMIT if self.limit is None else self.limit

    @property
    def units_max(self) -> int:
        """Returns how many units of a rate can be taken at once after a pause."""
        return self.per_second if self.burst is None else self.burst

    def weight(self, key: int) -> int:
        return self.weights[key] if self.weights else 1

    def priority(self, key: int) -> int:
        return self.priorities[key] if self.priorities else 0

    def describe(self) -> list[str]:
        """Returns the words about Takes in the description of a run."""
        words = [f"Takes of {self.items.text}"]
        if self.wait:
            words.append(f"waiting up to {duration(self.wait * 1e9)}")
        if self.keys:
            words.append(several(self.keys, "fairness key"))
        return words

    def mistakes(self) -> Mistakes:
        weights, priorities = len(self.weights), len(self.priorities)
        return [
            (not 0 <= self.wait <= WAIT_MAX, f"a Take can wait 0 to {WAIT_MAX:g} seconds"),
            (not 1 <= self.per_second <= RATE_LIMIT_MAX, f"the limit of a rate must be 1 to {RATE_LIMIT_MAX} a second"),
            (not 1 <= self.units_max <= BURST_MAX, f"the burst of a rate must be 1 to {BURST_MAX}"),
            (self.keys > KEYS_MAX, f"there can be {KEYS_MAX} fairness keys, not {self.keys}"),
            (
                bool(weights and priorities) and weights != priorities,
                f"there are {weights} weights and {priorities} priorities, but each fairness key needs one of each",
            ),
            (
                not all(1 <= weight <= WEIGHT_MAX for weight in self.weights),
                f"a weight must be 1 to {WEIGHT_MAX}",
            ),
            (
                not all(0 <= priority <= PRIORITY_MAX for priority in self.priorities),
                f"a priority must be 0 to {PRIORITY_MAX}",
            ),
        ]

    def as_options(self) -> dict[str, Any]:
        """Returns the options of the command line except --wait, by name."""
        has_rates = self.items.rates > 0
        return {
            "items": self.items.text,
            "limit": self.per_second if has_rates else None,
            "burst": self.units_max if has_rates else None,
            "weights": ",".join(map(str, self.weights)) or None,
            "priorities": ",".join(map(str, self.priorities)) or None,
        }
