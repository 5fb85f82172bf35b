"""PermitCalls: each pending call gets its own answer, and permits granted to an abandoned call are given back.

The last tests mix the order of the answers at random and cut the bytes anywhere."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterd.client._calls import Call
from counterd.client.counter._permits import PermitCalls
from counterd.errors import ConnectionLost, CounterdError, NotAcquired, NotAvailable, ProtocolError, ServerError
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import OnDeath, Permit, Rate
from kit.scripted.counter import responded

ONE = b"\0\0\0\1"
GRANT_7 = struct.pack(">Q4I", 7, 3, 6, 6, 6)
ENTRY = b"\0\0\0\1\0\0\0\2\0\1a"


class Kept(Call):
    """A call that records how it ended. wanted: whether somebody waits for it."""

    def __init__(self, wanted: bool = True) -> None:
        super().__init__()
        self.wanted = wanted
        self.ends: list[tuple[Any, CounterdError | None]] = []

    def settle(self, result: Any, error: CounterdError | None) -> bool:
        self.ends.append((result, error))
        return self.wanted


def asked(calls: PermitCalls, *request: Any, wanted: bool = True) -> Kept:
    call = Kept(wanted)
    assert calls.add(call, *request) == call.frame
    return call


def opaque(call: Call) -> int:
    return int.from_bytes(call.frame[8:12], "big")


def answer(call: Call, body: bytes = b"", status: int = 0) -> bytes:
    return responded(call.frame[1], opaque(call), body, status)


def test_answers_in_any_order() -> None:
    calls = PermitCalls()
    first, second = asked(calls, wire.get, b"a"), asked(calls, wire.noop)
    assert opaque(first) != opaque(second)
    calls.feed(answer(second) + answer(first, ONE))
    assert (first.ends, second.ends) == ([(1, None)], [(None, None)])
    assert calls.pending == {}


def test_entries_of_two_dumps() -> None:
    calls = PermitCalls()
    first, second = asked(calls, wire.dump), asked(calls, wire.dump)
    calls.feed(answer(first, ENTRY) + answer(second, ENTRY) + answer(first, ENTRY) + answer(second))
    assert (first.ends, second.ends) == ([], [([(b"a", 1, 2, None, None)], None)])
    calls.feed(answer(first))
    assert [len(result) for result, _ in first.ends] == [2]


def test_grants_add_to_what_is_held_and_releases_subtract() -> None:
    calls = PermitCalls()
    acquired = asked(calls, wire.acquire, b"a", 5, 9)
    assert calls.held == 0
    calls.feed(answer(acquired, b"\0\0\0\5"))
    assert calls.held == 5
    released = asked(calls, wire.release, b"a", 2)
    assert calls.held == 3  # whatever becomes of the connection, these are not missed
    calls.feed(answer(released))
    assert calls.held == 3
    refused = asked(calls, wire.release, b"a", 4)
    calls.feed(answer(refused, b"Not acquired", 0x22))
    assert calls.held == 3
    assert isinstance(refused.ends[0][1], NotAcquired)
    calls.feed(answer(asked(calls, wire.acquire, b"a", 5, 9), b"Resource not available", 0x21))
    assert calls.held == 3


def test_a_refused_acquire_has_the_details_of_the_request() -> None:
    calls = PermitCalls()
    call = asked(calls, wire.acquire, b"a\xff", 5, 9)
    calls.feed(answer(call, b"no", 0x21))
    error = call.ends[0][1]
    assert isinstance(error, NotAvailable)
    assert (error.name, error.resources, error.maximum, error.text) == (b"a\xff", 5, 9, "no")
    assert error.limit is None
    call = asked(calls, wire.acquire, b"a", 5, 9)
    calls.feed(answer(call, b"More than the limit of the server: 4", 0x21))
    error = call.ends[0][1]
    assert isinstance(error, NotAvailable)
    assert (error.resources, error.maximum, error.limit) == (5, 4, 4)
    for request, shown in (
        ((wire.get, b"a"), "no (status 0x01): a"),
        ((wire.release, b"a", 2), "no (status 0x01): asked for 2 of a"),
        ((wire.acquire, b"a", 2, 3), "no (status 0x01): asked for 2 of a, maximum 3"),
        ((wire.noop,), "no (status 0x01)"),
    ):
        call = asked(calls, *request)
        calls.feed(answer(call, b"no", 0x01))
        assert str(call.ends[0][1]) == shown


@pytest.mark.parametrize(
    ("rate", "most", "retry_ms", "shown"),
    [
        (Rate(b"r", 1, 2, 60_000_000, 2), 2, 29_500, ", limit 2 per 60 s, retry after 29.5 s"),
        (Rate(b"r", 1, 2, 500_000, 9), 9, wire.U32_MAX, ", limit 2 per 0.5 s, at most 9 at once"),
        (Rate(b"r", 1), 5, 1, ", at most 5 at once, retry after 0.001 s"),
    ],
)
def test_a_refused_rate_has_the_details_of_the_rate(rate: Rate, most: int, retry_ms: int, shown: str) -> None:
    calls = PermitCalls()
    call = asked(calls, wire.take, [rate])
    calls.feed(answer(call, struct.pack(">BIII", 0, 0, most, retry_ms) + b"no", 0x21))
    assert str(call.ends[0][1]) == f"no (status 0x21): asked for 1 of r{shown}"


def test_permits_granted_to_an_abandoned_call_are_given_back() -> None:
    calls = PermitCalls()
    calls.feed(answer(asked(calls, wire.acquire, b"a\0", 5, 9, wanted=False), b"\0\0\0\5"))
    calls.feed(answer(asked(calls, wire.acquire, b"b", 5, 9, wanted=False), b"no", 0x21))
    calls.feed(answer(asked(calls, wire.get, b"c", wanted=False), ONE))
    assert calls.give_back == [(wire.release, b"a\0", 5)]
    assert calls.held == 5


def test_an_abandoned_pipeline_gives_back_only_what_it_does_not_release_itself() -> None:
    """Else permits of another hold of that name would be given back too."""
    requests = [
        (wire.release, b"a", 9),  # of what was held before: nothing to do with what follows
        (wire.acquire, b"a", 5, 9),
        (wire.acquire, b"b", 1, 9),
        (wire.release, b"a", 2),
        (wire.acquire, b"a", 3, 9),
        (wire.release, b"a", 4),
    ]
    calls, under_way = PermitCalls(), [Kept(wanted=False) for _ in requests]
    calls.add_all(under_way, requests)
    for call, permits in zip(under_way, (b"", 5, 1, b"", 3, b""), strict=True):
        body = permits.to_bytes(4, "big") if isinstance(permits, int) else permits
        calls.feed(responded(call.frame[1], opaque(call), body))
    assert calls.give_back == [(wire.release, b"b", 1), (wire.release, b"a", 2)]


@pytest.mark.parametrize(
    ("requests", "answers", "back"),
    [
        # The second is refused, so the release is that of the first.
        ([(wire.acquire, b"a", 2, 9), (wire.acquire, b"a", 5, 6), (wire.release, b"a", 2)], [2, None, 0], []),
        ([(wire.acquire, b"a", 2, 9), (wire.release, b"a", 3)], [2, None], [(b"a", 2)]),
        ([(wire.acquire, b"a", 2, 9), (wire.release, b"a", 1)], [2], [(b"a", 1)]),
    ],
)
@pytest.mark.parametrize("forgotten_at", [0, 1, 9])
def test_an_abandoned_pipeline_with_refusals_gives_back_what_it_was_granted(
    requests: Any, answers: Any, back: Any, forgotten_at: int
) -> None:
    """It gives back all of its own permits and none of others, whenever its caller abandons it."""
    calls, under_way = PermitCalls(), [Kept() for _ in requests]
    calls.add_all(under_way, requests)
    for at, permits in enumerate([*answers, ...]):
        if at >= forgotten_at or permits is ...:
            for call in under_way:
                call.wanted = False
                calls.forget(call)
        if permits is ...:
            break
        call = under_way[at]
        body = permits.to_bytes(4, "big") if permits else b""
        calls.feed(responded(call.frame[1], opaque(call), body, 0x22 if permits is None else 0))
    assert calls.give_back == [(wire.release, *each) for each in back]


def test_add_all_adds_all_calls_or_none() -> None:
    calls = PermitCalls()
    before = asked(calls, wire.acquire, b"a", 5, 9)
    calls.feed(answer(before, b"\0\0\0\5"))
    made = [Kept() for _ in range(3)]
    frames = calls.add_all(made, [(wire.release, b"a", 1), (wire.noop,), (wire.get, b"a")])
    assert frames == b"".join(call.frame for call in made)
    assert (len(calls.pending), calls.held) == (3, 4)
    with pytest.raises(ValueError, match=r"^name"):
        calls.add_all([Kept() for _ in range(3)], [(wire.release, b"a", 1), (wire.noop,), (wire.get, b"")])
    assert (len(calls.pending), calls.held) == (3, 4)


def test_opaques_wrap_around_and_skip_those_in_use() -> None:
    calls = PermitCalls()
    old = asked(calls, wire.noop)
    calls._opaque = wire.U32_MAX - 1
    assert [opaque(asked(calls, wire.noop)) for _ in range(4)] == [wire.U32_MAX, 0, 2, 3]
    assert opaque(old) == 1


def test_a_lost_connection_fails_all_pending_calls() -> None:
    calls = PermitCalls()
    made = [asked(calls, wire.noop) for _ in range(3)]
    calls.fail(lambda: ConnectionLost("gone"))
    errors = [error for call in made for _, error in call.ends]
    assert [str(error) for error in errors] == ["gone"] * 3
    assert len(set(map(id, errors))) == 3  # each has its own traceback
    assert calls.pending == {}


@pytest.mark.parametrize(
    ("request_", "sent", "message"),
    [
        ((wire.noop,), responded(0, 2), "no request has the opcode 00 and the opaque 00000002"),
        ((wire.noop,), responded(1, 1), "no request has the opcode 01 and the opaque 00000001"),
        ((wire.noop,), responded(1, 1, status=1), "no request has the opcode 01"),
        ((wire.noop,), responded(0, 1, b"a"), "expected a reply without a body, not 61"),
        ((wire.release, b"a", 1), responded(3, 1, b"a"), "expected a reply without a body, not 61"),
        ((wire.get, b"a"), responded(1, 1, b"abc"), "61 62 63"),
        ((wire.acquire, b"a", 1, 1), responded(2, 1), "nothing"),
        ((wire.acquire, b"a", 1, 9), responded(2, 1, b"\0\0\0\2"), "more was granted than was asked for: 00 00 00 02"),
        ((wire.stats,), responded(16, 1, b"a"), "61"),
        ((wire.dump,), responded(17, 1, b"a"), "61"),
        ((wire.noop,), b"\x90", "not the start"),
    ],
)
def test_invalid_answers_are_protocol_errors(request_: tuple[Any, ...], sent: bytes, message: str) -> None:
    calls = PermitCalls()
    call = asked(calls, *request_)
    with pytest.raises(ProtocolError, match=message):
        calls.feed(sent)
    assert call.ends == []


def test_a_second_answer_to_one_request_is_a_protocol_error() -> None:
    calls = PermitCalls()
    call = asked(calls, wire.noop)
    with pytest.raises(ProtocolError, match="no request has the"):
        calls.feed(answer(call) * 2)
    assert call.ends == [(None, None)]


def test_an_abandoned_take_is_given_back() -> None:
    """Its permits, and the units of its rates, except of a rate whose units cannot be settled."""
    calls = PermitCalls()
    items = [Permit(b"a", 2, 5), *(Rate(bytes([name]), 3, 9, 1_000_000, 9, OnDeath(name)) for name in range(3))]
    call = asked(calls, wire.take, items, wanted=False)
    calls.feed(answer(call, GRANT_7))
    assert calls.give_back == [
        (wire.release, b"a", 2),
        (wire.settle, 7, bytes([OnDeath.CHARGED]), 0),
        (wire.settle, 7, bytes([OnDeath.REFUNDED]), 0),
    ]


# ---- any interleaving ------------------------------------------------------------------------------------------------

U32 = st.integers(0, wire.U32_MAX)
NAMES = st.binary(min_size=1, max_size=40)
ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=10)


def number(value: int) -> list[bytes]:
    return [struct.pack(">I", value)]


def stats(items: dict[str, str]) -> list[bytes]:
    pairs = ((name.encode(), value.encode()) for name, value in items.items())
    return [b"".join(struct.pack(">HH", len(name), len(value)) + name + value for name, value in pairs)]


def entries(found: list[wire.DumpEntry]) -> list[bytes]:
    heads = (struct.pack(">IIH", entry.consumption, entry.peak, len(entry.name)) for entry in found)
    more = ([number for number in (entry.limit, entry.everywhere) if number is not None] for entry in found)
    limits = (struct.pack(f">{len(numbers)}I", *numbers) for numbers in more)
    names = (entry.name for entry in found)
    return [*map(b"".join, zip(heads, names, limits, strict=True)), b""]


ENTRIES = st.one_of(
    st.builds(wire.DumpEntry, NAMES, U32, U32, st.none() | U32, st.none()),
    st.builds(wire.DumpEntry, NAMES, U32, U32, U32, U32),
)
# A request, the bodies of its answer, and what the caller is to get.
SUCCESSES: st.SearchStrategy[tuple[tuple[Any, ...], list[bytes], Any]] = st.one_of(
    st.just(((wire.noop,), [b""], None)),
    st.builds(lambda name, value: ((wire.get, name), number(value), value), NAMES, U32),
    st.builds(lambda name, value: ((wire.acquire, name, value, value), number(value), value), NAMES, U32),
    st.builds(lambda name, value: ((wire.release, name, value), [b""], None), NAMES, U32),
    st.builds(lambda items: ((wire.stats,), stats(items), items), st.dictionaries(ASCII, ASCII, max_size=4)),
    st.builds(lambda found: ((wire.dump,), entries(found), found), st.lists(ENTRIES, max_size=4)),
)
REFUSALS = st.builds(lambda success, status: (success[0], [(status, b"no")], status), SUCCESSES, st.integers(1, 255))
PLANS = st.lists(st.one_of(SUCCESSES, REFUSALS), max_size=12)


def cut(data: bytes, at: list[int]) -> list[bytes]:
    places = sorted({min(place, len(data)) for place in at})
    return [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]


def frames(call: Call, bodies: list[Any]) -> list[bytes]:
    opaque = int.from_bytes(call.frame[8:12], "big")
    made = []
    for body in bodies:
        status, text = body if isinstance(body, tuple) else (0, body)
        made.append(wire.frame(call.frame[1], opaque, text, magic=wire.RESPONSE_MAGIC, flags=status))
    return made


CUTS = st.lists(st.integers(0, 2000), max_size=20)


@settings(max_examples=200, deadline=None)
@given(plans=PLANS, wanted=st.booleans(), opaque=U32, choose=st.randoms(use_true_random=False), at=CUTS)
def test_each_call_gets_its_own_answer(plans: Any, wanted: bool, opaque: int, choose: Any, at: list[int]) -> None:
    calls = PermitCalls()
    calls._opaque = opaque
    made = [Kept(wanted) for _ in plans]
    sent = calls.add_all(made, [request for request, _, _ in plans])
    assert sent == b"".join(call.frame for call in made)
    queues = [frames(call, bodies) for call, (_, bodies, _) in zip(made, plans, strict=True)]
    stream = b""
    # The frames of one answer stay in order, and mix with those of others.
    while waiting := [queue for queue in queues if queue]:
        stream += choose.choice(waiting).pop(0)
    for piece in cut(stream, at):
        calls.feed(piece)
    assert calls.pending == {}
    held, granted = 0, set()
    for call, (request, _, expected) in zip(made, plans, strict=True):
        ((result, error),) = call.ends
        if error is None:
            assert result == expected
            held += {wire.acquire: 1, wire.release: -1}.get(request[0], 0) * (request[2] if len(request) > 2 else 0)
            if request[0] is wire.acquire and expected:
                granted.add(request[1])
        else:
            assert isinstance(error, ServerError)
            assert (result, error.status) == (None, expected)
    assert calls.held == held
    released = {request[1] for request, _, _ in plans if request[0] is wire.release}
    given_back = {name for _, name, _ in calls.give_back}
    assert given_back <= (set() if wanted else granted)
    assert given_back | released >= (set() if wanted else granted)


GARBAGE = st.one_of(
    st.binary(max_size=40),
    st.binary(max_size=40).map(lambda data: b"\x91" + data),
    st.builds(
        lambda opcode, status, opaque, body: wire.frame(opcode, opaque, body, magic=wire.RESPONSE_MAGIC, flags=status),
        st.sampled_from([0, 1, 2, 3, 0x10, 0x11, 0x77]),
        st.sampled_from([0, 0, 0, 0x01, 0x21, 0xFF]),
        st.integers(0, 8),
        st.one_of(st.just(b""), st.binary(max_size=20)),
    ),
)
ALL = [(wire.noop,), (wire.get, b"a"), (wire.acquire, b"a", 1, 1), (wire.release, b"a", 1), (wire.stats,), (wire.dump,)]


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(GARBAGE, max_size=12))
def test_garbage_raises_only_protocol_errors(pieces: list[bytes]) -> None:
    calls = PermitCalls()
    made = [Kept(True) for _ in ALL]
    calls.add_all(made, ALL)
    with contextlib.suppress(ProtocolError):
        for piece in pieces:
            calls.feed(piece)
    assert all(len(call.ends) <= 1 for call in made)
    assert len(calls.pending) == sum(not call.ends for call in made)
