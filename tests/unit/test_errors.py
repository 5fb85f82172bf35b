"""The errors and their texts."""

from __future__ import annotations

import pickle

import pytest

import counterd
from counterd import errors

REFUSALS = [errors.NotFound, errors.InvalidArguments, errors.NotAvailable, errors.NotAcquired]
REFUSALS += [errors.UnknownCommand, errors.OutOfMemory, errors.ServerError]


def test_everything_is_a_counterd_error() -> None:
    assert all(issubclass(kind, errors.ServerError) for kind in REFUSALS)
    for kind in (errors.ServerError, errors.ConnectionLost, errors.Timeout, errors.ProtocolError, errors.EventsLost):
        assert issubclass(kind, errors.CounterdError)


@pytest.mark.parametrize("kind", REFUSALS)
def test_a_refusal_shows_its_status_and_request(kind: type[errors.ServerError]) -> None:
    error = kind(0x21, "some text")
    assert (error.status, error.text, str(error)) == (0x21, "some text", "some text (status 0x21)")
    error.name = b"a\xff"
    assert str(error) == "some text (status 0x21): a\\xff"
    error.resources, error.maximum = 2, 3
    assert str(error) == "some text (status 0x21): asked for 2 of a\\xff, maximum 3"


def test_a_server_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.NotAvailable(0x21, "Resource not available")))
    assert type(error) is errors.NotAvailable
    assert (error.status, error.text) == (0x21, "Resource not available")


def test_lost_events_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.EventsLost(3)))
    assert (type(error), error.count) == (errors.EventsLost, 3)
    assert str(error) == "3 events were lost, because the events before them were not taken in time"


def test_an_import_from_the_wrong_module_names_the_right_one() -> None:
    with pytest.raises(ImportError, match=r"^counterd has no Client: write `from counterd.client import Client`$"):
        exec("from counterd import Client", {})


def test_other_missing_names_have_the_usual_error() -> None:
    assert not hasattr(counterd, "Clients")
