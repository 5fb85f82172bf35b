"""What holding permits is, however one waits for them: what was asked for, and what becomes of it when they are lost.

Stands beside the floors, shared by the blocking client and that for asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from counterd.client._connection import CLOSED, FORKED, as_bytes
from counterd.errors import ConnectionLost, NotAvailable
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import ERROR_TEXTS, Status

if TYPE_CHECKING:
    from collections.abc import Callable

REACQUIRE: Literal["reacquire"] = "reacquire"
RAISE: Literal["raise"] = "raise"
# Why a connection ended, where that is no loss: its owner wanted it, or never had it.
NO_LOSS = (CLOSED, FORKED)


class Asked:
    """What a hold asks for."""

    def __init__(self, name: str | bytes, resources: int, maximum: int, timeout: float | None, on_lost: Any) -> None:
        if on_lost not in (RAISE, REACQUIRE) and not callable(on_lost):
            raise ValueError(f'on_lost must be "raise", "reacquire" or callable, not {on_lost!r}')
        if timeout is not None and not timeout >= 0:
            raise ValueError(f"timeout must be None, or 0 or more seconds, not {timeout!r}")
        self.name = as_bytes(name)
        wire.acquire(0, self.name, resources, maximum)  # what does not fit the protocol is told here already
        self.resources = resources
        self.maximum = maximum
        self.timeout = timeout
        self.on_lost: Callable[[Any], object] | str = on_lost

    def __str__(self) -> str:
        return f"{self.resources} of {self.name.decode('utf-8', 'backslashreplace')}"

    def not_available(self, consumption: int | None) -> NotAvailable:
        """The error for who has waited long enough."""
        status = Status.RESOURCE_NOT_AVAILABLE
        error = NotAvailable(status, ERROR_TEXTS[status])
        error.name, error.resources, error.maximum = self.name, self.resources, self.maximum
        error.consumption, error.waited = consumption, self.timeout
        return error

    def lost(self, where: str, why: str) -> ConnectionLost:
        return ConnectionLost(f"lost {self} with the connection to {where}: {why}")
