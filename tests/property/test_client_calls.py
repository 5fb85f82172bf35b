"""The client's calls: whatever the order of the answers, and however they are cut, each call gets its own."""

from __future__ import annotations

import contextlib
import struct
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from counterd.client._calls import Call
from counterd.client.counter._permits import PermitCalls
from counterd.errors import CounterdError, ProtocolError, ServerError
from counterd.protocols.counter import wire

U32 = st.integers(0, wire.U32_MAX)
NAMES = st.binary(min_size=1, max_size=40)
ASCII = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=10)


class Kept(Call):
    """Keeps how it ended."""

    def __init__(self, wanted: bool) -> None:
        super().__init__()
        self.wanted = wanted
        self.ends: list[tuple[Any, CounterdError | None]] = []

    def settle(self, result: Any, error: CounterdError | None) -> bool:
        self.ends.append((result, error))
        return self.wanted


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


ENTRY = st.one_of(
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
    st.builds(lambda found: ((wire.dump,), entries(found), found), st.lists(ENTRY, max_size=4)),
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
def test_garbage_is_a_protocol_error_and_nothing_else(pieces: list[bytes]) -> None:
    calls = PermitCalls()
    made = [Kept(True) for _ in ALL]
    calls.add_all(made, ALL)
    with contextlib.suppress(ProtocolError):
        for piece in pieces:
            calls.feed(piece)
    assert all(len(call.ends) <= 1 for call in made)
    assert len(calls.pending) == sum(not call.ends for call in made)
