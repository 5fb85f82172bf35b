"""Whose request it is: what the middleware for web applications takes for a gatekeeper's identifier.

Stands beside the floors, shared by ASGI and WSGI, each of which says what a request has.
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

REJECTED = b"Rejected\n"  # what a client is told
STATUS = 503
CLIENT, PATH, HEADER = "client", "path", "header:"
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # what the name of a header can be (RFC 9110, section 5.6.2)
WANTED = {CLIENT: "a client address"}

R = TypeVar("R")
Identify = Callable[[R], Union[str, bytes, None]]  # noqa: UP007 - is evaluated, by Python 3.10 too
# A name, several, or a function of the request, which gives None for one that is to pass.
Identifier = Union[str, Sequence[str], Callable[[Any], Union[str, bytes, None]]]  # noqa: UP007


def identify_by(
    identifier: Identifier, client: Identify[R], path: Identify[R], header: Callable[[R, str], str | bytes]
) -> Callable[[R], bytes | None]:
    """A function that says whose a request is. ValueError for an unknown name.

    None is for a request that has neither an address nor a header where one is named. It is to pass: all such requests
    under one limit would slow down clients that do nothing wrong. The first is logged.
    """
    if callable(identifier):
        ask = identifier
        return lambda request: _fitting(ask(request))
    names = [identifier] if isinstance(identifier, str) else list(identifier)
    parts = [_part(name, client, path, header) for name in names]
    if not parts:
        raise ValueError("identifier: nothing tells requests apart")
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
    """The header's value: whole seconds, and no fewer than it takes."""
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
    """Without a space, so that one of several parts cannot contain the beginning of the next."""
    return as_bytes(part or b"").replace(b"%", b"%25").replace(b" ", b"%20")


def _fitting(identifier: str | bytes | None) -> bytes | None:
    """As it is sent: in place of what is too long, its SHA-256 in hex."""
    if identifier is None:
        return None
    found = identifier.encode("utf-8", "surrogateescape") if isinstance(identifier, str) else as_bytes(identifier)
    return found if len(found) <= IDENTIFIER_MAX else hashlib.sha256(found).hexdigest().encode()
