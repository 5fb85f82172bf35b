"""The counter protocol: permits of acquire(), of hold() and of take()."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Client, Permit, Rate, aio
from counterd.errors import ConnectionLost, NotAvailable, Timeout
from kit import loops
from kit.daemon import wait_until
from kit.machine import PATIENCE
from kit.shapes import BLOCKING, begins, entered, got, left, opened
from scenarios.thing import Thing, Visit, cut

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

MAXIMUM = 3  # of most names; a hold that has to wait asks for one more than there are


def settings(directory: Path) -> dict[str, Any]:
    return {}


class Permits(Thing):
    """What all of them have in common."""

    PROTOCOL = "counter"
    FULL = b"full"  # of which there is no permit left
    _observer: Client | None = None

    @property
    def observer(self) -> Client:
        if self._observer is None:
            self._observer = Client(*self.server.where("counter"), timeout=PATIENCE)
        return self._observer

    def client(self, shape: str, **options: Any) -> Any:
        kind = Client if shape == BLOCKING else aio.Client
        return kind(*self.server.where("counter"), **{"timeout": PATIENCE, **options})

    def another(self, shape: str) -> Any:
        return self.client(shape, **({"watch": True} if shape == BLOCKING else {}))

    async def ask(self, client: Any) -> None:
        await got(client.noop())

    def in_use(self, name: bytes) -> int:
        return self.observer.get(name, default=0)

    def look(self) -> None:
        super().look()
        with contextlib.suppress(NotAvailable):
            self.observer.acquire(self.FULL, maximum=1)

    def end_waits(self) -> None:
        self.close()

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()


class Acquired(Permits):
    NAME = "counter acquire"

    async def take(self, client: Any, name: bytes) -> bytes:
        await got(client.acquire(name, maximum=MAXIMUM))
        return name

    async def give(self, client: Any, taken: bytes) -> None:
        await got(client.release(taken))

    async def when_gone(self, client: Any, taken: bytes) -> None:
        await loops.until(lambda: self._is_told(client), "it is told of the loss")

    async def _is_told(self, client: Any) -> bool:
        with contextlib.suppress(Timeout):
            with pytest.raises(ConnectionLost, match=r"^(?!cannot connect)"):
                await self.ask(client)
            return True
        return False

    def is_lost(self, client: Any, taken: bytes) -> bool:
        link = client._link
        return bool(link.closed or not link.calls.held)


class Blocks(Permits):
    """What those have in common that a block has."""

    async def give(self, client: Any, taken: Any) -> None:
        await left(taken)

    async def in_child(self, client: Any, taken: Any) -> None:
        assert taken.lost
        await self.give(client, taken)

    async def when_gone(self, client: Any, taken: Any) -> None:
        await loops.until(lambda: taken.lost, "it is known to be lost")
        with pytest.raises(ConnectionLost, match=r"^lost 1 of one [0-9]+ with the connection to "):
            await self.give(client, taken)

    def is_lost(self, client: Any, taken: Any) -> bool:
        return bool(taken.lost)


class Held(Blocks):
    NAME = "counter hold"

    async def take(self, client: Any, name: bytes) -> Any:
        return await entered(client.hold(name, maximum=MAXIMUM))

    def waiting(self, client: Any) -> Any:
        return begins(client.hold(self.FULL, maximum=1))


class Taken(Blocks):
    NAME = "counter take"

    async def take(self, client: Any, name: bytes) -> Any:
        return await entered(client.take(Permit(name, maximum=MAXIMUM), timeout=None))

    def waiting(self, client: Any) -> Any:
        return client.take(Permit(self.FULL, maximum=1), timeout=None).acquire


# ---- what is interrupted: a block, or a call of which the program knows what it gave --------------------------------


async def acquire(visit: Visit) -> None:
    visit.has = await got(visit.client.acquire(visit.name, 2, maximum=MAXIMUM))


async def calls(visit: Visit) -> None:
    client = visit.client
    visit.has = await got(client.acquire(visit.name, 2, maximum=MAXIMUM))
    assert await got(client.get(visit.name)) == 2
    with pytest.raises(NotAvailable):
        await got(client.acquire(visit.name, 2, maximum=MAXIMUM))
    await got(client.noop())
    await got(client.dump())
    await got(client.stats())


async def pipeline(visit: Visit) -> None:
    asked = visit.client.pipeline().acquire(visit.name, 2, maximum=MAXIMUM).get(visit.name)
    granted, used, refused = await got(asked.acquire(visit.name, 2, maximum=MAXIMUM).execute())
    visit.has = granted
    assert (granted, used, type(refused)) == (2, 2, NotAvailable)


async def held(visit: Visit) -> None:
    async with opened(visit.client.hold(visit.name, 2, maximum=MAXIMUM)):
        assert await got(visit.client.get(visit.name)) == 2


async def held_on_a_new_connection(visit: Visit) -> None:
    await got(visit.client.noop())
    cut(visit.client)
    async with opened(visit.client.hold(visit.name, maximum=MAXIMUM)):
        await got(visit.client.get(visit.name))


async def fails_within(visit: Visit) -> None:
    with pytest.raises(ZeroDivisionError):
        async with opened(visit.client.hold(visit.name, 2, maximum=MAXIMUM)):
            _ = 1 // 0


async def semaphore(visit: Visit) -> None:
    permits = visit.client.semaphore(visit.name, 2)
    async with opened(permits), opened(permits):
        assert await got(visit.client.get(visit.name)) == 2


class Rival:
    """Another client, which has all permits of a name, and gives them back when somebody waits for them."""

    def __init__(self, visit: Visit) -> None:
        self._visit = visit
        self._over = threading.Event()
        self._has = threading.Event()
        self._thread = threading.Thread(target=self._run)  # where no point is

    def __enter__(self) -> None:
        self._thread.start()
        assert self._has.wait(PATIENCE)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        with self._visit.thing.client(BLOCKING) as client:
            client.acquire(self._visit.name, MAXIMUM, maximum=MAXIMUM)
            self._has.set()
            wait_until(lambda: self._over.is_set() or self._is_waited_for(client), "somebody waits")

    def _is_waited_for(self, client: Client) -> bool:
        return bool(self._visit.client._turns._queues) or int(client.stats().get("waiters", 0)) > 0


async def waited_for(visit: Visit) -> None:
    with Rival(visit):
        async with opened(visit.client.hold(visit.name, maximum=MAXIMUM)):
            pass


async def taken_after_waiting(visit: Visit) -> None:
    with Rival(visit):
        async with opened(visit.client.take(Permit(visit.name, maximum=MAXIMUM), timeout=None)):
            pass


async def taken(visit: Visit) -> None:
    rate = Rate(b"rate", limit=1 << 20, per=1)
    async with opened(visit.client.take(Permit(visit.name, 2, maximum=MAXIMUM), rate)) as it:
        await got(it.settle(b"rate", 0))


class Hard(Rival):
    """One that gives nothing back before the block ends."""

    def _is_waited_for(self, client: Client) -> bool:
        return False


async def gives_up(visit: Visit) -> None:
    with Hard(visit), pytest.raises(NotAvailable, match=r"3 in use, waited 0\.01 s"):
        await entered(visit.client.hold(visit.name, maximum=MAXIMUM, timeout=0.01))


async def refused(visit: Visit) -> None:
    with Hard(visit), pytest.raises(NotAvailable):
        await entered(visit.client.hold(visit.name, maximum=MAXIMUM, timeout=0))


async def acquired_again(visit: Visit) -> None:
    """After its connection was cut."""
    client = visit.another
    async with opened(client.hold(visit.name, maximum=9, on_lost="reacquire")) as hold:
        cut(client)
        await visit.until(lambda: not hold.lost and hold._link is client._link, "it is held again")
    await got(client.close())


async def left_unreachable(visit: Visit) -> None:
    with pytest.raises(ConnectionLost):
        async with opened(visit.client.hold(visit.name, maximum=9)):
            cut(visit.client)


async def closed(visit: Visit) -> None:
    """With permits that were acquired, and with a hold."""
    client = visit.another
    await got(client.acquire(visit.name, maximum=MAXIMUM))
    async with opened(client.hold(visit.name, maximum=MAXIMUM)):
        await got(client.close())


async def decorated(visit: Visit) -> None:
    client = visit.client
    hold = client.hold(visit.name, maximum=MAXIMUM)
    if visit.is_blocking:

        @hold
        def counts() -> Iterator[int]:
            yield client.get(visit.name)
            yield client.get(visit.name)

        assert hold(lambda: list(counts()))() == [2, 2]
    else:

        @hold
        async def count() -> AsyncIterator[int]:
            yield await client.get(visit.name)
            yield await client.get(visit.name)

        @hold
        async def both() -> list[int]:
            return [each async for each in count()]

        assert await both() == [2, 2]


Acquired.USES = (acquire, calls, pipeline, closed)
Held.USES = (
    held, held_on_a_new_connection, fails_within, waited_for, gives_up, refused, acquired_again, left_unreachable,
    decorated,
)  # fmt: skip
# With threads its permits belong to no block, so an interrupted release() may have released nothing.
Held.ASYNC_USES = (semaphore,)
Taken.USES = (taken, taken_after_waiting)
THINGS = [Acquired, Held, Taken]
