"""The clients for tokens, blocking and for asyncio, with a server that answers wrongly, too late, or not at all.

What only asyncio has is in test_aio_sentinel.py."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client.sentinel import Answer, AsyncClient, Blocked, Client, NoSuchRule, TokenLost, TokenRefused
from counterd.errors import ConnectionLost, ProtocolError, Timeout
from counterd.protocols.sentinel.wire import MessageType, Status
from kit.connections import fill, sockets
from kit.daemon import PATIENCE, wait_until
from kit.interrupting import Points
from kit.loops import until
from kit.scripted import Hangup
from kit.scripted.sentinel import Asked, Tokens
from kit.shapes import BLOCKING, SHAPES, answered, begun, got, opened, run
from ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator

SHORT = 0.05  # a timeout that passes
POINTS_MAX = 1000
LEASE_MS = 4000
PASSED, REFUSED = Answer(0, fallback=True), Answer(1, fallback=True)


def token_server(**options: Any) -> Tokens:
    return Tokens({101: 2}, lease_ms=LEASE_MS, **options)


@pytest.fixture
def server() -> Iterator[Tokens]:
    with token_server() as made:
        yield made


def made(shape: str, server: Tokens | None = None, **options: Any) -> Any:
    client = Client if shape == BLOCKING else AsyncClient
    return client(*server.address if server else (), **{"timeout": PATIENCE, "limits": {101: 1}, **options})


def hasty(shape: str, server: Tokens, **options: Any) -> Any:
    """A client with short timeouts."""
    return made(shape, server, **{"timeout": SHORT, "connect_timeout": PATIENCE, **options})


async def entered(hold: Any) -> Any:
    """Enters the hold, and returns it; raises the error if it is refused."""
    await got(hold.__enter__() if hasattr(hold, "__enter__") else hold.__aenter__())
    return hold


async def left(hold: Any) -> None:
    await got((hold.__exit__ if hasattr(hold, "__exit__") else hold.__aexit__)(None, None, None))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "counterd.client.sentinel"]


# ---- answers --------------------------------------------------------------------------------------------------------


@SHAPES
def test_answers_may_come_in_another_order(server: Tokens, shape: str) -> None:
    """Each caller gets its own."""

    async def scenario() -> None:
        server.waits = {MessageType.FLOW}
        server.limits = dict.fromkeys(range(1, 6), 10)
        async with opened(made(shape, server)) as client:
            asking = [begun(shape, lambda number=number: client.flow(number, number)) for number in range(1, 6)]
            await until(lambda: len(server.held_back) == 5, "all have asked")
            assert (await got(client.acquire(5))).id, "others do not wait for them"
            server.go_on()
            assert [await each for each in asking] == [Answer(0, 10 - number) for number in range(1, 6)]

    run(shape, scenario())


@SHAPES
def test_the_namespace_is_sent_first(server: Tokens, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, server, namespace="sch\u00f6n")) as client:
            await got(client.flow(101))
            server.hang_up()
            await got(client.flow(101))

    run(shape, scenario())
    asked = [(request.connection, request.type) for request in server.seen]
    assert asked == [(0, MessageType.PING), (0, MessageType.FLOW), (1, MessageType.PING), (1, MessageType.FLOW)]
    assert server.seen[0].body == struct.pack(">i", 6) + "sch\u00f6n".encode()


@SHAPES
def test_an_invalid_answer_is_a_protocol_error(server: Tokens, shape: str) -> None:
    async def scenario() -> None:
        server.says = {MessageType.FLOW: 0}  # which is too short
        async with opened(made(shape, server, limits={})) as client:
            with pytest.raises(ProtocolError, match="flow 101 has no local limit"):
                await got(client.flow(101))

    run(shape, scenario())


# ---- too late -------------------------------------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("holds", [False, True])
def test_a_late_grant_is_given_back(server: Tokens, shape: str, holds: bool) -> None:
    """At once, though the client makes no further calls."""

    async def scenario() -> None:
        async with opened(hasty(shape, server, fallback="closed")) as client:
            await answered(client.ping)
            server.waits = {MessageType.ACQUIRE}
            with pytest.raises(Timeout):
                await (entered(client.hold(101)) if holds else got(client.acquire(101)))
            server.go_on()
            await until(lambda: server.of(MessageType.RELEASE), "it is given back")
            await until(lambda: server.used[101] == 0, "it is free")
            await until(lambda: client.stats().late == 1, "it is counted")
            assert [peer.is_there() for peer in server.peers] == [True]

    run(shape, scenario())


@SHAPES
def test_leases_are_kept_while_a_grant_is_owed(server: Tokens, shape: str) -> None:
    async def scenario() -> None:
        server.limits = {101: 1, 102: 1}
        async with opened(hasty(shape, server, fallback="closed")) as client:
            hold = await answered(lambda: entered(client.hold(101)))
            before = client.stats().late
            server.waits = {MessageType.ACQUIRE}
            with pytest.raises(Timeout):
                await got(client.acquire(102))
            kept = len(server.of(MessageType.KEEP))
            await until(lambda: len(server.of(MessageType.KEEP)) > kept + 1, "it is kept again")
            assert not hold.lost
            assert server.used[101] == 1
            server.go_on()
            await until(lambda: client.stats().late == before + 1, "it is given back")

    run(shape, scenario())


@SHAPES
@pytest.mark.parametrize("status", [Status.NO_RULE, Status.NOT_AVAILABLE, Status.FAIL])
def test_a_refused_renewal_is_repeated(server: Tokens, shape: str, status: Status) -> None:
    """The lease goes on in time."""

    async def scenario() -> None:
        async with opened(made(shape, server)) as client, opened(client.hold(101)) as hold:
            for says in ({}, {MessageType.KEEP: status}, {}):
                server.says = says
                kept = len(server.of(MessageType.KEEP))
                await until(lambda kept=kept: len(server.of(MessageType.KEEP)) > kept, "it is kept")
            assert not hold.lost
            server.says = {MessageType.RELEASE: status}

    run(shape, scenario())


@SHAPES
def test_releasing_an_unknown_token_is_a_loss(server: Tokens, shape: str) -> None:
    async def scenario() -> None:
        server.lease_ms = 600_000  # so that it is not kept again before
        async with opened(made(shape, server)) as client:
            hold = await entered(client.hold(101))
            await until(lambda: server.of(MessageType.KEEP), "it is kept")
            await got(client.ping())  # that it was is known as well
            server.end_all()
            assert not hold.lost
            with pytest.raises(TokenLost, match="the server no longer knows the token"):
                await left(hold)
            assert client.stats().lost == 1

    run(shape, scenario())


# ---- falling back ---------------------------------------------------------------------------------------------------


@SHAPES
def test_local_limits_while_there_is_no_server(shape: str, caplog: pytest.LogCaptureFixture) -> None:
    """One log line when it begins, one when it ends: not one for each call."""
    (port,) = free_ports(1)

    async def scenario() -> None:
        async with opened(made(shape, port=port, limits={101: 2, 201: 1})) as client:
            assert [await got(client.flow(101)) for _ in range(3)] == [PASSED, PASSED, REFUSED]
            assert [await got(client.param(201, [value])) for value in "aba"] == [PASSED, PASSED, REFUSED]
            async with opened(client.hold(101)) as hold:
                assert (hold.fallback, hold.lost) == (True, False)
                second = await got(client.acquire(101))
                assert await got(client.keep(second)) > 10**9
                with pytest.raises(Blocked):
                    await entered(client.hold(101, timeout=SHORT))
                with pytest.raises(Blocked):
                    await got(client.acquire(101))
                assert await got(client.release(second))
                assert not await got(client.release(second))
            with pytest.raises(ConnectionLost, match=r"cannot connect .*; flow 7 has no local limit$"):
                await got(client.flow(7))
            with pytest.raises(ConnectionLost, match=r"flow 7 has no local limit$"):
                await got(client.acquire(7))
            begun = lines(caplog)
            assert len(begun) == 1
            assert begun[0].startswith(f"cannot connect to 127.0.0.1:{port}: ")
            assert begun[0].endswith(": local limits apply")
            assert client.stats().falling_back in begun[0]
            refused: int = client.stats().refused
            assert client.stats()[1:] == (1, 6, refused, 0, 0)
        assert lines(caplog)[1].endswith(f": 6 calls passed without the server, and {refused} were refused")

    run(shape, scenario())


@SHAPES
def test_the_fallback_ends_when_the_server_is_back(
    server: Tokens, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with opened(hasty(shape, server, fallback="open")) as client:

            async def is_over() -> bool:
                await got(client.flow(101))
                return not client.stats().falling_back

            passed = 0
            for _ in range(2):
                server.waits = {MessageType.FLOW}
                passed = client.stats().passed
                assert [await got(client.flow(101)) for _ in range(2)] == [PASSED, PASSED]
                server.go_on()
                await until(is_over, "the server decides again")
            passed = client.stats().passed - passed
        assert [line.partition(":")[0].partition(" after")[0] for line in lines(caplog)] == [
            "127.0.0.1",
            "the server decides again",
        ] * 2
        assert lines(caplog)[3].endswith(f"{passed} calls passed without the server, and 0 were refused")

    run(shape, scenario())


@SHAPES
def test_open_passes_and_closed_refuses_without_a_server(shape: str) -> None:
    (port,) = free_ports(1)

    async def scenario() -> None:
        async with opened(made(shape, port=port, fallback="open")) as client, opened(client.hold(7, 1000)):
            assert await got(client.flow(7, 1000)) == PASSED
        async with opened(made(shape, port=port, fallback="closed")) as client:
            assert await got(client.flow(7)) == REFUSED
            with pytest.raises(ConnectionLost, match=r"^cannot connect"):
                await got(client.acquire(7))

    run(shape, scenario())


@SHAPES
def test_a_hold_with_closed_fallback_waits_for_the_server(shape: str) -> None:
    (port,) = free_ports(1)

    async def scenario() -> None:
        async with opened(made(shape, port=port, fallback="closed")) as client:
            start = time.monotonic()
            with pytest.raises(ConnectionLost, match="cannot connect"):
                await entered(client.hold(101, timeout=0.15))
            assert time.monotonic() - start >= 0.14  # uvloop's clock counts milliseconds
            hold = client.hold(101)
            waiting = begun(shape, hold.__enter__ if shape == BLOCKING else hold.__aenter__)
            with token_server(listening=socket.create_server(("127.0.0.1", port))):
                assert await waiting is hold
                await left(hold)
                await got(client.close())

    run(shape, scenario())


@SHAPES
@pytest.mark.parametrize("status", [-4, -2, -1, 3, 5, 4, 99])
def test_answers_without_a_decision_use_the_fallback(
    server: Tokens, shape: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        server.says = dict.fromkeys((MessageType.FLOW, MessageType.PARAM, MessageType.ACQUIRE), status)
        async with opened(made(shape, server)) as client:
            assert [await got(client.flow(101)), await got(client.flow(101))] == [PASSED, REFUSED]
            assert await got(client.param(101, ["a"])) == PASSED
            assert (await got(client.acquire(101))).fallback
            kind, text = NoSuchRule if status == 3 else TokenRefused, rf"\(status {status}\): .* flow 7$"
            for call in (client.flow, client.acquire, lambda flow_id: client.param(flow_id, [1])):
                with pytest.raises(kind, match=text):
                    await got(call(7))
            with pytest.raises(kind, match=text):
                await entered(client.hold(7))
        assert len([line for line in lines(caplog) if "after" not in line]) == 2, "one for each flow"

    run(shape, scenario())


@SHAPES
def test_refused_keeps_and_releases_raise(server: Tokens, shape: str) -> None:
    async def scenario() -> None:
        async with opened(made(shape, server)) as client:
            token = await got(client.acquire(101))
            server.says = {MessageType.KEEP: 5, MessageType.RELEASE: -1, MessageType.PING: -1}
            with pytest.raises(TokenRefused, match=rf"not available \(status 5\): token {token.id} of flow 101"):
                await got(client.keep(token))
            with pytest.raises(TokenRefused, match=r"failed \(status -1\)"):
                await got(client.release(token))
            with pytest.raises(TokenRefused, match=r"failed \(status -1\)"):
                await got(client.ping())
            server.says = {MessageType.RELEASE: 3}
            assert await got(client.release(token)), "its rule has gone, and so has it"

    run(shape, scenario())


# ---- the connection -------------------------------------------------------------------------------------------------


@SHAPES
def test_calls_go_on_with_another_connection(server: Tokens, shape: str) -> None:
    """Also a pending one."""

    async def scenario() -> None:
        async with opened(made(shape, server)) as client:
            for _ in range(3):
                assert await got(client.ping()) >= 1
                server.hang_up()
                assert await got(client.flow(101)) == Answer(0, 1)
                server.hang_up()
                token = await got(client.acquire(101))
                server.hang_up()
                assert await got(client.keep(token)) == server.lease_ms
                server.hang_up()
                assert await got(client.release(token))
            assert client.stats().fallbacks == 0

    run(shape, scenario())


def test_only_the_first_call_waits_for_a_server_that_does_not_accept() -> None:
    """It is refused here; after that only the keeper waits. For asyncio: test_aio_sentinel.py."""
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(Client(port=port, fallback="open", connect_timeout=PATIENCE))
        assert client.flow(101) == PASSED
        fill(stack.enter_context(socket.create_server(("127.0.0.1", port))), stack)
        before = sockets()

        def asks() -> bool:
            assert client.flow(101) == PASSED
            return bool(sockets() - before)

        wait_until(asks, "the keeper connects")
        assert client.flow(101) == PASSED
        assert sockets() - before, "it still does"


@SHAPES
def test_calls_reach_a_server_that_is_back(shape: str) -> None:
    (port,) = free_ports(1)

    async def scenario() -> None:
        async with opened(made(shape, port=port, limits={101: 10**6})) as client:
            assert (await got(client.flow(101))).fallback

            async def decides() -> bool:
                return not (await got(client.flow(101))).fallback

            with token_server(listening=socket.create_server(("127.0.0.1", port))):
                await until(decides, "it is found")
                await got(client.close())

    run(shape, scenario())


@SHAPES
def test_calls_pause_for_a_server_that_closes_each_connection(server: Tokens, shape: str) -> None:
    """As one without room does."""

    def close(_: Asked) -> bytes:
        raise Hangup

    async def scenario() -> None:
        server.answer = close  # type: ignore[method-assign]
        async with opened(made(shape, server, fallback="open")) as client:
            deadline = time.monotonic() + 0.3
            while time.monotonic() < deadline:
                assert await got(client.flow(101)) == PASSED
        assert len(server.peers) < 10

    run(shape, scenario())


@SHAPES
def test_a_hold_is_lost_when_its_lease_is_over_without_a_server(shape: str) -> None:
    lost: list[object] = []

    async def scenario(server: Tokens) -> None:
        server.lease_ms = 300
        async with opened(made(shape, server)) as client:
            async with opened(client.hold(101, on_lost=lost.append)) as hold:
                await until(lambda: server.of(MessageType.KEEP), "it is kept")
                await got(client.ping())  # its lease is known
                leaving.close()
                await until(lambda: lost, "it is lost")
                assert hold.lost
            assert client.stats().lost == 1

    with contextlib.ExitStack() as leaving:
        run(shape, scenario(leaving.enter_context(token_server())))


def test_a_signal_handler_can_close_the_client(server: Tokens) -> None:
    """Wherever it comes, and whatever lock the interrupted thread has."""
    server.limits = {101: POINTS_MAX}
    for at in range(1, POINTS_MAX):
        client = made(BLOCKING, server)
        with Points(at, client.close) as points, contextlib.suppress(ConnectionLost), client.hold(101):
            pass
        if not points.fired:
            client.close()
            break
        with pytest.raises(ConnectionLost, match=r"close\(\) was called"):
            client.ping()
    assert at > 1
    wait_until(lambda: not any(thread.name == "counterd-keep" for thread in threading.enumerate()), "it ends")
    server.wait_for_ends(len(server.peers))


@SHAPES
@pytest.mark.parametrize("call", ["flow", "acquire"])
def test_closing_a_waiting_client_does_not_use_the_fallback(server: Tokens, shape: str, call: str) -> None:
    async def scenario() -> None:
        server.waits = {MessageType.FLOW, MessageType.ACQUIRE}
        client = made(shape, server, fallback="open")
        asking = begun(shape, lambda: getattr(client, call)(101))
        await until(lambda: server.held_back, "it has asked")
        await got(client.close())
        with pytest.raises(ConnectionLost, match=r"close\(\) was called"):
            await asking

    run(shape, scenario())


def test_the_client_configures_no_logging() -> None:
    code = "import logging, counterd.client.sentinel as told; print(logging.getLogger(told.__name__).handlers)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert ended.stdout == "[]\n"
