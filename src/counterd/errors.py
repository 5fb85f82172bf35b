"""The errors that clients raise.

Clients raise only CounterdError and its subclasses, and ValueError for arguments that do not fit the protocol.

Floor 0 (ARCHITECTURE.md): this file imports nothing of counterd. The folder of a protocol has the protocol's status
codes, and the errors that no other protocol has.
"""

from __future__ import annotations


class CounterdError(Exception):
    """The base class of all errors that clients raise on purpose.

    status: the status byte of the response, or None if the error did not come as a response.
    text: the message in the response, or "".
    """

    status: int | None = None
    text: str = ""


class ConnectionLost(CounterdError):
    """The connection ended or could not be made: it was refused, closed by either side, or given up after another
    failure.

    The server releases everything that was held through the connection. The client does not know whether requests
    without a reply were executed.
    """


class Timeout(CounterdError):
    """The server did not answer, or did not accept the connection, in time.

    The server may still execute the request.
    """


class ProtocolError(CounterdError):
    """The server sent bytes that the protocol does not allow. The message shows these bytes."""


class EventsLost(CounterdError):
    """Events arrived faster than they were taken, and the buffer was full. The connection stays open.

    count: how many events are missing at this place, at least 1.
    """

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.count = count

    def __str__(self) -> str:
        lost = "1 event was" if self.count == 1 else f"{self.count} events were"
        return f"{lost} lost, because the events before them were not taken in time"


class ServerError(CounterdError):
    """The server refused the request: it replied with a status that is not a success.

    status: the status of the response, as the protocol defines it.
    text: the message in the response.
    name, resources, maximum: the arguments of the request; b"", None and None if the request has no such arguments.
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
        return f"{said}: asked for {self.resources} of {name}{self._bounds()}"

    def _bounds(self) -> str:
        return "" if self.maximum is None else f", maximum {self.maximum}"


class NotFound(ServerError):
    """The name does not exist on the server."""


class InvalidArguments(ServerError):
    """The request does not follow the protocol."""


DRAINING = "Draining"  # the text of a refusal by a server that is about to stop


class NotAvailable(ServerError):
    """The request was refused, because to grant it would exceed the maximum.

    maximum: the smaller one of the request's and the server's, where the server says it.
    consumption: at least how much was in use when the request was refused, or None. The server does not say how much
    more than the maximum was in use.
    waited: how many seconds a hold has waited, or None.
    retry_after: after how many seconds the request may succeed, or None if the server does not know.
    limit: the server's limit, if the request was for more than that: then it can never succeed. Otherwise None.
    """

    consumption: int | None = None
    waited: float | None = None
    retry_after: float | None = None
    limit: int | None = None
    _rate = ""  # for people: the numbers of the rate, if units of a rate were asked for

    @property
    def draining(self) -> bool:
        """Whether the server is about to stop: it grants nothing more, whatever is available."""
        return self.text == DRAINING

    def __str__(self) -> str:
        used = "" if self.consumption is None or self._rate else f", {self.consumption} in use"
        waited = "" if self.waited is None else f", waited {self.waited:g} s"
        later = "" if self.retry_after is None else f", retry after {self.retry_after:g} s"
        return super().__str__() + used + waited + later

    def _bounds(self) -> str:
        return f", {self._rate}" if self._rate else super()._bounds()


class NotAcquired(ServerError):
    """The connection holds fewer permits than it tried to release."""


class Cancelled(ServerError):
    """The request waited in the server, and was cancelled."""


class UnknownCommand(ServerError):
    """The server does not know the request."""


class OutOfMemory(ServerError):
    """The server has no memory for another name or holding."""
