"""Finds the protocols. Each protocol has a folder here, and deleting the folder removes the protocol.

Floor 2 (ARCHITECTURE.md). The package of a protocol exports PROTOCOL (contract.py), and the floors above use nothing
else of the package. Protocols never import each other. Importing the package needs no compiled module, so that any
program can show what the package registers.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterd.contract import ProtocolSpec


def find_protocols() -> tuple[ProtocolSpec, ...]:
    """Returns the installed protocols, sorted by name."""
    return tuple(importlib.import_module(f"{__name__}.{name}").PROTOCOL for name in names())


def names() -> tuple[str, ...]:
    """Returns the names of the installed protocols, sorted. names() imports none of the protocols."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__) if module.ispkg))
