"""A beanstalk store in memory with the tests' settings; kit/pump.py drives it."""

from __future__ import annotations

from typing import Any

from counterd.protocols.beanstalk._session import open_store
from kit.pump import START_NS

FIGURES = {"pid": 1, "version": "0", "rusage_utime": "0.000000", "rusage_stime": "0.000000", "uptime": 0}


def make_store(
    *,
    memory_limit: int = 1 << 22,
    job_size_max: int = 65535,
    tubes: int = 1000,
    tube_jobs_max: int = 1 << 29,
    journal_period_ns: int = 0,
    journal_lag_ns: int = -1,
) -> Any:
    """A store with a known key."""
    return open_store(
        memory_limit=memory_limit,
        job_size_max=job_size_max,
        tubes=tubes,
        tube_jobs_max=tube_jobs_max,
        figures=lambda: FIGURES,
        host={"id": "0123456789abcdef", "hostname": b"here", "os": b"one", "platform": b"x86_64"},
        journal_period_ns=journal_period_ns,
        journal_lag_ns=journal_lag_ns,
        hash_key=bytes(range(16)),
        now_ns=START_NS,
    )
