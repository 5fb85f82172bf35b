"""The throttr clients, blocking and for asyncio, against a small server that goes through the steps of a test."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from counterd import errors
from counterd.client import throttr
from counterd.client.throttr import AsyncClient, Attribute, Change, Client, Event, Executed, Get, Query, Stat, TTLType
from counterd.protocols.throttr import wire
from counterd.protocols.throttr.wire import Encoder, ValueSize
from steps import PATIENCE, Script, gate

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator
    from pathlib import Path

ENCODER = Encoder(ValueSize.UINT16)
ID = bytes(range(16))
PURGE = ENCODER.purge(b"k")
RECORD = ID + bytes(221)
NONE = bytes(8)  # a count
ONE = (1).to_bytes(8, "little")


def event(number: int, size: int = 1) -> bytes:
    """One that tells its number, with a payload of that size."""
    return ENCODER.message(wire.Opcode.EVENT, b"c", bytes([number]) * size)


def told(number: int, size: int = 1) -> Event:
    return Event(b"c", bytes([number]) * size)


@pytest.fixture
def serve() -> Iterator[Callable[..., Script]]:
    """Starts a Script with these steps, on a free TCP port or on the given socket."""
    scripts: list[Script] = []

    def start(*steps: Any, listening: socket.socket | None = None) -> Script:
        scripts.append(Script(steps, listening or socket.create_server(("127.0.0.1", 0))))
        return scripts[-1]

    yield start
    for script in scripts:
        script.stop()


def connected(script: Script, timeout: float = PATIENCE, **options: Any) -> Client:
    return Client(port=script.port, timeout=timeout, **options)


def async_client(script: Script, timeout: float = PATIENCE, **options: Any) -> AsyncClient:
    return AsyncClient(port=script.port, timeout=timeout, **options)


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 3 * PATIENCE))


def assert_given_up(client: Client, script: Script, why: str) -> None:
    """The client closed the connection, and later calls say why and send nothing."""
    assert script.ended.wait(PATIENCE)
    assert script.rest in (b"", b"nothing was read")
    with pytest.raises(errors.ConnectionLost, match=f"^there is no connection to 127.0.0.1:[0-9]+ any more: .*{why}"):
        client.purge("k")


async def assert_async_given_up(client: AsyncClient, script: Script, why: str) -> None:
    assert await asyncio.to_thread(script.ended.wait, PATIENCE)
    assert script.rest in (b"", b"nothing was read")
    with pytest.raises(errors.ConnectionLost, match=f"^there is no connection to 127.0.0.1:[0-9]+ any more: .*{why}"):
        await client.purge("k")


# ---- every method of both clients

CALLS: list[tuple[Callable[[Any], Any], bytes, bytes, Any]] = [
    (lambda c: c.insert("é", 5, 60), ENCODER.insert("é".encode(), 5, 60), b"\1", True),
    (lambda c: c.insert(b"k", 5, 6, TTLType.HOURS), ENCODER.insert(b"k", 5, 6, 6), b"\0", False),
    (lambda c: c.query("k"), ENCODER.query(b"k"), b"\1\5\0\4\6\0", Query(5, TTLType.SECONDS, 6)),
    (lambda c: c.query("k"), ENCODER.query(b"k"), b"\0", None),
    (lambda c: c.update("k", Attribute.TTL, Change.PATCH, 9), ENCODER.update(b"k", 1, 0, 9), b"\1", True),
    (lambda c: c.set_quota("k", 9), ENCODER.update(b"k", 0, 0, 9), b"\1", True),
    (lambda c: c.increase_quota("k", 9), ENCODER.update(b"k", 0, 1, 9), b"\1", True),
    (lambda c: c.decrease_quota(b"k", 9), ENCODER.update(b"k", 0, 2, 9), b"\0", False),
    (lambda c: c.set_ttl("k", 9), ENCODER.update(b"k", 1, 0, 9), b"\1", True),
    (lambda c: c.extend_ttl("k", 9), ENCODER.update(b"k", 1, 1, 9), b"\1", True),
    (lambda c: c.shorten_ttl("k", 9), ENCODER.update(b"k", 1, 2, 9), b"\0", False),
    (lambda c: c.purge("k"), ENCODER.purge(b"k"), b"\1", True),
    (lambda c: c.set("k", "é", 5), ENCODER.set(b"k", "é".encode(), 5), b"\1", True),
    (lambda c: c.set(b"k", b"", 5, TTLType.MINUTES), ENCODER.set(b"k", b"", 5, 5), b"\0", False),
    (lambda c: c.get("k"), ENCODER.get(b"k"), b"\1\4\7\0\2\0\0\1", Get(TTLType.SECONDS, 7, b"\0\1")),
    (lambda c: c.get("k"), ENCODER.get(b"k"), b"\0", None),
    (lambda c: c.list(), ENCODER.list(), b"\1" + ONE + ONE + ONE + b"\1\1\4" + ONE + b"\2\0k", [
        throttr.ListEntry(b"k", throttr.KeyType.BUFFER, TTLType.SECONDS, 1, 2),
    ]),
    (lambda c: c.info().version, ENCODER.info(), b"\1" + bytes(416) + b"counterd".ljust(16, b"\0"), "counterd"),
    (lambda c: c.stat("k"), ENCODER.stat(b"k"), b"\1" + ONE + NONE + ONE + ONE, Stat(1, 0, 1, 1)),
    (lambda c: c.stat("k"), ENCODER.stat(b"k"), b"\0", None),
    (lambda c: c.stats(), ENCODER.stats(), b"\1" + NONE, []),
    (lambda c: c.subscribe("c"), ENCODER.subscribe(b"c"), b"\1", True),
    (lambda c: c.unsubscribe("c"), ENCODER.unsubscribe(b"c"), b"\0", False),
    (lambda c: c.publish("c", "payload"), ENCODER.publish(b"c", b"payload"), b"\1", True),
    (lambda c: c.connections(), ENCODER.connections(), b"\1" + NONE, []),
    (lambda c: c.connection(ID), ENCODER.connection(ID), b"\0", None),
    (lambda c: c.connection(ID.hex()).id, ENCODER.connection(ID), b"\1" + RECORD, ID),
    (lambda c: c.channels(), ENCODER.channels(), b"\1" + NONE, []),
    (lambda c: c.channel("c"), ENCODER.channel(b"c"), b"\1" + ONE + ID + ONE + NONE + NONE, [
        throttr.Subscriber(ID, 1, 0, 0),
    ]),
    (lambda c: c.channel("c"), ENCODER.channel(b"c"), b"\0", None),
    (lambda c: c.whoami(), ENCODER.whoami(), b"\1" + ID, ID),
    (lambda c: c.event("c", c.encoder.purge(b"k")), ENCODER.event(b"c", PURGE), b"\1\1", Executed(True)),
    (lambda c: c.event("c", c.encoder.purge(b"k")), ENCODER.event(b"c", PURGE), b"\0", None),
]  # fmt: skip


class Awaiting:
    """Makes the calls of CALLS, which look into results at once, out of those of an AsyncClient."""

    def __init__(self, client: AsyncClient, loop: asyncio.AbstractEventLoop) -> None:
        self.encoder = client.encoder
        self._client = client
        self._loop = loop

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *args: self._loop.run_until_complete(getattr(self._client, name)(*args))


def test_every_method(serve) -> None:
    with connected(serve(*((request, reply) for _, request, reply, _ in CALLS))) as client:
        for call, _, _, result in CALLS:
            assert call(client) == result


def test_every_method_with_asyncio(serve) -> None:
    script = serve(*((request, reply) for _, request, reply, _ in CALLS))
    loop = asyncio.new_event_loop()
    try:
        client = async_client(script)
        loop.run_until_complete(client.connect())
        for call, _, _, result in CALLS:
            assert call(Awaiting(client, loop)) == result
        loop.run_until_complete(client.close())
    finally:
        loop.close()


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(method).parameters) for name, method in found if name[0] != "_"}

    blocking, asynchronous = methods(Client), methods(AsyncClient)
    assert asynchronous.pop("connect") == ["self"]
    assert blocking.pop("events") == ["self", "timeout"]
    assert asynchronous.pop("events") == ["self"]
    assert blocking == asynchronous
    assert inspect.signature(Client.__init__) == inspect.signature(AsyncClient.__init__)


@pytest.mark.parametrize(("size", "width"), [("uint8", 1), ("uint16", 2), ("uint32", 4), ("uint64", 8)])
def test_value_sizes(serve, size: str, width: int) -> None:
    reply = b"\1" + b"\xff" * width + b"\4" + b"\1".ljust(width, b"\0")
    script = serve((b"\2\1k", reply))
    with connected(script, value_size=size) as client:
        assert client.query("k") == Query(256**width - 1, 4, 1)


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_value_size_that_is_none(kind: type) -> None:
    with pytest.raises(ValueError, match=r"^value_size must be .*, not 'uint24'$"):
        kind(value_size="uint24")


WRONG_ARGUMENTS: list[Callable[[Any], Any]] = [
    lambda c: c.insert("k" * 256, 1, 1),
    lambda c: c.increase_quota("k", 65536),
    lambda c: c.set("k", bytes(65536), 1),
    lambda c: c.connection(b"short"),
    lambda c: c.connection("no hex"),
    lambda c: c.event("c", wire.Request(b"\0")),
]


def test_wrong_arguments_leave_the_connection(serve) -> None:
    with connected(serve((PURGE, b"\1"))) as client:
        for call in WRONG_ARGUMENTS:
            with pytest.raises(ValueError, match=r"must|not|hex"):
                call(client)
        assert client.purge("k")


def test_wrong_arguments_leave_the_connection_with_asyncio(serve) -> None:
    async def main() -> None:
        async with async_client(serve((PURGE, b"\1"))) as client:
            for call in WRONG_ARGUMENTS:
                with pytest.raises(ValueError, match=r"must|not|hex"):
                    await call(client)
            assert await client.purge("k")

    run(main())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_unix_socket(serve, tmp_path: Path, kind: type) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    listening.listen()
    serve((PURGE, b"\1"), listening=listening)

    async def main() -> None:
        async with AsyncClient(path=tmp_path / "socket") as client:
            assert await client.purge("k")

    if kind is AsyncClient:
        run(main())
    else:
        with Client(path=tmp_path / "socket") as client:
            assert client.purge("k")


# ---- replies and events in any order and in pieces


def test_a_reply_in_pieces(serve) -> None:
    def nodelay(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    request, reply = CALLS[16][1:3]
    pieces = [(b"", bytes([byte])) for byte in event(1) + reply + event(2)]
    with connected(serve(nodelay, (request, b""), *pieces)) as client:
        assert client.list() == CALLS[16][3]
        assert [client.next_event(), client.next_event()] == [told(1), told(2)]


def test_events_before_between_and_after_replies(serve) -> None:
    steps = [(PURGE, event(1) + b"\1" + event(2)), (PURGE, event(3) + b"\0"), (PURGE, b"\1" + event(4))]
    with connected(serve(*steps)) as client:
        assert [client.purge("k") for _ in steps] == [True, False, True]
        assert [client.next_event().payload[0] for _ in range(4)] == [1, 2, 3, 4]
        assert client.next_event(0) is None


def test_waiting_for_events(serve) -> None:
    hold, release = gate()
    with connected(serve(hold, (b"", event(1)), hold, (PURGE, b"\1"))) as client:
        assert client.next_event(0) is None
        assert client.next_event(0.01) is None
        release()
        assert client.next_event() == told(1)
        assert client.purge("k")


def test_half_an_event_is_kept(serve) -> None:
    hold, release = gate()
    sent = threading.Event()
    half = event(1)[:3]
    with connected(serve((b"", half), lambda _: sent.set(), hold, (b"", event(1)[3:]), (PURGE, b"\1"))) as client:
        assert sent.wait(PATIENCE)
        assert client.next_event(0.01) is None
        release()
        assert client.next_event(PATIENCE) == told(1)
        assert client.purge("k")


def test_events_end_when_none_comes_in_time(serve) -> None:
    with connected(serve((PURGE, event(1) + event(2) + b"\1"))) as client:
        client.purge("k")
        assert list(client.events(0)) == [told(1), told(2)]
        assert list(client.events(0.01)) == []


def test_events_end_with_close(serve) -> None:
    client = connected(serve((PURGE, event(1) + event(2) + b"\1")))
    client.purge("k")
    received = []
    for each in client.events():
        received.append(each)
        client.close()
    assert received == [told(1), told(2)]
    assert list(client.events()) == []
    with pytest.raises(errors.ConnectionLost, match=r"close\(\) was called$"):
        client.next_event()


def test_events_that_came_before_the_end_are_told(serve) -> None:
    with connected(serve((PURGE, event(1) + event(2) + b"\1"), (b"", None))) as client:
        client.purge("k")
        assert [client.next_event(), client.next_event()] == [told(1), told(2)]
        with pytest.raises(errors.ConnectionLost, match=r"^127\.0\.0\.1:[0-9]+ closed the connection$"):
            client.next_event()
        with pytest.raises(errors.ConnectionLost, match=r"^there is no connection .* closed the connection$"):
            next(client.events())


def test_events_beyond_the_bound(serve) -> None:
    """Each takes 1 + 49 + 150 bytes."""
    burst = b"".join(event(number, 49) for number in range(1, 7))
    with connected(serve((PURGE, burst + b"\1"), (PURGE, event(9) + b"\0")), events_max=800) as client:
        assert client.purge("k")
        assert [client.next_event(0) for _ in range(3)] == [told(number, 49) for number in (1, 2, 3)]
        assert not client.purge("k")  # whose event is after the gap
        assert client.next_event(0) == told(4, 49)
        with pytest.raises(errors.EventsLost) as caught:
            client.next_event(0)
        assert caught.value.count == 3
        assert client.next_event(0) is None


def test_an_event_that_was_not_read_yet_is_here(serve) -> None:
    with connected(serve((b"", event(1)))) as client:
        assert select.select([client._socket], [], [], PATIENCE)[0]
        assert client.next_event(0) == told(1)


def test_events_do_not_make_a_call_longer(serve) -> None:
    """They keep coming, but the reply does not."""
    done = threading.Event()

    def flood(connection: socket.socket) -> None:
        while not done.is_set():
            connection.sendall(event(1) * 10)

    script = serve((PURGE, b""), flood)
    with connected(script, timeout=0.2, events_max=1000) as client:
        start = time.monotonic()
        with pytest.raises(errors.Timeout):
            client.purge("k")
        assert time.monotonic() - start < PATIENCE / 2
        done.set()
        assert_given_up(client, script, "a call took more")


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_server_that_is_read_from_before_it_reads(serve, kind: type) -> None:
    """It sends far more than buffers hold, and takes the request only after that."""
    value = bytes(8 << 20)
    encoder = Encoder(ValueSize.UINT32)
    events = encoder.message(wire.Opcode.EVENT, b"c", bytes(1 << 20)) * 16
    script = serve((encoder.set(b"k", value, 1)[:1], events), (encoder.set(b"k", value, 1)[1:], b"\1"))

    async def main() -> None:
        async with async_client(script, value_size="uint32") as client:
            assert await client.set("k", value, 1)

    if kind is AsyncClient:
        run(main())
    else:
        with connected(script, value_size="uint32") as client:
            assert client.set("k", value, 1)


def test_a_request_that_goes_out_in_pieces(serve) -> None:
    request = Encoder(ValueSize.UINT32).set(b"k", bytes(32 << 20), 1)
    with connected(serve((request, b"\1")), value_size="uint32") as client:
        assert client.set("k", bytes(32 << 20), 1)


# ---- failures


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# What a server does with a PURGE, the error, and what is said of the connection afterwards.
FAILURES: list[tuple[tuple[Any, ...], type[errors.CounterdError], str, str]] = [
    (((PURGE, None),), errors.ConnectionLost, r"^127\.0\.0\.1:[0-9]+ closed the connection$", "clos"),
    (((PURGE, b""), reset), errors.ConnectionLost, r"^lost the connection to .*reset by peer", "reset by peer"),
    (((PURGE, b"\2"),), errors.ProtocolError, r"^not the start of a reply or an event: 02$", "not the start"),
    (((PURGE, b"\1\1"),), errors.ProtocolError, r"^a reply that nothing asked for: 01$", "nothing asked for"),
]


@pytest.mark.parametrize(("steps", "kind", "message", "why"), FAILURES)
def test_failures(serve, steps: tuple[Any, ...], kind: type[errors.CounterdError], message: str, why: str) -> None:
    script = serve(*steps)
    with connected(script) as client:
        with pytest.raises(kind, match=message):
            client.purge("k")
        assert_given_up(client, script, why)


@pytest.mark.parametrize(("steps", "kind", "message", "why"), FAILURES)
def test_failures_with_asyncio(
    serve, steps: tuple[Any, ...], kind: type[errors.CounterdError], message: str, why: str
) -> None:
    async def main() -> None:
        script = serve(*steps)
        async with async_client(script) as client:
            with pytest.raises(kind, match=message):
                await client.purge("k")
            await assert_async_given_up(client, script, why)
            with pytest.raises(errors.ConnectionLost, match=why):
                await client.next_event()

    run(main())


def test_a_value_that_is_too_long(serve) -> None:
    script = serve((ENCODER.get(b"k"), b"\1\4\1\0\6\0"))
    with connected(script, value_max=5) as client:
        with pytest.raises(errors.ProtocolError, match=r"^a value of 6 bytes, more than 5: "):
            client.get("k")
        assert_given_up(client, script, "a value of 6 bytes")


def test_no_reply_in_time(serve) -> None:
    script = serve((PURGE, b""))
    with connected(script, timeout=0.05) as client:
        with pytest.raises(errors.Timeout, match=r"^127\.0\.0\.1:[0-9]+ did not answer within 0\.05 s$"):
            client.purge("k")
        assert_given_up(client, script, "a call took more than 0.05 s")


def test_a_request_that_does_not_go_out_in_time(serve) -> None:
    hold, release = gate()
    with connected(serve(hold), timeout=0.1, value_size="uint32") as client:
        with pytest.raises(errors.Timeout, match="did not answer"):
            client.set("k", bytes(32 << 20), 1)
        release()


def test_an_interrupted_call_closes(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    script = serve((PURGE, b"\1"))
    with connected(script) as client:
        monkeypatch.setattr(wire.Parser, "feed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.purge("k")
        assert_given_up(client, script, "KeyboardInterrupt interrupted a call")


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(errors.ConnectionLost, match=f"^cannot connect to 127.0.0.1:{port}: .*refused"):
        Client(port=port)

    async def main() -> None:
        for client, where in [(AsyncClient(port=port), port), (AsyncClient(path=tmp_path / "none"), tmp_path / "none")]:
            with pytest.raises(errors.ConnectionLost, match=f"^cannot connect to .*{where}: .*(failed|No such file)"):
                await client.connect()
            with pytest.raises(errors.ConnectionLost, match=f"^there is no connection to .*{where} any more: "):
                await client.connect()
            with pytest.raises(errors.ConnectionLost, match=f"^there is no connection to .*{where} any more: "):
                await client.purge("k")
            await client.close()

    run(main())


def test_nobody_accepts() -> None:
    """The queue of a listening socket is full, so the kernel leaves further connections unanswered."""

    async def main(port: int) -> None:
        with pytest.raises(errors.Timeout, match=r"did not accept a connection within 0\.1 s$"):
            await AsyncClient(port=port, timeout=0.1).connect()
        client = AsyncClient(port=port)
        connecting = asyncio.ensure_future(client.connect())
        await asyncio.sleep(0)
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        with pytest.raises(errors.ConnectionLost, match=r"connecting was interrupted$"):
            await client.purge("k")

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listening.getsockname())
        port = listening.getsockname()[1]
        with pytest.raises(errors.Timeout, match=r"did not accept a connection within 0\.1 s$"):
            Client(port=port, timeout=0.1)
        run(main(port))


# ---- only asyncio


def test_calls_side_by_side(serve) -> None:
    """All are sent before the first is answered, and each gets its own."""
    keys = [b"k%d" % number for number in range(100)]
    requests = b"".join(ENCODER.query(key) for key in keys)
    replies = b"".join(b"\0" if number % 3 else b"\1" + bytes([number]) + b"\0\4\1\0" for number in range(100))

    async def main() -> None:
        async with async_client(serve((requests, event(1) + replies))) as client:
            results = await asyncio.gather(*(client.query(key) for key in keys))
            expected = [None if number % 3 else Query(number, TTLType.SECONDS, 1) for number in range(100)]
            assert results == expected
            assert await client.next_event() == told(1)

    run(main())


def test_another_loop(serve) -> None:
    """uvloop's transports are not asyncio's."""

    async def main() -> None:
        client = async_client(serve((PURGE, event(1) + b"\1"), (PURGE, b"")))
        async with client:
            assert await client.purge("k")
            assert await client.next_event() == told(1)
            call = asyncio.ensure_future(client.purge("k"))
            await asyncio.sleep(0)
        with pytest.raises(errors.ConnectionLost, match=r"close\(\) was called$"):
            await call

    loop = uvloop.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()


async def cancelled(awaitable: Awaitable[Any]) -> None:
    with pytest.raises(asyncio.CancelledError):
        await awaitable


def test_a_cancelled_call_leaves_the_connection_in_step(serve) -> None:
    request, reply = CALLS[16][1:3]
    hold, release = gate()
    steps = [(request + ENCODER.query(b"k"), reply[:9]), hold, (b"", reply[9:] + b"\0"), (PURGE, b"\1")]

    async def main() -> None:
        async with async_client(serve(*steps)) as client:
            listing = asyncio.ensure_future(client.list())
            query = asyncio.ensure_future(client.query("k"))
            await asyncio.sleep(0)
            listing.cancel()
            await cancelled(listing)
            release()
            assert await query is None
            assert await client.purge("k") is True

    run(main())


def test_a_call_that_is_cancelled_before_its_turn_is_not_sent(serve) -> None:
    """The socket takes no more, so what is asked then waits."""
    value = bytes(16 << 20)
    encoder = Encoder(ValueSize.UINT32)
    hold, release = gate()

    async def main() -> None:
        script = serve(hold, (encoder.set(b"k", value, 1), b"\1"), (PURGE, b"\0"))
        async with async_client(script, value_size="uint32") as client:
            setting = asyncio.ensure_future(client.set("k", value, 1))
            await asyncio.sleep(0)
            waiting = [asyncio.ensure_future(client.purge(key)) for key in ("never", "k")]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await cancelled(waiting[0])
            release()
            assert await setting is True
            assert await waiting[1] is False

    run(main())


def test_a_timeout_ends_all_calls(serve) -> None:
    async def main() -> None:
        script = serve((PURGE * 2, b""))
        async with async_client(script) as client:
            client._link._timeout = 0.05  # of the calls alone: connecting has its time
            first, second = await asyncio.gather(client.purge("k"), client.purge("k"), return_exceptions=True)
            assert (type(first), type(second)) == (errors.Timeout, errors.ConnectionLost)
            assert str(first).endswith("did not answer within 0.05 s")
            assert str(second).endswith(": a call took more than 0.05 s")
            await assert_async_given_up(client, script, "a call took more than 0.05 s")

    run(main())


def test_the_timer_of_an_answered_or_cancelled_call_is_off(serve) -> None:
    hold, release = gate()

    async def main() -> None:
        async with async_client(serve((PURGE * 2, b"\1"), hold, (b"", b"\1"), (PURGE, b"\0"))) as client:
            first, second = (asyncio.ensure_future(client.purge("k")) for _ in range(2))
            assert await first
            second.cancel()
            await cancelled(second)
            timers = asyncio.get_running_loop()._scheduled  # type: ignore[attr-defined]
            assert [timer.cancelled() for timer in timers].count(False) == 1  # that of run()
            release()
            assert not await client.purge("k")

    run(main())


def test_garbage_ends_all_calls(serve) -> None:
    async def main() -> None:
        async with async_client(serve((PURGE * 3, b"\7"))) as client:
            results = await asyncio.gather(*(client.purge("k") for _ in range(3)), return_exceptions=True)
            assert [type(each) for each in results] == [errors.ProtocolError] * 3
            assert len({id(each) for each in results}) == 3

    run(main())


def test_close_ends_all_calls_and_events(serve) -> None:
    async def main() -> None:
        script = serve((PURGE, b""))
        client = async_client(script)
        await client.connect()
        call = asyncio.ensure_future(client.purge("k"))

        async def listen() -> list[Event]:
            return [each async for each in client.events()]

        events = asyncio.ensure_future(listen())
        waiting = asyncio.ensure_future(client.next_event())
        await asyncio.sleep(0)
        await client.close()
        await client.close()
        with pytest.raises(errors.ConnectionLost, match=r"^lost the connection to .*: close\(\) was called$"):
            await call
        with pytest.raises(errors.ConnectionLost, match=r"close\(\) was called$"):
            await waiting
        assert await events == []
        await assert_async_given_up(client, script, r"close\(\) was called")

    run(main())


def test_close_that_is_cancelled(serve) -> None:
    async def main() -> None:
        client = async_client(serve())
        await client.connect()
        closing = asyncio.ensure_future(client.close())
        await asyncio.sleep(0)
        closing.cancel()
        await cancelled(closing)
        await client.close()

    run(main())


def test_a_call_that_fails_and_is_cancelled_at_once(serve) -> None:
    """Nobody hears of the failure, and asyncio has nothing to complain of."""
    complaints: list[Any] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        async with async_client(serve((PURGE, b""))) as client:
            call = asyncio.ensure_future(client.purge("k"))
            await asyncio.sleep(0)
            client._link.drop("a test")
            call.cancel()
            await cancelled(call)
        del call
        gc.collect()

    run(main())
    assert complaints == []


def test_not_connected_yet(serve) -> None:
    async def main() -> None:
        script = serve((PURGE, b"\1"))
        client = async_client(script)
        for call in (client.purge("k"), client.next_event()):
            with pytest.raises(
                errors.ConnectionLost, match=r"^there is no connection to .* yet: connect\(\) makes it$"
            ):
                await call
        await client.connect()
        await client.connect()
        assert await client.purge("k")
        await client.close()
        with pytest.raises(errors.ConnectionLost, match=r"close\(\) was called$"):
            await client.connect()

    run(main())


def test_closed_while_connecting(serve) -> None:
    async def main() -> None:
        script = serve()
        client = async_client(script)
        connecting = asyncio.ensure_future(client.connect())
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises(errors.ConnectionLost, match=r"close\(\) was called$"):
            await connecting
        assert await asyncio.to_thread(script.ended.wait, PATIENCE)

    run(main())


def test_events_with_asyncio(serve) -> None:
    hold, release = gate()
    steps = [
        (PURGE, event(1) + b"\1" + event(2)),
        hold,
        (b"", event(3)[:2]),
        (b"", event(3)[2:]),
        (PURGE, b"\1"),
        (b"", None),
    ]

    async def main() -> None:
        async with async_client(serve(*steps)) as client:
            assert await client.purge("k")
            received = []
            async for each in client.events():
                received.append(each)
                if len(received) == 2:
                    release()
                if len(received) == 3:
                    break
            assert received == [told(1), told(2), told(3)]
            assert await client.next_event(0.01) is None
            assert await client.purge("k")
            with pytest.raises(errors.ConnectionLost, match=r"the server closed it$"):
                await client.events().__anext__()

    run(main())


def test_a_cancelled_wait_loses_no_event(serve) -> None:
    hold, release = gate()

    async def main() -> None:
        async with async_client(serve(hold, (b"", event(1)))) as client:
            first = asyncio.ensure_future(client.next_event())
            second = asyncio.ensure_future(client.next_event())
            await asyncio.sleep(0)
            first.cancel()
            await cancelled(first)
            release()
            assert await second == told(1)
            assert await client.next_event(0) is None
            assert not client._link._waiting

    run(main())


def test_each_event_goes_to_one(serve) -> None:
    async def main() -> None:
        hold, release = gate()
        async with async_client(serve(hold, (b"", event(1) + event(2) + event(3)))) as client:
            waiting = [asyncio.ensure_future(client.next_event()) for _ in range(3)]
            await asyncio.sleep(0)
            release()
            assert sorted(await asyncio.gather(*waiting)) == [told(1), told(2), told(3)]

    run(main())


def test_events_beyond_the_bound_with_asyncio(serve) -> None:
    async def main() -> None:
        burst = b"".join(event(number, 49) for number in range(1, 4))
        async with async_client(serve((PURGE, burst + b"\1"), (PURGE, event(4) + b"\1")), events_max=200) as client:
            assert await client.purge("k")
            events = client.events()
            assert await events.__anext__() == told(1, 49)
            with pytest.raises(errors.EventsLost, match=r"^2 events"):
                await events.__anext__()
            assert await client.purge("k")
            assert await events.__anext__() == told(4)

    run(main())


def test_the_socket_is_closed_with_the_client(serve) -> None:
    """Also where it was given up."""

    async def main() -> None:
        for answer in (b"\1", b"\7", None):
            async with async_client(serve((PURGE, answer))) as client:
                transport = client._link._transport
                assert transport is not None
                with contextlib.suppress(errors.CounterdError):
                    await client.purge("k")
            assert transport.get_extra_info("socket").fileno() == -1

    run(main())
