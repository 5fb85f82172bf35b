"""A session of the smockron protocol, beyond the conformance vectors: bounds of work, and input in pieces."""

from __future__ import annotations

import pytest

from conformance.smockron.engine import Pump, make_store
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import Parser, SocketType, Status
from kit.pump import START_NS

LATER_NS = START_NS + 1


def test_the_server_sends_its_greeting_first_and_keeps_early_input() -> None:
    store = make_store()
    session = store.session(START_NS, 0)
    assert session.more
    assert session.receive(wire.greeting() + wire.ready(SocketType.PUB), START_NS) == b""
    assert session.take_output(START_NS) == wire.greeting()
    assert session.more
    answer = session.take_output(START_NS)
    assert Parser().feed(wire.greeting() + answer)[0] == (b"READY", b"\x0bSocket-Type\0\0\0\x03SUB")
    session.closed(START_NS)


@pytest.mark.parametrize("size", [1, 24, 25, 300, 4096])
def test_a_message_byte_by_byte_costs_as_much_as_a_whole_one(size: int) -> None:
    bench = Pump(make_store())
    gate, ear = bench.connect_by_name("gate"), bench.connect_by_name("control")
    gate.send(wire.greeting() + wire.ready(SocketType.PUB))
    ear.send(wire.greeting() + wire.ready(SocketType.SUB) + wire.subscribe(b""))
    message = wire.accounting(b"day", Status.ACCEPTED, b"i" * size, 0)
    for byte in message:
        gate.send(bytes((byte,)))
    assert bench.store.snapshot()["published"] == 1


def test_many_messages_in_one_read_are_handled_in_turns() -> None:
    """Others are served between them."""
    bench = Pump(make_store(identifiers=1 << 16))
    gate = bench.connect_by_name("gate")
    gate.send(wire.greeting() + wire.ready(SocketType.PUB))
    many = b"".join(wire.accounting(b"second", Status.ACCEPTED, b"%d" % number, 0) for number in range(10_000))
    gate.session.receive(many, LATER_NS)
    done = bench.store.snapshot()["identifiers"]
    assert 0 < done < 5000
    turns = 0
    while gate.session.more:
        gate.session.take_output(LATER_NS)
        turns += 1
    assert turns > 1
    assert bench.store.snapshot()["identifiers"] == 10_000


def test_evicting_identifiers_counts_as_work() -> None:
    bench = Pump(make_store(identifiers=10))
    gate = bench.connect_by_name("gate")
    gate.send(wire.greeting() + wire.ready(SocketType.PUB))
    many = b"".join(wire.accounting(b"second", Status.ACCEPTED, b"%d" % number, 0) for number in range(10_000))
    gate.session.receive(many, LATER_NS)
    assert 0 < bench.store.snapshot()["evicted"] < 1000


def test_publishing_to_many_subscribers_counts_as_work() -> None:
    bench = Pump(make_store(identifiers=1 << 16))
    ears = [bench.connect_by_name("control") for _ in range(500)]
    for ear in ears:
        ear.send(wire.greeting() + wire.ready(SocketType.SUB) + wire.subscribe(b""))
    gate = bench.connect_by_name("gate")
    gate.send(wire.greeting() + wire.ready(SocketType.PUB))
    gate.session.receive(b"".join(wire.accounting(b"day", Status.ACCEPTED, b"%d" % n, 0) for n in range(100)), LATER_NS)
    assert bench.store.snapshot()["published"] < 12, "4,096 steps in a turn"
    gate.take(b"")
    bench.settle()
    assert bench.store.snapshot()["published"] == 100


def test_messages_and_pings_count_as_requests() -> None:
    bench = Pump(make_store())
    gate = bench.connect_by_name("gate")
    gate.send(wire.greeting() + wire.ready(SocketType.PUB))
    before = gate.session.requests
    gate.send(3 * wire.accounting(b"day", Status.REJECTED, b"a", 0) + wire.ping(0))
    assert gate.session.requests - before == 4


@pytest.mark.parametrize("size", [0, 255, 256, 300, 4000])
def test_properties_of_any_size_may_precede_the_socket_type(size: int) -> None:
    bench = Pump(make_store())
    gate = bench.connect_by_name("gate")
    gate.output.clear()
    properties = b"\x08Identity" + size.to_bytes(4, "big") + b"i" * size + b"\x0bSocket-Type\0\0\0\x03PUB"
    gate.send(wire.greeting() + wire.command(b"READY", properties))
    answer = Parser().feed(wire.greeting() + bytes(gate.output))
    assert answer[0] == (b"READY", b"\x0bSocket-Type\0\0\0\x03SUB")


@pytest.mark.parametrize("moment", [str((1 << 64) + 1000), str((1 << 65) + 1000), "9" * 40])
def test_times_do_not_overflow(moment: str) -> None:
    bench = Pump(make_store())
    gate = bench.connect_by_name("gate")
    gate.send(wire.greeting() + wire.ready(SocketType.PUB))
    gate.send(wire.message(b"day\0", b"ACCEPTED", b"a", moment.encode(), b"", b""))
    assert bench.store.snapshot()["identifiers"] == 0
