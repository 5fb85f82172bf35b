"""The counter room: the yrmcds counter protocol, its store of counters and its sessions. Floor 2."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from counterd.protocols import Figures, Room
from counterd.settings import Setting, integer, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from counterd.protocols.counter._room import CounterStore

# An index has at most 2^31 slots of the 32-bit tag's home range, at least two for each entry; the default of
# counter.holdings doubles the buckets once more.
BUCKETS_MAX = 1 << 29
HOLDINGS_MAX = 1 << 30
# Blocks of names are numbered with 32 bits and hold 64 bytes each.
NAME_MEMORY_MAX = 1 << 37


def make_store(values: Mapping[str, Any], figures: Figures) -> CounterStore:
    """The store for the effective configuration; figures are added to what Stats answers."""
    from counterd.protocols.counter._room import CounterStore  # noqa: PLC0415 - settings are read before it is built

    return CounterStore(
        buckets=values["counter.buckets"],
        holdings=values["counter.holdings"] or 2 * values["counter.buckets"],
        holdings_per_connection=values["counter.holdings_per_connection"],
        name_memory=values["counter.name_memory"],
        hash_key=os.urandom(16),
        figures=figures,
    )


def reload(store: CounterStore, values: Mapping[str, Any]) -> None:
    """Applies what may change while the store runs."""
    store.limit_holdings(values["counter.holdings_per_connection"])


ROOM = Room(
    name="counter",
    default_port=11215,
    settings=(
        Setting("counter.buckets", integer(1, BUCKETS_MAX), 1_000_000, "counters"),
        Setting("counter.holdings", integer(0, HOLDINGS_MAX), 0, "holdings; 0 is twice counter.buckets"),
        Setting(
            "counter.holdings_per_connection",
            integer(0, HOLDINGS_MAX),
            0,
            "holdings; 0 is counter.holdings",
            reload=True,
        ),
        Setting("counter.name_memory", size(0, NAME_MEMORY_MAX), 256 << 20, "bytes"),
        Setting("counter.stats_interval", integer(10, 1 << 31), 86400, "seconds", reload=True),
    ),
    make_store=make_store,
    reload=reload,
    aliases={"counter.stat_interval": "counter.stats_interval"},
    window="counter.stats_interval",
)
