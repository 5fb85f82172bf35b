"""A session of the sentinel protocol: how many requests a connection may send at once, and the counts of outcomes.

Each request's reply, byte by byte, is in tests/conformance/sentinel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from conformance.sentinel.engine import make_store
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.wire import Status
from unit.protocols.sentinel.rig import calls, rate, values

if TYPE_CHECKING:
    from collections.abc import Callable

    from unit.protocols.sentinel.rig import Rig

    MakeRig = Callable[..., Rig]

OUTPUT_MAX = 1 << 18  # bytes of replies in one piece, and one more reply
BUDGET = 4096  # steps that all sessions have in a turn
GRACE = 128  # that a call may take beyond them
NAMESPACES = 65_536  # that are connected to


# ---- much at once ---------------------------------------------------------------------------------------------------


def test_a_flood_of_requests_waits_for_turns_and_others_are_served(make_rig: MakeRig) -> None:
    rig = make_rig(rate(1), rate(2, 5))
    flood, other = rig.connection(), rig.connection()
    flood.send(wire.flow(1, 1, 1) * 10_000)
    assert flood.session.more
    assert BUDGET <= len(flood.told()) <= BUDGET + GRACE
    assert other.ask(wire.flow(1, 2, 1)).status == Status.OK
    rig.settle()
    assert len(flood.told()) == pytest.approx(10_000 - BUDGET, abs=GRACE)


@pytest.mark.parametrize(("samples", "steps"), [(10, 200), (125, 1800)])
def test_the_work_of_a_value_grows_with_its_samples(make_rig: MakeRig, samples: int, steps: int) -> None:
    rig = make_rig(values(1, 1e9, samples=samples))
    client = rig.connection()
    client.send(wire.param_flow(1, 1, 1, range(100)) * 200)
    assert client.session.more
    answered = len(client.told())
    assert BUDGET // (steps + 10) <= answered <= (BUDGET + GRACE) // steps + 1
    rig.settle()
    assert answered + len(client.told()) == 200


def test_the_replies_of_a_call_are_bounded(make_rig: MakeRig) -> None:
    """They are short, so that the work ends a call before they do."""
    client = make_rig(rate(1)).connection()
    said = client.session.receive(wire.flow(1, 1, 1) * 30_000, client.rig.now_ns)
    assert len(said) <= OUTPUT_MAX + 16
    assert client.session.more
    while client.session.more:
        said += client.session.take_output(client.rig.now_ns)
    assert len(client.parser.feed(said)) == 30_000


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_requests_parsed_ahead_are_executed_in_order(make_rig: MakeRig, count: int) -> None:
    """What a request frees is there for the next, wherever the batches of 64 end."""
    rig = make_rig(calls(1, 1))
    client = rig.connection()
    first = client.acquire(1)
    client.send(*(wire.release(n, first) + wire.acquire(n, 1, 1) for n in range(count)))
    told = client.told()
    assert [response.status for response in told[:2]] == [Status.RELEASE_OK, Status.OK]
    expected = [Status.ALREADY_RELEASED, Status.BLOCKED] * (count - 1)
    assert [response.status for response in told[2:]] == expected
    assert [response.xid for response in told] == [n for n in range(count) for _ in range(2)]


def test_the_longest_frame(make_rig: MakeRig) -> None:
    """It is answered when it is complete, in linear time; a connection that ends within it gets no answer."""
    rig = make_rig(rate(1, 9))
    client = rig.connection()
    frame = wire.frame(7, 1, bytes(65_530))
    for start in range(0, len(frame) - 1, 100):
        client.send(frame[start : min(start + 100, len(frame) - 1)])
    assert client.told() == []
    client.send(frame[-1:], wire.flow(8, 1, 1))
    assert [(response.xid, response.status) for response in client.told()] == [(7, Status.BAD_REQUEST), (8, Status.OK)]
    client.send(frame[:-1])
    client.peer.half_close()
    assert client.told() == []
    assert rig.store.sessions_open == 0


# ---- namespaces -----------------------------------------------------------------------------------------------------


def test_the_number_of_connected_namespaces_is_bounded(make_rig: MakeRig) -> None:
    """Beyond it a ping of an unknown namespace gets -1; when all connections have left a namespace, another has
    room."""
    rig = make_rig()
    clients = [rig.connection() for _ in range(NAMESPACES // 64)]
    for number, client in enumerate(clients):
        client.send(*(wire.ping(1, b"%d" % name) for name in range(64 * number, 64 * number + 64)))
        rig.settle()
        assert {response.status for response in client.told()} == {Status.OK}
    assert rig.figures("namespaces") == [NAMESPACES]
    other = rig.connection()
    assert other.ask(wire.ping(1, b"one more")).status == Status.FAIL
    assert other.ask(wire.ping(1, b"77")).connected == 2
    clients[3].close()
    rig.settle()
    assert other.ask(wire.ping(1, b"one more")).connected == 1
    assert other.ask(wire.ping(1, b"200")).connected == 1
    rig.store.audit()


def test_long_namespaces_have_memory_of_their_own(make_rig: MakeRig) -> None:
    """Where that is used up, the reply is -1, and values of parameters have their own memory."""
    rig = make_rig(values(1), max_param_values=1)
    statuses = []
    while not statuses or statuses[-1] == Status.OK:
        client = rig.connection()
        names = (b"%d-%d" % (len(statuses), number) for number in range(64))
        client.send(*(wire.ping(1, name.ljust(1013, b"n")) for name in names))
        rig.settle()
        statuses += [response.status for response in client.told()]
        assert len(statuses) < NAMESPACES
    assert len(statuses) > 1024
    assert set(statuses) == {Status.OK, Status.FAIL}
    assert client.ask(wire.ping(1, b"short")).status == Status.OK
    assert client.ask(wire.param_flow(1, 1, 1, ["v"])).status == Status.OK


# ---- later answers --------------------------------------------------------------------------------------------------


def test_late_answers_of_a_connection_are_one_write(served: Rig, asked: list[Any]) -> None:
    client = served.connection()
    client.send(wire.acquire(1, 1, 1), wire.acquire(2, 1, 1), wire.flow(3, 2, 1))
    served.store.tick(served.now_ns)
    client.told()
    for call in asked:
        served.store.answer(call.ticket, Status.OK, call.ticket, served.now_ns)
    assert served.store.take_dirty() == [client.session]
    assert len(client.session.take_output(served.now_ns)) == 2 * 16


def test_a_connection_that_does_not_read_is_not_read(served: Rig, asked: list[Any]) -> None:
    """So no more requests wait than may be sent at once."""
    client = served.connection()
    client.peer.deaf = True
    client.send(wire.acquire(1, 1, 1) * 1000)
    served.settle()
    for call in asked:
        served.store.answer(call.ticket, Status.OK, 5, served.now_ns)
    served.settle()
    assert client.session.more
    client.send(wire.acquire(2, 1, 1) * 10)
    served.settle()
    assert len(asked) == 1000
    client.peer.deaf = False
    client.peer.pull()
    served.settle()
    assert len(asked) == 1010
    assert [(response.xid, response.token_id) for response in client.told()] == [(1, 5)] * 1000
    assert not client.session.dropped


def test_a_half_closed_connection_is_answered_before_it_ends(served: Rig, asked: list[Any]) -> None:
    client = served.connection()
    client.send(wire.acquire(1, 1, 1), wire.flow(2, 2, 1))
    client.peer.half_close()
    assert not client.session.closing
    served.settle()
    served.store.answer(asked[0].ticket, Status.OK, 9, served.now_ns)
    served.settle()
    assert [(response.xid, response.token_id) for response in client.told()] == [(2, 0), (1, 9)]
    assert client.session.closing
    assert len(asked) == 1
    assert served.store.sessions_open == 0


def test_a_call_has_the_address_of_its_client(served: Rig, asked: list[Any]) -> None:
    client = served.connection()
    client.session.owner = None
    client.session.receive(wire.acquire(1, 1, 1), served.now_ns)
    served.settle()
    assert asked[0].address == ""


# ---- what is told ---------------------------------------------------------------------------------------------------


def test_outcomes_are_counted_by_type_and_status(make_rig: MakeRig) -> None:
    rig = make_rig(calls(1, 1), rate(2, 1), values(3, 1))
    client = rig.connection()
    assert rig.store.outcomes() == []
    client.send(
        wire.ping(1, b"n"), wire.ping(1, b""), wire.frame(1, 0, b"x"),
        *[wire.flow(1, 2, 1)] * 3, wire.flow(1, 9, 1), wire.frame(1, 1),
        *[wire.param_flow(1, 3, 1, ["v"])] * 2,
        *[wire.acquire(1, 1, 1)] * 2, wire.acquire(1, 2, 1),
        wire.release(1, 7), wire.keep(1, 7), wire.frame(1, 5, b"x"),
        wire.frame(1, 6), wire.frame(1, -1, b"x"), bytes(2), wire.frame(1, 77, bytes(2000)),
        wire.frame(1, 1, bytes(2000)),
    )  # fmt: skip
    assert sorted(rig.store.outcomes()) == [
        ("acquire", "blocked", 1),
        ("acquire", "no_rule", 1),
        ("acquire", "ok", 1),
        ("flow", "bad_request", 2),
        ("flow", "blocked", 2),
        ("flow", "no_rule", 1),
        ("flow", "ok", 1),
        ("keep", "already_released", 1),
        ("keep", "bad_request", 1),
        ("param", "blocked", 1),
        ("param", "ok", 1),
        ("ping", "bad_request", 1),
        ("ping", "fail", 1),
        ("ping", "ok", 1),
        ("release", "already_released", 1),
        ("unknown", "bad_request", 4),
    ]
    assert client.session.requests == 21


def test_a_closed_session_answers_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(rate(1))
    client = rig.connection()
    client.close()
    assert client.session.receive(wire.flow(1, 1, 1), rig.now_ns) == b""
    assert rig.store.outcomes() == []


@pytest.mark.parametrize("size", [0, 15, 17])
def test_hash_keys_of_the_wrong_size_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="16"):
        make_store(hash_key=bytes(size))
