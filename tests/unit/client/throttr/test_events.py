"""The queue of events in a client: order, the bound, and the loss that it reports."""

from __future__ import annotations

import pytest

from counterd.client.throttr._events import Events
from counterd.errors import ConnectionLost, EventsLost
from counterd.protocols.throttr.wire import Event


def event(number: int) -> Event:
    """An event that counts as 200 bytes."""
    return Event(b"c", bytes([number]) * 49)


def test_events_come_in_order() -> None:
    events = Events(1000)
    assert events.take() is None
    for number in (1, 2, 3):
        events.put(event(number))
    assert [events.take() for _ in range(4)] == [event(1), event(2), event(3), None]


def test_events_beyond_the_bound_are_dropped_until_the_gap_is_reported() -> None:
    """So there is one gap, and after it no event is missing."""
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
def test_a_queue_keeps_what_fits(limit: int, kept: int) -> None:
    """At least one event always fits."""
    events = Events(limit)
    for number in range(3):
        events.put(event(number))
    assert [events.take() for _ in range(kept)] == [event(number) for number in range(kept)]
    with pytest.raises(EventsLost):
        events.take()


def test_taking_an_event_makes_room() -> None:
    events = Events(400)
    events.put(event(0))
    for number in range(1, 100):
        events.put(event(number))
        assert events.take() == event(number - 1)


def test_a_loss_is_reported_in_its_place() -> None:
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


def test_a_loss_behind_a_gap_is_reported_with_the_gap() -> None:
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
