"""The network between client and server fails silently, and comes back.

The client and the daemon are each in a network namespace. All clients run at the same time, because it takes
seconds until the kernel gives up a peer. A waiting call ends; the server takes everything back; the client works
when the network is back."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING

import pytest

from counterd.errors import CounterdError
from kit import daemon, loops
from kit.daemon import wait_until
from kit.machine import PATIENCE
from kit.namespaces import HERE, Net, inside, ip, joined
from kit.shapes import ALL, begun, opened, run
from scenarios.resource import VANISHED
from scenarios.server import RESOURCES, Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scenarios.resource import Resource

pytestmark = pytest.mark.needs("ip", "networks")
CASES = [(resource, shape) for resource in RESOURCES if VANISHED not in resource.LACKS for shape in ALL]
TIMEOUT_S = 0.5  # of a call, and of an attempt to connect
DAEMON = {"insecure": "true", "keepalive_idle": 1, "keepalive_interval": 1, "keepalive_count": 2, "user_timeout": 3}
ALL_S = 2 * PATIENCE  # of a case; its clients give the network up after 10 to 12 s

HOLDING, AWAY, BACK = range(3)  # all hold something; the network is gone, and given up by all; it is there again


class Case:
    """A client and what it takes. error: the error with which it failed. reached: the phase that it has reached."""

    def __init__(self, resource: Resource, shape: str, net: Net) -> None:
        self.resource = resource
        self.shape = shape
        self.error: BaseException | None = None
        self.reached = -1
        self.now = HOLDING  # the phase
        self._net = net
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with inside(self._net.keepers[1]):
                run(self.shape, self._vanishes(), ALL_S)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.error = error
        self.reached = BACK

    async def _vanishes(self) -> None:
        resource = self.resource
        made = functools.partial(resource.client, self.shape, timeout=TIMEOUT_S)
        async with opened(made()) as client, opened(resource.waiter(made)) as waiter:
            taken = await resource.take(client, resource.ONE)
            waits = resource.waiting(waiter)
            waiting = None if waits is None else begun(self.shape, waits)
            await self._meet(HOLDING)
            await resource.while_away(client)
            if resource.IS_GIVEN_OUT:
                await loops.until(lambda: resource.in_use(resource.ONE) == 0, "the server has taken it back")
            await resource.when_gone(client, taken)
            await self._meet(AWAY)
            await resource.when_back(client, taken)
            await loops.until(lambda: resource.works(client), "it works")
            await loops.until(lambda: resource.in_use(resource.ONE) == 0, "nothing is in use")
            resource.end_waits()
            if waiting is not None:
                with contextlib.suppress(CounterdError):
                    await waiting

    async def _meet(self, phase: int) -> None:
        """Waits for the next phase, which begins when all cases are here."""
        self.reached = phase
        await loops.until(lambda: self.now > phase, "all are here")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[type[Resource], str], Case]]:
    """All cases, after their runs."""
    with joined() as net:
        ip(net.keepers[0], "link", "set", "lo", "up")
        directory = tmp_path_factory.mktemp("server") / "daemon"
        with Server(directory, HERE, DAEMON, (*net.here, *daemon.MODULE)) as server:
            made = {case: Case(case[0](server, number), case[1], net) for number, case in enumerate(CASES)}
            with inside(net.keepers[0]):  # where the server is: so they can see it all the time
                for each in made.values():
                    each.resource.look()
            for each in made.values():
                each.thread.start()
            for phase, act in ((HOLDING, net.vanish), (AWAY, net.come_back)):
                wait_until(lambda phase=phase: all(each.reached >= phase for each in made.values()), f"phase {phase}")  # type: ignore[misc]
                act()
                for each in made.values():
                    each.now = phase + 1
            for each in made.values():
                each.thread.join(PATIENCE)
                each.resource.close()
            yield made


@pytest.mark.parametrize(("resource", "shape"), CASES, ids=lambda each: getattr(each, "NAME", each))
def test_the_network_vanishes_and_comes_back(
    cases: dict[tuple[type[Resource], str], Case], resource: type[Resource], shape: str
) -> None:
    if (error := cases[resource, shape].error) is not None:
        raise error
