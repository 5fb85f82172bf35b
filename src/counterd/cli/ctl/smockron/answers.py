"""A gatekeeper for a proxy that asks about each request before it forwards the request.

Floor 5 (ARCHITECTURE.md); needs aiohttp, which receives the proxy's requests. The method of the proxy's request has no
effect, and its body is not read. The gate cannot know whether the proxy or the proxy's client has written a header.
The configuration of the proxy has to ensure that only the proxy writes this header.
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
    """Answers a request that passes with status 200, immediately or after its delay. Answers a rejected request with
    the configured status and Retry-After.

    gatekeeper: the gatekeeper, which the gate does not close.
    identifiers: what identifies the sender of a request: "header:NAME", "path" (without the query), "client" (the
    address that asks the gate). If headers or "client" are named, and a request has none of them, it passes without a
    limit; the first such request is logged.
    status: the status of the reply to a rejected request.
    """

    def __init__(self, gatekeeper: AsyncGatekeeper, identifiers: Sequence[str], status: int) -> None:
        self._gatekeeper = gatekeeper
        self._identify = identify_by(identifiers, _client, _path, _header)
        self._status = status

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """Answers a request of the proxy.

        The call is cancelled if the proxy disconnects; then the request no longer waits.
        """
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
    """Returns the address that asks the gate, or None on a Unix socket."""
    return request.remote or None


def _path(request: web.BaseRequest) -> bytes:
    said = next((request.headers[name] for name in PATH_HEADERS if name in request.headers), request.raw_path)
    return said.partition("?")[0].encode("utf-8", "surrogateescape")


def _header(request: web.BaseRequest, name: str) -> bytes:
    return ", ".join(request.headers.getall(name, ())).encode("utf-8", "surrogateescape")
