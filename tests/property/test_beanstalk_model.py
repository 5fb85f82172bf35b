"""The beanstalk protocol's store and a model in plain dicts are given the same commands, and the same time."""

from __future__ import annotations

import contextlib
import random

import pytest

from kit.machine import examples
from property.beanstalk_both import Both, Tied, step

STEPS = 80


@pytest.mark.parametrize("seed", range(examples(12)))
def test_the_store_does_what_the_model_does(seed: int):
    """Twenty histories for each seed; one ends early where it is tied."""
    for part in range(20):
        with contextlib.suppress(Tied):
            generator, both = random.Random(1000 * seed + part), Both()
            for _ in range(STEPS):
                step(generator, both)
