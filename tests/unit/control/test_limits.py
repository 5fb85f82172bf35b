"""How many connections are let in. What else is in limits.py changes the process: tests/functional does that."""

from __future__ import annotations

import pytest

from counterd._core import LIMIT_CONNECTIONS
from counterd.control.limits import effective_connections


@pytest.mark.parametrize(
    ("configured", "descriptors", "effective"),
    [
        (0, 1000, 936),
        (100, 1000, 100),
        (936, 1000, 936),
        (937, 1000, 936),
        (0, 65, 1),
        (0, 10, 1),
        (0, 1 << 30, LIMIT_CONNECTIONS),
        (1 << 29, 1 << 30, LIMIT_CONNECTIONS),
    ],
)
def test_the_smallest_of_three_bounds_counts(configured, descriptors, effective):
    assert effective_connections(configured, descriptors) == effective
