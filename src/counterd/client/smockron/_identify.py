"""How the middleware for web applications makes the identifier of a request.

Floor: side (ARCHITECTURE.md); shared by ASGI, WSGI and the gate, which read a request in different ways.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Union

from counterd.client._connection import as_bytes
from counterd.client.smockron._gatekeeping import log
from counterd.protocols.smockron.wire import IDENTIFIER_MAX

REJECTED = b"Rejected\n"  # the body of the reply
STATUS = 503
CLIENT, PATH, HEADER = "client", "path", "header:"
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # what the name of a header can be (RFC 9110, section 5.6.2)
WANTED = {CLIENT: "a client address"}

R = TypeVar("R")
Identify = Callable[[R], Union[str, bytes, None]]  # noqa: UP007 - is evaluated, by Python 3.10 too
# A name, several names, or a function of the request, which returns None to let the request pass.
Identifier = Union[str, Sequence[str], Callable[[Any], Union[str, bytes, None]]]  # noqa: UP007


def identify_by(
    identifier: Identifier, client: Identify[R], path: Identify[R], header: Callable[[R, str], str | bytes]
) -> Callable[[R], bytes | None]:
    """Returns a function that returns the identifier of a request. Raises ValueError for an unknown name.

    If addresses or headers are named and a request has none of them, the returned function returns None. A request
    without an identifier passes, because one limit for all such requests would slow down clients that do nothing wrong.
    The first such request is logged.
    """
    if callable(identifier):
        ask = identifier
        return lambda request: _fitting(ask(request))
    names = [identifier] if isinstance(identifier, str) else list(identifier)
    parts = [_part(name, client, path, header) for name in names]
    if not parts:
        raise ValueError("identifier: the list must not be empty")
    wanted = [WANTED.get(name, name.removeprefix(HEADER)) for name in names if name != PATH]
    has_warned = False

    def identify(request: R) -> bytes | None:
        nonlocal has_warned
        found = [part(request) for part in parts]
        if not wanted or any(value for name, value in zip(names, found, strict=True) if name != PATH):
            return _fitting(found[0] if len(found) == 1 else b" ".join(map(_quoted, found)))
        if not has_warned:
            has_warned = True
            log.warning("requests without %s pass without a limit (logged once)", " or ".join(wanted))
        return None

    return identify


def retry_after(seconds: float) -> str:
    """Returns the value of the header Retry-After: whole seconds, rounded up, at least 1."""
    return str(max(math.ceil(seconds), 1))


def _part(name: str, client: Identify[R], path: Identify[R], header: Callable[[R, str], str | bytes]) -> Identify[R]:
    if name == CLIENT:
        return client
    if name == PATH:
        return path
    wanted = name.removeprefix(HEADER)
    if wanted == name or not _TOKEN.fullmatch(wanted):
        raise ValueError(f'identifier: expected "client", "path", "header:NAME" or a function, not {name!r}')
    return lambda request: header(request, wanted)


def _quoted(part: str | bytes | None) -> bytes:
    """Returns a part of an identifier with its spaces replaced.

    Spaces separate parts, so a part cannot look like two parts.
    """
    return as_bytes(part or b"").replace(b"%", b"%25").replace(b" ", b"%20")


def _fitting(identifier: str | bytes | None) -> bytes | None:
    """Returns the identifier that is sent. If an identifier is too long, the result is its SHA-256 in hex."""
    if identifier is None:
        return None
    found = identifier.encode("utf-8", "surrogateescape") if isinstance(identifier, str) else as_bytes(identifier)
    return found if len(found) <= IDENTIFIER_MAX else hashlib.sha256(found).hexdigest().encode()
