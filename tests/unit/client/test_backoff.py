"""Backoff, whose random delays grow up to a bound; and Attempts, which decides when a client may connect again."""

from __future__ import annotations

import pytest

from counterd.client._backoff import RANDOM, Attempts, Backoff
from counterd.errors import ConnectionLost, CounterdError, Timeout


def delays(backoff: Backoff, count: int) -> list[float]:
    return [backoff.delay() for _ in range(count)]


@pytest.mark.parametrize(("drawn", "part"), [(0.0, 0.5), (1.0, 1.0)])
def test_delays_double_up_to_the_longest(monkeypatch: pytest.MonkeyPatch, drawn: float, part: float) -> None:
    monkeypatch.setattr(RANDOM, "uniform", lambda low, high: low + (high - low) * drawn)
    assert delays(Backoff(1, 5), 5) == [part * delay for delay in (1, 2, 4, 5, 5)]


def test_reset_begins_with_the_first_delay() -> None:
    backoff = Backoff(1, 100)
    delays(backoff, 10)
    backoff.reset()
    assert 0.5 <= backoff.delay() <= 1
    assert 1 <= backoff.delay() <= 2


def test_two_backoffs_differ() -> None:
    assert len({tuple(delays(Backoff(1, 100), 4)) for _ in range(10)}) == 10


# ---- connecting again

LOST = CounterdError("lost")


def test_after_a_good_connection_the_first_attempt_begins_at_once() -> None:
    attempts = Attempts()
    for good in (object(), object()):
        attempts.begin(10.0, good, True, LOST)
        attempts.succeeded(10.0, good)
        assert attempts.retry_at == 0.0


def test_after_an_unanswered_connection_the_next_attempt_waits() -> None:
    attempts, bad = Attempts(), object()
    attempts.begin(10.0, bad, False, LOST)
    attempts.succeeded(10.0, bad)
    with pytest.raises(ConnectionLost, match=r"^lost; another attempt is due within 2 s$"):
        attempts.begin(10.0, bad, False, LOST)
    attempts.begin(attempts.retry_at, bad, False, LOST)


def test_the_pauses_between_failed_attempts_grow() -> None:
    attempts, now = Attempts(), 10.0
    pauses = []
    for _ in range(9):
        attempts.begin(now, None, False, LOST)
        attempts.failed(now, Timeout("no answer"))
        with pytest.raises(ConnectionLost, match=r"^no answer; another"):
            attempts.begin(now, None, False, LOST)
        pauses.append(attempts.retry_at - now)
        now = attempts.retry_at
    assert pauses[0] <= 0.05
    assert 1 <= pauses[-1] <= 2
    attempts.begin(now, "good", True, LOST)
    attempts.failed(now, LOST)
    assert attempts.retry_at - now <= 0.05
