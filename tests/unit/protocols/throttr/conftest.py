"""Fixtures: stores of the throttr protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from unit.protocols.throttr.rooms import Connection, Room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def make_room() -> Iterator[Callable[..., Room]]:
    """Makes rooms, which are audited after the test."""
    rooms: list[Room] = []

    def made(**options: Any) -> Room:
        rooms.append(Room(**options))
        return rooms[-1]

    yield made
    for room in rooms:
        room.settle()
        room.store.audit()


@pytest.fixture
def room(make_room: Callable[..., Room]) -> Room:
    return make_room()


@pytest.fixture
def client(room: Room) -> Connection:
    return room.connect()
