"""What a gatekeeper says to a proxy that asks about each request before it passes it on.

Stands beside the floors; needs aiohttp, which brings the requests. Their method counts for nothing, and no body is
read. The gate cannot tell which headers the proxy has written and which its client: the configuration of the proxy
sees to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from counterd.client.smockron._identify import REJECTED, identify_by, retry_after
from counterd.protocols.smockron.errors import Rejected

if TYPE_CHECKING:
    from collections.abc import Sequence

    from counterd.client.smockron import AsyncGatekeeper

# Where the path of the client's request is, if not in that of the request for the gate. The first is what Traefik and
# Caddy overwrite, so that no client of theirs can say another path in the second.
PATH_HEADERS = ("X-Forwarded-Uri", "X-Original-URI")


class Gate:
    """Answers: 200 for a request that passes, now or when it has waited; else the status, with Retry-After.

    gatekeeper: is not closed with the gate.
    identifiers: what tells requests apart: "header:NAME", "path" without what follows a ?, "client", who asks the gate.
    A request passes without a limit if headers or "client" are named and it has none of them; the first is logged.
    status: of the answer to a rejected request.
    """

    def __init__(self, gatekeeper: AsyncGatekeeper, identifiers: Sequence[str], status: int) -> None:
        self._gatekeeper = gatekeeper
        self._identify = identify_by(identifiers, _client, _path, _header)
        self._status = status

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """When it is cancelled, because the proxy has gone away, the request does not wait any more."""
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
    """None on a Unix socket."""
    return request.remote or None


def _path(request: web.BaseRequest) -> bytes:
    said = next((request.headers[name] for name in PATH_HEADERS if name in request.headers), request.raw_path)
    return said.partition("?")[0].encode("utf-8", "surrogateescape")


def _header(request: web.BaseRequest, name: str) -> bytes:
    return ", ".join(request.headers.getall(name, ())).encode("utf-8", "surrogateescape")
