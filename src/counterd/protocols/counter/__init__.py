"""The counter room: the yrmcds counter protocol, its store of counters and its sessions. Floor 2."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from counterd.protocols import (
    ROWS_MAX,
    Column,
    Figure,
    Figures,
    Room,
    Table,
    name_of_bytes,
    ranked_parameters,
    read_parameters,
)
from counterd.settings import Setting, integer, size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from counterd.protocols import Walk
    from counterd.protocols.counter._room import CounterStore

# An index has at most 2^31 slots of the 32-bit tag's home range, at least two for each entry; the default of
# counter.holdings doubles the buckets once more.
BUCKETS_MAX = 1 << 29
HOLDINGS_MAX = 1 << 30
# Blocks of names are numbered with 32 bits and hold 64 bytes each.
NAME_MEMORY_MAX = 1 << 37
SORTS = ("consumption", "usage", "peak", "limit")


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


def open_counters(store: CounterStore, parameters: Mapping[str, str]) -> Walk:
    """Begins a walk through the counters."""
    from counterd.protocols.counter._tables import CountersWalk  # noqa: PLC0415 - as above

    match, sort, limit = ranked_parameters(parameters, SORTS)
    return CountersWalk(store, match, limit, sort)


def open_holders(store: CounterStore, parameters: Mapping[str, str]) -> Walk:
    """Begins a walk along the holders of one counter."""
    from counterd.protocols.counter._tables import HoldersWalk  # noqa: PLC0415 - as above

    values = read_parameters(parameters, {"name": name_of_bytes, "limit": integer(1, ROWS_MAX)}, {"limit": ROWS_MAX})
    return HoldersWalk(store, values["name"], values["limit"])


FIGURES = (
    Figure("busy", "counters", "gauge", "Counters that exist, by whether anything of them is held.", {"state": "busy"}),
    Figure("idle", "counters", "gauge", "Counters that exist, by whether anything of them is held.", {"state": "idle"}),
    Figure("buckets", "counters_limit", "gauge", "Counters that there can be."),
    Figure("total_objects", "counters_created_total", "counter", "Counters that came into being."),
    Figure("reclaimed", "counters_reclaimed_total", "counter", "Idle counters that made room for another."),
    Figure("expired", "counters_expired_total", "counter", "Idle counters that were freed after their window."),
    Figure("records", "table_load_ratio", "gauge", "Records in use, of those that there are.", over="buckets"),
    Figure("longest_probe", "table_longest_probe", "gauge", "Slots that an insertion looked past, at most."),
    Figure("holdings", "holdings", "gauge", "Holdings: how often a connection holds anything of a counter."),
    Figure("holdings_max", "holdings_limit", "gauge", "Holdings that there can be."),
    Figure("given_back", "holdings_returned_total", "counter", "Holdings of connections that ended, given back."),
    Figure("name_memory", "name_memory_bytes", "gauge", "Memory of long names, in use."),
    Figure("name_memory_max", "name_memory_limit_bytes", "gauge", "Memory that there is for long names."),
    Figure("region", "region_bytes", "gauge", "Size of the mapping that has everything in it; used as needed."),
)

TABLES = (
    Table(
        "counters",
        "The counters that exist, those first that have most of what `sort` says; `match` has to be in their names.",
        (
            Column("name", "name", "of the counter"),
            Column("consumption", "integer", "resources that are held now"),
            Column("limit", "integer", "the maximum that the last Acquire gave"),
            Column("peak", "integer", "the largest consumption in the stats window"),
        ),
        SORTS,
        open_counters,
    ),
    Table(
        "holders",
        "Who holds resources of the counter `name`, who came last first.",
        (
            Column("connection", "connection", "who holds them"),
            Column("amount", "integer", "how many resources"),
            Column("since", "since", "when it first acquired them"),
        ),
        (),
        open_holders,
    ),
)

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
    figures=FIGURES,
    tables=TABLES,
)
