"""The errors that clients of the sentinel protocol raise. Floor 2 (ARCHITECTURE.md), pure Python, as wire.py."""

from __future__ import annotations

from counterd.errors import CounterdError, NotAvailable, NotFound, ServerError
from counterd.protocols.sentinel.wire import Status

# The meanings of statuses that are not a success.
TEXTS: dict[int, str] = {
    Status.BAD_REQUEST: "bad request",
    Status.TOO_MANY_REQUESTS: "too many requests",
    Status.FAIL: "failed",
    Status.BLOCKED: "blocked",
    Status.SHOULD_WAIT: "to wait",
    Status.NO_RULE: "no such rule",
    Status.NO_REFERENCE_RULE: "no reference rule",
    Status.NOT_AVAILABLE: "not available",
    Status.RELEASE_OK: "released",
    Status.ALREADY_RELEASED: "already released",
}


class TokenRefused(ServerError):
    """A server of the sentinel protocol refused a request.

    status: the status of the response, -128 to 127.
    name: "flow" and the id of the flow, or "token" and the id of the token, as bytes. resources: the count.
    """

    _status_format = "{}"


class Blocked(TokenRefused, NotAvailable):
    """Status 1: the call would exceed the threshold of the flow's rule, or of the client's own fallback.

    waited: how many seconds a hold has waited, or None.
    """


class NoSuchRule(TokenRefused, NotFound):
    """Status 3: the server has no rule for this flow, or no rule of this kind."""


class TokenLost(CounterdError):
    """A token is lost, although it was not released: its lease was over, or its server no longer knows it."""


ERRORS: dict[int, type[TokenRefused]] = {Status.BLOCKED: Blocked, Status.NO_RULE: NoSuchRule}


def token_error(status: int) -> TokenRefused:
    """Makes the error for a status: a class of its own, or TokenRefused."""
    return ERRORS.get(status, TokenRefused)(status, TEXTS.get(status, "unknown"))
