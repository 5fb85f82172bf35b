"""The server is killed while a resource is held, and starts again at the same address.

A program that has lost something gets one error. One that has lost nothing gets none: its next call uses a new
connection. While the server is away calls fail at once, or the client decides by itself."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from kit import loops
from kit.shapes import ALL, opened, run
from scenarios.server import THINGS, Server
from scenarios.thing import RESTARTED

if TYPE_CHECKING:
    from pathlib import Path

    from scenarios.thing import Thing

pytestmark = pytest.mark.usefixtures("unhurried")


async def restarts(thing: Thing, shape: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        made = [await stack.enter_async_context(opened(thing.client(shape))) for _ in range(1 if thing.IS_ALONE else 3)]
        holder, *others = made
        for client in others:
            await thing.ask(client)
        taken = await thing.take(holder, thing.ONE)
        assert thing.in_use(thing.ONE) == 1
        thing.server.kill()
        await thing.when_gone(holder, taken)
        for client in made[:2]:
            await thing.while_away(client)
        thing.server.start()
        for client in others[1:]:
            await thing.ask(client)  # it has lost nothing, and has not noticed anything
        await thing.when_back(holder, taken)
        for client in made:
            await loops.until(lambda client=client: thing.works(client), "it works")  # type: ignore[misc]
        await loops.until(lambda: thing.in_use(thing.ONE) == 0, "all of it has come back")


@pytest.mark.parametrize("shape", ALL)
@pytest.mark.parametrize("thing", [each for each in THINGS if RESTARTED not in each.LACKS], ids=lambda each: each.NAME)
def test_the_server_is_killed_and_comes_back(tmp_path: Path, thing: type[Thing], shape: str) -> None:
    with Server(tmp_path / "daemon") as server:
        made = thing(server)
        try:
            run(shape, restarts(made, shape))
        finally:
            made.close()
