"""Whatever a server sends, a client has an answer or a CounterdError, however the bytes are cut, and keeps little
memory.

The parsers of all protocols and of the admin process's frames get the stream twice, whole and cut: what the one
returns before an error is the beginning of what the other returns. The clients themselves get it on a socket.

Input: which parser or client, how the stream is cut, how many requests and which; the rest is what the server
sends."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any
from unittest import mock

from counterd.client import _threads, throttr
from counterd.client._calls import Call
from counterd.client._threadlink import ThreadCall, ThreadLink
from counterd.client.counter._permits import PermitCalls
from counterd.client.sentinel._token_link import TokenLink
from counterd.client.sentinel._tokens import Tally, TokenCalls
from counterd.client.smockron._delays import STALE_MAX
from counterd.client.smockron._gatekeeping import Core, Options
from counterd.client.throttr._events import Events
from counterd.client.throttr._keys import asked
from counterd.errors import ConnectionLost, CounterdError, EventsLost, ProtocolError, ServerError
from counterd.ipc import Frames, frame
from counterd.protocols.beanstalk import wire as beanstalk_wire
from counterd.protocols.counter import wire as counter_wire
from counterd.protocols.sentinel import wire as sentinel_wire
from counterd.protocols.smockron import wire as smockron_wire
from counterd.protocols.throttr import wire as throttr_wire
from counterd.protocols.throttr.wire import Encoder, Event, ValueSize
from fuzz.stream import Source, fenced

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

BEANSTALK, SMOCKRON = 7, 6  # in the highest bits of the first byte
REQUESTS_MAX = 8
VALUE_MAX = 64  # bytes of a value that a parser takes here
EVENTS_MAX = 600
FRAME_MAX = 64
REMEMBERED_MAX = 4
TIMEOUT_S = 10.0  # never passes: the server ends its side
SIZES = list(ValueSize)
# What a parser may wait for before it looks at it: the names of a whole fragment, all of the longest.
WANTED_MAX = 255 * throttr_wire.FRAGMENT_ENTRIES_MAX
COUNTER_REQUESTS: list[tuple[Any, ...]] = [
    (counter_wire.acquire, b"a", 1, 5),
    (counter_wire.release, b"a", 1),
    (counter_wire.get, b"a"),
    (counter_wire.noop,),
    (counter_wire.stats,),
    (counter_wire.dump, True),
]
TOKEN_REQUESTS: list[tuple[Any, ...]] = [
    (sentinel_wire.ping, b"a"),
    (sentinel_wire.flow, 1, 1),
    (sentinel_wire.param_flow, 1, 1, ["a"]),
    (sentinel_wire.acquire, 1, 1),
    (sentinel_wire.release, 1),
    (sentinel_wire.keep, 1),
]


def throttr_requests(size: ValueSize) -> list[bytes]:
    encoder = Encoder(size)
    whoami, listing = encoder.whoami(), encoder.list()
    return [
        *(encoder.insert(b"a", 1, 1, 1), encoder.query(b"a"), encoder.get(b"a"), listing, encoder.info()),
        *(encoder.stat(b"a"), encoder.stats(), encoder.connections(), encoder.connection(bytes(16))),
        *(encoder.channels(), encoder.channel(b"a"), whoami, encoder.publish(b"a", b"b"), encoder.event(b"a", whoami)),
        encoder.event(b"a", encoder.event(b"b", listing)),
    ]


THROTTR_REQUESTS = {size: throttr_requests(size) for size in SIZES}

TOKENS = [
    b"OK 13\r\n---\n- default\n\r\n",
    b"RESERVED 1 2\r\nxx\r\n",
    b"JOBS 2\r\n",
    b"KICKED 1\r\n",
    smockron_wire.greeting(),
    smockron_wire.command(b"PING", b"\0\0me"),
    smockron_wire.subscribe(b"d\0"),
    b"\x01\x02d\0\x01\x0bDELAY_UNTIL\x01\x01a\0\x013",
    b"- id: 1\n",
    b"\x91\x02\x00\x00\x00\x00\x00\x04\x00\x00\x00\x01\x00\x00\x00\x01",
    b"\x91\x01\x00\x00\x00\x00\x00\x04\x00\x00\x00\x01\x00\x00\x00\x01",
    b"\x91\x03\x22\x00\x00\x00\x00\x0c\x00\x00\x00\x02Not acquired",
    b"\x91\x10\x00\x00\x00\x00\x00\x06\x00\x00\x00\x01\x00\x01\x00\x01ab",
    b"\x91\x11\x00\x00\x00\x00\x00\x0f\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x02\x00\x01a\x00\x00\x00\x03",
    b"\x91\x11\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01",
    b"\x19\x01\x01\x00ab",
    b"\x01\x01\x00\x00\x00\x00\x00\x00\x00",
    b"\x01\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00",
    frame(b"{}"),
    b"\x00\x0e\x00\x00\x00\x01\x03\x00\x80\x00\x00\x00\x00\x00\x00\x01",
    b"\x00\x0e\x00\x00\x00\x01\x01\x02\x00\x00\x00\x09\x00\x00\x00\x64",
    b"\x00\x0a\x00\x00\x00\x01\x05\x00\x00\x00\x0f\xa0",
    b"\x00\x06\x00\x00\x00\x01\x04\x07",
]

Told = tuple[list[Any], str]


# ---- parsers --------------------------------------------------------------------------------------------------------


def told(feed: Callable[[bytes], Iterable[Any]], pieces: Iterable[bytes], error: type[Exception]) -> Told:
    """The parsed items of the stream, and the name of the error that ended it."""
    found: list[Any] = []
    try:
        for piece in pieces:
            for item in feed(fenced(piece)):
                found.append(item)  # one by one: those before an error count
    except error as caught:
        return found, type(caught).__name__
    return found, ""


def check_cut(make: Callable[[], Callable[[bytes], Iterable[Any]]], source: Source, error: type[Exception]) -> None:
    """Parses the stream whole, in pieces, and byte by byte."""
    pieces = source.byte() or 1
    stream = source.take(len(source.data))
    cut = [stream[start : start + pieces] for start in range(0, len(stream), pieces)]
    whole, failed = told(make(), [stream], error)
    found, broken = told(make(), cut, error)
    every, ended = told(make(), [stream[at : at + 1] for at in range(len(stream))], error)
    assert failed == broken == ended
    assert whole == every[: len(whole)]
    assert found == every[: len(found)]
    assert failed or whole == found == every


class SeenCall(Call):
    """A call whose result is kept in the order in which calls end."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen
        self.settled = 0

    def settle(self, result: Any, error: CounterdError | None) -> bool:
        self.settled += 1
        assert error is None or isinstance(error, ServerError)
        self.seen.append((self.frame, result, error and (type(error), error.args, str(error))))
        return True


def counter_calls(requests: list[int]) -> Callable[[bytes], Iterable[Any]]:
    """Pending requests of the counter protocol, as both clients keep them."""
    calls = PermitCalls()
    seen: list[Any] = []
    waiting = [SeenCall(seen) for _ in requests]
    calls.add_all(waiting, [COUNTER_REQUESTS[number % len(COUNTER_REQUESTS)] for number in requests])

    def feed(data: bytes) -> Iterable[Any]:
        try:
            calls.feed(data)
        finally:
            assert all(call.settled <= 1 for call in waiting)
            assert len(calls.pending) == sum(not call.settled for call in waiting)
        kept = calls._parser._buffer
        size = int.from_bytes(kept[4:8], "big") if len(kept) >= 8 else 0
        assert len(kept) < counter_wire.HEADER_SIZE + size or len(kept) < counter_wire.HEADER_SIZE
        taken, seen[:] = list(seen), []
        return taken

    return feed


def token_calls(requests: list[int]) -> Callable[[bytes], Iterable[Any]]:
    """Pending requests of the sentinel protocol, as both clients keep them."""
    calls = TokenCalls(Tally())
    seen: list[Any] = []
    waiting = [SeenCall(seen) for _ in requests]
    calls.add_all(waiting, [TOKEN_REQUESTS[number % len(TOKEN_REQUESTS)] for number in requests])

    def feed(data: bytes) -> Iterable[Any]:
        try:
            calls.feed(data)
        finally:
            assert all(call.settled <= 1 for call in waiting)
            assert len(calls.pending) == sum(not call.settled for call in waiting)
        assert len(calls._parser._buffer) < sentinel_wire.FRAME_MAX
        taken, seen[:] = list(seen), []
        return taken

    return feed


def throttr_parser(size: ValueSize, requests: list[int]) -> Callable[[bytes], Iterable[Any]]:
    parser = throttr_wire.Parser(size, VALUE_MAX)
    for number in requests:
        parser.expect(THROTTR_REQUESTS[size][number % len(THROTTR_REQUESTS[size])])
    events = Events(EVENTS_MAX)

    def feed(data: bytes) -> Iterable[Any]:
        items = parser.feed(data)
        assert len(parser._buffer) < parser._wanted <= WANTED_MAX or parser._wanted == 0
        for item in items:
            if isinstance(item, Event):
                events.put(item)
        assert events._bytes <= EVENTS_MAX or len(events._kept) == 1
        return items

    return feed


def beanstalk_parser() -> Callable[[bytes], Iterable[Any]]:
    """Replies of the beanstalk protocol, and the contents of their bodies."""
    parser = beanstalk_wire.Parser(VALUE_MAX)

    def feed(data: bytes) -> Iterable[Any]:
        replies = parser.feed(data)
        assert len(parser._buffer) < max(beanstalk_wire.REPLY_LINE_MAX, VALUE_MAX + 2)
        assert parser.is_within == bool(parser._buffer or parser._head)
        for reply in replies:
            for read in (beanstalk_wire.read_list, beanstalk_wire.read_jobs, beanstalk_wire.read_dictionary):
                with contextlib.suppress(ProtocolError):
                    read(reply.body)
        return replies

    return feed


def gatekeeper(on_control: bool, is_ready: bool) -> Callable[[bytes], Iterable[Any]]:
    """One of a gatekeeper's two connections to a master, after the handshake or before it."""
    core = Core("127.0.0.1", b"d", tls=False, options=Options(max_remembered=REMEMBERED_MAX))
    master = core.masters[0]
    line = master.control if on_control else master.accounting
    line.opened(0.0)
    if is_ready:
        kind = smockron_wire.SocketType.PUB if on_control else smockron_wire.SocketType.SUB
        core.feed(master, line, smockron_wire.greeting() + smockron_wire.ready(kind), 0, 0)
        assert line.is_ready
    core.take(master, line, 0)  # what is sent before anything comes

    def feed(data: bytes) -> Iterable[Any]:
        core.feed(master, line, data, 0, 0)
        assert core.delays.count == sum(map(len, core.delays._domains)) <= REMEMBERED_MAX
        assert len(core.delays._heap) <= 2 * core.delays.count + STALE_MAX
        assert all(line.prefixes.values())
        assert len(line._parser._rest) < smockron_wire.MESSAGE_MAX + 9
        return core.take(master, line, 0)

    return feed


def admin_frames() -> Callable[[bytes], Iterable[Any]]:
    return Frames(FRAME_MAX).feed


# ---- clients --------------------------------------------------------------------------------------------------------


def ignore(_: Any) -> None: ...


def counter_client(requests: list[int], source: Source) -> None:
    near, far = served(source)
    with far:
        link = ThreadLink(near, "the server", TIMEOUT_S, ignore, ignore, calls=PermitCalls())
        try:
            calls: list[ThreadCall] = []
            with contextlib.suppress(ProtocolError, ConnectionLost):
                link.call_all([COUNTER_REQUESTS[number % len(COUNTER_REQUESTS)] for number in requests], calls)
            for call in calls:
                assert call.done
                assert isinstance(call.error, (type(None), ServerError, ProtocolError, ConnectionLost))
        finally:
            link.close()


def token_client(requests: list[int], source: Source) -> None:
    """The caller of the first request is gone: what that grants is given back."""
    near, far = served(source)
    tally = Tally()
    with far:
        link = TokenLink(near, "the server", TIMEOUT_S, ignore, ignore, calls=TokenCalls(tally), on_late=lambda: None)
        try:
            link.tell(*TOKEN_REQUESTS[3])
            calls: list[ThreadCall] = []
            with contextlib.suppress(ProtocolError, ConnectionLost):
                link.call_all([TOKEN_REQUESTS[number % len(TOKEN_REQUESTS)] for number in requests], calls)
            for call in calls:
                assert call.done
                assert isinstance(call.error, (type(None), ProtocolError, ConnectionLost))
        finally:
            link.close()
    assert tally.late <= 1


def throttr_client(size: ValueSize, requests: list[int], source: Source) -> None:
    """Its second attempt to connect fails."""
    near, far = served(source)
    with (
        far,
        mock.patch.object(_threads, "connected_socket", side_effect=[near, *[ConnectionRefusedError()] * REQUESTS_MAX]),
        throttr.Client(value_size=size, value_max=VALUE_MAX, events_max=EVENTS_MAX, timeout=TIMEOUT_S) as client,
    ):
        for number in requests:
            with contextlib.suppress(ProtocolError, ConnectionLost):
                client._run_command(asked(THROTTR_REQUESTS[size][number % len(THROTTR_REQUESTS[size])]))
        with contextlib.suppress(ProtocolError, ConnectionLost):  # once all that came has been told
            while True:
                take_event(client)


def take_event(client: throttr.Client) -> None:
    """Takes an event, or the report that some are missing. Raises what next_event() raises at the end."""
    with contextlib.suppress(EventsLost):
        event = client.next_event(timeout=TIMEOUT_S)
        assert event is not None
        assert len(event.payload) <= VALUE_MAX


def served(source: Source) -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection; the server has sent the rest of the input, and ended its side."""
    near, far = socket.socketpair()
    far.sendall(source.take(len(source.data)))
    far.shutdown(socket.SHUT_WR)
    near.setblocking(False)
    return near, far


def one_input(data: bytes) -> None:
    source = Source(data)
    which = source.byte()
    width = which >> 3 & 3
    size = SIZES[width]
    if which >> 5 == BEANSTALK:
        check_cut(beanstalk_parser, source, ProtocolError)
        return
    if which >> 5 == SMOCKRON:
        check_cut(lambda: gatekeeper(bool(which & 1), bool(which & 2)), source, ProtocolError)
        return
    requests = [source.byte() for _ in range(source.byte() % REQUESTS_MAX)]
    which &= 7
    if which < 2:
        check_cut(lambda: counter_calls(requests), source, ProtocolError)
    elif which < 4:
        check_cut(lambda: throttr_parser(size, requests), source, ProtocolError)
    elif which == 4 and width == 2:  # what the corpus had before it had tokens has its meaning still
        check_cut(lambda: token_calls(requests), source, ProtocolError)
    elif which == 5 and width == 0:
        token_client(requests or [0], source)
    elif which == 4:
        check_cut(admin_frames, source, ValueError)
    elif which < 6:
        counter_client(requests or [0], source)
    else:
        throttr_client(size, requests, source)
