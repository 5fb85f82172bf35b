"""What a client takes of a server: the description of it that a protocol gives to the scenarios.

A description is a Thing. `THINGS` of a protocol's module lists its Things, and SETTINGS are the daemon's settings for
it.
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


class Thing:
    """What clients of a protocol take and give back. ONE is what the scenarios take, OTHER another of the same kind.

    PROTOCOL: of which the clients are. NAME: in the names of tests.
    LACKS: by scenario, why there is no such scenario with it.
    USES: what is interrupted: functions that take a Visit. ASYNC_USES: more of them, for asyncio only.
    IS_GIVEN_OUT: by the server, which takes it back from a client that is gone.
    IS_ALONE: another such client would take its share.
    relay: through which its clients connect, if there is one. The Thing itself looks at the server directly.
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
        """number: of one that is used at the same time as others."""
        self.server = server
        self.ONE, self.OTHER = self.names(number)

    def names(self, number: int) -> tuple[Any, Any]:
        return b"one %d" % number, b"other %d" % number

    def where(self) -> tuple[str, int]:
        """Where its clients find the server."""
        return self.server.where(self.PROTOCOL) if self.relay is None else self.relay.address

    def client(self, shape: str, **options: Any) -> Any:
        """A client that has not connected yet."""
        raise NotImplementedError

    async def take(self, client: Any, name: Any) -> Any:
        """Takes it, waiting if it has to."""
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
        """Whether the client tells that it was lost."""
        raise NotImplementedError

    def in_use(self, name: Any) -> int:
        """How much of it the server has given out. Asks through a client of its own."""
        raise NotImplementedError

    def look(self) -> None:
        """Makes the connection that in_use() asks through, and takes what waiting() waits for."""
        self.in_use(self.ONE)

    def close(self) -> None:
        """Ends what in_use() asks through."""

    def waiter(self, make: Callable[..., Any]) -> Any:
        """The client that waits. make: makes one."""
        return make()

    def waiting(self, client: Any) -> Callable[[], Any] | None:
        """Returns a call that waits for something that does not come before end_waits(); None if there is no such."""
        return None

    def end_waits(self) -> None:
        """Lets it come."""

    async def while_away(self, client: Any) -> None:
        """What the client does while nothing answers: it says so, at once."""
        try:
            await self.ask(client)
        except CounterdError:
            return
        raise AssertionError("a call succeeded although no server was there")

    async def in_child(self, client: Any, taken: Any) -> None:
        """Called in the child of a fork: checks what the child has of it, and leaves a block that it inherited."""

    async def lasts(self, client: Any, taken: Any) -> None:
        """Waits until the client has renewed it, if that is necessary."""

    async def when_gone(self, client: Any, taken: Any) -> None:
        """Called when its server was killed: checks that the client tells of the loss, if it already does."""

    async def when_back(self, client: Any, taken: Any) -> None:
        """Called when there is a server again: checks that the client tells of the loss, if it does not before."""

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
        """Whether the server has given out what the program has, after an interruption."""
        try:
            await self.ask(visit.client)
        except ConnectionLost:  # once, if anything was lost
            visit.has, visit.is_told = 0, True
        return self.in_use(self.ONE) == visit.has

    async def has_kept(self, visit: Visit, kept: Any) -> bool:
        """Whether the program still has what it took before the interruption."""
        return not await self.is_lost(visit.client, kept)

    async def works(self, client: Any) -> bool:
        """Takes and gives back once more. False if the client was just told of a loss, or cannot connect yet."""
        with contextlib.suppress(ConnectionLost):
            await self.give(client, await self.take(client, self.ONE))
            return True
        return False


class Visit:
    """What a use has: the client that is interrupted, and its Thing. has: how much the program knows that it has.

    another: a client like it, which the use may close.
    """

    def __init__(self, thing: Thing, shape: str, client: Any, another: Any) -> None:
        self.thing = thing
        self.shape = shape
        self.client = client
        self.another = another
        self.name = thing.ONE
        self.has = 0
        self.is_told = False  # of a loss
        self.prepared: Any = None  # by begin()

    @property
    def is_blocking(self) -> bool:
        return self.shape == BLOCKING

    @property
    def relay(self) -> Relay:
        """The connections of its clients."""
        assert self.thing.relay is not None
        return self.thing.relay

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        """Waits, in a way that suits the shape."""
        if self.is_blocking:
            wait_until(condition, what)
        else:
            await loops.until(condition, what)
