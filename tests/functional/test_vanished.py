"""A host that vanishes without a word: its network is cut, in namespaces made for that.

The daemon and the client are each in a network namespace of their own, joined by a pair of virtual interfaces. Needs
the right to make those, which root has outside most containers; it is tried.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from counterd.protocols.counter import wire
from functional import peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

import daemon

HOLDER = Path(__file__).with_name("holder.py")
HERE, THERE = "198.51.100.1", "198.51.100.2"  # TEST-NET-2, seen by nobody but the two
PATIENCE = {
    "counter.keepalive_idle": 1,
    "counter.keepalive_interval": 1,
    "counter.keepalive_count": 2,
    "counter.user_timeout": 3,
}


class Net(NamedTuple):
    """Two namespaces; what is run in one begins with these words."""

    here: tuple[str, ...]
    there: tuple[str, ...]
    names: tuple[str, str]

    def cut(self) -> None:
        """The other host loses its power."""
        ip("-n", self.names[1], "link", "set", "counterd1", "down")

    def lose(self) -> None:
        """Everything that is sent to the other host is lost on the way: nothing says that it cannot be reached."""
        ip("-n", self.names[0], "neigh", "replace", THERE, "lladdr", "02:00:00:00:00:99", "dev", "counterd0", "nud",
           "permanent")  # fmt: skip
        ip("-n", self.names[1], "neigh", "replace", HERE, "lladdr", "02:00:00:00:00:99", "dev", "counterd1", "nud",
           "permanent")  # fmt: skip


def ip(*arguments: str) -> None:
    result = subprocess.run(
        ["ip", *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False
    )
    if result.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {result.stderr.strip()}")


@pytest.fixture
def net() -> Iterator[Net]:
    names = (f"counterd-{os.getpid()}-0", f"counterd-{os.getpid()}-1")
    if shutil.which("ip") is None:
        if os.environ.get("CI"):
            pytest.fail("there is no ip; the package is iproute2")
        pytest.skip("there is no ip; the package is iproute2")
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(ip, "netns", "del", name)
            ip(
                "-n",
                names[0],
                "link",
                "add",
                "counterd0",
                "type",
                "veth",
                "peer",
                "name",
                "counterd1",
                "netns",
                names[1],
            )
        except OSError as error:
            if "not permitted" in str(error) or "denied" in str(error):
                pytest.skip(f"namespaces are not permitted here: {error}")
            raise
        for number, address in enumerate((HERE, THERE)):
            ip("-n", names[number], "addr", "add", f"{address}/24", "dev", f"counterd{number}")
            ip("-n", names[number], "link", "set", f"counterd{number}", "up")
        yield Net(("ip", "netns", "exec", names[0]), ("ip", "netns", "exec", names[1]), names)


@contextlib.contextmanager
def holder(net: Net, counterd: daemon.Daemon, name: str, *arguments: str) -> Iterator[None]:
    """A client on the other host."""
    command = [*net.there, sys.executable, str(HOLDER), HERE, str(counterd.address.port), name, "3", *arguments]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "holding\n"
            yield
        finally:
            process.kill()


@pytest.mark.parametrize("how", [Net.cut, Net.lose], ids=["cut", "lost"])
def test_what_it_held_comes_back(
    how: Callable[[Net], None], net: Net, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    settings = {**PATIENCE, "counter.bind": HERE, "counter.socket": str(short_path / "s")}
    counterd = start(settings, program=(*net.here, *daemon.MODULE))
    with counterd.connect(unix=True) as connection:
        peers.acquire_many(connection, [b"counter %d" % number for number in range(20_000)])

        def figures() -> dict[str, int]:
            return daemon.numbers(wire.decode_stats(peers.ask(connection, wire.stats(1)).body))

        with holder(net, counterd, "idle"), holder(net, counterd, "owed", "30"):
            daemon.wait_until(lambda: figures()["stuck_outputs"] == 1, "one is owed more than it reads")
            assert (figures()["holdings"], figures()["curr_connections"]) == (20_002, 3)
            time.sleep(2.5)  # they are alive, so keepalive does them nothing; for the other it counts as reading none
            assert figures()["holdings"] >= 20_001
            how(net)
            began = time.monotonic()
            daemon.wait_until(lambda: figures()["holdings"] == 20_000, "both have been given up")
            assert time.monotonic() - began < 10
            seen = figures()
            assert seen["curr_connections"] == 1
            assert seen["internal_errors"] == 0
            assert (seen["vanished_peers"], seen["slow_readers"]) == (1, 1)
            counterd.wait_for_log("WARNING .*vanished")
