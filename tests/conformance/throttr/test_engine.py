"""Level 1: the vectors against the engine in memory, at every value size, and with their streams cut in every way.

Also properties of the vectors themselves, and behaviour that depends on the store's limits, which vectors cannot
express."""

from __future__ import annotations

import itertools
import random
import struct
from typing import TYPE_CHECKING

import pytest

from conformance import vectors
from conformance.throttr import replies
from conformance.throttr.dialect import MAX_MESSAGE
from conformance.throttr.engine import make_store
from kit.pump import START_NS, Pump
from property.throttr_model import (
    CHANNEL,
    EVENT,
    GET,
    INSERT,
    LAYOUT,
    LIST,
    PUBLISH,
    PURGE,
    QUERY,
    SET,
    STATS,
    SUBSCRIBE,
    UNSUBSCRIBE,
    UPDATE,
    WHOAMI,
    Reader,
    encode,
    parse,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kit.pump import Peer

SIZES = (1, 2, 4, 8)
CASES = {size: vectors.load("throttr", value_size=size) for size in SIZES}
STREAMS = {size: [(case.name, stream) for case in CASES[size] if (stream := vectors.stream(case))] for size in SIZES}

# Single cuts that are tried in a stream: at one value size all up to this length, else those near its requests' borders
# and some others.
EVERY_CUT_SIZE = 2
EVERY_CUT_MAX = 400
STRIDES = 100
NEAR = 8
FEW = 12  # of each, at the other value sizes
PIECES = (1, 2, 3, 4, 5, 7, 8, 11, 13, 17, 31, 64, 65, 255, 257, 4096)
PIECES_MAX = 20_000  # more of them prove nothing more

HOURS = 6
DONE, FAILED = b"\1", b"\0"


# ---- the vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ticking", [True, False], ids=["ticking", "never-ticked"])
def test_the_engine_does_what_the_vectors_say(size: int, ticking: bool) -> None:
    """never-ticked: the store gets no ticks, so only requests notice that keys have expired."""

    def play(case: vectors.Case) -> None:
        bench = Pump(make_store(size), ticking=ticking)
        vectors.run_case(case, bench.connect, advance=bench.advance)
        bench.ticking = True
        bench.settle()
        bench.store.audit()
        assert bench.store.sessions_open == 0, case.name

    vectors.run_cases(CASES[size], play)


@pytest.mark.parametrize("size", SIZES)
def test_all_cases_pass_in_one_store(size: int) -> None:
    """As with one server at the other level: remains of one case exist for later ones."""
    bench = Pump(make_store(size))
    for case in CASES[size]:
        if not case.driven:
            vectors.run_case(case, bench.connect, advance=bench.advance)
            bench.store.audit()
    assert bench.store.sessions_open == 0


def names_of(content: vectors.Bytes, size: int) -> Iterator[tuple[str, bytes]]:
    """The keys and channels that a step names, if all of it is known beforehand."""
    stream = content if isinstance(content, bytes) else b""
    while (request := parse(stream, size, len(stream))) and not request.breaks:
        stream = stream[request.size :]
        if request.opcode in (INSERT, SET):
            yield "key", request.fields[LAYOUT[request.opcode].index("k")]
        if request.opcode == SUBSCRIBE:
            yield "channel", request.fields[0]


def test_cases_use_different_keys_and_channels() -> None:
    """Except the empty names, and the channel of all, which they leave unchanged."""
    owners: dict[tuple[str, bytes], str] = {}
    for size in SIZES:
        for case in CASES[size]:
            for kind, name in {name for step in case.steps for name in names_of(step.send, size)}:
                if name not in (b"", b"*"):
                    assert owners.setdefault((kind, name), case.name) == case.name


@pytest.mark.parametrize("size", SIZES)
def test_the_cases_cover_every_request(size: int) -> None:
    sections = {case.section for case in CASES[size]}
    documented = {name.upper() for name in replies.REQUESTS}
    assert sections >= documented | {"EVENT", "TTL", "TTL Types", "Key", "Request types"}
    assert len(CASES[size]) > 100
    assert len([case for case in CASES[size] if case.driven]) < 30
    assert len(STREAMS[size]) > 50


# ---- every way of cutting them --------------------------------------------------------------------------------------


def play(size: int, pieces: Iterable[bytes], *, end: bool = False) -> tuple[bytes, bool]:
    """The answers to a stream in these pieces on its own store, and whether it is closed then."""
    store = make_store(size)
    session = store.session(START_NS)
    output = bytearray()
    for piece in pieces:
        output += session.receive(piece, START_NS)
        while session.more:
            output += session.take_output(START_NS)
    if end:
        output += session.eof(START_NS)
        while session.more:
            output += session.take_output(START_NS)
    closing = session.closing
    session.closed(START_NS)
    return bytes(output), closing


def cut(stream: bytes, positions: Iterable[int]) -> list[bytes]:
    borders = [0, *sorted(positions), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(borders)]


def chunks(stream: bytes, size: int) -> list[bytes]:
    return cut(stream, range(size, len(stream), size))


def single_cuts(stream: bytes, size: int) -> Iterable[int]:
    if size == EVERY_CUT_SIZE and len(stream) <= EVERY_CUT_MAX:
        return range(1, len(stream))
    most, strides, near = (EVERY_CUT_MAX, STRIDES, NEAR) if size == EVERY_CUT_SIZE else (2 * FEW, FEW, 2)
    positions = set(random.Random(stream).sample(range(len(stream)), min(strides, len(stream))))
    most += len(positions)
    border = 0
    while len(positions) < most and (request := parse(stream[border : border + MAX_MESSAGE], size, MAX_MESSAGE)):
        positions.update(range(border - near, border + 2 * near))
        border += request.size
        positions.update(range(border - near, border + 2 * near))
        if request.breaks:
            break
    return sorted(position for position in positions if 0 < position < len(stream))


def compare(size: int, name: str, stream: vectors.Stream, pieces: list[bytes], how: str, *, end: bool = False) -> None:
    said = play(size, pieces, end=end)
    assert said == (stream.expected, stream.closes or end), f"{name}, {how}: {said}"


@pytest.mark.parametrize("size", SIZES)
def test_vectors_in_two_pieces(size: int) -> None:
    for name, stream in STREAMS[size]:
        compare(size, name, stream, [stream.sent], "whole")
        for position in single_cuts(stream.sent, size):
            compare(size, name, stream, cut(stream.sent, [position]), f"cut at {position}")


@pytest.mark.parametrize("size", SIZES)
def test_vectors_in_many_pieces(size: int) -> None:
    for name, stream in STREAMS[size]:
        numbers = random.Random(stream.sent)
        for length in PIECES:
            if len(stream.sent) // length < PIECES_MAX:
                compare(size, name, stream, chunks(stream.sent, length), f"pieces of {length}")
        for seed in range(5):
            count = min(len(stream.sent) - 1, numbers.choice((2, 3, 5, 20)))
            positions = numbers.sample(range(1, len(stream.sent)), count)
            compare(size, name, stream, cut(stream.sent, positions), f"random cut {seed}")


@pytest.mark.parametrize("size", SIZES)
def test_vectors_followed_by_a_half_close(size: int) -> None:
    """The last byte is followed by the end of the stream: the replies are the same, and the connection closes."""
    for name, stream in STREAMS[size]:
        for length in (1, 12, 4096):
            if len(stream.sent) // length < PIECES_MAX:
                how = f"pieces of {length}, then the end"
                compare(size, name, stream, chunks(stream.sent, length), how, end=True)


# ---- what depends on the store --------------------------------------------------------------------------------------


class Caller:
    """Makes requests as calls on one connection, at one value size."""

    def __init__(self, bench: Pump, size: int = 2) -> None:
        self.peer: Peer = bench.connect()
        self.size = size

    def ask(self, opcode: int, *fields: int | bytes) -> bytes:
        """Returns everything that is received, events included."""
        self.peer.send(encode(self.size, opcode, *fields))
        return self.said()

    def said(self) -> bytes:
        return self.peer.recv_exactly(len(self.peer.output))

    def rows(self, opcode: int) -> list[list[replies.Row]]:
        reader = Reader(self.ask(opcode))
        listed = replies.read_listing(reader.take, opcode, self.size)
        assert reader.position == len(reader.data)
        return listed


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("opcode", [LIST, STATS])
def test_fragments_are_as_full_as_possible(size: int, opcode: int) -> None:
    caller = Caller(Pump(make_store(size)), size)
    for number in range(200):
        name = (b"%d-" % number).ljust(number % 256, b"k")
        assert caller.ask(INSERT, 1, HOURS, 2, name) == DONE
    fragments = caller.rows(opcode)
    rows = [row for rows in fragments for row in rows]
    assert len(rows) == len({row.name for row in rows}) == 200
    assert list(map(len, fragments)) == list(map(len, replies.in_fragments(rows, opcode, size)))


def test_memory_has_a_limit_and_nothing_is_evicted() -> None:
    """Beyond it INSERT and SET are refused; existing keys go on, and a purge makes room."""
    caller = Caller(Pump(make_store(memory_limit=1 << 18)))
    names = (b"key-%06d" % number for number in itertools.count())
    made = list(itertools.takewhile(lambda name: caller.ask(INSERT, 7, HOURS, 2, name) == DONE, names))
    # Half of the limit at 112 bytes a key, or less by up to half for what is rounded down.
    assert (1 << 17) // 224 <= len(made) <= (1 << 17) // 112
    assert caller.ask(INSERT, 7, HOURS, 2, b"one more") == FAILED
    assert caller.ask(SET, HOURS, 2, b"one more", b"") == FAILED
    for name in made:
        assert caller.ask(QUERY, name)[:3] == b"\1\7\0"
    assert caller.ask(UPDATE, 0, 1, 1, made[0]) == DONE
    assert sorted(row.name for rows in caller.rows(LIST) for row in rows) == made
    assert caller.ask(PURGE, made[5]) == DONE
    assert caller.ask(INSERT, 7, HOURS, 2, b"one more") == DONE
    assert caller.ask(INSERT, 7, HOURS, 2, made[5]) == FAILED


def test_memory_of_values_has_a_limit() -> None:
    """A SET that finds no room leaves the buffer unchanged."""
    caller = Caller(Pump(make_store(memory_limit=1 << 18)))
    names = (b"key-%06d" % number for number in itertools.count())
    made = list(itertools.takewhile(lambda name: caller.ask(SET, HOURS, 2, name, name * 400) == DONE, names))
    assert 10 < len(made) < (1 << 18) // 4000
    assert caller.ask(SET, HOURS, 2, made[0], b"z" * 19_000) == FAILED
    for name in made:
        assert caller.ask(GET, name).endswith(name * 400)
    assert caller.ask(SET, HOURS, 2, made[0], b"short") == DONE
    assert caller.ask(SET, HOURS, 2, b"another", b"short") == DONE
    assert caller.ask(GET, made[0]).endswith(b"\5\0short")


def test_memory_of_subscriptions_has_a_limit() -> None:
    bench = Pump(make_store(memory_limit=1 << 18))
    caller, other = Caller(bench), Caller(bench)
    names = (b"channel-%06d" % number for number in range(1 << 16))
    made = list(itertools.takewhile(lambda name: caller.ask(SUBSCRIBE, name) == DONE, names))
    assert 100 < len(made) < 1 << 16
    assert other.ask(SUBSCRIBE, b"one more") == FAILED
    assert other.ask(PUBLISH, made[-1], b"x") == DONE
    assert caller.said() == encode(2, EVENT, made[-1], b"x")
    for name in made:
        assert caller.ask(UNSUBSCRIBE, name) == DONE
    assert other.ask(SUBSCRIBE, b"one more") == DONE


def test_a_subscriber_that_does_not_read_is_dropped() -> None:
    """Beyond max_queued bytes; the others get every event."""
    bench = Pump(make_store(max_queued=10_000))
    reader, publisher, sleeper = Caller(bench), Caller(bench), Caller(bench)
    assert sleeper.ask(SUBSCRIBE, b"news") == sleeper.ask(SUBSCRIBE, b"alone") == DONE
    assert reader.ask(SUBSCRIBE, b"news") == DONE
    sleeper.peer.deaf = True
    event = encode(2, EVENT, b"news", b"n" * 100)
    for _ in range(10_000 // len(event) - 1):
        assert publisher.ask(PUBLISH, b"news", b"n" * 100) == DONE
        assert reader.said() == event
    assert not sleeper.peer.session.dropped
    assert publisher.ask(PUBLISH, b"alone", b"") == DONE
    for _ in range(5):
        assert publisher.ask(PUBLISH, b"news", b"n" * 100) == DONE
        assert reader.said() == event
    assert sleeper.peer.session.dropped
    assert sleeper.said() == b""
    assert publisher.ask(PUBLISH, b"alone", b"") == FAILED
    assert bench.store.snapshot()["dropped_subscribers"] == 1
    assert not reader.peer.session.closing


def test_one_event_always_fits() -> None:
    """However long it is, and however little max_queued is."""
    bench = Pump(make_store(max_queued=4096))
    publisher, sleeper = Caller(bench), Caller(bench)
    assert sleeper.ask(SUBSCRIBE, b"news") == DONE
    sleeper.peer.deaf = True
    assert publisher.ask(PUBLISH, b"news", b"n" * 19_000) == DONE
    assert not sleeper.peer.session.dropped
    assert publisher.ask(PUBLISH, b"news", b"") == DONE
    assert sleeper.peer.session.dropped


def test_subscriptions_of_one_connection_to_one_channel_have_a_limit() -> None:
    caller = Caller(Pump(make_store()))
    assert [caller.ask(SUBSCRIBE, b"news") for _ in range(17)] == [DONE] * 16 + [FAILED]
    assert caller.ask(PUBLISH, b"news", b"x") == encode(2, EVENT, b"news", b"x") * 16 + DONE
    assert caller.ask(UNSUBSCRIBE, b"news") == DONE
    assert caller.ask(PUBLISH, b"news", b"x") == FAILED


GRACE_NS = 10_000_000_000


def test_grace_of_expired_keys() -> None:
    """The behaviour of older servers: for the grace time the name cannot be used, and SET of a buffer reports
    success."""
    bench = Pump(make_store(expiry_grace_ns=GRACE_NS))
    caller = Caller(bench)
    assert caller.ask(INSERT, 5, 4, 1, b"counter") == DONE
    assert caller.ask(SET, 4, 1, b"buffer", b"old") == DONE
    assert caller.ask(INSERT, 5, 4, 0, b"at once") == DONE
    bench.advance(1_000_000_000 - 1)
    assert caller.ask(QUERY, b"counter")[:1] == DONE
    for goes_by in (1, GRACE_NS - 1):
        bench.advance(goes_by)
        for name in (b"counter", b"buffer"):
            assert caller.ask(QUERY, name) == caller.ask(GET, name) == FAILED
            assert caller.ask(INSERT, 6, HOURS, 2, name) == FAILED
            assert caller.ask(UPDATE, 1, 0, 9, name) == caller.ask(UPDATE, 0, 0, 9, name) == FAILED
            assert caller.ask(PURGE, name) == FAILED
        assert caller.ask(SET, HOURS, 2, b"buffer", b"lost") == DONE
        assert caller.ask(SET, HOURS, 2, b"counter", b"never") == FAILED
        assert caller.ask(GET, b"buffer") == FAILED
        assert caller.rows(LIST) == caller.rows(STATS) == []
    bench.advance(1)
    assert caller.ask(INSERT, 6, HOURS, 2, b"counter") == DONE
    assert caller.ask(SET, HOURS, 2, b"buffer", b"new") == DONE
    assert caller.ask(GET, b"buffer").endswith(b"\3\0new")


@pytest.mark.parametrize("size", [2, 4, 8])
def test_events_nested_as_deep_as_a_message_can_be(size: int) -> None:
    """Sixteen levels are executed; deeper ones are no requests."""
    caller = Caller(Pump(make_store(size)), size)
    nested = encode(size, WHOAMI)
    for depth in range(1, 100):
        nested = encode(size, EVENT, b"", nested)
        if len(nested) > min(MAX_MESSAGE, (1 << 8 * size) - 1):
            break
        caller.peer.send(nested)
        said = caller.said()
        if depth > 16:
            assert said == DONE * 16 + FAILED
        else:
            assert said == DONE * depth + caller.ask(WHOAMI)


def test_the_limit_of_a_message_counts_all_its_bytes() -> None:
    """max_message counts all of a message."""
    caller = Caller(Pump(make_store(max_message=1000)))
    assert caller.ask(SET, HOURS, 2, b"k" * 100, b"v" * (1000 - 7 - 100)) == DONE
    assert caller.ask(SET, HOURS, 2, b"k" * 100, b"v" * (1001 - 7 - 100)) == FAILED
    assert caller.peer.session.closing


def test_many_subscribers_of_one_channel() -> None:
    """More than one slice serves: each gets every event once, in order, and the store has nothing left to do at the
    end."""
    bench = Pump(make_store(memory_limit=1 << 24))
    callers = [Caller(bench) for _ in range(300)]
    for caller in callers:
        assert caller.ask(SUBSCRIBE, b"news") == DONE
    events = [encode(2, EVENT, b"news", b"%d" % number) for number in range(20)]
    callers[0].peer.send(b"".join(encode(2, PUBLISH, b"news", b"%d" % number) for number in range(20)))
    assert callers[0].said() == b"".join(event + DONE for event in events)
    for caller in callers[1:]:
        assert caller.said() == b"".join(events)
    reader = Reader(callers[0].ask(CHANNEL, b"news"))
    subscribers = replies.read_subscribers(reader.take)
    assert subscribers is not None
    assert sorted(row.name for row in subscribers) == sorted(caller.ask(WHOAMI)[1:] for caller in callers)


def test_a_listing_is_not_interrupted_by_events() -> None:
    """They come after it, whoever publishes while it is being sent."""
    bench = Pump(make_store(memory_limit=1 << 26))
    caller, publisher = Caller(bench), Caller(bench)
    assert caller.ask(SUBSCRIBE, b"news") == DONE
    count = 30_000
    for first in range(0, count, 1000):
        caller.peer.send(b"".join(encode(2, INSERT, 1, HOURS, 2, b"k%d" % (first + number)) for number in range(1000)))
    assert caller.said() == DONE * count
    session = caller.peer.session
    session.owner = None  # so that only this test takes its output
    said = bytearray(session.receive(encode(2, LIST), bench.now_ns))
    assert session.more
    published = 0
    while session.more:
        assert publisher.ask(PUBLISH, b"news", struct.pack("<I", published)) == DONE
        published += 1
        said += session.take_output(bench.now_ns)
    for dirty in bench.store.take_dirty():
        said += dirty.take_output(bench.now_ns)
    said += session.take_output(bench.now_ns)
    reader = Reader(bytes(said))
    rows = [row for rows in replies.read_listing(reader.take, LIST, 2) for row in rows]
    assert len({row.name for row in rows}) == len(rows) == count
    events = b"".join(encode(2, EVENT, b"news", struct.pack("<I", number)) for number in range(published))
    assert reader.data[reader.position :] == events
