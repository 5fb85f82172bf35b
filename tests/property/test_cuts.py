"""However a stream is cut, and whenever its output is taken: the answer is the same, and so is what it leaves behind.

Every vector of one connection, streams made up by hypothesis, and one that is longer than any bound of the engine. Of
the sentinel, the beanstalk and the smockron protocol what hypothesis makes up, right and wrong; vectors of the first
and the last are cut in tests/conformance.
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import vectors
from conformance.beanstalk.engine import make_store as make_beanstalk_store
from conformance.sentinel.engine import make_store as make_sentinel_store
from conformance.smockron.engine import make_store as make_smockron_store
from counterd.protocols.beanstalk import wire as beanstalk
from counterd.protocols.counter import wire
from counterd.protocols.sentinel import wire as sentinel
from counterd.protocols.sentinel.rules import FlowRule, ParamRule, Rules
from counterd.protocols.smockron import wire as smockron
from kit.counters import Client, frames_of, make_store, outputs, settle
from kit.machine import examples
from kit.permits import Permits
from kit.pump import START_NS
from property.counter_model import Model

if TYPE_CHECKING:
    from collections.abc import Iterable

# Positions of a single cut that are tried in a stream: all of them up to this length, else those near the borders of
# its frames and as many others at equal distances.
EVERY_CUT_MAX = 2000
STRIDES = 100
NEAR = 13

STREAMS = {case.name: stream for case in vectors.load("counter") if (stream := vectors.stream(case)) is not None}

# When the output that waits is taken: all of it after each piece of input, one call after each, or all at the end.
EAGER, ONE_BY_ONE, LATE = "eager", "one by one", "late"


class Outcome(NamedTuple):
    """What a stream led to."""

    output: bytes
    closing: bool
    left_behind: dict[str, int]


def play(pieces: Iterable[bytes], *, pull: str = EAGER, end: bool = False, filled: int = 0) -> Outcome:
    """The output of a stream in these pieces on a store of its own. filled: counters that another connection holds."""
    store = make_store(filled + 16, filled + 64, name_memory=1 << 19)
    if filled:
        holder = Client(store)
        holder.raw(b"".join(wire.acquire(0, b"filler-%09d" % number, 1, 1) for number in range(filled)))
    session = store.session()
    output = bytearray()
    for piece in pieces:
        output += session.receive(piece, 0)
        if pull == ONE_BY_ONE:
            output += session.take_output(0)
        if pull == EAGER:
            output += b"".join(outputs(session))
    if end:
        output += session.eof(0)
    output += b"".join(outputs(session))
    closing = session.closing
    store.audit()
    session.closed(0)
    settle(store)
    return Outcome(bytes(output), closing, store.snapshot())


def comparable(outcome: Outcome) -> tuple[list[bytes | dict[str, str]], bool, dict[str, int]]:
    """Without the counted bytes: how many had come when Stats was answered, and so its length, depends on the cut."""
    replies: list[bytes | dict[str, str]] = []
    for frame in frames_of(outcome.output):
        if frame[1:3] == b"\x10\0":
            figures = wire.decode_stats(frame[12:])
            replies.append({name: value for name, value in figures.items() if name not in ("bytes_in", "bytes_out")})
        else:
            replies.append(frame)
    left_behind = {name: value for name, value in outcome.left_behind.items() if name != "bytes_out"}
    return replies, outcome.closing, left_behind


def cut(stream: bytes, positions: Iterable[int]) -> list[bytes]:
    borders = [0, *sorted(positions), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(borders)]


def chunks(stream: bytes, size: int) -> list[bytes]:
    return cut(stream, range(size, len(stream), size))


def single_cuts(stream: bytes) -> Iterable[int]:
    if len(stream) <= EVERY_CUT_MAX:
        return range(1, len(stream))
    positions = set(range(1, len(stream), len(stream) // STRIDES))
    border = 0
    for frame in frames_of(stream):
        border += len(frame)
        positions.update(range(border - NEAR, border + NEAR))
        positions.update(range(border - len(frame), border - len(frame) + 3 * NEAR))
    return sorted(position for position in positions if 0 < position < len(stream))


@pytest.mark.parametrize("name", STREAMS)
def test_a_vector_in_two_pieces(name: str) -> None:
    stream = STREAMS[name]
    expected = play([stream.sent])
    assert (expected.output, expected.closing) == (stream.expected, stream.closes)
    for position in single_cuts(stream.sent):
        assert play(cut(stream.sent, [position])) == expected, f"cut at {position}"


@pytest.mark.parametrize("name", STREAMS)
def test_a_vector_in_many_pieces(name: str) -> None:
    stream = STREAMS[name]
    expected = play([stream.sent])
    numbers = random.Random(name)
    for size in (1, 2, 3, 5, 7, 11, 12, 13, 64, 65, 4096):
        if len(stream.sent) // size < 200_000:
            assert play(chunks(stream.sent, size)) == expected, f"pieces of {size}"
    for seed in range(20):
        count = min(len(stream.sent) - 1, numbers.choice((2, 3, 5, 20)))
        positions = numbers.sample(range(1, len(stream.sent)), count)
        for pull in (ONE_BY_ONE, LATE):
            assert play(cut(stream.sent, positions), pull=pull) == expected, f"random cut {seed}, {pull}"


@pytest.mark.parametrize("name", STREAMS)
def test_a_vector_and_the_end(name: str) -> None:
    """The last byte is followed by the end of the stream: the same answer, and it closes."""
    stream = STREAMS[name]
    expected = play([stream.sent], end=True)
    assert (expected.output, expected.closing) == (stream.expected, True)
    for size in (1, 12, 4096):
        for pull in (EAGER, LATE):
            assert play(chunks(stream.sent, size), pull=pull, end=True) == expected


# ---- streams made up ------------------------------------------------------------------------------------------------

opaques = st.sampled_from([0, 1, 0xDEADBEEF])
names = st.sampled_from([b"a", b"b", b"a" * 36, b"a" * 37, b"a" * 89, b"filler-%09d" % 7])
numbers = st.sampled_from([0, 1, 1, 2, 0xFFFFFFFF])
harmless = st.one_of(
    st.builds(wire.noop, opaques),
    st.builds(wire.acquire, opaques, names, numbers, st.sampled_from([1, 2, 3, 0xFFFFFFFF])),
    st.builds(wire.release, opaques, names, numbers),
    st.builds(wire.get, opaques, names),
    st.builds(wire.stats, opaques),
    st.builds(wire.dump, opaques, limits=st.booleans()),
    st.builds(wire.frame, st.integers(0, 0x13), opaques, st.binary(max_size=30), flags=st.integers(0, 255)),
)
closings = st.one_of(
    st.builds(wire.frame, st.integers(0, 255), opaques, st.binary(max_size=20), magic=st.integers(0, 255)),
    st.builds(
        wire.frame, st.integers(0, 255), opaques, st.binary(max_size=20), body_length=st.integers(65546, 1 << 31)
    ),
    st.binary(min_size=1, max_size=30),
)
streams = st.builds(
    lambda requests, last, after: b"".join([*requests, last, *after]),
    st.lists(harmless, min_size=1, max_size=8),
    st.one_of(st.just(b""), closings, harmless.map(lambda frame: frame[:-1])),
    st.lists(harmless, max_size=2),
)


@settings(max_examples=examples(100), deadline=None)
@given(stream=streams, end=st.booleans())
def test_any_stream_cut_once_anywhere_or_everywhere(stream: bytes, end: bool) -> None:
    expected = comparable(play([stream], end=end))
    for position in single_cuts(stream):
        assert comparable(play(cut(stream, [position]), end=end)) == expected, f"cut at {position}"
    assert comparable(play(chunks(stream, 1), end=end)) == expected


@settings(max_examples=examples(100), deadline=None)
@given(
    stream=streams,
    end=st.booleans(),
    cuts=st.lists(st.integers(1, 1 << 16), max_size=12),
    pull=st.sampled_from([EAGER, ONE_BY_ONE, LATE]),
)
def test_any_stream_with_long_dumps_cut_in_any_way(stream: bytes, end: bool, cuts: list[int], pull: str) -> None:
    """A Dump of so many counters comes in pieces, and what is behind it waits."""
    expected = comparable(play([stream], end=end, filled=3000))
    positions = {position % len(stream) for position in cuts}
    assert comparable(play(cut(stream, positions), pull=pull, end=end, filled=3000)) == expected


asking = st.lists(
    st.one_of(
        st.builds(wire.acquire, opaques, names, st.sampled_from([1, 1, 2]), st.sampled_from([1, 2, 3, 0xFFFFFFFF])),
        st.builds(wire.release, opaques, names, st.just(1)),
        st.builds(wire.dump, opaques, limits=st.booleans()),
    ),
    min_size=2,
    max_size=6,
)


def follow(pieces: Iterable[bytes]) -> None:
    """The model, told the same in the same pieces, says what the session says."""
    sizes = {"buckets": 4, "holdings": 3, "holdings_per_connection": 0, "name_memory": 3 * 64}
    store, model = make_store(**sizes), Model(**sizes)
    session, expected = store.session(), model.session()
    for piece in pieces:
        said = session.receive(piece, 0)
        model.receive(expected, said, session.more, piece)
        assert not session.more


@settings(max_examples=examples(40), deadline=None)
@given(requests=asking)
def test_a_dump_says_what_the_model_says_wherever_it_is_cut(requests: list[bytes]) -> None:
    stream = b"".join([*requests, wire.dump(0, limits=True)])
    for position in range(len(stream)):
        follow(cut(stream, [position]))
    follow(chunks(stream, 1))


def test_a_stream_longer_than_every_bound() -> None:
    """More output than one call may give, more frames than are parsed ahead, Dumps in pieces, and a broken frame."""
    gets = b"".join(wire.get(number, b"filler-%09d" % (number % 4000)) for number in range(20_000))
    dumps = wire.dump(3) + wire.dump(3, limits=True)
    stream = wire.noop(1) * 30_000 + wire.dump(2) + gets + dumps + wire.noop(4) + b"GET / HTTP/1.1\r\n" * 9
    expected = play([stream], filled=3000)
    assert len(list(frames_of(expected.output))) == 30_000 + 3 * 3001 + 20_000 + 2
    assert expected.closing
    for size in (1000, 4096, 65536, 262144, len(stream) - 1):
        for pull in (EAGER, ONE_BY_ONE, LATE):
            assert play(chunks(stream, size), pull=pull, filled=3000) == expected, f"pieces of {size}, {pull}"


# ---- the sentinel protocol ------------------------------------------------------------------------------------------

SENTINEL_RULES = Rules(
    (
        FlowRule("n", 1, "rate", 1, 20, 1, 10, 1000, 2000, 2000, 0),
        FlowRule("n", 2, "calls", 0, 20, 1, 10, 1000, 2000, 2000, 0),
    ),
    (ParamRule("n", 3, "values", 5, 0, 10, 1000),),
)
GRANTED = 8  # tokens that a stream begins with
SENTINEL_STRIDES = 12  # each needs a store

xids = st.sampled_from([0, -1, 0x0005_0006])
flow_ids = st.sampled_from([1, 2, 3, 4, -1])
small = st.integers(0, 3)
token_ids = st.integers(0, GRANTED)  # one more than there are
sentinel_requests = st.one_of(
    st.builds(sentinel.ping, xids, st.sampled_from([b"n", b"", b"m" * 300])),
    st.builds(sentinel.flow, xids, flow_ids, small, st.booleans()),
    st.builds(sentinel.param_flow, xids, flow_ids, small, st.lists(st.sampled_from(["a", "b", 1, True]), max_size=3)),
    st.builds(sentinel.acquire, xids, flow_ids, small),
    st.tuples(st.sampled_from([sentinel.release, sentinel.keep]), xids, token_ids),
    st.builds(sentinel.frame, xids, st.integers(-128, 127), st.binary(max_size=30)),
    st.builds(
        lambda type, size: sentinel.frame(7, type, bytes(size)), st.integers(-1, 7), st.sampled_from([1017, 1018])
    ),
    st.binary(max_size=4).map(lambda data: len(data).to_bytes(2, "big") + data),
)


def play_sentinel(pieces: Iterable[bytes], *, end: bool = False) -> Outcome:
    """Its stores have a known key, so that the ids of tokens are the same each time."""
    store = make_sentinel_store(SENTINEL_RULES)
    session = store.session(START_NS)
    output = b"".join([*(session.receive(piece, START_NS) for piece in pieces), *outputs(session)])
    if end:
        output += session.eof(START_NS)
    closing = session.closing
    store.audit()
    session.closed(START_NS)
    left_behind = {**store.snapshot(), **{"/".join(outcome[:2]): outcome[2] for outcome in store.outcomes()}}
    return Outcome(output, closing, left_behind)


BEGINNING = b"".join(sentinel.acquire(number, 2, 1) for number in range(GRANTED))
TOKENS = [response.token_id for response in sentinel.ResponseParser().feed(play_sentinel([BEGINNING]).output)] + [12345]


@settings(max_examples=examples(25), deadline=None)
@given(
    asked=st.lists(sentinel_requests, min_size=1, max_size=8),
    positions=st.lists(st.integers(1, 1 << 12), max_size=8),
    unfinished=st.sampled_from([0, 0, 1, 17]),
    end=st.booleans(),
)
def test_any_stream_of_sentinel_cut_once_anywhere_or_in_any_way(
    asked: list[Any], positions: list[int], unfinished: int, end: bool
) -> None:
    requests = [each if isinstance(each, bytes) else each[0](each[1], TOKENS[each[2]]) for each in asked]
    stream = BEGINNING + b"".join(requests) + sentinel.frame(1, 1, bytes(20))[:unfinished]
    expected = play_sentinel([stream], end=end)
    assert expected.output.startswith(play_sentinel([BEGINNING]).output)
    for position in range(len(BEGINNING), len(stream), max(1, (len(stream) - len(BEGINNING)) // SENTINEL_STRIDES)):
        assert play_sentinel(cut(stream, [position]), end=end) == expected, f"cut at {position}"
    assert play_sentinel(chunks(stream, 1), end=end) == expected
    assert play_sentinel(cut(stream, {position % len(stream) for position in positions}), end=end) == expected


# ---- the beanstalk protocol -----------------------------------------------------------------------------------------

JOB_MAX = 300
BEANSTALK_STRIDES = 12  # each needs a store

tubes = st.sampled_from([b"default", b"t", b"t" * 200])
job_ids = st.integers(0, 6)
few = st.integers(0, 3)
job_states = st.sampled_from([*beanstalk.STATES, "all"])
bodies = st.sampled_from([b"", b"x", b"delete 1\r\n", b"\r", b"y" * JOB_MAX, b"z" * (JOB_MAX + 1), b"\r\n" * 2000])
lines_right = st.one_of(
    st.builds(beanstalk.put, bodies, priority=few, delay=st.sampled_from([0, 0, 1])),
    st.builds(beanstalk.put_unique, bodies, st.sampled_from([b"k", b"k" * 150]), few),
    st.builds(
        beanstalk.put_limited, bodies, st.sampled_from([b"c", b"c" * 90]), st.integers(1, 2),
        st.sampled_from([b"", b"k" * 60]), few, delay=st.sampled_from([0, 0, 1]),
    ),
    st.builds(beanstalk.reserve, st.sampled_from([None, 0, 0, 9])),
    st.builds(beanstalk.batch_reserve, st.integers(1, 9), few),
    st.tuples(
        st.sampled_from(
            [beanstalk.reserve_job, beanstalk.delete, beanstalk.release, beanstalk.bury, beanstalk.touch,
             beanstalk.peek, beanstalk.kick_job, beanstalk.stats_job]
        ),
        job_ids,
    ).map(lambda asked: asked[0](asked[1])),
    st.tuples(
        st.sampled_from([beanstalk.use, beanstalk.watch, beanstalk.ignore, beanstalk.stats_tube]), tubes
    ).map(lambda asked: asked[0](asked[1])),
    st.builds(beanstalk.pause_tube, tubes, few),
    st.builds(beanstalk.kick, few),
    st.builds(beanstalk.clear_tube, tubes),
    st.builds(beanstalk.limit_reserves, tubes, few, tubes),
    st.builds(beanstalk.list_jobs, tubes, job_states, job_ids, few, st.sampled_from([b"", b"x", b"\r\n", b"n" * 1024])),
    st.sampled_from([
        beanstalk.list_tubes(), beanstalk.list_tubes_watched(), beanstalk.list_tube_used(), beanstalk.stats(),
        *(beanstalk.peek_next(state) for state in ("ready", "delayed", "buried")),
    ]),
)  # fmt: skip
lines_wrong = st.one_of(
    st.binary(max_size=30).map(lambda data: data + b"\r\n"),
    st.builds(
        lambda fill, size: fill * size + b"\r\n", st.sampled_from([b"a", b"\r", b"\r\r\n"]),
        st.sampled_from([220, 222, 223, 224, 448, 500]),
    ),
    st.sampled_from([
        b"put 1 2 3\r\n", b"put 0 0 1 3\r\nbad..", b"put 0 0 1 4294967296\r\n", b"peek  1\r\n", b"delete -1\r\n",
        b"search-jobs t all 0 9 1025\r\n" + b"n" * 1027, b"search-jobs default all 0 9 1\r\nxyz",
        b"batch-reserve 0 0\r\n", b"clear-tube t reserved\r\n", b"quit\r\n", b"quit \r\n", b"use t\n\r\n",
        b"put-unique 0 0 1 1 -k 0\r\nx\r\n", b"put-limited 0 0 1 1 c 0\r\nx\r\n", b"put-limited 0 0 1 1 c 1 k\r\n",
    ]),
)  # fmt: skip


def play_beanstalk(pieces: Iterable[bytes], *, pull: str = EAGER, end: bool = False, filled: int = 0) -> Outcome:
    """filled: buried jobs that there are before."""
    store = make_beanstalk_store(job_size_max=JOB_MAX, memory_limit=1 << 20)
    Permits(store)
    if filled:
        holder = store.session(START_NS)
        holder.receive(beanstalk.put(b"filler") * filled, START_NS)
        for first in range(1, filled + 1, 100):
            ids = range(first, min(first + 100, filled + 1))
            asked = b"".join(beanstalk.reserve_job(each) + beanstalk.bury(each) for each in ids)
            answered = holder.receive(asked, START_NS) + b"".join(outputs(holder, START_NS))
            assert answered.count(b"BURIED") == len(ids)
    session = store.session(START_NS)
    output = bytearray()
    for piece in pieces:
        output += session.receive(piece, START_NS)
        if pull == ONE_BY_ONE:
            output += session.take_output(START_NS)
        if pull == EAGER:
            output += b"".join(outputs(session, START_NS))
    output += b"".join(outputs(session, START_NS))
    if end:
        output += session.eof(START_NS) + b"".join(outputs(session, START_NS))
    closing = session.closing
    store.audit()
    session.closed(START_NS)
    store.take_dirty()
    while 0 <= store.next_deadline() <= START_NS:
        store.tick(START_NS)
    store.audit()
    left_behind = {**store.snapshot(), **{"/".join(outcome[:2]): outcome[2] for outcome in store.outcomes()}}
    return Outcome(bytes(output), closing, left_behind)


@settings(max_examples=examples(60), deadline=None)
@given(
    asked=st.lists(st.one_of(lines_right, lines_right, lines_right, lines_wrong), min_size=1, max_size=10),
    unfinished=st.sampled_from([b"", b"", b"\r", b"put 0 0 1 5\r\nabc", b"a" * 223, b"a" * 300]),
    positions=st.lists(st.integers(1, 1 << 13), max_size=8),
    end=st.booleans(),
)
def test_any_stream_of_beanstalk_cut_once_anywhere_or_in_any_way(
    asked: list[bytes], unfinished: bytes, positions: list[int], end: bool
) -> None:
    stream = b"".join(asked) + unfinished
    expected = play_beanstalk([stream], end=end)
    for position in range(1, len(stream), max(1, len(stream) // BEANSTALK_STRIDES)):
        assert play_beanstalk(cut(stream, [position]), end=end) == expected, f"cut at {position}"
    assert play_beanstalk(chunks(stream, 1), end=end) == expected
    cuts = {position % len(stream) for position in positions}
    for pull in (ONE_BY_ONE, LATE):
        assert play_beanstalk(cut(stream, cuts), pull=pull, end=end) == expected, pull


@settings(max_examples=examples(20), deadline=None)
@given(
    asked=st.lists(
        st.one_of(
            lines_right,
            st.just(beanstalk.kick(2000)),
            st.just(beanstalk.clear_tube(b"default", "buried")),
            st.just(beanstalk.list_jobs(b"default", count=900, needle=b"fill")),
            st.just(beanstalk.batch_reserve(900, 1)),
        ),
        min_size=1, max_size=6,
    ),
    positions=st.lists(st.integers(1, 1 << 10), max_size=4),
    pull=st.sampled_from([EAGER, ONE_BY_ONE, LATE]),
    end=st.booleans(),
)  # fmt: skip
def test_any_stream_of_beanstalk_with_long_commands_cut_in_any_way(
    asked: list[bytes], positions: list[int], pull: str, end: bool
) -> None:
    """They take several calls, and what is behind them waits."""
    stream = b"".join(asked)
    expected = play_beanstalk([stream], end=end, filled=2000)
    cuts = {position % len(stream) for position in positions}
    assert play_beanstalk(cut(stream, cuts), pull=pull, end=end, filled=2000) == expected


# ---- the smockron protocol ------------------------------------------------------------------------------------------

SMOCKRON_STRIDES = 24  # each needs a store
SMOCKRON_MAX = 1 << 13  # bytes of a message

topics = st.sampled_from([b"day\0", b"day", b"second\0", b"none\0", b"d" * 300])
told = st.sampled_from([b"ACCEPTED", b"ACCEPTED", b"DELAYED", b"REJECTED", b"FORGET", b"?"])
identifiers = st.sampled_from([b"", b"a", b"b" * 25, b"c" * 256, b"d" * 4096, b"d" * 4097])
moments = st.sampled_from([b"0", b"1.5", b"x", b"", b"9" * 20])
messages_right = st.one_of(
    st.builds(smockron.message, topics, told, identifiers, moments, moments),
    st.builds(smockron.message, topics, told, identifiers, moments, moments, st.just(b"log")),
    st.builds(smockron.message, st.sampled_from([b"\0", b"\1", b"\1day\0", b"\0day\0", b"\1" + b"p" * 1025])),
    st.builds(smockron.subscribe, st.sampled_from([b"", b"day", b"day\0", b"second", b"p" * 1025])),
    st.builds(smockron.cancel, st.sampled_from([b"", b"day", b"none"])),
    st.builds(smockron.ping, st.sampled_from([0, 1]), st.sampled_from([b"", b"c" * 16])),
    st.sampled_from([
        smockron.command(b"PING", b"\0\0" + b"c" * 17), smockron.command(b"?"), smockron.frame(b"", smockron.COMMAND),
        smockron.frame(b"x", smockron.MORE) + smockron.ping(0, b"between") + smockron.frame(b"y"),
        smockron.message(*[b"x"] * 64),
    ]),
)  # fmt: skip
messages_wrong = st.one_of(
    st.binary(min_size=1, max_size=30),
    st.sampled_from([
        smockron.frame(b"x", smockron.MORE) * 64 + smockron.frame(b"x"), smockron.frame(bytes(SMOCKRON_MAX)),
        smockron.frame(bytes(5000), smockron.MORE) + smockron.frame(bytes(5000)), smockron.greeting(), b"\x05\0",
        smockron.command(b"ERROR", b"\0"), smockron.frame(b"x", smockron.MORE) + b"\xff", b"\xff" + bytes(9),
    ]),
)  # fmt: skip
handshakes = st.sampled_from([
    *(smockron.greeting() + smockron.ready(kind) for kind in smockron.SocketType for _ in range(3)),
    smockron.greeting() + smockron.command(b"READY", b"\x0bsocket-type\0\0\0\4XPUB"),
    smockron.greeting()[:11] + bytes(1) + smockron.greeting()[12:] + smockron.ready(smockron.SocketType.PUB),
    smockron.greeting() + smockron.command(b"READY", b"\x0bSocket-Type\0\0\0\4PU"),
    smockron.greeting(), smockron.ready(smockron.SocketType.SUB), b"",
])  # fmt: skip
smockron_streams = st.builds(
    lambda handshake, sent, unfinished: handshake + b"".join(sent) + unfinished,
    handshakes,
    st.lists(st.one_of(messages_right, messages_right, messages_right, messages_wrong), max_size=10),
    st.sampled_from([b"", b"", smockron.greeting()[:20], smockron.message(b"day", b"ACCEPTED")[:-1], b"\2"]),
)


def play_smockron(port: int, pieces: Iterable[bytes], *, end: bool = False) -> tuple[Outcome, bytes]:
    """What comes of a stream, and what somebody who has subscribed to everything is told meanwhile.

    Behind it somebody sends a request that both may be told of.
    """
    store = make_smockron_store(message_max=SMOCKRON_MAX)
    ear, gate, session = store.session(START_NS, 1), store.session(START_NS), store.session(START_NS, port)
    opened = smockron.greeting() + smockron.ready(smockron.SocketType.SUB) + smockron.subscribe(b"")
    heard = bytearray(ear.receive(opened, START_NS) + b"".join(outputs(ear, START_NS)))
    output = bytearray()
    for piece in pieces:
        output += session.receive(piece, START_NS) + b"".join(outputs(session, START_NS))
        heard += b"".join(outputs(ear, START_NS))
    last = smockron.accounting(b"day", smockron.Status.ACCEPTED, b"last", 0)
    gate.receive(smockron.greeting() + smockron.ready(smockron.SocketType.PUB) + last, START_NS)
    heard += b"".join(outputs(ear, START_NS))
    output += b"".join(outputs(session, START_NS))
    if end:
        output += session.eof(START_NS)
    closing = session.closing
    store.audit()
    for each in (session, gate, ear):
        each.closed(START_NS)
    store.take_dirty()
    store.audit()
    left_behind = {**store.snapshot(), **{"/".join(outcome[:2]): outcome[2] for outcome in store.outcomes()}}
    return Outcome(bytes(output), closing, left_behind), bytes(heard)


@settings(max_examples=examples(60), deadline=None)
@given(
    port=st.integers(0, 1),
    stream=smockron_streams,
    positions=st.lists(st.integers(1, 1 << 14), max_size=8),
    end=st.booleans(),
)
def test_any_stream_of_smockron_cut_once_anywhere_or_in_any_way(
    port: int, stream: bytes, positions: list[int], end: bool
) -> None:
    expected = play_smockron(port, [stream], end=end)
    for position in range(1, len(stream), max(1, len(stream) // SMOCKRON_STRIDES)):
        assert play_smockron(port, cut(stream, [position]), end=end) == expected, f"cut at {position}"
    assert play_smockron(port, chunks(stream, 1), end=end) == expected
    cuts = {position % len(stream) for position in positions if stream}
    assert play_smockron(port, cut(stream, cuts), end=end) == expected
