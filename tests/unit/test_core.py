"""The session machine: states, waits, skipping, barriers, and the region, driven with a protocol made up for the
tests."""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from counterd import _core
from counterd._core import Session, Store
from counterd.protocols import find_protocols
from native import build, load

waiting: Any = load("_waiting", build("_waiting", Path(__file__).parent))

KEY = bytes(16)
PIECE = 200_000
OUTPUT_MAX = 262_144


class Scene:
    """A store whose sessions have sent and received what `sent` and `received` say."""

    def __init__(self) -> None:
        self.store = waiting.WaitingStore(hash_key=KEY, make_session=waiting.WaitingSession, reply_max=PIECE)
        self.now_ns = 10

    def peer(self) -> Peer:
        return Peer(self)

    def turns(self) -> int:
        """Calls tick() and take_output() as a driver does, until nothing is due; returns how many calls it made."""
        calls = 0
        while (due := self.store.next_deadline()) >= 0 and due <= self.now_ns:
            self.store.tick(self.now_ns)
            calls += 1
            for session in self.store.take_dirty():
                calls += session.owner.pull()
            assert calls < 1000
        return calls


class Peer:
    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.session = scene.store.session(scene.now_ns)
        self.session.owner = self
        self.received = b""

    @property
    def state(self) -> str:
        return _core.STATE_NAMES[self.session.state]

    def send(self, data: bytes) -> bytes:
        """Sends data; returns all output that follows without another request."""
        before = len(self.received)
        self.received += self.session.receive(data, self.scene.now_ns)
        self.pull()
        return self.received[before:]

    def pull(self) -> int:
        """Takes output as long as there is more; returns how many calls that took."""
        calls = 0
        while self.session.more:
            self.received += self.session.take_output(self.scene.now_ns)
            calls += 1
            assert calls < 1000
        return calls

    def eof(self) -> None:
        self.received += self.session.eof(self.scene.now_ns)
        self.pull()


@pytest.fixture
def scene() -> Scene:
    return Scene()


# ---- the store and its region ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 15, 17])
def test_a_hash_key_has_16_bytes(size: int) -> None:
    with pytest.raises(ValueError, match=f"^hash_key must have 16 bytes, not {size}$"):
        Store(hash_key=bytes(size), make_session=Session)


@pytest.mark.parametrize("key", [None, "0123456789abcdef", bytearray(16)])
def test_a_hash_key_is_bytes(key: Any) -> None:
    with pytest.raises(TypeError):
        Store(hash_key=key, make_session=Session)


def test_a_store_makes_its_sessions() -> None:
    store = Store(hash_key=KEY, make_session=Session)
    with pytest.raises(RuntimeError, match=r"^sessions are made by Store\.session\(\)$"):
        Session(store)
    for nothing in (None, 1):
        with pytest.raises(TypeError):
            Session(nothing)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        Store(hash_key=KEY, make_session=int).session()  # type: ignore[arg-type]
    assert type(store.session()) is Session


def test_a_store_without_parts_has_nothing_to_do() -> None:
    store = Store(hash_key=KEY, make_session=Session)
    assert store.next_deadline() == -1
    assert store.take_dirty() == []
    store.tick(0)
    store.audit()
    store.begin_drain()
    store.part()
    assert (store.held(), store.holdings_of(1), store.leases(1), store.outcomes()) == (0, 0, [], [])
    assert (store.about(1), store.evict(1, 0)) == (("", None), False)
    links = -(-4 * ((1 << 20) + 1) // 4096)  # of the numbers of connections; there is none with number 0
    assert store.snapshot()["region"] == 4096 * (1 + links)


def test_numbers_of_connections_are_reused(scene: Scene) -> None:
    one, two = scene.peer(), scene.peer()
    assert (one.session.number, two.session.number) == (1, 2)
    one.session.closed(scene.now_ns)
    assert one.session.number == 0
    assert scene.peer().session.number == 1


def test_a_call_within_a_call_is_refused(scene: Scene) -> None:
    """An exception ends a call, and the next one works."""
    peer, other = scene.peer(), scene.peer()
    scene.store.fails = True
    with pytest.raises(ValueError, match="as it was told"):
        peer.send(b"Ea")
    scene.store.fails = False
    assert other.send(b"Eb") == b"b"
    assert scene.turns() == 0


# ---- the region is touched within calls only -------------------------------------------------------------------------

# What is this process's alone, and so needs no call. All else that a store has can be called between two calls only.
LOCAL = {
    "take_dirty": (), "limit_posted": (1,), "outcomes": (), "begin_drain": (), "part": (), "set_wall": (0, 0),
    "about": (1,), "evict": (1, 0),
}  # fmt: skip
COMMON: dict[str, tuple[Any, ...]] = {
    "audit": (), "held": (), "holdings_of": (1,), "leases": (1,), "next_deadline": (), "reach": (1, 0), "session": (),
    "snapshot": (), "tick": (0,),
}  # fmt: skip
OWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "counter": {
        "begin_window": (1,), "limit_holdings": (1,), "limit_takes": (1, 1), "set_wall": (0, 0), "begin_drain": (),
        "limit_shares": (50, 100), "limit_resumptions": (1,), "about": (1,), "evict": (1, 0), "part": (),
    },
    "throttr": {"set_wall": (0, 0), "outcomes": ()},
    "smockron": {
        "share": (False, 0), "take_questions": (0,), "settle_questions": ([], 0), "outcomes": (),
    },
    "beanstalk": {"set_wall": (0, 0), "outcomes": (), "begin_drain": (), "refuse_puts": (False,)},
    "sentinel": {
        "flow": (1,), "request_token": (1, 1, False, 0, 0), "release_token": (1, 0),
        "keep_token": (1, 0, 0), "answer": (1, 0, 0, 0), "expire": (1, (), 0),
    },
}  # fmt: skip
# Settings, which each process is given, and people's functions.
OWN_LOCAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "sentinel": {"delegate": (None,), "delegate_expiry": (None,)},
    "beanstalk": {"borrow": (None,)},
}
# Methods of which more is asked than an empty store has: limits to set, or a wait that has ended.
OTHERS = {"set_limits", "settled"}
FILES = {"counter": b'{"permits": [{"name": "a", "maximum": 1}]}'}
PARAMETERS = {name: {"connection": "1"} for name in ("holdings", "subscriptions", "reserved", "waits")}
PARAMETERS["throttled"] = {"match": "a"}
PARAMETERS["holders"] = PARAMETERS["queue"] = PARAMETERS["limit"] = {"name": "a"}
PROTOCOLS = {spec.name: spec for spec in find_protocols()}


@pytest.fixture(params=PROTOCOLS)
def made(request: pytest.FixtureRequest) -> tuple[str, Any]:
    spec = PROTOCOLS[request.param]
    settings = spec.settings()
    return spec.name, spec.make_store(settings, dict, 0)


def test_every_method_of_a_store_begins_a_call(made: tuple[str, Any]) -> None:
    """Even one that seems too small for that. Where it is forgotten, a debug build crashes."""
    name, store = made
    calls = COMMON | OWN[name]
    if (files := PROTOCOLS[name].files) is not None:
        load = "load_limits" if name == "counter" else "load_rules"
        calls[load] = (*(read(FILES.get(name, b"{}")) for read in files.readers.values()),)
    local = {method: given for method, given in LOCAL.items() if method not in calls} | OWN_LOCAL.get(name, {})
    if name in {"throttr", "smockron"}:  # whose subscriptions keep nobody waiting
        local |= {method: calls.pop(method) for method in ("held", "holdings_of", "leases")}
    methods = {method for method in dir(store) if not method.startswith("_") and callable(getattr(store, method))}
    assert {*calls, *local} == methods - OTHERS, "each is in one of the tables above"
    for method, given in calls.items():
        getattr(store, method)(*given)
        with store, pytest.raises(RuntimeError, match="a call is in progress"):
            getattr(store, method)(*given)
    for method, given in local.items():
        getattr(store, method)(*given)
        with store:
            getattr(store, method)(*given)
    store.audit()


def test_every_step_of_a_walk_is_a_call(made: tuple[str, Any]) -> None:
    name, store = made
    session = store.session()
    assert PROTOCOLS[name].tables()
    for table in PROTOCOLS[name].tables():
        walk = table.open(store, PARAMETERS.get(table.name, {}))
        with store, pytest.raises(RuntimeError, match="a call is in progress"):
            walk.step()
        while not walk.step():
            pass
        assert walk.total == len(walk.rows())
    session.closed(0)


def test_every_method_of_a_session_is_a_call(scene: Scene) -> None:
    """Except those that have nothing to do at the moment."""
    parked, streaming = scene.peer().session, scene.peer().session
    parked.receive(b"W", 10)
    streaming.receive(b"L\x02", 10)
    calls = (
        (scene.peer().session, "receive", (b"Ea", 10)), (streaming, "take_output", (10,)), (parked, "hang_up", (10,)),
        (parked, "eof", (10,)), (parked, "closed", (10,)), (streaming, "wait", ()),
    )  # fmt: skip
    for session, method, given in calls:
        with scene.store, pytest.raises(RuntimeError, match="a call is in progress"):
            getattr(session, method)(*given)
    public = {method for method in dir(Session) if not method.startswith("_") and callable(getattr(Session, method))}
    assert {method for _, method, _ in calls} == public
    scene.store.audit()


FORGOTTEN = """
from unit.test_core import Scene
scene = Scene()
assert scene.peer().send(b"Ea") == b"a"
scene.store.peek()
"""


@pytest.mark.skipif(not _core.DEBUG, reason="only a debug build sees to it")
def test_a_method_that_begins_no_call_ends_the_process_of_a_debug_build() -> None:
    script = f"import sys; sys.path[:] = {sys.path!r}\n{FORGOTTEN}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGSEGV, done.stderr


# ---- states ----------------------------------------------------------------------------------------------------------


def test_the_table_of_transitions_names_every_state() -> None:
    assert tuple(_core.TRANSITIONS) == _core.STATE_NAMES
    assert {state for followers in _core.TRANSITIONS.values() for state in followers} == set(_core.STATE_NAMES)
    assert _core.TRANSITIONS["closing"] == ()


def test_the_diagram_in_the_documents_shows_this_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ADDING_A_PROTOCOL.md").read_text("utf-8")
    drawn = page.partition("stateDiagram-v2\n")[2].partition("```")[0].split("\n")
    arrows = [f"{state} --> {next_}" for state, followers in _core.TRANSITIONS.items() for next_ in followers]
    assert [line.strip() for line in drawn if line] == [
        "[*] --> READING",
        *(arrow.upper() for arrow in arrows),
        "CLOSING --> [*]",
    ]


def test_a_long_reply_streams_and_later_requests_wait(scene: Scene) -> None:
    peer = scene.peer()
    assert peer.session.receive(b"L\x03EaEb", 10) == b"l" * PIECE
    assert peer.state == "streaming"
    assert peer.session.receive(b"Ec", 10) == b""
    assert peer.session.take_output(10) == b"l" * PIECE
    assert peer.session.take_output(10) == b"l" * PIECE + b"abc"
    assert peer.state == "reading"
    assert peer.session.take_output(10) == b""


def test_a_half_closed_peer_is_answered_then_closed(scene: Scene) -> None:
    peer = scene.peer()
    peer.session.receive(b"L\x02Ea", 10)
    assert peer.session.eof(10) == b""
    assert peer.state == "ended"
    peer.pull()
    assert (peer.state, peer.received) == ("closing", b"l" * PIECE + b"a")
    assert (peer.session.eof(10), peer.session.receive(b"Ea", 10), peer.session.take_output(10)) == (b"", b"", b"")


def test_a_framing_error_closes(scene: Scene) -> None:
    peer = scene.peer()
    assert peer.send(b"EaXEb") == b"aX"
    assert peer.state == "closing"
    assert peer.session.number == 0


# ---- requests that wait ----------------------------------------------------------------------------------------------


def test_a_waiting_request_holds_back_later_requests(scene: Scene) -> None:
    peer, other = scene.peer(), scene.peer()
    assert peer.send(b"EaWEbWEc") == b"a"
    assert peer.state == "parked"
    assert peer.send(b"Ed") == b""
    assert other.send(b"Ez") == b"z", "nobody else waits"
    assert other.send(b"G") == b"g"
    assert scene.turns() > 0
    assert (peer.state, peer.received) == ("parked", b"aGb")
    other.send(b"G")
    scene.turns()
    assert (peer.state, peer.received) == ("reading", b"aGbGcd")
    assert peer.send(b"Ee") == b"e"


def test_a_waiting_session_causes_no_calls(scene: Scene) -> None:
    """With requests behind it: no call is due before the deadline."""
    peers = [scene.peer() for _ in range(100)]
    scene.store.wait_ns = 10**12
    for peer in peers:
        assert peer.send(b"WEaEb") == b""
    assert scene.turns() == 0
    assert scene.store.next_deadline() == 10 + 10**12
    assert not any(peer.session.more or peer.session.closing for peer in peers)
    assert all(peer.pull() == 0 for peer in peers)
    peers[0].send(b"")
    assert scene.turns() == 0


def test_a_wait_can_end_without_a_reply(scene: Scene) -> None:
    peer, other = scene.peer(), scene.peer()
    peer.send(b"WEa")
    other.send(b"N")
    scene.turns()
    assert (peer.state, peer.received) == ("reading", b"a")


def test_a_deadline_ends_a_wait(scene: Scene) -> None:
    peer = scene.peer()
    peer.send(b"WEa")
    scene.now_ns = 1009
    assert scene.turns() == 0
    scene.now_ns = 1010
    scene.turns()
    assert (peer.state, peer.received, scene.store.waiters) == ("reading", b"Ta", [])


def test_a_half_close_ends_a_wait_and_the_next(scene: Scene) -> None:
    """Requests behind it are answered; a second wait could not be answered any more."""
    peer = scene.peer()
    peer.send(b"WEaWWEb")
    peer.eof()
    assert (peer.state, peer.received, scene.store.waiters) == ("closing", b"HaHHb", [])
    assert peer.session.number == 0


def test_a_half_close_seen_before_all_input_is_read_ends_a_wait(scene: Scene) -> None:
    peer = scene.peer()
    peer.send(b"W")
    peer.session.hang_up(10)
    scene.turns()
    assert (peer.state, peer.received) == ("reading", b"H")
    assert peer.send(b"EaWEb") == b"aHb"
    peer.eof()
    assert peer.state == "closing"


def test_a_reset_ends_a_wait(scene: Scene) -> None:
    peer, other = scene.peer(), scene.peer()
    peer.send(b"WEa")
    peer.session.closed(10)
    assert (peer.state, scene.store.waiters, peer.session.number) == ("closing", [], 0)
    assert other.send(b"G") == b"g"
    scene.turns()
    assert peer.received == b""


def test_a_drain_ends_all_waits(scene: Scene) -> None:
    peers = [scene.peer() for _ in range(3)]
    for peer in peers:
        peer.send(b"WEa")
    scene.store.begin_drain()
    scene.turns()
    assert [(peer.state, peer.received) for peer in peers] == 3 * [("reading", b"Da")]


def test_a_wait_ends_only_once(scene: Scene) -> None:
    """Its event and its deadline, its half-close or its end happen at the same time."""
    for end in ("deadline", "eof", "hang_up", "closed"):
        peer, other = scene.peer(), scene.peer()
        peer.send(b"W")
        other.send(b"G")
        if end == "deadline":
            scene.now_ns += 10_000
        else:
            getattr(peer.session, end)(scene.now_ns)
        scene.turns()
        peer.pull()
        assert peer.received == (b"" if end == "closed" else b"G")


# ---- input that is skipped -------------------------------------------------------------------------------------------


def test_a_frame_that_is_too_big_is_skipped_then_answered_however_it_is_cut() -> None:
    data = b"EaS\x01" + bytes(100) + b"EbS\x03" + b"X" * 300 + b"EcS\x02" + b"W" * 200 + b"Ed"
    cuts: list[list[int]] = [[], list(range(1, len(data))), *([cut] for cut in range(1, len(data)))]
    chance = random.Random(1)
    cuts += [sorted(chance.sample(range(1, len(data)), 3)) for _ in range(200)]
    for places in cuts:
        peer = Scene().peer()
        for start, end in itertools.pairwise([0, *places, len(data)]):
            peer.send(data[start:end])
        assert (peer.received, peer.state) == (b"aSbBcBd", "reading"), places


def test_the_reply_to_a_skipped_frame_comes_after_its_last_byte(scene: Scene) -> None:
    peer = scene.peer()
    assert peer.send(b"S\xff" + bytes(25_499)) == b""
    assert peer.state == "reading"
    assert peer.send(b"\0Ea") == b"Ba"


def test_a_half_close_within_a_skipped_frame_closes(scene: Scene) -> None:
    peer = scene.peer()
    peer.send(b"S\x09abc")
    peer.eof()
    assert (peer.received, peer.state) == (b"", "closing")


def test_a_half_close_behind_a_skipped_frame_keeps_the_session_until_all_is_answered(scene: Scene) -> None:
    """The rest of the skipped frame may look like the start of a request that will never be complete."""
    peer = scene.peer()
    peer.send(b"JS\x03" + bytes(250))
    scene.store.reach(1, scene.now_ns)
    peer.session.receive(b"S\x01" + bytes(48) + b"Ea", scene.now_ns)
    peer.session.eof(scene.now_ns)
    assert (peer.state, peer.session.number) == ("ended", 1)
    peer.pull()
    assert (peer.received, peer.state, peer.session.number) == (b"JBa", "closing", 0)


def test_a_skipped_frame_behind_a_wait(scene: Scene) -> None:
    peer, other = scene.peer(), scene.peer()
    peer.send(b"WS\x02" + bytes(150))
    peer.send(bytes(50) + b"Ea")
    other.send(b"G")
    scene.turns()
    assert peer.received == b"GBa"


# ---- replies that wait for the journal -------------------------------------------------------------------------------


def test_replies_wait_for_the_journal_and_keep_their_order(scene: Scene) -> None:
    peer, other = scene.peer(), scene.peer()
    assert peer.send(b"EaJEb") == b"a"
    assert peer.send(b"Ec") == b""
    assert peer.state == "reading", "it is read: what it asks is committed together"
    assert other.send(b"EzJ") == b"z"
    assert scene.turns() == 0
    scene.store.reach(1, scene.now_ns)
    scene.turns()
    assert (peer.received, other.received) == (b"aJbc", b"z")
    scene.store.reach(2, scene.now_ns)
    scene.turns()
    assert other.received == b"zJ"
    assert other.send(b"J") == b""
    scene.store.reach(3, scene.now_ns)
    scene.turns()
    assert (other.received, scene.store.next_deadline()) == (b"zJJ", -1)


def test_an_earlier_journal_position_is_no_step_back(scene: Scene) -> None:
    peer = scene.peer()
    scene.store.reach(5, scene.now_ns)
    scene.store.reach(2, scene.now_ns)
    assert scene.store.durable == 5
    peer.send(b"J")
    scene.store.reach(5, scene.now_ns)
    scene.turns()
    assert peer.received == b"J"


def test_a_session_with_held_replies_is_read_up_to_a_bound(scene: Scene) -> None:
    peer = scene.peer()
    assert peer.send(b"JL\x02Ea") == b""
    assert peer.state == "parked"
    assert scene.turns() == 0
    assert peer.send(b"Eb") == b""
    scene.store.reach(1, scene.now_ns)
    scene.turns()
    assert (peer.state, peer.received) == ("reading", b"J" + b"l" * 2 * PIECE + b"ab")


def test_a_half_close_waits_for_the_journal(scene: Scene) -> None:
    for last, state in ((b"", "parked"), (b"X", "parked")):
        peer = scene.peer()
        peer.send(b"J" + last)
        peer.eof()
        assert (peer.received, peer.state) == (b"", state)
        assert peer.session.number == 0, "what it held comes back at once"
        scene.store.reach(scene.store.written, scene.now_ns)
        scene.turns()
        assert (peer.received, peer.state) == (b"J" + last, "closing")


def test_an_ended_connection_does_not_wait_for_the_journal(scene: Scene) -> None:
    peer = scene.peer()
    peer.send(b"J")
    peer.session.closed(scene.now_ns)
    scene.store.reach(1, scene.now_ns)
    assert scene.turns() == 0
    assert (peer.received, peer.state) == (b"", "closing")


def test_a_wait_behind_the_journal_ends_behind_it(scene: Scene) -> None:
    peer, other = scene.peer(), scene.peer()
    peer.send(b"JW")
    other.send(b"G")
    scene.turns()
    assert peer.received == b""
    scene.store.reach(1, scene.now_ns)
    scene.turns()
    assert (peer.received, peer.state) == (b"JG", "reading")


def test_nothing_behind_a_bad_frame_is_executed(scene: Scene) -> None:
    """Not if all of it was kept while a long reply went on, either."""
    peer = scene.peer()
    peer.received += peer.session.receive(b"L\x02JXEa", scene.now_ns)
    peer.pull()
    scene.store.reach(1, scene.now_ns)
    scene.turns()
    assert (peer.received[2 * PIECE :], peer.state) == (b"JX", "closing")


def test_a_half_close_behind_a_skipped_frame_and_a_wait(scene: Scene) -> None:
    peer = scene.peer()
    peer.send(b"JS\x03" + bytes(250))
    scene.store.reach(1, scene.now_ns)
    peer.session.receive(b"S\x01" + bytes(48) + b"WEa", scene.now_ns)
    peer.session.eof(scene.now_ns)
    while peer.session.more:
        assert peer.session.number == 1 or not peer.received.endswith(b"B"), "it has left, and more is asked"
        peer.received += peer.session.take_output(scene.now_ns)
    assert (peer.received, peer.state, peer.session.number) == (b"JBHa", "closing", 0)


def test_a_dropped_session_waits_no_more(scene: Scene) -> None:
    """What it waited for goes to the next."""
    scene.store.limit_posted(200)
    peer, other, third = scene.peer(), scene.peer(), scene.peer()
    peer.send(b"JW")
    third.send(b"W")
    other.send(b"P\x02P\x01")
    assert peer.session.dropped
    other.send(b"G")
    scene.turns()
    assert third.received == b"G"


def test_posted_output_behind_the_journal_is_bounded(scene: Scene) -> None:
    """It keeps its place behind the replies that wait, and the session that posts it does not wait for the journal."""
    scene.store.limit_posted(200)
    peer, other = scene.peer(), scene.peer()
    peer.send(b"J")
    assert other.send(b"P\x02") == b"p"
    scene.turns()
    assert (peer.received, peer.state, peer.session.dropped) == (b"", "parked", False)
    assert peer.send(b"Ea") == b""
    scene.store.reach(1, scene.now_ns)
    scene.turns()
    assert (peer.received, peer.state) == (b"J" + b"P" * 200 + b"a", "reading")
    peer.send(b"J")
    assert other.send(b"P\x02P\x01") == b"pp"
    scene.turns()
    assert (peer.state, peer.session.dropped) == ("closing", True)
