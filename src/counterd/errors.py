"""What can go wrong between a client and a server.

Everything a client raises on purpose is a CounterdError, except ValueError for arguments that do not fit the protocol.

Floor 0: imports nothing of counterd. Which status is which error, and the errors that only one protocol has, are in the
protocol's folder.
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
    """The server refused: it answered with a status that is not a success.

    status: of the response, as the protocol has it.
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
    """The server has nothing of this name."""


class InvalidArguments(ServerError):
    """The request does not follow the protocol."""


class NotAvailable(ServerError):
    """The maximum does not leave room for what was asked.

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
    """This connection does not hold as much as it wants to release."""


class UnknownCommand(ServerError):
    """The server does not know the request."""


class OutOfMemory(ServerError):
    """The server has no room for another name or holding."""
