"""The smockron protocol: a gatekeeper's places for delayed requests. The master itself grants nothing."""

from __future__ import annotations

import itertools
import json
import os
from typing import TYPE_CHECKING, Any

from counterd.client.smockron import AsyncGatekeeper, Gatekeeper, Verdict
from kit import loops
from kit.machine import PATIENCE
from kit.shapes import BLOCKING, got, opened
from scenarios.resource import Resource, Visit

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from scenarios.server import Server

RULES = {"slow": {"rate": "1/hour", "burst": 0}, "quick": {"rate": "1/sec", "burst": 0}}
FAR_S = 1e6
numbers = itertools.count()


def settings(directory: Path) -> dict[str, Any]:
    path = directory.parent / "smockron.json"
    path.write_text(json.dumps(RULES))
    return {"smockron.rules": path, "smockron.control_port": 0}


def new_identifier() -> str:
    """Returns one that no request of this process or of another has had."""
    return f"{os.getpid()} {next(numbers)}"


def closing(kind: type[Any], on_close: Callable[[Any], object]) -> type[Any]:
    """Returns a class of gatekeepers that call a function when they are closed for the first time."""

    class Closing(kind):  # type: ignore[misc]
        is_closing = False

        def close(self) -> Any:
            if not self.is_closing:
                self.is_closing = True
                on_close(self)
            return super().close()

    return Closing


def has_heard(stats: Any) -> bool:
    """Whether the master has said something about each request."""
    return bool(stats.told >= stats.passed + stats.delayed)


class Delayed(Resource):
    """A request that waits, because the master said so, has a place at its gatekeeper until it stops waiting.

    As the master gives nothing out, nothing can be lost with a connection: what it said counts for the gatekeeper.
    """

    PROTOCOL = "smockron"
    NAME = "smockron delay"
    IS_GIVEN_OUT = False

    def __init__(self, server: Server, number: int = 0) -> None:
        super().__init__(server, number)
        self._made: list[Any] = []
        self._others: list[Any] = []  # gatekeepers that also have a place of OTHER

    def client(self, shape: str, **options: Any) -> Any:
        kind = closing(Gatekeeper if shape == BLOCKING else AsyncGatekeeper, self._made.remove)
        masters = tuple(f"{host}:{port}" for host, port in map(self.server.where, ("smockron", "smockron-control")))
        made: Any = kind(masters, "slow", max_delay_s=FAR_S, max_delayed=3, **{"timeout": PATIENCE, **options})
        self._made.append(made)
        return made

    async def _connect(self, client: Any) -> None:
        # A domain that is first used later may be subscribed to only after what the master says about it.
        client.decide(new_identifier(), "quick")
        assert await got(client.connect(PATIENCE))

    async def take(self, client: Any, name: str) -> Any:
        await self._connect(client)
        identifiers, decisions = [new_identifier()], []

        def is_delayed() -> bool:
            decisions.append(client.decide(identifiers[-1]))
            if decisions[-1].verdict is Verdict.REJECT:  # it has asked too often before the master said something
                identifiers.append(new_identifier())
            return decisions[-1].verdict is Verdict.DELAY

        await loops.until(is_delayed, "the master has said that it has to wait")
        if name == self.OTHER:
            self._others.append(client)
        return name, decisions[-1]

    async def give(self, client: Any, taken: Any) -> None:
        name, decision = taken
        client.gave_up(decision)
        if name == self.OTHER:
            self._others.remove(client)

    async def when_back(self, client: Any, taken: Any) -> None:
        await self.give(client, taken)

    async def ask(self, client: Any) -> None:
        client.decide(new_identifier())

    async def while_away(self, client: Any) -> None:
        assert client.decide(new_identifier()).verdict is Verdict.PASS

    async def is_lost(self, client: Any, taken: Any) -> bool:
        return False

    def in_use(self, name: str) -> int:
        others = sum(made in self._made for made in self._others)
        return others if name == self.OTHER else sum(made.stats().delaying for made in self._made) - others

    async def begin(self, visit: Visit) -> None:
        client, visit.prepared = visit.client, new_identifier()
        await self._connect(client)
        assert client.decide(visit.prepared, "quick").verdict is Verdict.PASS
        await loops.until(lambda: has_heard(client.stats()), "the master has said: wait")


async def waits(visit: Visit) -> None:
    async with opened(visit.client.admit(visit.prepared, "quick")):
        pass


async def connects(visit: Visit) -> None:
    assert await got(visit.another.connect(PATIENCE))
    visit.another.decide(new_identifier())
    await got(visit.another.close())


Delayed.USES = (waits, connects)
RESOURCES = [Delayed]
