"""The throttr protocol: subscriptions. Keys belong to no connection, so nothing of them can be lost or leak."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client.throttr import AsyncClient, Client
from counterd.errors import ConnectionLost
from kit import loops
from kit.machine import PATIENCE
from kit.shapes import BLOCKING, got
from scenarios.resource import Resource, Visit

if TYPE_CHECKING:
    from pathlib import Path


def settings(directory: Path) -> dict[str, Any]:
    return {}


class Subscription(Resource):
    """A channel's events. After a loss the client subscribes again by itself, and next_event() tells of it."""

    PROTOCOL = "throttr"
    NAME = "throttr subscription"
    _observer: Client | None = None

    @property
    def observer(self) -> Client:
        if self._observer is None:
            self._observer = Client(*self.server.where("throttr"), timeout=PATIENCE)
        return self._observer

    def client(self, shape: str, **options: Any) -> Any:
        kind = Client if shape == BLOCKING else AsyncClient
        return kind(*self.where(), **{"timeout": PATIENCE, **options})

    async def take(self, client: Any, name: bytes) -> bytes:
        assert await got(client.subscribe(name))
        return name

    async def give(self, client: Any, taken: bytes) -> None:
        assert await got(client.unsubscribe(taken))

    async def in_child(self, client: Any, taken: bytes) -> None:
        """Its connection is subscribed to the same channels."""
        await self.ask(client)
        assert self.in_use(taken) == 2
        await self.give(client, taken)

    async def when_gone(self, client: Any, taken: bytes) -> None:
        with pytest.raises(ConnectionLost, match=r"events may be missing$"):
            await got(client.next_event(PATIENCE))

    async def when_back(self, client: Any, taken: bytes) -> None:
        await loops.until(lambda: self.asks(client), "it is connected again")
        assert self.in_use(taken) == 1, "it has subscribed again"
        await self.give(client, taken)

    def waiting(self, client: Any) -> Any:
        return client.next_event

    async def ask(self, client: Any) -> None:
        await got(client.query(b"nothing"))

    async def is_lost(self, client: Any, taken: bytes) -> bool:
        return False

    def subscribers(self, name: bytes) -> set[bytes]:
        """Returns the connections that have subscribed."""
        return {each.id for each in self.observer.channel(name) or ()}

    def in_use(self, name: bytes) -> int:
        return len(self.observer.channel(name) or ())

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()

    async def agrees(self, visit: Visit) -> bool:
        """The call may have been executed or not, but then the client is of the same opinion as the server.

        On a new connection it subscribes again to what it believes that it has.
        """
        has = await self._has(visit.client)
        visit.relay.cut()
        assert await self._has(visit.client) == has, "the client believes something else"
        if has:
            await got(visit.client.unsubscribe(self.ONE))
        return True

    async def _has(self, client: Any) -> bool:
        """Whether its connection is subscribed, according to the server."""
        await self._hear(client)
        own = {await got(client.whoami())}
        await loops.until(lambda: self.subscribers(self.ONE) <= own, "other connections have ended")
        return own == self.subscribers(self.ONE)

    async def _hear(self, client: Any) -> None:
        """Takes all events, and hears of a loss if there was one. Then it is connected."""
        with contextlib.suppress(ConnectionLost):
            while await got(client.next_event(0)) is not None:
                pass
        await loops.until(lambda: self.asks(client), "it is connected")


async def events(visit: Visit) -> None:
    client = visit.client
    assert await got(client.subscribe(visit.name))
    assert await got(client.publish(visit.name, b"a"))
    event = await got(client.next_event(PATIENCE))
    assert (event.channel, event.payload) == (visit.name, b"a")
    assert await got(client.unsubscribe(visit.name))


async def calls(visit: Visit) -> None:
    """Each has its own reply: none is left for the next call."""
    client = visit.client
    await got(client.purge(b"key"))
    assert await got(client.insert(b"key", 5, 60))
    assert (await got(client.query(b"key"))).quota == 5
    assert await got(client.decrease_quota(b"key", 2))
    assert (await got(client.query(b"key"))).quota == 3
    assert [entry.key for entry in await got(client.list())] == [b"key"]
    assert await got(client.purge(b"key"))


async def subscribed_on_a_new_connection(visit: Visit) -> None:
    assert await got(visit.client.subscribe(visit.name))
    visit.relay.cut()
    with contextlib.suppress(ConnectionLost):
        await got(visit.client.next_event(PATIENCE))
    await got(visit.client.query(b"nothing"))
    assert await got(visit.client.unsubscribe(visit.name))


async def closed(visit: Visit) -> None:
    assert await got(visit.another.subscribe(visit.name))
    await got(visit.another.close())


Subscription.USES = (events, calls, subscribed_on_a_new_connection, closed)
RESOURCES = [Subscription]
