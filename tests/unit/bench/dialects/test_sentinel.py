"""The sentinel dialect: requests byte for byte, the rules for a load, and the comparison of flows with held tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from counterd.bench.dialects import sentinel
from counterd.bench.dialects.sentinel import FIRST_RATE, FIRST_SEMAPHORE, FLOWS_MAX, PARAM_FLOW, rules_of
from counterd.bench.plan import Plan, read_work
from counterd.errors import ProtocolError
from counterd.protocols.sentinel.rules import parse_rules
from counterd.protocols.sentinel.wire import MessageType
from kit.scripted.sentinel import Asked, Tokens

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GIVE_BACK_S": 0.05, "LOOK_S": 0.05, "PAUSE_S": 0.001}.items():
        monkeypatch.setattr(sentinel, name, value)


@pytest.fixture
def server() -> Iterator[Tokens]:
    with Tokens(10) as started:
        yield started


def plan_of(server: Tokens, **options: Any) -> Plan:
    return Plan(protocol="sentinel", port=server.address.port, verify=True, **{"names": 3, "maximum": 10, **options})


def judged(server: Tokens, held: dict[int, int]) -> list[str]:
    board: Any = SimpleNamespace(all_held=lambda: held)
    return sentinel.while_held(plan_of(server), board)


def test_matching_flows_are_no_violation(server: Tokens) -> None:
    server.used.update({1: 4, 3: 10})
    assert judged(server, {0: 4, 2: 10}) == []
    assert (server.tokens, +server.used) == ({}, {1: 4, 3: 10}), "looking changes nothing"


def test_differences_are_violations(server: Tokens) -> None:
    server.used.update({1: 3, 2: 1})
    assert judged(server, {0: 4}) == [
        "flow 1: 4 of 10 are held, and 7 more were granted",
        "flow 2: 0 of 10 are held, and the other 10 cannot be acquired",
    ]
    assert (server.tokens, +server.used) == ({}, {1: 3, 2: 1})


def test_more_tokens_than_the_limit_are_a_violation(server: Tokens) -> None:
    server.used[1] = 12
    assert judged(server, {0: 12}) == []


def test_after_the_load_no_tokens_may_be_in_use(server: Tokens) -> None:
    assert sentinel.when_gone(plan_of(server)) == []
    server.used[2] = 1
    late = "flow 2: 0 of 10 are held, and the other 10 cannot be acquired, 0.05 s after the last connection was closed"
    assert sentinel.when_gone(plan_of(server)) == [late]


def test_tokens_that_end_in_time_are_no_violation(server: Tokens) -> None:
    class Ending(Tokens):
        def give_back(self, peer: object) -> None:
            self.used.clear()

    with Ending(10) as ending:
        ending.used[1] = 5
        sentinel.look(plan_of(ending))


@pytest.mark.parametrize("maximum", [9, 11])
def test_a_different_limit_is_reported_before_the_load(maximum: int, server: Tokens) -> None:
    with pytest.raises(ProtocolError, match=r"flow 1: .*: the count of each rule must be --maximum"):
        sentinel.look(plan_of(server, maximum=maximum))


def test_many_flows_are_probed_in_batches_and_long_findings_shortened(server: Tokens) -> None:
    server.used.update(dict.fromkeys(range(1, 601), 1))
    found = sentinel.when_gone(plan_of(server, names=600))
    assert (len(found), found[-1]) == (11, "and 590 more")
    assert len({each.id for each in server.of(MessageType.ACQUIRE)}) == 600
    assert max(peer.batches[0] for peer in server.peers if peer.batches) <= sentinel.AT_ONCE


def test_a_closed_connection_is_an_error() -> None:
    class Closing(Tokens):
        def answer(self, asked: Asked) -> bytes:
            raise OSError

    with Closing() as server, pytest.raises((ProtocolError, OSError)):
        sentinel.look(plan_of(server))


def test_rules_for_semaphores_rates_and_values() -> None:
    rules = parse_rules(rules_of(3, 70, resourceTimeout=5000))
    found = {(rule.grade, rule.flow_id): rule for rule in rules.flows}
    semaphores = {(0, FIRST_SEMAPHORE + number) for number in range(3)}
    assert found.keys() == semaphores | {(1, FIRST_RATE + number) for number in range(3)}
    assert {(rule.count, rule.threshold_type) for rule in rules.flows} == {(70, 1)}
    assert {found[each].resource_timeout_ms for each in semaphores} == {5000}
    assert [(rule.flow_id, rule.count, rule.threshold_type) for rule in rules.params] == [(PARAM_FLOW, 70, 1)]


def test_the_number_of_flows_is_bounded() -> None:
    assert len(parse_rules(rules_of(FLOWS_MAX, 1)).flows) == 2 * FLOWS_MAX
    with pytest.raises(ValueError, match="at most 8192 flows of a kind, not 8193"):
        rules_of(FLOWS_MAX + 1, 1)


def test_requests_byte_for_byte() -> None:
    """Ids of flows and tokens are filled in later; those of a flow are counted from these."""
    assert sentinel.requests_of(Plan(protocol="sentinel", resources=3), b"jobs") == {
        "noop": bytes.fromhex("0015 00000000 00 0000000c") + b"counterbench",
        "acquire": bytes.fromhex("0012 00000000 03 0000000000000001 00000003 00"),
        "release": bytes.fromhex("000d 00000000 04 0000000000000000"),
        "keep": bytes.fromhex("000d 00000000 05 0000000000000000"),
        "flow": bytes.fromhex("0012 00000000 01 00000000000f4241 00000003 00"),
        "param": bytes.fromhex("001e 00000000 02 0000000000000001 00000003 00000001 07 00000004") + b"jobs",
    }
    longest = sentinel.requests_of(Plan(protocol="sentinel", work=read_work("param"), name_size=996), b"x" * 996)
    assert len(longest["param"]) == 1024
