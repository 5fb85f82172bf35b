"""The throttr clients, blocking and for asyncio, against a small server that performs the steps of a test."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Any

import pytest

from counterd import errors
from counterd.client import throttr
from counterd.client.throttr import AsyncClient, Attribute, Change, Client, Event, Executed, Get, Query, Stat, TTLType
from counterd.protocols.throttr import wire
from counterd.protocols.throttr.wire import Encoder, ValueSize
from kit.daemon import wait_until
from kit.loops import leaves_connections_open
from kit.machine import PATIENCE
from kit.scripted.script import Script, gate
from kit.shapes import BLOCKING, SHAPES, begun, got, opened, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

ENCODER = Encoder(ValueSize.UINT16)
ID = bytes(range(16))
PURGE = ENCODER.purge(b"k")
QUERY = ENCODER.query(b"k")
SUBSCRIBE = ENCODER.subscribe(b"c")
RECORD = ID + bytes(221)
NONE = bytes(8)  # a count
ONE = (1).to_bytes(8, "little")
SHORT = 0.05
MISSED = "events may be missing$"


def event(number: int, size: int = 1) -> bytes:
    """An event whose payload has that size, and tells its number."""
    return ENCODER.message(wire.Opcode.EVENT, b"c", bytes([number]) * size)


def told(number: int, size: int = 1) -> Event:
    return Event(b"c", bytes([number]) * size)


@pytest.fixture
def serve() -> Iterator[Callable[..., Script]]:
    """Starts a Script with these steps, on a free TCP port or on the given socket."""
    with contextlib.ExitStack() as stack:

        def start(*steps: Any, **options: Any) -> Script:
            return stack.enter_context(Script(*steps, **options))

        yield start


def made(shape: str, script: Script, **options: Any) -> Any:
    kind = Client if shape == BLOCKING else AsyncClient
    return kind(port=script.port, **{"timeout": PATIENCE, **options})


async def events_of(client: Any, timeout: float | None = None) -> list[Event]:
    """All events, until the iterator ends."""
    found = client.events(timeout)
    return list(found) if isinstance(client, Client) else [each async for each in found]


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
    (lambda c: c.info(), ENCODER.info(), b"\1" + bytes(416) + b"counterd".ljust(16, b"\0"), lambda info: info.version),
    (lambda c: c.stat("k"), ENCODER.stat(b"k"), b"\1" + ONE + NONE + ONE + ONE, Stat(1, 0, 1, 1)),
    (lambda c: c.stat("k"), ENCODER.stat(b"k"), b"\0", None),
    (lambda c: c.stats(), ENCODER.stats(), b"\1" + NONE, []),
    (lambda c: c.subscribe("c"), ENCODER.subscribe(b"c"), b"\1", True),
    (lambda c: c.unsubscribe("c"), ENCODER.unsubscribe(b"c"), b"\0", False),
    (lambda c: c.publish("c", "payload"), ENCODER.publish(b"c", b"payload"), b"\1", True),
    (lambda c: c.connections(), ENCODER.connections(), b"\1" + NONE, []),
    (lambda c: c.connection(ID), ENCODER.connection(ID), b"\0", None),
    (lambda c: c.connection(ID.hex()), ENCODER.connection(ID), b"\1" + RECORD, lambda found: found.id == ID),
    (lambda c: c.channels(), ENCODER.channels(), b"\1" + NONE, []),
    (lambda c: c.channel("c"), ENCODER.channel(b"c"), b"\1" + ONE + ID + ONE + NONE + NONE, [
        throttr.Subscriber(ID, 1, 0, 0),
    ]),
    (lambda c: c.channel("c"), ENCODER.channel(b"c"), b"\0", None),
    (lambda c: c.whoami(), ENCODER.whoami(), b"\1" + ID, ID),
    (lambda c: c.event("c", c.encoder.purge(b"k")), ENCODER.event(b"c", PURGE), b"\1\1", Executed(True)),
    (lambda c: c.event("c", c.encoder.purge(b"k")), ENCODER.event(b"c", PURGE), b"\0", None),
]  # fmt: skip


@SHAPES
def test_every_method_sends_its_request_and_reads_its_reply(serve, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, serve(*((request, reply) for _, request, reply, _ in CALLS)))) as client:
            for call, _, _, result in CALLS:
                found = await got(call(client))
                assert result(found) if callable(result) else found == result

    run(shape, scenario())


def test_both_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(method).parameters) for name, method in found if name[0] != "_"}

    assert methods(Client) == methods(AsyncClient)
    assert inspect.signature(Client.__init__) == inspect.signature(AsyncClient.__init__)


@SHAPES
@pytest.mark.parametrize(("size", "width"), [("uint8", 1), ("uint16", 2), ("uint32", 4), ("uint64", 8)])
def test_every_value_size(serve, size: str, width: int, shape: str) -> None:
    async def scenario() -> None:
        reply = b"\1" + b"\xff" * width + b"\4" + b"\1".ljust(width, b"\0")
        async with opened(made(shape, serve((b"\2\1k", reply)), value_size=size)) as client:
            assert await got(client.query("k")) == Query(256**width - 1, 4, 1)

    run(shape, scenario())


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_an_invalid_value_size_is_refused(kind: type) -> None:
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


@SHAPES
def test_invalid_arguments_keep_the_connection(serve, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, serve((PURGE, b"\1")))) as client:
            for call in WRONG_ARGUMENTS:
                with pytest.raises(ValueError, match=r"must|not|hex"):
                    await got(call(client))
            assert await got(client.purge("k"))

    run(shape, scenario())


@SHAPES
def test_a_client_of_a_unix_socket(serve, tmp_path: Path, shape: str) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    listening.listen()
    serve((PURGE, b"\1"), listening=listening)

    async def scenario() -> None:
        kind = Client if shape == BLOCKING else AsyncClient
        async with opened(kind(path=tmp_path / "socket")) as client:
            assert await got(client.purge("k"))

    run(shape, scenario())


# ---- replies and events in any order and in pieces


@SHAPES
def test_a_reply_that_comes_in_pieces(serve, shape: str) -> None:
    def nodelay(connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def scenario() -> None:
        request, reply = CALLS[16][1:3]
        pieces = [(b"", bytes([byte])) for byte in event(1) + reply + event(2)]
        async with opened(made(shape, serve(nodelay, (request, b""), *pieces))) as client:
            assert await got(client.list()) == CALLS[16][3]
            assert [await got(client.next_event()) for _ in range(2)] == [told(1), told(2)]

    run(shape, scenario())


@SHAPES
def test_events_before_between_and_after_replies(serve, shape: str) -> None:
    async def scenario() -> None:
        steps = [(PURGE, event(1) + b"\1" + event(2)), (PURGE, event(3) + b"\0"), (PURGE, b"\1" + event(4))]
        async with opened(made(shape, serve(*steps))) as client:
            assert [await got(client.purge("k")) for _ in steps] == [True, False, True]
            assert [(await got(client.next_event())).payload[0] for _ in range(4)] == [1, 2, 3, 4]
            assert await got(client.next_event(0)) is None

    run(shape, scenario())


@SHAPES
def test_next_event_waits_for_an_event(serve, shape: str) -> None:
    async def scenario() -> None:
        hold, release = gate()
        async with opened(made(shape, serve(hold, (b"", event(1)), hold, (PURGE, b"\1")))) as client:
            assert await got(client.next_event(0)) is None
            assert await got(client.next_event(0.01)) is None
            release()
            assert await got(client.next_event()) == told(1)
            assert await got(client.purge("k"))

    run(shape, scenario())


@SHAPES
def test_an_incomplete_event_is_kept(serve, shape: str) -> None:
    async def scenario() -> None:
        hold, release = gate()
        sent = threading.Event()
        steps = ((PURGE, b"\1" + event(1)[:3]), lambda _: sent.set(), hold, (b"", event(1)[3:]), (PURGE, b"\1"))
        async with opened(made(shape, serve(*steps))) as client:
            assert await got(client.purge("k"))
            assert await asyncio.to_thread(sent.wait, PATIENCE)
            assert await got(client.next_event(0.01)) is None
            release()
            assert await got(client.next_event(PATIENCE)) == told(1)
            assert await got(client.purge("k"))

    run(shape, scenario())


@SHAPES
def test_an_iteration_of_events_ends_at_its_timeout(serve, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, serve((PURGE, event(1) + event(2) + b"\1")))) as client:
            await got(client.purge("k"))
            assert await events_of(client, 0) == [told(1), told(2)]
            assert await events_of(client, 0.01) == []

    run(shape, scenario())


@SHAPES
def test_close_ends_calls_and_events(serve, shape: str) -> None:
    async def scenario() -> None:
        client = made(shape, serve((PURGE, event(1) + event(2) + b"\1"), (QUERY, b"")))
        await got(client.purge("k"))
        calling, waiting = begun(shape, lambda: client.query("k")), begun(shape, client.next_event)
        assert await waiting == told(1)
        assert await got(client.next_event()) == told(2)
        waiting = begun(shape, client.next_event)
        await got(client.close())
        await got(client.close())
        for task in (calling, waiting):
            with pytest.raises(errors.ConnectionLost, match=r"close\(\) was called$"):
                await task
        assert await events_of(client) == []
        for call in (client.next_event, lambda: client.purge("k")):
            with pytest.raises(errors.ConnectionLost, match=r"^the connection to .*close\(\) was called$"):
                await got(call())

    run(shape, scenario())


@SHAPES
def test_events_before_a_loss_come_first(serve, shape: str) -> None:
    """Then one call raises that events may be missing, and the next connects again."""

    async def scenario() -> None:
        again = [((b"", event(3)),)]
        script = serve((PURGE, event(1) + event(2) + b"\1"), (b"", None), again=again)
        async with opened(made(shape, script)) as client:
            await got(client.purge("k"))
            assert [await got(client.next_event()) for _ in range(2)] == [told(1), told(2)]
            with pytest.raises(errors.ConnectionLost, match="closed"):
                await got(client.next_event())
            assert await got(client.next_event()) == told(3)

    run(shape, scenario())


@SHAPES
def test_a_loss_that_a_call_raised_is_also_raised_by_next_event(serve, shape: str) -> None:
    async def scenario() -> None:
        script = serve((PURGE, b"\1"), (PURGE, None), again=[((PURGE, b"\1"), (b"", event(3)))])
        async with opened(made(shape, script)) as client:
            assert await got(client.purge("k"))
            with pytest.raises(errors.ConnectionLost):
                await got(client.purge("k"))
            assert await got(client.purge("k"))
            with pytest.raises(errors.ConnectionLost, match=MISSED):
                await got(client.next_event())
            assert await got(client.next_event()) == told(3)

    run(shape, scenario())


@SHAPES
def test_next_event_raises_a_loss_without_other_calls(serve, shape: str) -> None:
    async def scenario() -> None:
        hold, release = gate()
        async with opened(made(shape, serve(hold, (b"", None), again=[((b"", event(3)),)]))) as client:
            assert await got(client.next_event(0)) is None
            release()
            with pytest.raises(errors.ConnectionLost, match=MISSED):
                await got(client.next_event())
            assert await got(client.next_event()) == told(3)

    run(shape, scenario())


@SHAPES
def test_events_beyond_the_bound_are_dropped_and_reported(serve, shape: str) -> None:
    """Each takes 1 + 49 + 150 bytes."""

    async def scenario() -> None:
        burst = b"".join(event(number, 49) for number in range(1, 7))
        script = serve((PURGE, burst + b"\1"), (PURGE, event(9) + b"\0"))
        async with opened(made(shape, script, events_max=800)) as client:
            assert await got(client.purge("k"))
            assert [await got(client.next_event(0)) for _ in range(3)] == [told(number, 49) for number in (1, 2, 3)]
            assert not await got(client.purge("k"))  # whose event is after the gap
            assert await got(client.next_event(0)) == told(4, 49)
            with pytest.raises(errors.EventsLost) as caught:
                await got(client.next_event(0))
            assert caught.value.count == 3
            assert await got(client.next_event(0)) is None

    run(shape, scenario())


def test_next_event_with_timeout_0_reads_the_socket(serve) -> None:
    hold, release = gate()
    with Client(port=serve((PURGE, b"\1"), hold, (b"", event(1))).port) as client:
        assert client.purge("k")
        release()
        assert select.select([client._link], [], [], PATIENCE)[0]
        assert client.next_event(0) == told(1)


@SHAPES
def test_each_event_goes_to_one_waiting_call(serve, shape: str) -> None:
    async def scenario() -> None:
        hold, release = gate()
        async with opened(made(shape, serve(hold, (b"", event(1) + event(2) + event(3))))) as client:
            waiting = [begun(shape, client.next_event) for _ in range(3)]
            release()
            assert sorted(await asyncio.gather(*waiting)) == [told(1), told(2), told(3)]

    run(shape, scenario())


@SHAPES
def test_events_do_not_extend_the_timeout_of_a_call(serve, shape: str) -> None:
    """They keep coming, but the reply does not."""
    done = threading.Event()

    def flood(connection: socket.socket) -> None:
        while not done.is_set():
            connection.sendall(event(1) * 10)

    async def scenario() -> None:
        async with opened(
            made(shape, serve((PURGE, b""), flood), timeout=0.2, connect_timeout=PATIENCE, events_max=1000)
        ) as client:
            with pytest.raises(errors.Timeout, match=r"within 0\.2 s$"):
                await got(client.purge("k"))
        done.set()

    run(shape, scenario())


@SHAPES
def test_a_client_reads_events_while_it_sends(serve, shape: str) -> None:
    """The server sends far more than buffers hold, and reads the request only after that."""

    async def scenario() -> None:
        value = bytes(8 << 20)
        encoder = Encoder(ValueSize.UINT32)
        events = encoder.message(wire.Opcode.EVENT, b"c", bytes(1 << 20)) * 16
        script = serve((encoder.set(b"k", value, 1)[:1], events), (encoder.set(b"k", value, 1)[1:], b"\1"))
        async with opened(made(shape, script, value_size="uint32")) as client:
            assert await got(client.set("k", value, 1))

    run(shape, scenario())


@SHAPES
def test_a_large_request_is_sent_in_pieces(serve, shape: str) -> None:
    async def scenario() -> None:
        request = Encoder(ValueSize.UINT32).set(b"k", bytes(32 << 20), 1)
        async with opened(made(shape, serve((request, b"\1")), value_size="uint32")) as client:
            assert await got(client.set("k", bytes(32 << 20), 1))

    run(shape, scenario())


@SHAPES
def test_concurrent_calls_are_pipelined(serve, shape: str) -> None:
    """All are sent before the first is answered."""

    async def scenario() -> None:
        async with opened(made(shape, serve((QUERY * 4, event(1) + b"\1\5\0\4\6\0" * 4)))) as client:
            results = await asyncio.gather(*(begun(shape, lambda: client.query("k")) for _ in range(4)))
            assert results == [Query(5, TTLType.SECONDS, 6)] * 4
            assert await got(client.next_event()) == told(1)

    run(shape, scenario())


# ---- failures


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


# What a server does with a PURGE, and the error.
FAILURES: list[tuple[tuple[Any, ...], type[errors.CounterdError], str]] = [
    (((PURGE, None),), errors.ConnectionLost, r"^127\.0\.0\.1:[0-9]+ closed the connection"),
    (((PURGE, b""), reset), errors.ConnectionLost, r"^lost the connection to .*reset by peer"),
    (
        ((PURGE, b"\2"),),
        errors.ProtocolError,
        r"^127\.0\.0\.1:[0-9]+: this is not the start of a reply or an event: 02$",
    ),
]


@SHAPES
@pytest.mark.parametrize(("steps", "kind", "message"), FAILURES)
def test_a_client_reconnects_after_each_failure(
    serve, steps: tuple[Any, ...], kind: type[errors.CounterdError], message: str, shape: str
) -> None:
    async def scenario() -> None:
        async with opened(made(shape, serve(*steps, again=[((PURGE, b"\1"),)]))) as client:
            with pytest.raises(kind, match=message):
                await got(client.purge("k"))
            assert await got(client.purge("k"))

    run(shape, scenario())


@SHAPES
def test_a_protocol_error_fails_all_calls(serve, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, serve((PURGE * 3, b"\7")))) as client:
            calls = [begun(shape, lambda: client.purge("k")) for _ in range(3)]
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(each) for each in results] == [errors.ProtocolError] * 3
            assert len({id(each) for each in results}) == 3

    run(shape, scenario())


@SHAPES
def test_a_value_beyond_value_max_is_a_protocol_error(serve, shape: str) -> None:
    async def scenario() -> None:
        script = serve((ENCODER.get(b"k"), b"\1\4\1\0\6\0"))
        async with opened(made(shape, script, value_max=5)) as client:
            with pytest.raises(errors.ProtocolError, match=r": a value of 6 bytes is longer than 5: "):
                await got(client.get("k"))

    run(shape, scenario())


@SHAPES
def test_a_call_that_times_out_keeps_the_connection(serve, shape: str) -> None:
    """The reply is still awaited, in its turn."""

    async def scenario() -> None:
        hold, release = gate()
        script = serve((PURGE, b""), hold, (b"", b"\1"), (QUERY, b"\0"))
        async with opened(made(shape, script, timeout=SHORT, connect_timeout=PATIENCE)) as client:
            with pytest.raises(errors.Timeout, match=r"^127\.0\.0\.1:[0-9]+ did not answer within 0\.05 s$"):
                await got(client.purge("k"))
            release()
            client._link._timeout = PATIENCE
            assert await got(client.query("k")) is None

    run(shape, scenario())


@SHAPES
def test_the_error_of_a_timeout_mentions_the_value_size(serve, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, serve((QUERY, b"\1\5")), timeout=SHORT, connect_timeout=PATIENCE)) as client:
            with pytest.raises(errors.Timeout, match=r"s: is its value_size uint16, as this client's\?$"):
                await got(client.query("k"))

    run(shape, scenario())


@SHAPES
def test_a_request_that_cannot_be_sent_in_time_ends_the_connection(serve, shape: str) -> None:
    async def scenario() -> None:
        hold, release = gate()
        script = serve(hold)
        async with opened(made(shape, script, timeout=0.1, connect_timeout=PATIENCE, value_size="uint32")) as client:
            with pytest.raises((errors.Timeout, errors.ConnectionLost), match=r"did not answer|takes no more"):
                await got(client.set("k", bytes(32 << 20), 1))
            assert client._link.closed == "the server accepts no more requests"
            release()

    run(shape, scenario())


def test_an_interrupted_call_ends_the_connection(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    script = serve((PURGE, b"\1"))
    with Client(port=script.port) as client:
        with monkeypatch.context() as patch:
            patch.setattr(wire.Parser, "feed", interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.purge("k")
        script.wait_for_ends(1)


def test_a_request_whose_sending_is_interrupted_ends_the_connection(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its call would get the reply to the next request."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with Client(port=serve((PURGE, b"\1"), again=[((QUERY, b"\0"),)]).port) as client:
        assert client.purge("k")
        monkeypatch.setattr(client._link, "_send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.purge("k")
        assert client._link.closed == "sending was interrupted"
        assert client.query("k") is None


def test_closed_by_a_signal_handler_while_a_reply_is_read(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    with Client(port=serve((PURGE, b"\1"), (PURGE, b"\1")).port) as client:
        assert client.purge("k")
        parser = client._link.calls._parser  # type: ignore[attr-defined]
        feed = parser.feed

        def closing(data: bytes) -> Any:
            items = feed(data)
            client.close()
            return items

        monkeypatch.setattr(parser, "feed", closing)
        with pytest.raises(errors.ConnectionLost, match=r"close\(\) was called$"):
            client.purge("k")


@SHAPES
def test_the_error_if_no_server_listens(tmp_path: Path, shape: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]

    async def scenario() -> None:
        kind = Client if shape == BLOCKING else AsyncClient
        async with opened(kind(port=port)) as client:
            with pytest.raises(errors.ConnectionLost, match=f"^cannot connect to 127.0.0.1:{port}: .*(refused|failed)"):
                await got(client.purge("k"))
        async with opened(kind(path=tmp_path / "none")) as client:
            with pytest.raises(errors.ConnectionLost, match=r"none: .*No such file"):
                await got(client.next_event())

    run(shape, scenario())


# ---- the next connection


@SHAPES
def test_only_requests_that_change_nothing_are_repeated(serve, shape: str) -> None:
    async def scenario() -> None:
        script = serve((PURGE, b"\1"), (QUERY, None), again=[((QUERY, b"\0"), (PURGE, None)), ((PURGE, b"\0"),)])
        async with opened(made(shape, script)) as client:
            assert await got(client.purge("k"))
            assert await got(client.query("k")) is None
            with pytest.raises(errors.ConnectionLost):
                await got(client.purge("k"))
            assert not await got(client.purge("k"))

    run(shape, scenario())


@SHAPES
def test_a_client_subscribes_again_after_a_loss(serve, shape: str) -> None:
    async def scenario() -> None:
        other, end = ENCODER.subscribe(b"other"), ENCODER.unsubscribe(b"other")
        hold, release = gate()
        first = ((SUBSCRIBE * 2 + other + end, b""), hold, (b"", b"\1\1\1\1"), (b"", None))
        script = serve(*first, again=[((SUBSCRIBE * 2, b"\1\1" + event(5)),)])
        async with opened(made(shape, script)) as client:
            calls = [lambda: client.subscribe("c")] * 2 + [lambda: client.subscribe("other")]
            tasks = []
            for call in [*calls, lambda: client.unsubscribe("other")]:
                tasks.append(begun(shape, call))
                await sent(client, len(tasks))
            release()
            assert await asyncio.gather(*tasks) == [True] * 4
            with pytest.raises(errors.ConnectionLost):
                await got(client.next_event())
            assert await got(client.next_event()) == told(5)

    run(shape, scenario())


async def sent(client: Any, count: int) -> None:
    """Returns once that many calls are under way, in the order of the script."""
    await asyncio.to_thread(
        wait_until, lambda: client._link is not None and len(client._link.calls.pending) == count, "they are sent"
    )


@SHAPES
def test_a_subscription_refused_after_a_loss_raises(serve, shape: str) -> None:
    async def scenario() -> None:
        script = serve((SUBSCRIBE, b"\1"), (b"", None), again=[((SUBSCRIBE, b"\0"),)])
        async with opened(made(shape, script)) as client:
            assert await got(client.subscribe("c"))
            with pytest.raises(errors.ConnectionLost):
                await got(client.next_event())
            with pytest.raises(
                errors.OutOfMemory, match=r"^the server's memory has no room any more for the subscription to b'c'"
            ):
                await got(client.next_event())
            assert not client._exchange.events  # nobody has had that connection

    run(shape, scenario())


@SHAPES
def test_a_refused_subscription_is_not_repeated_after_a_loss(serve, shape: str) -> None:
    async def scenario() -> None:
        script = serve((SUBSCRIBE, b"\0"), (PURGE, None), again=[((QUERY, b"\0"),)])
        async with opened(made(shape, script)) as client:
            assert not await got(client.subscribe("c"))
            assert len(client._exchange.channels) == 0
            with pytest.raises(errors.ConnectionLost):
                await got(client.purge("k"))
            assert await got(client.query("k")) is None

    run(shape, scenario())


def test_a_forked_child_has_no_events_of_its_parent(serve) -> None:
    with Client(port=serve((PURGE, event(1) + b"\1")).port) as client:
        assert client.purge("k")
        child = os.fork()
        if not child:
            os._exit(0 if client._exchange.events.take() is None else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert client.next_event(0) == told(1)


# ---- tasks that are cancelled


ASYNC = pytest.mark.parametrize("shape", ["asyncio", "uvloop"])


@ASYNC
def test_a_cancelled_call_leaves_the_connection_in_step(serve, shape: str) -> None:
    async def scenario() -> None:
        request, reply = CALLS[16][1:3]
        hold, release = gate()
        steps = [(request + QUERY, reply[:9]), hold, (b"", reply[9:] + b"\0"), (PURGE, b"\1")]
        async with opened(made(shape, serve(*steps))) as client:
            listing, query = begun(shape, client.list), begun(shape, lambda: client.query("k"))
            await sent(client, 2)
            listing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await listing
            release()
            assert await query is None
            assert await client.purge("k") is True

    run(shape, scenario())


@ASYNC
def test_an_iteration_continues_after_a_cancelled_wait(serve, shape: str) -> None:
    async def scenario() -> None:
        hold, release = gate()
        async with opened(made(shape, serve((PURGE, b"\1"), hold, (b"", event(1))))) as client:
            assert await client.purge("k")
            events = client.events()
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(anext(events), 0.01)
            release()
            assert await anext(events) == told(1)

    run(shape, scenario())


@leaves_connections_open
def test_another_loop_reports_that_events_may_be_missing(serve) -> None:
    async def second(client: AsyncClient) -> None:
        async with client:
            with pytest.raises(errors.ConnectionLost, match="event loop was closed; events may be missing"):
                await client.next_event()
            assert await client.next_event() == told(1)

    client = made("asyncio", serve((PURGE, b"\1"), again=[((b"", event(1)),)]))
    assert asyncio.run(client.purge("k"))
    asyncio.run(second(client))


@ASYNC
def test_a_cancelled_wait_loses_no_event(serve, shape: str) -> None:
    async def scenario() -> None:
        hold, release = gate()
        async with opened(made(shape, serve((PURGE, b"\1"), hold, (b"", event(1))))) as client:
            assert await client.purge("k")
            first, second = begun(shape, client.next_event), begun(shape, client.next_event)
            await asyncio.to_thread(wait_until, lambda: len(client._link.calls.listeners) == 2, "both wait")
            first.cancel()
            with pytest.raises(asyncio.CancelledError):
                await first
            release()
            assert await second == told(1)
            assert await client.next_event(0) is None
            assert client._link.calls.listeners == []

    run(shape, scenario())


@ASYNC
def test_closing_while_connecting_ends_calls(serve, shape: str) -> None:
    async def scenario() -> None:
        script = serve()
        client = made(shape, script)
        calling = begun(shape, lambda: client.purge("k"))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises((errors.ConnectionLost, asyncio.CancelledError)):
            await calling
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", script.port), PATIENCE):
            pass  # where its connection never began the server waits for one

    run(shape, scenario())
