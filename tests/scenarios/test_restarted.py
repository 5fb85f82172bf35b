"""The server is killed while a resource is held, and starts again at the same address.

A program that has lost something gets one error. One that has lost nothing gets none: its next call uses a new
connection. While the server is away calls fail at once, or the client decides by itself."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from kit import loops
from kit.shapes import ALL, opened, run
from scenarios.resource import RESTARTED
from scenarios.server import RESOURCES, Server

if TYPE_CHECKING:
    from pathlib import Path

    from scenarios.resource import Resource

pytestmark = pytest.mark.usefixtures("unhurried")


async def restarts(resource: Resource, shape: str) -> None:
    async with contextlib.AsyncExitStack() as stack:
        made = [
            await stack.enter_async_context(opened(resource.client(shape)))
            for _ in range(1 if resource.IS_ALONE else 3)
        ]
        holder, *others = made
        for client in others:
            await resource.ask(client)
        taken = await resource.take(holder, resource.ONE)
        assert resource.in_use(resource.ONE) == 1
        resource.server.kill()
        await resource.when_gone(holder, taken)
        for client in made[:2]:
            await resource.while_away(client)
        resource.server.start()
        for client in others[1:]:
            await resource.ask(client)  # it has lost nothing, and has not noticed anything
        await resource.when_back(holder, taken)
        for client in made:
            await loops.until(lambda client=client: resource.works(client), "it works")  # type: ignore[misc]
        await loops.until(lambda: resource.in_use(resource.ONE) == 0, "all of it has come back")


@pytest.mark.parametrize("shape", ALL)
@pytest.mark.parametrize(
    "resource", [each for each in RESOURCES if RESTARTED not in each.LACKS], ids=lambda each: each.NAME
)
def test_the_server_is_killed_and_comes_back(tmp_path: Path, resource: type[Resource], shape: str) -> None:
    with Server(tmp_path / "daemon") as server:
        made = resource(server)
        try:
            run(shape, restarts(made, shape))
        finally:
            made.close()
