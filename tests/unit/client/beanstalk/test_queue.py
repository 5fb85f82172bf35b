"""QueueCalls, the pending calls of one beanstalk connection: each reply goes to its call, however the bytes are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from counterd.client._calls import Call
from counterd.client._command import PipelineBase
from counterd.client.beanstalk._queue import Commands, Peeked, QueueCalls, Tubes
from counterd.errors import ConnectionLost, CounterdError, ProtocolError
from counterd.protocols.beanstalk import wire
from counterd.protocols.beanstalk.errors import Draining, Refused

if TYPE_CHECKING:
    from counterd.client._command import Request
    from counterd.protocols.beanstalk.wire import Reply

BATCH = b"JOBS 2\r\nRESERVED 7 1\r\na\r\nRESERVED 8 0\r\n\r\n"


class Recorder(Commands[int], PipelineBase):
    """Returns the requests of commands; its jobs are their ids."""

    def __init__(self) -> None:
        self._tubes = Tubes("default", "default")

    def _new_job(self, reply: Reply) -> int:
        return reply.number or 0

    def _run_command(self, request: Request[Any]) -> Any:
        return request


class Kept(Call):
    """A call that records how it ended."""

    def __init__(self, *, wanted: bool = True) -> None:
        self.ends: list[Any] = []
        self.wanted = wanted

    def settle(self, result: Any, error: CounterdError | None) -> bool:
        self.ends.append(error or result)
        return self.wanted


def asked(*requests: Any, wanted: bool = True) -> tuple[QueueCalls, list[Kept]]:
    calls, under_way = QueueCalls(), [Kept(wanted=wanted) for _ in requests]
    sent = calls.add_all(under_way, [(request,) for request in requests])
    assert sent == b"".join(request.frame for request in requests)
    return calls, under_way


ask: Any = Recorder()


def test_replies_may_be_cut_anywhere() -> None:
    said = b"INSERTED 5\r\nNOT_FOUND\r\n" + BATCH + b"DRAINING\r\nFOUND 5 2\r\n\r\n\r\n"
    for cut in range(len(said)):
        calls, under_way = asked(ask.put("a"), ask.delete(4), ask.reserve_batch(2), ask.put("b"), ask.peek(5))
        calls.feed(said[:cut])
        calls.feed(said[cut:])
        found = [call.ends for call in under_way]
        assert found[:3] == [[5], [False], [[7, 8]]]
        assert isinstance(found[3][0], Draining)
        assert found[4] == [Peeked(5, b"\r\n")]
        assert (calls.pending, calls.answered, calls.held, calls.give_back) == ({}, True, 2, [])


@pytest.mark.parametrize(
    ("request_of", "reply"),
    [
        (lambda: ask.put("a"), b"DELETED\r\n"),
        (lambda: ask.reserve(0), b"FOUND 1 0\r\n\r\n"),
        (lambda: ask.reserve_batch(1), b"RESERVED 1 0\r\n\r\n"),
        (ask.stats, b"OK 1\r\nx\r\n"),
        (ask.list_tubes, b"OK 1\r\nx\r\n"),
        (lambda: ask.use("a"), b"WHAT\r\n"),
    ],
)
def test_a_reply_of_the_wrong_kind_is_a_protocol_error(request_of: Any, reply: bytes) -> None:
    calls, (call,) = asked(request_of())
    with pytest.raises(ProtocolError):
        calls.feed(reply)
    calls.fail(lambda: ConnectionLost("x"))
    assert isinstance(call.ends[0], ConnectionLost), "who owns the connection ends it, and so the call"


def test_a_reply_without_a_request_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="came without a request"):
        QueueCalls().feed(b"DELETED\r\n")


def test_reserved_jobs_count_as_held_until_they_are_deleted() -> None:
    calls, _ = asked(ask.reserve_batch(2), ask.reserve(0), ask.delete(7), ask.delete(7), ask.reserve_job(9))
    for said, held in ((BATCH, 2), (b"TIMED_OUT\r\n", 2), (b"DELETED\r\n", 1), (b"NOT_FOUND\r\n", 1)):
        calls.feed(said)
        assert calls.held == held
    calls.feed(b"RESERVED 9 0\r\n\r\n")
    assert calls.held == 2


def test_jobs_of_an_abandoned_reserve_are_released_with_their_priority() -> None:
    calls, _ = asked(ask.reserve_batch(2), wanted=False)
    calls.feed(BATCH)
    first, second = ((request,) for (request,) in calls.give_back)
    assert [first[0].frame, second[0].frame] == [wire.stats_job(7), wire.stats_job(8)]
    calls.give_back.clear()
    calls.add(Kept(wanted=False), *first)
    calls.add(Kept(wanted=False), *second)
    calls.feed(b"OK 11\r\n---\npri: 3\n\r\nNOT_FOUND\r\n")
    ((request,),) = calls.give_back
    assert request.frame == wire.release(7, 3, 0)
    calls.add(Kept(wanted=False), request)
    calls.feed(b"RELEASED\r\n")
    assert calls.held == 1, "nobody has heard of the other, which is gone"


def test_add_all_adds_nothing_if_one_request_cannot_be_encoded() -> None:
    calls = QueueCalls()
    first = Kept()
    calls.add(first, ask.peek(1))
    with pytest.raises(AttributeError):
        calls.add_all([Kept(), Kept()], [(ask.peek(2),), (None,)])
    calls.feed(b"NOT_FOUND\r\n")
    assert (first.ends, calls.pending) == ([None], {})


def test_only_reserves_may_grant_something() -> None:
    calls, under_way = asked(ask.reserve(), ask.reserve_batch(1), ask.reserve_job(1), ask.put("reserve"))
    assert [calls.may_grant(call) for call in under_way] == [True, True, True, False]


def test_which_requests_are_repeatable_and_patient() -> None:
    again = [ask.reserve(), ask.reserve_batch(1), ask.put_unique("a", "k", 9), ask.stats(), ask.use("a")]
    assert all(request.is_repeatable for request in again)
    once = [ask.put("a"), ask.delete(1), ask.kick(1), ask.kick_job(1), ask.reserve_job(1), ask.put_unique("a", "k")]
    assert not any(request.is_repeatable for request in once)
    assert [ask.reserve(3).patience, ask.reserve().patience, ask.stats().patience] == [3, float("inf"), 0]


def test_a_job_with_a_counter() -> None:
    frame = ask.put("a", priority=1, delay=2, ttr=3, concurrency=("mail", 5)).frame
    assert frame == b"put-limited 1 2 3 1 mail 5\r\na\r\n"
    unique = ask.put_unique("a", "k", 9, concurrency=(b"mail", 5))
    assert unique.frame == b"put-limited 65536 0 60 1 mail 5 k 9\r\na\r\n"
    assert unique.is_repeatable
    with pytest.raises(ValueError, match="maximum must be from 1"):
        ask.put("a", concurrency=("mail", 0))


def test_a_connection_sends_its_tubes_first() -> None:
    def greeting(tubes: Tubes) -> list[bytes]:
        return [request.frame for request in tubes.greeting()]

    assert greeting(Tubes("default", "default")) == []
    tubes = Tubes("a", ["b", "c"])
    assert greeting(tubes) == [b"use a\r\n", b"watch b\r\n", b"watch c\r\n", b"ignore default\r\n"]
    calls, _ = asked(tubes.watching(b"d", is_watched=True), tubes.watching(b"b", is_watched=False))
    calls.feed(b"WATCHING 3\r\nWATCHING 2\r\n")
    assert greeting(tubes) == [b"use a\r\n", b"watch c\r\n", b"watch d\r\n", b"ignore default\r\n"]
    calls, (call,) = asked(tubes.watching(b"c", is_watched=False))
    calls.feed(b"NOT_IGNORED\r\n")
    assert isinstance(call.ends[0], Refused)
    assert greeting(tubes)[1] == b"watch c\r\n"
