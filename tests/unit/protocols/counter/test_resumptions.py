"""Resume, Goodbye, Who and Held: holdings stay for a grace time, and another connection can take them over."""

from __future__ import annotations

import pytest

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Grant, OnDeath, Permit, Rate, Resumption, Status
from kit.counters import outputs
from kit.takes import MS, Desk, Taker

GRACE_MS = 5000
RESUME_MAX = 60  # s


@pytest.fixture
def desk() -> Desk:
    return made()


def made(**sizes: int) -> Desk:
    desk = Desk(**sizes)
    desk.store.limit_resumptions(RESUME_MAX)
    return desk


def ask(taker: Taker, grace_ms: int = GRACE_MS) -> Resumption:
    assert taker.status(wire.resume(0, grace_ms)) == Status.NO_ERROR
    return wire.decode_resumption(taker.answers.others[-1].body)


def present(taker: Taker, resumption: Resumption, attempt: int = 0) -> Resumption | int:
    status = taker.status(wire.resume(0, GRACE_MS, resumption.token, attempt))
    return wire.decode_resumption(taker.answers.others[-1].body) if status == Status.NO_ERROR else status


def held(taker: Taker, name: bytes) -> int:
    assert taker.status(wire.held(0, name)) == Status.NO_ERROR
    return wire.decode_consumption(taker.answers.others[-1].body)


def settle(taker: Taker, former: Taker, opaque: int) -> int:
    """Settles a Take of a former connection: one unit of r was used."""
    grant = former.of(opaque)
    assert isinstance(grant, Grant)
    return taker.status(wire.settle(0, grant.number, b"r", 1))


def figures(desk: Desk) -> tuple[int, int, int, int]:
    found = desk.store.snapshot()
    return found["kept"], found["kept_holdings"], found["resumed"], found["expired_stays"]


# ---- tokens and grace times ------------------------------------------------------------------------------------------


def test_holdings_stay_for_the_grace_time(desk: Desk) -> None:
    one, other = desk.some(2)
    ask(one)
    assert one.acquire(b"p", 2, 2) == Status.NO_ERROR
    one.close()
    desk.wait(GRACE_MS - 1)
    assert other.acquire(b"p") == Status.RESOURCE_NOT_AVAILABLE
    assert figures(desk) == (1, 1, 0, 0)
    desk.wait(3)
    assert other.acquire(b"p") == Status.NO_ERROR
    assert figures(desk) == (0, 0, 0, 1)


def test_another_connection_resumes_the_holdings(desk: Desk) -> None:
    one, other = desk.some(2)
    resumption = ask(one)
    assert one.acquire(b"p", 2, 3) == Status.NO_ERROR
    opaque = one.take(Rate(b"r", 3, 10, 3_600_000_000, 10, OnDeath.CHARGED), Permit(b"q", 1, 1))
    before = desk.store.leases(9)
    one.close()
    desk.wait(GRACE_MS - 1)
    after = present(other, resumption)
    assert isinstance(after, Resumption)
    assert after.token != resumption.token
    assert desk.store.leases(9) == before, "the numbers of its connection and the ages are the same"
    assert figures(desk) == (0, 0, 1, 0)
    desk.wait(2 * GRACE_MS)
    assert (held(other, b"p"), held(other, b"q"), held(other, b"r"), held(other, b"none")) == (2, 1, 0, 0)
    assert settle(other, one, opaque) == Status.NO_ERROR
    assert other.release(b"p", 2) == other.release(b"q") == Status.NO_ERROR
    other.close()
    assert figures(desk) == (0, 0, 1, 0), "nothing was left to keep"


def test_a_connection_with_charges_to_settle_is_kept(desk: Desk) -> None:
    one, other, third = desk.some(3)
    resumption = ask(one)
    rate = Rate(b"r", 3, 3, 3_600_000_000, 3, OnDeath.REFUNDED)
    opaque = one.take(rate)
    one.close()
    assert not third.has(third.take(rate)), "nothing is refunded yet"
    assert isinstance(present(other, resumption), Resumption)
    assert settle(other, one, opaque) == Status.NO_ERROR
    again = ask(other)
    assert other.has(other.take(rate._replace(amount=1)))
    other.close()
    desk.wait(GRACE_MS + 2)
    assert third.has(third.take(rate._replace(amount=2))), "what was not settled is refunded at the end"
    assert present(desk.taker(), again) == Status.NOT_FOUND


def test_a_token_is_good_for_one_client(desk: Desk) -> None:
    one, other, third, fourth = desk.some(4)
    first = ask(one)
    assert one.acquire(b"p") == Status.NO_ERROR
    one.close()
    second = present(other, first, 7)
    assert isinstance(second, Resumption)
    assert present(third, first, 8 + 65536) == Status.NOT_FOUND
    third_resumption = present(third, first, 8)
    assert isinstance(third_resumption, Resumption), "the reply may have been lost"
    assert (held(third, b"p"), held(other, b"p")) == (1, 0)
    assert present(fourth, second, 7) == Status.NOT_FOUND
    third.close()
    assert isinstance(present(fourth, third_resumption, 9), Resumption)
    assert present(other, first, 7) == Status.NOT_FOUND
    assert fourth.release(b"p") == Status.NO_ERROR


@pytest.mark.parametrize("attempt", [6, 7])
def test_a_late_resume_of_an_old_connection_is_refused(desk: Desk, attempt: int) -> None:
    """The client has abandoned the connection on which it presented its token first."""
    one, late, successor = desk.some(3)
    first = ask(one)
    assert one.acquire(b"p") == Status.NO_ERROR
    one.close()
    second = present(successor, first, 7)
    assert isinstance(second, Resumption)
    assert present(late, first, attempt) == Status.NOT_FOUND
    assert held(successor, b"p") == 1
    successor.close()
    assert isinstance(present(late, second), Resumption)


def test_a_client_may_resume_again_after_a_lost_reply(desk: Desk) -> None:
    one, other, third = desk.some(3)
    first = ask(one)
    assert one.acquire(b"p") == Status.NO_ERROR
    one.close()
    assert isinstance(present(other, first, 7), Resumption)
    other.close()
    desk.wait(GRACE_MS - 1)
    assert isinstance(present(third, first, 8), Resumption)
    assert held(third, b"p") == 1


def test_a_new_token_replaces_the_old_one(desk: Desk) -> None:
    one, other = desk.some(2)
    first, second = ask(one), ask(one, 2**32 - 1)
    assert second == Resumption(second.token, RESUME_MAX * 1000)
    assert one.acquire(b"p") == Status.NO_ERROR
    one.close()
    assert present(other, first) == Status.NOT_FOUND
    assert isinstance(present(other, second), Resumption)


def test_invalid_tokens_are_refused(desk: Desk) -> None:
    one, other = desk.some(2)
    resumption = ask(one)
    assert one.acquire(b"p") == Status.NO_ERROR
    number, secret = resumption.token[:4], resumption.token[4:]
    wrong = [
        b"\0" * 12,
        number + bytes(8),
        bytes(4) + secret,
        b"\xff" * 4 + secret,
        b"\0\0\0\2" + secret,
        secret + number,
    ]
    for token in wrong:
        assert present(other, Resumption(token, 0)) == Status.NOT_FOUND
    for bit in range(64):
        flipped = int.from_bytes(secret, "big") ^ 1 << bit
        assert present(other, Resumption(number + flipped.to_bytes(8, "big"), 0)) == Status.NOT_FOUND
    assert isinstance(present(other, resumption), Resumption)


@pytest.mark.parametrize(
    "body", [b"", b"\0\0\0\1\0", bytes(4), bytes(3), b"\1" * 19, b"\1" * 21, bytes(20), b"\1" * 16]
)
def test_invalid_resume_requests_are_refused(desk: Desk, body: bytes) -> None:
    (one,) = desk.some(1)
    assert one.status(wire.frame(wire.Opcode.RESUME, 0, body)) == Status.INVALID_ARGUMENTS


def test_a_connection_with_holdings_cannot_resume_another(desk: Desk) -> None:
    one, other, third = desk.some(3)
    resumption = ask(one)
    assert present(one, resumption) == Status.INVALID_ARGUMENTS, "it is its own"
    assert one.acquire(b"p") == Status.NO_ERROR
    assert other.acquire(b"q") == Status.NO_ERROR
    assert present(other, resumption) == Status.INVALID_ARGUMENTS
    assert other.release(b"q") == Status.NO_ERROR
    waiting = other.take(Permit(b"p", 1, 1), wait_ms=1000)
    assert present(other, resumption) == Status.INVALID_ARGUMENTS
    assert other.cancel(waiting) == Status.NO_ERROR
    charged = other.take(Rate(b"r", 1, 1, 1_000_000, 1, OnDeath.CHARGED))
    assert present(other, resumption) == Status.INVALID_ARGUMENTS
    assert other.settle(charged, b"r", 1) == Status.NO_ERROR
    assert isinstance(present(other, resumption), Resumption)
    assert present(third, ask(other)), "third has nothing"


def test_resume_without_a_grace_time_gives_no_token() -> None:
    desk = made()
    one, other, third = desk.some(3)
    resumption = ask(one)
    assert one.acquire(b"p") == other.acquire(b"q") == Status.NO_ERROR
    kept = ask(other)
    other.close()
    desk.store.limit_resumptions(0)
    assert third.status(wire.resume(0, 1)) == Status.RESOURCE_NOT_AVAILABLE
    assert present(third, resumption) == present(third, kept) == Status.RESOURCE_NOT_AVAILABLE
    one.close()
    assert figures(desk)[:2] == (1, 1), "the grace time that has begun goes on, and no other begins"
    desk.store.limit_resumptions(1)
    assert isinstance(present(third, kept), Resumption)


def test_a_smaller_maximum_applies_from_the_next_end_on(desk: Desk) -> None:
    (one,) = desk.some(1)
    assert ask(one).grace_ms == GRACE_MS
    assert one.acquire(b"p") == Status.NO_ERROR
    desk.store.limit_resumptions(1)
    one.close()
    desk.wait(1002)
    assert figures(desk) == (0, 0, 0, 1)


def test_at_most_half_of_the_holdings_are_kept() -> None:
    desk = made(holdings=5)
    one, other, third = desk.some(3)
    for taker, names in ((one, b"ab"), (other, b"cd"), (third, b"e")):
        ask(taker)
        assert {taker.acquire(bytes([name])) for name in names} == {Status.NO_ERROR}
    one.close()
    other.close()
    assert figures(desk)[:2] == (1, 2), "for the second, there is too little left"
    third.close()
    assert figures(desk)[:2] == (2, 3)
    assert desk.store.held() == 3


# ---- the other connection --------------------------------------------------------------------------------------------


def test_resuming_an_open_connection_takes_its_holdings(desk: Desk) -> None:
    one, other, third = desk.some(3)
    resumption = ask(one)
    assert one.acquire(b"p", 1, 1) == Status.NO_ERROR
    waiting = one.take(Permit(b"q", 1, 1), wait_ms=1000)
    assert one.has(waiting)
    assert third.acquire(b"s") == Status.NO_ERROR
    waiting = one.take(Permit(b"s", 1, 1), wait_ms=1000)
    assert isinstance(present(other, resumption), Resumption)
    assert one.of(waiting) == Status.CANCELLED
    assert one.session.awaited == 0
    assert one.release(b"p") == Status.NOT_ACQUIRED
    assert one.acquire(b"t") == Status.NO_ERROR, "it goes on"
    assert (held(one, b"t"), held(other, b"t"), held(other, b"p")) == (1, 0, 1)
    one.close()
    assert figures(desk) == (0, 0, 1, 0), "it has no token any more"
    assert third.acquire(b"t") == Status.NO_ERROR


def test_waiting_takes_of_an_ended_connection_are_removed_at_once(desk: Desk) -> None:
    one, other, third = desk.some(3)
    ask(one)
    assert other.acquire(b"p") == one.acquire(b"q") == Status.NO_ERROR
    one.take(Permit(b"p", 1, 1), wait_ms=100_000)
    behind = third.take(Permit(b"p", 1, 1), wait_ms=100_000)
    one.close()
    assert desk.store.snapshot()["waiters"] == 1
    assert other.release(b"p") == Status.NO_ERROR
    assert third.has(behind)
    assert figures(desk)[:2] == (1, 1)


WAITING = 10_000


def crowd(taker: Taker) -> None:
    """Lets many Takes wait, more than a turn can end."""
    taker.send(b"".join(wire.take(number, [Permit(b"w", 1, 1)], 100_000) for number in range(WAITING)))
    assert taker.session.awaited == WAITING


@pytest.mark.parametrize("ends", [False, True])
def test_a_connection_with_very_many_takes_is_resumed(ends: bool) -> None:
    desk = made(waiters=WAITING)
    one, other, third = desk.some(3)
    resumption = ask(one)
    assert third.acquire(b"w") == one.acquire(b"p") == Status.NO_ERROR
    crowd(one)
    if ends:
        one.session.closed(desk.pump.now_ns)
    assert other.session.receive(wire.resume(0, 1, resumption.token), desk.pump.now_ns) == b""
    turns = 0
    while not (said := other.session.take_output(desk.pump.now_ns)):
        turns += 1
        desk.store.tick(desk.pump.now_ns)
    assert turns > 3, "it is much work"
    assert said[2] == Status.NO_ERROR
    desk.pump.settle()
    assert desk.store.snapshot()["waiters"] == 0
    assert held(other, b"p") == 1
    if not ends:
        assert {one.of(number) for number in range(WAITING)} == {Status.CANCELLED}


def test_a_grace_time_that_is_over_before_the_takes_are_removed() -> None:
    desk = made(waiters=WAITING)
    one, other = desk.some(2)
    ask(one, 1)
    assert other.acquire(b"w") == one.acquire(b"p") == Status.NO_ERROR
    crowd(one)
    one.close()
    desk.wait(5)
    assert (desk.store.held(), desk.store.snapshot()["waiters"]) == (1, 0)


def test_a_garbage_collected_session_can_be_resumed(desk: Desk) -> None:
    """Its end is noticed at the next tick. Until then, a Resume with its token waits."""
    one = Taker(desk.pump.connect())
    other, third = desk.some(2)
    resumption = ask(one)
    assert one.acquire(b"p") == Status.NO_ERROR
    one.session.owner = None
    del one
    desk.pump.settle()
    assert figures(desk)[:2] == (1, 1)
    assert isinstance(present(other, resumption), Resumption)
    assert third.acquire(b"p") == Status.RESOURCE_NOT_AVAILABLE


def test_an_evicted_connection_has_no_grace_time(desk: Desk) -> None:
    (one,) = desk.some(1)
    ask(one)
    assert one.acquire(b"p") == Status.NO_ERROR
    assert not desk.store.evict(one.session.number, desk.pump.now_ns)
    one.close()
    assert (desk.store.held(), figures(desk)) == (0, (0, 0, 0, 0))
    for number in (0, 1, 2, 1 << 31):
        assert not desk.store.evict(number, desk.pump.now_ns)


def test_evicting_a_connection_ends_its_grace_time(desk: Desk) -> None:
    one, other = desk.some(2)
    resumption = ask(one)
    number = one.session.number
    assert one.acquire(b"p") == Status.NO_ERROR
    one.close()
    assert desk.store.about(number) == ("", (desk.pump.now_ns // MS + GRACE_MS) // 100)
    assert desk.store.evict(number, desk.pump.now_ns)
    desk.wait(3)
    assert desk.store.about(number) == ("", None)
    assert (desk.store.held(), figures(desk)) == (0, (0, 0, 0, 1))
    assert present(other, resumption) == Status.NOT_FOUND


def test_a_drain_ends_all_grace_times(desk: Desk) -> None:
    one, other, third = desk.some(3)
    resumption = ask(one)
    late = ask(other)
    assert one.acquire(b"p") == other.acquire(b"q") == third.acquire(b"r") == Status.NO_ERROR
    one.close()
    assert desk.store.held() == 3
    desk.store.begin_drain()
    desk.pump.settle()
    assert (desk.store.held(), figures(desk)) == (2, (0, 0, 0, 1))
    other.close()
    assert desk.store.held() == 1
    fourth = desk.taker()
    for request in (wire.resume(0, 1), wire.resume(0, 1, resumption.token), wire.resume(0, 1, late.token)):
        assert fourth.status(request) == Status.RESOURCE_NOT_AVAILABLE
        assert fourth.answers.others[-1].body == b"Draining"


# ---- Goodbye ---------------------------------------------------------------------------------------------------------


def test_goodbye_gives_everything_back(desk: Desk) -> None:
    one, other = desk.some(2)
    resumption = ask(one)
    refunded = Rate(b"r", 3, 3, 3_600_000_000, 3, OnDeath.REFUNDED)
    assert one.status(wire.who(0, "me")) == one.acquire(b"p") == Status.NO_ERROR
    assert one.has(one.take(refunded, Permit(b"q", 2, 2)))
    assert other.acquire(b"s") == Status.NO_ERROR
    waiting = one.take(Permit(b"s", 1, 1), wait_ms=1000)
    assert one.status(wire.goodbye(0)) == Status.NO_ERROR
    assert one.of(waiting) == Status.CANCELLED
    assert (one.session.awaited, desk.store.snapshot()["charges"], desk.store.held()) == (0, 0, 1)
    assert other.has(other.take(refunded, Permit(b"q", 2, 2), Permit(b"p", 1, 1)))
    assert present(desk.taker(), resumption) == Status.NOT_FOUND
    assert desk.store.about(one.session.number)[0] == "me"
    assert one.acquire(b"t") == Status.NO_ERROR, "it goes on"
    one.close()
    assert figures(desk) == (0, 0, 0, 0)


def test_a_goodbye_with_many_holdings() -> None:
    desk = made(buckets=WAITING, holdings=WAITING, waiters=WAITING, name_memory=0)
    one, other = desk.some(2)
    assert other.acquire(b"w") == Status.NO_ERROR
    names = [b"%d" % number for number in range(WAITING - 1)]
    one.send(b"".join(wire.acquire(0, name, 1, 1) for name in names))
    crowd(one)
    one.answers.others.clear()
    said = one.session.receive(wire.goodbye(0) + wire.acquire(0, names[0], 1, 1), desk.pump.now_ns)
    pieces = [said, *outputs(one.session, desk.pump.now_ns)]
    assert len(pieces) > 20, "it takes its time"
    one.peer.output += b"".join(pieces)
    assert [response.status for response in one.answers.others] == [Status.NO_ERROR] * 2
    assert (desk.store.held(), desk.store.snapshot()["waiters"]) == (2, 0)
    assert {one.of(number) for number in range(WAITING)} == {Status.CANCELLED}


# ---- Who and Held ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "billing-3", "\N{SNOWMAN} man", "x" * 64, "\N{SNOWMAN}" * 21, " a ", "e\u0301"])
def test_who_sets_the_name_of_a_connection(desk: Desk, name: str) -> None:
    (one,) = desk.some(1)
    assert desk.store.about(one.session.number)[0] == ""
    assert one.status(wire.who(0, "before")) == Status.NO_ERROR
    assert one.status(wire.who(0, name)) == Status.NO_ERROR
    number = one.session.number
    assert desk.store.about(number)[0] == name
    one.close()
    assert desk.store.about(number)[0] == ""


@pytest.mark.parametrize(
    "name",
    [
        *(
            b"",
            b"x" * 65,
            b"\xff",
            b"\xc3",
            b"a\nb",
            b"a\0",
            b"\x1b[2J",
            b"\xe2\x80\xa8",
            b"\xed\xa0\x80",
            b"\xe2\x80\xae",
        ),
        *(blank.encode() for blank in (" ", "\u3164", "\u115f" * 21, "\u0301" * 32, "\u2800 \uffa0\u1160", "\ufe0f")),
    ],
)
def test_invalid_names_of_connections_are_refused(desk: Desk, name: bytes) -> None:
    (one,) = desk.some(1)
    assert one.status(wire.who(0, "before")) == Status.NO_ERROR
    assert one.status(wire.frame(wire.Opcode.WHO, 0, name)) == Status.INVALID_ARGUMENTS
    assert desk.store.about(one.session.number)[0] == "before"
    assert desk.store.about(1 << 31)[0] == ""


def test_names_when_a_connection_is_resumed(desk: Desk) -> None:
    one, other, third = desk.some(3)
    resumption = ask(one)
    assert one.status(wire.who(0, "one")) == one.acquire(b"p") == Status.NO_ERROR
    resumption = present(other, resumption)
    assert isinstance(resumption, Resumption)
    assert [desk.store.about(taker.session.number)[0] for taker in (one, other)] == ["one", "one"]
    other.close()
    assert desk.store.about(desk.store.leases(1)[0][0])[0] == "one", "also in the grace time"
    assert third.status(wire.who(0, "third")) == Status.NO_ERROR
    assert isinstance(present(third, resumption), Resumption)
    assert [desk.store.about(taker.session.number)[0] for taker in (one, third)] == ["one", "third"]


def test_requests_cut_in_two_get_the_same_replies() -> None:
    """Wherever the stream is cut."""
    token = ask(made().taker()).token  # a new store gives the same one
    requests = b"".join(
        (
            wire.who(1, "name"),
            wire.resume(2, GRACE_MS, token, 3),
            wire.held(4, b"p"),
            wire.goodbye(5),
            wire.resume(6, GRACE_MS, token, 3),
            wire.resume(7, GRACE_MS),
        )
    )
    replies = set()
    for cut in range(len(requests)):
        desk = made()
        one, other = desk.some(2)
        assert ask(one).token == token
        assert one.acquire(b"p") == Status.NO_ERROR
        said = b"".join(other.session.receive(piece, desk.pump.now_ns) for piece in (requests[:cut], requests[cut:]))
        replies.add(said)
        desk.pump.settle()
        assert desk.store.held() == 0
    (said,) = replies
    assert [response.status for response in wire.ResponseParser().feed(said)] == [0, 0, 0, 0, Status.NOT_FOUND, 0]


def test_outcomes_are_counted(desk: Desk) -> None:
    one, other = desk.some(2)
    resumption = ask(one)
    one.status(wire.who(0, "a"))
    one.status(wire.frame(wire.Opcode.WHO, 0, b"\0"))
    present(other, Resumption(bytes(12), 0))
    assert one.acquire(b"p") == Status.NO_ERROR
    present(other, resumption)
    held(other, b"p")
    other.status(wire.goodbye(0))
    found = {(name, status): count for name, status, count in desk.store.outcomes()}
    del found["acquire", "ok"]
    assert found == {
        ("resume", "ok"): 2, ("resume", "not_found"): 1, ("who", "ok"): 1, ("who", "invalid_arguments"): 1,
        ("held", "ok"): 1, ("goodbye", "ok"): 1,
    }  # fmt: skip


def test_grace_times_use_the_engines_clock(desk: Desk) -> None:
    (one,) = desk.some(1)
    ask(one)
    assert one.acquire(b"p") == Status.NO_ERROR
    one.close()
    due = desk.store.next_deadline()
    assert desk.pump.now_ns < due <= desk.pump.now_ns + (GRACE_MS + 2) * MS


@pytest.mark.parametrize("last", ["cancel", "goodbye"])
def test_a_cancel_executed_after_a_half_close_lets_the_connection_end(desk: Desk, last: str) -> None:
    """Requests that waited for a later turn are executed then, and no Take waits for its reply any more."""
    holder, one, other = desk.some(3)
    assert holder.acquire(b"p") == Status.NO_ERROR
    waiting = one.take(Permit(b"p", 1, 1), wait_ms=1000 * GRACE_MS)
    requests = [wire.stats(0)] * 40  # more than one call executes
    requests += [wire.cancel(0, waiting) if last == "cancel" else wire.goodbye(0), wire.acquire(0, b"q", 1, 1)]
    session, now_ns = one.session, desk.pump.now_ns
    one.peer.take(session.receive(b"".join(requests), now_ns))
    one.peer.take(session.eof(now_ns))
    desk.wait(1)
    assert session.awaited == 0
    assert session.closing
    assert desk.store.snapshot()["waiters"] == 0
    assert other.acquire(b"q") == Status.NO_ERROR, "the permit of a connection that has ended came back"
