"""Random histories of a store that shares limits: it never grants more than it has rights to."""

from __future__ import annotations

import random

import pytest

from kit.machine import examples
from property.leased_limits_model import History

STEPS = 80


@pytest.mark.parametrize("block", range(4))
def test_promises_of_random_histories(block: int) -> None:
    for seed in range(examples(80)):
        history = History(random.Random(1000 * block + seed))
        for _ in range(STEPS):
            history.step()
        history.end()
