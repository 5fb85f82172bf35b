"""Connections that are resumed: what their holdings have to do after their end, and what is wrong with it.

A client of the history is a connection. If it asks for a token, and ends, what it holds stays for its grace time; a
connection that presents the token goes on with it. So its `Closed` is not when its holdings end: `given_back` says when
that is, and TakeModel has holdings and charges change hands where a Resume takes effect.

Answers to Resume are (status, milliseconds); `old` is the connection whose token is presented. Whoever got no answer
presents the same token again, with the same number of the attempt, on a third connection. A client does nothing more
with a connection whose token it presents.

`mistakes_of_resumptions` finds, without a search: a token that was valid twice, too long, or after a Goodbye; one that
was not valid any more although its grace time was not over; a Goodbye that left a Take waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.counter.wire import Permit
from history.counter import NOT_FOUND, OK, Acquire, Release
from history.operations import Closed, Operation

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

NS_PER_MS = 1_000_000


class Resume(NamedTuple):
    """A request for a token, or with one. grace_ms: the requested grace time. old: the connection whose token is
    presented; 0: the client asks for its own. parts: of one object, those that it concerns.
    """

    grace_ms: int
    old: int = 0
    parts: tuple[Any, ...] = ()


class Goodbye(NamedTuple):
    """A Goodbye. part: filled in by prepared(): the holdings of each part are given back by themselves."""

    part: Any = None


class Held(NamedTuple):
    name: Any


class Grace(NamedTuple):
    """For how many ns the holdings of a connection outlive it: at least, and at most, as far as the client knows."""

    least: int
    most: int


def may_resume(operation: Operation) -> bool:
    """Whether this Resume may have taken over what another connection had."""
    call = operation.call
    return isinstance(call, Resume) and call.old != 0 and (operation.answer is None or operation.answer[0] == OK)


class Lines:
    """Which connections resumed which.

    graces: by connection. successors: by connection, the Resume that certainly got what it had, if there is one. roots:
    by connection, the first of all that may have had the same; families: these, by the first. closed: connections'
    ends.
    """

    def __init__(self, operations: Iterable[Operation]) -> None:
        history = sorted(operations, key=lambda operation: operation.started)
        self.calls: dict[int, list[Operation]] = defaultdict(list)
        self.presented: dict[int, list[Operation]] = defaultdict(list)  # Resumes, by the old connection
        self.closed: dict[int, Operation] = {}
        self.roots: dict[int, int] = {}
        for one in history:
            if isinstance(one.call, Closed):
                self.closed[one.client] = one
            else:
                self.calls[one.client].append(one)
            if isinstance(one.call, Resume) and one.call.old:
                self.presented[one.call.old].append(one)
                if may_resume(one):
                    self.roots[one.client] = self.root(one.call.old)
        self.families: dict[int, list[int]] = defaultdict(list)
        for client in self.calls:
            self.families[self.root(client)].append(client)
        self.graces = {client: grace_of(calls) for client, calls in self.calls.items()}
        self.successors: dict[int, Operation] = {}
        for old, presented in self.presented.items():
            for one in presented:
                if one.answer is not None and one.answer[0] == OK:
                    lost = [other.client for other in presented if other.answer is None]
                    self.successors.update(dict.fromkeys((old, *lost), one))
                    break

    def root(self, client: int) -> int:
        return self.roots.get(client, client)

    def given_back(self, late_ns: int, seen_ns: Mapping[int, int]) -> list[Operation]:
        """Each connection's end, at the time at which what it still holds is given back.

        seen_ns: by connection, when its holdings were seen to have been given back, if that is known.

        If it was resumed, its end is after the Resume: what it held then is not its own any more. A call without an
        answer may have been done after that, and what it took be given back at any time from then on.
        """
        found = []
        for client, closed in self.closed.items():
            grace = self.graces.get(client, Grace(0, 0))
            started, ended = closed.started, closed.ended
            if client in self.successors:
                successor = self.successors[client]
                is_done = all(one.answer is not None or may_resume(one) for one in self.calls[client])
                after = (successor.ended or 0) + 1
                started = max(started, after if is_done else successor.started)
                ended = None if ended is None else max(ended, after)
            elif grace.most:
                started += grace.least
                seen = seen_ns.get(client, None if ended is None else ended + grace.most + late_ns)
                ended = None if seen is None else max(seen, started)
            found.append(closed._replace(started=started, ended=ended))
        return found


def grace_of(calls: Sequence[Operation]) -> Grace:
    """The grace time of a connection after the last of its calls."""
    least = most = 0
    for one in calls:
        call, answer = one.call, one.answer
        if isinstance(call, Goodbye):
            least, most = 0, (most if answer is None else 0)
        elif isinstance(call, Resume) and (answer is None or answer[0] == OK):
            grace = (call.grace_ms if answer is None else answer[1]) * NS_PER_MS
            is_sure = answer is not None or call.old
            least, most = (grace, grace) if is_sure else (min(least, grace), max(most, grace))
    return Grace(least, most)


def mistakes_of_resumptions(operations: Iterable[Operation], *, late_ns: int) -> Iterator[str]:
    """Complaints about tokens, grace times and Goodbyes, as text for people."""
    lines = Lines(operations)
    for old, presented in lines.presented.items():
        resumed = [one for one in presented if one.answer is not None and one.answer[0] == OK]
        if len(resumed) > 1:
            yield f"a token was valid twice: {resumed}"
        for one in resumed:
            yield from too_late(one, old, lines, late_ns)
            if one.answer[1] > one.call.grace_ms:
                yield f"a longer grace time than was asked for: {one}"
        for one in presented:
            if (
                one.answer is not None
                and one.answer[0] == NOT_FOUND
                and not resumed
                and not may_be_over(one, old, lines)
            ):
                yield f"it should have been resumed: {one}"
    for calls in lines.calls.values():
        for one in calls:
            if isinstance(one.call, Goodbye) and one.ended is not None:
                left = [other for other in calls if other.started < one.started and not ends_by(other, one.ended)]
                if left:
                    yield f"{one} was answered, and these were not: {left}"


def certainly_held(client: int, lines: Lines) -> bool:
    """Whether a connection held permits when it ended, whatever was done of what it has no answer to."""
    held: Counter[Any] = Counter()
    for other in lines.families[lines.root(client)]:
        for one in lines.calls[other]:
            is_done = one.answer is not None and one.answer[0] == OK
            if isinstance(one.call, Goodbye):
                held.clear()
            elif isinstance(one.call, Release) and (is_done or one.answer is None):
                held[one.call.name] -= one.call.resources
            elif isinstance(one.call, Acquire) and is_done:
                held[one.call.name] += one.call.resources
            elif hasattr(one.call, "items") and is_done:
                held.update({item[0]: item[1] for item in one.call.items if len(item) == len(Permit._fields)})
    return any(amount > 0 for amount in held.values())


def ends_by(operation: Operation, moment: int) -> bool:
    return operation.ended is not None and operation.ended <= moment


def too_late(one: Operation, old: int, lines: Lines, late_ns: int) -> Iterator[str]:
    """Complains if the token that was accepted cannot have been valid any more."""
    lost = [other.client for other in lines.presented[old] if other.answer is None and other.started < one.started]
    if not lines.graces[old].most:
        yield f"a token was valid after a Goodbye: {one}"
    closed = lines.closed.get(old)
    over = closed is not None and closed.ended is not None and closed.ended + lines.graces[old].most + late_ns
    if over and one.started > over and not lost:
        yield f"it was resumed after its grace time: {one}, {closed}"


def may_be_over(one: Operation, old: int, lines: Lines) -> bool:
    """Whether the presented token may have expired before the Resume ended: at once if the connection held nothing."""
    if not certainly_held(old, lines):
        return True
    lost = [other.client for other in lines.presented[old] if other.answer is None and other is not one]
    for client in (old, *lost):
        closed = lines.closed.get(client)
        if closed is not None and (one.ended or 0) >= closed.started + lines.graces[client].least:
            return True
    return lines.graces[old].least == 0
