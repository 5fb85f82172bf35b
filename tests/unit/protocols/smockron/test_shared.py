"""The calls to Redis and how their answers are applied; tests/functional/test_smockron_state.py runs the script."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from conformance.smockron.dialect import START_MS
from conformance.smockron.engine import RULES, Pump, make_store
from counterd.protocols.smockron import shared, wire
from counterd.protocols.smockron.wire import Control, Parser, SocketType, Status
from kit.pump import START_NS

if TYPE_CHECKING:
    from kit.pump import Peer

DAY_MS = 86_400_000


class Scene:
    """A store that shares its state, a gatekeeper, and the messages that this received."""

    def __init__(self, **settings: Any) -> None:
        self.bench = Pump(make_store(**settings))
        self.store = self.bench.store
        shared.begin(self.store, START_NS)
        self.gate, self.ear = self.opened("gate", SocketType.PUB), self.opened("control", SocketType.SUB)
        self.ear.send(wire.subscribe(b""))
        self.ear.output.clear()

    def opened(self, name: str, kind: SocketType) -> Peer:
        peer = self.bench.connect_by_name(name)
        peer.send(wire.greeting() + wire.ready(kind))
        peer.output.clear()
        return peer

    def account(self, domain: bytes, *identifiers: bytes) -> None:
        accounts = (wire.accounting(domain, Status.ACCEPTED, identifier, 0) for identifier in identifiers)
        self.gate.take(self.gate.session.receive(b"".join(accounts), self.bench.now_ns))

    def take(self) -> Any:
        return shared.take(self.store, self.bench.now_ns)

    def settle(self, answer: bytes) -> None:
        shared.settle(self.store, answer, self.bench.now_ns)
        while any(self.bench.turn()) and not self.store.snapshot()["asking"]:
            pass

    def told(self) -> list[Control | None]:
        for peer in (self.ear,):
            peer.pull()
        heard = Parser().feed(wire.greeting() + bytes(self.ear.output))
        self.ear.output.clear()
        return [wire.control(one) for one in heard if isinstance(one, tuple)]

    def figure(self, name: str) -> int:
        return int(self.store.snapshot()[name])


def test_one_call_has_all_requests_of_a_domain() -> None:
    scene = Scene()
    scene.account(b"day", b"a", b"b", b"a")
    scene.account(b"second", b"c")
    assert scene.store.next_deadline() == 0, "somebody has to come for them"
    keys, arguments = scene.take()
    assert keys == [b"throttle;day;a", b"throttle;day;b", b"throttle;day;a"]
    assert arguments == [DAY_MS, 0, START_MS, START_MS, START_MS]
    assert scene.store.next_deadline() != 0, "who takes them does so again when he has an answer"
    assert scene.take() == ([b"throttle;second;c"], [1000, 10_000, START_MS])
    scene.account(b"day", b"d")
    assert scene.take() is None, "two at a time"
    scene.settle(b"%d %d %d" % (START_MS + 5, START_MS, START_MS + 9))
    assert scene.told() == [
        Control(b"day", "DELAY_UNTIL", b"a", START_MS + 5), Control(b"day", "DELAY_UNTIL", b"a", START_MS + 9),
    ]  # fmt: skip
    assert scene.take() == ([b"throttle;day;d"], [DAY_MS, 0, START_MS])
    scene.settle(b"%d" % (START_MS - 9000))
    scene.settle(b"%d" % START_MS)
    assert scene.told() == []
    assert scene.figure("asking") == 0
    scene.store.audit()


@pytest.mark.parametrize("answer", [b"", b"1 2", b"x", b"1.5", b"9" * 30, b"-" + b"9" * 19, 7, None, [b"1"], 1.5])
def test_an_invalid_answer_is_refused_and_its_requests_can_be_decided_alone(answer: object) -> None:
    scene = Scene()
    scene.account(b"day", b"a")
    scene.take()
    with pytest.raises(ValueError, match=r"."):
        shared.settle(scene.store, answer, START_NS)
    shared.alone(scene.store, START_NS)
    assert scene.told() == [Control(b"day", "DELAY_UNTIL", b"a", START_MS + DAY_MS)]
    scene.store.audit()


def test_without_redis_the_store_goes_on_from_the_last_answers() -> None:
    scene = Scene()
    scene.account(b"day", b"a")
    scene.take()
    scene.settle(b"%d" % (START_MS + DAY_MS))
    assert len(scene.told()) == 1
    scene.account(b"day", b"a")
    scene.take()
    scene.account(b"day", b"b")
    scene.take()
    scene.account(b"day", b"a")
    shared.alone(scene.store, START_NS)
    assert scene.told() == [
        Control(b"day", "DELAY_UNTIL", identifier, START_MS + days * DAY_MS)
        for identifier, days in ((b"a", 2), (b"b", 1), (b"a", 3))
    ]
    assert (scene.figure("alone"), scene.figure("asking")) == (1, 0)
    scene.account(b"day", b"a")
    assert scene.told() == [Control(b"day", "DELAY_UNTIL", b"a", START_MS + 4 * DAY_MS)]
    shared.begin(scene.store, START_NS)
    scene.account(b"day", b"a")
    assert scene.told() == []
    assert scene.figure("alone") == 0
    assert scene.take() is not None
    scene.store.audit()


def test_the_size_of_a_call_and_the_waiting_requests_are_bounded() -> None:
    scene = Scene()
    for _ in range(60):
        scene.account(b"day", *[b"%d" % number for number in range(100)])
    waiting = scene.figure("asking")
    assert 4096 <= waiting < 6000, "the rest is not read"
    taken = []
    while scene.figure("asking") or scene.gate.session.more:
        found = scene.take()
        if found is not None:
            taken.append(len(found[0]))
            scene.settle(b" ".join([b"%d" % START_MS] * taken[-1]))
    assert max(taken) == 500
    assert sum(taken) == 6000
    scene.store.audit()


def test_domains_take_turns() -> None:
    scene = Scene()
    scene.account(b"day", *[b"%d" % number for number in range(1200)])
    scene.account(b"second", b"c")
    scene.account(b"gone", b"d")
    taken = []
    while (found := scene.take()) is not None:
        taken.append((found[0][0].split(b";")[1], len(found[0])))
        scene.settle(b" ".join([b"%d" % START_MS] * taken[-1][1]))
    assert taken == [(b"day", 500), (b"second", 1), (b"gone", 1), (b"day", 500), (b"day", 200)]


def is_answered(peer: Peer) -> bool:
    """Whether a PING is answered, now or after its session's turns."""
    answer = peer.session.receive(wire.ping(0, b"now?"), START_NS)
    while peer.session.more:
        answer += peer.session.take_output(START_NS)
    return b"now?" in answer


def test_a_connection_with_too_many_requests_is_not_read_until_there_is_room() -> None:
    scene = Scene()
    assert is_answered(scene.gate)
    for first in range(0, 4200, 100):
        scene.account(b"day", *[b"%d" % number for number in range(first, first + 100)])
    assert not is_answered(scene.gate)
    assert (scene.figure("asking"), scene.gate.session.more) == (4096, False)
    scene.take()
    assert scene.store.next_deadline() == -1, "there is nothing to do until Redis answers"
    scene.store.audit()
    scene.settle(b" ".join([b"%d" % START_MS] * 500))
    assert is_answered(scene.gate)
    assert scene.figure("asking") == 4200 - 500
    shared.alone(scene.store, START_NS)
    assert scene.figure("asking") == 0
    scene.store.audit()


def test_a_connection_that_is_not_read_can_end() -> None:
    scene = Scene()
    others = [scene.opened("gate", SocketType.PUB) for _ in range(2)]
    for first in range(0, 4200, 100):
        scene.account(b"day", *[b"%d" % number for number in range(first, first + 100)])
    for other in others:
        other.session.receive(wire.accounting(b"day", Status.ACCEPTED, b"a", 0), START_NS)
    assert not any(map(is_answered, others))
    assert others[0].session.eof(START_NS) == b""
    others[1].session.closed(START_NS)
    scene.store.audit()
    shared.alone(scene.store, START_NS)
    assert is_answered(scene.gate)
    scene.store.audit()


def test_forget_messages_wait_for_their_turn() -> None:
    scene = Scene()
    scene.account(b"day", b"a")
    scene.gate.take(scene.gate.session.receive(wire.accounting(b"day", Status.FORGET, b"a", 0), scene.bench.now_ns))
    scene.account(b"day", b"a")
    assert scene.take() == ([b"throttle;day;a"] * 3, [DAY_MS, 0, START_MS, 0, START_MS])
    scene.settle(b"%d 0 %d" % (START_MS + DAY_MS, START_MS + DAY_MS))
    assert [(one.word, one.time_ms) for one in scene.told() if one] == [
        ("DELAY_UNTIL", START_MS + DAY_MS), ("FORGET", START_MS), ("DELAY_UNTIL", START_MS + DAY_MS),
    ]  # fmt: skip


def test_an_identifier_decided_by_redis_counts_as_recently_used() -> None:
    scene = Scene(identifiers=2)
    for name in (b"a", b"b", b"a", b"c"):
        scene.account(b"day", name)
        scene.take()
        scene.settle(b"%d" % (START_MS + DAY_MS))
    scene.told()
    shared.alone(scene.store, START_NS)
    scene.account(b"day", b"a")
    assert scene.told() == [Control(b"day", "DELAY_UNTIL", b"a", START_MS + 2 * DAY_MS)], "b was forgotten"


def test_a_domain_whose_rule_is_removed_during_a_call() -> None:
    scene = Scene()
    scene.account(b"gone", b"a")
    scene.account(b"gone", b"b")
    scene.take()
    scene.bench.happen("changed")
    scene.store.audit()
    scene.settle(b"%d %d" % (START_MS, START_MS))
    scene.store.audit()
    scene.bench.advance(2 * DAY_MS * 1_000_000)
    assert scene.figure("domains") == 2, "it went with its last identifier"


def test_a_domain_without_a_rule_delays_no_request() -> None:
    scene = Scene()
    scene.account(b"gone", b"a")
    scene.bench.happen("changed")
    assert scene.take() == ([b"throttle;gone;a"], [1, 0, START_MS])


def test_a_time_too_far_in_the_future_is_cut_off() -> None:
    scene = Scene()
    scene.account(b"day", b"a")
    scene.take()
    scene.settle(b"9" * 15)
    assert scene.told() == [Control(b"day", "DELAY_UNTIL", b"a", START_MS + 366 * DAY_MS)]


def test_subscriptions_outlive_their_domain() -> None:
    scene = Scene()
    domain = b"d" * 255  # so long that its blocks are overwritten when it ends
    scene.store.load_rules({domain: RULES["first"][b"day"]})
    scene.account(domain, b"a", b"a")
    scene.store.load_rules({})
    shared.alone(scene.store, START_NS)
    assert [one.word for one in scene.told() if one is not None] == ["DELAY_UNTIL"] * 2
    scene.bench.advance(3 * 86_400 * 10**9)
    assert scene.figure("domains") == 0
    scene.store.audit()
