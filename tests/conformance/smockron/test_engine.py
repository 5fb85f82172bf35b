"""Level 1: the vectors against the engine in memory, with a clock that the test drives, however their streams are
cut.

Also properties of the vectors themselves."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING

import pytest

from conformance import vectors
from conformance.smockron.dialect import port_of
from conformance.smockron.engine import HERE, Pump, make_store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CASES = vectors.load("smockron")
STREAMS = {case.name: (case.steps[0].on, stream) for case in CASES if (stream := vectors.stream(case)) is not None}

# Single cuts that are tried in a stream: all of them up to this length, else as many at equal distances.
EVERY_CUT_MAX = 300
PIECES = (1, 2, 3, 5, 7, 63, 64, 65, 255, 256, 1023)
# A greeting and a READY end before: where what is sent in one step is cut, whatever the case is about.
FRAME_CUTS = 40
PAGE = HERE.parents[2] / "docs" / "protocols" / "smockron.md"


def run(case: vectors.Case, bench: Pump, cut: Callable[[bytes], Iterable[bytes]] = lambda data: [data]) -> None:
    """Runs the case with all sent data split like this."""
    bench.cut = cut
    vectors.run_case(case, bench.connect_by_name, by_name=True, advance=bench.advance, happen=bench.happen)
    assert bench.store.sessions_open == 0, case.name
    assert bench.store.snapshot()["subscriptions"] == 0, case.name


def run_all(cut: Callable[[bytes], Iterable[bytes]]) -> None:
    for case in CASES:
        run(case, Pump(make_store()), cut)


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
        if not case.driven:
            run(case, bench)
            bench.store.audit()
    bench.advance(366 * 86_400 * 10**9)
    assert bench.store.snapshot()["identifiers"] == 0


# ---- every way of cutting them --------------------------------------------------------------------------------------


def test_cases_byte_by_byte() -> None:
    run_all(lambda data: chunks(data, 1))


@pytest.mark.parametrize("position", range(1, FRAME_CUTS))
def test_cases_with_each_send_in_two_pieces(position: int) -> None:
    run_all(lambda data: cut_at(data, [position]))


@pytest.mark.parametrize("seed", range(3))
def test_cases_in_random_pieces(seed: int) -> None:
    numbers = random.Random(seed)
    run_all(lambda data: cut_at(data, (numbers.randrange(len(data)) for _ in range(numbers.choice((1, 3, 10))))))


def said(name: str, pieces: Iterable[bytes], *, end: bool = False) -> tuple[bytes, bool]:
    """The answers to a stream in these pieces, and whether it is closed then."""
    bench = Pump(make_store())
    session, now_ns = bench.store.session(bench.now_ns, port_of(name)), bench.now_ns
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


@pytest.mark.parametrize("name", STREAMS)
def test_streams_in_two_pieces(name: str) -> None:
    on, stream = STREAMS[name]
    assert said(on, [stream.sent]) == (stream.expected, stream.closes), "at once"
    for position in single_cuts(len(stream.sent)):
        pieces = cut_at(stream.sent, [position])
        assert said(on, pieces) == (stream.expected, stream.closes), f"cut at {position}"


@pytest.mark.parametrize("name", STREAMS)
def test_streams_in_many_pieces_and_their_end(name: str) -> None:
    on, stream = STREAMS[name]
    for size in PIECES:
        assert said(on, chunks(stream.sent, size), end=True) == (stream.expected, True), f"in pieces of {size}"


# ---- what the vectors promise ---------------------------------------------------------------------------------------


def test_every_section_of_the_page_has_a_case() -> None:
    page = PAGE.read_text("utf-8")
    sections = {line.strip("# ") for line in page.splitlines() if line.startswith("##")}
    assert {case.section for case in CASES} <= sections
    told = sections - {
        "On the wire",
        "Shared state",
        "Several masters",
        "Where counterd differs, and why",
        "Guarantees",
    }
    assert told == {case.section for case in CASES}


def test_the_cases_cover_every_outcome() -> None:
    """Except a handshake that takes too long, at the other level."""
    bench = Pump(make_store())
    seen: set[tuple[str, str]] = set()
    for case in CASES:
        bench = Pump(make_store())
        run(case, bench)
        seen |= {(operation, outcome) for operation, outcome, _ in bench.store.outcomes()}
    assert seen == {
        ("accepted", "ok"), ("accepted", "throttled"), ("accepted", "malformed"), ("delayed", "throttled"),
        ("delayed", "malformed"), ("rejected", "ok"), ("forget", "ok"), ("accounting", "unknown_domain"),
        ("accounting", "malformed"), ("subscribe", "ok"), ("subscribe", "malformed"), ("subscribe", "refused"),
        ("cancel", "ok"), ("ping", "ok"), ("ping", "malformed"), ("handshake", "ok"), ("handshake", "refused"),
        ("handshake", "timed_out"), ("unknown", "framing_lost"),
    }  # fmt: skip
