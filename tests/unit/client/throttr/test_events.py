"""The queue of events: order, the bound, and the gap that is told."""

from __future__ import annotations

import pytest

from counterd.client.throttr._events import Events
from counterd.errors import ConnectionLost, EventsLost
from counterd.protocols.throttr.wire import Event


def event(number: int) -> Event:
    """Of 200 bytes, as they are counted."""
    return Event(b"c", bytes([number]) * 49)


def test_in_order() -> None:
    events = Events(1000)
    assert events.take() is None
    for number in (1, 2, 3):
        events.put(event(number))
    assert [events.take() for _ in range(4)] == [event(1), event(2), event(3), None]


def test_beyond_the_bound() -> None:
    """What comes after one that was left out is left out too, so that there is one gap, and after it all come again."""
    events = Events(400)
    for number in range(5):
        events.put(event(number))
    assert events.take() == event(0)
    events.put(event(5))  # there is room, but it is after the gap
    assert events.take() == event(1)
    with pytest.raises(EventsLost) as caught:
        events.take()
    assert caught.value.count == 4
    assert events.take() is None
    events.put(event(6))
    assert [events.take(), events.take()] == [event(6), None]


@pytest.mark.parametrize(("limit", "kept"), [(0, 1), (199, 1), (399, 1), (400, 2), (401, 2)])
def test_what_fits(limit: int, kept: int) -> None:
    """One always does."""
    events = Events(limit)
    for number in range(3):
        events.put(event(number))
    assert [events.take() for _ in range(kept)] == [event(number) for number in range(kept)]
    with pytest.raises(EventsLost):
        events.take()


def test_what_is_taken_makes_room() -> None:
    events = Events(400)
    events.put(event(0))
    for number in range(1, 100):
        events.put(event(number))
        assert events.take() == event(number - 1)


def test_a_loss_has_its_place() -> None:
    events = Events(1000)
    assert not events
    events.put(event(0))
    for _ in range(3):
        events.put_loss(ConnectionLost("lost"))
    events.put(event(1))
    assert events.take() == event(0)
    with pytest.raises(ConnectionLost, match=r"^lost$"):
        events.take()
    assert events.take() == event(1)
    assert events.take() is None


def test_a_loss_behind_a_gap_is_part_of_it() -> None:
    events = Events(0)
    for number in range(3):
        events.put(event(number))
        events.put_loss(ConnectionLost("lost"))
    assert events
    assert events.take() == event(0)
    with pytest.raises(ConnectionLost):
        events.take()
    events.clear()
    assert not events
    assert events.take() is None
