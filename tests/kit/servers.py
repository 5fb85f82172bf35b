"""Servers for the tests of the counter client: the real counterd, and the real yrmcdsd for comparisons."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from counterd.client import Client
from counterd.errors import NotFound
from kit import daemon, reference

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.daemon import Address

PATIENCE = daemon.PATIENCE


class Server:
    """A running server. observer: a separate client that reads what is in use."""

    def __init__(self, address: tuple[str, int], observer: Client) -> None:
        self.address = address
        self.observer = observer

    def client(self, **options: Any) -> Client:
        client = Client(*self.address, **{"timeout": PATIENCE, **options})
        client.fileno()  # connects
        return client

    def used(self, name: str) -> int:
        try:
            return self.observer.get(name)
        except NotFound:
            return 0

    def wait_for_use(self, name: str, count: int) -> None:
        daemon.wait_until(lambda: self.used(name) == count, f"{count} of {name} are in use")

    def acquires(self) -> int:
        """Returns the number of Acquire requests so far."""
        return int(self.observer.stats()["command:acquire"])

    def wait_for_waiters(self, count: int) -> None:
        """Only of a counterd: waits until so many Takes wait."""
        daemon.wait_until(lambda: int(self.observer.stats()["waiters"]) == count, f"{count} wait")


def count_waiting(client: Any, name: str) -> int:
    """Returns how many wait for a name in a client of either shape, or ask, or wait in the server."""
    queue = client._turns._queues.get(name.encode())
    calls = [] if client._link is None else list(client._link.calls.pending.values())
    in_server = [call for call in calls if call.items and call.items[0].name == name.encode()]
    return len(in_server) + (len(queue.waiters) if queue else 0)


@contextlib.contextmanager
def running(kind: str, directory: Path) -> Iterator[Server]:
    """Runs a server during the block. kind: counterd or yrmcdsd."""
    with contextlib.ExitStack() as stack:
        address: Address
        if kind == "counterd":
            address = stack.enter_context(daemon.running(directory)).address
        else:
            address = stack.enter_context(reference.running(directory))
        yield Server(address, stack.enter_context(Client(*address, timeout=PATIENCE)))
