"""When a worker touches its job, and how a job whose function failed is released or buried."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from counterd.client.beanstalk._working import FIRST_TOUCH_S, SHARES, Bury, End, Policy, Retry, Tended

FIGURES = {"pri": "7", "ttr": "60", "reserves": "1"}


def test_a_job_is_touched_each_third_of_its_time_to_run() -> None:
    tended = Tended(100.0)
    assert tended.due == 100 + FIRST_TOUCH_S
    tended.touched(100.5, True, FIGURES)
    assert tended.due == 100.5 + 60 / SHARES
    tended.failed(120.0)
    assert (tended.due, tended.lost) == (120 + FIRST_TOUCH_S, False)
    tended.touched(121.0, True, FIGURES | {"ttr": "1"})
    assert tended.due == pytest.approx(121 + 1 / SHARES)


@pytest.mark.parametrize(("touched", "figures"), [(False, FIGURES), (True, None), (False, None)])
def test_a_job_that_cannot_be_touched_is_lost(touched: bool, figures: Any) -> None:
    tended = Tended(100.0)
    tended.touched(100.5, touched, figures)
    assert (tended.lost, tended.due) == (True, math.inf)


@pytest.mark.parametrize(
    ("error", "reserves", "end"),
    [
        (Retry(5), 99, End(7, 5)),
        (Retry(), 1, End(7, 0)),
        (Bury(), 1, End(7, None)),
        (OSError(), 3, End(7, None)),
        (OSError(), 4, End(7, None)),
        (SystemExit(), 99, End(7, 0)),
        (asyncio.CancelledError(), 1, End(7, 0)),
    ],
)
def test_a_failed_job_is_released_or_buried(error: BaseException, reserves: int, end: End) -> None:
    assert Policy(3, (1, 600)).end(error, FIGURES | {"reserves": str(reserves)}) == end


def test_the_delay_grows_with_each_attempt() -> None:
    policy = Policy(1000, (2, 60))
    for attempt, most in ((1, 2), (2, 4), (3, 8), (5, 32), (6, 60), (900, 60)):
        delays = {policy.end(OSError(), FIGURES | {"reserves": str(attempt)}).delay for _ in range(200)}
        assert max(delays) <= most  # type: ignore[type-var]
        assert min(delays) >= most // 2  # type: ignore[type-var]
        assert len(delays) > 1 or most == 2
    assert Policy(9, (0, 0)).end(OSError(), FIGURES) == End(7, 0)


@pytest.mark.parametrize(
    ("delay", "kind"), [(-1, ValueError), (1 << 32, ValueError), (0.5, TypeError), (None, TypeError)]
)
def test_a_retry_delay_out_of_range_is_refused(delay: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        Retry(delay)
    assert Retry((1 << 32) - 1).delay == (1 << 32) - 1


@pytest.mark.parametrize("backoff", [(2, 1), (-1, 1), (1, math.inf), (1, 1 << 32)])
def test_a_backoff_out_of_range_is_refused(backoff: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match=r"^backoff must be 0 to 4294967295 seconds"):
        Policy(1, backoff)


@pytest.mark.parametrize("backoff", [lambda attempt: attempt, 5, (1, 2, 3), (1,), ("1", "2"), "12", None])
def test_a_backoff_must_be_a_pair(backoff: Any) -> None:
    with pytest.raises(TypeError, match=r"^backoff must be a pair of seconds, such as \(1, 600\), not .+$"):
        Policy(1, backoff)
