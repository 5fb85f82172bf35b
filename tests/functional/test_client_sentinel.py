"""The clients for tokens, blocking and for asyncio, with a real counterd: flows, tokens, holds, and lost
connections.

Wrong or missing answers are in test_client_fallback.py; what only asyncio has in test_aio_sentinel.py."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from asyncio import sleep
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import sentinel
from counterd.client.sentinel import AsyncClient, Blocked, Client, NoSuchRule, Tag, TokenLost, Typed
from counterd.errors import ConnectionLost, ServerError
from counterd.protocols.sentinel.wire import MessageType
from kit import daemon, sentinels
from kit.cuts import Relay
from kit.daemon import PATIENCE, environment, wait_until
from kit.loops import NEW_LOOP, until
from kit.scripted.sentinel import Tokens
from kit.sentinels import flow, param
from kit.shapes import BLOCKING, SHAPES, begun, got, opened, queued, run

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from kit.certificates import Files

OFFLINE_MS = 200
QUICK = {"clientOfflineTime": OFFLINE_MS}
LASTING_S = 4  # of what has to be kept however busy the machine is
LASTING = {"clientOfflineTime": LASTING_S * 1000}
FLOWS = [
    flow(101, 2, **QUICK),
    flow(103, 1, resourceTimeout=400, **QUICK),  # a lease of 800 ms
    flow(104, 1, resourceTimeout=75, resourceTimeoutStrategy=1),  # of 75 ms that cannot be renewed
    flow(105, 1000, clientOfflineTime=60_000),
    flow(107, 3, thresholdType=0),  # for each connection of the namespace
    flow(108, 2, resourceTimeout=LASTING_S * 500, **LASTING),  # a lease of LASTING_S
    flow(109, 2, resourceTimeout=60_000, **LASTING),
]
OWN = {shape: 10 * number for number, shape in enumerate((BLOCKING, *NEW_LOOP))}  # rates are each shape's own
for number in OWN.values():
    FLOWS += [flow(1002 + number, 5, grade=1), flow(1006 + number, 1, grade=1, sampleCount=1)]
PARAMS = [param(2001 + number, 2) for number in OWN.values()]
RULES = {"default": {"flowRules": FLOWS, "paramFlowRules": PARAMS}, "other": {"flowRules": [flow(301, 1)]}}


def made(shape: str, address: tuple[str, int], **options: Any) -> Any:
    client = Client if shape == BLOCKING else AsyncClient
    return client(*address, **{"timeout": PATIENCE, "fallback": "closed", **options})


class Server:
    """A running server. observer: a separate client, to see what is in use."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.observer = Client(*address, timeout=PATIENCE, namespace="observers")

    def made(self, shape: str, **options: Any) -> Any:
        return made(shape, self.address, **options)

    def client(self, **options: Any) -> Client:
        made: Client = self.made(BLOCKING, **options)
        return made

    def is_free(self, flow_id: int, count: int) -> bool:
        """Whether so much is free."""
        with contextlib.suppress(Blocked):
            return self.observer.release(self.observer.acquire(flow_id, count))
        return False

    async def until_free(self, flow_id: int, count: int) -> None:
        await until(lambda: self.is_free(flow_id, count), f"{count} of {flow_id} are free")

    def wait_until_free(self, flow_id: int, count: int) -> None:
        wait_until(lambda: self.is_free(flow_id, count), f"{count} of {flow_id} are free")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with sentinels.running(tmp_path_factory.mktemp("counterd"), RULES) as (_, address):
        served = Server(address)
        yield served
        served.observer.close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with server.client() as made:
        yield made


def keepers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "counterd-keep"]


# ---- calls ----------------------------------------------------------------------------------------------------------


@SHAPES
def test_calls_by_rate(server: Server, shape: str) -> None:
    async def scenario() -> None:
        async with opened(server.made(shape)) as client:
            answers = [await got(client.flow(1002 + OWN[shape])) for _ in range(7)]
            assert [answer.passed for answer in answers] == [True] * 5 + [False] * 2
            assert [answer.remaining for answer in answers[:5]] == [4, 3, 2, 1, 0]
            assert not any(answer.fallback for answer in answers)
            told = [await got(client.flow(1006 + OWN[shape], prioritized=True)) for _ in range(2)]
            assert told[0] == (0, 0, 0, False)
            assert (told[1].status, told[1].wait_ms, told[1].passed) == (2, 1000, True), "of the next window"

    run(shape, scenario())


@SHAPES
def test_calls_by_values_of_parameters(server: Server, shape: str) -> None:
    async def scenario() -> None:
        values = ["a", 5, 1 << 40, True, 0.5, b"bytes", Typed(Tag.SHORT, 5)]
        async with opened(server.made(shape)) as client:

            async def passes(values: list[Any], count: int = 1) -> Any:
                return (await got(client.param(2001 + OWN[shape], values, count))).passed

            assert [await passes(values) for _ in range(3)] == [True, True, False]
            assert (await got(client.param(2001 + OWN[shape], ["b"]))).remaining == 1
            assert not await passes(["c", "a"])
            assert await passes(["c"], 2), "what was refused with another counts for none"
            with pytest.raises(ValueError, match="values must have 0 to"):
                await passes(["x" * 600, "y" * 600])
            with pytest.raises(ValueError, match="at least one"):
                await passes([])

    run(shape, scenario())


@SHAPES
def test_tokens_are_acquired_and_released(server: Server, shape: str) -> None:
    async def scenario() -> None:
        async with opened(server.made(shape)) as client:
            token = await got(client.acquire(101, 2))
            assert (token.flow_id, token.count, token.fallback) == (101, 2, False)
            with pytest.raises(Blocked, match=r"^blocked \(status 1\): asked for 1 of flow 101$") as caught:
                await got(client.acquire(101))
            assert (caught.value.name, caught.value.resources, caught.value.waited) == (b"flow 101", 1, None)
            assert 3000 < await got(client.keep(token)) <= 4000
            assert await got(client.release(token))
            assert not await got(client.release(token))
            assert server.is_free(101, 2)
            with pytest.raises(TokenLost, match=r"^lost 2 of flow 101: the server no longer knows the token"):
                await got(client.keep(token))
            with pytest.raises(NoSuchRule, match=r"^no such rule \(status 3\): asked for 1 of flow 999$"):
                await got(client.acquire(999))
            for wrong in (client.flow, client.acquire, client.hold):
                with pytest.raises(ValueError, match="flow_id must be"):
                    wrong(0)

    run(shape, scenario())


@SHAPES
def test_namespaces_count_their_clients(server: Server, shape: str) -> None:
    async def scenario() -> None:
        other, second = (server.made(shape, namespace=name) for name in ("other", b"other"))
        async with opened(server.made(shape)) as client:
            async with opened(other), opened(second):
                assert [await got(each.ping()) for each in (other, second, other)] == [1, 2, 2]
                async with opened(other.hold(301)):
                    with pytest.raises(Blocked):
                        await got(second.acquire(301))
            first = await got(client.acquire(107, 3))
            async with opened(server.made(shape)) as more:
                await got(more.ping())
                await got(client.release(first))
                await got(client.release(await got(client.acquire(107, 6))))
            assert repr(client).startswith(f"<{type(client).__name__} 127.0.0.1:")

    run(shape, scenario())


@SHAPES
def test_a_client_connects_with_the_first_call(shape: str) -> None:
    made: Any = Client if shape == BLOCKING else AsyncClient

    async def scenario() -> None:
        async with opened(made("sentinel://127.0.0.1:1")) as client:
            assert client.where == "127.0.0.1:1"
        with pytest.raises(ConnectionLost, match=r"close\(\) was called"):
            await got(client.flow(101))
        assert client.stats() == ("", 0, 0, 0, 0, 0)
        with pytest.raises(ValueError, match="sentinel://HOST:PORT"):
            made("counter://127.0.0.1")

    run(shape, scenario())


# ---- holds ----------------------------------------------------------------------------------------------------------


@SHAPES
def test_a_hold_has_its_token_in_its_block(server: Server, shape: str) -> None:
    async def scenario() -> None:
        async with opened(server.made(shape)) as client:
            async with opened(client.hold(101, 2)) as hold:
                assert (hold.lost, hold.fallback) == (False, False)
                assert repr(hold) == f"<{type(hold).__name__} 2 of flow 101>"
                assert str(hold.token) == "2 of flow 101"
                hold.raise_if_lost()
                assert not server.is_free(101, 1)
                with pytest.raises(Blocked, match=r"waited 0 s$"):
                    async with opened(client.hold(101, timeout=0)):
                        pytest.fail("granted")
                with pytest.raises(RuntimeError, match="already in use"):
                    async with opened(hold):
                        pytest.fail("entered")
            assert hold.token is None
            assert server.is_free(101, 2)
            async with opened(hold):
                pass
            with pytest.raises(NoSuchRule):
                async with opened(client.hold(999)):
                    pytest.fail("granted")

    run(shape, scenario())


@SHAPES
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_a_hold_gives_back_after_any_exception(server: Server, shape: str, error: type[BaseException]) -> None:
    async def scenario() -> None:
        async with opened(server.made(shape)) as client:
            with pytest.raises(error):
                async with opened(client.hold(101, 2)):
                    raise error
            await server.until_free(101, 2)

    run(shape, scenario())


def test_a_hold_as_a_decorator(server: Server, client: Client) -> None:
    @client.hold(101)
    def call(number: int) -> bool:
        return server.is_free(101, number)

    @client.hold(101)
    def generate() -> Iterator[bool]:
        yield server.is_free(101, 2)

    assert (call(1), call(2)) == (True, False)
    assert list(generate()) == [False]
    generator = generate()
    next(generator)
    generator.close()
    server.wait_until_free(101, 2)


@SHAPES
def test_a_hold_waits_for_a_release(shape: str) -> None:
    """The waiters of one client in order."""

    async def scenario(server: Tokens) -> None:
        order: list[Any] = []
        async with opened(made(shape, server.address)) as client:

            def wait(hold: Any) -> Any:
                if shape == BLOCKING:
                    with hold:
                        order.append(hold)
                    return None
                return wait_async(hold)

            async def wait_async(hold: Any) -> None:
                async with hold:
                    order.append(hold)

            first, *others = holds = [client.hold(101, 2) for _ in range(3)]
            async with opened(client.hold(101, 2)):
                waiting = [begun(shape, lambda: wait(first))]
                await until(lambda: len(server.of(MessageType.ACQUIRE)) > 3, "it asks again and again")
                for hold in others:
                    waiting.append(await queued(shape, lambda hold=hold: wait(hold), client.ping))
                assert order == []
            for each in waiting:
                await each
            assert order == holds

    with Tokens(2) as server:
        run(shape, scenario(server))


@SHAPES
def test_a_waiting_hold_times_out(server: Server, shape: str) -> None:
    async def scenario() -> None:
        async with opened(server.made(shape)) as client:
            token = server.observer.acquire(101, 2)
            start = time.monotonic()
            with pytest.raises(Blocked, match=r"asked for 1 of flow 101, waited 0\.1 s$"):
                async with opened(client.hold(101, timeout=0.1)):
                    pytest.fail("granted")
            assert time.monotonic() - start >= 0.09  # uvloop's clock counts milliseconds
            server.observer.release(token)
            async with opened(client.hold(101)):  # which would be behind it, if it still waited
                pass

    run(shape, scenario())


def test_threads_share_a_client(server: Server) -> None:
    """One connection, one keeper, and never more than the limit."""
    inside: Counter[int] = Counter()
    most = 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal most
        for _ in range(30):
            assert client.flow(105).status in (0, 1, 3)
            with client.hold(101, timeout=PATIENCE):
                with lock:
                    inside[101] += 1
                    most = max(most, inside[101])
                with lock:
                    inside[101] -= 1

    with server.client(fallback="open") as client:  # 105 has no rate
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        assert len(keepers()) <= 1
        for thread in threads:
            thread.join(PATIENCE)
    assert inside[101] == 0
    assert most <= 2


# ---- leases ---------------------------------------------------------------------------------------------------------


@SHAPES
def test_a_hold_outlives_its_lease_and_its_connection(server: Server, shape: str) -> None:
    """Also the first of its flow, before the length of its lease is known. The program makes no calls; a token without
    a hold is kept too."""

    async def scenario(relay: Relay) -> None:
        async with opened(made(shape, relay.address)) as client:
            async with opened(client.hold(108)) as hold, opened(client.hold(109)):
                mine = await got(client.acquire(109))
                for _ in range(2):
                    relay.cut()
                    await sleep(LASTING_S * 0.75)  # by the second time the first lease is over
                    assert not hold.lost
                    assert not server.is_free(108, 2)
                    assert not server.is_free(109, 1)
                assert await got(client.release(mine))
            assert server.is_free(109, 2)
            assert client.stats() == ("", 0, 0, 0, 0, 0)

    behind_relay(server, shape, scenario)


@SHAPES
def test_a_token_that_was_garbage_collected_is_lost(server: Server, shape: str) -> None:
    async def scenario() -> None:
        async with opened(server.made(shape)) as client:
            token = await got(client.acquire(103))
            await server.until_free(103, 1)
            assert not await got(client.release(token))

    run(shape, scenario())


@SHAPES
def test_a_hold_is_lost_if_its_lease_cannot_be_renewed(server: Server, shape: str) -> None:
    async def lose(client: Any, also: type[Exception] | None = None) -> None:
        async with opened(client.hold(104, timeout=PATIENCE)) as hold:
            await until(lambda: hold.lost, "it is lost")
            with pytest.raises(TokenLost):
                hold.raise_if_lost()
            if also is not None:
                raise also

    async def scenario() -> None:
        told: list[Any] = []
        async with opened(server.made(shape)) as client:
            with pytest.raises(TokenLost, match=r"^lost 1 of flow 104: "):
                await lose(client)
            async with opened(client.hold(104, timeout=PATIENCE, on_lost=told.append)) as hold:
                await until(lambda: told, "it is told")
            assert told == [hold]
            assert client.stats().lost == 2
            with pytest.raises(ZeroDivisionError):
                await lose(client, ZeroDivisionError)

    run(shape, scenario())


@SHAPES
def test_an_exception_in_a_callback_is_logged(server: Server, shape: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    async def scenario() -> None:
        async with opened(server.made(shape)) as client, opened(client.hold(104, timeout=PATIENCE, on_lost=fail)):
            await until(lambda: "on_lost of 1 of flow 104" in caplog.text, "it is logged")

    run(shape, scenario())


@SHAPES
def test_short_holds_need_no_keep_requests(shape: str) -> None:
    """Once a lease of that flow was seen."""

    async def scenario(server: Tokens) -> None:
        async with opened(made(shape, server.address)) as client:
            async with opened(client.hold(105)):
                await until(lambda: server.of(MessageType.KEEP), "it has asked")
                await got(client.ping())  # and was answered
            before = len(server.seen)
            for _ in range(20):
                async with opened(client.hold(105)):
                    await got(client.ping())
            assert len(server.seen) - before <= 61

    with Tokens() as server:
        run(shape, scenario(server))


def test_the_keeper_ends_when_there_is_nothing_to_do(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentinel, "IDLE_S", 0.02)
    with server.client() as client:
        for _ in range(2):
            with client.hold(105):
                assert len(keepers()) == 1
            wait_until(lambda: not keepers(), "the thread ends")


# ---- connections ----------------------------------------------------------------------------------------------------


def behind_relay(server: Server, shape: str, scenario: Callable[[Relay], Coroutine[Any, Any, None]]) -> None:
    """Runs a scenario with a relay to the server, which it cuts."""
    with Relay(server.address) as relay:
        run(shape, scenario(relay))


@SHAPES
def test_a_release_during_a_lost_connection_ends_the_token_soon(server: Server, shape: str) -> None:
    async def scenario(relay: Relay) -> None:
        async with opened(made(shape, relay.address)) as client:
            await got(client.acquire(101, 2))
            start = time.monotonic()
            relay.cut()
            await server.until_free(101, 2)
            assert time.monotonic() - start > OFFLINE_MS / 1000 * 0.9

    behind_relay(server, shape, scenario)


@SHAPES
def test_calls_go_on_with_another_connection(server: Server, shape: str) -> None:
    async def scenario(relay: Relay) -> None:
        async with opened(made(shape, relay.address, fallback="open")) as client:
            for _ in range(3):
                await got(client.ping())
                relay.cut()
                assert (await got(client.flow(1002 + OWN[shape]))).status in (0, 1)
                token = await got(client.acquire(101))
                relay.cut()
                assert await got(client.keep(token))
                relay.cut()
                assert await got(client.release(token))
            assert client.stats().fallbacks == 0

    behind_relay(server, shape, scenario)


@SHAPES
def test_a_restarted_server_has_no_tokens(tmp_path: Path, shape: str) -> None:
    rules = {"default": {"flowRules": [flow(101, 2, resourceTimeout=int(PATIENCE * 1000))]}}

    def is_kept(first: daemon.Daemon) -> bool:
        (line,) = first.logged_stats(["sentinel"]).values()
        return re.search(r"\bkept=0\b", line) is None

    async def granted(client: Any) -> Any:
        token = await got(client.acquire(101))
        if token.fallback:
            await got(client.release(token))
            return None
        return token

    async def hold(client: Any, first: daemon.Daemon, start_again: Callable[[], object]) -> None:
        async with opened(client.hold(101)) as held:
            await until(lambda: is_kept(first), "it is kept")
            await got(client.ping())  # its lease is known
            first.process.kill()
            first.process.wait()
            with pytest.raises(Blocked, match="maximum 1"):
                await got(client.acquire(101))  # what the server granted counts in the local limit
            start_again()
            await until(lambda: held.lost, "it is lost")

    async def scenario(stack: contextlib.ExitStack) -> None:
        first = stack.enter_context(daemon.running(tmp_path, sentinels.settings(tmp_path, rules), status=-9))
        address = first.address_of("sentinel")
        again = sentinels.running(tmp_path / "again", rules, port=str(address.port))
        made: Any = Client if shape == BLOCKING else AsyncClient
        async with opened(made(*address, timeout=PATIENCE, limits={101: 1})) as client:
            with pytest.raises(TokenLost, match="the server no longer knows the token"):
                await hold(client, first, lambda: stack.enter_context(again))
            token = await until(lambda: granted(client), "the server grants")
            assert await got(client.release(token))

    with contextlib.ExitStack() as stack:
        run(shape, scenario(stack))


@SHAPES
def test_closing_gives_everything_back(server: Server, shape: str) -> None:
    async def scenario() -> None:
        client = server.made(shape)
        kept = [await got(client.acquire(105, 300)) for _ in range(2)]
        async with opened(client.hold(105, 400)) as hold:
            assert not server.is_free(105, 1)
            await got(client.close())
            await server.until_free(105, 1000)  # long before it would be offline
            assert hold.lost
        assert not keepers()
        with pytest.raises(ConnectionLost, match=r"close\(\) was called"):
            await got(client.release(kept[0]))
        await got(client.close())

    run(shape, scenario())


def test_closing_in_a_callback(server: Server) -> None:
    client = server.client()
    closed = threading.Event()

    def close(_: object) -> None:
        client.close()
        closed.set()

    with client.hold(104, timeout=PATIENCE, on_lost=close):
        assert closed.wait(PATIENCE)
    wait_until(lambda: not keepers(), "the thread ends")


@SHAPES
def test_tls_and_unix_sockets(tmp_path: Path, short_path: Path, pem: Files, shape: str) -> None:
    path, other_path = str(short_path / "s"), str(short_path / "o")
    made: Any = Client if shape == BLOCKING else AsyncClient

    async def scenario(url: str, relay: Relay) -> None:
        async with opened(made(url, timeout=PATIENCE, fallback="closed")) as client, opened(client.hold(105)) as hold:
            relay.cut()
            await until(lambda: relay.accepted == 2, "it is back")
            await got(client.ping())
            assert not hold.lost

    with sentinels.running(tmp_path, RULES, socket=path, **{"tls.cert": pem.server}) as (_, address):
        with Relay(address) as relay:
            run(shape, scenario(f"sentinels://localhost:{relay.port}?cacert={pem.cacert}", relay))
        with Relay(path, other_path) as relay:
            run(shape, scenario(f"sentinel+unix://{other_path}", relay))


# ---- processes ------------------------------------------------------------------------------------------------------

PREAMBLE = """\
import os, sys, threading, time
from counterd.client.sentinel import Client, TokenLost
client = Client(sys.argv[1], int(sys.argv[2]), timeout=10, fallback="closed")
"""


def program(server: Server, code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), *map(str, server.address)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )


def test_a_waiter_gets_the_token_of_a_killed_holder(server: Server, client: Client) -> None:
    code = """
        with client.hold(101, 2):
            print("holds", flush=True)
            time.sleep(60)
    """
    with program(server, code) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        holder.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with client.hold(101, 2, timeout=PATIENCE):
            assert time.monotonic() - killed > OFFLINE_MS / 1000 * 0.9


def test_a_hold_at_the_end_of_the_program(server: Server) -> None:
    """From Python 3.12 on no new threads can be started then."""
    code = """
        import atexit

        def hold():
            with client.hold(103):
                print("held")
            client.close()

        atexit.register(hold)
    """
    with program(server, code) as ending:
        out, err = ending.communicate(timeout=PATIENCE)
        assert (ending.returncode, out, err) == (0, "held\n", "")


def test_an_error_of_the_server_has_its_class(client: Client) -> None:
    with pytest.raises(ServerError):
        client.acquire(999)
