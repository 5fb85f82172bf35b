"""What a hold of the counter protocol asks for, and the errors that it raises.

Floor: side (ARCHITECTURE.md); shared by the blocking client and the client for asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterd.client._connection import as_bytes
from counterd.client._holding import Wanted, printed
from counterd.client.counter._taking import Request
from counterd.errors import DRAINING, ConnectionLost, NotAvailable
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import ERROR_TEXTS, Status

if TYPE_CHECKING:
    from counterd.client._wait_queues import Queue
    from counterd.errors import CounterdError


class Asked(Wanted):
    """The permits of a counter that a hold asks for. where: the result of place()."""

    def __init__(
        self,
        name: str | bytes,
        resources: int,
        maximum: int,
        timeout: float | None,
        on_lost: Any,
        *,
        where: dict[str, Any],
    ) -> None:
        super().__init__(as_bytes(name), timeout, on_lost)
        wire.acquire(0, self.name, resources, maximum)  # raises for arguments that do not fit the protocol
        self.resources = resources
        self.maximum = maximum
        self._request = Request([wire.Permit(self.name, resources, maximum)], where)

    def __str__(self) -> str:
        return f"{self.resources} of {printed(self.name)}"

    def request(self, seconds: float | None) -> tuple[Any, ...]:
        """Returns the request that waits in the server for this many seconds. None means for ever."""
        return self._request.waiting(seconds)

    def gives_up(self, queue: Queue) -> CounterdError:
        """Returns the error for a hold whose timeout is over, and that has not asked by itself."""
        if queue.unreachable:
            return ConnectionLost(queue.unreachable)
        status = Status.RESOURCE_NOT_AVAILABLE
        error = NotAvailable(status, DRAINING if queue.draining else ERROR_TEXTS[status])
        error.name, error.resources, error.maximum = self.name, self.resources, self.maximum
        error.consumption, error.waited = None if queue.draining else queue.consumption, self.timeout
        return error

    def lost(self, where: str, why: str) -> ConnectionLost:
        return ConnectionLost(f"lost {self} with the connection to {where}: {why}")
