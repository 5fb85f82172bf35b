"""Calls of a protocol whose replies come in the order of the requests. Other protocols: test_permits, test_tokens."""

from __future__ import annotations

from typing import Any

import pytest

from counterd.client._calls import FRAME_KEPT, Call, Ordered
from counterd.client._command import Request
from counterd.errors import ConnectionLost, CounterdError, NotFound


class Kept(Call):
    """A call that records how it ended."""

    def __init__(self) -> None:
        self.ends: list[tuple[Any, CounterdError | None]] = []

    def settle(self, result: Any, error: CounterdError | None) -> bool:
        self.ends.append((result, error))
        return True


class Numbers(Ordered):
    """A protocol in which each reply is a byte."""

    def feed(self, data: bytes) -> None:
        for number in data:
            call, result, error = self._read([number])
            call.settle(result, error)


def request(frame: bytes) -> Request[int]:
    def read(replies: list[int]) -> int:
        if replies == [0]:
            raise NotFound(0, "nothing")
        return replies[0]

    return Request(frame, read)


def asked(calls: Numbers, *frames: bytes) -> list[Kept]:
    made = [Kept() for _ in frames]
    assert calls.add_all(made, [(request(frame),) for frame in frames]) == b"".join(frames)
    return made


def test_replies_come_in_order_and_refusals_count_as_replies() -> None:
    calls = Numbers()
    first, second, third = asked(calls, b"a", b"b", b"c")
    calls.feed(b"\1\0")
    assert first.ends == [(1, None)]
    ((result, error),) = second.ends
    assert (result, str(error)) == (None, "nothing (status 0x00)")
    assert third.ends == []
    calls.fail(lambda: ConnectionLost("gone"))
    assert isinstance(third.ends[0][1], ConnectionLost)
    assert calls.pending == {}


def test_add_all_adds_all_calls_or_none() -> None:
    calls = Numbers()
    (first,) = asked(calls, b"a")
    with pytest.raises(AttributeError):
        calls.add_all([Kept(), Kept()], [(request(b"b"),), (None,)])
    calls.feed(b"\7")
    assert first.ends == [(7, None)]
    assert calls.pending == {}


def test_listeners_are_woken_once_by_input_or_by_the_end() -> None:
    calls = Numbers()
    first, second = Kept(), Kept()
    calls.listeners.append(first)
    calls.wake_listeners()
    calls.wake_listeners()
    calls.listeners.append(second)
    calls.fail(lambda: ConnectionLost("gone"))
    assert (first.ends, second.ends) == ([(None, None)], [(None, None)])


def test_the_frame_of_a_large_request_is_not_kept() -> None:
    """A call that timed out stays until its turn comes, but what it sent need not."""
    calls = Numbers()
    large = request(bytes(FRAME_KEPT + 1))
    assert len(calls.add(call := Kept(), large)) == FRAME_KEPT + 1
    assert len(call.frame) + len(call.request.frame) == 1
    assert len(large.frame) == FRAME_KEPT + 1, "whoever made it may send it again"
    calls.feed(b"\7")
    assert call.ends == [(7, None)]
