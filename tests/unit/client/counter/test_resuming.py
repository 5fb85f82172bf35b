"""The first requests of a connection, and what a client that resumes knows about its permits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from counterd.client.counter._permits import PermitCalls
from counterd.client.counter._resuming import Greeting
from counterd.errors import ConnectionLost
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Permit
from unit.client.counter.test_permits import answer, asked


def frames(*requests: Any) -> list[bytes]:
    return [encode(1, *arguments) for encode, *arguments in requests]


def test_the_first_requests_of_a_connection() -> None:
    silent, named, both = Greeting(0, ""), Greeting(0, "me"), Greeting(1.5, "me")
    assert (silent.resumes, named.resumes, both.resumes) == (False, False, True)
    assert (silent.states_name(), frames(*named.states_name())) == ([], [wire.who(1, "me")])
    assert frames(both.asks()) == [wire.resume(1, 1500)]
    assert frames(Greeting(0.0001, "").asks()) == [wire.resume(1, 1)]


def test_each_resume_presents_a_higher_number() -> None:
    greeting = Greeting(2, "")
    token = greeting.token(wire.Resumption(b"t" * wire.TOKEN_SIZE, 1000))
    assert token.grace_s == 1
    assert frames(greeting.asks(token)) == [wire.resume(1, 2000, token.token, token.attempt)]
    again = token.again()
    assert again == (token.token, token.grace_s, token.attempt + 1)
    assert token.attempt % 65536 == 0


def booked() -> PermitCalls:
    calls = PermitCalls()
    calls.names = Counter()
    return calls


def test_amounts_are_counted_for_each_name() -> None:
    calls = booked()
    calls.feed(answer(asked(calls, wire.acquire, b"a", 5, 9), b"\0\0\0\5"))
    calls.feed(answer(asked(calls, wire.release, b"a", 2)))
    calls.feed(answer(asked(calls, wire.acquire, b"a", 5, 9), b"no", 0x21))
    calls.feed(answer(asked(calls, wire.release, b"b", 2), b"no", 0x22))
    calls.feed(answer(asked(calls, wire.take, [Permit(b"a", 2, 9), Permit(b"c", 1, 1)], 0), bytes(16)))
    assert calls.names == {b"a": 5, b"c": 1}


def test_names_with_unanswered_changes_are_doubtful() -> None:
    calls = booked()
    calls.feed(answer(asked(calls, wire.acquire, b"a", 5, 9), b"\0\0\0\5"))
    asked(calls, wire.release, b"a", 2)
    asked(calls, wire.acquire, b"b", 1, 9)
    asked(calls, wire.take, [Permit(b"c", 1, 1)], 0)
    asked(calls, wire.get, b"d")
    calls.fail(lambda: ConnectionLost("lost"))
    assert calls.doubtful == [b"a", b"b", b"c"]
    assert frames(*calls.asks_held()) == [wire.held(1, name) for name in calls.doubtful]
    assert (calls.names, calls.held) == ({b"a": 3}, 3), "the release counts as executed"


@pytest.mark.parametrize(("held", "returned"), [(3, []), (5, [(b"a", 2)]), (0, [])])
def test_surplus_permits_are_given_back_after_a_resume(held: int, returned: list[tuple[bytes, int]]) -> None:
    calls, after = booked(), booked()
    calls.feed(answer(asked(calls, wire.acquire, b"a", 5, 9), b"\0\0\0\5"))
    asked(calls, wire.release, b"a", 2)
    calls.fail(lambda: ConnectionLost("lost"))
    after.inherit(calls, {b"a": held})
    assert [tuple(request[1:]) for request in after.give_back] == returned
    for request in after.give_back:
        after.feed(answer(asked(after, *request)))
    assert (after.names, after.held) == ({b"a": 3}, 3)
