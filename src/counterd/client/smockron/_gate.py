"""A gatekeeper for a proxy that asks about each request before the proxy forwards it.

Floor: side; needs aiohttp, which receives the requests. Their method has no effect, and no body is read.
The gate cannot know whether the proxy has written a header or the proxy's client: the configuration of the proxy has to
ensure that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from counterd.client.smockron._identify import REJECTED, identify_by, retry_after
from counterd.protocols.smockron.errors import Rejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from counterd.client.smockron import AsyncGatekeeper

# The headers that may have the path of the client's request; without them it is the path of the request to the gate.
# The first one comes first because Traefik and Caddy overwrite it, so a client cannot use the second to send another.
PATH_HEADERS = ("X-Forwarded-Uri", "X-Original-URI")


class Gate:
    """Answers 200 for a request that passes, at once or after its delay, else with the status and Retry-After.

    gatekeeper: the gate does not close it.
    identifiers: what is limited: "header:NAME", "path" (without the query), "client" (the address that asks the gate).
    A request passes without a limit if headers or "client" are named and it has none of them; the first is logged.
    status: of the reply to a rejected request.
    """

    def __init__(self, gatekeeper: AsyncGatekeeper, identifiers: Sequence[str], status: int) -> None:
        self._gatekeeper = gatekeeper
        self._identify = identify_by(identifiers, _client, _path, _header)
        self._status = status

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answers a request. It is cancelled if the proxy disconnects; then the request does not wait any more."""
        identifier = self._identify(request)
        if identifier is None:
            return web.Response()
        try:
            async with self._gatekeeper.admit(identifier):
                return web.Response()
        except Rejected as error:
            headers = {"Retry-After": retry_after(error.retry_after)}
            return web.Response(status=self._status, body=REJECTED, headers=headers, content_type="text/plain")


def _client(request: web.BaseRequest) -> str | None:
    """Returns None on a Unix socket."""
    return request.remote or None


def _path(request: web.BaseRequest) -> bytes:
    said = next((request.headers[name] for name in PATH_HEADERS if name in request.headers), request.raw_path)
    return said.partition("?")[0].encode("utf-8", "surrogateescape")


def _header(request: web.BaseRequest, name: str) -> bytes:
    return ", ".join(request.headers.getall(name, ())).encode("utf-8", "surrogateescape")
