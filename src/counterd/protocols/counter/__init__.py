"""The counter protocol of yrmcds: a store of counters, and the sessions of its connections.

Floor 2 (ARCHITECTURE.md).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from counterd.contract import Figures, Files, LeasedLimits, Lender, ProtocolSpec, Windows
from counterd.protocols.counter import yrmcds
from counterd.protocols.counter.wire import PORT
from counterd.settings import absolute_path, integer, setting, size
from counterd.tables import Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from counterd.protocols.counter._store import CounterStore
    from counterd.protocols.counter.limits import Limits
    from counterd.tables import Table

# An index has at most 2^31 slots, numbered by a 32-bit tag, and at least two for each entry. The default of
# counter.holdings is twice the number of buckets.
BUCKETS_MAX = 1 << 29
HOLDINGS_MAX = 1 << 30
WAITERS_MAX = 1 << 24
# Blocks of names are numbered with 32 bits and hold 64 bytes each.
NAME_MEMORY_MAX = 1 << 37
POSTED_MAX = 1 << 18  # bytes of replies to requests that waited, which a connection does not read; then it is closed


@dataclass(frozen=True)
class CounterSettings:
    """The settings that only this protocol has."""

    buckets: int = setting(integer(1, BUCKETS_MAX), 1_000_000, "counters")
    holdings: int = setting(integer(0, HOLDINGS_MAX), 0, "holdings; 0 means twice counter.buckets")
    holdings_per_connection: int = setting(
        integer(0, HOLDINGS_MAX), 0, "holdings; 0 means counter.holdings", reload=True
    )
    waiters: int = setting(integer(0, WAITERS_MAX), 100_000, "requests")
    waiters_per_connection: int = setting(
        integer(0, WAITERS_MAX), 1000, "requests; 0 means counter.waiters", reload=True
    )
    settle_time: int = setting(integer(1, 86_400), 3600, "seconds", reload=True)
    resume_max: int = setting(
        integer(0, 86_400), 60, "seconds; 0 means that no connection has a grace time", reload=True
    )
    remote_share: int = setting(integer(1, 100), 50, "percent", reload=True)
    local_share: int = setting(integer(1, 100), 100, "percent", reload=True)
    limits: str = setting(absolute_path, "", "absolute path; empty means that the server sets no limits", reload=True)
    name_memory: int = setting(size(0, NAME_MEMORY_MAX), 256 << 20, "bytes")
    stats_interval: int = setting(integer(10, 1 << 31), 86400, "seconds", reload=True)


def make_store(settings: CounterSettings, figures: Figures, now_ns: int) -> CounterStore:
    """Makes the store for these settings. figures: returns figures of the daemon, for Stats."""
    from counterd.protocols.counter._session import open_store  # noqa: PLC0415 - settings are read before it is built

    store = open_store(
        buckets=settings.buckets,
        holdings=settings.holdings or 2 * settings.buckets,
        holdings_per_connection=settings.holdings_per_connection,
        waiters=settings.waiters,
        name_memory=settings.name_memory,
        hash_key=os.urandom(16),
        posted_max=POSTED_MAX,
        now_ns=now_ns,
        figures=figures,
    )
    store.limit_takes(settings.waiters_per_connection, settings.settle_time)
    store.limit_resumptions(settings.resume_max)
    store.limit_shares(settings.remote_share, settings.local_share)
    return store


def read_limits(text: bytes) -> Limits:
    """Parses the file of counter.limits. Raises DocumentError."""
    from counterd.protocols.counter.limits import parse_limits  # noqa: PLC0415 - clients import this without limits

    return parse_limits(text)


def load(store: CounterStore, _settings: CounterSettings, files: Mapping[str, Any]) -> None:
    """Loads the limits in the file of counter.limits. Without a file, there are no limits."""
    from counterd.protocols.counter.limits import Limits  # noqa: PLC0415 - as above

    store.load_limits(files.get("counter.limits", Limits()))


def reload(store: CounterStore, settings: CounterSettings) -> None:
    """Applies the settings that can change while the store runs."""
    store.limit_holdings(settings.holdings_per_connection)
    store.limit_takes(settings.waiters_per_connection, settings.settle_time)
    store.limit_resumptions(settings.resume_max)
    store.limit_shares(settings.remote_share, settings.local_share)


def lend(store: CounterStore, settled: Callable[[int, bool], None], wake: Callable[[], None]) -> Lender:
    """Lends permits to another protocol's store. settled, wake: see ProtocolSpec.lend."""
    from counterd.protocols.counter._lending import Lending  # noqa: PLC0415 - as above

    return Lending.of(store, settled, wake)


def leased_limits(store: CounterStore, prefix: bytes) -> LeasedLimits:
    """Lets the limits of names that begin with `prefix` hold for several daemons. Raises ValueError."""
    from counterd.protocols.counter._leased_limits import LeasedLimits  # noqa: PLC0415 - as above

    return LeasedLimits.of(store, prefix)


def tables() -> tuple[Table, ...]:
    """Returns the tables that people can ask for."""
    from counterd.protocols.counter._tables import TABLES  # noqa: PLC0415 - as above

    return TABLES


FIGURES = (
    Figure("busy", "counters", "gauge", "Counters that exist, by state: in use or idle.", {"state": "busy"}),
    Figure("idle", "counters", "gauge", "Counters that exist, by state: in use or idle.", {"state": "idle"}),
    Figure("buckets", "counters_limit", "gauge", "Counters that can exist."),
    Figure("total_objects", "counters_created_total", "counter", "Counters that were created."),
    Figure(
        "reclaimed",
        "counters_reclaimed_total",
        "counter",
        "Idle counters that were removed to make room for other counters.",
    ),
    Figure(
        "expired",
        "counters_expired_total",
        "counter",
        "Idle counters that were removed after the end of the statistics window.",
    ),
    Figure("records", "table_load_ratio", "gauge", "Share of the counter records in use, from 0 to 1.", over="buckets"),
    Figure("longest_probe", "table_longest_probe", "gauge", "Longest probe sequence of the hash table, in slots."),
    Figure("holdings", "holdings", "gauge", "Holdings: pairs of a connection and a counter of which it holds permits."),
    Figure("holdings_max", "holdings_limit", "gauge", "Holdings that can exist."),
    Figure(
        "given_back",
        "holdings_returned_total",
        "counter",
        "Holdings that were given back because their connection ended.",
    ),
    Figure("waiters", "waiting", "gauge", "Take requests that wait."),
    Figure("waiters_max", "waiting_limit", "gauge", "Take requests that can wait."),
    Figure("granted_later", "granted_after_wait_total", "counter", "Take requests that were granted after a wait."),
    Figure(
        "granted_later_seconds",
        "granted_after_wait_seconds_total",
        "counter",
        "Seconds that Take requests have waited before they were granted.",
    ),
    Figure("waits", "waits_total", "counter", "Take requests that began to wait."),
    Figure(
        "timed_out", "waits_timed_out_total", "counter", "Take requests that were refused when their time was over."
    ),
    Figure(
        "not_queued",
        "waits_rejected_total",
        "counter",
        "Take requests that could not wait because too many others waited.",
    ),
    Figure(
        "waits_over_share",
        "waits_over_share_total",
        "counter",
        "Take requests that could not wait because their peer had its share of the waiting requests.",
    ),
    Figure("rates", "rates", "gauge", "Rates that are not full, because something was taken recently."),
    Figure("rates_max", "rates_limit", "gauge", "Rates that can exist."),
    Figure("charges", "charges", "gauge", "Charges of rates that can still be settled."),
    Figure("kept", "grace_connections", "gauge", "Connections that have ended and may still be resumed."),
    Figure("kept_holdings", "grace_holdings", "gauge", "Holdings of connections that may still be resumed."),
    Figure("resumed", "resumed_total", "counter", "Connections that were resumed by another connection."),
    Figure("expired_stays", "grace_expired_total", "counter", "Connections that were not resumed in their grace time."),
    Figure(
        "stays_over_share",
        "grace_over_share_total",
        "counter",
        "Connections that got no grace time because their peer had its share of the grace times.",
    ),
    Figure("charges_max", "charges_limit", "gauge", "Charges that can exist."),
    Figure(
        "charges_dropped",
        "charges_dropped_total",
        "counter",
        "Charges that can no longer be settled because there were too many.",
    ),
    Figure("name_memory", "name_memory_bytes", "gauge", "Bytes of counter.name_memory in use."),
    Figure("name_memory_max", "name_memory_limit_bytes", "gauge", "The size of counter.name_memory in bytes."),
    Figure(
        "region", "region_bytes", "gauge", "Size of the memory mapping of all tables; memory is used only as they fill."
    ),
)

PROTOCOL = ProtocolSpec(
    name="counter",
    default_port=PORT,
    settings=CounterSettings,
    make_store=make_store,
    reload=reload,
    aliases={"counter.stat_interval": "counter.stats_interval"},
    foreign_file=yrmcds.FILE,
    figures=FIGURES,
    windows=Windows("counter.stats_interval"),
    files=Files({"counter.limits": read_limits}, load),
    tables=tables,
    lend=lend,
    leased_limits=leased_limits,
)
