"""The admin process's end of the socket to the daemon. Each question has a number, and its answer has the same number.

Floor: side (ARCHITECTURE.md), without HTTP. The frames on this socket are those of ipc.py. Their bodies are:
    child to daemon   {"id": 1, "ask": "figures", ...}  and, about itself, {"note": "what went wrong"}
    daemon to child   ID 200 ANSWER, in JSON, which HTTP clients get as it is; or ID STATUS TEXT, an error
                      0 200 SETTINGS, in JSON, first of all, and after each reload
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from counterd.ipc import SETTINGS, Frames, Refused, frame

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

# A question that waits costs the child a few hundred bytes. HTTP can have 64 questions waiting, the event streams 17.
ASKED_MAX = 256


class Link(asyncio.Protocol):
    """The connection to the daemon.

    on_settings: called with the settings whenever the daemon sends them. ended: set when the daemon has ended.
    """

    def __init__(self, on_settings: Callable[[dict[str, Any]], None]) -> None:
        self.ended = asyncio.Event()
        self._on_settings = on_settings
        self._frames = Frames()
        self._transport: asyncio.WriteTransport | None = None
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._number = 0

    @classmethod
    async def open(cls, connected: socket.socket, on_settings: Callable[[dict[str, Any]], None]) -> Link:
        """Makes a Link over a socket that is connected to the daemon."""
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(on_settings), sock=connected)
        return link

    async def ask(self, what: str, patience: float, **arguments: Any) -> bytes:
        """Asks the daemon something, and returns the answer, which is JSON.

        Raises Refused if the daemon refuses, or with status 503 if the daemon does not answer within patience seconds.
        """
        if self._transport is None or len(self._asked) >= ASKED_MAX:
            raise Refused(503, "too many questions to the daemon are waiting")
        self._number += 1
        number = self._number
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._send({"id": number, "ask": what, **arguments})
        try:
            return await asyncio.wait_for(answer, patience)
        except asyncio.TimeoutError:
            raise Refused(503, f"the daemon has not answered within {patience:g} s") from None
        finally:
            del self._asked[number]

    def note(self, text: str) -> None:
        """Reports an error in this process to the daemon, which writes it to the log."""
        if self._transport is not None:
            self._send({"note": text})

    # ---- called by the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for body in self._frames.feed(data):
            self._receive(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.ended.set()

    # ---- inside ----

    def _send(self, message: dict[str, Any]) -> None:
        assert self._transport is not None
        self._transport.write(frame(json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogateescape")))

    def _receive(self, body: bytes) -> None:
        number, status, answer = body.split(b" ", 2)
        if int(number) == SETTINGS:
            self._on_settings(json.loads(answer))
            return
        waiting = self._asked.get(int(number))
        if waiting is None or waiting.done():  # the caller has stopped waiting
            return
        if status == b"200":
            waiting.set_result(answer)
        else:
            waiting.set_exception(Refused(int(status), answer.decode()))


async def keep_alive(link: Link, period: float) -> None:
    """Sends a ping in each period, because the daemon replaces a child that sends nothing."""
    while True:
        with contextlib.suppress(Refused):
            await link.ask("ping", period)
        await asyncio.sleep(period)
