"""Masters that share the state of identifiers in a Redis, and a master whose Redis does not answer."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import redis

from counterd.protocols.smockron.wire import Status
from kit import certificates, gates, needs
from kit.daemon import wait_until
from kit.gates import DAY_MS, SETTINGS, gate
from ports import free_ports

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.daemon import Daemon

pytestmark = pytest.mark.needs("redis-server")

DECIDES = "Redis decides"
# A domain for `alone`: its key stays for a day, and nobody is told to wait.
PROBED = {"probe": {"rate": "1000/sec", "burst": "1 day"}}


class Redis:
    """A real Redis on a Unix socket. client: to look into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.process: subprocess.Popen[bytes] | None = None
        self.client = redis.Redis(unix_socket_path=str(path), db=3)
        self.start()

    def start(self, *options: str) -> None:
        command = [needs.path("redis-server"), "--port", "0", "--unixsocket", str(self.path), "--save", "", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self.path.is_socket, "Redis listens")

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.path.unlink(missing_ok=True)
            self.process = None


@pytest.fixture
def shared(short_path: Path) -> Iterator[Redis]:
    found = Redis(short_path / "r")
    yield found
    found.client.close()
    found.stop()


@pytest.fixture
def serve(start: Callable[..., Daemon], shared: Redis, tmp_path: Path) -> Callable[..., Daemon]:
    """Starts a master that shares its state."""

    def serve(rules: Any = gates.RULES, **options: str) -> Daemon:
        path = gates.write_rules(tmp_path, {**rules, **PROBED})
        state = {"smockron.rules": path, "smockron.state": f"unix://{shared.path}?db=3"}
        return start({**SETTINGS, **state, **options})

    return serve


def decided(shared: Redis, key: str) -> int:
    """What Redis has decided for it."""
    return int(wait_until(lambda: shared.client.get(key), f"{key} in Redis"))


def warned(daemon: Daemon, count: int) -> str:
    """Waits for so many lines that Redis is unavailable. Returns the last."""
    return daemon.wait_for_log("Redis is unavailable", count)


def test_the_keys_and_times_are_those_of_the_real_master(serve: Callable[..., Daemon], shared: Redis) -> None:
    with gate(serve()) as one:
        wait_until(lambda: alone(one, shared), DECIDES)
        one.account(b"api", b"me")
        first = decided(shared, "throttle;api;me")
        one.account(b"api", b"me")
        wait_until(lambda: decided(shared, "throttle;api;me") == first + DAY_MS, "the second counts on from the first")
        one.account(b"api", b"me")
        told = one.told()
        assert (told.domain, told.identifier, told.time_ms) == (b"api", b"me", first + 2 * DAY_MS)
        left = shared.client.pttl("throttle;api;me")
        assert DAY_MS < left <= 2 * DAY_MS, "its burst after the last request"
        assert set(shared.client.keys()) == {b"throttle;probe;probe", b"throttle;api;me"}


def alone(one: gates.Gate, shared: Redis) -> bool:
    """Asks until Redis decides: before the master is connected to it, it decides alone."""
    one.account(b"probe", b"probe")
    return bool(shared.client.get("throttle;probe;probe"))


def test_two_masters_have_one_limit(serve: Callable[..., Daemon], shared: Redis) -> None:
    with gate(serve(), b"api\0") as one, gate(serve(), b"api\0") as other:
        for each in (one, other):
            wait_until(lambda each=each: alone(each, shared), DECIDES)  # type: ignore[misc]
            shared.client.flushdb()
        one.account(b"api", b"me")
        first_ms = decided(shared, "throttle;api;me")
        one.account(b"api", b"me")
        wait_until(lambda: decided(shared, "throttle;api;me") == first_ms + DAY_MS, "both of one master's")
        other.account(b"api", b"me")
        assert other.told().time_ms == first_ms + 2 * DAY_MS, "is the third, a day too early"


def test_a_forgotten_identifier_is_removed_from_redis(serve: Callable[..., Daemon], shared: Redis) -> None:
    with gate(serve(), b"api\0") as one:
        wait_until(lambda: alone(one, shared), DECIDES)
        one.account(b"api", b"me", 5)
        first_ms, *_ = [one.told().time_ms for _ in range(3)]
        one.account(b"api", b"me", status=Status.FORGET)
        assert one.told().word == "FORGET"
        assert shared.client.get("throttle;api;me") is None
        one.account(b"api", b"me", 3)
        assert 0 <= one.told().time_ms - first_ms < DAY_MS, "as of one that nothing was heard of"


@pytest.mark.parametrize("left", ["nan", "inf", "1e300", "400000000000000", "nothing"])
def test_invalid_values_of_the_real_master_count_as_none(
    serve: Callable[..., Daemon], shared: Redis, left: str
) -> None:
    shared.client.set("throttle;api;me", left)
    with gate(serve()) as one:
        wait_until(lambda: alone(one, shared), DECIDES)
        one.account(b"api", b"me")
        before = decided(shared, "throttle;probe;probe")
        wait_until(lambda: shared.client.get("throttle;api;me") != left.encode(), "it is replaced")
        assert abs(decided(shared, "throttle;api;me") - before) < DAY_MS


def test_fractions_of_the_real_master_are_cut_off(serve: Callable[..., Daemon], shared: Redis) -> None:
    """It stores one if a gatekeeper has sent one. Redis still decides."""
    counterd = serve()
    with gate(counterd, b"login\0") as one:
        wait_until(lambda: alone(one, shared), DECIDES)
        ahead_ms = decided(shared, "throttle;probe;probe") + 2 * DAY_MS
        shared.client.set("throttle;login;me", f"{ahead_ms}.5")
        one.account(b"login", b"me")
        assert one.told().time_ms == ahead_ms + DAY_MS
        assert not counterd.lines("Redis is unavailable")


def test_without_redis_the_master_goes_on_from_the_last_times(serve: Callable[..., Daemon], shared: Redis) -> None:
    counterd = serve()
    with gate(counterd, b"api\0") as one:
        wait_until(lambda: alone(one, shared), DECIDES)
        one.account(b"api", b"me")
        first_ms = decided(shared, "throttle;api;me")
        one.account(b"api", b"me")
        wait_until(lambda: decided(shared, "throttle;api;me") == first_ms + DAY_MS, "both")
        shared.stop()
        one.account(b"api", b"me", 1)
        third = one.told()
        assert (third.identifier, third.time_ms) == (b"me", first_ms + 2 * DAY_MS), "one a day ahead of the first two"
        assert "decides by itself" in warned(counterd, 1)
        one.account(b"api", b"me", 1)
        assert one.told().time_ms == third.time_ms + DAY_MS, "and exactly, in memory"
        shared.start()
        counterd.wait_for_log("Redis is available again, and decides about requests again")
        one.account(b"api", b"me", 1)
        assert decided(shared, "throttle;api;me") > 0


def test_a_hanging_redis_is_not_waited_for(serve: Callable[..., Daemon], shared: Redis) -> None:
    counterd = serve()
    assert shared.process is not None
    with gate(counterd, b"login\0") as one:
        wait_until(lambda: alone(one, shared), DECIDES)
        os.kill(shared.process.pid, signal.SIGSTOP)
        one.account(b"login", b"me")
        assert one.told().identifier == b"me", "decided alone, once it has not answered for a second"
        assert "no answer for 1 s" in warned(counterd, 1)
        os.kill(shared.process.pid, signal.SIGCONT)
        counterd.wait_for_log("Redis is available again, and decides about requests again")


def test_the_daemon_starts_without_redis(serve: Callable[..., Daemon], shared: Redis) -> None:
    shared.stop()
    counterd = serve()
    with gate(counterd, b"login\0") as one:
        warned(counterd, 1)
        one.account(b"login", b"me")
        assert one.told().identifier == b"me"


def test_a_wrong_password_is_reported_and_not_shown(serve: Callable[..., Daemon], shared: Redis) -> None:
    shared.stop()
    shared.start("--requirepass", "right")
    counterd = serve(**{"smockron.state": f"unix://{shared.path}?db=0&password=guessed"})
    line = warned(counterd, 1)
    assert "password" in line.lower()
    assert "guessed" not in "".join(counterd.log)


# ---- TLS ----


@pytest.fixture
def secured(shared: Redis, tmp_path: Path) -> tuple[certificates.Files, int]:
    """A Redis that serves only clients with TLS: the files, and its port."""
    files = certificates.Files(tmp_path)
    (port,) = free_ports(1)
    shared.stop()
    shared.start(
        "--tls-port", str(port), "--tls-auth-clients", "no", "--tls-ca-cert-file", str(files.cacert),
        "--tls-cert-file", str(files.server), "--tls-key-file", str(files.server),
    )  # fmt: skip
    return files, port


def test_redis_over_tls(serve: Callable[..., Daemon], shared: Redis, secured: tuple[certificates.Files, int]) -> None:
    files, port = secured
    url = f"rediss://localhost:{port}/3?ssl_ca_certs={files.cacert}"
    with gate(serve(**{"smockron.state": url})) as one:
        wait_until(lambda: alone(one, shared), DECIDES)


def test_a_redis_with_an_untrusted_certificate(
    serve: Callable[..., Daemon], secured: tuple[certificates.Files, int]
) -> None:
    files, port = secured
    daemon = serve(**{"smockron.state": f"rediss://localhost:{port}/3?ssl_ca_certs={files.other}"})
    with gate(daemon) as one:
        one.account(b"slow", b"me")
        assert "certificate verify failed" in warned(daemon, 1)


def test_a_redis_that_never_ends_the_tls_handshake(
    serve: Callable[..., Daemon], secured: tuple[certificates.Files, int]
) -> None:
    """The master decides alone meanwhile."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        daemon = serve(**{"smockron.state": f"rediss://localhost:{port}/3?ssl_ca_certs={secured[0].cacert}"})
        with gate(daemon) as one:
            one.account(b"api", b"me")
            one.account(b"api", b"me")
            one.account(b"api", b"me")
            assert one.told().identifier == b"me"
        assert "no connection within 1 s" in warned(daemon, 1)
