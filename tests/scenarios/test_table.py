"""The matrix is complete: each scenario runs with a resource of each protocol, or the protocol gives a reason why
not."""

from __future__ import annotations

import pytest

from counterd import protocols
from scenarios.resource import CANCELLED, INTERRUPTED, SCENARIOS
from scenarios.server import RESOURCES


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_protocol_has_each_scenario(scenario: str) -> None:
    having = {resource.PROTOCOL for resource in RESOURCES if scenario not in resource.LACKS}
    assert having == set(protocols.names())


def test_missing_scenarios_have_a_reason() -> None:
    for resource in RESOURCES:
        assert set(resource.LACKS) <= set(SCENARIOS)
        assert all(resource.LACKS.values())
        assert bool(resource.USES) == (not {CANCELLED, INTERRUPTED} <= set(resource.LACKS))
