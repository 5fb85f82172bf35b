"""A fork while a resource is held: the child has its own connection and nothing of its parent, which keeps what it
holds.

With threads, another thread has all locks of the client at that moment: no thread of the child will ever release
them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import traceback
import warnings
from typing import TYPE_CHECKING, Any

import pytest

from kit import loops
from kit.machine import PATIENCE
from kit.shapes import ALL, BLOCKING, opened, run
from scenarios.resource import FORKED
from scenarios.server import RESOURCES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from scenarios.resource import Resource
    from scenarios.server import Server

pytestmark = pytest.mark.usefixtures("unhurried")
RLock = type(threading.RLock())


class Child:
    """A process that runs a coroutine, in the middle of which it reports that it is ready, and waits to go on."""

    def __init__(self, shape: str, scenario: Callable[[Child], Awaitable[None]]) -> None:
        self._readable, self._ready = os.pipe()
        self._resumed, self._resume = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # from 3.12 on, of every fork of a program with threads
            self.pid = os.fork()
        if self.pid == 0:
            os.close(self._resume)
            os._exit(self._status(shape, scenario))
        os.close(self._ready)
        os.close(self._resumed)

    def _status(self, shape: str, scenario: Callable[[Child], Awaitable[None]]) -> int:
        try:
            asyncio.events._set_running_loop(None)
            run(shape, scenario(self))  # type: ignore[arg-type]
        except BaseException:  # noqa: BLE001 - the parent fails then
            traceback.print_exc()
            return 1
        return 0

    def waits(self) -> None:
        """Called in the child: reports that it is ready, and waits."""
        os.write(self._ready, b".")
        os.read(self._resumed, 1)

    async def is_ready(self) -> None:
        assert await asyncio.to_thread(os.read, self._readable, 1), "the child failed"

    async def ends(self) -> None:
        os.close(self._resume)
        _, status = await asyncio.to_thread(os.waitpid, self.pid, 0)
        os.close(self._readable)
        assert os.waitstatus_to_exitcode(status) == 0


def locks(client: Any) -> list[Any]:
    """Returns the locks in a client and in what it is made of."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    pending = [client]
    while pending:
        each = pending.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, RLock):
            found[id(each)] = each
        elif isinstance(each, (dict, list, tuple, set)) or type(each).__module__.startswith(("counterd.", "threading")):
            pending += gc.get_referents(each)
    return list(found.values())


@contextlib.contextmanager
def locked(client: Any) -> Iterator[None]:
    """Lets another thread hold all locks of the client during the block."""
    has, over = threading.Event(), threading.Event()

    def take() -> None:
        all_of_them = locks(client)
        while (taken := [lock for lock in all_of_them if lock.acquire(blocking=False)]) != all_of_them:
            for lock in taken:
                lock.release()
        has.set()
        over.wait(PATIENCE)
        for lock in all_of_them:
            lock.release()

    thread = threading.Thread(target=take)
    thread.start()
    assert has.wait(PATIENCE)
    try:
        yield
    finally:
        over.set()
        thread.join()


async def in_child(resource: Resource, client: Any, taken: Any, child: Child) -> None:
    await resource.in_child(client, taken)
    own = await resource.take(client, resource.OTHER)
    assert resource.in_use(resource.OTHER) == 1
    child.waits()
    await resource.give(client, own)
    await resource.ask(client)
    async with opened(client):
        pass


async def in_parent(resource: Resource, shape: str) -> None:
    server, protocol = resource.server, resource.PROTOCOL
    assert (resource.in_use(resource.ONE), resource.in_use(resource.OTHER)) == (0, 0)
    before = server.connections(protocol)
    async with opened(resource.client(shape)) as client:
        taken = await resource.take(client, resource.ONE)
        own = server.connections(protocol) - before
        with locked(client) if shape == BLOCKING else contextlib.nullcontext():
            child = Child(shape, lambda child: in_child(resource, client, taken, child))
        await child.is_ready()
        assert resource.in_use(resource.ONE) == 1
        await resource.lasts(client, taken)
        await resource.give(client, taken)
        assert await resource.works(client)
        await resource.take(client, resource.ONE)
        both = server.connections(protocol)
    # The child has no copy of the connection, which would keep it open.
    await loops.until(lambda: server.connections(protocol) == both - own, "the connection has ended")
    await loops.until(lambda: resource.in_use(resource.ONE) == 0, "all of it has come back")
    await child.ends()


@pytest.mark.parametrize("shape", ALL)
@pytest.mark.parametrize(
    "resource", [each for each in RESOURCES if FORKED not in each.LACKS], ids=lambda each: each.NAME
)
def test_a_child_has_nothing_of_its_parent(server: Server, resource: type[Resource], shape: str) -> None:
    made = resource(server)
    try:
        run(shape, in_parent(made, shape))
    finally:
        made.close()
