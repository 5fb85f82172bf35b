"""The client for asyncio when connections, servers and programs end: errors, returned permits, and how it goes on.

With counterd alone: yrmcdsd gives back up to 3 s after a client has gone, or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import aio
from counterd.errors import ConnectionLost, NotAvailable, NotFound
from kit import daemon
from kit.connections import sockets
from kit.loops import NEW_LOOP, leaves_connections_open, run, until
from kit.machine import own_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOLDER = Path(__file__).with_name("aio_holder.py")
LOOPS = pytest.mark.parametrize("loop", NEW_LOOP)


class Server:
    """A counterd that can be killed and started again at the same place."""

    def __init__(self, start: Callable[..., daemon.Daemon], path: str | None) -> None:
        self.host = own_address()
        with socket.create_server((self.host, 0)) as found:
            self.port = found.getsockname()[1]
        self.path = path
        self._start = start
        self.start()

    def start(self) -> None:
        settings = {
            "counter.bind": self.host,
            "counter.port": self.port,
            **({"counter.socket": self.path} if self.path else {}),
        }
        self.daemon = self._start(settings, status=-signal.SIGKILL)

    def kill(self) -> None:
        self.daemon.process.kill()
        self.daemon.ended()

    def client(self, **options: Any) -> aio.Client:
        return aio.Client(path=self.path, **options) if self.path else aio.Client(self.host, self.port, **options)


@pytest.fixture(params=["tcp", "unix"])
def server(request, start, short_path) -> Iterator[Server]:
    found = Server(start, str(short_path / "counterd") if request.param == "unix" else None)
    yield found
    if found.daemon.process.poll() is None:
        found.kill()


@pytest.fixture(scope="module")
def counterd(tmp_path_factory) -> Iterator[daemon.Daemon]:
    with daemon.running(tmp_path_factory.mktemp("counterd")) as running:
        yield running


async def in_use(client: aio.Client, name: str) -> int:
    try:
        return await client.get(name)
    except NotFound:
        return 0


async def is_in_use(client: aio.Client, name: str, permits: int) -> bool:
    return await in_use(client, name) == permits


# ---- the server ends ------------------------------------------------------------------------------------------------


def test_the_server_ends_while_permits_are_held(server, caplog) -> None:
    """Each loss is reported once; an exception of the program itself is not replaced."""
    told: list[aio.Hold] = []

    def tell(hold: aio.Hold) -> None:
        told.append(hold)
        raise ValueError("of on_lost")

    async def lose(client: aio.Client, also: type[Exception] | None = None) -> None:
        hold = client.hold("plain", maximum=1)
        async with hold, client.hold("told", maximum=1, on_lost=tell) as other:
            assert (hold.lost, other.lost) == (False, False)
            hold.raise_if_lost()
            server.kill()
            await until(lambda: hold.lost, "it is known to be lost")
            assert (other.lost, told.pop()) == (True, other)
            with pytest.raises(ConnectionLost, match=r"^lost 1 of plain with the connection to "):
                hold.raise_if_lost()
            if also is not None:
                raise also

    async def main() -> None:
        async with server.client() as client:
            with pytest.raises(ConnectionLost, match=r"^lost 1 of plain with the connection to "):
                await lose(client)
            server.start()
            await until(lambda: answers(client), "it is connected again")
            with pytest.raises(KeyError):
                await lose(client, KeyError)
        assert told == []
        assert [record.message for record in caplog.records] == ["the function on_lost of 1 of told failed"] * 2

    with caplog.at_level(logging.WARNING):
        run(main())


async def answers(client: aio.Client) -> bool:
    with contextlib.suppress(ConnectionLost):
        await client.noop()
        return True
    return False


@LOOPS
def test_permits_are_acquired_again_when_the_server_is_back(server, loop: str) -> None:
    async def main() -> None:
        async with server.client() as client:
            holds = [client.hold(f"name {number}", 2, maximum=2, on_lost="reacquire") for number in range(5)]
            for hold in holds:
                await hold.__aenter__()
            for _ in range(2):
                server.kill()
                await until(lambda: all(hold.lost for hold in holds), "they are lost")
                server.start()
                await until(lambda: not any(hold.lost for hold in holds), "they are held again")
                async with server.client() as other:
                    assert [await other.get(f"name {number}") for number in range(5)] == [2] * 5
            server.kill()
            await until(lambda: holds[0].lost, "they are lost")
            await holds[0].__aexit__(None, None, None)  # while it is being acquired again
            server.start()
            await until(lambda: not any(hold.lost for hold in holds), "they are held again")
            async with server.client() as other:
                assert await in_use(other, "name 0") == 0
                for hold in holds[1:]:
                    await hold.__aexit__(None, None, None)
                assert [each.consumption for each in await other.dump()] == [0] * 4

    run(main(), loop)


@LOOPS
def test_permits_are_acquired_again_although_others_want_them(server, loop: str) -> None:
    async def main() -> None:
        async with server.client() as client, server.client() as other:
            async with client.hold("name", 2, maximum=2, on_lost="reacquire") as hold:
                server.kill()
                await until(lambda: hold.lost, "it is lost")
                server.start()
                # Whoever comes first, this gets its own; if it is this, the other has to wait.
                async with other.hold("name", maximum=3, on_lost="reacquire"):
                    used = await other.get("name")
                    await asyncio.sleep(0.1)
                    assert (await other.get("name"), hold.lost) == ((1, True) if used == 1 else (3, False))
                await until(lambda: not hold.lost, "it is held again")
                assert await other.get("name") == 2
            assert await other.get("name") == 0

    run(main(), loop)


@pytest.mark.parametrize("first", ["call", "pipeline", "hold"])
def test_lost_permits_of_acquire_are_raised_once(server, first: str) -> None:
    """By one call, also when a hold was the first to connect again."""

    async def main() -> None:
        async with server.client() as client:
            before = sockets()
            await client.acquire("name", maximum=1)
            own = sockets() - before
            server.kill()
            await until(lambda: not own & sockets(), "it is known to be lost")
            server.start()
            if first == "hold":
                async with client.hold("other", maximum=1):
                    with pytest.raises(
                        ConnectionLost, match="everything that was acquired through this connection has been given back"
                    ):
                        await client.get("other")
            else:
                tell = client.noop() if first == "call" else client.pipeline().noop().execute()
                with pytest.raises(
                    ConnectionLost, match="everything that was acquired through this connection has been given back"
                ):
                    await tell
            await asyncio.gather(*(client.noop() for _ in range(10)))
            await client.acquire("name", maximum=1)
            await client.release("name")
            own = sockets() - before
            server.kill()
            await until(lambda: not own & sockets(), "it is known to be lost")
            server.start()
            await client.noop()  # nothing was held: nobody need know

    run(main())


def test_calls_and_holds_without_a_server(server) -> None:
    """The first call has the reason, others fail at once as the next attempt is not due; a hold waits."""

    async def main() -> None:
        server.kill()
        client = server.client()
        with pytest.raises(ConnectionLost, match=r"^cannot connect to "):
            await client.noop()
        with pytest.raises(ConnectionLost, match=r"another attempt is due within 2 s$"):
            await client.noop()
        began = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionLost):
            await client.hold("name", maximum=1, timeout=0.1).__aenter__()
        assert asyncio.get_running_loop().time() - began >= 0.09
        waiting = asyncio.ensure_future(client.hold("name", maximum=1).__aenter__())
        await asyncio.sleep(0.1)
        server.start()
        await (await waiting).__aexit__(None, None, None)
        await client.close()

    run(main())


def test_a_hold_waits_for_a_server_that_does_not_accept() -> None:
    """As for one that does not exist."""

    async def scenario() -> None:
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            for _ in range(3):  # now its queue is full, and the kernel leaves further connections unanswered
                connection = stack.enter_context(socket.socket())
                connection.setblocking(False)
                connection.connect_ex(listening.getsockname())
            client = aio.Client(port=listening.getsockname()[1], connect_timeout=0.05)
            with pytest.raises(ConnectionLost, match="did not accept"):
                await client.hold("mute", maximum=1, timeout=0.3).__aenter__()
            await client.close()

    run(scenario())


def test_a_connection_to_itself_is_refused() -> None:
    """The kernel may choose the very port that is connected to for this side of the connection."""

    async def scenario() -> None:
        client = aio.Client(port=1)
        with socket.socket() as itself:
            itself.bind(("127.0.0.1", 0))
            itself.connect(itself.getsockname())
            itself.setblocking(False)
            loop = asyncio.get_running_loop()
            create = loop.create_connection
            loop.create_connection = lambda factory, *_, **__: create(factory, sock=itself)  # type: ignore[method-assign]
            with pytest.raises(ConnectionLost, match="refused"):
                await client.noop()
        await client.close()

    run(scenario())


@LOOPS
def test_many_tasks_share_an_attempt_to_connect(counterd, loop: str) -> None:
    """It goes on although some are cancelled, including the first."""

    async def main() -> None:
        async with aio.Client(*counterd.address) as other:
            before = int((await other.stats())["total_connections"])
            client = aio.Client(*counterd.address)
            calls = [asyncio.ensure_future(client.noop()) for _ in range(50)]
            await asyncio.sleep(0)
            for call in calls[::3]:
                call.cancel()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert [type(each) for each in ended[::3]] == [asyncio.CancelledError] * 17
            assert {each for number, each in enumerate(ended) if number % 3} == {None}
            assert int((await other.stats())["total_connections"]) == before + 1
            await client.close()

    run(main(), loop)


@LOOPS
def test_a_server_without_room_closes_connections(start, loop: str) -> None:
    """Calls raise, and a hold asks again only now and then."""

    async def main() -> None:
        async with aio.Client(*counterd.address) as only:
            await only.noop()
            client = aio.Client(*counterd.address)
            for _ in range(3):
                with pytest.raises(ConnectionLost):
                    await client.noop()
            with pytest.raises(ConnectionLost):
                await client.hold("name", maximum=1, timeout=0.5).__aenter__()
            assert 1 <= int((await only.stats())["rejected:max_connections"]) <= 60
            waiting = asyncio.ensure_future(client.hold("name", maximum=1).__aenter__())
            await asyncio.sleep(0.01)
        await waiting
        await client.close()

    counterd = start({"counter.max_connections": 1})
    run(main(), loop)


# ---- the program ends -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def program(counterd: daemon.Daemon, name: str, loop: str, mode: str) -> Iterator[subprocess.Popen[str]]:
    """Runs aio_holder.py during the block."""
    process = subprocess.Popen(
        [sys.executable, HOLDER, *map(str, counterd.address), name, loop, mode],
        stdin=subprocess.PIPE,  # a child of it ends when this does
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**daemon.environment(), "PYTHONPATH": str(HOLDER.parents[1])},
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return process.stdout.readline().split()


@LOOPS
def test_a_waiter_gets_the_permits_of_a_killed_program(counterd, loop: str) -> None:
    name = f"killed {loop}"

    async def main() -> None:
        async with aio.Client(*counterd.address) as client:
            with pytest.raises(NotAvailable):
                await client.acquire(name, 8, maximum=9)
            waiting = asyncio.ensure_future(client.hold(name, 8, maximum=9, timeout=10).__aenter__())
            await asyncio.sleep(0.05)
            assert not waiting.done()
            process.kill()
            await (await waiting).__aexit__(None, None, None)

    with program(counterd, name, loop, "hold") as process:
        assert line(process)[0] == "holding"
        run(main(), loop)


@LOOPS
@pytest.mark.parametrize(("mode", "status", "complaint"), [("leave", 0, ""), ("raise", 1, "KeyError"), ("task", 0, "")])
def test_a_program_that_ends_inside_a_hold(counterd, mode: str, status: int, complaint: str, loop: str) -> None:
    name = f"{mode} {loop}"
    with counterd.client() as client, program(counterd, name, loop, mode) as process:
        assert line(process)[0] == "holding"
        errors = process.communicate(timeout=daemon.PATIENCE)[1]
        assert (process.returncode, complaint in errors) == (status, True)
        daemon.wait_until(lambda: client.get(name) == 0, "it is back")


# ---- event loops ----------------------------------------------------------------------------------------------------


@LOOPS
@leaves_connections_open
def test_permits_are_lost_with_a_closed_loop(counterd, loop: str) -> None:
    """As with one asyncio.run() after the other: the client goes on, reports the loss, and leaks nothing."""

    async def holds() -> None:
        async with client.hold(loop, maximum=1):
            pass

    async def takes() -> None:
        assert await client.acquire(loop, maximum=1) == 1

    async def hears() -> None:
        with pytest.raises(ConnectionLost, match="its event loop was closed"):
            await client.noop()
        await holds()
        await client.close()

    client = aio.Client(*counterd.address)
    for main in (holds(), holds(), takes(), hears()):
        each = NEW_LOOP[loop]()
        each.run_until_complete(main)
        each.close()


def test_a_call_in_another_loop_raises_before_it_sends(counterd) -> None:
    async def main() -> None:
        async with aio.Client(*counterd.address) as client:
            for call in (client.noop(), client.hold("n", maximum=1).__aenter__(), client.close()):
                with pytest.raises(RuntimeError, match="belongs to another event loop"):
                    await asyncio.to_thread(asyncio.run, call)
            await client.noop()

    run(main())
