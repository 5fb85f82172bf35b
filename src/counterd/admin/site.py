"""Serves the paths of the admin endpoint: reads the request, asks the daemon, writes the answer.

Floor: side (ARCHITECTURE.md). No path names a file, and the body of a request is never read. Names are bytes. In
requests and answers, names are percent-encoded. In a question to the daemon, a name is a string with one character for
each byte. The answer of the daemon is JSON, and becomes the body of the response as it is.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import json
import re
from importlib import resources
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

from aiohttp import web

from counterd.admin import metrics
from counterd.admin.events import RETRY_MS, Hub
from counterd.admin.guard import Guard
from counterd.admin.peer import PLAIN, Peer, Peers, let_in
from counterd.ipc import Refused
from counterd.tables import ROWS_MAX

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Coroutine, Hashable, Mapping, Sequence

    from counterd.admin.link import Link
    from counterd.contract import ProtocolSpec

    Handler = Callable[[web.BaseRequest, dict[str, str]], Awaitable[web.StreamResponse]]
    Changer = Callable[[str, str], Awaitable[web.StreamResponse]]  # gets the method, and the path after its beginning

LIVE_PATIENCE_S = 1.0  # a probe of an orchestrator must get an answer, even a negative one
ASK_PATIENCE_S = 9.0  # a request asks the daemon at most one question, so it is answered within this time
PARAMETERS_MAX = 16
READING = ("GET", "HEAD")

HEADERS = {
    **PLAIN,
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


class Site:
    """The paths of the admin endpoint. link: the connection to the daemon. specs: the installed protocols."""

    def __init__(self, link: Link, specs: Sequence[ProtocolSpec]) -> None:
        self.peers = Peers(Guard())
        self._link = link
        self._specs = specs
        self._asking: dict[Hashable, asyncio.Task[bytes]] = {}  # questions whose answers several requests may share
        self._hub = Hub(self._stats, self._rows)
        self._page = resources.files("counterd.admin").joinpath("dashboard.html").read_bytes()
        self._page_policy = page_policy(self._page.decode())
        self._handlers: dict[str, Handler] = {
            "/": self._on_page,
            "/config": self._on_config,
            "/connections": self._on_connections,
            "/events": self._on_events,
            "/livez": self._on_livez,
            "/metrics": self._on_metrics,
            "/readyz": self._on_readyz,
            "/stats": self._on_stats,
        }
        # The beginnings of paths whose requests change something, with their methods.
        self._changers: dict[str, tuple[tuple[str, ...], Changer]] = {
            "/connections/": (("DELETE",), self._on_connection),
            "/drain/": (("DELETE", "PUT"), self._on_drain),
        }
        self._tables = {f"/{table.name}": table for spec in specs for table in spec.tables()}

    def configure(self, settings: Mapping[str, Any]) -> None:
        """Applies the settings that the daemon has sent."""
        self.peers.guard = Guard.of(settings)

    async def serve(self, listening: socket.socket) -> None:
        """Serves all clients that connect to a listening socket, until the task is cancelled."""
        loop = asyncio.get_running_loop()
        manager = web.Server(self._handle)
        await let_in(listening, self.peers, lambda: Peer(self.peers, manager, loop))

    # ---- every request ----

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        peer = request.protocol
        assert isinstance(peer, Peer)
        peer.begin()
        try:
            response = await self._answer(request)
        except Refused as error:
            response = refused(error.status, str(error))
        except ConnectionError:
            raise  # the client has closed the connection
        except Exception as error:  # noqa: BLE001 - a bug must cost only one answer; the daemon logs it
            self._link.note(f"{request.method} {request.path}: {type(error).__name__}: {error}")
            response = refused(500, "internal error")
        finally:
            peer.end()
        if not response.prepared:
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            if self.peers.is_awaited:
                response.force_close()
        return response

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        self.peers.guard.check(request.method, request.headers.getall("Host", []), request.headers)
        if request.body_exists:
            raise Refused(413, "requests must not have a body")
        path, _, query = request.raw_path.partition("?")
        handler = self._handlers.get(path) or (self._on_table if path in self._tables else None)
        beginning = next((each for each in self._changers if path.startswith(each)), "")
        if handler is None and not beginning:
            raise Refused(404, "there is nothing at this path")
        methods, change = self._changers.get(beginning, (READING, None))
        if request.method not in methods:
            response = refused(405, "this path does not allow this method")
            response.headers["Allow"] = ", ".join(methods)
            return response
        if change is not None:
            return await change(request.method, unquote(path.removeprefix(beginning), "latin-1"))
        assert handler is not None
        return await handler(request, parameters_of(query))

    # ---- each path ----

    async def _on_page(self, request: web.BaseRequest, parameters: dict[str, str]) -> web.StreamResponse:
        policy = {"Content-Security-Policy": self._page_policy}
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=policy)

    async def _on_stats(self, request: web.BaseRequest, parameters: dict[str, str]) -> web.StreamResponse:
        return answered(await self._stats())

    async def _on_metrics(self, request: web.BaseRequest, parameters: dict[str, str]) -> web.StreamResponse:
        encoder, content_type = metrics.negotiate(",".join(request.headers.getall("Accept", [])))
        body = await self._share(("metrics", content_type), lambda: self._render(encoder))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _on_livez(self, request: web.BaseRequest, parameters: dict[str, str]) -> web.StreamResponse:
        await self._link.ask("ping", LIVE_PATIENCE_S)
        return web.Response(text="ok\n")

    async def _on_readyz(self, request: web.BaseRequest, parameters: dict[str, str]) -> web.StreamResponse:
        state = json.loads(await self._link.ask("ping", LIVE_PATIENCE_S))["state"]
        return web.Response(status=200 if state == "ready" else 503, text=f"{state}\n")

    async def _on_config(self, request: web.BaseRequest, parameters: dict[str, str]) -> web.StreamResponse:
        return answered(await self._share("config", lambda: self._link.ask("config", ASK_PATIENCE_S)))

    async def _on_table(self, request: web.BaseRequest, parameters: dict[str, str]) -> web.StreamResponse:
        return answered(await self._rows(request.raw_path.partition("?")[0][1:], parameters))

    async def _on_connections(self, request: web.BaseRequest, parameters: dict[str, str]) -> web.StreamResponse:
        key = ("connections", *sorted(parameters.items()))
        found = self._share(key, lambda: self._link.ask("connections", ASK_PATIENCE_S, parameters=parameters))
        return answered(await found)

    async def _on_connection(self, method: str, given: str) -> web.StreamResponse:
        return answered(await self._link.ask("close", ASK_PATIENCE_S, connection=given))

    async def _on_drain(self, method: str, given: str) -> web.StreamResponse:
        return answered(await self._link.ask("drain", ASK_PATIENCE_S, protocol=given, on=method == "PUT"))

    async def _on_events(self, request: web.BaseRequest, parameters: dict[str, str]) -> web.StreamResponse:
        if request.method == "HEAD":
            raise Refused(405, "a stream does not support HEAD")
        table = parameters.pop("table", None)
        if table is None and parameters:
            raise Refused(400, "these parameters need the parameter table")
        if table is not None:
            try:
                await self._rows(table, parameters)  # reports invalid parameters before the stream begins
            except Refused as error:
                if error.status != 503:  # 503: the daemon is busy; the stream asks again
                    raise
        peer = request.protocol
        assert isinstance(peer, Peer)
        with self._hub.listen(table, parameters, peer.host, peer.cut) as listener:
            response = web.StreamResponse(headers={**HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
            await response.prepare(request)
            await response.write(f"retry: {RETRY_MS}\n\n".encode())
            while not self._link.ended.is_set():
                await response.write(await listener.next())
        return response

    # ---- asking the daemon ----

    async def _share(self, key: Hashable, ask: Callable[[], Coroutine[Any, Any, bytes]]) -> bytes:
        """Returns the result of ask().

        If the same question was already asked and is not answered yet, waits for that answer.
        """
        if key not in self._asking:

            def done(asking: asyncio.Task[bytes]) -> None:
                del self._asking[key]
                asking.exception()  # marks the error as handled: perhaps no request waits for it any more

            self._asking[key] = asyncio.create_task(ask())
            self._asking[key].add_done_callback(done)
        return await asyncio.shield(self._asking[key])

    async def _stats(self) -> bytes:
        return await self._share("figures", lambda: self._link.ask("figures", ASK_PATIENCE_S))

    async def _render(self, encoder: metrics.Encoder) -> bytes:
        """Renders the metrics for Prometheus.

        If the protocol of a table is not enabled, or the daemon is busy, the table counts as empty.
        """
        names = [table.name for table in self._tables.values() if table.metrics]

        async def rows_of(name: str) -> Any:
            try:
                return json.loads(await self._rows(name, {"limit": str(ROWS_MAX)}))["rows"]
            except Refused:
                return []

        stats, *rows = await asyncio.gather(self._stats(), *map(rows_of, names))
        return metrics.encode(json.loads(stats), self._specs, dict(zip(names, rows, strict=True)), encoder)

    async def _rows(self, name: str, parameters: Mapping[str, str]) -> bytes:
        key = (name, *sorted(parameters.items()))
        ask = functools.partial(self._link.ask, "table", ASK_PATIENCE_S, table=name, parameters=parameters)
        return await self._share(key, ask)


def parameters_of(query: str) -> dict[str, str]:
    """Returns the parameters in a query, as strings with one character for each byte (latin-1). Raises Refused."""
    octets = query.encode("utf-8", "surrogateescape").decode("latin-1")  # bytes that are not percent-encoded
    try:
        # The two True: blank values are kept, and parsing is strict, so it would refuse an empty query.
        pairs = parse_qsl(octets, True, True, "latin-1", max_num_fields=PARAMETERS_MAX) if octets else []
    except ValueError as error:
        raise Refused(400, f"invalid query: {error}") from None
    parameters = dict(pairs)
    if len(parameters) != len(pairs):
        raise Refused(400, "a parameter occurs twice")
    return parameters


def answered(answer: bytes) -> web.Response:
    return web.Response(body=answer, content_type="application/json")


def refused(status: int, text: str) -> web.Response:
    """Makes a response that refuses the request.

    The connection is closed after this response, even if further requests have been received.
    """
    response = web.Response(status=status, body=json.dumps({"error": text}).encode(), content_type="application/json")
    if status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if status == 503:
        response.headers["Retry-After"] = "1"
    response.force_close()
    return response


def page_policy(page: str) -> str:
    """Returns a Content-Security-Policy that permits only the scripts and styles in the page itself."""

    def hashes(tag: str) -> str:
        inline = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", page, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inline)
        return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
