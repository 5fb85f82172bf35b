"""The arguments of a hold, and its errors if it gets no permits or loses them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from counterd.client._wait_queues import Queue
from counterd.client.counter._asked import Asked
from counterd.client.counter._taking import place
from counterd.errors import ConnectionLost, NotAvailable
from counterd.protocols.counter import wire


def asked(**changes: Any) -> Asked:
    usual = {"name": "n", "resources": 2, "maximum": 3, "timeout": None, "on_lost": "raise", "where": place(b"", 1, 0)}
    return Asked(**{**usual, **changes})


def test_names_become_bytes() -> None:
    assert (asked(name="é").name, asked(name=b"\xff").name) == (b"\xc3\xa9", b"\xff")
    assert (str(asked(name="é")), str(asked(name=b"\xff"))) == ("2 of é", "2 of \\xff")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"name": ""}, ValueError, "^name must have 1 to 65535 bytes, not 0$"),
        ({"resources": -1}, ValueError, "^permits must be 0 to 4294967295, not -1$"),
        ({"resources": "2"}, TypeError, "^permits must be a whole number, not '2'$"),
        ({"maximum": 1 << 32}, ValueError, "^maximum must be 0 to 4294967295, not 4294967296$"),
        ({"maximum": "3"}, TypeError, "^maximum must be a whole number, not '3'$"),
        ({"where": place("k" * 256, 1, 0)}, ValueError, "^key must have 0 to 255 bytes, not 256$"),
        ({"where": place("k", 0, 0)}, ValueError, "^weight must be 1 to 1000, not 0$"),
        ({"where": place("k", 1, 256)}, ValueError, "^priority must be 0 to 255, not 256$"),
    ],
)
def test_arguments_out_of_range_are_refused(changes: Any, error: type[Exception], message: str) -> None:
    """The error is raised where a hold is made, not where it is entered."""
    with pytest.raises(error, match=message):
        asked(**changes)


@pytest.mark.parametrize(
    ("seconds", "wait_ms"),
    [(None, 2**32 - 1), (0, 0), (0.0001, 1), (1.5, 1500), (10**12, 2**32 - 1), (math.inf, 2**32 - 1)],
)
def test_a_timeout_becomes_the_wait_of_a_take(seconds: float | None, wait_ms: int) -> None:
    encode, *arguments = asked(where=place("k", 3, 9)).request(seconds)
    items = [wire.Permit(b"n", 2, 3)]
    assert encode(7, *arguments) == wire.take(7, items, wait_ms, key=b"k", weight=3, priority=9)


@pytest.mark.parametrize("timeout", [None, 0, 0.5, 10**12, math.inf])
def test_valid_timeouts_are_kept(timeout: float | None) -> None:
    assert asked(timeout=timeout).timeout == timeout


@pytest.mark.parametrize("timeout", [-1, -0.001, -math.inf, math.nan])
def test_invalid_timeouts_are_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match=r"^timeout must be None, or 0 or more seconds, not"):
        asked(timeout=timeout)


@pytest.mark.parametrize("on_lost", ["", "reaquire", None, 1])
def test_invalid_values_of_on_lost_are_refused(on_lost: Any) -> None:
    with pytest.raises(ValueError, match=r"^on_lost must be \"raise\", \"reacquire\" or callable, not"):
        asked(on_lost=on_lost)


@pytest.mark.parametrize("on_lost", ["raise", "reacquire", print])
def test_valid_values_of_on_lost(on_lost: Any) -> None:
    assert asked(on_lost=on_lost).on_lost == on_lost


def test_the_error_of_a_timeout_says_how_many_are_in_use() -> None:
    queue = Queue()
    queue.consumption = 7
    error = asked(timeout=1.5).gives_up(queue)
    assert isinstance(error, NotAvailable)
    assert (error.status, error.text) == (0x21, "Resource not available")
    assert (error.name, error.resources, error.maximum, error.consumption, error.waited) == (b"n", 2, 3, 7, 1.5)
    assert str(error).endswith("asked for 2 of n, maximum 3, 7 in use, waited 1.5 s")
    assert "in use" not in str(asked().gives_up(Queue()))


def test_the_error_of_a_timeout_says_that_the_server_drains() -> None:
    queue = Queue()
    queue.consumption, queue.draining = 7, True
    error = asked().gives_up(queue)
    assert isinstance(error, NotAvailable)
    assert error.draining
    assert "in use" not in str(error)


def test_the_error_of_a_timeout_says_that_the_server_is_unreachable() -> None:
    queue = Queue()
    queue.unreachable = "cannot connect"
    error = asked().gives_up(queue)
    assert (type(error), str(error)) == (ConnectionLost, "cannot connect")


def test_the_error_of_a_loss_names_the_permits() -> None:
    assert str(asked().lost("host:1", "why")) == "lost 2 of n with the connection to host:1: why"
