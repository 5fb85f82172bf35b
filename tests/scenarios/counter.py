"""The counter protocol: permits of acquire(), of hold() and of take()."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Client, Permit, Rate, aio
from counterd.errors import ConnectionLost, NotAvailable, Timeout
from kit import loops
from kit.machine import PATIENCE
from kit.shapes import BLOCKING, begins, entered, got, opened
from scenarios import holds
from scenarios.holds import Rival, block, closed, fails_within, gives_up, held_on_a_new_connection, waited_for
from scenarios.resource import Resource, Visit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

MAXIMUM = 3  # of most names; a hold that has to wait asks for one more than there are


def settings(directory: Path) -> dict[str, Any]:
    return {}


class Permits(Resource):
    """What the scenarios' uses of permits have in common."""

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
        return kind(*self.where(), **{"timeout": PATIENCE, **options})

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

    async def has_kept(self, visit: Visit, kept: bytes) -> bool:
        return not visit.is_told


class Blocks(holds.Blocks, Permits):
    """What the uses in which a block holds the permits have in common."""

    REFUSED = (NotAvailable, r"3 in use, waited 0\.01 s")

    @contextlib.contextmanager
    def occupied(self, client: Client) -> Iterator[None]:
        client.acquire(self.ONE, MAXIMUM, maximum=MAXIMUM)
        yield
        client.release(self.ONE, MAXIMUM)

    def is_waited_for(self, visit: Visit, asked: int, client: Client) -> bool:
        return super().is_waited_for(visit, asked, client) or int(client.stats().get("waiters", 0)) > 0

    async def when_gone(self, client: Any, taken: Any) -> None:
        await loops.until(lambda: taken.lost, "it is known to be lost")
        with pytest.raises(ConnectionLost, match=r"^lost 1 of one [0-9]+ with the connection to "):
            await self.give(client, taken)


class Held(Blocks):
    NAME = "counter hold"

    def block(self, client: Any, **options: Any) -> Any:
        return client.hold(self.ONE, maximum=MAXIMUM, **options)

    async def take(self, client: Any, name: bytes) -> Any:
        return await entered(client.hold(name, maximum=MAXIMUM))

    def waiting(self, client: Any) -> Any:
        return begins(client.hold(self.FULL, maximum=1))


class Taken(Blocks):
    NAME = "counter take"

    def block(self, client: Any, **options: Any) -> Any:
        return client.take(Permit(self.ONE, maximum=MAXIMUM), **{"timeout": None, **options})

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


async def semaphore(visit: Visit) -> None:
    permits = visit.client.semaphore(visit.name, 2)
    async with opened(permits), opened(permits):
        assert await got(visit.client.get(visit.name)) == 2


async def taken(visit: Visit) -> None:
    rate = Rate(b"rate", limit=1 << 20, per=1)
    async with opened(visit.client.take(Permit(visit.name, 2, maximum=MAXIMUM), rate)) as it:
        await got(it.settle(b"rate", 0))


async def refused(visit: Visit) -> None:
    with Rival(visit, is_hard=True), pytest.raises(NotAvailable):
        await entered(block(visit, timeout=0))


async def acquired_again(visit: Visit) -> None:
    """After its connection was cut."""
    client = visit.another
    async with opened(client.hold(visit.name, maximum=9, on_lost="reacquire")) as hold:
        before = visit.relay.accepted
        visit.relay.cut()
        await visit.until(lambda: visit.relay.accepted > before and not hold.lost, "it is held again")
    await got(client.close())


async def left_unreachable(visit: Visit) -> None:
    with pytest.raises(ConnectionLost):
        async with opened(visit.client.hold(visit.name, maximum=9)):
            visit.relay.cut()


async def closed_with_permits(visit: Visit) -> None:
    await got(visit.another.acquire(visit.name, maximum=MAXIMUM))
    await got(visit.another.close())


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


Acquired.USES = (acquire, calls, pipeline, closed_with_permits)
Held.USES = (
    held, held_on_a_new_connection, fails_within, waited_for, gives_up, refused, acquired_again, left_unreachable,
    decorated, closed,
)  # fmt: skip
# With threads its permits belong to no block, so an interrupted release() may have released nothing.
Held.ASYNC_USES = (semaphore,)
Taken.USES = (taken, waited_for)
RESOURCES = [Acquired, Held, Taken]
