"""Level 1: the vectors against the engine in memory, with a clock that the test drives."""

from __future__ import annotations

import pytest

from conformance import vectors
from conformance.beanstalk.engine import make_store
from kit.permits import LentPump

CASES = vectors.load("beanstalk")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_engine_does_what_the_vector_says(case: vectors.Case) -> None:
    bench = LentPump(make_store())
    vectors.run_case(case, bench.connect, advance=bench.advance)
    bench.store.audit()
