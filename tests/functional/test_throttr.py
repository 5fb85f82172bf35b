"""The throttr protocol served by a process: beside the counters, with real time, sockets and slow readers."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client.throttr import AsyncClient, Client, TTLType
from counterd.errors import Timeout
from kit.daemon import Daemon, run, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SETTINGS = {"throttr.enable": "true", "throttr.port": "0", "throttr.bind": "127.0.0.1"}


@pytest.fixture
def serve(start: Callable[..., Daemon]) -> Callable[..., Daemon]:
    """Starts a counterd with the throttr protocol, and without counters unless the settings have them."""

    def served(**settings: Any) -> Daemon:
        keys = {f"throttr.{name}": value for name, value in settings.items()}
        return start({"counter.enable": "false", **SETTINGS, **keys})

    return served


def client_of(daemon: Daemon, **options: Any) -> Client:
    return Client(*daemon.address_of("throttr"), timeout=15, **options)


def log_stats(daemon: Daemon) -> str:
    """The figures of the throttr protocol, which SIGUSR1 makes the daemon log."""
    count = len(daemon.lines("stats of throttr"))
    daemon.send_signal(signal.SIGUSR1)
    return daemon.wait_for_log("stats of throttr", count + 1)


def test_both_protocols_are_served_by_one_process(start: Callable[..., Daemon]) -> None:
    daemon = start(SETTINGS)
    with daemon.client() as counters, client_of(daemon) as keys:
        counters.acquire("both", 1, maximum=1)
        assert keys.insert("both", 7, 60)
        assert keys.decrease_quota("both", 3)
        query = keys.query("both")
        assert query is not None
        assert query.quota == 4
        assert 30 < query.ttl < 60
        assert counters.get("both") == 1
    assert daemon.wait_for_stats(holdings=0)["curr_connections"] == 1
    assert " keys=1 " in log_stats(daemon)


@pytest.mark.parametrize("size", ["uint8", "uint16", "uint32", "uint64"])
def test_every_value_size(serve: Callable[..., Daemon], size: str) -> None:
    daemon = serve(value_size=size)
    largest = 256 ** {"uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8}[size] - 1
    with client_of(daemon, value_size=size) as client:
        assert client.insert("k", largest, 100)
        assert not client.increase_quota("k", 1)
        query = client.query("k")
        assert query is not None
        assert query.quota == largest
        assert client.set("v", b"x" * min(largest, 70_000), 100)
        value = client.get("v")
        assert value is not None
        assert len(value.value) == min(largest, 70_000)


def test_the_error_of_a_client_with_another_value_size(serve: Callable[..., Daemon]) -> None:
    """The server waits for the rest of a request that the client considers complete."""
    address = serve(value_size="uint32").address_of("throttr")
    doubt = r"did not answer within 0\.2 s: is its value_size uint16, as this client's\?$"
    with Client(*address, timeout=0.2) as client, pytest.raises(Timeout, match=doubt):
        client.insert("k", 5, 60)

    async def main() -> None:
        async with AsyncClient(*address, timeout=0.2) as client:
            with pytest.raises(Timeout, match=doubt):
                await client.insert("k", 5, 60)

    asyncio.run(main())
    with Client(*address, timeout=15, value_size="uint32") as client:
        assert client.insert("k", 70_000, 60)
        with pytest.raises(ValueError, match="quota must be 0 to 4294967295, not 4294967296: value_size is uint32"):
            client.insert("k", 1 << 32, 60)


def test_keys_expire_without_requests(serve: Callable[..., Daemon]) -> None:
    daemon = serve()
    with client_of(daemon) as client:
        for number in range(100):
            assert client.insert(f"k{number}", 1, 20, TTLType.MILLISECONDS)
        assert client.insert("stays", 1, 60)
        wait_until(lambda: "expired=100" in log_stats(daemon), "all have expired")
        assert " keys=1 " in log_stats(daemon)
        assert [entry.key for entry in client.list()] == [b"stays"]


def test_connections_can_list_themselves_and_others(serve: Callable[..., Daemon], short_path: Path) -> None:
    before = time.time_ns()
    daemon = serve(socket=short_path / "s")
    with client_of(daemon) as tcp, Client(path=short_path / "s") as unix:
        ids = {tcp.whoami(), unix.whoami()}
        connections = {connection.id: connection for connection in tcp.connections()}
        assert connections.keys() == ids
        own, other = connections[tcp.whoami()], connections[unix.whoami()]
        assert (own.ip, own.kind, other.ip, other.kind, other.port) == ("127.0.0.1", 0, "", 1, 0)
        assert own.port > 0
        assert before < own.connected_at < other.connected_at < time.time_ns()
        info = tcp.info()
        assert before < info.running_since < own.connected_at
        assert before // 10**9 <= info.timestamp <= time.time()
        assert info.connections == 2


def test_a_killed_subscriber_leaves_its_channels(serve: Callable[..., Daemon]) -> None:
    daemon = serve()
    host, port = daemon.address_of("throttr")
    script = (
        "import sys, time\nfrom counterd.client.throttr import Client\n"
        f"client = Client({host!r}, {port})\nclient.subscribe('jobs')\nprint('subscribed', flush=True)\ntime.sleep(60)"
    )
    with (
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as child,
        client_of(daemon) as client,
    ):
        assert child.stdout is not None
        assert child.stdout.readline() == b"subscribed\n"
        assert client.publish("jobs", "one")
        child.kill()
        child.wait()
        wait_until(lambda: not client.publish("jobs", "two"), "nobody is subscribed")
        assert client.channel("jobs") is None
        assert len(client.channels()) == 2  # its own


@pytest.fixture
def audience(serve: Callable[..., Daemon]) -> Iterator[tuple[Daemon, list[Client], contextlib.ExitStack]]:
    daemon = serve(max_queued="64K")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(client_of(daemon)) for _ in range(200)]
        for client in clients:
            assert client.subscribe("news")
        yield daemon, clients, stack


def test_all_subscribers_get_all_events_in_the_same_order(
    audience: tuple[Daemon, list[Client], contextlib.ExitStack],
) -> None:
    daemon, clients, _ = audience
    with client_of(daemon) as one, client_of(daemon) as another:
        for number in range(20):
            assert one.publish("news", f"one {number}")
            assert another.publish("news", f"another {number}")
        heard = []
        for client in clients:
            heard.append([client.next_event(timeout=15) for _ in range(40)])
    assert all(events == heard[0] for events in heard)
    assert sorted(event.payload for event in heard[0] if event) == sorted(
        f"{who} {number}".encode() for who in ("one", "another") for number in range(20)
    )


def test_a_subscriber_that_does_not_read_is_dropped_and_delays_no_others(
    audience: tuple[Daemon, list[Client], contextlib.ExitStack],
) -> None:
    daemon, clients, stack = audience
    deaf = stack.enter_context(daemon.connect(receive_buffer=4096))
    deaf.sendall(b"\x11\x04news")
    with client_of(daemon) as publisher:
        wait_until(lambda: len(publisher.channel("news") or ()) == 201, "it is subscribed too")
        sent = 0
        while "dropped_subscribers=1" not in log_stats(daemon):
            for _ in range(10):
                assert publisher.publish("news", bytes(60_000))
                sent += 1
            for client in clients:
                events = [client.next_event(timeout=15) for _ in range(10)]
                assert all(event and len(event.payload) == 60_000 for event in events)
            assert sent < 500
        assert len(publisher.channel("news") or ()) == 200
    deaf.settimeout(15)
    with contextlib.suppress(ConnectionResetError):
        while deaf.recv(1 << 20):
            pass
    daemon.wait_for_log("disconnected a peer that was too slow to read the messages of other clients")


def test_a_drain_answers_and_ends_subscribers_too(serve: Callable[..., Daemon]) -> None:
    daemon = serve()
    with client_of(daemon) as subscriber, client_of(daemon) as publisher:
        assert subscriber.subscribe("c")
        assert publisher.publish("c", "last")
        assert daemon.stop() == 0
        event = subscriber.next_event(timeout=15)
        assert event is not None
        assert event.payload == b"last"


def test_a_reload_changes_max_queued_but_not_the_value_size(serve: Callable[..., Daemon]) -> None:
    daemon = serve()
    daemon.reload({"counter.enable": "false", **SETTINGS, "throttr.max_queued": "8K", "throttr.value_size": "uint64"})
    assert daemon.lines(r"throttr\.value_size needs a restart to change$")
    assert daemon.lines(r"reloaded .*: throttr\.max_queued$")


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("throttr.value_size=uint24", "expected one of uint8, uint16, uint32, uint64, not 'uint24'"),
        ("throttr.memory_limit=1K", "1K is out of range, expected 65536 to 68719476736"),
        ("throttr.max_message=100", "100 is out of range, expected 512 to 67108864"),
        ("throttr.expiry_grace=-1", "-1 is out of range, expected 0 to 3600"),
    ],
)
def test_the_error_of_a_wrong_setting_says_what_is_expected(setting: str, text: str) -> None:
    done = run("--check", "--set", setting)
    assert (done.returncode, done.stderr) == (2, f"--set {setting}: {setting.partition('=')[0]}: {text}\n")


def test_a_connection_limit_concerns_only_its_protocol(start: Callable[..., Daemon]) -> None:
    daemon = start({**SETTINGS, "throttr.max_connections": 1})
    with client_of(daemon) as only, daemon.client() as counters:
        only.whoami()
        with socket.create_connection(daemon.address_of("throttr"), timeout=15) as refused:
            assert refused.recv(1) == b""
        counters.noop()
