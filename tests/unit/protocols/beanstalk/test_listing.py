"""Lists of tubes and jobs, while other connections create and end tubes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conformance.beanstalk.engine import make_store
from counterd.protocols.beanstalk import wire
from kit.journaled import Journaled
from kit.pump import Pump
from unit.protocols.beanstalk.asking import ask, fill, said

if TYPE_CHECKING:
    from kit.pump import Peer

COUNT = 3000
TUBE, WATCH = 248, 32  # bytes


def listed(output: bytes) -> list[bytes]:
    (reply,) = wire.Parser().feed(output)
    return wire.read_list(reply.body)


def many() -> tuple[Pump, Peer]:
    """A store with so many tubes, and a connection that watches them."""
    bench = Pump(make_store(memory_limit=1 << 24, tubes=2 * COUNT))
    peer = bench.connect()
    for number in range(COUNT):
        assert ask(peer, wire.watch(b"t%d" % number)) == b"WATCHING %d\r\n" % (number + 2)
    return bench, peer


def begun(bench: Pump, command: bytes) -> tuple[Peer, bytes]:
    """A connection that has requested a list, and whose output only the test takes."""
    peer = bench.connect()
    peer.session.owner = None
    return peer, peer.session.receive(command, bench.now_ns)


def named(bench: Pump, after: bytes = b"") -> tuple[Peer, bytes]:
    """A connection whose list of tubes has begun. after: its next request."""
    peer, output = begun(bench, wire.list_tubes() + after)
    return peer, output or peer.session.take_output(bench.now_ns)


def finished(bench: Pump, peer: Peer, output: bytes) -> list[bytes]:
    while peer.session.more:
        output += peer.session.take_output(bench.now_ns)
    bench.store.audit()
    return listed(output)


def test_many_tubes_are_listed_in_the_order_of_their_creation():
    bench, peer = many()
    names = [b"default", *(b"t%d" % number for number in range(COUNT))]
    asking, output = named(bench)
    assert asking.session.more
    assert finished(bench, asking, output) == names
    peer.send(wire.list_tubes_watched())
    assert listed(said(peer)) == names


def test_a_list_shows_the_tubes_of_the_moment_when_it_began():
    bench, peer = many()
    other = bench.connect()
    names = [b"default", *(b"t%d" % number for number in range(COUNT))]
    asking, output = named(bench)
    for number in range(1, COUNT, 2):
        ask(peer, wire.ignore(b"t%d" % number))
    ask(other, *(wire.watch(b"t%d" % number) for number in range(1, 100, 2)))  # anew, while the old ones are listed
    later, more = named(bench)
    for number in range(0, COUNT, 2):
        ask(peer, wire.ignore(b"t%d" % number))
    bench.store.audit()
    assert bench.store.snapshot()["tubes"] == 1 + 50
    assert finished(bench, asking, output) == names
    again = [b"t%d" % number for number in range(1, 100, 2)]
    assert finished(bench, later, more) == [*names[::2][:1], *names[1::2], *again]
    bench.settle()
    assert listed(ask(bench.connect(), wire.list_tubes())) == [b"default", *again]
    assert bench.store.snapshot()["used_memory"] == (1 + 50) * TUBE + 50 * WATCH


def test_the_requests_after_a_list_wait_until_it_is_read():
    bench, _ = many()
    asking, output = named(bench, wire.use(b"new") + wire.list_tubes())
    assert bench.store.snapshot()["tubes"] == 1 + COUNT
    while asking.session.more:
        output += asking.session.take_output(bench.now_ns)
    first, used, second = wire.Parser().feed(output)
    assert wire.read_list(second.body) == [*wire.read_list(first.body), b"new"]
    assert used.status == wire.Status.USING


def test_tubes_created_and_ended_during_a_list_use_no_memory():
    bench, peer = many()
    asking, output = named(bench)
    before = bench.store.snapshot()["used_memory"]
    for number in range(100):
        assert ask(peer, wire.use(b"u%d" % number), wire.use(b"default")).endswith(b"USING default\r\n")
        assert bench.store.snapshot()["used_memory"] == before
    assert len(finished(bench, asking, output)) == 1 + COUNT


def test_a_list_ends_if_its_tubes_use_the_protocol_of_new_ones():
    """A client that does not read its list cannot keep others from creating tubes."""
    bench = Pump(make_store(memory_limit=1 << 24, tubes=COUNT + 2))
    peer = bench.connect()
    ask(peer, *(wire.watch(b"t%d" % number) for number in range(COUNT)))
    askers = [named(bench)[0] for _ in range(2)]
    ask(peer, *(wire.ignore(b"t%d" % number) for number in range(COUNT)))
    replies = ask(bench.connect(), *(wire.watch(b"new%d" % number) for number in range(COUNT)))
    assert replies == b"".join(b"WATCHING %d\r\n" % (number + 2) for number in range(COUNT))
    assert all(asker.session.dropped for asker in askers)
    bench.settle()
    bench.store.audit()
    assert bench.store.sessions_dropped == 2


@pytest.mark.parametrize("fails", [False, True])
def test_a_list_begins_when_the_replies_before_it_are_on_disk(fails: bool):
    kept = Journaled(memory_limit=1 << 24, tubes=2 * COUNT)
    peer = kept.connect()
    ask(peer, *(wire.watch(b"t%d" % number) for number in range(COUNT)))
    asking = kept.connect()
    asking.send(wire.put(b"x") + wire.list_tubes())
    assert asking.output == b""
    ask(peer, *(wire.ignore(b"t%d" % number) for number in range(COUNT)))
    assert kept.take()
    if fails:
        kept.refuse()
    else:
        kept.commit()
    put, names = wire.Parser().feed(said(asking))
    assert put.status == (wire.Status.INTERNAL_ERROR if fails else wire.Status.INSERTED)
    assert wire.read_list(names.body) == [b"default", *(b"t%d" % number for number in range(COUNT))]


def test_a_list_of_an_ended_connection_keeps_no_tube():
    bench, peer = many()
    asking, _ = named(bench)
    assert asking.session.more
    asking.session.closed(bench.now_ns)
    peer.close()
    bench.settle()
    del asking
    assert ask(bench.connect(), wire.list_tube_used()) == b"USING default\r\n"
    bench.store.audit()
    assert bench.store.snapshot()["tubes"] == 1


# ---- jobs ------------------------------------------------------------------------------------------------------------


def jobs(output: bytes) -> list[dict[str, str]]:
    (reply,) = wire.Parser().feed(output)
    return wire.read_jobs(reply.body)


def ids(output: bytes) -> list[int]:
    return [int(job["id"]) for job in jobs(output)]


def test_jobs_are_listed_by_state(bench: Pump):
    fill(bench, 2, tube=b"t")
    fill(bench, 2, tube=b"t", delay=9)
    fill(bench, 1, tube=b"u")
    peer = bench.connect()
    ask(peer, wire.reserve_job(2), wire.reserve_job(3), wire.bury(3, 7))
    for state, found in {"ready": [1], "reserved": [2], "delayed": [4], "buried": [3], "all": [1, 2, 3, 4]}.items():
        assert ids(ask(peer, wire.list_jobs(b"t", state))) == found
    (job,) = jobs(ask(peer, wire.list_jobs(b"t", "buried")))
    told = wire.read_dictionary(wire.Parser().feed(ask(peer, wire.stats_job(3)))[0].body)
    assert job == told
    assert job["pri"] == "7"
    assert ask(peer, wire.list_jobs(b"none")) == b"NOT_FOUND\r\n"


def test_jobs_are_listed_in_pages(bench: Pump):
    fill(bench, 30, tube=b"t")
    peer = bench.connect()
    pages = [ids(ask(peer, wire.list_jobs(b"t", first=first, count=12))) for first in (0, 13, 25, 31)]
    assert pages == [list(range(1, 13)), list(range(13, 25)), list(range(25, 31)), []]
    assert ids(ask(peer, wire.list_jobs(b"t", count=0))) == []


def test_a_list_of_jobs_is_bounded(bench: Pump):
    fill(bench, 1500, tube=b"t")
    peer = bench.connect()
    assert ids(ask(peer, wire.list_jobs(b"t", count=5000))) == list(range(1, 1001))


def test_jobs_are_searched_by_their_bodies(bench: Pump):
    peer = bench.connect()
    bodies = [b"needle", b"x" * 70 + b"needle", b"x" * 57 + b"needle", b"need\r\nle", b"", b"NEEDLE"]
    ask(peer, *(wire.put(body) for body in bodies))
    assert ids(ask(peer, wire.list_jobs(b"default", needle=b"needle"))) == [1, 2, 3]
    assert ids(ask(peer, wire.list_jobs(b"default", needle=b"d\r\nl"))) == [4]
    assert ids(ask(peer, b"search-jobs default all 0 9 0\r\n\r\n")) == [1, 2, 3, 4, 5, 6]
    assert ask(peer, b"search-jobs default all 0 9 1\r\nxyz") == b"EXPECTED_CRLF\r\n"
    assert ask(peer, b"search-jobs default all 0 9 1025\r\n" + b"x" * 1027, wire.use(b"t")) == (
        b"BAD_FORMAT\r\nUSING t\r\n"
    )


def test_jobs_are_listed_in_slices():
    bench = Pump(make_store(memory_limit=1 << 24))
    fill(bench, 20_000, tube=b"t")
    other = bench.connect()
    asking, output = begun(bench, wire.list_jobs(b"t", first=10_001, count=500))
    assert output == b""
    turns = 0
    while asking.session.more:
        turns += 1
        assert ask(other, wire.delete(10_000 + 2 * turns)) == b"DELETED\r\n"
        output += asking.session.take_output(bench.now_ns)
    found = ids(output)
    assert turns > 5
    assert found == sorted(set(found))
    deleted = {10_000 + 2 * turn for turn in range(1, turns + 1)}
    assert set(range(10_001, 10_501)) - deleted <= set(found) <= set(range(10_001, 10_501 + turns))
    bench.store.audit()


def test_large_jobs_are_searched_in_slices():
    """A few of them are as much work as thousands of small ones."""
    bench = Pump(make_store(memory_limit=1 << 24, job_size_max=64_000))
    fill(bench, 50, body=b"x" * 64_000)
    asking, output = begun(bench, wire.list_jobs(b"default", needle=b"xy"))
    turns = 0
    while asking.session.more:
        turns += 1
        output += asking.session.take_output(bench.now_ns)
    assert turns > 10
    assert ids(output) == []


def test_a_tube_stays_while_its_jobs_are_listed(bench: Pump):
    fill(bench, 5000, tube=b"t")
    peer = bench.connect()
    asking, output = begun(bench, wire.list_jobs(b"t", count=1000))
    assert asking.session.more
    assert ask(peer, b"clear-tube t all\r\n") == b"CLEARED 5000\r\n"
    assert bench.store.snapshot()["tubes"] == 2
    while asking.session.more:
        output += asking.session.take_output(bench.now_ns)
    assert ids(output) == []
    assert bench.store.snapshot()["tubes"] == 1
