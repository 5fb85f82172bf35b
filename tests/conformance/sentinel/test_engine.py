"""Level 1: the vectors against the engine in memory, with a clock that the test drives, however their streams are
cut.

Also properties of the vectors themselves."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from conformance import vectors
from conformance.sentinel.engine import RULES, Pump, make_store
from counterd.protocols.sentinel.wire import MessageType, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CASES = vectors.load("sentinel")
STREAMS = {case.name: stream for case in CASES if (stream := vectors.stream(case)) is not None}

# Single cuts that are tried in a stream: all of them up to this length, else as many at equal distances.
EVERY_CUT_MAX = 300
PIECES = (1, 2, 3, 5, 7, 18, 19, 64, 1023, 1024, 1025)
# All requests but a PING and a PARAM end before: where each of them is cut in every case, whatever it is about.
FRAME_CUTS = 28
# Longer than any window of a case that is one stream, and whole windows of all of them.
LATER_NS = 600 * 10**9


def run(case: vectors.Case, bench: Pump, cut: Callable[[bytes], Iterable[bytes]] = lambda data: [data]) -> None:
    """Runs the case from the beginning of a sample of every window, with all sent data split like this."""
    bench.advance(-bench.now_ns % LATER_NS)
    bench.cut = cut
    vectors.run_case(case, bench.connect, advance=bench.advance, happen=bench.happen)
    assert bench.store.sessions_open == 0, case.name


def run_all(cut: Callable[[bytes], Iterable[bytes]]) -> None:
    """Runs all cases on one store, which is faster than one for each; after a drain there must be another."""
    bench = Pump(make_store())
    for case in sorted(CASES, key=lambda case: "drain" in case.happenings):
        bench.happen("first")
        run(case, bench, cut)
    bench.store.audit()


def cut_at(data: bytes, positions: Iterable[int]) -> list[bytes]:
    borders = [0, *sorted(position for position in set(positions) if 0 < position < len(data)), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(borders)]


def chunks(data: bytes, size: int) -> list[bytes]:
    return cut_at(data, range(size, len(data), size))


# ---- the vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_engine_does_what_the_vector_says(case: vectors.Case) -> None:
    bench = Pump(make_store())
    run(case, bench)
    bench.store.audit()


def test_all_cases_pass_in_one_store() -> None:
    """As with one server at the other level: remains of one case exist for later ones."""
    bench = Pump(make_store())
    for case in CASES:
        if "drain" not in case.happenings:
            run(case, bench)
            bench.store.audit()
    bench.advance(3600 * 10**9)
    figures = bench.store.snapshot()
    assert figures["tokens"] == figures["param_values"] == figures["namespaces"] == bench.store.held() == 0


def test_replies_do_not_depend_on_sweeps() -> None:
    """Without ticks of the store, only requests notice that a lease has ended."""
    for case in CASES:
        if not any("swept" in step.note or step.eventually for step in case.steps):
            run(case, Pump(make_store(), ticking=False))


# ---- every way of cutting them --------------------------------------------------------------------------------------


def test_cases_byte_by_byte() -> None:
    run_all(lambda data: chunks(data, 1))


@pytest.mark.parametrize("position", range(1, FRAME_CUTS))
def test_cases_with_every_request_in_two_pieces(position: int) -> None:
    run_all(lambda data: cut_at(data, [position]))


@pytest.mark.parametrize("seed", range(3))
def test_cases_in_random_pieces(seed: int) -> None:
    numbers = random.Random(seed)
    run_all(lambda data: cut_at(data, (numbers.randrange(len(data)) for _ in range(numbers.choice((1, 3, 10))))))


class Ear:
    """Receives one stream after the other, each so much later that nothing counts any more of the one before."""

    def __init__(self) -> None:
        self.bench = Pump(make_store())

    def said(self, pieces: Iterable[bytes], *, end: bool = False) -> tuple[bytes, bool]:
        """The answers to a stream in these pieces, and whether it is closed then."""
        self.bench.advance(LATER_NS)
        session, now_ns = self.bench.store.session(self.bench.now_ns), self.bench.now_ns
        output = bytearray()
        for piece in pieces:
            output += session.receive(piece, now_ns)
            while session.more:
                output += session.take_output(now_ns)
        if end:
            output += session.eof(now_ns)
            while session.more:
                output += session.take_output(now_ns)
        closing = session.closing
        session.closed(now_ns)
        return bytes(output), closing


def single_cuts(size: int) -> Iterable[int]:
    return range(1, size) if size <= EVERY_CUT_MAX else range(1, size, size // EVERY_CUT_MAX + 1)


def test_streams_in_two_pieces() -> None:
    ear = Ear()
    for name, stream in STREAMS.items():
        assert ear.said([stream.sent]) == (stream.expected, stream.closes), f"{name} at once"
        for position in single_cuts(len(stream.sent)):
            pieces = cut_at(stream.sent, [position])
            assert ear.said(pieces) == (stream.expected, stream.closes), f"{name}, cut at {position}"


def test_streams_in_many_pieces_and_their_end() -> None:
    ear = Ear()
    for name, stream in STREAMS.items():
        numbers = random.Random(name)
        for size in PIECES:
            pieces = chunks(stream.sent, size)
            assert ear.said(pieces, end=True) == (stream.expected, True), f"{name} in pieces of {size}"
        for seed in range(3):
            pieces = cut_at(stream.sent, (numbers.randrange(len(stream.sent)) for _ in range(seed * 5)))
            assert ear.said(pieces) == (stream.expected, stream.closes), f"{name}, random pieces {seed}"


# ---- what the vectors promise ---------------------------------------------------------------------------------------


def frames_of(data: bytes) -> Iterable[bytes]:
    while data:
        size = 2 + int.from_bytes(data[:2], "big")
        yield data[2:size]
        data = data[size:]


def test_the_cases_cover_every_type_and_status() -> None:
    """For a status with unpredictable data, the case's name counts."""
    seen = set()
    for case in CASES:
        for step in case.steps:
            if isinstance(step.expect, vectors.Pattern):
                seen.update(known(step.expect))
            elif isinstance(step.expect, bytes):
                seen.update((frame[4], frame[5]) for frame in frames_of(step.expect))
    told = {(type, status - 256 if status > 127 else status) for type, status in seen}
    everywhere = {Status.OK, Status.BAD_REQUEST}
    asked = {Status.OK, Status.BLOCKED, Status.NO_RULE, Status.BAD_REQUEST}
    held = {Status.ALREADY_RELEASED, Status.NO_RULE, Status.BAD_REQUEST}
    expected = {
        MessageType.PING: everywhere | {Status.FAIL},
        MessageType.FLOW: asked | {Status.SHOULD_WAIT, Status.TOO_MANY_REQUESTS},
        MessageType.PARAM: asked | {Status.TOO_MANY_REQUESTS},
        MessageType.ACQUIRE: asked | {Status.NOT_AVAILABLE},
        MessageType.RELEASE: held | {Status.RELEASE_OK},
        MessageType.KEEP: held | {Status.OK},
    }
    for type, statuses in expected.items():
        assert {status for kind, status in told if kind == type} == statuses


def known(pattern: vectors.Pattern) -> Iterable[tuple[int, int]]:
    """Type and status of each frame whose head, at least, is known."""
    data = b"".join(part if isinstance(part, bytes) else bytes(part.size) for part in pattern.parts)
    return ((frame[4], frame[5]) for frame in frames_of(data))


def test_cases_use_different_rules_and_namespaces() -> None:
    """Except flows without a rule."""
    ruled = {rule.flow_id for rules in RULES.values() for rule in (*rules.flows, *rules.params)}
    owners: dict[int | bytes, str] = {}
    for case in CASES:
        for step in case.steps:
            for name in named(step.send) if isinstance(step.send, bytes) else ():
                if isinstance(name, bytes) or name in ruled:
                    assert owners.setdefault(name, case.name) == case.name


def named(stream: bytes) -> set[int | bytes]:
    """The flows and namespaces that whole requests name."""
    found: set[int | bytes] = set()
    for frame in frames_of(stream):
        if len(frame) > 4 and frame[4] in (MessageType.FLOW, MessageType.PARAM, MessageType.ACQUIRE):
            found.add(int.from_bytes(frame[5:13], "big", signed=True))
        elif len(frame) > 9 and frame[4] == MessageType.PING and len(frame) == 9 + int.from_bytes(frame[5:9], "big"):
            found.add(frame[9:])
    return found
