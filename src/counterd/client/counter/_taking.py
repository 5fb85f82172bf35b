"""The items of a Take: permits and rates, as users write them. Also what has to be done when the Take is over.

Floor: side (ARCHITECTURE.md); shared by the blocking client and the client for asyncio. No I/O.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from counterd.client._connection import as_bytes
from counterd.client._holding import Wanted, printed
from counterd.errors import ConnectionLost
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import OnDeath

if TYPE_CHECKING:
    from collections.abc import Sequence


PROBE = (wire.noop,)  # the request that shows that the server still answers
NOT_TAKEN = "this Take has no items: acquire() was not called, or release() was called already"
AFTER_DEATH = {"final": OnDeath.FINAL, "charge": OnDeath.CHARGED, "refund": OnDeath.REFUNDED}


@dataclass(frozen=True)
class Permit:
    """An item of a Take: permits of a counter, which has at most `maximum` permits.

    The permits are given back when the block of the Take ends, or when the connection ends.
    """

    name: str | bytes
    amount: int = 1
    maximum: int = 1

    def _item(self) -> wire.Permit:
        return wire.Permit(as_bytes(self.name), self.amount, self.maximum)


@dataclass(frozen=True)
class Rate:
    """An item of a Take: units of a rate, such as requests or tokens in a minute.

    limit: how many units are allowed in `per` seconds (None: 1). burst: how many units can be taken at once after a
    pause; None means limit. So a period can contain limit + burst - 1 units: after a pause, a rate of 10 in a minute
    lets up to 19 through, and only 10 with burst=1. Without a limit, the numbers come from the server's file of limits;
    NotFound is raised if the file has none.
    after_death: what happens to the units if the connection ends before settle(): "charge" means that they stay taken,
    "refund" means that they are given back. "final" means that they stay taken and that settle() cannot change that;
    the server then has to remember less.
    """

    name: str | bytes
    amount: int = 1
    limit: int | None = None
    per: float | None = None
    burst: int | None = None
    after_death: Literal["charge", "refund", "final"] = "charge"

    def _item(self) -> wire.Rate:
        if self.after_death not in AFTER_DEATH:
            raise ValueError(f"after_death must be one of {', '.join(AFTER_DEATH)}, not {self.after_death!r}")
        after_death = AFTER_DEATH[self.after_death]
        if self.limit is None:
            if (self.per, self.burst) != (None, None):
                raise ValueError("a rate with a period or a burst needs a limit")
            return wire.Rate(as_bytes(self.name), self.amount, on_death=after_death)
        if self.limit < 1:
            raise ValueError(f"limit must be at least 1, not {self.limit}")
        burst = self.limit if self.burst is None else self.burst
        period_us = round((1.0 if self.per is None else self.per) * 1_000_000)
        return wire.Rate(as_bytes(self.name), self.amount, self.limit, period_us, burst, after_death)


def place(key: str | bytes, weight: int, priority: int) -> dict[str, Any]:
    """The place of a request in the server's queue."""
    return {"key": as_bytes(key), "weight": weight, "priority": priority}


class Request:
    """A Take that is encoded once and can be sent again and again. ValueError or TypeError if it does not fit."""

    def __init__(self, items: Sequence[wire.Permit | wire.Rate], where: dict[str, Any]) -> None:
        self._items = items
        self._encoded = wire.take(0, items, **where)

    def waiting(self, seconds: float | None) -> tuple[Any, ...]:
        """Returns the request that waits in the server for so many seconds; None: as long as a request can say."""
        wait_ms = wire.U32_MAX if seconds is None else math.ceil(min(seconds * 1000, wire.U32_MAX))
        return self._encode, self._items, wait_ms

    def _encode(self, opaque: int, _items: object, wait_ms: int) -> bytes:
        return wire.take_again(opaque, self._encoded, wait_ms)


class AskedItems(Wanted):
    """The items that Client.take() asks for."""

    def __init__(self, items: Sequence[Permit | Rate], timeout: float | None, where: dict[str, Any]) -> None:
        super().__init__(b"", timeout, "raise")
        self.items = [item._item() for item in items]
        names = [(type(item), item.name) for item in self.items]
        if len({*names}) < len(names):
            raise ValueError("a Take must not contain the same counter, or the same rate, twice")
        self._request = Request(self.items, where)

    def __str__(self) -> str:
        return ", ".join(f"{item.amount} of {printed(item.name)}" for item in self.items)

    @property
    def permits(self) -> list[wire.Permit]:
        return [item for item in self.items if isinstance(item, wire.Permit)]

    def request(self, seconds: float | None) -> tuple[Any, ...]:
        return self._request.waiting(seconds)

    def rate(self, name: str | bytes) -> bytes:
        """Returns the name of a rate that can be settled. Raises ValueError for any other name."""
        found = as_bytes(name)
        for item in self.items:
            if isinstance(item, wire.Rate) and item.name == found and item.on_death != OnDeath.FINAL:
                return found
        raise ValueError(f"{printed(found)} is not a rate of this Take that can be settled")

    def lost(self, where: str, why: str) -> ConnectionLost:
        return ConnectionLost(f"lost {self} with the connection to {where}: {why}")
