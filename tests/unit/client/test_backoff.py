"""Delays that grow, up to a bound, and differ."""

from __future__ import annotations

import random

import pytest

from counterd.client._backoff import Backoff


def delays(backoff: Backoff, count: int) -> list[float]:
    return [backoff.delay() for _ in range(count)]


@pytest.mark.parametrize(("drawn", "part"), [(0.0, 0.5), (1.0, 1.0)])
def test_doubles_up_to_the_longest(monkeypatch: pytest.MonkeyPatch, drawn: float, part: float) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: low + (high - low) * drawn)
    assert delays(Backoff(1, 5), 5) == [part * delay for delay in (1, 2, 4, 5, 5)]


def test_begins_again() -> None:
    backoff = Backoff(1, 100)
    delays(backoff, 10)
    backoff.reset()
    assert 0.5 <= backoff.delay() <= 1
    assert 1 <= backoff.delay() <= 2


def test_no_two_are_in_step() -> None:
    assert len({tuple(delays(Backoff(1, 100), 4)) for _ in range(10)}) == 10
