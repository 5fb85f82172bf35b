"""`counterctl smockron gate` with a real master, behind the real nginx and Caddy with the files of deploy/."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from kit import daemon, proxies
from kit.daemon import wait_until
from kit.gates import SETTINGS
from kit.machine import PATIENCE
from kit.proxies import ask, figures

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kit.daemon import Address, Daemon

HOUR = {"rate": "1/hour", "burst": 0}
SECOND = {"rate": "1/sec", "burst": 0}
FORBID = "403"

PROXIES = pytest.mark.parametrize(
    "proxy",
    [
        pytest.param(proxies.nginx, marks=pytest.mark.needs("nginx"), id="nginx"),
        pytest.param(proxies.caddy, marks=pytest.mark.needs("caddy"), id="caddy"),
    ],
)


@pytest.fixture
def master(start: Callable[..., Daemon], tmp_path: Path) -> Callable[..., Daemon]:
    """Starts a master with a rule for the domain default."""

    def started(rule: Any) -> Daemon:
        path = tmp_path / "rules.json"
        path.write_text(json.dumps({"default": rule}))
        admin = {"admin.enable": "true", "admin.bind": "127.0.0.1:0"}
        return start({**SETTINGS, **admin, "smockron.rules": path})

    return started


def status_for(proxy: Any) -> str:
    return FORBID if proxy is proxies.nginx else "503"


def place(gate: Daemon) -> Address:
    return gate.served("listens on")[0]


def counted(gate: Daemon) -> dict[str, int]:
    """The figures that the gate logs when it ends."""
    assert gate.stop() == 0
    return {name: int(value) for name, value in re.findall(r"(\w+) (\d+)(?:,|$)", gate.log[-1])}


@PROXIES
def test_only_the_client_over_its_limit_is_rejected(proxy: Any, master: Callable[..., Daemon], tmp_path: Path) -> None:
    serving = master(HOUR)
    with (
        proxies.gate(serving, "--rejected-status", status_for(proxy)) as gate,
        proxy(tmp_path, place(gate)) as where,
    ):
        assert ask(where) == (200, None)
        wait_until(lambda: ask(where)[0] == 503, "the master has told it")
        status, after = ask(where, "/forbidden", body=b"x" * 100_000)
        assert status == 503
        assert 0 < int(after) <= 24 * 3600
        assert ask(where, client="127.0.0.2", body=b"x" * 100_000) == (200, None)
        assert ask(where, "/forbidden", client="127.0.0.3") == (403, None)
        wait_until(lambda: figures(serving)["rejected"] > 0, "the master knows it")


@PROXIES
def test_a_client_is_delayed(proxy: Any, master: Callable[..., Daemon], tmp_path: Path) -> None:
    serving = master(SECOND)
    with proxies.gate(serving) as gate, proxy(tmp_path, place(gate)) as where:

        def has_waited() -> bool:
            assert ask(where) == (200, None)
            return bool(figures(serving)["delayed"])

        wait_until(has_waited, "one of the requests had to wait")
        assert counted(gate)["delayed"] > 0


@PROXIES
def test_a_disconnected_client_is_no_longer_delayed(proxy: Any, master: Callable[..., Daemon], tmp_path: Path) -> None:
    """Else the gate would not end for an hour."""
    serving = master(HOUR)
    with (
        proxies.gate(serving, "--max-delay", "120m", "--max-delayed", "1") as gate,
        proxy(tmp_path, place(gate)) as where,
        contextlib.ExitStack() as clients,
    ):

        def one_waits() -> bool:
            client = clients.enter_context(socket.create_connection(where, PATIENCE))
            client.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            return bool(figures(serving)["delayed"])

        wait_until(one_waits, "one of the requests has to wait")
        clients.close()
        gate.stop()


@PROXIES
def test_while_the_gate_is_away_requests_pass(proxy: Any, master: Callable[..., Daemon], tmp_path: Path) -> None:
    with (
        proxies.gate(master(HOUR), "--rejected-status", status_for(proxy)) as gate,
        proxy(tmp_path, place(gate)) as where,
    ):
        wait_until(lambda: ask(where)[0] == 503, "the master has told it")
        gate.stop()
        for path, status in (("/", 200), ("/forbidden", 403)):
            assert ask(where, path) == (status, None)
        assert ask(where, body=b"x" * 100_000) == (200, None)


@PROXIES
def test_while_the_gate_does_not_answer_requests_are_rejected(proxy: Any, tmp_path: Path) -> None:
    """Else a client that overloads it would pass."""

    def hasten(text: str) -> str:
        return text.replace("_timeout 10s", "_timeout 100ms")

    with socket.create_server(("127.0.0.1", 0)) as silent:
        gate = daemon.Address(*silent.getsockname())
        with proxy(tmp_path, gate, hasten) as where:
            assert ask(where) == (503, "1")
            assert ask(where, "/forbidden", body=b"x" * 100_000) == (503, "1")


@PROXIES
def test_an_overlong_request_head_does_not_bypass_the_gate(
    proxy: Any, master: Callable[..., Daemon], tmp_path: Path
) -> None:
    with (
        proxies.gate(master(HOUR), "--rejected-status", status_for(proxy)) as gate,
        proxy(tmp_path, place(gate)) as where,
    ):
        wait_until(lambda: ask(where)[0] == 503, "the master has told it")
        for size in (7_000, 20_000, 70_000, 400_000):
            with contextlib.suppress(OSError):  # it may be closed before all of it was sent
                assert ask(where, **{"X-Long": "x" * size})[0] in {400, 431, 503}


@PROXIES
def test_a_request_head_that_the_proxy_accepts_is_not_refused(
    proxy: Any, master: Callable[..., Daemon], tmp_path: Path
) -> None:
    with (
        proxies.gate(master({"rate": "1000/sec", "burst": 1000})) as gate,
        proxy(tmp_path, place(gate)) as where,
    ):
        many = {f"X-{number}": "x" for number in range(90)}
        for fields in ({"Content-Encoding": "br"}, {"Content-Encoding": "zstd"}, {"X-Long": "x" * 7_000}, many):
            assert ask(where, **fields) == (200, None), fields
        if proxy is proxies.caddy:  # nginx itself takes no field of more than 8 KB
            assert ask(where, "/" + "p" * 7_000, **{"X-Long": "x" * 8_500}) == (200, None)


@pytest.mark.needs("nginx")
def test_requests_forbidden_by_nginx_stay_forbidden(master: Callable[..., Daemon], tmp_path: Path) -> None:
    def deny(text: str) -> str:
        return text.replace("auth_request /", "deny 127.0.0.9;\nauth_request /")

    with (
        proxies.gate(master(HOUR), "--rejected-status", FORBID) as gate,
        proxies.nginx(tmp_path, place(gate), deny) as where,
    ):
        assert ask(where, client="127.0.0.9") == (403, None)
        assert ask(where, client="127.0.0.8") == (200, None)


@pytest.mark.needs("nginx")
def test_many_requests_of_many_clients_are_counted_exactly(master: Callable[..., Daemon], tmp_path: Path) -> None:
    """All are answered, and the counts of master and gate agree."""
    serving = master({"rate": "1/hour", "burst": 20})
    clients = [f"127.0.1.{number}" for number in range(1, 9)]
    with (
        proxies.gate(serving, "--rejected-status", FORBID) as gate,
        proxies.nginx(tmp_path, place(gate)) as where,
        ThreadPoolExecutor(16) as pool,
    ):
        seen: Counter[int] = Counter()

        def is_rejected() -> bool:
            status, _ = ask(where)
            seen[status] += 1
            return bool(status == 503)

        wait_until(is_rejected, "the gate has its master")
        seen.update(pool.map(lambda number: ask(where, client=clients[number % 8])[0], range(800)))
        assert set(seen) == {200, 503}
        assert seen[200] >= 9 * 21
        said = counted(gate)
        assert (said["passed"], said["rejected"]) == (seen[200], seen[503])
        # Dropped is what came while the gate was not connected, if that took it long.
        assert said["sent"] + said["dropped"] == seen.total()
        wait_until(lambda: figures(serving)["rejected"] == seen[503], "the master has heard of all that were rejected")
        wait_until(lambda: figures(serving)["accepted"] == seen[200] - said["dropped"], "and of all that passed")


# ---- the gate alone --------------------------------------------------------------------------------------------------


def test_delayed_requests_are_answered_when_the_gate_ends(master: Callable[..., Daemon]) -> None:
    serving = master(SECOND)

    def decided() -> int:
        return sum(figures(serving)[name] for name in ("accepted", "delayed"))

    with proxies.gate(serving, "--max-delay", "60s", "--identifier", "path") as gate, ThreadPoolExecutor(3) as pool:

        def has_waited() -> bool:
            assert ask(place(gate)) == (200, None)
            return bool(figures(serving)["delayed"])

        wait_until(has_waited, "the gate knows that one has to wait")
        with socket.create_connection(place(gate), PATIENCE) as idle:
            before = decided()
            asking = [pool.submit(ask, place(gate)) for _ in range(3)]
            wait_until(lambda: decided() == before + 3, "all have come")
            gate.stop(signal.SIGINT)
            assert idle.recv(1) == b""
        assert [each.result() for each in asking] == [(200, None)] * 3


def test_the_gate_listens_on_a_unix_socket(master: Callable[..., Daemon], short_path: Path) -> None:
    path = short_path / "gate"
    with (
        proxies.gate(master(HOUR), "--identifier", "path", listen=f"unix:{path}"),
        socket.socket(socket.AF_UNIX) as asking,
    ):
        asking.connect(str(path))
        asking.sendall(b"GET /a HTTP/1.0\r\n\r\n")
        assert asking.recv(100).startswith(b"HTTP/1.0 200 OK\r\n")
    assert not path.exists()


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--listen", "nowhere"], 2, "expected an IP address and a port, or unix:"),
        (["--rejected", "most"], 2, "expected all, none or a share"),
        (["--rejected", "2"], 2, "rejected must be a share"),
        (["--identifier", "name"], 2, "identifier: expected"),
        (["--rejected-status", "200"], 2, "200"),
        (["--listen", "192.0.2.1:10006"], 2, "cannot listen on 192.0.2.1:10006: "),
    ],
)
def test_invalid_options_are_refused(options: list[str], status: int, said: str) -> None:
    done = daemon.run("smockron", "gate", *options, program=[proxies.COUNTERCTL])
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
