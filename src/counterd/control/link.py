"""A connection to a Redis server: one of those through which daemons share limits, or the one with a store's state.

Floor 4 (ARCHITECTURE.md). hiredis writes and reads the protocol (docs/decisions/0018-cluster-client.md); the extra
`redis` installs it. A connection sends each call at once, and does not wait for the answers to earlier calls. Servers
answer in order. A connection is cut, and all its calls fail, if an answer lacks for PATIENCE_S or is larger than its
Bounds, if its bytes are no reply, or if they are a reply to no call: later answers would be taken for those to other
calls. No error has the password in it.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from counterd.cluster.lease_protocol import LIBRARY, library, script, shown
from counterd.control.resp_size_guard import LARGEST, Bounds, InvalidReply, RespSizeGuard

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

PATIENCE_S = 1.0  # for an answer, and for a connection
# An answer but that to CLUSTER SLOTS. Elements: ZRANGE has two for each daemon; HSCAN has two for each of some 1,000
# names. Bytes: a call is told up to 32 names of 64 KiB each.
MOST = Bounds(1 << 22, 1 << 14)
AT_ONCE = 1 << 15  # bytes: 8,192 elements, which take about 2 ms
DIGEST = re.compile(rb"[0-9a-f]{40}")  # of a script


class Place(NamedTuple):
    """The address of a server. A port of -1 means that `host` is the path of a Unix socket."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}" if self.port >= 0 else self.host


class Login(NamedTuple):
    """How a connection is made. user: "" for the default user. password: "" if servers ask for none. tls: or None.
    database: its number.
    """

    user: str
    password: str
    tls: ssl.SSLContext | None
    database: int = 0


class LinkFailed(Exception):
    """A server cannot be reached or does not do what it is asked. str() says why, for people."""


class OddAnswer(LinkFailed):
    """An answer that no Redis server gives to a command."""

    def __init__(self, asked: str, found: Any) -> None:
        super().__init__(f"invalid reply to {asked}: {shown(found)}")


class Link(asyncio.Protocol):
    """A connection to a server. connect() makes it.

    lost: called with the link when it ends. most: the size of an answer. run: the ID of the server's process;
    identify() sets it. command: what calls of the authority begin with; prepare() sets it. is_open: False once it has
    ended.
    """

    def __init__(self, place: Place, lost: Callable[[Link], None], most: Bounds = MOST) -> None:
        import hiredis  # noqa: PLC0415 - only in an extra; the check of the configuration has found it installed

        self.place = place
        self.run = ""
        self.command: tuple[str, str] = ("", "")
        self.is_open = True
        self.why = ""
        self._lost = lost
        self._pack: Callable[[tuple[Any, ...]], bytes] = hiredis.pack_command
        self._most = most
        self._guard = RespSizeGuard(most)
        self._reader = hiredis.Reader()  # returns False if there is no whole answer
        self._protocol_error = hiredis.ProtocolError
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._waiting: deque[tuple[Callable[[Any], None], float]] = deque()  # with the time when patience ends
        self._timer: asyncio.TimerHandle | None = None

    def send(self, then: Callable[[Any], None], *words: bytes | str | int) -> None:
        """Sends a command. Calls then() with the answer: an exception if the server refuses it, or if none comes.

        Calls then() only after send() has returned.
        """
        if not self.is_open:
            self._loop.call_soon(then, LinkFailed(self.why))
            return
        self._waiting.append((then, self._loop.time() + PATIENCE_S))
        self._transport.write(self._pack(words))
        if self._timer is None:
            self._timer = self._loop.call_later(PATIENCE_S, self._look)

    async def ask(self, *words: bytes | str | int) -> Any:
        """Sends a command and returns its answer. Raises LinkFailed."""
        answer = self._loop.create_future()
        self.send(lambda found: None if answer.done() else answer.set_result(found), *words)
        found = await answer
        if not self.is_open:  # it may have ended after the answer, which the caller would take for a sign of life
            raise LinkFailed(self.why)
        if isinstance(found, Exception):
            raise LinkFailed(str(found))
        return found

    async def ask_for_slots(self) -> Any:
        """Returns the answer to CLUSTER SLOTS, which can be larger than others. Raises LinkFailed."""
        self._guard.most = LARGEST
        try:
            return await self.ask("CLUSTER", "SLOTS")
        finally:
            self._guard.most = self._most

    async def log_in(self, login: Login) -> None:
        """Says the password, and chooses the database. Raises LinkFailed, without the password: some servers repeat
        what they do not know."""
        if login.user or login.password:
            words = (login.user, login.password) if login.user else (login.password,)
            try:
                found = await self.ask("AUTH", *words)
            except LinkFailed as error:
                said = str(error)
                raise LinkFailed(said.replace(login.password, "***") if login.password else said) from None
            if found != b"OK":
                raise LinkFailed("invalid reply to AUTH")
        if login.database and (found := await self.ask("SELECT", login.database)) != b"OK":
            raise OddAnswer("SELECT", found)

    async def identify(self) -> None:
        """Learns the ID of the server's process. Raises LinkFailed."""
        told = await self.ask("INFO", "server")
        if not isinstance(told, bytes):
            raise OddAnswer("INFO", told)
        run = re.search(rb"\nrun_id:(\w+)", told)
        if run is None:
            raise LinkFailed("does not tell its run_id")
        self.run = run[1].decode()

    async def load(self, script: bytes) -> str:
        """Loads a script into the server. Returns the digest by which calls name it. Raises LinkFailed."""
        digest = await self.ask("SCRIPT", "LOAD", script)
        if not isinstance(digest, bytes) or not DIGEST.fullmatch(digest):
            raise OddAnswer("SCRIPT LOAD", digest)
        return digest.decode()

    async def prepare(self) -> None:
        """Loads the authority into the server, which has to be a master. Raises LinkFailed."""
        try:
            await self.ask("FUNCTION", "LOAD", library())
        except LinkFailed as error:
            if "unknown command" in str(error).lower():  # before Redis 7
                self.command = ("EVALSHA", await self.load(script()))
                return
            if "already exists" not in str(error):
                raise
        self.command = ("FCALL", LIBRARY)

    def cut(self, why: str) -> None:
        """Ends the connection at once. All its calls fail."""
        if self.is_open:
            self.is_open = False
            self.why = why
            self._transport.abort()
            if self._timer is not None:
                self._timer.cancel()
            self._lost(self)
            while self._waiting:
                self._waiting.popleft()[0](LinkFailed(why))

    # ---- called by the loop ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if len(data) > AT_ONCE:  # the loop would read on while bytes come
            self._transport.pause_reading()
            self._loop.call_soon(self._resume)
        try:
            self._guard.read(data)
            self._reader.feed(data)
            while self._waiting and (found := self._reader.gets()) is not False:
                self._waiting.popleft()[0](found)
        except (InvalidReply, self._protocol_error) as error:
            self.cut(f"sent an invalid reply: {error}")
        if not self._waiting and self._reader.has_data():
            self.cut("sent an unsolicited reply")

    def connection_lost(self, error: Exception | None) -> None:
        self.cut(_words(error) if error else "closed the connection")

    def _resume(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    def _look(self) -> None:
        self._timer = None
        if self._waiting:
            left = self._waiting[0][1] - self._loop.time()
            if left > 0:
                self._timer = self._loop.call_later(left, self._look)
            else:
                self.cut(f"no answer for {PATIENCE_S:g} s")


def _words(error: Exception) -> str:
    """Returns an error for people, without its number."""
    return getattr(error, "strerror", None) or str(error)


async def connect(place: Place, login: Login, lost: Callable[[Link], None], most: Bounds = MOST) -> Link:
    """Connects to a server and logs in. Raises LinkFailed."""
    loop = asyncio.get_running_loop()
    make = functools.partial(Link, place, lost, most)
    try:
        making: Any = (
            loop.create_unix_connection(make, place.host)
            if place.port < 0
            else loop.create_connection(make, *place, ssl=login.tls)
        )
        link: Link = (await asyncio.wait_for(making, PATIENCE_S))[1]
    except asyncio.TimeoutError:
        raise LinkFailed(f"no connection within {PATIENCE_S:g} s") from None
    except (OSError, ValueError, OverflowError, RuntimeError) as error:
        # OSError: also those of TLS. ValueError, OverflowError: no such host name or port can be. RuntimeError: of
        # uvloop, when the connection ends while it is made.
        raise LinkFailed(_words(error)) from None
    try:
        await link.log_in(login)
    except BaseException as error:
        link.cut(str(error))
        raise
    return link
