"""The sentinel protocol: tokens of acquire(), and of hold(), which renews their lease."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from counterd.client.sentinel import AsyncClient, Blocked, Client, TokenLost
from kit import loops
from kit.machine import PATIENCE
from kit.sentinels import flow, param
from kit.shapes import BLOCKING, begins, entered, got, opened
from scenarios import holds
from scenarios.holds import closed, fails_within, gives_up, held, held_on_a_new_connection, waited_for
from scenarios.resource import FORKED, RESTARTED, VANISHED, Resource, Visit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ONE, OTHER, SHORT, RATE, VALUES = 1000, 2000, 103, 104, 201
CASES_MAX = 40  # that are used at the same time
QUICK_MS = 50  # until a token is free again whose connection has ended
LASTING_MS = 60_000
NOBODYS_PORT = 1
LEASE_MS = 1000  # of a hold's token; it is renewed three times as often
KEEPS = 5  # after which a lease was renewed, and is over: a child has two of them
RULES = {
    "default": {
        "flowRules": [
            *(flow(ONE + n, 1, resourceTimeout=LEASE_MS // 2, clientOfflineTime=QUICK_MS) for n in range(CASES_MAX)),
            *(flow(OTHER + n, 1, clientOfflineTime=LASTING_MS) for n in range(CASES_MAX)),
            flow(SHORT, 1, resourceTimeout=75, resourceTimeoutStrategy=1),  # of 75 ms that cannot be renewed
            flow(RATE, 10**6, grade=1),
        ],
        "paramFlowRules": [param(VALUES, 10**6)],
    }
}
# Of a call. A caller that is interrupted at some points leaves the client's thread without its reply for so long, which
# close() waits for; a check waits for PATIENCE.
TIMEOUT_S = PATIENCE / 6


def settings(directory: Path) -> dict[str, Any]:
    path = directory.parent / "sentinel.json"
    path.write_text(json.dumps(RULES))
    return {"sentinel.rules": path}


class Tokens(Resource):
    """What the scenarios' uses of tokens have in common. Tokens outlive their connection: it is the lease that ends
    them.
    """

    PROTOCOL = "sentinel"
    _observer: Client | None = None

    def names(self, number: int) -> tuple[int, int]:
        return ONE + number, OTHER + number

    @property
    def observer(self) -> Client:
        if self._observer is None:
            where = self.server.where("sentinel")
            self._observer = Client(*where, timeout=PATIENCE, namespace="observers", fallback="closed")
        return self._observer

    def client(self, shape: str, **options: Any) -> Any:
        kind = Client if shape == BLOCKING else AsyncClient
        return kind(*self.where(), **{"timeout": TIMEOUT_S, "fallback": "closed", **options})

    async def ask(self, client: Any) -> None:
        await got(client.ping())

    def kept(self) -> int:
        """How many leases were renewed."""
        return self.server.figure("sentinel", "kept")

    def in_use(self, name: int) -> int:
        with contextlib.suppress(Blocked):
            self.observer.release(self.observer.acquire(name))
            return 0
        return 1

    def close(self) -> None:
        if self._observer is not None:
            self._observer.close()


class Acquired(Tokens):
    NAME = "sentinel acquire"

    async def take(self, client: Any, name: int) -> Any:
        return await got(client.acquire(name))

    async def give(self, client: Any, taken: Any) -> None:
        assert await got(client.release(taken))

    async def agrees(self, visit: Visit) -> bool:
        """Whether the program has its token, unless the interruption ended the connection."""
        await self.ask(visit.client)
        visit.has = 0
        if visit.prepared is not None:
            with contextlib.suppress(TokenLost):
                await got(visit.client.keep(visit.prepared))
                visit.has = 1
        return self.in_use(self.ONE) == visit.has

    async def when_back(self, client: Any, taken: Any) -> None:
        await loops.until(lambda: self.asks(client), "it is connected again")
        assert not await got(client.release(taken))

    async def is_lost(self, client: Any, taken: Any) -> bool:
        return False


class Blocks(holds.Blocks, Tokens):
    """What the uses in which a block holds the token have in common."""

    REFUSED = (Blocked, r"waited 0\.01 s")

    def block(self, client: Any, **options: Any) -> Any:
        return client.hold(self.ONE, **options)

    @contextlib.contextmanager
    def occupied(self, client: Client) -> Iterator[None]:
        token = client.acquire(self.ONE)
        yield
        client.release(token)


class Held(Blocks):
    NAME = "sentinel hold"

    def client(self, shape: str, **options: Any) -> Any:
        """A client that decides by itself while no server does."""
        return super().client(shape, **{"fallback": "local", "limits": {self.OTHER: 1, RATE: 5}, **options})

    async def take(self, client: Any, name: int) -> Any:
        return await entered(client.hold(name))

    def waiting(self, client: Any) -> Any:
        return begins(client.hold(self.OTHER))

    async def lasts(self, client: Any, taken: Any) -> None:
        before = self.kept()
        await loops.until(lambda: self.kept() >= before + KEEPS, "its lease is renewed")
        assert not taken.lost

    async def when_back(self, client: Any, taken: Any) -> None:
        await loops.until(lambda: taken.lost, "it is known to be lost")
        with pytest.raises(TokenLost):
            await self.give(client, taken)

    async def while_away(self, client: Any) -> None:
        assert (await got(client.flow(RATE))).fallback
        async with opened(client.hold(self.OTHER)) as hold:
            assert hold.fallback
            with pytest.raises(Blocked):
                await got(client.acquire(self.OTHER))


class Fallback(Blocks):
    """Tokens of the client's own limits, which count while no server can be reached."""

    NAME = "sentinel fallback"
    LACKS: ClassVar = {
        FORKED: "its limits are those of one process",
        RESTARTED: "sentinel hold decides by itself while the server is away",
        VANISHED: "sentinel hold decides by itself while the server is away",
    }

    def client(self, shape: str, **options: Any) -> Any:
        kind = Client if shape == BLOCKING else AsyncClient
        return kind(self.server.host, NOBODYS_PORT, timeout=PATIENCE, limits={ONE: 1, OTHER: 1})

    async def ask(self, client: Any) -> None:
        client.stats()

    async def take(self, client: Any, name: int) -> Any:
        hold = await entered(client.hold(name))
        assert hold.fallback
        return hold

    async def is_lost(self, client: Any, taken: Any) -> bool:
        return False

    def in_use(self, name: int) -> int:
        """Nothing, as the server knows nothing of these tokens."""
        return 1 if name == self.OTHER else 0

    async def agrees(self, visit: Visit) -> bool:
        if not visit.has:
            token = await got(visit.client.acquire(ONE))
            assert token.fallback
            await got(visit.client.release(token))
        visit.has = 0
        return True


async def acquire(visit: Visit) -> None:
    visit.prepared = await got(visit.client.acquire(ONE))


async def calls(visit: Visit) -> None:
    await got(visit.client.ping())
    assert (await got(visit.client.flow(RATE))).passed
    assert (await got(visit.client.param(VALUES, [f"{visit!r}"]))).passed
    visit.prepared = await got(visit.client.acquire(ONE))
    with pytest.raises(Blocked):
        await got(visit.client.acquire(ONE))


async def renewed(visit: Visit) -> None:
    """The first hold of its flow, which learns its lease at once."""
    assert isinstance(visit.resource, Tokens)
    before = visit.resource.kept()
    async with opened(visit.client.hold(ONE)):
        await visit.until(lambda: visit.resource.kept() > before, "its lease is renewed")  # type: ignore[attr-defined]


async def lost(visit: Visit) -> None:
    with contextlib.suppress(TokenLost):
        async with opened(visit.client.hold(SHORT)) as hold:
            await visit.until(lambda: hold.lost, "it is lost")


Acquired.USES = (acquire, calls)
Held.USES = (held, held_on_a_new_connection, fails_within, waited_for, gives_up, renewed, lost, closed)
Fallback.USES = (held, fails_within)
RESOURCES = [Acquired, Held, Fallback]
