"""The first requests of a client on a new connection: its name, and the token of the last connection or a request for a
token.

Floor: side (ARCHITECTURE.md); shared by the blocking client and the client for asyncio. No I/O.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from counterd.protocols.counter import wire

if TYPE_CHECKING:
    from counterd.client._calls import Request


class Token(NamedTuple):
    """The token of a connection. attempt: the number of the last attempt to present it.

    Each attempt has a higher number, so a request that arrives late takes nothing away from a later one.
    """

    token: bytes
    grace_s: float
    attempt: int

    def again(self) -> Token:
        """Returns the token with the number of the next attempt."""
        return self._replace(attempt=self.attempt + 1)


class Greeting:
    """The first requests of a client. resume: the grace time in seconds, 0 for none. name: the client's name, "" for
    none.

    Raises ValueError or TypeError for arguments that do not fit the protocol.
    """

    def __init__(self, resume: float, name: str) -> None:
        if not isinstance(resume, (int, float)):
            raise TypeError(f"resume must be a number of seconds, not {resume!r}")
        if not 0 <= resume <= wire.U32_MAX / 1000:
            raise ValueError(f"resume must be 0 to {wire.U32_MAX // 1000} seconds, not {resume!r}")
        self._grace_ms = 0 if resume == 0 else max(1, round(resume * 1000))
        self._name = name
        if name:
            wire.who(0, name)

    @property
    def resumes(self) -> bool:
        return self._grace_ms > 0

    def states_name(self) -> list[Request]:
        return [(wire.who, self._name)] if self._name else []

    def asks(self, token: Token | None = None) -> Request:
        """Returns the request for a token, which presents this token."""
        if token is None:
            return wire.resume, self._grace_ms
        return wire.resume, self._grace_ms, token.token, token.attempt

    def token(self, resumption: wire.Resumption) -> Token:
        return Token(resumption.token, resumption.grace_ms / 1000, random.getrandbits(16) << 16)
