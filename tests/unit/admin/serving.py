"""The site on a port of its own, with a dictionary in place of the daemon, and a client that can send any bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.admin.site import Site
from counterd.contract import ProtocolSpec
from counterd.ipc import Refused
from counterd.tables import Column, Figure, Table
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

SETTINGS: dict[str, Any] = {"token": "", "allow": [], "hosts": []}

PROTOCOL = ProtocolSpec(
    name="fake",
    default_port=1,
    settings=object,
    make_store=lambda *_: None,
    reload=lambda *_: None,
    figures=(
        Figure("things", "things", "gauge", "Things.", {"state": "new"}),
        Figure("made", "things_made_total", "counter", "Things that were made."),
    ),
    tables=lambda: (
        Table(
            "things",
            "Things.",
            (Column("name", "name", ""), Column("size", "integer", "")),
            ("size",),
            lambda *_: None,
            metrics=(Figure("size", "thing_size", "gauge", "How large one is."),),
        ),
    ),
)
STATS: dict[str, Any] = {
    "version": "1.2.3",
    "pid": 1,
    "uptime_seconds": 5.5,
    "state": "ready",
    "loop": {"lag_seconds": 0.0, "lag_max_seconds": 0.0},
    "process": {
        "cpu_seconds": 1.5, "resident_bytes": 1 << 20, "open_fds": 9, "max_fds": 99, "start_time_seconds": 1e9
    },
    "log": {"lines_lost": 3},
    "internal_errors": 4,
    "memory_errors": 5,
    "admin": {"restarts": 2},
    "protocols": {},
    "histograms": {"loop_lag_seconds": {"bounds": [0.001, 1.0], "counts": [5, 2, 1], "sum": 4.5}},
    "tables": [],
}  # fmt: skip


class Link:
    """The daemon that the site asks. answers: by question: an answer, a function of the arguments, or an error to
    raise.
    """

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.notes: list[str] = []
        self.answers: dict[str, Any] = {
            "figures": STATS,
            "ping": {"state": "ready"},
            "config": {"path": "/c", "values": []},
            "connections": {"rows": [], "next": None},
            "close": {"closed": "x"},
            "table": lambda: {"rows": [{"name": "a%20b%FF", "size": 1}], "total": 1},
        }

    async def ask(self, what: str, patience: float, **arguments: Any) -> bytes:
        self.asked.append((what, arguments))
        answer = self.answers[what]
        if isinstance(answer, Exception):
            raise answer
        return json.dumps(answer() if callable(answer) else answer).encode()

    def note(self, text: str) -> None:
        self.notes.append(text)


BUSY = Refused(503, "busy")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """One connection to the site, on which anything can be sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def head(self) -> tuple[int, dict[str, str]]:
        """Receives the next status and headers."""
        head = await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), PATIENCE)
        status, *lines = head.decode().strip().split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return int(status.split()[1]), {name.lower(): value for name, value in pairs}

    async def answer(self, has_body: bool = True) -> Answer:
        status, headers = await self.head()
        length = int(headers["content-length"]) if has_body else 0
        return Answer(status, headers, await asyncio.wait_for(self.reader.readexactly(length), PATIENCE))

    async def request(self, path: str, method: str = "GET", host: str = "localhost", **headers: str) -> Answer:
        """Makes a request, and returns the answer. In a keyword, `_` stands for the hyphen of a header's name."""
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        return await self.answer(has_body=method != "HEAD")

    async def ends(self) -> bytes:
        """Returns what arrives until the connection ends."""
        try:
            return await asyncio.wait_for(self.reader.read(), PATIENCE)
        except ConnectionError:
            return b""


async def until(condition: Callable[[], object]) -> None:
    """Waits until the condition is true."""

    async def look() -> None:
        while not condition():  # noqa: ASYNC110 - what changes it does not know of this
            await asyncio.sleep(0.001)

    await asyncio.wait_for(look(), PATIENCE)


class World:
    def __init__(self, site: Site, link: Link, port: int) -> None:
        self.site = site
        self.link = link
        self.port = port

    @contextlib.asynccontextmanager
    async def client(self, local: tuple[str, int] | None = None) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, local_addr=local)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def get(self, path: str, method: str = "GET", host: str = "localhost", **headers: str) -> Answer:
        """As Client.request, on its own connection."""
        async with self.client() as client:
            return await client.request(path, method, host, **headers)


def serve(scene: Callable[[World], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Runs a scene while the site serves, with these settings over those of a fresh install."""

    async def main() -> None:
        link: Any = Link()
        site = Site(link, [PROTOCOL])
        site.configure({**SETTINGS, **settings})
        with socket.create_server(("127.0.0.1", 0)) as listening:
            listening.setblocking(False)
            serving = asyncio.create_task(site.serve(listening))
            await asyncio.wait_for(scene(World(site, link, listening.getsockname()[1])), 3 * PATIENCE)
            await until(lambda: not site.peers.fresh and not site.peers.idle and not site.peers.busy)
            assert not serving.done()
            serving.cancel()

    asyncio.run(main())
