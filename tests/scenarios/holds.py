"""Resources that are held while a block runs, and the uses that all of them have in common."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from kit.daemon import wait_until
from kit.machine import PATIENCE
from kit.shapes import BLOCKING, entered, got, left, opened
from scenarios.resource import Resource

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from scenarios.resource import Visit


# After so many pieces it waits between them: at most three are a greeting, the first request, and that of its turn.
ASKS = 5


class Blocks(Resource):
    """What the uses in which a block holds something have in common.

    REFUSED: the error of a block that gives up after 10 ms, and its message.
    """

    REFUSED: ClassVar[tuple[type[Exception], str]]

    def block(self, client: Any, **options: Any) -> Any:
        """A block that has ONE, or a part of it, while it runs."""
        raise NotImplementedError

    def occupied(self, client: Any) -> AbstractContextManager[Any]:
        """A block in which a blocking client has all of ONE."""
        raise NotImplementedError

    def is_waited_for(self, visit: Visit, asked: int, client: Any) -> bool:
        """Whether the client of the visit waits for it. asked: how often it has asked. client: another one."""
        return asked >= ASKS

    async def give(self, client: Any, taken: Any) -> None:
        await left(taken)

    async def in_child(self, client: Any, taken: Any) -> None:
        assert taken.lost
        await self.give(client, taken)

    async def is_lost(self, client: Any, taken: Any) -> bool:
        return bool(taken.lost)


class Rival:
    """Another client, which holds all of it, and gives it back when somebody waits for it.

    is_hard: it gives nothing back before the block ends.
    """

    def __init__(self, visit: Visit, *, is_hard: bool = False) -> None:
        assert isinstance(visit.resource, Blocks)
        self._visit, self._resource = visit, visit.resource
        self._is_hard = is_hard
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
        relay = self._visit.relay
        with self._resource.client(BLOCKING) as client, self._resource.occupied(client):
            before = relay.asked
            self._has.set()
            wait_until(lambda: self._over.is_set() or self._may_yield(relay.asked - before, client), "somebody waits")

    def _may_yield(self, asked: int, client: Any) -> bool:
        return not self._is_hard and self._resource.is_waited_for(self._visit, asked, client)


def block(visit: Visit, **options: Any) -> Any:
    """A block of the visit's client."""
    assert isinstance(visit.resource, Blocks)
    return visit.resource.block(visit.client, **options)


async def held(visit: Visit) -> None:
    async with opened(block(visit)):
        await visit.resource.ask(visit.client)


async def held_on_a_new_connection(visit: Visit) -> None:
    await visit.resource.ask(visit.client)
    visit.relay.cut()
    await held(visit)


async def fails_within(visit: Visit) -> None:
    with pytest.raises(ZeroDivisionError):
        async with opened(block(visit)):
            _ = 1 // 0


async def waited_for(visit: Visit) -> None:
    with Rival(visit):
        async with opened(block(visit)):
            pass


async def gives_up(visit: Visit) -> None:
    assert isinstance(visit.resource, Blocks)
    error, message = visit.resource.REFUSED
    with Rival(visit, is_hard=True), pytest.raises(error, match=message):
        await entered(block(visit, timeout=0.01))


async def closed(visit: Visit) -> None:
    assert isinstance(visit.resource, Blocks)
    async with opened(visit.resource.block(visit.another)):
        await got(visit.another.close())
