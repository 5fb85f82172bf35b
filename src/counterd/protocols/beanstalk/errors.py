"""The errors of the beanstalk protocol.

Floor 2 (ARCHITECTURE.md), pure Python.
"""

from __future__ import annotations

from counterd.errors import OutOfMemory, ServerError
from counterd.protocols.beanstalk.wire import Status

_TEXTS = {
    Status.DEADLINE_SOON: "a reserved job's time to run ends within a second",
    Status.DRAINING: "the server is draining and accepts no new jobs",
    Status.JOB_TOO_BIG: "the body is longer than the server allows",
    Status.OUT_OF_MEMORY: "the server has no room for the job or tube",
    Status.INTERNAL_ERROR: "the server cannot write the change to its journal",
    Status.NOT_ENABLED: "the server has no counters: counter.enable is off",
    Status.NOT_IGNORED: "a connection must watch at least one tube",
    Status.BAD_FORMAT: "the server does not accept these arguments",
    Status.UNKNOWN_COMMAND: "the server does not know this command, which only counterd has",
}


class Refused(ServerError):
    """The server refused a command. status: the word in the server's reply."""

    status: Status  # type: ignore[assignment]

    def __init__(self, status: Status) -> None:
        Exception.__init__(self, status)
        self.status = status
        self.text = _TEXTS[status]

    def __str__(self) -> str:
        return self.text


class DeadlineSoon(Refused):
    """A reserve was refused, because a job of this client has less than a second of its time to run left.

    Touch or end that job.
    """


class Draining(Refused):
    """A put was refused because the server is draining."""


class JobTooBig(Refused):
    """A put was refused because the body is longer than the server allows."""


class NoRoom(Refused, OutOfMemory):
    """The server has no room for another job or tube. The error is an OutOfMemory."""


_ERRORS = {
    Status.DEADLINE_SOON: DeadlineSoon,
    Status.DRAINING: Draining,
    Status.JOB_TOO_BIG: JobTooBig,
    Status.OUT_OF_MEMORY: NoRoom,
}


def refused(status: Status) -> Refused | None:
    """Makes the error for a reply. Returns None if the status is not a refusal."""
    return _ERRORS.get(status, Refused)(status) if status in _TEXTS else None
