"""The blocking client when its connection is lost: cut, or ended with the server, which comes back or not."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Client, Hold
from counterd.errors import ConnectionLost, NotAvailable
from kit import daemon, servers
from kit.connections import cut, fill, hears_of_loss, is_connecting, name_of, sockets
from kit.cuts import Relay
from kit.daemon import PATIENCE, wait_until
from kit.needs import has_ipv6

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module", params=["counterd", pytest.param("yrmcdsd", marks=pytest.mark.needs("yrmcdsd"))])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.running(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


class KillableServer:
    """A counterd that can be killed, and started again where it was."""

    def __init__(self, directory: Path, path: str = "") -> None:
        self.settings = {"counter.socket": path, "counter.bind": " "} if path else {}
        self.options: dict[str, Any] = {"path": path} if path else {}
        self._directory = directory
        self._running = contextlib.ExitStack()

    def start(self) -> None:
        running = daemon.running(self._directory, self.settings, status=-9)
        self._daemon = self._running.enter_context(running)
        if self._daemon.addresses:
            host, port = self._daemon.address
            self.settings = {"counter.port": str(port)}
            self.options = {"host": host, "port": port}

    def kill(self) -> None:
        self._daemon.process.kill()
        self._running.close()

    def client(self, **options: Any) -> Client:
        return Client(**self.options, **{"timeout": PATIENCE, **options})


@pytest.fixture(params=["TCP", "Unix"])
def killable(request: pytest.FixtureRequest, tmp_path: Path, short_path: Path) -> Iterator[KillableServer]:
    server = KillableServer(tmp_path, str(short_path / "100%25") if request.param == "Unix" else "")
    server.start()
    yield server
    server.kill()


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "counterd-watch"]


# ---- holds ----------------------------------------------------------------------------------------------------------


def test_a_lost_hold_raises_at_the_end_of_its_block(server: servers.Server) -> None:
    with server.client() as client:
        with pytest.raises(
            ConnectionLost, match=r"^lost 2 of lost with the connection to 127.*: the .* closed the connection$"
        ):
            lose(client)
        with client.hold("lost", 2, maximum=2, timeout=PATIENCE) as hold:
            assert not hold.lost


def lose(client: Client, name: str = "lost", permits: int = 2) -> None:
    """Holds permits, and loses them."""
    with client.hold(name, permits, maximum=2) as hold:
        assert not hold.lost
        cut(client)
        assert hold.lost
        with pytest.raises(ConnectionLost, match=rf"^lost {permits} of {name} with the connection"):
            hold.raise_if_lost()
        client.noop()  # by another connection
        assert hold.lost


def test_leaving_a_lost_hold_does_not_replace_an_exception(server: servers.Server) -> None:
    with server.client() as client:
        with pytest.raises(ZeroDivisionError), client.hold("hidden", maximum=1):
            raise ZeroDivisionError(cut(client))
        with pytest.raises(ConnectionLost, match=r"^lost 1 of hidden"), client.hold("hidden", maximum=2):
            cut(client)  # and nobody looks
        with client.hold("hidden", maximum=2):
            client.close()  # is no loss


def test_leaving_a_lost_semaphore_does_not_replace_an_exception(server: servers.Server) -> None:
    with server.client() as client, pytest.raises(ZeroDivisionError), client.semaphore("lost", 1):
        raise ZeroDivisionError(cut(client))


def test_one_call_raises_the_loss_of_acquired_permits(server: servers.Server) -> None:
    with server.client() as client:
        client.acquire("heard", maximum=1)
        with contextlib.suppress(ConnectionLost), client.hold("seen", maximum=1) as hold:
            cut(client)
            assert hold.lost
            with pytest.raises(
                ConnectionLost, match="everything that was acquired through this connection has been given back"
            ):
                client.noop()
            client.noop()
        server.wait_for_use("heard", 0)


def test_a_call_raises_the_loss_after_a_hold_has_reconnected(server: servers.Server) -> None:
    with server.client() as client:
        for _ in range(3):
            client.acquire("told", maximum=9)
            cut(client)
            with client.hold("other", maximum=1, timeout=PATIENCE):
                with pytest.raises(ConnectionLost, match="given back"):
                    client.pipeline().noop().execute()
                client.noop()
                assert server.used("other") == 1


def test_the_pending_call_raises_the_loss(server: servers.Server) -> None:
    with server.client() as client:
        for call in (client.noop, lambda: client.pipeline().noop().execute()):
            client.acquire("under way", maximum=9)
            cut(client)
            with pytest.raises(ConnectionLost):
                call()
            client.noop()


def test_no_call_raises_if_only_holds_lost_permits(server: servers.Server) -> None:
    with server.client() as client:
        with pytest.raises(ConnectionLost, match=r"^lost 1 of only"):
            lose(client, "only", 1)
        client.noop()


def test_lost_permits_of_a_semaphore(server: servers.Server) -> None:
    with server.client() as client:
        semaphore = client.semaphore("lost semaphore", 3)
        assert semaphore.acquire()
        assert semaphore.acquire()
        cut(client)
        server.wait_for_use("lost semaphore", 0)
        assert semaphore.acquire()
        with pytest.raises(ConnectionLost, match=r"^lost 1 of lost semaphore"):
            semaphore.release(3)
        assert server.used("lost semaphore") == 0
        with pytest.raises(ValueError, match="too many times"):
            semaphore.release()


# ---- connecting again -----------------------------------------------------------------------------------------------


def test_a_client_waits_for_a_server_that_comes_back(killable: KillableServer) -> None:
    """With a hold that waits meanwhile, in a thread, and calls that do not."""
    with killable.client() as client, killable.client() as other:
        other.acquire("back", maximum=1)
        held = threading.Event()

        def wait() -> None:
            with client.hold("back", maximum=1):
                held.set()

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        wait_until(lambda: int(other.stats()["waiters"]) == 1, "it waits")
        killable.kill()
        errors = []
        while len(errors) < 30:
            with pytest.raises(ConnectionLost) as caught:
                client.noop()
            errors.append(str(caught.value))
            time.sleep(0.005)
        assert any("cannot connect to" in error for error in errors)
        assert any(error.endswith("another attempt is due within 2 s") for error in errors)
        assert not held.is_set()
        killable.start()
        assert held.wait(PATIENCE)
        waiting.join(PATIENCE)
        client.noop()
        with pytest.raises(ConnectionLost):
            other.noop()
        wait_until(lambda: connects(other), "connected again")


def connects(client: Client) -> bool:
    with contextlib.suppress(ConnectionLost):
        client.noop()
        return True
    return False


def test_a_hold_times_out_without_a_server(killable: KillableServer) -> None:
    with killable.client() as client:
        killable.kill()
        start = time.monotonic()
        with pytest.raises(ConnectionLost, match="cannot connect"), client.hold("none", maximum=1, timeout=0.3):
            pytest.fail("granted")
        assert time.monotonic() - start >= 0.3
        killable.start()


def test_a_hold_waits_for_a_server_that_does_not_accept() -> None:
    """As for one that does not exist."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(Client(port=listening.getsockname()[1], timeout=PATIENCE, connect_timeout=0.05))
        fill(listening, stack)
        with pytest.raises(ConnectionLost, match="did not accept"), client.hold("mute", maximum=1, timeout=0.3):
            pytest.fail("granted")


def test_attempts_to_connect_grow_rare() -> None:
    """However many calls there are: after 50 ms, 100, 200 and so on, each shortened by half at most."""
    attempts = 0
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    start = time.monotonic()
    with Client(port=port, timeout=PATIENCE) as client:
        while time.monotonic() - start < 0.5:
            with pytest.raises(ConnectionLost, match="cannot connect") as caught:
                client.noop()
            attempts += not str(caught.value).endswith("another attempt is due within 2 s")
        taken = time.monotonic() - start
    assert 2 <= attempts <= 6 + (taken - 0.5) / 0.025


def test_attempts_pause_for_a_server_without_room(tmp_path: Path) -> None:
    """It accepts connections and closes them, so connecting succeeds each time."""
    with (
        daemon.running(tmp_path, {"counter.max_connections": "2"}) as counterd,
        counterd.client() as client,
        counterd.client() as other,
    ):
        cut(client)
        with counterd.client() as third:
            wait_until(lambda: connects(third), "it has the place")
            start = time.monotonic()
            with pytest.raises(ConnectionLost), client.hold("full", maximum=1, timeout=0.4):
                pytest.fail("granted")
            taken = time.monotonic() - start
            refused = int(other.stats()["rejected:max_connections"])
            assert 1 <= refused <= 8 + taken / 0.025
        wait_until(lambda: connects(client), "there is room again")


def test_the_first_reachable_address_is_used(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dead = listening.getsockname()[1]
    path = str(tmp_path / "no%20socket")
    with daemon.running(tmp_path, {"counter.bind": "127.0.0.1 ::1" if has_ipv6() else "127.0.0.1"}) as counterd:
        for host, port in counterd.addresses:
            url = f"counter://[{host}]:{port}" if ":" in host else f"counter://{host}:{port}"
            with Client([f"counter://127.0.0.1:{dead}", f"counter+unix://{path}", url]) as client:
                client.noop()
                assert client.where == url.removeprefix("counter://")
                cut(client)
                wait_until(lambda client=client: connects(client), "connected again")
        with pytest.raises(ConnectionLost, match="no socket"):
            Client([f"counter://127.0.0.1:{dead}", f"counter+unix://{path}"]).noop()


def test_closing_while_connecting() -> None:
    """A connection made after that is closed as well."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listening.settimeout(PATIENCE)
        fill(listening, stack)
        before = sockets()
        port = listening.getsockname()[1]
        client = Client(port=port, timeout=PATIENCE, watch=True)
        errors: list[str] = []

        def call() -> None:
            with pytest.raises(ConnectionLost) as caught:
                client.noop()
            errors.append(str(caught.value))

        calling = threading.Thread(target=call, daemon=True)
        calling.start()
        wait_until(lambda: sockets() - before and is_connecting(port), "it connects")
        client.close()
        made = []
        while calling.is_alive():  # the kernel tries to connect again, and there is room
            listening.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                made.append(stack.enter_context(listening.accept()[0]))
        assert len(errors) == 1
        assert errors[0].endswith("close() was called")
        assert sockets() - before <= set(map(name_of, made))
    wait_until(lambda: not watchers(), "nobody watches")


# ---- watching -------------------------------------------------------------------------------------------------------


def test_a_callback_is_called_once_and_at_once(server: servers.Server, caplog: pytest.LogCaptureFixture) -> None:
    called: list[tuple[Hold, float]] = []

    def on_lost(hold: Hold) -> None:
        called.append((hold, time.monotonic()))
        raise ValueError("what it raises")

    with server.client(watch=True) as client, client.hold("other", maximum=1, on_lost=lambda _: None):
        with client.hold("watched", maximum=1, on_lost=on_lost) as hold:
            start = time.monotonic()
            cut(client)
            wait_until(lambda: called, "called")
            assert called[0][0] is hold
            assert called[0][1] - start < 1
            assert hold.lost
            client.noop()
            cut(client)
            client_is_back(client)
        assert len(called) == 1
        with client.hold("watched", maximum=1, on_lost=on_lost, timeout=PATIENCE):
            cut(client)
            wait_until(lambda: len(called) == 2, "called again, although the first had raised something")
    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "on_lost of 1 of watched" in caplog.text
    assert "ValueError: what it raises" in caplog.text
    assert not watchers()


def test_the_loss_of_an_already_replaced_connection_is_reported(server: servers.Server) -> None:
    """While the watching thread is busy with a callback, others lose their permits, and calls connect again."""
    told: list[str] = []
    go_on = threading.Event()

    def slow(_: Hold) -> None:
        go_on.wait(PATIENCE)
        told.append("slow")

    with server.client(watch=True) as client:
        with client.hold("slow", maximum=1, on_lost=slow):
            cut(client)
            client_is_back(client)
            with client.hold("quick", maximum=1, on_lost=lambda _: told.append("quick")):
                cut(client)
                client_is_back(client)
                with client.hold("third", maximum=1, on_lost=lambda _: told.append("third")):
                    go_on.set()
                    wait_until(lambda: len(told) == 2, "both are told")
        assert told == ["slow", "quick"]


def client_is_back(client: Client) -> None:
    wait_until(lambda: connects(client), "connected again")


def test_lost_permits_are_acquired_again(server: servers.Server) -> None:
    with server.client(watch=True) as client:
        with client.hold("again", 2, maximum=3, on_lost="reacquire") as hold:
            for _ in range(3):
                cut(client)
                wait_until(lambda: not hold.lost and server.used("again") == 2, "acquired again")
        assert server.used("again") == 0


def test_lost_permits_are_acquired_again_when_others_give_them_back(tmp_path: Path) -> None:
    with (
        servers.running("counterd", tmp_path) as server,
        Relay(server.address) as relay,
        Client(*relay.address, timeout=PATIENCE, watch=True) as client,
        server.client() as other,
    ):
        with client.hold("taken", maximum=1, on_lost="reacquire") as hold:
            relay.is_open = False
            relay.cut()
            with other.hold("taken", maximum=1, timeout=PATIENCE):
                relay.is_open = True
                before = server.takes()
                wait_until(lambda: server.takes() > before, "it asks for it")
                assert hold.lost
            wait_until(lambda: not hold.lost, "acquired again")
            assert other.get("taken") == 1
        assert other.get("taken") == 0


def test_leaving_a_hold_while_it_is_acquired_again(tmp_path: Path) -> None:
    """Not with yrmcdsd: its output to a cut connection is answered with a reset, after which it keeps the holdings."""
    with (
        servers.running("counterd", tmp_path) as server,
        server.client(watch=True) as client,
        server.client() as other,
    ):
        hold = client.hold("leaving", maximum=1, on_lost="reacquire", timeout=PATIENCE)
        for number in range(40):
            with hold:
                cut(client)
                if number % 2:  # and now and then the other one is faster
                    with contextlib.suppress(NotAvailable), other.hold("leaving", maximum=1, timeout=0.01):
                        pass
        server.wait_for_use("leaving", 0)
        client.noop()
        assert not hears_of_loss(client)


def test_closing_in_a_callback(server: servers.Server) -> None:
    client = server.client(watch=True)
    closed = threading.Event()

    def close(_: Hold) -> None:
        client.close()
        closed.set()

    with client.hold("closing", maximum=1, on_lost=close):
        cut(client)
        assert closed.wait(PATIENCE)
    wait_until(lambda: not watchers(), "the thread ends")
    with pytest.raises(ConnectionLost, match=r"close\(\) was called"):
        client.noop()


def test_closing_in_a_signal_handler_that_interrupts_a_call(server: servers.Server) -> None:
    """The call has a lock that the watching thread needs to end."""
    with server.client(watch=True) as client:
        client.noop()

        def handle(_: object, event: str, function: Any) -> None:
            if event == "c_call" and function.__name__ == "send":
                sys.setprofile(None)
                client.close()

        sys.setprofile(handle)
        try:
            with pytest.raises(ConnectionLost):
                client.noop()
        finally:
            sys.setprofile(None)
    wait_until(lambda: not watchers(), "the thread ends")
