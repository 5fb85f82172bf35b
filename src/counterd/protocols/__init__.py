"""Finds the protocols. Each has a folder here, and deleting the folder removes the protocol.

Floor 2. A protocol's package exports ROOM (contract.py), and the floors above use nothing else of it. Protocols never
import each other. Importing the package needs no compiled module, so that any program can show what it registers.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterd.contract import Room


def find_rooms() -> tuple[Room, ...]:
    """Returns the installed protocols, sorted by name. Raises ValueError if two have a table of the same name."""
    packages = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    rooms = tuple(importlib.import_module(f"{__name__}.{name}").ROOM for name in packages)
    check_tables(rooms)
    return rooms


def check_tables(rooms: tuple[Room, ...]) -> None:
    """Raises ValueError if two tables have the same name."""
    owners: dict[str, str] = {}
    for room in rooms:
        for table in room.tables:
            if table.name in owners:
                raise ValueError(f"both {owners[table.name]} and {room.name} have a table {table.name}")
            owners[table.name] = room.name
