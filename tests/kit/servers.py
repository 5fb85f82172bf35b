"""Servers for the tests of the counter client: the real counterd, and the real yrmcdsd for comparisons."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from counterd.client import Client
from counterd.errors import NotFound
from kit import daemon, reference
from kit.connections import is_asleep

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator
    from pathlib import Path

    from kit.daemon import Address

PATIENCE = daemon.PATIENCE
ASKS = 3  # after so many requests one is certainly in the queue of its client


class Server:
    """A running server. observer: a separate client that reads what is in use."""

    def __init__(self, address: tuple[str, int], observer: Client) -> None:
        self.address = address
        self.observer = observer
        self._waiters = self._before = 0

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

    def takes(self) -> int:
        """Only of a counterd: returns the number of Takes so far."""
        return int(self.observer.stats()["command:take"])

    def wait_for_waiters(self, count: int) -> None:
        """Only of a counterd: waits until so many Takes wait."""
        daemon.wait_until(lambda: int(self.observer.stats()["waiters"]) == count, f"{count} wait")

    @contextlib.contextmanager
    def expecting_waiter(self) -> Iterator[None]:
        """In the block, threads of one client begin to wait for one name, each after wait_for_waiter()."""
        self._waiters, self._before = 0, self.acquires()
        yield

    def wait_for_waiter(self, thread: threading.Thread | None = None) -> None:
        """Waits until one more waits: in the server, or in the client, whose first waiter asks again and again.

        thread: which waits without a timeout, behind that.
        """
        self._waiters += 1
        if "waiters" in self.observer.stats():
            self.wait_for_waiters(self._waiters)
        elif thread is None:
            daemon.wait_until(lambda: self.acquires() >= self._before + ASKS, "the first asks again")
        else:
            daemon.wait_until(lambda: is_asleep(thread.native_id or 0), "it waits for its turn")


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
