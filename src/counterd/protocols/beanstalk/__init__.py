"""The beanstalk protocol: a work queue, for the clients of beanstalkd. Floor 2 (ARCHITECTURE.md)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from counterd.contract import Figures, Journal, ProtocolSpec
from counterd.protocols.beanstalk.wire import BODY_MAX, KEPT_BODY_MAX, PORT
from counterd.settings import absolute_path, choice, integer, setting, size
from counterd.tables import Figure

if TYPE_CHECKING:
    from counterd.protocols.beanstalk._store import BeanstalkStore
    from counterd.tables import Table

# Jobs are numbered with 29 bits and cost 128 bytes, blocks of bodies with 32 bits and hold 60.
MEMORY_MIN, MEMORY_MAX = 1 << 20, 1 << 36
TUBES_MAX = 1 << 24
JOBS_MAX = 1 << 29
SYNC_MAX_MS = 10_000
LAG_MAX_NS = 1_000_000_000  # of a journal for which no reply waits: then they do, or it would never catch up


def sync(text: str) -> str:
    """Reads when a change has to be on disk: always, never or within a number of milliseconds."""
    if text in ("always", "never") or (text.isdecimal() and 1 <= int(text) <= SYNC_MAX_MS):
        return text
    raise ValueError(f"expected always, never or milliseconds from 1 to {SYNC_MAX_MS}, not {text!r}")


def timing(text: str) -> tuple[int, int]:
    """Converts the value of sync() to the store's values: the time between two pieces, and the lag of the journal that
    holds replies back, in ns."""
    if text == "always":
        return 0, -1
    if text == "never":
        return 0, LAG_MAX_NS
    period_ns = int(text) * 1_000_000
    return period_ns, 2 * period_ns


@dataclass(frozen=True)
class BeanstalkSettings:
    """The settings that only this protocol has."""

    journal: str = setting(absolute_path, "", "absolute path; empty means no journal")
    sync: str = setting(sync, "always", "always, never or milliseconds")

    memory_limit: int = setting(size(MEMORY_MIN, MEMORY_MAX), 1 << 30, "bytes")
    max_job_size: int = setting(size(1, BODY_MAX), 65535, "bytes")
    max_tubes: int = setting(integer(1, TUBES_MAX), 100_000)
    max_jobs_per_tube: int = setting(integer(1, JOBS_MAX), JOBS_MAX)
    usr1: str = setting(choice("stats", "drain"), "stats", reload=True)


def make_store(settings: BeanstalkSettings, figures: Figures, now_ns: int) -> BeanstalkStore:
    """Makes the store for these settings.

    figures: a function that returns the daemon's pid, CPU times, uptime and version, for the command stats.
    """
    from counterd.protocols.beanstalk._session import open_store  # noqa: PLC0415 - settings are read before it is built

    machine = os.uname()
    journal_period_ns, journal_lag_ns = timing(settings.sync)
    return open_store(
        memory_limit=settings.memory_limit,
        job_size_max=settings.max_job_size,
        tubes=settings.max_tubes,
        tube_jobs_max=settings.max_jobs_per_tube,
        figures=figures,
        host={
            "id": os.urandom(8).hex(),
            "hostname": machine.nodename.encode(),
            "os": machine.version.encode(),
            "platform": machine.machine.encode(),
        },
        journal_period_ns=journal_period_ns,
        journal_lag_ns=journal_lag_ns,
        hash_key=os.urandom(16),
        now_ns=now_ns,
    )


def reload(_store: BeanstalkStore, _settings: BeanstalkSettings) -> None:
    """Does nothing: none of the protocol's own settings can change while the store runs."""


def set_drain_mode(store: BeanstalkStore, on: bool) -> None:
    """Makes the store refuse put with DRAINING, or accept jobs again."""
    store.refuse_puts(on)


def tables() -> tuple[Table, ...]:
    """Returns the tables that people can ask for."""
    from counterd.protocols.beanstalk._tables import TABLES  # noqa: PLC0415 - as above

    return TABLES


FIGURES = (
    Figure("jobs:ready", "beanstalk_jobs", "gauge", "Jobs, by state.", {"state": "ready"}),
    Figure("jobs:reserved", "beanstalk_jobs", "gauge", "Jobs, by state.", {"state": "reserved"}),
    Figure("jobs:delayed", "beanstalk_jobs", "gauge", "Jobs, by state.", {"state": "delayed"}),
    Figure("jobs:buried", "beanstalk_jobs", "gauge", "Jobs, by state.", {"state": "buried"}),
    Figure("blocked", "beanstalk_jobs_blocked", "gauge", "Ready jobs that wait for a permit."),
    Figure("total_jobs", "beanstalk_jobs_created_total", "counter", "Jobs that were put since the start."),
    Figure(
        "timeouts", "beanstalk_timeouts_total", "counter", "Jobs whose time to run ended before their worker finished."
    ),
    Figure("retired", "beanstalk_retired_total", "counter", "Jobs that were reserved as often as their tube allows."),
    Figure(
        "given_back",
        "beanstalk_given_back_total",
        "counter",
        "Jobs that became ready again because their worker disconnected.",
    ),
    Figure("waiting", "beanstalk_waiting", "gauge", "Connections that wait for a job."),
    Figure("tubes", "beanstalk_tubes", "gauge", "Tubes that exist."),
    Figure("tubes_max", "beanstalk_tubes_limit", "gauge", "Tubes that can exist."),
    Figure("used_memory", "beanstalk_memory_bytes", "gauge", "Bytes of beanstalk.memory_limit in use."),
    Figure("memory_limit", "beanstalk_memory_limit_bytes", "gauge", "The value of beanstalk.memory_limit in bytes."),
    Figure(
        "longest_probe", "beanstalk_table_longest_probe", "gauge", "Longest probe sequence of the hash table, in slots."
    ),
    Figure("refuses_puts", "beanstalk_drain_mode", "gauge", "1 in drain mode, in which put gets the reply DRAINING."),
    Figure("journal_failing", "beanstalk_journal_failing", "gauge", "1 while the journal cannot be written."),
    Figure("journal_full", "beanstalk_journal_full", "gauge", "1 while the disk has no room for more jobs."),
    Figure("journal_behind", "beanstalk_journal_behind", "gauge", "Changes in the journal that are not on disk yet."),
    Figure("journal_records", "beanstalk_journal_records_total", "counter", "Rows that were sent to the journal."),
    Figure(
        "region",
        "beanstalk_region_bytes",
        "gauge",
        "Bytes of address space that are reserved for all tables; memory is used only as they fill.",
    ),
)

PROTOCOL = ProtocolSpec(
    name="beanstalk",
    default_port=PORT,
    settings=BeanstalkSettings,
    make_store=make_store,
    reload=reload,
    figures=FIGURES,
    tables=tables,
    journal=Journal(
        "beanstalk.journal",
        "beanstalk.sync",
        "counterd.protocols.beanstalk._journal",
        "counterd.protocols.beanstalk.journal",
        {"beanstalk.max_job_size": KEPT_BODY_MAX},
    ),
    drain_mode=set_drain_mode,
    usr1="beanstalk.usr1",
    borrows=True,
)
