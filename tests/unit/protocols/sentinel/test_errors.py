"""The errors of tokens: which status raises which, and their texts."""

from __future__ import annotations

import pickle

import pytest

from counterd.errors import NotAvailable, NotFound, ServerError
from counterd.protocols.sentinel import errors
from counterd.protocols.sentinel.wire import Status


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
    assert isinstance(error, ServerError)
    assert str(error) == f"{text} (status {status})"


def test_errors_of_tokens_are_subclasses_of_errors_of_permits() -> None:
    assert issubclass(errors.Blocked, NotAvailable)
    assert issubclass(errors.NoSuchRule, NotFound)
    error = errors.token_error(1)
    error.name, error.resources, error.waited = b"flow 101", 2, 0.5
    assert str(error) == "blocked (status 1): asked for 2 of flow 101, waited 0.5 s"


def test_every_status_of_tokens_has_a_text() -> None:
    assert errors.TEXTS.keys() == set(Status) - {Status.OK}
