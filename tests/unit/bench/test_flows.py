"""The rules that a room needs for a load are rules."""

from __future__ import annotations

from counterd.bench.flows import FIRST_RATE, FIRST_SEMAPHORE, FLOWS_MAX, PARAM_FLOW, rules_of
from counterd.protocols.sentinel.rules import parse_rules


def test_semaphores_rates_and_values() -> None:
    rules = parse_rules(rules_of(3, 70, resourceTimeout=5000))
    found = {(rule.grade, rule.flow_id): rule for rule in rules.flows}
    semaphores = {(0, FIRST_SEMAPHORE + number) for number in range(3)}
    assert found.keys() == semaphores | {(1, FIRST_RATE + number) for number in range(3)}
    assert {(rule.count, rule.threshold_type) for rule in rules.flows} == {(70, 1)}
    assert {found[each].resource_timeout_ms for each in semaphores} == {5000}
    assert [(rule.flow_id, rule.count, rule.threshold_type) for rule in rules.params] == [(PARAM_FLOW, 70, 1)]


def test_as_many_as_a_room_has_room_for() -> None:
    assert len(parse_rules(rules_of(FLOWS_MAX, 1)).flows) == 2 * FLOWS_MAX
