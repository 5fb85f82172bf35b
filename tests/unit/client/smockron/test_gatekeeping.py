"""A gatekeeper's decisions without sockets, threads or clocks: the test gives the times and the bytes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client._addresses import Address, Tls
from counterd.client.smockron._delays import STALE_MAX, DelayCache, DelayedRequests
from counterd.client.smockron._gatekeeping import (
    BATCH,
    BLIND_S,
    DOMAINS_MAX,
    HELD_NS,
    Core,
    Decision,
    Master,
    News,
    Options,
    Stats,
    Verdict,
)
from counterd.client.smockron._masters import Pair, read_masters
from counterd.client.smockron._zmtp import JOIN_S, ZmtpSession
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import Command, Parser, SocketType
from unit.client.smockron.test_zmtp import OLD, items, ready

if TYPE_CHECKING:
    from collections.abc import Callable

NOW = 1_800_000_000_000  # ms of Unix time
MS = 1_000_000  # ns
STARTED_NS = NOW * MS - 100 * 1000 * MS  # when the machine started: 100 s ago
PASS, DELAY, REJECT = Verdict.PASS, Verdict.DELAY, Verdict.REJECT


# ---- what was told ---------------------------------------------------------------------------------------------------


def test_the_latest_time_of_an_identifier_counts_until_it_has_passed() -> None:
    told = DelayCache(10)
    times = told.new_domain()
    told.remember(times, b"a", 100, 0)
    told.remember(times, b"a", 90, 0)
    assert times == {b"a": 100}
    told.remember(times, b"a", 110, 0)
    told.remember(times, b"late", 50, 50)
    assert (times, told.count) == ({b"a": 110}, 1)
    told.expire(109)
    assert times == {b"a": 110}
    told.expire(110)
    assert (times, told.count) == ({}, 0)


def test_domains_are_separate_and_a_forgotten_identifier_can_be_told_again() -> None:
    told = DelayCache(10)
    one, other = told.new_domain(), told.new_domain()
    told.remember(one, b"a", 100, 0)
    told.remember(other, b"a", 200, 0)
    told.forget(one, b"a")
    told.forget(one, b"never heard of")
    assert (one, other, told.count) == ({}, {b"a": 200}, 1)
    told.remember(one, b"a", 100, 0)
    told.expire(100)
    assert (one, other, told.count) == ({}, {b"a": 200}, 1)


def test_a_full_cache_evicts_the_earliest_time() -> None:
    told = DelayCache(2)
    one, other = told.new_domain(), told.new_domain()
    told.remember(one, b"a", 300, 0)
    told.remember(other, b"b", 100, 0)
    told.remember(one, b"c", 200, 0)
    assert (one, other, told.evicted) == ({b"a": 300, b"c": 200}, {}, 1)
    told.remember(one, b"d", 150, 0)
    assert (one, told.count, told.evicted) == ({b"a": 300, b"c": 200}, 2, 2)


def test_an_identifier_told_again_and_again_takes_no_more_memory() -> None:
    told = DelayCache(10)
    times = told.new_domain()
    for until in range(1, 10_000):
        told.remember(times, b"a", until, 0)
    assert len(told._heap) <= 2 + STALE_MAX
    told.expire(9_998)
    assert (times, told.count, told.evicted) == ({b"a": 9_999}, 1, 0)


def test_delays_end_at_their_time_or_before() -> None:
    delays = DelayedRequests()
    first, second = delays.add(100), delays.add(200)
    assert delays.count(99) == 2
    delays.remove(second)
    delays.remove(second)
    assert delays.count(99) == 1
    assert delays.count(100) == 0
    delays.remove(first)
    third = delays.add(300)
    assert len({first, second, third}) == 3
    assert delays.count(299) == 1
    assert not delays.count(300)
    assert not delays._heap


def test_delays_that_end_before_their_time_take_no_more_memory() -> None:
    delays = DelayedRequests()
    stays = delays.add(2_000_000)
    for until in range(1_000_000, 1_010_000):
        delays.remove(delays.add(until))
    assert len(delays._heap) <= 2 + STALE_MAX
    assert delays.count(1_999_999) == 1
    delays.remove(stays)
    assert delays.count(0) == 0


# ---- where masters are -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "accounting", "control"),
    [
        ("h", Address("h", 10004), Address("h", 10005)),
        ("h:7", Address("h", 7), Address("h", 8)),
        ("::1", Address("::1", 10004), Address("::1", 10005)),
        ("[::1]:7", Address("::1", 7), Address("::1", 8)),
        ("smockron://h:7", Address("h", 7), Address("h", 8)),
        ("smockrons://h", Address("h", 10004, tls=Tls()), Address("h", 10005, tls=Tls())),
        (("h", "i"), Address("h", 10004), Address("i", 10005)),
        (("h:65535", "smockron+unix:///c"), Address("h", 65535), Address(path="/c")),
        (("smockron+unix:///a", "smockron+unix:///c"), Address(path="/a"), Address(path="/c")),
    ],
)
def test_addresses_of_a_master(where: Any, accounting: Address, control: Address) -> None:
    pair = Pair(accounting, control)
    assert read_masters(where, False) == (pair, {})
    assert read_masters({"é": where, b"\xff": where}, False) == (None, {"é".encode(): pair, b"\xff": pair})


def test_tls_is_for_both_ports() -> None:
    pair, _ = read_masters("h", True)
    assert pair is not None
    assert [address.tls for address in pair] == [Tls(), Tls()]


@pytest.mark.parametrize(
    ("where", "wrong"),
    [
        ("smockron+unix:///a", r"a master on Unix sockets needs two addresses, \(ACCOUNTING, CONTROL\)"),
        ("h:65535", "there is no next port for control"),
        ("tcp://h:7", "expected smockron://HOST:PORT"),
        ({}, "the gatekeeper needs at least one master"),
        ("a..b", "'a..b' is not a valid host name: "),
        ((64 * "a", "b"), "is not a valid host name: "),
        ("smockron://a..b:7", "'a..b' is not a valid host name: "),
        (("a", "b", "c"), r"a master is one address or a pair \(ACCOUNTING, CONTROL\)"),
    ],
)
def test_invalid_addresses_of_masters_are_refused(where: Any, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        read_masters(where, False)


# ---- deciding --------------------------------------------------------------------------------------------------------


def core_of(masters: Any = "h", domain: str = "d", **options: Any) -> Core:
    return Core(masters, domain, False, Options(**options))


def decide(
    core: Core, identifier: str | bytes, domain: str | bytes | None, log_info: str | bytes, now: int, *, set_ms: int = 0
) -> Decision:
    """Decides at this time. now: Unix time in ms, as it would be if the wall clock had not been set by so much."""
    return core.decide(identifier, domain, log_info, now * MS - STARTED_NS, (now + set_ms) * MS)


def feed(core: Core, master: Master, session: ZmtpSession, data: bytes, now: int = NOW, *, set_ms: int = 0) -> News:
    return core.feed(master, session, data, now * MS - STARTED_NS, (now + set_ms) * MS)


def take(core: Core, master: Master, session: ZmtpSession, now: int) -> bytes:
    return core.take(master, session, now * MS - STARTED_NS)


def stats(core: Core, now: int) -> Stats:
    return core.stats(now * MS - STARTED_NS)


def pong(master: Master) -> bytes:
    """The PONG of a master that has processed all subscriptions."""
    return wire.command(b"PONG", len(master.gates).to_bytes(4, "big"))


def connect(core: Core, says: bytes = wire.subscribe(b""), master: Master | None = None) -> Master:
    """Performs the handshakes with a master. says: what it sends on its accounting port after that."""
    master = master or core.masters[0]
    for session, more in ((master.control, pong(master)), (master.accounting, says)):
        session.opened(100.0)
        kind = SocketType.SUB if session.kind is SocketType.PUB else SocketType.PUB
        feed(core, master, session, wire.greeting() + wire.ready(kind) + more)
        session.out.clear()
    return master


def tell(core: Core, identifier: bytes, until: int, *, word: bytes = b"DELAY_UNTIL", domain: bytes = b"d") -> None:
    said = wire.message(wire.topic(domain), word, identifier, b"%d" % until)
    feed(core, core.masters[0], core.masters[0].control, said)


def accounted(core: Core, master: Master | None = None, now: int = NOW) -> list[Any]:
    master = master or core.masters[0]
    return items(take(core, master, master.accounting, now))


def test_a_request_of_an_unknown_identifier_passes() -> None:
    core = core_of()
    connect(core)
    assert decide(core, "é", None, b"", NOW) == Decision(PASS)
    assert decide(core, b"", b"d", "log", NOW + 1) == Decision(PASS)
    assert decide(core, b"x" * 256, "d", b"y" * 2000, NOW + 2) == Decision(PASS)
    assert accounted(core) == [
        (b"d\0", b"ACCEPTED", "é".encode(), b"%d" % NOW, b"", b""),
        (b"d\0", b"ACCEPTED", b"", b"%d" % (NOW + 1), b"", b"log"),
        (b"d\0", b"ACCEPTED", b"x" * 256, b"%d" % (NOW + 2), b"", b"y" * 1024),
    ]
    assert stats(core, NOW)[:3] == (3, 0, 0)


@pytest.mark.parametrize("identifier", [b"", b"a", b"x" * 255, b"x" * 256, b"x" * 4096])
@pytest.mark.parametrize("unix_ms", [0, 7, NOW])
def test_accounting_messages_equal_those_of_the_wire_module(identifier: bytes, unix_ms: int) -> None:
    core = core_of(max_delay_s=0)
    master = connect(core)

    def message() -> bytes:
        decide(core, identifier, None, b"", NOW, set_ms=unix_ms - NOW)
        return take(core, master, master.accounting, NOW)

    assert message() == wire.accounting(b"d", wire.Status.ACCEPTED, identifier, unix_ms)
    tell(core, identifier, NOW + 1)
    assert message() == wire.accounting(b"d", wire.Status.REJECTED, identifier, unix_ms)


def test_a_request_is_delayed_until_the_time_that_was_told() -> None:
    core = core_of()
    connect(core)
    tell(core, b"a", NOW + 800)
    assert decide(core, "a", None, b"i", NOW) == Decision(DELAY, 0.8, NOW + 800, 1)
    assert decide(core, "a", None, b"", NOW + 799) == Decision(DELAY, 0.001, NOW + 800, 2)
    assert decide(core, "a", None, b"", NOW + 800) == Decision(PASS)
    assert accounted(core) == [
        (b"d\0", b"DELAYED", b"a", b"%d" % NOW, b"%d" % (NOW + 800), b"i"),
        (b"d\0", b"DELAYED", b"a", b"%d" % (NOW + 799), b"%d" % (NOW + 800), b""),
        (b"d\0", b"ACCEPTED", b"a", b"%d" % (NOW + 800), b"", b""),
    ]


def test_five_seconds_are_delayed_and_more_is_rejected() -> None:
    core = core_of()
    connect(core)
    tell(core, b"a", NOW + 5001)
    assert decide(core, "a", None, b"", NOW) == Decision(REJECT, 5.001, NOW + 5001)
    assert decide(core, "a", None, b"", NOW + 1) == Decision(DELAY, 5.0, NOW + 5001, 1)
    assert [message[1] for message in accounted(core)] == [b"REJECTED", b"DELAYED"]


def test_delayed_requests_are_limited() -> None:
    core = core_of(max_delayed=2)
    connect(core)
    tell(core, b"a", NOW + 1000)
    tell(core, b"b", NOW + 2000)
    first = decide(core, "a", None, b"", NOW)
    assert decide(core, "b", None, b"", NOW).verdict is DELAY
    assert decide(core, "a", None, b"", NOW) == Decision(REJECT, 1.0, NOW + 1000)
    core.gave_up(first)
    core.gave_up(first)
    core.gave_up(Decision(PASS))
    assert decide(core, "a", None, b"", NOW).verdict is DELAY
    assert decide(core, "b", None, b"", NOW + 999).verdict is REJECT
    assert decide(core, "b", None, b"", NOW + 1000).verdict is DELAY
    assert stats(core, NOW + 1000).delaying == 2


@pytest.mark.parametrize(("rejected", "told"), [("all", 1000), ("none", 0), (1.0, 1000), (0, 0)])
def test_a_master_is_told_of_rejected_requests_or_not(rejected: Any, told: int) -> None:
    core = core_of(rejected=rejected)
    connect(core)
    tell(core, b"a", NOW + 9000)
    for _ in range(1000):
        assert decide(core, "a", None, b"", NOW).verdict is REJECT
    assert len(accounted(core)) == told
    assert stats(core, NOW).rejected == 1000


def test_a_share_of_the_rejections_is_accounted(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = iter([0.1, 0.25, 0.9, 0.2499])
    monkeypatch.setattr("random.random", lambda: next(drawn))
    core = core_of(rejected=0.25)
    connect(core)
    tell(core, b"a", NOW + 9000)
    for _ in range(4):
        decide(core, "a", None, b"", NOW)
    assert len(accounted(core)) == 2


def test_identifiers_longer_than_a_request_can_have_are_ignored() -> None:
    core = core_of()
    connect(core)
    for identifier in (b"x" * 4096, b"x" * 4097):
        tell(core, identifier, NOW + 800)
    figures = stats(core, NOW)
    assert (figures.told, figures.unknown, figures.remembered) == (1, 1, 1)


def test_times_out_of_range_are_ignored() -> None:
    core = core_of()
    connect(core)
    tell(core, b"a", 9_999_999_999_999_999)
    assert decide(core, "a", None, b"", NOW).verdict is PASS
    tell(core, b"a", NOW + 10 * 365 * 86_400_000)
    assert decide(core, "a", None, b"", NOW).verdict is REJECT


def test_control_messages_concern_one_domain_and_can_be_forgotten() -> None:
    core = core_of()
    connect(core)
    decide(core, "a", "e", b"", NOW)
    tell(core, b"a", NOW + 800, domain=b"e")
    tell(core, b"a", NOW + 800, domain=b"never used")
    assert decide(core, "a", None, b"", NOW).verdict is PASS
    assert decide(core, "a", "e", b"", NOW).verdict is DELAY
    tell(core, b"a", NOW, word=b"FORGET", domain=b"e")
    assert decide(core, "a", b"e", b"", NOW).verdict is PASS
    tell(core, b"a", NOW + 800, word=b"FUTURE")
    figures = stats(core, NOW)
    assert (figures.told, figures.unknown, figures.remembered) == (2, 2, 0)


def test_invalid_domains_and_identifiers_are_refused() -> None:
    core = core_of()
    connect(core)
    for wrong in ("d" * 256, "d\0"):
        with pytest.raises(ValueError, match="the name of a domain can have at most 255 bytes and no NUL at its end"):
            decide(core, "a", wrong, b"", NOW)
    with pytest.raises(ValueError, match="an identifier can have at most 4096 bytes"):
        decide(core, "a" * 4097, None, b"", NOW)
    for number in range(1, DOMAINS_MAX):
        decide(core, "a", str(number), b"", NOW)
    with pytest.raises(ValueError, match="the master at h:10004 has 4096 domains already"):
        decide(core, "a", "one more", b"", NOW)
    while accounted(core):
        pass
    with pytest.raises(TypeError, match="expected text or bytes"):
        decide(core, 5, None, b"", NOW)  # type: ignore[arg-type]
    assert accounted(core) == []
    with pytest.raises(ValueError, match="no master is configured for the domain b'e'"):
        decide(core_of({"d": "h"}), "a", "e", b"", NOW)


@pytest.mark.parametrize(
    "options",
    [
        {"max_delay_s": -1}, {"max_delay_s": float("nan")}, {"max_delayed": -1}, {"max_remembered": 0}, {"max_held": 0},
        {"heartbeat": 0}, {"heartbeat": 2185}, {"timeout": 0}, {"rejected": "some"}, {"rejected": 1.5},
    ],
)  # fmt: skip
def test_invalid_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(max_|heartbeat|timeout|rejected)"):
        Options(**options)


# ---- the wall clock --------------------------------------------------------------------------------------------------

HOUR_MS = 3_600_000
SET_MS = pytest.mark.parametrize("set_ms", [-HOUR_MS, 0, HOUR_MS])


@SET_MS
def test_setting_the_wall_clock_changes_no_delay(set_ms: int) -> None:
    core = core_of(max_delayed=1)
    connect(core)
    tell(core, b"a", NOW + 1000)
    until_ms = NOW + 1000 + set_ms  # as the clock shows it then
    assert decide(core, "a", None, b"", NOW + 400, set_ms=set_ms) == Decision(DELAY, 0.6, until_ms, 1)
    assert decide(core, "a", None, b"", NOW + 999, set_ms=set_ms) == Decision(REJECT, 0.001, until_ms)
    assert decide(core, "a", None, b"", NOW + 1000, set_ms=set_ms) == Decision(PASS)
    assert stats(core, NOW + 1000).delaying == 0
    assert [message[3:5] for message in accounted(core)] == [
        (b"%d" % (NOW + 400 + set_ms), b"%d" % until_ms),
        (b"%d" % (NOW + 999 + set_ms), b""),
        (b"%d" % (NOW + 1000 + set_ms), b""),
    ]


@SET_MS
def test_later_control_messages_use_the_wall_clock_as_it_is_then(set_ms: int) -> None:
    core = core_of()
    master = connect(core)
    tell(core, b"a", NOW + 1000)
    said = wire.message(b"d\0", b"DELAY_UNTIL", b"a", b"%d" % (NOW + 1500 + set_ms))
    feed(core, master, master.control, said, NOW + 500, set_ms=set_ms)
    assert decide(core, "a", None, b"", NOW + 500, set_ms=set_ms).delay_s == 1.0


@SET_MS
def test_the_wall_clock_does_not_matter_to_how_long_messages_are_held(set_ms: int) -> None:
    core = core_of()
    decide(core, "a", None, b"", NOW, set_ms=set_ms)
    decide(core, "a", None, b"", NOW + 1)
    connect(core)
    assert len(accounted(core, now=NOW + HELD_NS // MS)) == 2


# ---- holding back ----------------------------------------------------------------------------------------------------


def test_messages_wait_until_the_master_has_subscribed_to_their_domain() -> None:
    core = core_of()
    decide(core, "a", None, b"", NOW)
    decide(core, "a", "e", b"", NOW)
    master = connect(core, says=b"")
    assert not master.is_ready
    assert accounted(core) == []
    feed(core, master, master.accounting, wire.subscribe(b"d\0x") + wire.message(b"\1d"))
    assert [message[0] for message in accounted(core)] == [b"d\0"]
    feed(core, master, master.accounting, wire.subscribe(b""))
    assert [message[0] for message in accounted(core)] == [b"e\0"]
    assert stats(core, NOW).sent == 2


def test_too_many_or_too_old_messages_are_dropped_oldest_first() -> None:
    core = core_of(max_held=3)
    for number in range(5):
        decide(core, str(number), None, b"", NOW + 1000 * number)
    assert stats(core, NOW)[9:11] == (3, 2)
    connect(core)
    now = NOW + 3000 + HELD_NS // MS
    assert [message[2] for message in accounted(core, now=now)] == [b"3", b"4"]
    figures = stats(core, now)
    assert (figures.sent, figures.held, figures.dropped) == (2, 0, 3)


def test_old_messages_are_dropped_while_the_master_is_away() -> None:
    core = core_of()
    for _ in range(100):
        decide(core, "a", None, b"", NOW)
    decide(core, "a", None, b"", NOW + HELD_NS // MS)
    assert stats(core, NOW).held == 101
    decide(core, "a", None, b"", NOW + HELD_NS // MS + 1)
    assert stats(core, NOW)[9:11] == (2, 100)
    connect(core)
    assert len(accounted(core)) == 2


def test_a_batch_of_messages_is_bounded() -> None:
    core = core_of()
    decide(core, "a", "e", b"", NOW)
    for _ in range(BATCH + 1):
        decide(core, "a", None, b"", NOW)
    connect(core)
    assert [len(accounted(core)) for _ in range(3)] == [BATCH, 2, 0]
    assert stats(core, NOW).sent == BATCH + 2


def test_a_master_may_subscribe_to_each_of_many_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work is for each domain and each subscription, not for each pair, and only when something changes."""
    directed: list[int] = []
    direct = Core._direct
    monkeypatch.setattr(Core, "_direct", lambda core, master: (directed.append(1), direct(core, master))[1])
    core = core_of()
    names = [b"%d" % number for number in range(1, DOMAINS_MAX)]
    for name in names:
        decide(core, "a", name, b"", NOW)
    assert not directed
    master = connect(core, b"".join(wire.subscribe(wire.topic(name)) for name in names))
    assert len(directed) < 5
    assert sum(gate.flow.name == "OPEN" for gate in master.gates) == len(names), "all but the default"
    directed.clear()
    feed(core, master, master.accounting, wire.command(b"PONG"))
    assert not directed


def test_a_cancelled_subscription_stops_accounting_messages() -> None:
    core = core_of()
    master = connect(core, wire.subscribe(b"d\0"))
    decide(core, "a", None, b"", NOW)
    feed(core, master, master.accounting, wire.cancel(b"d\0"))
    decide(core, "a", None, b"", NOW)
    assert accounted(core) == []
    assert (stats(core, NOW).unwanted, stats(core, NOW).held) == (2, 0)
    feed(core, master, master.accounting, wire.message(b"\1"))
    decide(core, "b", None, b"", NOW)
    assert [message[2] for message in accounted(core)] == [b"b"]


def test_the_sender_is_woken_once() -> None:
    core = core_of()
    stirred: list[int] = []
    core.wake = lambda: stirred.append(1)
    decide(core, "a", None, b"", NOW)
    assert stirred == []
    connect(core)
    decide(core, "a", None, b"", NOW)
    decide(core, "a", None, b"", NOW)
    assert stirred == [1]
    core.is_awake = False
    decide(core, "a", None, b"", NOW)
    assert stirred == [1, 1]


# ---- masters ---------------------------------------------------------------------------------------------------------


def test_each_domain_has_its_master() -> None:
    core = core_of({"d": "h:1", "e": "i:1", "f": "h:1"})
    assert [[gate.name for gate in master.gates] for master in core.masters] == [[b"d", b"f"], [b"e"]]
    for master in core.masters:
        connect(core, master=master)
    for domain in "def":
        decide(core, "a", domain, b"", NOW)
    assert [[message[0] for message in accounted(core, master)] for master in core.masters] == [
        [b"d\0", b"f\0"],
        [b"e\0"],
    ]
    tell(core, b"a", NOW + 100, domain=b"e")  # whose master this is not
    assert decide(core, "a", "e", b"", NOW).verdict is PASS
    assert core.where == "h:1, i:1"


@pytest.mark.parametrize("greeting", [wire.greeting(), bytes(OLD)])
def test_a_master_is_ready_once_it_has_taken_the_subscriptions(greeting: bytes) -> None:
    """A PONG says so."""
    core = core_of()
    master = core.masters[0]
    master.control.opened(100.0)
    feed(core, master, master.control, greeting + wire.ready(SocketType.PUB))
    master.accounting.opened(100.0)
    feed(core, master, master.accounting, wire.greeting() + wire.ready(SocketType.SUB) + wire.subscribe(b""))
    assert not master.is_ready
    feed(core, master, master.control, pong(master))
    assert master.is_ready
    core.lost(master, master.control, "it ended", 101.0)
    assert not master.is_ready


def test_a_new_domain_is_subscribed_to_at_once() -> None:
    core = core_of()
    master = connect(core)
    stirred: list[int] = []
    core.wake = lambda: stirred.append(1)
    decide(core, "a", "e", b"", NOW)
    assert stirred
    assert items(take(core, master, master.control, NOW)) == [Command(b"SUBSCRIBE", b"e\0")]


@pytest.mark.parametrize("answers", [True, False])
def test_a_new_domain_waits_until_its_control_messages_arrive(answers: bool) -> None:
    """Else the effect of its first messages would be missed. Others do not wait for it, and it does not for ever."""
    core = core_of()
    master = core.masters[0]
    for session, kind in ((master.control, SocketType.PUB), (master.accounting, SocketType.SUB)):
        session.opened(100.0)
        feed(core, master, session, (wire.greeting() if answers else bytes(OLD)) + wire.ready(kind))
    feed(core, master, master.accounting, wire.subscribe(b""))
    core.look(master, master.control, 100.0 + JOIN_S)
    if answers:
        feed(core, master, master.control, pong(master))
    for session in master.sessions:
        session.out.clear()
    assert master.is_ready
    decide(core, "a", "e", b"", NOW)
    decide(core, "a", None, b"", NOW)
    assert [message[0] for message in accounted(core)] == [b"d\0"]
    core.look(master, master.control, 100.0 + JOIN_S)
    subscribes, asks = items(take(core, master, master.control, NOW))
    assert subscribes == (Command(b"SUBSCRIBE", b"e\0") if answers else (b"\1e\0",))
    assert asks.name == b"PING"
    stirred: list[int] = []
    core.wake, core.is_awake = lambda: stirred.append(1), False
    if answers:
        feed(core, master, master.control, pong(master))
    else:
        assert master.due == 100.0 + 2 * JOIN_S
        core.look(master, master.control, 100.0 + 2 * JOIN_S)
    assert stirred
    assert [message[0] for message in accounted(core)] == [b"e\0"]


def test_accounting_goes_on_after_a_short_time_without_control_messages() -> None:
    core = core_of()
    master = connect(core)
    core.lost(master, master.control, "it ended", 100.0)
    core.lost(master, master.control, "it cannot be made again", 100.0 + BLIND_S / 2)
    decide(core, "a", None, b"", NOW)
    decide(core, "a", "e", b"", NOW)
    assert accounted(core) == [], "it may be back at once"
    master.control.retry_at = 200.0
    assert master.due == 100.0 + BLIND_S
    stirred: list[int] = []
    core.wake, core.is_awake = lambda: stirred.append(1), False
    core.look(master, master.accounting, 100.0 + BLIND_S)
    assert stirred
    assert [message[0] for message in accounted(core)] == [b"d\0", b"e\0"]
    assert master.due > 101.0 + BLIND_S, "nothing more is due"
    assert BLIND_S < HELD_NS / 1e9, "nothing is dropped"
    master.control.is_connecting = True
    core.look(master, master.accounting, 101.0)
    decide(core, "a", None, b"", NOW)
    assert [message[0] for message in accounted(core)] == [b"d\0"]
    master.control.opened(101.0)
    core.look(master, master.control, 101.0)
    decide(core, "a", None, b"", NOW)
    assert accounted(core) == [], "its handshake has begun"
    feed(core, master, master.control, wire.greeting() + wire.ready(SocketType.PUB))
    decide(core, "a", None, b"", NOW)
    assert accounted(core) == [], "it is back, and has not taken the subscriptions"
    feed(core, master, master.control, pong(master))
    assert [message[0] for message in accounted(core)] == 2 * [b"d\0"]


def test_accounting_waits_for_control_again_after_it_was_lost() -> None:
    core = core_of()
    master = connect(core)
    core.lost(master, master.control, "it ended", 100.0)
    core.look(master, master.accounting, 100.0 + BLIND_S)
    core.lost(master, master.accounting, "it ended too", 103.0)
    master.accounting.opened(104.0)
    said = wire.greeting() + wire.ready(SocketType.SUB) + wire.subscribe(b"")
    core.feed(master, master.accounting, said, 104 * 10**9, NOW * MS)
    master.accounting.out.clear()
    decide(core, "a", None, b"", NOW)
    assert accounted(core) == []
    assert master.wants(master.control, 104.0), "the master is back, so the other port is tried at once"
    core.look(master, master.accounting, 104.0 + BLIND_S)
    assert len(accounted(core)) == 1


def test_a_closing_gatekeeper_does_not_wait_for_control_messages() -> None:
    core = core_of()
    master = connect(core)
    decide(core, "a", "e", b"", NOW)
    core.lost(master, master.control, "it ended", 100.0)
    decide(core, "a", None, b"", NOW)
    assert accounted(core) == []
    core.leave()
    assert core.has_unsent()
    assert [message[0] for message in accounted(core)] == [b"e\0", b"d\0"]
    assert not core.has_unsent()


def test_accounting_is_connected_after_control_unless_that_fails() -> None:
    master = core_of().masters[0]
    assert master.wants(master.control, 0.0)
    assert not master.wants(master.accounting, 0.0)
    master.control.is_connecting = True
    assert not master.wants(master.control, 0.0)
    master.control.opened(0.0)
    assert not master.wants(master.accounting, 0.0)
    assert master.due == 5.0
    ready(master.control, now=0.0)
    assert master.wants(master.accounting, 0.0)
    master.control.reset()
    master.control.closed(0.0)
    assert not master.wants(master.control, 0.0)
    assert master.wants(master.control, 0.05)
    assert master.wants(master.accounting, 0.0)
    assert 0 < master.due <= 0.05


def test_an_outage_is_reported_once_and_requests_pass() -> None:
    core = core_of()
    master = core.masters[0]
    away = logging.WARNING, "cannot reach the master at %s; requests pass: %s", master.accounting.address
    assert core.lost(master, master.control, "refused", 50.0) == (*away, "refused")
    assert core.lost(master, master.accounting, "refused too", 51.0) is None
    assert stats(core, NOW).away == {"h:10004": "refused"}
    assert decide(core, "a", None, b"", NOW).verdict is PASS
    assert not core.has_unsent()
    connect(core, b"")
    back = logging.INFO, "the master at %s is back after %.1f s", master.accounting.address, 50.0
    assert feed(core, master, master.accounting, wire.subscribe(b"")) == back
    assert feed(core, master, master.accounting, wire.subscribe(b"d")) is None
    assert accounted(core)
    assert stats(core, NOW).away == {}
    tell(core, b"a", NOW + 800)
    assert core.lost(master, master.accounting, "it ended", 102.0) == (*away, "it ended")
    assert decide(core, "a", None, b"", NOW).verdict is DELAY
    assert decide(core, "b", None, b"", NOW).verdict is PASS
    assert stats(core, NOW)[9:] == (2, 0, 0, 3, {"h:10004": "it ended"})


def test_an_outage_ends_when_a_subscription_counts_without_a_pong() -> None:
    core = core_of()
    master = core.masters[0]
    core.lost(master, master.control, "refused", 50.0)
    decide(core, "a", None, b"", NOW)
    for session in master.sessions:
        session.opened(100.0)
    feed(core, master, master.control, bytes(OLD) + wire.ready(SocketType.PUB))
    feed(core, master, master.accounting, wire.greeting() + wire.ready(SocketType.SUB) + wire.subscribe(b""))
    assert core.look(master, master.control, 100.0) is None
    assert stats(core, NOW).held == 1
    back = logging.INFO, "the master at %s is back after %.1f s", master.accounting.address, 50.0 + JOIN_S
    assert core.look(master, master.control, 100.0 + JOIN_S) == back
    assert core.look(master, master.control, 100.0 + JOIN_S) is None
    assert core.has_unsent()
    assert stats(core, NOW).away == {}
    assert b"ACCEPTED" in take(core, master, master.accounting, NOW)


def test_a_forked_child_is_unconnected_and_keeps_the_known_delays() -> None:
    core = core_of()
    master = connect(core)
    tell(core, b"a", NOW + 800)
    decide(core, "a", None, b"", NOW)
    core.reset()
    assert (master.control.is_open, master.accounting.is_ready) == (False, False)
    assert (stats(core, NOW).held, stats(core, NOW).delaying) == (0, 0)
    assert decide(core, "a", None, b"", NOW).verdict is DELAY
    connect(core)
    assert [message[1] for message in accounted(core)] == [b"DELAYED"]


@pytest.mark.parametrize("say", [wire.subscribe, lambda prefix: wire.message(b"\1" + prefix)])
def test_a_stream_may_be_cut_anywhere(say: Callable[[bytes], bytes]) -> None:
    core = core_of()
    master = core.masters[0]
    master.control.opened(100.0)
    feed(core, master, master.control, wire.greeting() + wire.ready(SocketType.PUB) + pong(master))
    master.accounting.opened(100.0)
    decide(core, "a", None, b"", NOW)
    for byte in wire.greeting() + wire.ready(SocketType.SUB) + say(b"d") + wire.ping(1, b"x"):
        feed(core, master, master.accounting, bytes((byte,)))
    found = Parser().feed(take(core, master, master.accounting, NOW))
    assert found[-2:] == [Command(b"PONG", b"x"), (b"d\0", b"ACCEPTED", b"a", b"%d" % NOW, b"", b"")]
