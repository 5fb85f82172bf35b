"""The rooms: one folder per protocol, found by looking, so that deleting the folder removes the protocol.

Floor 2. A room's package exports ROOM, the one thing the floors above read of it. Rooms never import each other.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from counterd.settings import Setting

Figures = Callable[[], Mapping[str, object]]


@dataclass(frozen=True)
class Room:
    """How a protocol registers itself.

    settings: the room's own keys, each beginning with `name.`; those every listener has are added by control.
    aliases: other spellings of keys, `{accepted: real}`.
    window: the key that holds the length of the store's wall-clock windows in seconds, or None.
    make_store: makes the store from the effective values of all keys and a function that returns the figures
        of the floors above, for protocols whose clients can ask for statistics. May raise ValueError or MemoryError.
    reload: hands a running store the values of its settings that may change.
    """

    name: str
    default_port: int
    settings: tuple[Setting, ...]
    make_store: Callable[[Mapping[str, Any], Figures], Any]
    reload: Callable[[Any, Mapping[str, Any]], None]
    aliases: Mapping[str, str] = field(default_factory=dict)
    window: str | None = None


def find_rooms() -> tuple[Room, ...]:
    """Every room that is installed, by name."""
    packages = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg)
    return tuple(importlib.import_module(f"{__name__}.{name}").ROOM for name in packages)
