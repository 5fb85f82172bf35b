"""Rooms for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from unit.protocols.sentinel.rooms import Room

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def make_room() -> Iterator[Callable[..., Room]]:
    """Makes rooms, which are audited in the end."""
    rooms: list[Room] = []

    def made(*rules: Any, **options: Any) -> Room:
        rooms.append(Room(*rules, **options))
        return rooms[-1]

    yield made
    for room in rooms:
        room.store.audit()
        room.settle()
        room.store.audit()
