"""The matrix is whole: each scenario runs with something of each protocol, and what lacks one says why."""

from __future__ import annotations

import pytest

from counterd import protocols
from scenarios.server import THINGS
from scenarios.thing import CANCELLED, INTERRUPTED, SCENARIOS


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_protocol_has_each_scenario(scenario: str) -> None:
    having = {thing.PROTOCOL for thing in THINGS if scenario not in thing.LACKS}
    assert having == set(protocols.names())


def test_what_lacks_a_scenario_says_why() -> None:
    for thing in THINGS:
        assert set(thing.LACKS) <= set(SCENARIOS)
        assert all(thing.LACKS.values())
        assert bool(thing.USES) == (not {CANCELLED, INTERRUPTED} <= set(thing.LACKS))
