"""What a client decides without its server: up to its local limits, and it logs when it begins and ends."""

from __future__ import annotations

import gc
import logging
import time
from typing import Any

import pytest

from counterd.client.sentinel._fallback import Fallback
from counterd.client.sentinel._tokens import Answer, Token
from counterd.errors import ConnectionLost, ProtocolError, Timeout
from counterd.protocols.sentinel.errors import Blocked, NoSuchRule, TokenRefused, token_error
from counterd.protocols.sentinel.wire import MessageType, Response, Status

AWAY = ConnectionLost("cannot connect to there")
PASSED, REFUSED = Answer(0, fallback=True), Answer(1, fallback=True)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {(record.name, record.levelno) for record in caplog.records} <= {
        ("counterd.client.sentinel", logging.WARNING)
    }
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def flows(fallback: Fallback, flow_id: int, count: int = 1, values: Any = (), error: Any = AWAY) -> Answer:
    return fallback.answer(flow_id, count, values, error)


def heard(fallback: Fallback, status: int, flow_id: int = 101) -> TokenRefused | None:
    return fallback.heard(flow_id, 1, Response(1, MessageType.FLOW, status))


# ---- rates ----------------------------------------------------------------------------------------------------------


def test_a_local_limit_counts_the_last_second(clock: Clock) -> None:
    fallback = Fallback("local", {101: 3}, clock)
    assert [flows(fallback, 101) for _ in range(4)] == [PASSED, PASSED, PASSED, REFUSED]
    clock.now += 0.95
    assert flows(fallback, 101) == REFUSED
    clock.now += 0.1
    assert flows(fallback, 101, 2) == PASSED
    clock.now += 0.5
    assert [flows(fallback, 101, 2), flows(fallback, 101)] == [REFUSED, PASSED]
    assert len(fallback._rates[101]) == 2, "what is older is forgotten"


def test_values_have_limits_of_their_own(clock: Clock) -> None:
    fallback = Fallback("local", {201: 2}, clock)
    assert flows(fallback, 201, values=["a", "b"]) == PASSED
    assert flows(fallback, 201, values=["a", "c", "a"]) == REFUSED, "equal ones add up: three of a"
    assert flows(fallback, 201, 2, values=["c"]) == PASSED, "what was refused counts for none"
    assert flows(fallback, 201, values=["a"]) == PASSED
    assert flows(fallback, 201, values=["a"]) == REFUSED


def test_a_flow_without_a_local_limit_raises_the_error() -> None:
    fallback = Fallback("local", {101: 1}, time.monotonic)
    for error in (AWAY, Timeout("no answer"), ProtocolError("strange")):
        with pytest.raises(type(error), match=rf"^{error}; flow 7 has no local limit$"):
            flows(fallback, 7, error=error)
        with pytest.raises(type(error), match="flow 7 has no local limit"):
            fallback.acquire(7, 1, error)
    refusal = heard(fallback, Status.NO_RULE, 7)
    with pytest.raises(NoSuchRule, match=r"^no such rule \(status 3\): asked for 1 of flow 7$"):
        flows(fallback, 7, error=refusal)
    assert fallback.stats().refused == 7


def test_open_passes_all_calls_and_closed_refuses_them() -> None:
    opened, closed = Fallback("open", {101: 0}, time.monotonic), Fallback("closed", {101: 9}, time.monotonic)
    assert [flows(opened, 101), flows(opened, 7)] == [PASSED, PASSED]
    assert flows(closed, 101) == REFUSED
    assert opened.acquire(7, 9, AWAY).fallback
    with pytest.raises(ConnectionLost):
        closed.acquire(101, 1, AWAY)
    assert (opened.stats()[:4], closed.stats()[:4]) == ((str(AWAY), 1, 3, 0), (str(AWAY), 1, 0, 2))


# ---- tokens ---------------------------------------------------------------------------------------------------------


def test_tokens_of_the_server_count_in_the_local_limit() -> None:
    fallback = Fallback("local", {101: 3, 102: 1}, time.monotonic)
    mine, other = Token(-5, 101, 2), Token(6, 102, 1)
    fallback.granted(mine)
    fallback.granted(other)
    token = fallback.acquire(101, 1, AWAY)
    with pytest.raises(Blocked, match=r"blocked .*: asked for 1 of flow 101, maximum 3"):
        fallback.acquire(101, 1, AWAY)
    fallback.gone(mine)
    second = fallback.acquire(101, 2, AWAY)
    assert fallback.release(token)
    assert not fallback.release(token), "once"
    assert fallback.release(second)
    assert fallback.tokens() == [other]


def test_a_token_that_was_garbage_collected_does_not_count() -> None:
    fallback = Fallback("local", {101: 1}, time.monotonic)
    fallback.granted(Token(5, 101, 1))
    gc.collect()
    assert fallback.acquire(101, 1, AWAY).fallback


def test_a_forked_child_does_not_count_tokens_of_its_parent() -> None:
    fallback = Fallback("local", {101: 1}, time.monotonic)
    token = fallback.acquire(101, 1, AWAY)
    fallback.after_fork()
    assert fallback.acquire(101, 1, AWAY)
    assert not fallback.release(Token(token.id + 9, 101, 1, fallback=True))


# ---- what it says ---------------------------------------------------------------------------------------------------


def test_an_outage_logs_one_line_when_it_begins_and_one_when_it_ends(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    fallback = Fallback("local", {101: 2}, clock)
    assert heard(fallback, Status.OK) is None
    for _ in range(5):
        flows(fallback, 101)
    assert said(caplog) == [f"{AWAY}: local limits apply"]
    assert fallback.stats() == (str(AWAY), 1, 2, 3, 0, 0)
    clock.now += 0.9
    heard(fallback, Status.OK)
    assert said(caplog) == [], "it may be back again at once"
    flows(fallback, 101)
    clock.now += 1.0
    heard(fallback, Status.BLOCKED, 7)
    assert said(caplog) == [
        "the server decides again after 1.9 s: 2 calls passed without the server, and 4 were refused"
    ]
    heard(fallback, Status.OK)
    assert said(caplog) == []
    assert fallback.stats() == ("", 1, 2, 4, 0, 0)


def test_an_error_of_one_flow_does_not_concern_others(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    fallback = Fallback("open", {}, clock)
    for status in (Status.NO_RULE, Status.BAD_REQUEST, Status.TOO_MANY_REQUESTS, Status.FAIL, Status.NOT_AVAILABLE):
        error = heard(fallback, status, 7)
        assert (type(error), error and error.status) == (type(token_error(status)), status)
        assert flows(fallback, 7, error=error) == PASSED
    assert said(caplog) == ["no such rule (status 3): asked for 1 of flow 7: all calls pass"]
    clock.now += 5
    heard(fallback, Status.OK, 8)
    assert said(caplog) == []
    heard(fallback, Status.SHOULD_WAIT, 7)
    assert said(caplog) == [
        "flow 7: the server decides again after 5.0 s: 5 calls passed without the server, and 0 were refused"
    ]


def test_a_flow_without_a_local_limit_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    fallback = Fallback("local", {}, time.monotonic)
    with pytest.raises(NoSuchRule):
        flows(fallback, 7, error=heard(fallback, Status.NO_RULE, 7))
    assert said(caplog) == ["no such rule (status 3): asked for 1 of flow 7: the flow has no local limit"]


def test_closing_during_an_outage_logs_its_end(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    fallback = Fallback("closed", {}, clock)
    held = Token(5, 101, 1)
    fallback.granted(held)
    flows(fallback, 101)
    clock.now += 2
    said(caplog)
    assert fallback.close() == [held]
    assert said(caplog) == ["closed after 2.0 s: 0 calls passed without the server, and 1 were refused"]
    assert fallback.close() == [held]
    assert said(caplog) == []


@pytest.mark.parametrize(
    ("mode", "limits", "wrong"),
    [
        ("Local", {}, "fallback must be"),
        ("local", {0: 1}, "flow_id must be"),
        ("local", {1: -1}, "limit of flow 1"),
        ("local", {1: 0.5}, "limit of flow 1"),
    ],
)
def test_invalid_modes_and_limits_are_refused(mode: str, limits: dict[int, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Fallback(mode, limits, time.monotonic)
