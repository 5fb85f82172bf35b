"""What a gatekeeper says to a proxy that asks about each request before it passes it on.

Stands beside the floors; needs aiohttp, which brings the requests. Their method counts for nothing, and no body is
read. Nobody here can tell what in them the proxy has written and what its client: the proxy's configuration sees to it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from aiohttp import web

from counterd.client._gatekeeping import Verdict
from counterd.client._identify import REJECTED, identify_by, retry_after

if TYPE_CHECKING:
    from collections.abc import Sequence

    from counterd.client.smockron import AsyncGatekeeper

HEADER = "header:"
# Where the path of the client's request is, if not in that of the request for the gate. The first is what Traefik and
# Caddy overwrite, so that no client of theirs can say another path in the second.
PATH_HEADERS = ("X-Forwarded-Uri", "X-Original-URI")

log = logging.getLogger("counterd.client.smockron")


class Gate:
    """Answers: 200 for a request that passes, now or when it has waited; else the status, with Retry-After.

    gatekeeper: which whoever made it closes.
    identifiers: what tells requests apart: "header:NAME", "path" without what follows a ?, "client", who asks the gate.
    Of a request that has none of the headers nobody knows whose it is: it passes.
    status: of an answer that is no.
    """

    def __init__(self, gatekeeper: AsyncGatekeeper, identifiers: Sequence[str], status: int) -> None:
        self._gatekeeper = gatekeeper
        self._identify = identify_by(identifiers, _client, _path, _header)
        self._headers = [name.removeprefix(HEADER) for name in identifiers if name.startswith(HEADER)]
        self._status = status
        self._has_warned = False

    async def answer(self, request: web.BaseRequest) -> web.Response:
        """When it is cancelled, because the proxy has gone away, the request does not wait any more."""
        identifier = self._whose(request)
        if identifier is None:
            return web.Response()
        decision = self._gatekeeper.decide(identifier)
        if decision.verdict is Verdict.REJECT:
            headers = {"Retry-After": retry_after(decision.delay_s)}
            return web.Response(status=self._status, body=REJECTED, headers=headers, content_type="text/plain")
        if decision.verdict is Verdict.DELAY:
            try:
                await asyncio.sleep(decision.delay_s)
            finally:
                self._gatekeeper.left(decision)
        return web.Response()

    def _whose(self, request: web.BaseRequest) -> bytes | None:
        if not self._headers or any(request.headers.get(name) for name in self._headers):
            return self._identify(request)
        if not self._has_warned:
            self._has_warned = True
            missing = " or ".join(self._headers)
            log.warning("a request without %s passes, and so does each that comes like it", missing)
        return None


def _client(request: web.BaseRequest) -> str | None:
    """None on a Unix socket."""
    return request.remote or None


def _path(request: web.BaseRequest) -> bytes:
    said = next((request.headers[name] for name in PATH_HEADERS if name in request.headers), request.raw_path)
    return said.partition("?")[0].encode("utf-8", "surrogateescape")


def _header(request: web.BaseRequest, name: str) -> bytes:
    return ", ".join(request.headers.getall(name, ())).encode("utf-8", "surrogateescape")
