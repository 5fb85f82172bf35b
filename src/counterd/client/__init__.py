"""Clients for counterd, blocking and for asyncio: one module for each protocol.

Client and AsyncClient are for the counter protocol: a counter has a maximum of permits, and hold() holds permits while
a block runs. counterd.client.throttr, counterd.client.sentinel and counterd.client.beanstalk also have a Client and an
AsyncClient; counterd.client.smockron has gatekeepers. counterd.client.aio.Client is another name of AsyncClient.

Floor: side (ARCHITECTURE.md).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from counterd.errors import (
    Cancelled,
    ConnectionLost,
    CounterdError,
    InvalidArguments,
    NotAcquired,
    NotAvailable,
    NotFound,
    OutOfMemory,
    ProtocolError,
    ServerError,
    Timeout,
    UnknownCommand,
)

if TYPE_CHECKING:
    from counterd.client.aio import Client as AsyncClient
    from counterd.client.counter import Client, Hold, Permit, Pipeline, Rate, Semaphore, Taken
    from counterd.protocols.counter.wire import DumpEntry

__all__ = [
    "AsyncClient",
    "Cancelled",
    "Client",
    "ConnectionLost",
    "CounterdError",
    "DumpEntry",
    "Hold",
    "InvalidArguments",
    "NotAcquired",
    "NotAvailable",
    "NotFound",
    "OutOfMemory",
    "Permit",
    "Pipeline",
    "ProtocolError",
    "Rate",
    "Semaphore",
    "ServerError",
    "Taken",
    "Timeout",
    "UnknownCommand",
]

if not TYPE_CHECKING:  # with __getattr__() a type checker would accept any name
    _LATER = {
        "AsyncClient": ("counterd.client.aio", "Client"),
        "DumpEntry": ("counterd.protocols.counter.wire", "DumpEntry"),
        **{
            name: ("counterd.client.counter", name)
            for name in ("Client", "Hold", "Permit", "Pipeline", "Rate", "Semaphore", "Taken")
        },
    }

    def __getattr__(name: str) -> Any:
        """Imports a module when its name is first used: asyncio takes longer to import than everything else."""
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, found = _LATER[name]
        globals()[name] = value = getattr(importlib.import_module(module), found)
        return value
