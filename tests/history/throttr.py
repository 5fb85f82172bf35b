"""The keys of the throttr protocol: docs/protocols/throttr.md as a model, a key at a time.

Answers are those of counterd.client.throttr: True or False; (quota, ttl type, ttl) to a Query, (ttl type, ttl, value)
to a Get. That there is no such key is False here, whatever was asked: None says that there was no answer.

When a key expires is exact for the server, but known here only within an interval: from the TTL after the earliest
moment of the call that set it to the TTL after the latest, give or take the slack. Before the interval the key must be
there, after it it must not, and within either will do. What calls tell does not narrow it. That the key has gone is no
step by itself: it is in the next call that finds it gone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.throttr.wire import Attribute, Change, TTLType
from history.model import Model
from history.operations import Closed

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from history.operations import Operation

__all__ = [
    "Attribute",
    "Change",
    "Closed",
    "Get",
    "Insert",
    "Purge",
    "Query",
    "Set",
    "TTLType",
    "ThrottrModel",
    "Update",
]

NEVER = 1 << 63  # ns
UNIT_NS = {
    TTLType.NANOSECONDS: 1,
    TTLType.MICROSECONDS: 1_000,
    TTLType.MILLISECONDS: 1_000_000,
    TTLType.SECONDS: 1_000_000_000,
    TTLType.MINUTES: 60_000_000_000,
    TTLType.HOURS: 3_600_000_000_000,
}


class Insert(NamedTuple):
    key: bytes | str
    quota: int
    ttl: int
    ttl_type: int = TTLType.SECONDS.value


class Query(NamedTuple):
    key: bytes | str


class Update(NamedTuple):
    key: bytes | str
    attribute: int
    change: int
    value: int


class Purge(NamedTuple):
    key: bytes | str


class Set(NamedTuple):
    key: bytes | str
    value: bytes
    ttl: int
    ttl_type: int = TTLType.SECONDS.value


class Get(NamedTuple):
    key: bytes | str


class Key(NamedTuple):
    """A key that exists. value: of a buffer, or None. It expires within [earliest, latest], on the recorder's clock."""

    quota: int
    value: bytes | None
    ttl_type: int
    earliest: int
    latest: int

    def shifted(self, by: int) -> Key:
        """The key with another time of expiry, which is never negative."""
        return self._replace(earliest=max(0, self.earliest + by), latest=max(0, self.latest + by))


class ThrottrModel(Model):
    """Model of a key, without throttr.expiry_grace.

    value_size: bytes of a number. slack_ns: how far outside of the call the server's time of it may lie. memory: there
    may be no room for an Insert or a Set.
    """

    def __init__(self, *, value_size: int = 2, slack_ns: int = 0, memory: bool = False) -> None:
        self.number_max = 256**value_size - 1
        self.slack_ns = slack_ns
        self.memory = memory

    def key(self, call: Any) -> Hashable:
        return call.key

    def initial(self) -> Key | None:
        return None

    def step(self, state: Key | None, operation: Operation) -> tuple[Key | None, ...]:
        if isinstance(operation.call, Closed):
            return (state,)
        found = []
        for before in self._at(state, operation):
            answer, after = self._do(before, operation)
            if operation.answer is None:
                possible = answer is True  # what was refused has done nothing
            elif isinstance(operation.call, Query | Get):
                possible = before is None if operation.answer is False else self._tells(before, operation)
            else:
                possible = answer == operation.answer or (
                    self.memory and operation.answer is False and isinstance(operation.call, Insert | Set)
                )
                after = after if answer == operation.answer else before
            if possible and after not in found:
                found.append(after)
        return tuple(found)

    def observes(self, operation: Operation) -> bool:
        """Not an answer that there is no such key: the key may have expired in that very call."""
        if isinstance(operation.call, Insert):
            return operation.answer is False and not self.memory
        return isinstance(operation.call, Query | Get) and operation.answer is not False

    def alike(self, operation: Operation) -> Hashable | None:
        """Equal for calls that add to the same number, and for those that find no key. Not for calls that begin a TTL,
        each at its own time.
        """
        call, answer = operation.call, operation.answer
        timed = isinstance(call, Update) and call.attribute == Attribute.TTL
        if answer is False and (timed or isinstance(call, Query | Get | Purge)):
            return False
        adds = isinstance(call, Update) and not (timed and call.change == Change.PATCH)
        return call if adds and answer is True else None

    def describe(self, state: Key | None) -> str:
        return "no key" if state is None else str(state)

    # ---- inside ----

    def _at(self, state: Key | None, operation: Operation) -> Iterator[Key | None]:
        """The states that the key may be in during the operation: still there, or expired."""
        if state is None or state.latest > operation.started - self.slack_ns:
            yield state
        if state is not None and state.earliest <= latest(operation) + self.slack_ns:
            yield None

    def _until(self, operation: Operation, ttl: int, ttl_type: int) -> tuple[int, int]:
        """When a key expires whose TTL is set to so long from now."""
        ttl_ns = ttl * UNIT_NS[TTLType(ttl_type)]
        return operation.started + ttl_ns - self.slack_ns, latest(operation) + ttl_ns + self.slack_ns

    def _do(self, before: Key | None, operation: Operation) -> tuple[bool | None, Key | None]:
        """The answer, and the key afterwards; None in place of the answer of a call that only reads."""
        call = operation.call
        if isinstance(call, Insert | Set):
            inserts = isinstance(call, Insert)
            if before is not None and (inserts or before.value is None):
                return False, before
            quota, value = (call.quota, None) if inserts else (0, call.value)
            return True, Key(quota, value, call.ttl_type, *self._until(operation, call.ttl, call.ttl_type))
        if isinstance(call, Purge):
            return before is not None, None
        if isinstance(call, Update):
            return (False, None) if before is None else self._update(before, operation)
        return None, before

    def _update(self, before: Key, operation: Operation) -> tuple[bool, Key]:
        call = operation.call
        by = -call.value if call.change == Change.DECREASE else call.value
        if call.attribute == Attribute.TTL:
            if call.change != Change.PATCH:
                return True, before.shifted(by * UNIT_NS[TTLType(before.ttl_type)])
            earliest, latest = self._until(operation, call.value, before.ttl_type)
            return True, before._replace(earliest=earliest, latest=latest)
        quota = by + (before.quota if call.change != Change.PATCH else 0)
        if before.value is not None or not 0 <= quota <= self.number_max:
            return False, before
        return True, before._replace(quota=quota)

    def _tells(self, before: Key | None, operation: Operation) -> bool:
        """Whether a Query or Get of the key can answer this. The remaining TTL is told in whole units, rounded down."""
        if before is None:
            return False
        if isinstance(operation.call, Query):
            quota, ttl_type, ttl = operation.answer
            same = quota == before.quota
        else:
            ttl_type, ttl, value = operation.answer
            same = value == (before.value or b"")
        if not same or ttl_type != before.ttl_type:
            return False
        unit = UNIT_NS[TTLType(ttl_type)]
        most = (before.latest - operation.started + self.slack_ns - 1) // unit
        least = max(0, (before.earliest - latest(operation) - self.slack_ns - 1) // unit)
        # What does not fit is cut: one of these numbers has to end in the bytes that are told.
        return least + (ttl - least) % (self.number_max + 1) <= most


def latest(operation: Operation) -> int:
    """The time by which the call has taken effect."""
    return NEVER if operation.ended is None else operation.ended
