"""The clients and counterctl over TLS: they keep all promises that they make for plain connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Client, aio, throttr
from counterd.errors import ConnectionLost, Timeout
from kit import daemon, loops, servers
from kit.certificates import client_context
from kit.connections import cut, hears_of_loss
from kit.cuts import Relay
from kit.daemon import PATIENCE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from counterd.client import Hold
    from kit.certificates import Files

COUNTERCTL = Path(sys.executable).parent / "counterctl"
PROTOCOLS = {"throttr.enable": "true", "throttr.port": "0", "throttr.bind": "127.0.0.1"}
MANY = [f"name {number}" for number in range(20_000)]  # so many replies are dozens of records


class Secured:
    """A counterd with TLS. counters, keys: where they are; observer: sees what is in use, over the Unix socket."""

    def __init__(self, running: daemon.Daemon, pem: Files, observer: Client) -> None:
        self.daemon = running
        self.pem = pem
        self.counters = running.address
        self.keys = running.address_of("throttr")
        seen = servers.Server(running.address, observer)
        self.used, self.wait_for_use, self.acquires = seen.used, seen.wait_for_use, seen.acquires

    @property
    def url(self) -> str:
        return self.url_at(self.counters.port)

    def url_at(self, port: int) -> str:
        return f"counters://localhost:{port}?cacert={self.pem.cacert}"

    def client(self, **options: Any) -> Client:
        return Client(self.url, **{"timeout": PATIENCE, **options})


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, pem: Files) -> Iterator[Secured]:
    with tempfile.TemporaryDirectory() as directory:  # whose name is short enough for a Unix socket
        path = f"{directory}/s"
        protocols = {**PROTOCOLS, "counter.socket": path}
        protocols |= {f"{protocol}.tls.cert": pem.server for protocol in ("counter", "throttr")}
        with daemon.running(tmp_path_factory.mktemp("counterd"), protocols) as running, Client(path=path) as observer:
            yield Secured(running, pem, observer)


# ---- the blocking client ----


def test_every_command_over_tls(server: Secured) -> None:
    with server.client() as client:
        client.noop()
        with client.hold("whole", 2, maximum=3) as hold:
            assert (client.get("whole"), hold.lost) == (2, False)
        assert client.get("whole") == 0
        pipeline = client.pipeline()
        for name in MANY:
            pipeline.acquire(name, maximum=1)
        assert pipeline.execute() == [1] * len(MANY)
        assert sum(entry.consumption for entry in client.dump()) == len(MANY)
    server.wait_for_use(MANY[0], 0)


def test_a_client_with_its_own_context(server: Secured) -> None:
    with Client(*server.counters, tls=client_context()) as client:
        client.noop()


def test_untrusted_servers_are_refused(server: Secured) -> None:
    with pytest.raises(ConnectionLost, match=r"^cannot connect to 127.*: TLS handshake: .*CERTIFICATE_VERIFY_FAILED"):
        Client(*server.counters, tls=True).noop()
    with pytest.raises(ConnectionLost, match=r"^cannot connect to localhost:.*: /none: No such file or directory$"):
        Client(f"counters://localhost:{server.counters.port}?cacert=/none").noop()


def test_a_client_without_tls_at_a_tls_port(server: Secured) -> None:
    """The server can send nothing that such a client would understand."""
    hint = r" closed the connection: it may expect TLS, have no room, or not allow this address$"
    with Client(*server.counters) as client, pytest.raises(ConnectionLost, match=hint):
        client.noop()

    async def main() -> None:
        async with aio.Client(*server.counters) as refused:
            with pytest.raises(ConnectionLost, match=hint):
                await refused.noop()

    loops.run(main())


def test_threads_share_a_connection_over_tls(server: Secured) -> None:
    """Requests and replies of all sizes, at once: the reading thread leaves nothing in TLS's buffers."""
    with server.client() as client:
        errors: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for length in range(1, 40):
                    name = f"{number}" * length * number * 20
                    with client.hold(name, maximum=1, timeout=0):
                        assert client.get(name) == 1
            except BaseException as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert not hears_of_loss(client)


def test_a_loss_is_noticed_and_reported(server: Secured) -> None:
    lost = threading.Event()

    def tell(_: Hold) -> None:
        lost.set()

    with server.client(watch=True) as client:
        with client.hold("told", maximum=1, on_lost=tell):
            cut(client)
            assert lost.wait(PATIENCE)
        with pytest.raises(ConnectionLost, match="lost 1 of lost"):
            lose(client)
        with client.hold("lost", maximum=1, timeout=PATIENCE):  # through another connection
            assert server.used("lost") == 1


def lose(client: Client) -> None:
    with client.hold("lost", maximum=1) as hold:
        cut(client)
        wait_until(lambda: hold.lost, "lost")


def test_a_late_grant_is_given_back(server: Secured) -> None:
    with Relay(server.counters) as relay:
        options = {"timeout": 0.05, "connect_timeout": PATIENCE}
        with Client(server.url_at(relay.port), **options) as client:
            wait_until(lambda: is_answered(client), "it is connected")
            before = server.acquires()
            relay.hold_back()
            with pytest.raises(Timeout):
                client.acquire("late", maximum=1)
            wait_until(lambda: server.acquires() > before, "it is granted")
            relay.go_on()
            server.wait_for_use("late", 0)
            wait_until(lambda: is_answered(client), "it answers")


def is_answered(client: Client) -> bool:
    with contextlib.suppress(Timeout):
        client.noop()
        return True
    return False


def test_a_fork_leaves_the_connection_to_the_parent(server: Secured) -> None:
    """The child sends nothing on it, closes its copy, and makes one of its own."""
    with server.client() as client, client.hold("forked", maximum=2) as hold:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                client.acquire("forked", maximum=2)
                status = client.get("forked") - 2
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        server.wait_for_use("forked", 1)
        client.noop()
        assert not hold.lost


# ---- asyncio ----


async def lose_in_a_task(client: aio.Client, relay: Relay) -> None:
    async with client.hold("lost", maximum=1) as hold:
        await asyncio.to_thread(relay.cut)
        await loops.until(lambda: hold.lost, "lost")


@pytest.mark.parametrize("loop", loops.NEW_LOOP)
def test_the_asyncio_client_over_tls(loop: str, server: Secured) -> None:
    async def main(relay: Relay) -> None:
        async with aio.Client(server.url_at(relay.port), timeout=PATIENCE) as client:
            pipeline = client.pipeline()
            for name in MANY[:5000]:
                pipeline.acquire(name, maximum=1)
            assert sum(await pipeline.execute()) == 5000
            cancelled = [asyncio.ensure_future(client.acquire("cancelled", maximum=9)) for _ in range(9)]
            await asyncio.sleep(0)
            for task in cancelled:
                task.cancel()
            await client.noop()
            await loops.until(lambda: server.used("cancelled") == 0, "given back")
            with pytest.raises(ConnectionLost, match="lost 1 of lost"):
                await lose_in_a_task(client, relay)
        for options in ({"tls": True}, {"tls": ssl.create_default_context()}):
            with pytest.raises(ConnectionLost, match=r"TLS handshake: .*CERTIFICATE_VERIFY_FAILED"):
                async with aio.Client(*server.counters, **options) as refused:
                    await refused.noop()

    with Relay(server.counters) as relay:
        loops.run(main(relay), loop)


# ---- throttr ----


def test_the_throttr_client_over_tls(server: Secured) -> None:
    value = os.urandom(60_000)
    context = client_context()
    with throttr.Client(*server.keys, tls=context, timeout=PATIENCE) as client:
        assert client.set("key", value, ttl=60)
        for _ in range(20):
            found = client.get("key")
            assert found is not None
            assert found.value == value
        client.subscribe("channel")
        for number in range(100):
            assert client.publish("channel", f"{number}")
        assert [event.payload for event in client.events(timeout=0.02)] == [b"%d" % number for number in range(100)]

    async def main() -> None:
        url = f"throttrs://localhost:{server.keys.port}?cacert={server.pem.cacert}"
        async with throttr.AsyncClient(url, timeout=PATIENCE) as client:
            found = await asyncio.gather(*[client.get("key") for _ in range(20)])
            assert all(each is not None and each.value == value for each in found)

    loops.run(main())


# ---- counterctl ----


def ctl(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [COUNTERCTL, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=daemon.environment(env),
        check=False,
    )


def test_counterctl_run_over_tls(server: Secured) -> None:
    """The permits last as long as the command that has inherited the connection, also after counterctl was killed."""
    host, port, cacert = "localhost", str(server.counters.port), server.pem.cacert
    script = "kill -KILL $PPID; echo; read line"
    with subprocess.Popen(
        [COUNTERCTL, "-h", host, "-p", port, "--cacert", cacert, "run", "inherited", "--max", "1", "sh", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=daemon.environment(),
    ) as running:
        assert running.stdout is not None
        assert running.stdin is not None
        running.stdout.readline()
        running.wait()
        done = ctl("get", "inherited", "--output", "csv", COUNTERD_URL=server.url)
        assert (done.stdout, done.stderr) == ("name,consumption\ninherited,1\n", "")
        running.stdin.write(b"\n")
    server.wait_for_use("inherited", 0)
    done = ctl("-u", f"counters://localhost:{port}", "ping")
    assert (done.returncode, "CERTIFICATE_VERIFY_FAILED" in done.stderr) == (3, True)
    url = f"throttrs://localhost:{server.keys.port}?cacert={cacert}"
    assert ctl("throttr", "-u", url, "insert", "quota", "7", "--ttl", "60s").returncode == 0


def test_all_permits_were_given_back(server: Secured) -> None:
    wait_until(lambda: not any(server.used(name) for name in ("lost", "told", "forked", "late")), "all is given back")
