"""Fixtures: stores of the sentinel protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from unit.protocols.sentinel.rooms import SECOND, Room, calls, rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def make_room() -> Iterator[Callable[..., Room]]:
    """Makes rooms, which are audited after the test."""
    rooms: list[Room] = []

    def made(*rules: Any, **options: Any) -> Room:
        rooms.append(Room(*rules, **options))
        return rooms[-1]

    yield made
    for room in rooms:
        room.store.audit()
        room.settle()
        room.store.audit()


@pytest.fixture
def asked() -> list[Any]:
    """The requests that a token service received."""
    return []


@pytest.fixture
def served(make_room: Callable[..., Room], asked: list[Any]) -> Room:
    """A room with a token service, which has a second to answer."""
    room = make_room(calls(1), rate(2, 9))
    room.store.delegate(asked.extend, SECOND)
    return room
