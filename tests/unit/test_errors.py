"""The errors: one class for each status, and what they show."""

from __future__ import annotations

import pickle

import pytest

from counterd import errors
from counterd.protocols.counter.wire import ERROR_TEXTS, Status
from counterd.protocols.sentinel.wire import Status as TokenStatus


def test_every_error_status_has_its_own_class() -> None:
    statuses = set(Status) - {Status.NO_ERROR}
    assert errors.BY_STATUS.keys() == statuses == ERROR_TEXTS.keys()
    assert len(set(errors.BY_STATUS.values())) == len(statuses)


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0x01, errors.NotFound),
        (0x04, errors.InvalidArguments),
        (0x21, errors.NotAvailable),
        (0x22, errors.NotAcquired),
        (0x81, errors.UnknownCommand),
        (0x82, errors.OutOfMemory),
        (0x7F, errors.ServerError),
    ],
)
def test_server_error_picks_the_class(status: int, expected: type[errors.ServerError]) -> None:
    error = errors.server_error(status, "some text")
    assert type(error) is expected
    assert (error.status, error.text) == (status, "some text")
    assert str(error) == f"some text (status 0x{status:02x})"


def test_everything_is_a_counterd_error() -> None:
    assert all(issubclass(kind, errors.ServerError) for kind in errors.BY_STATUS.values())
    for kind in (errors.ServerError, errors.ConnectionLost, errors.Timeout, errors.ProtocolError, errors.EventsLost):
        assert issubclass(kind, errors.CounterdError)


def test_a_server_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.server_error(0x21, "Resource not available")))
    assert type(error) is errors.NotAvailable
    assert (error.status, error.text) == (0x21, "Resource not available")


def test_lost_events_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.EventsLost(3)))
    assert (type(error), error.count) == (errors.EventsLost, 3)
    assert str(error) == "3 events were lost, because those before them were not taken in time"


@pytest.mark.parametrize(
    ("status", "expected", "text"),
    [
        (1, errors.Blocked, "blocked"),
        (3, errors.NoSuchRule, "no such rule"),
        (-4, errors.TokenRefused, "bad request"),
        (5, errors.TokenRefused, "not available"),
        (-128, errors.TokenRefused, "unknown"),
    ],
)
def test_errors_of_tokens(status: int, expected: type[errors.TokenRefused], text: str) -> None:
    error = pickle.loads(pickle.dumps(errors.token_error(status)))
    assert type(error) is expected
    assert isinstance(error, errors.ServerError)
    assert str(error) == f"{text} (status {status})"


def test_who_waits_for_a_permit_can_wait_for_a_token() -> None:
    assert issubclass(errors.Blocked, errors.NotAvailable)
    assert issubclass(errors.NoSuchRule, errors.NotFound)
    error = errors.token_error(1)
    error.name, error.resources, error.waited = b"flow 101", 2, 0.5
    assert str(error) == "blocked (status 1): asked for 2 of flow 101, waited 0.5 s"


def test_every_status_of_tokens_has_its_words() -> None:
    assert errors.TOKEN_TEXTS.keys() == set(TokenStatus) - {TokenStatus.OK}
