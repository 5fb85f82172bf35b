"""What a client takes from a server, such as a permit: a protocol describes it to the scenarios as a Resource.

`RESOURCES` of a protocol's module lists its Resources, and SETTINGS are the daemon's settings for it.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from counterd.errors import ConnectionLost, CounterdError
from kit import loops
from kit.daemon import wait_until
from kit.shapes import BLOCKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from kit.cuts import Relay
    from scenarios.server import Server

CANCELLED = "cancelled at every await"
INTERRUPTED = "interrupted at every point"
FORKED = "forked"
RESTARTED = "restarted"
VANISHED = "vanished"
SCENARIOS = (CANCELLED, INTERRUPTED, FORKED, RESTARTED, VANISHED)


class Resource:
    """What clients of a protocol take and give back. The scenarios take ONE; OTHER is another of the same kind.

    PROTOCOL: that of the clients. NAME: for the names of tests.
    LACKS: for each scenario that does not exist for it, the reason.
    USES: the code that is interrupted: functions that take a Visit. ASYNC_USES: more of them, for asyncio only.
    IS_GIVEN_OUT: whether the server grants it, and takes it back from a client that is gone.
    IS_ALONE: whether another such client would take its share.
    relay: the one through which its clients connect, if any. The Resource itself connects to the server directly.
    """

    PROTOCOL: ClassVar[str]
    NAME: ClassVar[str]
    LACKS: ClassVar[Mapping[str, str]] = {}
    USES: ClassVar[tuple[Callable[[Visit], Awaitable[None]], ...]] = ()
    ASYNC_USES: ClassVar[tuple[Callable[[Visit], Awaitable[None]], ...]] = ()
    IS_GIVEN_OUT: ClassVar[bool] = True
    IS_ALONE: ClassVar[bool] = False
    relay: Relay | None = None

    def __init__(self, server: Server, number: int = 0) -> None:
        """number: distinguishes it from others that are used at the same time."""
        self.server = server
        self.ONE, self.OTHER = self.names(number)

    def names(self, number: int) -> tuple[Any, Any]:
        return b"one %d" % number, b"other %d" % number

    def where(self) -> tuple[str, int]:
        """The address of the server for its clients."""
        return self.server.where(self.PROTOCOL) if self.relay is None else self.relay.address

    def client(self, shape: str, **options: Any) -> Any:
        """A client that has not connected yet."""
        raise NotImplementedError

    async def take(self, client: Any, name: Any) -> Any:
        """Takes it, waiting if necessary."""
        raise NotImplementedError

    async def give(self, client: Any, taken: Any) -> None:
        """Gives it back."""
        raise NotImplementedError

    async def ask(self, client: Any) -> None:
        """A call that changes nothing."""
        raise NotImplementedError

    async def asks(self, client: Any) -> bool:
        """As ask(). False if the client cannot connect yet."""
        with contextlib.suppress(ConnectionLost):
            await self.ask(client)
            return True
        return False

    async def is_lost(self, client: Any, taken: Any) -> bool:
        """Whether the client reports that it was lost."""
        raise NotImplementedError

    def in_use(self, name: Any) -> int:
        """How much of it the server has granted, asked through a separate client."""
        raise NotImplementedError

    def look(self) -> None:
        """Opens the connection of in_use(), and takes what waiting() waits for."""
        self.in_use(self.ONE)

    def close(self) -> None:
        """Closes the connection of in_use()."""

    def waiter(self, make: Callable[..., Any]) -> Any:
        """The client that waits. make: makes one."""
        return make()

    def waiting(self, client: Any) -> Callable[[], Any] | None:
        """Returns a call that waits until end_waits(); None if there is no such call."""
        return None

    def end_waits(self) -> None:
        """Ends the waits of waiting()."""

    async def while_away(self, client: Any) -> None:
        """Checks the client while the server is away: a call fails at once."""
        try:
            await self.ask(client)
        except CounterdError:
            return
        raise AssertionError("a call succeeded although no server was there")

    async def in_child(self, client: Any, taken: Any) -> None:
        """Called in the child of a fork: checks what the child has of it, and leaves a block that it inherited."""

    async def lasts(self, client: Any, taken: Any) -> None:
        """Waits until the client has renewed it, if it has to be renewed."""

    async def when_gone(self, client: Any, taken: Any) -> None:
        """Called when its server was killed: checks that the client reports the loss, if it does so already."""

    async def when_back(self, client: Any, taken: Any) -> None:
        """Called when the server is back: checks that the client reports the loss, if it did not before."""

    async def begin(self, visit: Visit) -> None:
        """Called before each attempt of an interruption."""

    def end(self) -> None:
        """Called after each attempt of an interruption, with nothing in use."""

    def visitor(self, shape: str) -> Any:
        """The client of a Visit."""
        return self.client(shape)

    def another(self, shape: str) -> Any:
        """The other client of a Visit."""
        return self.visitor(shape)

    async def agrees(self, visit: Visit) -> bool:
        """Whether the server has granted exactly what the program has, after an interruption."""
        try:
            await self.ask(visit.client)
        except ConnectionLost:  # once, if anything was lost
            visit.has, visit.is_told = 0, True
        return self.in_use(self.ONE) == visit.has

    async def has_kept(self, visit: Visit, kept: Any) -> bool:
        """Whether the program still has what it took before the interruption."""
        return not await self.is_lost(visit.client, kept)

    async def works(self, client: Any) -> bool:
        """Takes and gives back once more. False if the client just raised a loss, or cannot connect yet."""
        with contextlib.suppress(ConnectionLost):
            await self.give(client, await self.take(client, self.ONE))
            return True
        return False


class Visit:
    """The arguments of a use: the interrupted client, and its Resource. has: the amount that the program knows of.

    another: a similar client, which the use may close.
    """

    def __init__(self, resource: Resource, shape: str, client: Any, another: Any) -> None:
        self.resource = resource
        self.shape = shape
        self.client = client
        self.another = another
        self.name = resource.ONE
        self.has = 0
        self.is_told = False  # of a loss
        self.prepared: Any = None  # by begin()

    @property
    def is_blocking(self) -> bool:
        return self.shape == BLOCKING

    @property
    def relay(self) -> Relay:
        """The connections of its clients."""
        assert self.resource.relay is not None
        return self.resource.relay

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Waits, in a way that suits the shape."""
        if self.is_blocking:
            wait_until(condition, what)
        else:
            await loops.until(condition, what)
