"""What can go wrong between a client and a counter server.

Everything a client raises on purpose is a CounterdError, except ValueError for arguments that do not fit the protocol.

Floor 0: imports nothing of counterd.
"""

from __future__ import annotations


class CounterdError(Exception):
    """Any failure below.

    status: the status byte of the response, or None if it is not the server that refused.
    text: the message in that response, or "".
    """

    status: int | None = None
    text: str = ""


class ConnectionLost(CounterdError):
    """There is no connection (any more): refused, closed by either side, or given up after another failure.

    What was held through it is held no more. What was asked through it may have been done or not.
    """


class Timeout(CounterdError):
    """The server did not answer in time, or accept a connection. What was asked may be done or not, now or later."""


class ProtocolError(CounterdError):
    """The server sent something the protocol does not allow; the message shows the bytes."""


class EventsLost(CounterdError):
    """Events came faster than they were taken, and there was no room for more; the connection stays.

    count: how many are missing at this place, at least 1.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count

    def __str__(self) -> str:
        lost = "1 event was" if self.count == 1 else f"{self.count} events were"
        return f"{lost} lost, because those before them were not taken in time"


class ServerError(CounterdError):
    """The server answered with a status other than "No error" (sections "Response status" and "Error responses").

    status: the status byte of the response, 0 to 255.
    text: the message in its body.
    name, resources, maximum: what was asked for, as far as the request has it; else b"", None and None.
    """

    name: bytes = b""
    resources: int | None = None
    maximum: int | None = None
    _status_format = "0x{:02x}"

    def __init__(self, status: int, text: str) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text

    def __str__(self) -> str:
        said = f"{self.text} (status {self._status_format.format(self.status)})"
        if not self.name:
            return said
        name = self.name.decode("utf-8", "backslashreplace")
        if self.resources is None:
            return f"{said}: {name}"
        maximum = "" if self.maximum is None else f", maximum {self.maximum}"
        return f"{said}: asked for {self.resources} of {name}{maximum}"


class NotFound(ServerError):
    """0x01: there is no counter with this name, used now or in the current statistics interval."""


class InvalidArguments(ServerError):
    """0x04: the request does not follow the protocol."""


class NotAvailable(ServerError):
    """0x21: the maximum does not leave room for what was asked.

    consumption: how much was in use when a hold gave up, or None.
    waited: seconds that a hold waited, or None.
    """

    consumption: int | None = None
    waited: float | None = None

    def __str__(self) -> str:
        used = "" if self.consumption is None else f", {self.consumption} in use"
        waited = "" if self.waited is None else f", waited {self.waited:g} s"
        return super().__str__() + used + waited


class NotAcquired(ServerError):
    """0x22: this connection does not hold as much as it wants to release."""


class UnknownCommand(ServerError):
    """0x81: the server does not know the opcode."""


class OutOfMemory(ServerError):
    """0x82: the server has no room for another counter, name or holding."""


class TokenRefused(ServerError):
    """A server of the sentinel protocol did not do what it was asked.

    status: of the response, -128 to 127.
    name: "flow" and the flow's id, or "token" and the token's, as bytes; resources: the count.
    """

    _status_format = "{}"


class Blocked(TokenRefused, NotAvailable):
    """1: the flow's threshold leaves no room, that of the rule or of the client's own fallback.

    waited: seconds that a hold waited, or None.
    """


class NoSuchRule(TokenRefused, NotFound):
    """3: the server has no rule for this flow, or not one of this kind."""


class TokenLost(CounterdError):
    """A token is not held any more, though nobody gave it back: its lease was over, or its server forgot it."""


BY_STATUS: dict[int, type[ServerError]] = {
    0x01: NotFound,
    0x04: InvalidArguments,
    0x21: NotAvailable,
    0x22: NotAcquired,
    0x81: UnknownCommand,
    0x82: OutOfMemory,
}


def server_error(status: int, text: str) -> ServerError:
    """The error to raise for a status byte: of its own class, or ServerError itself for an unknown status."""
    return BY_STATUS.get(status, ServerError)(status, text)


# What the statuses of the sentinel protocol mean where they are no success.
TOKEN_TEXTS = {
    -4: "bad request",
    -2: "too many requests",
    -1: "failed",
    1: "blocked",
    2: "to wait",
    3: "no such rule",
    4: "no reference rule",
    5: "not available",
    6: "released",
    7: "already released",
}


def token_error(status: int) -> TokenRefused:
    """The error for a status of the sentinel protocol."""
    kind = {1: Blocked, 3: NoSuchRule}.get(status, TokenRefused)
    return kind(status, TOKEN_TEXTS.get(status, "unknown"))
