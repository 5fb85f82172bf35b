"""How many connections are admitted. The rest of limits.py changes the process, which tests/functional tests."""

from __future__ import annotations

import pytest

from counterd._core import LIMIT_CONNECTIONS
from counterd.control.process.limits import effective_connections, least_descriptors, share_descriptors


@pytest.mark.parametrize(
    ("configured", "descriptors", "effective"),
    [
        (0, 936, 936),
        (100, 936, 100),
        (936, 936, 936),
        (937, 936, 936),
        (0, 1, 1),
        (0, 1 << 30, LIMIT_CONNECTIONS),
        (1 << 29, 1 << 30, LIMIT_CONNECTIONS),
    ],
)
def test_the_smallest_of_three_bounds_counts(configured, descriptors, effective):
    assert effective_connections(configured, descriptors) == effective


@pytest.mark.parametrize(
    ("descriptors", "protocols", "share"),
    [(1000, 1, 936), (1000, 2, 468), (1001, 2, 468), (65, 1, 1), (65, 2, 1), (10, 1, 1)],
)
def test_protocols_share_the_free_descriptors(descriptors, protocols, share):
    assert share_descriptors(descriptors, protocols) == share


def test_each_protocol_needs_some_descriptors():
    assert [least_descriptors(protocols) for protocols in (1, 2, 3)] == [32, 40, 48]
