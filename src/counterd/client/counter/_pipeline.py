"""The requests of a pipeline, in order. The blocking client and the asyncio client send these requests and wait for the
replies.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from counterd.client._connection import as_bytes
from counterd.errors import ServerError
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import DumpEntry

if TYPE_CHECKING:
    from counterd.client._calls import Request

# For noop and release None, for get and acquire a number, for stats and dump what the methods return; or a refusal.
Result = int | dict[str, str] | list[DumpEntry] | ServerError | None

Self = TypeVar("Self", bound="Requests")


class Requests:
    """Each method adds the request of the client's method with the same name, and returns the pipeline."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def noop(self: Self) -> Self:
        """Adds a request whose result is None."""
        return self._add(wire.noop)

    def get(self: Self, name: str | bytes, *, everywhere: bool = False) -> Self:
        """Adds a request whose result is the same as that of Client.get()."""
        return self._add(wire.get, as_bytes(name), everywhere)

    def acquire(self: Self, name: str | bytes, resources: int = 1, *, maximum: int) -> Self:
        """Adds a request whose result is how many permits were granted."""
        return self._add(wire.acquire, as_bytes(name), resources, maximum)

    def release(self: Self, name: str | bytes, resources: int = 1) -> Self:
        """Adds a request whose result is None."""
        return self._add(wire.release, as_bytes(name), resources)

    def stats(self: Self) -> Self:
        """Adds a request whose result is the same as that of Client.stats()."""
        return self._add(wire.stats)

    def dump(self: Self) -> Self:
        """Adds a request whose result is the same as that of Client.dump()."""
        return self._add(wire.dump, True, True)

    def _add(self: Self, *request: Any) -> Self:
        self._requests.append(request)
        return self

    def _taken(self) -> list[Request]:
        """Removes all requests from the pipeline, and returns them."""
        requests, self._requests = self._requests, []
        return requests


def released(requests: list[Request]) -> set[bytes]:
    """Returns the names of the counters whose permits are given back."""
    return {request[1] for request in requests if request[0] is wire.release}
