"""The matrix is complete: each scenario runs with a resource of each protocol, or the protocol gives a reason why
not."""

from __future__ import annotations

import pytest

from counterd import protocols
from scenarios.server import THINGS
from scenarios.thing import CANCELLED, INTERRUPTED, SCENARIOS


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_protocol_has_each_scenario(scenario: str) -> None:
    having = {thing.PROTOCOL for thing in THINGS if scenario not in thing.LACKS}
    assert having == set(protocols.names())


def test_missing_scenarios_have_a_reason() -> None:
    for thing in THINGS:
        assert set(thing.LACKS) <= set(SCENARIOS)
        assert all(thing.LACKS.values())
        assert bool(thing.USES) == (not {CANCELLED, INTERRUPTED} <= set(thing.LACKS))
