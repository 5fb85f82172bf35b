"""Jobs with permits and clients of the counters, at random: see lent.py."""

from __future__ import annotations

import random

import pytest

from kit.machine import examples
from property.lent import Lent

STEPS = 150


@pytest.mark.parametrize("seed", range(examples(12)))
def test_jobs_and_clients_share_the_same_counters(seed: int) -> None:
    lent = Lent(random.Random(seed))
    for _ in range(STEPS):
        lent.step()
    assert lent.granted
    lent.end_all()
