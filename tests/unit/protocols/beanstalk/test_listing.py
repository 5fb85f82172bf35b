"""Lists of tubes, which others make and end meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from conformance.beanstalk.engine import make_store
from conformance.driven import Bench
from counterd.protocols.beanstalk import wire
from unit.protocols.beanstalk.asking import ask, said

if TYPE_CHECKING:
    from conformance.driven import EnginePeer

COUNT = 3000


def listed(output: bytes) -> list[bytes]:
    (reply,) = wire.Parser().feed(output)
    return wire.read_list(reply.body)


def many() -> tuple[Bench, EnginePeer]:
    """A store with so many tubes, and who watches them."""
    bench = Bench(make_store(memory_limit=1 << 24, tubes=2 * COUNT))
    peer = bench.connect()
    for number in range(COUNT):
        assert ask(peer, wire.watch(b"t%d" % number)) == b"WATCHING %d\r\n" % (number + 2)
    return bench, peer


def begun(bench: Bench, command: bytes) -> tuple[EnginePeer, bytes]:
    """A connection that has asked for a list, whose output only the test takes."""
    peer = bench.connect()
    peer.session.owner = None
    return peer, peer.session.receive(command, bench.now_ns)


def finished(bench: Bench, peer: EnginePeer, output: bytes) -> list[bytes]:
    while peer.session.more:
        output += peer.session.take_output(bench.now_ns)
    bench.store.audit()
    return listed(output)


def test_a_list_of_many_in_the_order_in_which_they_were_made():
    bench, peer = many()
    names = [b"default", *(b"t%d" % number for number in range(COUNT))]
    asking, output = begun(bench, wire.list_tubes())
    assert output == b""
    assert asking.session.more
    assert finished(bench, asking, output) == names
    peer.send(wire.list_tubes_watched())
    assert listed(said(peer)) == names


def test_what_is_there_throughout_is_listed_once():
    bench, peer = many()
    other = bench.connect()
    asking, output = begun(bench, wire.list_tubes())
    for number in range(COUNT):
        if number % 2:
            ask(peer, wire.ignore(b"t%d" % number))
    ask(other, *(wire.watch(b"new%d" % number) for number in range(COUNT // 2)))
    found = finished(bench, asking, output)
    assert len(found) == len(set(found))
    stayed = [b"default", *(b"t%d" % number for number in range(0, COUNT, 2))]
    assert [name for name in found if name in set(stayed)] == stayed
    assert bench.store.snapshot()["tubes"] == 1 + COUNT // 2 + COUNT // 2


def test_a_list_whose_asker_goes_keeps_no_tube():
    bench, peer = many()
    asking, _ = begun(bench, wire.list_tubes())
    assert asking.session.more
    asking.session.closed(bench.now_ns)
    peer.close()
    bench.settle()
    del asking
    assert ask(bench.connect(), wire.list_tube_used()) == b"USING default\r\n"
    bench.store.audit()
    assert bench.store.snapshot()["tubes"] == 1
