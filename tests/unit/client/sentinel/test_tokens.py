"""The shared parts of the sentinel clients: answers reach their calls, leases are kept in time, arguments are
checked."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest

from counterd.client._calls import Call
from counterd.client.sentinel._tokens import (
    AGAIN_S,
    FIRST_KEEP_S,
    LEAST_S,
    Answer,
    AskedToken,
    Lease,
    Tally,
    Token,
    TokenCalls,
    check,
    not_kept,
    read_namespace,
    release,
    values_of,
)
from counterd.errors import CounterdError, NotAvailable, ProtocolError
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.errors import Blocked, TokenLost, TokenRefused
from counterd.protocols.sentinel.wire import MessageType, Response, Status

TOKEN = Token(-7, 101, 2)


class Kept(Call):
    """A call that records how it ended. wanted: whether somebody waits for it."""

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.ends: list[tuple[Any, CounterdError | None]] = []

    def settle(self, result: Any, error: CounterdError | None) -> bool:
        self.ends.append((result, error))
        return self.wanted


def made() -> tuple[TokenCalls, Tally]:
    tally = Tally()
    return TokenCalls(tally), tally


def response(xid: int, kind: int, status: int, data: bytes = b"") -> bytes:
    return struct.pack(">Hibb", 6 + len(data), xid, kind, status) + data


def grant(xid: int, token_id: int) -> bytes:
    return response(xid, MessageType.ACQUIRE, Status.OK, struct.pack(">q", token_id))


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_answers_may_come_in_another_order() -> None:
    calls, _ = made()
    first, second = Kept(), Kept()
    calls.add(first, wire.flow, 101, 1)
    calls.add(second, wire.keep, -7)
    calls.feed(response(2, 5, 0, b"\0\0\0\5") + response(1, 1, 1, bytes(8)))
    assert second.ends == [(Response(2, 5, 0, left_ms=5), None)]
    assert first.ends == [(Response(1, 1, 1), None)]
    assert calls.answered
    assert calls.pending == {}


@pytest.mark.parametrize("wrong", [response(2, 1, 0, bytes(8)), response(1, 2, 0, bytes(8))])
def test_an_answer_without_a_request_is_a_protocol_error(wrong: bytes) -> None:
    calls, _ = made()
    calls.add(Kept(), wire.flow, 101, 1)
    with pytest.raises(ProtocolError, match="no request has the"):
        calls.feed(wrong)


def test_a_token_granted_to_an_abandoned_call_is_given_back() -> None:
    calls, tally = made()
    calls.add(Kept(wanted=False), wire.acquire, 101, 2)
    calls.feed(grant(1, -7))
    (request,) = calls.give_back
    assert request == release(Token(-7, 101, 2))
    assert request[0](3, *request[1:]) == wire.release(3, -7)
    assert tally.late == 1


def test_a_call_abandoned_after_its_grant_gives_back_once() -> None:
    calls, tally = made()
    call = Kept()
    calls.add(call, wire.acquire, 101, 2)
    calls.feed(grant(1, 7))
    assert calls.give_back == []
    for _ in range(2):
        calls.forget(call)
    assert calls.give_back == [release(Token(7, 101, 2))]
    assert tally.late == 1


@pytest.mark.parametrize("refusal", [response(1, 3, 1, bytes(8)), response(1, 3, 3), response(1, 3, -4)])
def test_a_refusal_gives_nothing_back(refusal: bytes) -> None:
    calls, _ = made()
    call = Kept(wanted=False)
    calls.add(call, wire.acquire, 101, 2)
    calls.feed(refusal)
    assert (calls.give_back, len(call.ends)) == ([], 1)


def test_only_an_acquire_grants() -> None:
    calls, _ = made()
    asked = [(wire.ping, b"n"), (wire.flow, 1, 1), (wire.acquire, 1, 1), (wire.release, 1), (wire.keep, 1)]
    under_way = [Kept() for _ in asked]
    calls.add_all(under_way, asked)
    assert [calls.may_grant(call) for call in under_way] == [False, False, True, False, False]


def test_add_all_adds_nothing_if_one_request_is_invalid() -> None:
    calls, _ = made()
    with pytest.raises(ValueError, match=r"^count"):
        calls.add_all([Kept(), Kept()], [(wire.acquire, 1, 1), (wire.acquire, 1, 1 << 31)])
    assert calls.pending == {}


def test_xids_wrap_around() -> None:
    calls, _ = made()
    calls.add(Kept(), wire.keep, 1)
    calls._opaque = calls.MASK - 1
    assert [calls.add(Kept(), wire.keep, 1)[2:6] for _ in range(3)] == [b"\x7f\xff\xff\xff", bytes(4), b"\0\0\0\2"]


# ---- leases ---------------------------------------------------------------------------------------------------------


def kept(left_ms: int, status: int = Status.OK) -> Response:
    return Response(1, MessageType.KEEP, status, left_ms=left_ms)


@pytest.mark.parametrize(("usual", "due"), [(None, 100), (0.3, 100.1), (0.75, 100.25), (60, 100 + FIRST_KEEP_S)])
def test_when_a_new_lease_is_due(usual: float | None, due: float) -> None:
    lease = Lease(TOKEN, 100.0, usual)
    assert lease.due == lease.next == pytest.approx(due)
    assert lease.ends == math.inf


def test_a_lease_is_kept_again_after_a_third_of_its_rest() -> None:
    lease = Lease(TOKEN, 100.0, None)
    lease.answered(100.0, 100.5, kept(3000))
    assert (lease.due, lease.ends) == (101.5, 103.0), "it ends as if it had been kept when that was asked"
    lease.answered(101.0, 101.0, kept(3))
    assert lease.due == 101.0 + LEAST_S
    assert lease.next == lease.ends == pytest.approx(101.003)


@pytest.mark.parametrize("answer", [None, kept(0, Status.NO_RULE), kept(0, Status.NOT_AVAILABLE), kept(0, Status.FAIL)])
def test_a_lease_that_was_not_kept_is_asked_for_again(answer: Response | None) -> None:
    lease = Lease(TOKEN, 100.0, None)
    lease.answered(100.0, 100.0, answer)
    assert lease.due == 100.0 + AGAIN_S
    lease.answered(100.0, 100.0, kept(3000))
    lease.answered(101.0, 101.2, answer)
    assert lease.due == pytest.approx(101.8), "a third of the rest"
    lease.answered(102.9, 102.9, answer)
    assert lease.due == pytest.approx(102.9 + 0.1 / 3)
    assert (lease.ends, lease.lost) == (103.0, "")


def test_how_a_lease_is_lost() -> None:
    lease = Lease(TOKEN, 100.0, None)
    lease.look(1e9)
    assert not lease.lost, "nobody has said when it ends"
    lease.answered(100.0, 100.0, kept(3000))
    lease.look(102.9)
    assert not lease.lost
    lease.look(103.0)
    assert lease.lost == "its lease is over"
    lease = Lease(TOKEN, 100.0, None)
    lease.answered(100.0, 100.0, kept(0, Status.ALREADY_RELEASED))
    lease.look(1e9)
    assert lease.lost == "the server no longer knows the token"


# ---- what is asked and said -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flow_id", "count"), [(0, 1), (-1, 1), (1 << 63, 1), (1, 0), (1, 1 << 31)])
def test_flow_ids_and_counts_out_of_range_are_refused(flow_id: int, count: int) -> None:
    with pytest.raises(ValueError, match="must be 1 to"):
        check(flow_id, count)


@pytest.mark.parametrize("wrong", ["1", 1.0, None])
def test_flow_ids_and_counts_must_be_whole_numbers(wrong: Any) -> None:
    with pytest.raises(TypeError, match="whole number"):
        check(wrong, 1)
    with pytest.raises(TypeError, match="whole number"):
        check(1, wrong)


def test_parameters_must_be_a_list_of_values() -> None:
    assert values_of(iter([1, "a"])) == [1, "a"]
    with pytest.raises(ValueError, match="at least one"):
        values_of([])
    for text in ("abc", b"abc"):
        with pytest.raises(TypeError, match="list of values"):
            values_of(text)


def test_namespaces_are_checked() -> None:
    assert read_namespace("\u00e4") == b"\xc3\xa4"
    assert read_namespace(b"n" * wire.NAMESPACE_MAX)
    for wrong in ("", "  ", "n" * (wire.NAMESPACE_MAX + 1)):
        with pytest.raises(ValueError, match="namespace"):
            read_namespace(wrong)


def test_which_answers_let_a_call_pass() -> None:
    assert [Answer(status).passed for status in (Status.OK, Status.BLOCKED, Status.SHOULD_WAIT)] == [True, False, True]


def test_tokens_and_errors_as_text() -> None:
    assert (str(TOKEN), repr(TOKEN)) == ("2 of flow 101", "<Token -7 for 2 of flow 101>")
    assert repr(Token(1, 5, 1, fallback=True)) == "<Token 1 for 1 of flow 5, fallback>"
    asked = AskedToken(101, 2, False, 0.5, "raise")
    error = asked.blocked(asked.timeout)
    assert isinstance(error, NotAvailable)
    assert type(error) is Blocked
    assert str(error) == "blocked (status 1): asked for 2 of flow 101, waited 0.5 s"
    assert str(not_kept(Status.NOT_AVAILABLE, TOKEN)) == "not available (status 5): token -7 of flow 101"
    gone = not_kept(Status.ALREADY_RELEASED, TOKEN)
    assert type(gone) is TokenLost
    assert str(gone) == "lost 2 of flow 101: the server no longer knows the token"
    assert isinstance(not_kept(-100, TOKEN), TokenRefused)


@pytest.mark.parametrize("on_lost", ["reacquire", "", None, 5])
def test_invalid_values_of_on_lost_are_refused(on_lost: Any) -> None:
    with pytest.raises(ValueError, match="on_lost must be"):
        AskedToken(101, 1, False, None, on_lost)
