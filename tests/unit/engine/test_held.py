"""Replies that wait for the journal leave in order, when it is on disk up to their position, in bounded pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from counterd.engine.held import HeldReplies

REPLIES = st.lists(st.tuples(st.integers(0, 3), st.binary(min_size=1, max_size=9)), max_size=12)


@given(REPLIES, st.lists(st.integers(0, 4), max_size=12), st.integers(1, 20))
def test_replies_are_taken_in_order_and_not_before_they_are_durable(
    replies: list[tuple[int, bytes]], steps: list[int], size_max: int
) -> None:
    held = HeldReplies()
    waiting: list[tuple[int, bytes]] = []
    position = durable = 0
    for step, reply in replies:
        position += step
        held.add(position, reply)
        waiting.append((position, reply))
        assert held.last_position() == position
    for step in steps:
        durable += step
        assert held.is_due(durable) == bool(waiting and waiting[0][0] <= durable)
        expected = b""
        while waiting and waiting[0][0] <= durable and len(expected) < size_max:
            expected += waiting.pop(0)[1]
        assert held.take(durable, size_max) == expected
        assert held.size == sum(len(reply) for _, reply in waiting)
        assert held.pieces == waiting


def test_a_reply_that_is_replaced_can_be_due_earlier() -> None:
    held = HeldReplies()
    held.add(5, b"INSERTED 1")
    held.add(6, b"INSERTED 2")
    held.replace(0, 0, b"refused")
    assert held.size == len(b"refused") + len(b"INSERTED 2")
    assert held.is_due(0)
    assert held.take(0, 100) == b"refused"
    assert not held.is_due(5)
