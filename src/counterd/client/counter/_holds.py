"""Holds and Takes of the counter protocol: written once, as step machines, for threads and for asyncio.

Floor: side (ARCHITECTURE.md). No I/O.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from counterd.client._connection import NotSent
from counterd.client._entering import Entering
from counterd.client._holding import NO_LOSS, RAISE, REACQUIRE, Held
from counterd.client._steps import CALL, CONNECT, RELEASE
from counterd.client.counter._taking import NOT_TAKEN
from counterd.errors import ConnectionLost, CounterdError, NotFound
from counterd.protocols.counter import wire

if TYPE_CHECKING:
    from collections.abc import Sequence

    from counterd.client._steps import Steps
    from counterd.client.counter._asked import Asked
    from counterd.client.counter._commands import Commands
    from counterd.client.counter._taking import AskedItems
    from counterd.protocols.counter.wire import Grant

log = logging.getLogger("counterd.client.counter")


class Has:
    """What a hold has while its block runs."""

    __slots__ = ("grant", "held", "link")

    def __init__(self, link: Any, held: Sequence[Held], grant: Grant | None = None) -> None:
        self.link = link
        self.held = held
        self.grant = grant


class Holding(Entering):
    """The base of Hold and Taken.

    A call that is interrupted, at whatever point, leaves no permits behind: what a connection has granted is among its
    `holds` from the moment of the grant, and disown() gives it back. Units of rates that it was granted stay taken.
    """

    KIND: str  # for people

    def __init__(self, client: Commands, asked: Any) -> None:
        self._client = client
        self._asked = asked
        self._entered = threading.Lock()  # locked from entering to leaving; nobody waits for it
        self._has: Has | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._asked}>"

    @property
    def lost(self) -> bool:
        """Whether the connection and the permits were lost while the block runs. A blocking client checks its socket; a
        client for asyncio says what the event loop knows."""
        has = self._last()
        return has is not None and not has.link.is_alive()

    def raise_if_lost(self) -> None:
        """Raises ConnectionLost if `lost` is true. Call this before any action that needs the permits."""
        has = self._last()
        if has is not None and not has.link.is_alive():
            link = has.link.current()
            raise self._asked.lost(link.where, link.closed)

    def _last(self) -> Has | None:
        """Returns what `lost` is about."""
        return self._has

    def _notify_of_loss(self) -> bool:
        """Called when the permits were lost. Returns whether to acquire them again."""
        return False

    def _claim(self) -> None:
        """Called before the steps of entering begin."""
        if not self._entered.acquire(blocking=False):
            raise RuntimeError(f"this {self.KIND} is already in use: make another one")
        self._is_used = True

    def _throw_away(self) -> None:
        """Called when entering or leaving has failed, maybe before the steps began, or after they ended."""
        has, self._has = self._has, None
        if has is not None:
            has.link.disown(*has.held)
        if self._entered.locked():
            self._entered.release()

    # ---- steps ----

    def _entering(self) -> Steps[None]:
        raise NotImplementedError

    def _enter(self, held: Sequence[Held], steps: Steps[Has]) -> Steps[None]:
        try:
            self._has = has = yield from steps
            _tell_if_lost(self._client, has.link)
        except BaseException:  # an interrupt may have come after the grant
            self._client._disown(held)
            raise

    def _leave(self, kind: type[BaseException] | None) -> Steps[None]:
        client = self._client
        has = None
        try:
            with client._swapping:
                has, self._has = self._has, None
            assert has is not None
            # GeneratorExit may come in the middle of another call, and a coroutine that is destroyed cannot wait.
            if kind is not GeneratorExit and has.held:
                yield from _releasing(has.link, has.held)
        except ConnectionLost:
            assert has is not None
            link = has.link.current()
            if kind is None and self._asked.on_lost == RAISE and link.closed not in NO_LOSS:
                raise self._asked.lost(link.where, link.closed) from None
        except CounterdError:
            if kind is None:
                raise
        finally:
            if has is not None:
                has.link.disown(*has.held)  # what is left of it
                self._entered.release()
                for held in has.held:
                    client._wait_queues.wake(held.name)


class HoldSteps(Holding):
    """The steps of Hold."""

    KIND = "hold"
    _asked: Asked

    def _entering(self) -> Steps[None]:
        asked = self._asked
        held = (Held(self, asked.name, asked.resources),)
        return self._enter(held, self._taken(held))

    def _taken(self, held: tuple[Held]) -> Steps[Has]:
        return Has((yield from self._client._held(self._asked, *held)), held)

    def _notify_of_loss(self) -> bool:
        on_lost = self._asked.on_lost
        if callable(on_lost):
            try:
                on_lost(self)
            except self._client._CAUGHT:
                log.exception("the function on_lost of %s failed", self._asked)
        return on_lost == REACQUIRE

    def _acquired_again(self) -> Steps[None]:
        """Acquires lost permits again, unless the block was left meanwhile."""
        asked, before = self._asked, self._has
        if before is None or before.link.is_alive():  # it was left, and maybe entered again
            return
        held = Held(self, asked.name, asked.resources)
        try:
            link = yield from self._client._held_again(asked, held)
            with self._client._swapping:
                if self._has is before:
                    self._has = Has(link, (held,))
            _tell_if_lost(self._client, link)
        finally:
            if self._has is None or held not in self._has.held:
                self._client._disown((held,))
                self._client._wait_queues.wake(asked.name)


class TakenSteps(Holding):
    """The steps of Taken."""

    KIND = "Take"
    _asked: AskedItems

    def __init__(self, client: Commands, asked: AskedItems) -> None:
        super().__init__(client, asked)
        self._taken_before: Has | None = None  # the last grant, which can be settled after the block

    def _last(self) -> Has | None:
        return self._taken_before  # settle() needs the connection after the block too

    @property
    def number(self) -> int:
        """The number of the grant.

        The number is higher than the number of each earlier grant of the server, so it can be used as a fencing token.
        """
        return self._granted().number

    def _check_taken(self) -> None:
        if self._has is None:
            raise RuntimeError(NOT_TAKEN)

    def _granted(self) -> Grant:
        if self._taken_before is None:
            raise RuntimeError(NOT_TAKEN)
        grant = self._taken_before.grant
        assert grant is not None
        return grant

    def _entering(self) -> Steps[None]:
        held = [Held(self, item.name, item.amount) for item in self._asked.permits]
        yield from self._enter(held, self._taken(held))

    def _taken(self, held: Sequence[Held]) -> Steps[Has]:
        link, grant = yield from self._client._take_items(self._asked, held)
        self._taken_before = Has(link, held, grant)
        return self._taken_before

    def _settling(self, name: str | bytes, used: int) -> Steps[None]:
        found = self._asked.rate(name)
        request = (wire.settle, self._granted().number, found, used)
        assert self._taken_before is not None
        link = self._taken_before.link.current()
        try:
            yield CALL, link, *request
        except ConnectionLost as error:
            if not (yield from self._client._resumed(link)):
                raise
            try:
                yield CALL, (yield CONNECT, False), *request
            except NotFound:
                if isinstance(error, NotSent):
                    raise  # else it may have been settled


def _tell_if_lost(client: Commands, link: Any) -> None:
    """Called when a hold has its permits: nobody has told it if the connection was lost a moment before."""
    link = link.current()
    if link.closed and not link.may_resume():
        client._on_end(link)


def _releasing(link: Any, held: Sequence[Held]) -> Steps[None]:
    """Gives back the permits that holds have on this connection. If the steps are interrupted, or the connection was
    lost and can be resumed, disown() gives back the rest."""
    was_open = link.is_open()
    try:
        yield RELEASE, link, held
    except ConnectionLost:
        if link.successor is not None:
            yield from _releasing(link.successor, held)
        elif not link.may_resume() and not link.has_read_all(was_open):
            raise
