"""Which replies are refusals, and which errors a client raises for them."""

from __future__ import annotations

import copy

import pytest

from counterd.errors import OutOfMemory, ServerError
from counterd.protocols.beanstalk.errors import DeadlineSoon, Draining, JobTooBig, NoRoom, Refused, refused
from counterd.protocols.beanstalk.wire import Status

RAISED = {
    Status.DEADLINE_SOON: DeadlineSoon,
    Status.DRAINING: Draining,
    Status.JOB_TOO_BIG: JobTooBig,
    Status.OUT_OF_MEMORY: NoRoom,
    Status.INTERNAL_ERROR: Refused,
    Status.NOT_ENABLED: Refused,
    Status.NOT_IGNORED: Refused,
    Status.BAD_FORMAT: Refused,
    Status.UNKNOWN_COMMAND: Refused,
}


@pytest.mark.parametrize("status", Status)
def test_each_refusal_has_its_error(status: Status) -> None:
    error = refused(status)
    assert type(error) is RAISED.get(status, type(None))
    if error is not None:
        assert isinstance(error, ServerError)
        assert (error.status, str(error)) == (status, error.text)
        again = copy.copy(error)
        assert (type(again), str(again)) == (type(error), str(error)), "as the client for asyncio raises it"


def test_no_room_is_out_of_memory() -> None:
    assert isinstance(refused(Status.OUT_OF_MEMORY), OutOfMemory)
