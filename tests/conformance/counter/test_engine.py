"""Level 1: the vectors against the engine in memory, with no socket and no clock."""

from __future__ import annotations

import re

import pytest

from conformance import vectors
from kit.counters import make_store
from kit.pump import START_NS, Pump

CASES = vectors.load("counter")


def bench(buckets: int) -> Pump:
    store = make_store(buckets, 64, name_memory=1 << 20, waiters=64, posted_max=1 << 18, now_ns=START_NS)
    store.limit_resumptions(60)
    return Pump(store)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_engine_does_what_the_vector_says(case: vectors.Case) -> None:
    made = bench(64)
    vectors.run_case(case, made.connect)
    made.store.audit()
    assert made.store.sessions_open == 0
    figures = made.store.snapshot()
    assert [figures[name] for name in ("busy", "holdings", "waiters", "charges")] == [0, 0, 0, 0]


def test_all_cases_pass_in_one_store() -> None:
    """As with one server at the other levels; with only as many records as the largest case needs."""
    made = bench(16)
    for case in CASES:
        vectors.run_case(case, made.connect)
        made.store.audit()
    assert made.store.snapshot()["busy"] == 0
    assert made.store.snapshot()["reclaimed"] > 0


def test_the_runner_fails_where_the_reference_differs() -> None:
    """So that a passing level 1 means something."""
    for case in CASES:
        if case.differs and not case.skip:
            with pytest.raises(AssertionError, match=f"^{re.escape(case.name)}, "):
                vectors.run_case(case, bench(64).connect, reference=True)
