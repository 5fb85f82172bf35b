"""The throttr protocol: quotas and buffers that expire, and channels, for the clients of Throttr.

Floor 2 (ARCHITECTURE.md).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from counterd.contract import Figures, ProtocolSpec
from counterd.protocols.throttr.wire import PORT, ValueSize
from counterd.settings import choice, integer, setting, size
from counterd.tables import Figure

if TYPE_CHECKING:
    from counterd.protocols.throttr._store import ThrottrStore
    from counterd.tables import Table

# Keys are numbered with 30 bits and cost 112 bytes, blocks of values with 32 bits and hold 60.
MEMORY_MAX = 1 << 36
MEMORY_MIN = 1 << 16
# The longest request except SET, PUBLISH and EVENT has 274 bytes: an INSERT of 64-bit numbers and a key of 255 bytes.
MESSAGE_MIN = 512
MESSAGE_MAX = 1 << 26
QUEUED_MIN, QUEUED_MAX = 1 << 12, 1 << 30
GRACE_MAX_NS = 3_600_000_000_000


@dataclass(frozen=True)
class ThrottrSettings:
    """The settings that only this protocol has."""

    value_size: str = setting(choice(*(size.name.lower() for size in ValueSize)), "uint16")
    memory_limit: int = setting(size(MEMORY_MIN, MEMORY_MAX), 256 << 20, "bytes")
    max_message: int = setting(size(MESSAGE_MIN, MESSAGE_MAX), 1 << 20, "bytes")
    max_queued: int = setting(size(QUEUED_MIN, QUEUED_MAX), 1 << 20, "bytes", reload=True)
    expiry_grace: int = setting(integer(0, GRACE_MAX_NS // 1_000_000_000), 0, "seconds")


def make_store(settings: ThrottrSettings, _figures: Figures, now_ns: int) -> ThrottrStore:
    """Makes the store for these settings. Clients of this protocol cannot ask for figures of the daemon."""
    from counterd.protocols.throttr._session import open_store  # noqa: PLC0415 - settings are read before it is built

    return open_store(
        value_size=ValueSize.named(settings.value_size),
        memory_limit=settings.memory_limit,
        max_message=settings.max_message,
        max_queued=settings.max_queued,
        expiry_grace_ns=settings.expiry_grace * 1_000_000_000,
        hash_key=os.urandom(16),
        now_ns=now_ns,
    )


def reload(store: ThrottrStore, settings: ThrottrSettings) -> None:
    """Applies the settings that can change while the store runs."""
    store.limit_posted(settings.max_queued)


def tables() -> tuple[Table, ...]:
    """Returns the tables that people can ask for."""
    from counterd.protocols.throttr._tables import TABLES  # noqa: PLC0415 - as above

    return TABLES


KEYS_HELP = "Keys that exist, by type, including expired keys during throttr.expiry_grace."
FIGURES = (
    Figure("counters", "throttr_keys", "gauge", KEYS_HELP, {"type": "quota"}),
    Figure("buffers", "throttr_keys", "gauge", KEYS_HELP, {"type": "buffer"}),
    Figure("keys_max", "throttr_keys_limit", "gauge", "Keys that can exist, if values leave enough memory for them."),
    Figure("expired", "throttr_keys_expired_total", "counter", "Keys that expired."),
    Figure("buffer_bytes", "throttr_buffer_bytes", "gauge", "Bytes in the values of buffers."),
    Figure("used_memory", "throttr_memory_bytes", "gauge", "Bytes of throttr.memory_limit in use."),
    Figure("memory_limit", "throttr_memory_limit_bytes", "gauge", "The value of throttr.memory_limit in bytes."),
    Figure("channels", "throttr_channels", "gauge", "Channels with subscribers; each connection has its own channel."),
    Figure(
        "subscriptions", "throttr_subscriptions", "gauge", "Subscriptions to channels; each connection begins with two."
    ),
    Figure(
        "dropped_subscribers",
        "throttr_subscribers_dropped_total",
        "counter",
        "Connections that were closed because the client did not read its events.",
    ),
    Figure(
        "longest_probe", "throttr_table_longest_probe", "gauge", "Longest probe sequence of the hash table, in slots."
    ),
    Figure(
        "region",
        "throttr_region_bytes",
        "gauge",
        "Bytes of address space that are reserved for all tables; memory is used only as they fill.",
    ),
)

PROTOCOL = ProtocolSpec(
    name="throttr",
    default_port=PORT,
    settings=ThrottrSettings,
    make_store=make_store,
    reload=reload,
    figures=FIGURES,
    tables=tables,
)
