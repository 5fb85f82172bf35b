"""The error that clients of the smockron protocol raise. Floor 2 (ARCHITECTURE.md), pure Python, as wire.py."""

from __future__ import annotations

import math

from counterd.errors import CounterdError


class Rejected(CounterdError):
    """A gatekeeper rejected a request, because it would have to wait too long or too many requests already wait.

    identifier, domain: those of the request.
    retry_after: after how many seconds the identifier's next request would pass without a delay, as far as is known
    now.
    """

    def __init__(self, identifier: bytes, domain: bytes, retry_after: float) -> None:
        super().__init__(identifier, domain, retry_after)
        self.identifier = identifier
        self.domain = domain
        self.retry_after = retry_after

    def __str__(self) -> str:
        identifier, domain = (name.decode("utf-8", "backslashreplace") for name in (self.identifier, self.domain))
        return f"{identifier} was rejected in {domain}: retry in {math.ceil(self.retry_after)} s"
