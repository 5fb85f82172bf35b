"""The throttr room: quotas, buffers and channels that expire, for the clients of Throttr. Floor 2."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from counterd.protocols import Figures, Room
from counterd.settings import Setting, choice, integer, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from counterd.protocols.throttr._store import ThrottrStore

VALUE_SIZES = {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}  # bytes

# Keys are numbered with 30 bits and cost 112 bytes, blocks of values with 32 bits and hold 60.
MEMORY_MAX = 1 << 36
MEMORY_MIN = 1 << 16
# The longest request of all but SET, PUBLISH and EVENT: an INSERT of 64-bit numbers and a key of 255 bytes has 274.
MESSAGE_MIN = 512
MESSAGE_MAX = 1 << 26
QUEUED_MIN, QUEUED_MAX = 1 << 12, 1 << 30
GRACE_MAX_S = 3600  # as the end of time leaves room for, in _keys.pxd


def make_store(values: Mapping[str, Any], _figures: Figures) -> ThrottrStore:
    """The store for the effective configuration; no client can ask for figures of the floors above."""
    from counterd.protocols.throttr._room import open_store  # noqa: PLC0415 - settings are read before it is built

    return open_store(
        value_size=VALUE_SIZES[values["throttr.value_size"]],
        memory_limit=values["throttr.memory_limit"],
        max_message=values["throttr.max_message"],
        max_queued=values["throttr.max_queued"],
        expiry_grace_ns=values["throttr.expiry_grace"] * 1_000_000_000,
        hash_key=os.urandom(16),
    )


def reload(store: ThrottrStore, values: Mapping[str, Any]) -> None:
    """Applies what may change while the store runs."""
    store.limit_posted(values["throttr.max_queued"])


ROOM = Room(
    name="throttr",
    default_port=9000,
    settings=(
        Setting("throttr.value_size", choice(*VALUE_SIZES), "uint16"),
        Setting("throttr.memory_limit", size(MEMORY_MIN, MEMORY_MAX), 256 << 20, "bytes"),
        Setting("throttr.max_message", size(MESSAGE_MIN, MESSAGE_MAX), 1 << 20, "bytes"),
        Setting("throttr.max_queued", size(QUEUED_MIN, QUEUED_MAX), 1 << 20, "bytes", reload=True),
        Setting("throttr.expiry_grace", integer(0, GRACE_MAX_S), 0, "seconds"),
    ),
    make_store=make_store,
    reload=reload,
)
