"""Clients whose daemon stops, and comes back or not: waits go on, or fail with the real reason."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Client, Permit, aio
from counterd.errors import ConnectionLost, CounterdError, NotAvailable
from kit import daemon
from kit.daemon import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.daemon import Daemon

NAME = "upgraded"
WAITING = 12
SETTINGS = {"drain.timeout": 3600}
SHAPES = pytest.mark.parametrize("shape", ["threads", "tasks"])
HOW = pytest.mark.parametrize("how", ["hold", "take"])


class Place:
    """A daemon, and its successors at the same port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running = contextlib.ExitStack()
        self.port = 0
        self.daemon: Daemon

    def start(self) -> None:
        settings = {**SETTINGS, "counter.port": self.port}
        self.daemon = self._running.enter_context(daemon.running(self._directory, settings))
        self.port = self.daemon.address.port

    def stop(self) -> None:
        self.daemon.send_signal(signal.SIGTERM)
        self.ends()

    def ends(self) -> None:
        assert self.daemon.ended() == 0
        self._running.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    made.start()
    yield made
    made.stop()


def ask(client: Any, how: str, timeout: float) -> Any:
    if how == "hold":
        return client.hold(NAME, maximum=1, timeout=timeout)
    return client.take(Permit(NAME, maximum=1), timeout=timeout)


def in_threads(
    place: Place, how: str, timeout: float, before: Callable[[], None], during: Callable[[], None]
) -> list[CounterdError | None]:
    """The outcomes of calls that wait in threads of one client, which holds what they wait for.

    before, during: what is done to the daemon before they wait, and while they wait.
    """

    def waits(client: Client) -> CounterdError | None:
        try:
            with ask(client, how, timeout):
                return None
        except CounterdError as error:
            return error

    with Client(port=place.port, timeout=PATIENCE) as client, ThreadPoolExecutor(WAITING) as pool:
        client.acquire(NAME, maximum=1)
        before()
        waiting = [pool.submit(waits, client) for _ in range(WAITING)]
        during()
        return [each.result(PATIENCE) for each in waiting]


def in_tasks(
    place: Place, how: str, timeout: float, before: Callable[[], None], during: Callable[[], None]
) -> list[CounterdError | None]:
    """As in_threads(), in tasks of one client."""

    async def waits(client: aio.Client) -> CounterdError | None:
        try:
            async with ask(client, how, timeout):
                return None
        except CounterdError as error:
            return error

    async def all_wait() -> list[CounterdError | None]:
        loop = asyncio.get_running_loop()
        async with aio.Client(port=place.port, timeout=PATIENCE) as client:
            await client.acquire(NAME, maximum=1)
            await loop.run_in_executor(None, before)
            waiting = [asyncio.ensure_future(waits(client)) for _ in range(WAITING)]
            await loop.run_in_executor(None, during)
            return await asyncio.wait_for(asyncio.gather(*waiting), PATIENCE)

    return asyncio.run(all_wait())


IN = {"threads": in_threads, "tasks": in_tasks}


@SHAPES
@HOW
def test_waits_go_on_with_the_next_daemon(place: Place, shape: str, how: str) -> None:
    def upgrade() -> None:
        place.daemon.wait_for_stats(waiters=WAITING)
        place.stop()
        place.start()

    assert IN[shape](place, how, 2 * PATIENCE, lambda: None, upgrade) == [None] * WAITING


@SHAPES
@HOW
def test_without_a_next_daemon_the_error_says_so(place: Place, shape: str, how: str) -> None:
    """Not that permits are in use, and not that a daemon has not answered in time."""
    for error in IN[shape](place, how, 0.5, place.stop, lambda: None):
        assert isinstance(error, ConnectionLost), repr(error)
    place.start()


@SHAPES
@HOW
def test_the_error_during_a_long_drain_says_so(place: Place, shape: str, how: str) -> None:
    place.daemon.reload({**SETTINGS, "counter.port": place.port, "drain.mode": "wait"})

    def drain() -> None:
        place.daemon.send_signal(signal.SIGTERM)
        place.daemon.wait_for_log("waiting for")

    for error in IN[shape](place, how, 0.5, drain, lambda: None):
        assert isinstance(error, NotAvailable), repr(error)
        assert error.draining, str(error)
        assert "in use" not in str(error)
    place.ends()
    place.start()
