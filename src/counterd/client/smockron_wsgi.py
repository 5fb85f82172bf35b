"""A gatekeeper in front of a WSGI application: `app = Middleware(app, gatekeeper)`.

Floor: side (ARCHITECTURE.md); needs no framework.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from counterd.client.smockron._gatekeeping import Verdict
from counterd.client.smockron._identify import REJECTED, STATUS, identify_by, retry_after

if TYPE_CHECKING:
    from counterd.client.smockron import Gatekeeper
    from counterd.client.smockron._identify import Identifier

__all__ = ["Middleware"]

StartResponse = Callable[..., Any]
App = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]


class Middleware:
    """An application behind a gatekeeper.

    A delayed request sleeps in its thread, because WSGI has no other way to wait. So set the gatekeeper's max_delayed
    to at most the number of the server's threads. If the server has replaced time.sleep() (gevent, eventlet), the
    replacement is called. The middleware does not notice a client that disconnects during the delay. A rejected request
    gets the status 503 and Retry-After.

    app: the application.
    gatekeeper: the gatekeeper, which the middleware does not close.
    identifier: what identifies the sender of a request; each value has its own limit. The identifier can be "client"
    (the client's address as the server reports it), "path", "header:NAME", a list of several of these, or a function of
    the environment. The function returns None to let a request pass. If "client" or headers are named, and a request
    has none of them, the request passes without a limit; the first such request is logged. On a Unix socket most
    servers report no "client". An identifier of more than 4,096 bytes is sent as its SHA-256.
    domain: the domain, if it is not the gatekeeper's default.
    log_info: a function of the environment that returns a text for the master's log, at most 1,024 bytes; counterd
    ignores it.
    sleep: a function that waits for a number of seconds, in place of time.sleep().

    A client can write any value into a header. Behind a proxy, "client" is the proxy's address unless the server is
    configured to trust the proxy's headers.
    """

    def __init__(
        self,
        app: App,
        gatekeeper: Gatekeeper,
        identifier: Identifier = "client",
        *,
        domain: str | bytes | None = None,
        log_info: Callable[[dict[str, Any]], str | bytes] | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._app = app
        self._gatekeeper = gatekeeper
        self._domain = domain
        self._log_info = log_info
        self._identify = identify_by(identifier, _client, _path, _header)
        self._sleep = sleep

    def __call__(self, environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        """Serves a request, as WSGI defines."""
        identifier = self._identify(environ)
        if identifier is None:
            return self._app(environ, start_response)
        decision = self._gatekeeper.decide(identifier, self._domain, self._log_info(environ) if self._log_info else b"")
        if decision.verdict is Verdict.REJECT:
            headers = [
                ("Content-Type", "text/plain; charset=utf-8"),
                ("Content-Length", str(len(REJECTED))),
                ("Retry-After", retry_after(decision.delay_s)),
            ]
            start_response(f"{STATUS} Service Unavailable", headers)
            return [REJECTED]
        if decision.verdict is Verdict.DELAY:
            try:
                (self._sleep or time.sleep)(decision.delay_s)
            finally:
                self._gatekeeper.gave_up(decision)
        return self._app(environ, start_response)


def _client(environ: dict[str, Any]) -> str | None:
    """Returns the client's address, or None if the server does not know it, as on a Unix socket."""
    return environ.get("REMOTE_ADDR") or None


def _path(environ: dict[str, Any]) -> bytes:
    """Returns the path in bytes. In WSGI's strings each character stands for one byte."""
    return (str(environ.get("SCRIPT_NAME", "")) + str(environ.get("PATH_INFO", ""))).encode("latin-1")


def _header(environ: dict[str, Any], name: str) -> bytes:
    key = name.upper().replace("-", "_")
    key = key if key in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{key}"
    return str(environ.get(key, "")).encode("latin-1")
