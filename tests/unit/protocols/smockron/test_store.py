"""The smockron store, beyond the conformance vectors and the model: slow subscribers, protocol, rules, ends."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest

from conformance.smockron.dialect import START_MS
from conformance.smockron.engine import Pump, make_store
from counterd.protocols.smockron import _session, wire
from counterd.protocols.smockron._store import LIMIT_DOMAINS, SmockronStore
from counterd.protocols.smockron.rules import Rule, Span, parse_rules
from counterd.protocols.smockron.wire import Control, Parser, SocketType, Status
from kit.pump import START_NS, Peer

if TYPE_CHECKING:
    from collections.abc import Iterable

DAY_MS = 86_400_000
RULE = Rule(Span(1, 0), Span(0, 0), 1, (0, 0))


class Scene:
    """A store, and connections to it."""

    def __init__(self, **settings: Any) -> None:
        self.bench = Pump(make_store(**settings))
        self.store: Any = self.bench.store

    def gate(self) -> Peer:
        return self.opened("gate", SocketType.PUB)

    def ear(self, *prefixes: bytes) -> Peer:
        peer = self.opened("control", SocketType.SUB)
        peer.send(b"".join(map(wire.subscribe, prefixes or (b"",))))
        return peer

    def opened(self, name: str, kind: SocketType) -> Peer:
        peer = self.bench.connect_by_name(name)
        peer.send(wire.greeting() + wire.ready(kind))
        peer.output.clear()
        return peer

    def figure(self, name: str) -> int:
        return int(self.store.snapshot()[name])


def accounts(identifiers: Iterable[bytes], domain: bytes = b"day") -> bytes:
    return b"".join(wire.accounting(domain, Status.ACCEPTED, identifier, 0) for identifier in identifiers)


def told(peer: Peer) -> list[Control | None]:
    """The messages since the last call."""
    heard = Parser().feed(wire.greeting() + bytes(peer.output))
    peer.output.clear()
    return [wire.control(one) for one in heard if isinstance(one, tuple)]


# ---- subscribers -----------------------------------------------------------------------------------------------------


def test_only_a_subscriber_that_does_not_read_loses_messages() -> None:
    scene = Scene(posted_max=1000)
    gate, deaf, ear = scene.gate(), scene.ear(), scene.ear()
    deaf.deaf = True
    for number in range(100):
        gate.send(accounts([b"%03d" % number]))
        assert told(ear) == [Control(b"day", "DELAY_UNTIL", b"%03d" % number, START_MS + DAY_MS)]
    lost = scene.figure("lost")
    assert lost > 50
    assert scene.figure("delivered") == 200 - lost
    deaf.deaf = False
    deaf.pull()
    scene.bench.settle()
    heard = told(deaf)
    assert [one.identifier for one in heard if one] == [b"%03d" % number for number in range(100 - lost)]
    gate.send(accounts([b"more"]))
    assert len(told(deaf)) == 1, "it is told again once it reads"
    assert not deaf.session.dropped
    scene.store.audit()


def test_accounting_waits_for_subscribers_whose_turn_is_due() -> None:
    scene = Scene(posted_max=1000, identifiers=4096)
    gate, ear = scene.gate(), scene.ear()
    stream = accounts(b"%04d" % number for number in range(1000))
    gate.take(gate.session.receive(stream, START_NS))
    assert scene.figure("published") < 60, "some more than it can have, then its turn comes"
    scene.bench.settle()
    assert len(told(ear)) == 1000
    assert scene.figure("lost") == 0


def test_messages_of_one_identifier_come_in_order() -> None:
    scene = Scene()
    gate, ear = scene.gate(), scene.ear(b"day", b"d")
    gate.send(accounts([b"me"] * 50))
    assert [one.time_ms for one in told(ear) if one] == [START_MS + days * DAY_MS for days in range(1, 51)]


def test_subscriptions_end_with_their_connection() -> None:
    scene = Scene()
    gate = scene.gate()
    for end in (Peer.close, Peer.half_close):
        end(scene.ear(b"a", b"b"))
        assert scene.figure("subscriptions") == 0
    leaver = scene.ear()
    leaver.session.owner = None
    scene.bench.waiting.discard(leaver)
    del leaver
    gc.collect()
    gate.send(accounts([b"me"]))
    scene.bench.advance(1)
    assert scene.figure("subscriptions") == 0
    scene.store.audit()


def test_many_subscriptions_end_in_slices() -> None:
    """Others are served between them. The number of the connection is free after the last."""
    scene = Scene()
    prefixes = [b"%d" % number for number in range(1024)]
    leavers = [scene.ear(*prefixes) for _ in range(5)]
    numbers = {leaver.session.number for leaver in leavers}
    for leaver in leavers:
        leaver.session.closed(START_NS)
    assert scene.figure("subscriptions") == 5 * 1024
    assert scene.store.session(START_NS, 1).number not in numbers
    counts = []
    for _ in range(30):
        scene.store.tick(START_NS)
        counts.append(scene.figure("subscriptions"))
    scene.store.audit()
    assert counts[-1] == 0
    assert len(counts) > 5
    assert max(before - after for before, after in zip([5 * 1024, *counts], counts, strict=False)) < 1024
    assert scene.store.session(START_NS, 1).number in numbers


def test_a_store_garbage_collected_with_its_connections() -> None:
    scene = Scene()
    for _ in range(3):
        scene.ear(b"a", b"")
    del scene
    gc.collect()


def test_many_subscribes_and_cancels_wait_for_turns() -> None:
    scene = Scene()
    ear = scene.ear(b"a")
    ear.take(ear.session.receive((wire.subscribe(b"day") + wire.cancel(b"day")) * 1000, START_NS))
    assert ear.session.more
    scene.bench.settle()
    assert {("subscribe", "ok", 1001), ("cancel", "ok", 1000)} <= set(scene.store.outcomes())


def test_searching_the_subscribers_of_many_domains_waits_for_turns() -> None:
    names = [b"%02d" % number + b"x" * 253 for number in range(60)]
    scene = Scene(rules=dict.fromkeys(names, parse_rules('{"a": {"rate": "1/day", "burst": 0}}')[b"a"]))
    gate, ear = scene.gate(), scene.ear()
    gate.take(gate.session.receive(b"".join(accounts([b"me"], name) for name in names), START_NS))
    assert 10 < scene.figure("published") < 20, "each takes the steps of 257 prefixes"
    scene.bench.settle()
    assert len(told(ear)) == 60


# ---- protocol --------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_identifier_is_evicted() -> None:
    scene = Scene(identifiers=3)
    gate, ear = scene.gate(), scene.ear()
    gate.send(accounts([b"a", b"b", b"c", b"a", b"d"]))
    assert scene.figure("evicted") == 1
    told(ear)
    gate.send(accounts([b"a", b"c", b"d", b"b"]))
    days = [(one.time_ms - START_MS) // DAY_MS for one in told(ear) if one]
    assert days == [3, 2, 2, 1], "b was forgotten"
    assert (scene.figure("evicted"), scene.figure("identifiers")) == (2, 3)
    scene.store.audit()


def test_domains_with_long_names_leave_room_for_identifiers() -> None:
    scene = Scene(identifiers=10, rules={b"%0254d" % number: RULE for number in range(4000)})
    gate = scene.gate()
    gate.send(accounts([b"a", b"b" * 4096, b"c" * 4096, b"d" * 4096], b"%0254d" % 7))
    assert (scene.figure("evicted"), scene.figure("identifiers")) == (1, 3)
    scene.store.audit()


def test_long_names_evict_only_long_names() -> None:
    """All names share records only. A name of 4,096 bytes needs 68 blocks, of which there are 228 here."""
    scene = Scene(identifiers=100)
    gate = scene.gate()
    gate.send(accounts([b"%d" % number for number in range(90)]))
    gate.send(accounts([b"%d" % number + b"x" * 4090 for number in range(9)]))
    assert (scene.figure("evicted"), scene.figure("identifiers")) == (6, 93)
    gate.send(accounts([b"and %d" % number for number in range(8)]))
    assert (scene.figure("evicted"), scene.figure("identifiers")) == (7, 100), "the oldest of all"
    scene.store.audit()


def test_a_rejected_request_counts_as_use_of_its_identifier() -> None:
    scene = Scene(identifiers=2)
    gate, ear = scene.gate(), scene.ear()
    gate.send(accounts([b"a", b"b"]) + wire.accounting(b"day", Status.REJECTED, b"a", 0) + accounts([b"c"]))
    told(ear)
    gate.send(accounts([b"a"]))
    (heard,) = told(ear)
    assert heard is not None
    assert heard.time_ms == START_MS + 2 * DAY_MS, "b was forgotten"
    scene.store.audit()


def test_a_rate_is_exact_for_any_number_of_requests() -> None:
    """Of 7 a second each takes 142,857,142 and 6/7 nanoseconds: without the fraction the error would be a millisecond
    here."""
    scene = Scene(rules=parse_rules('{"seven": {"rate": "7/sec", "burst": 0}}'))
    gate = scene.gate()
    batch = accounts([b"me"] * 4003, b"seven")
    for _ in range(50):
        gate.send(batch)
    ear = scene.ear()
    gate.send(accounts([b"me"] * 7, b"seven"))
    count = 50 * 4003 + 7
    assert count * 6 % 7 == 1, "it has to wait for a seventh of a millisecond more than whole ones"
    heard = told(ear)[-1]
    assert heard is not None
    assert heard.time_ms - START_MS == -(-count * 1000 // 7)


def test_the_longest_names_find_room() -> None:
    scene = Scene(identifiers=1)
    gate = scene.gate()
    gate.send(accounts([b"%d" % number + b"x" * 4095 for number in range(5)]))
    assert (scene.figure("evicted"), scene.figure("identifiers")) == (4, 1)
    scene.store.audit()


def test_identifiers_without_a_delay_are_swept() -> None:
    scene = Scene()
    scene.gate().send(accounts([b"%d" % number for number in range(1000)], b"second"))
    assert scene.figure("identifiers") == 1000
    scene.bench.advance(1_100_000_000)
    assert (scene.figure("identifiers"), scene.figure("expired")) == (0, 1000)


def test_a_store_needs_room_for_an_identifier() -> None:
    with pytest.raises(ValueError, match="there must be room for at least one identifier"):
        make_store(identifiers=0)


# ---- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        RULE._replace(parts=0), RULE._replace(parts=1 << 31), RULE._replace(interval=Span(1, 1)),
        RULE._replace(burst=Span(1, 1)), RULE._replace(interval=Span(-1, 0)), RULE._replace(burst=Span(1 << 60, 0)),
    ],
)  # fmt: skip
def test_an_impossible_rule_is_refused(rule: Rule) -> None:
    with pytest.raises(ValueError, match="an impossible rule"):
        make_store({b"a": rule})


def test_domains_with_identifiers_count_for_the_bound() -> None:
    scene = Scene(rules=dict.fromkeys((b"%d" % number for number in range(LIMIT_DOMAINS)), RULE), identifiers=10)
    hour = parse_rules('{"0": {"rate": "1/hour", "burst": 0}}')
    scene.store.load_rules(hour)
    scene.gate().send(accounts([b"me"], b"0"))
    full = dict.fromkeys((b"%d" % number for number in range(1, LIMIT_DOMAINS + 1)), RULE)
    with pytest.raises(ValueError, match="4096 domains are possible, including those that still have identifiers"):
        scene.store.load_rules(full)
    assert scene.figure("domains") == 1, "nothing has changed"
    scene.bench.advance(2 * 3600 * 10**9)
    scene.store.load_rules(full)
    assert scene.figure("domains") == LIMIT_DOMAINS
    scene.store.audit()


def test_a_domain_keeps_its_figures_until_it_is_freed() -> None:
    scene = Scene()
    gate = scene.gate()
    gate.send(accounts([b"me"], b"gone"))
    scene.bench.happen("changed")
    gate.send(accounts([b"me"], b"gone"))
    assert ("accounting", "unknown_domain", 1) in scene.store.outcomes()
    before = scene.figure("domains")
    scene.bench.advance(2 * DAY_MS * 1_000_000)
    assert scene.figure("domains") == before - 1


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_outcomes_are_counted_with_their_causes() -> None:
    scene = Scene()
    gate = scene.gate()
    gate.send(accounts([b"a"], b"second") + accounts([b"a"]) + wire.accounting(b"day", Status.REJECTED, b"a", 0))
    scene.bench.connect_by_name("gate").send(b"GET /")
    scene.bench.connect_by_name("gate").send(wire.greeting() + b"\xff")
    gate.send(b"\x40\0")
    assert set(scene.store.outcomes()) == {
        ("handshake", "ok", 1), ("accepted", "ok", 1), ("accepted", "throttled", 1), ("rejected", "ok", 1),
        ("unknown", "framing_lost", 2),
    }  # fmt: skip
    assert (scene.figure("broken:not_zmtp"), scene.figure("broken:flags")) == (1, 1)


def test_slow_handshakes_and_silent_peers_are_closed() -> None:
    scene = Scene()
    slow = scene.bench.connect_by_name("gate")
    quiet = scene.gate()
    quiet.send(wire.ping(60))
    scene.bench.advance(31 * 10**9)
    assert slow.session.closing
    assert not quiet.session.closing
    assert ("handshake", "timed_out", 1) in scene.store.outcomes()
    scene.bench.advance(31 * 10**9)
    assert quiet.session.closing
    assert scene.figure("silent") == 1


def test_open_store_makes_sessions_of_both_ports() -> None:
    store = _session.open_store(identifiers=1, message_max=8192, posted_max=1, hash_key=bytes(16))
    assert isinstance(store, SmockronStore)
    assert [store.session(0, port).port for port in (0, 1)] == [0, 1]  # type: ignore[attr-defined]
