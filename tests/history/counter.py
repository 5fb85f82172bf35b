"""The counter protocol: docs/protocols/counter.md as a model, a counter at a time.

Answers are (status, value), as on the wire: value is what a granted Acquire or a Get tells, else None.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.counter.wire import Status
from history.model import Model
from history.operations import Closed

if TYPE_CHECKING:
    from collections.abc import Hashable

    from history.operations import Operation

__all__ = ["Acquire", "Closed", "CounterModel", "Get", "Release"]

OK, NOT_FOUND, INVALID = int(Status.NO_ERROR), int(Status.NOT_FOUND), int(Status.INVALID_ARGUMENTS)
NOT_AVAILABLE, NOT_ACQUIRED = int(Status.RESOURCE_NOT_AVAILABLE), int(Status.NOT_ACQUIRED)
OUT_OF_MEMORY = int(Status.OUT_OF_MEMORY)
UNKNOWN = -1  # the value of an answer that never came


class Acquire(NamedTuple):
    name: bytes | str
    resources: int
    maximum: int


class Release(NamedTuple):
    name: bytes | str
    resources: int


class Get(NamedTuple):
    name: bytes | str


Holdings = tuple[tuple[int, int], ...]  # client and amount, in order; nobody with 0
State = tuple[int, Holdings]  # consumption: the sum of the amounts


def held(holdings: Holdings, client: int) -> int:
    place = bisect_left(holdings, (client, 0))
    return holdings[place][1] if place < len(holdings) and holdings[place][0] == client else 0


def changed(state: State, client: int, by: int) -> State:
    """The counter with so much more, or less, held by that client."""
    consumption, holdings = state
    place = bisect_left(holdings, (client, 0))
    amount = held(holdings, client)
    mine = ((client, amount + by),) if amount + by else ()
    return consumption + by, holdings[:place] + mine + holdings[place + (amount > 0) :]


class CounterModel(Model):
    """Model of a counter. draining: the daemon may have refused any Acquire, as it was stopping.

    Whether a counter at zero still exists depends on windows and sweeps: Get and Release may answer either way.
    """

    def __init__(self, *, draining: bool = False) -> None:
        self.draining = draining

    def key(self, call: Any) -> Hashable:
        return call.name

    def initial(self) -> State:
        return 0, ()

    def step(self, state: State, operation: Operation) -> tuple[State, ...]:
        call = operation.call
        if isinstance(call, Closed):
            return (changed(state, operation.client, -held(state[1], operation.client)),)
        status, value = operation.answer or (OK, UNKNOWN)
        if isinstance(call, Acquire):
            possible, by, told = self._acquire(state, call, status), call.resources, call.resources
        elif isinstance(call, Release):
            mine = held(state[1], operation.client)
            possible, by, told = self._release(state, call, status, mine), -call.resources, None
        else:
            possible, by, told = status == OK or (status, state[0]) == (NOT_FOUND, 0), 0, state[0]
        if not possible or value not in (UNKNOWN, told if status == OK else None):
            return ()
        return (changed(state, operation.client, by),) if status == OK and by else (state,)

    def _acquire(self, state: State, call: Acquire, status: int) -> bool:
        if not 0 < call.resources <= call.maximum:
            return status == INVALID
        fits = state[0] <= call.maximum - call.resources
        if status == OK:
            return fits
        # Memory is shared by all counters, so any Acquire may be refused for it.
        return status == OUT_OF_MEMORY or (status == NOT_AVAILABLE and (self.draining or not fits))

    def _release(self, state: State, call: Release, status: int, mine: int) -> bool:
        if status == OK:
            return call.resources <= mine
        return (status == NOT_ACQUIRED and call.resources > mine) or (status == NOT_FOUND and state[0] == 0)

    def observes(self, operation: Operation) -> bool:
        if operation.answer is not None and operation.answer[0] != OK:
            return True
        return isinstance(operation.call, Get) or operation.call.resources == 0

    def alike(self, operation: Operation) -> Hashable | None:
        """Equal for the same amount, as other clients see only the sum."""
        return (type(operation.call), operation.call) if operation.answer is not None else None

    def describe(self, state: State) -> str:
        consumption, holdings = state
        held_by = ", ".join(f"client {client} holds {amount}" for client, amount in holdings)
        return f"consumption {consumption}" + (f" ({held_by})" if held_by else "")
