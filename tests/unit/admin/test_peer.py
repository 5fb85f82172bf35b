"""Connections that misbehave: slow ones, many, large requests, and peers that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from typing import TYPE_CHECKING

import pytest

from counterd.admin import events, peer
from unit.admin.serving import STATS, World, serve, until

if TYPE_CHECKING:
    import socket

    from counterd.admin.peer import Peers

GET = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "PATIENCE_S", 0.05)


@pytest.mark.parametrize("sent", [b"", b"GET /stats HTTP/1.1\r\nHo", b"\r\n" * 10, GET[:-2]])
def test_a_connection_without_a_request_is_cut_off(sent: bytes, hasty: None) -> None:
    async def scene(world: World) -> None:
        async with world.client() as client:
            client.writer.write(sent)
            assert await client.ends() == b""
        assert world.link.asked == []

    serve(scene)


def test_slow_bytes_do_not_extend_the_timeout(hasty: None) -> None:
    async def scene(world: World) -> None:
        async with world.client() as client:
            ended = asyncio.create_task(client.ends())
            client.writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: ")
            while not ended.done():
                client.writer.write(b"x")
                await asyncio.sleep(0.005)
            assert await ended == b""
        assert world.link.asked == []

    serve(scene)


def test_a_request_head_without_end_is_cut_off() -> None:
    async def scene(world: World) -> None:
        world.site.peers.head = 1000
        async with world.client() as client:
            client.writer.write(GET[:-2] + b"A: " + b"x" * 900)
            assert (await world.get("/livez")).status == 200
            client.writer.write(b"x" * 100)
            assert await client.ends() == b""
        async with world.client() as client:
            for _ in range(20):  # of several requests it is not the sum that counts
                assert (await client.request("/livez")).status == 200

    serve(scene)


def test_the_timeout_begins_anew_with_each_answer() -> None:
    async def scene(world: World) -> None:
        async with world.client() as client:
            ends = []
            for _ in range(3):
                assert (await client.request("/livez")).status == 200
                (one,) = world.site.peers.fresh
                ends.append(one._idle_timer.when())
            assert ends[0] < ends[1] < ends[2]

    serve(scene)


def test_an_answer_may_take_longer_than_a_question(hasty: None) -> None:
    async def scene(world: World) -> None:
        async def slow(*_: object, **__: object) -> bytes:
            await asyncio.sleep(0.2)
            return json.dumps(STATS).encode()

        world.link.ask = slow
        assert (await world.get("/stats")).json == STATS

    serve(scene)


def test_a_peer_that_does_not_read_its_answer_is_cut_off(hasty: None) -> None:
    """Output that the kernel does not accept is dropped."""

    async def scene(world: World) -> None:
        world.link.answers["figures"] = {"long": "x" * (16 << 20)}
        async with world.client() as client:
            client.writer.write(GET.replace(b"livez", b"stats"))
            await until(lambda: world.link.asked)
            await until(lambda: there(world.site.peers) == 0)
            with contextlib.suppress(ConnectionError):
                assert len(await client.reader.read(1 << 30)) < 16 << 20

    serve(scene)


def test_an_unread_stream_of_events_is_cut_off(hasty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "STATS_PERIOD_S", 0.001)

    async def scene(world: World) -> None:
        world.link.answers["figures"] = {"long": "x" * (4 << 20)}
        async with world.client() as client:
            client.writer.write(GET.replace(b"livez", b"events"))
            await until(lambda: world.site.peers.busy)
            await until(lambda: not world.site.peers.busy)

    serve(scene)


def test_a_peer_that_reads_again_is_not_cut_off() -> None:
    async def scene(world: World) -> None:
        async with world.client() as client:
            client.writer.write(GET.replace(b"livez", b"events"))
            await until(lambda: world.site.peers.busy)
            (one,) = world.site.peers.busy
            one.pause_writing()
            timer = one._stuck_timer
            one.resume_writing()
            assert timer.cancelled()

    serve(scene)


def there(peers: Peers) -> int:
    return len(peers.fresh) + len(peers.idle) + len(peers.busy)


def test_a_surplus_connection_replaces_the_idlest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "CHANCE_S", 0.01)

    async def scene(world: World) -> None:
        async with contextlib.AsyncExitStack() as stack:
            first = await stack.enter_async_context(world.client())
            await until(lambda: len(world.site.peers.idle) == 1)
            second = await stack.enter_async_context(world.client())
            await until(lambda: len(world.site.peers.idle) == 2)
            assert (await first.request("/livez")).status == 200  # from now on the second is the idlest
            for _ in range(peer.CONNECTIONS_MAX - 2):
                await stack.enter_async_context(world.client())
            await until(lambda: len(world.site.peers.idle) == peer.CONNECTIONS_MAX)
            assert (await world.get("/livez")).status == 200
            assert await second.ends() == b""
            assert (await first.request("/livez")).status == 200

    serve(scene)


def test_in_a_crowd_every_connection_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connection is closed for another before its request was read, however many come at once."""
    monkeypatch.setattr(peer, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(peer, "CHANCE_S", 60.0)

    async def scene(world: World) -> None:
        answers = await asyncio.gather(*(world.get("/livez") for _ in range(50)))
        assert [answer.status for answer in answers] == [200] * 50

    serve(scene)


def test_while_all_connections_wait_for_answers_further_ones_are_not_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "CONNECTIONS_MAX", 2)

    async def scene(world: World) -> None:
        go = asyncio.Event()

        async def slow(*_: object, **__: object) -> bytes:
            await go.wait()
            return b'{"state": "ready"}'

        world.link.ask = slow
        asked = [asyncio.create_task(world.get("/readyz")) for _ in range(2)]
        await until(lambda: len(world.site.peers.busy) == 2)
        third = asyncio.create_task(world.get("/livez"))
        await until(lambda: world.site.peers.is_awaited)
        assert there(world.site.peers) == 2
        go.set()
        assert [(await task).status for task in (*asked, third)] == [200, 200, 200]
        assert not world.site.peers.is_awaited

    serve(scene)


def test_a_connection_with_endless_requests_is_replaced_after_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(peer, "CHANCE_S", 60.0)  # else it would be idle between its answers on a slow machine

    async def scene(world: World) -> None:
        async with world.client() as greedy:
            greedy.writer.write(GET)
            assert (await greedy.answer()).headers.get("connection") != "close"
            other = asyncio.create_task(world.get("/livez"))
            await until(lambda: world.site.peers.is_awaited)
            greedy.writer.write(GET * 1000)
            assert (await greedy.answer()).headers["connection"] == "close"
            assert await greedy.ends() == b""
            assert (await other).status == 200

    serve(scene)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ECONNABORTED])
def test_accepting_is_retried_after_an_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "EXHAUSTED_S", 0.001)

    async def scene(world: World) -> None:
        loop = asyncio.get_running_loop()
        accept, failed = loop.sock_accept, []

        async def failing(listening: socket.socket) -> object:
            if len(failed) < 3:
                failed.append(listening)
                raise OSError(number, "")
            return await accept(listening)

        monkeypatch.setattr(loop, "sock_accept", failing)
        assert (await world.get("/livez")).status == 200  # by the call that is under way
        assert (await world.get("/livez")).status == 200
        assert len(failed) == 3

    serve(scene)


def test_a_refused_address_gets_403() -> None:
    async def scene(world: World) -> None:
        async with world.client() as client:
            client.writer.write(GET)
            answer = await client.ends()
            assert answer.startswith(b"HTTP/1.1 403 ")
            assert answer.endswith(b'{"error": "this address is not allowed"}')
            assert b"counterd" not in answer
        assert world.link.asked == []

    serve(scene, allow=["192.0.2.0/24"])


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 10_000 + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X%d: x\r\n" % n for n in range(100)) + b"\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n Host: localhost\r\n\r\n",
        b"GET /livez HTTP/1.1\r\n\r\n",
        b"GET /livez HTTP/9.9\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"\x00\x01\x02\r\n\r\n",
        b"GET\r\n\r\n",
    ],
    ids=["line", "field", "fields", "nul", "lengths", "folded", "no host", "version", "tls", "binary", "short"],
)
def test_an_invalid_request_gets_a_short_answer_and_an_end(sent: bytes) -> None:
    async def scene(world: World) -> None:
        async with world.client() as client:
            client.writer.write(sent)
            answer = await client.answer()
            assert 400 <= answer.status < 500
            assert answer.headers["server"] == "counterd"
            assert len(answer.body) < 100
            assert await client.ends() == b""
        assert world.link.asked == []

    serve(scene)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def scene(world: World) -> None:
        async with world.client() as client:
            client.writer.write(GET * 50 + GET.replace(b"livez", b"nothing"))
            assert [(await client.answer()).status for _ in range(51)] == [200] * 50 + [404]
            assert await client.ends() == b""

    serve(scene)


def test_a_flood_of_requests_is_not_stored() -> None:
    """While the first is being answered, nearly all others are left in the kernel."""

    async def scene(world: World) -> None:
        go = asyncio.Event()

        async def slow(*_: object, **__: object) -> bytes:
            await go.wait()
            return json.dumps(STATS).encode()

        world.link.ask = slow
        async with world.client() as client:
            client.writer.write(GET * 400_000)
            await until(lambda: world.site.peers.busy)
            before = client.writer.transport.get_write_buffer_size()
            await asyncio.sleep(0.05)
            assert stored(world.site.peers) < 1_000
            assert client.writer.transport.get_write_buffer_size() > 0 < before
            go.set()
            client.writer.transport.abort()

    serve(scene)


def stored(peers: Peers) -> int:
    return sum(len(one._messages) for one in peers.busy)
