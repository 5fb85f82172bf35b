"""Tests that need a network of their own: a host that vanishes, and a machine without IPv6.

The daemon and the client are each in a network namespace (namespaces.py)."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from counterd.protocols.counter import wire
from kit import peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

from kit import daemon
from kit.namespaces import HERE, PATIENCE, THERE, Net, ip, joined

pytestmark = pytest.mark.needs("ip", "networks")

HOLDER = Path(__file__).with_name("holder.py")


@pytest.fixture
def net() -> Iterator[Net]:
    with joined() as made:
        yield made


@contextlib.contextmanager
def holder(net: Net, counterd: daemon.Daemon, name: str, *arguments: str) -> Iterator[IO[str]]:
    """Runs a client on the other host; yields the stream of its orders."""
    command = [*net.there, sys.executable, str(HOLDER), HERE, str(counterd.address.port), name, "3", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            yield process.stdin
        finally:
            process.kill()


def probed(net: Net, counterd: daemon.Daemon) -> list[float]:
    """When the kernel next probes the daemon's connections: in proc(5), timer 02 and its time in hundredths of a
    second.
    """
    table = subprocess.run([*net.here, "cat", "/proc/net/tcp"], capture_output=True, text=True, check=True).stdout
    found = []
    for line in table.splitlines()[1:]:
        _, local, _, state, _, timer, *_ = line.split()
        if int(local.partition(":")[2], 16) == counterd.address.port and state == "01" and timer.startswith("02:"):
            found.append(int(timer.partition(":")[2], 16) / 100)
    return sorted(found)


def test_connections_of_other_hosts_have_keepalive(
    net: Net, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    """As configured when they connected; local ones do not: they cannot vanish unnoticed."""
    ip(net.keepers[0], "link", "set", "lo", "up")
    settings = {
        "counter.bind": f"{HERE} 127.0.0.1",
        "counter.insecure": "true",
        "counter.socket": str(short_path / "s"),
    }
    counterd = start(settings, program=(*net.here, *daemon.MODULE))
    connect = (
        f"import socket, sys; s = socket.create_connection(('127.0.0.1', {counterd.address.port})); sys.stdin.read()"
    )
    with subprocess.Popen([*net.here, sys.executable, "-c", connect], stdin=subprocess.PIPE) as neighbour:
        with holder(net, counterd, "old"), counterd.connect(unix=True) as connection:
            counterd.reload({"counter.keepalive_idle": 1000})
            with holder(net, counterd, "new"):
                daemon.wait_until(
                    lambda: (
                        daemon.numbers(wire.decode_stats(peers.ask(connection, wire.stats(1)).body))["curr_connections"]
                        == 4
                    ),
                    "the neighbour has come",
                )
                old, new = probed(net, counterd)
        neighbour.kill()
    assert old <= 10
    assert 990 < new <= 1000


@pytest.mark.parametrize("how", [Net.cut, Net.lose], ids=["cut", "lost"])
def test_holdings_of_a_vanished_host_come_back(
    how: Callable[[Net], None], net: Net, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    """Of three clients: one is idle, one does not read, and one was sent a reply that never arrived."""
    settings = {**PATIENCE, "counter.bind": HERE, "counter.insecure": "true", "counter.socket": str(short_path / "s")}
    counterd = start(settings, program=(*net.here, *daemon.MODULE))
    with counterd.connect(unix=True) as connection:
        peers.acquire_many(connection, [b"counter %d" % number for number in range(20_000)])

        def figures() -> dict[str, int]:
            return daemon.numbers(wire.decode_stats(peers.ask(connection, wire.stats(1)).body))

        with (
            holder(net, counterd, "idle"),
            holder(net, counterd, "asking") as order,
            holder(net, counterd, "owed", "30"),
        ):
            daemon.wait_until(lambda: figures()["stuck_outputs"] == 1, "one is owed more than it reads")
            assert (figures()["holdings"], figures()["curr_connections"]) == (20_003, 4)
            time.sleep(2.5)  # they are alive, so keepalive does them nothing; but one does not read meanwhile
            assert figures()["holdings"] >= 20_002
            net.lose_answers()
            order.write("\n")
            order.flush()
            daemon.wait_until(lambda: figures()["command:noop"] == 1, "it has asked")
            how(net)
            daemon.wait_until(lambda: figures()["holdings"] == 20_000, "all have been given up")
            seen = figures()
            assert seen["curr_connections"] == 1
            assert seen["internal_errors"] == 0
            assert (seen["vanished_peers"], seen["slow_readers"]) == (2, 1)
            counterd.wait_for_log("WARNING .*vanished")


def test_the_default_addresses_on_a_machine_without_ipv6(
    net: Net, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    """The default, 127.0.0.1 and ::1, is as good as 127.0.0.1 there."""
    ip(net.keepers[0], "link", "set", "lo", "up")
    disabled = (*net.here, "sh", "-c", 'echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6; exec "$@"', "sh")
    counterd = start({"counter.bind": "", "counter.socket": str(short_path / "s")}, program=(*disabled, *daemon.MODULE))
    assert [address.host for address in counterd.addresses] == ["127.0.0.1"]
    (warning,) = counterd.lines("WARNING")
    assert f"{counterd.config}: counter.bind: cannot listen on [::1]:" in warning
    assert warning.endswith("counterd continues without this address")
    with counterd.connect(unix=True) as connection:
        assert peers.ask(connection, wire.noop(1)).status == 0


def test_an_address_of_another_machine_is_an_error(net: Net, tmp_path: Path) -> None:
    """Unlike ::1 in the default."""
    config = tmp_path / "a.conf"
    config.write_text(daemon.config_text({"counter.insecure": "true", "counter.bind": f"{THERE} {HERE}"}))
    result = daemon.run("-c", config, program=(*net.here, *daemon.MODULE))
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line == f"{config}:3: counter.bind: cannot listen on {THERE}:0: Cannot assign requested address"
