"""The beanstalk protocol's store: limits, time, and work that becomes due for many jobs at once."""

from __future__ import annotations

import pytest

from conformance.beanstalk.engine import make_store
from counterd.protocols.beanstalk import wire
from kit.pump import START_NS, Pump
from unit.protocols.beanstalk.asking import SECOND, TICK, ask, fill, said

JOB, BLOCK, TUBE, WATCH = 136, 64, 248, 32


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"job_size_max": (1 << 30) + 1}, "job_size_max must be at most 1073741824 bytes, not 1073741825"),
        ({"memory_limit": 1 << 40}, "at most 4294967294 blocks"),
        ({"tubes": 1 << 31}, "at most 1073741824 tubes"),
    ],
)
def test_invalid_sizes_are_refused(sizes: dict[str, int], said: str):
    with pytest.raises(ValueError, match=said):
        make_store(**sizes)


def test_a_new_store_has_one_tube(bench: Pump):
    figures = bench.store.snapshot()
    assert (figures["tubes"], figures["jobs"], figures["used_memory"]) == (1, 0, TUBE)


@pytest.mark.parametrize("size", [0, 1, 60, 61, 120, 1000])
def test_the_memory_of_a_job(bench: Pump, size: int):
    fill(bench, 10, body=b"x" * size)
    assert bench.store.snapshot()["used_memory"] == TUBE + 10 * (JOB + -(-size // 60) * BLOCK)
    peer = bench.connect()
    for number in range(1, 11):
        assert ask(peer, wire.delete(number)) == b"DELETED\r\n"
    assert bench.store.snapshot()["used_memory"] == TUBE


def test_jobs_are_found_by_id_in_a_full_store():
    bench = Pump(make_store(memory_limit=1 << 20))
    count = ((1 << 20) - TUBE) // JOB
    peer = bench.connect()
    last_id = 0
    for _ in range(count - 7):  # one of eight ids stays, so that they meet in the index
        ask(peer, wire.put(b"") * 8, *[wire.delete(last_id + number) for number in range(2, 9)])
        last_id += 8
    assert bench.store.snapshot()["longest_probe"] > 0
    for first in (0, 8, 24):
        for number in range(first + 1, last_id, 16 if first == 0 else 32):
            assert ask(peer, wire.peek(number), wire.delete(number), wire.peek(number)) == (
                b"FOUND %d 0\r\n\r\nDELETED\r\nNOT_FOUND\r\n" % number
            )
        bench.store.audit()
    assert bench.store.snapshot()["jobs"] == 0


def test_the_memory_limit_is_met_to_the_byte():
    bench = Pump(make_store(memory_limit=1 << 20))
    peer = bench.connect()
    each = JOB + 2 * BLOCK
    count = ((1 << 20) - TUBE) // each
    assert ask(peer, wire.put(b"x" * 100) * count).count(b"INSERTED") == count
    assert ask(peer, wire.put(b"x" * 100)) == b"OUT_OF_MEMORY\r\n"
    rest = (1 << 20) - TUBE - count * each
    assert ask(peer, wire.use(b"t")) == (b"USING t\r\n" if rest >= TUBE else b"OUT_OF_MEMORY\r\n")
    # What exists goes on.
    assert ask(peer, wire.reserve(), wire.release(1, 0, 5), wire.kick(1), wire.delete(1)).count(b"\r\n") == 5
    assert ask(peer, wire.put(b"x" * 100)) == b"INSERTED %d\r\n" % (count + 1)


def test_each_watch_after_the_first_uses_memory(bench: Pump):
    peer, other = bench.connect(), bench.connect()
    assert bench.store.snapshot()["used_memory"] == TUBE
    ask(peer, wire.watch(b"a"), wire.watch(b"b"))
    ask(other, wire.watch(b"a"))
    assert bench.store.snapshot()["used_memory"] == 3 * TUBE + 3 * WATCH
    peer.close()
    assert bench.store.snapshot()["used_memory"] == 2 * TUBE + WATCH


def test_the_number_of_tubes_is_bounded():
    bench = Pump(make_store(tubes=3))
    peer = bench.connect()
    assert ask(peer, wire.watch(b"a"), wire.use(b"b"), wire.watch(b"c"), wire.use(b"c")) == (
        b"WATCHING 2\r\nUSING b\r\nOUT_OF_MEMORY\r\nOUT_OF_MEMORY\r\n"
    )
    assert ask(peer, wire.use(b"a"), wire.use(b"c")) == b"USING a\r\nUSING c\r\n"


def test_the_jobs_of_a_tube_are_bounded():
    bench = Pump(make_store(tube_jobs_max=3))
    peer = bench.connect()
    ask(peer, wire.put(b"x"), wire.put(b"x", delay=1), wire.put(b"x"), wire.reserve(), wire.bury(1, 0))
    assert ask(peer, wire.put(b"x"), wire.use(b"t"), wire.put(b"x")) == b"OUT_OF_MEMORY\r\nUSING t\r\nINSERTED 4\r\n"
    assert ask(peer, wire.use(b"default"), wire.delete(2), wire.put(b"x")).endswith(b"DELETED\r\nINSERTED 5\r\n")


def test_an_id_is_never_used_again(bench: Pump):
    peer = bench.connect()
    for number in range(1, 50):
        assert ask(peer, wire.put(b"x"), wire.delete(number)) == b"INSERTED %d\r\nDELETED\r\n" % number


def test_a_name_of_the_largest_size(bench: Pump):
    peer = bench.connect()
    for size in (39, 40, 41, 200):
        name = b"n" * size
        assert ask(peer, wire.use(name), wire.list_tube_used()) == b"USING %b\r\nUSING %b\r\n" % (name, name)
        assert b'name: "%b"' % name in ask(peer, wire.stats_tube(name))


def test_delays_that_end_together_are_handled_in_slices(bench: Pump):
    """Each tick handles some, and others are served in between."""
    fill(bench, 3000, delay=5)
    bench.ticking = False
    bench.advance(5 * SECOND + TICK)
    other = bench.connect()
    ready = []
    while bench.store.next_deadline() >= 0:
        bench.store.tick(bench.now_ns)
        ready.append(bench.store.snapshot()["jobs:ready"])
        assert ask(other, wire.list_tube_used()) == b"USING default\r\n"
        bench.store.audit()
    assert ready[-1] == 3000
    assert max(after - before for before, after in zip([0, *ready], ready, strict=False)) <= 512


def test_times_to_run_that_end_together_are_handled_in_slices(bench: Pump):
    fill(bench, 1500, ttr=5)
    worker, waiting = bench.connect(), bench.connect()
    for _ in range(1500):
        worker.send(wire.reserve(0))
    assert said(worker).count(b"RESERVED") == 1500
    ask(waiting, wire.reserve())
    bench.advance(5 * SECOND - 1)
    assert said(waiting) == b""
    bench.advance(1 + TICK)
    assert said(waiting) == b"RESERVED 1 1\r\nx\r\n"
    figures = bench.store.snapshot()
    assert (figures["timeouts"], figures["jobs:ready"], figures["jobs:reserved"]) == (1500, 1499, 1)
    assert ask(worker, wire.delete(1)) == b"NOT_FOUND\r\n"


def test_after_a_pause_workers_are_served_by_age_and_jobs_by_priority(bench: Pump):
    producer = bench.connect()
    waiting = [bench.connect() for _ in range(3)]
    ask(producer, wire.pause_tube(b"default", 10))
    for peer in waiting:
        assert ask(peer, wire.reserve()) == b""
    ask(producer, wire.put(b"a", 3), wire.put(b"b", 1), wire.put(b"c", 2))
    bench.advance(10 * SECOND + TICK)
    assert [said(peer)[-3:-2] for peer in waiting] == [b"b", b"c", b"a"]
    assert b"pause: 0\n" in ask(producer, wire.stats_tube(b"default"))


@pytest.mark.parametrize("becomes_ready", ["by its delay", "by the end of a pause"])
def test_a_job_that_becomes_ready_when_a_wait_ends_is_reserved(bench: Pump, becomes_ready: str):
    worker, producer = bench.connect(), bench.connect()
    if becomes_ready == "by its delay":
        ask(producer, wire.put(b"x", delay=5))
    else:
        ask(producer, wire.put(b"x"), wire.pause_tube(b"default", 5))
    assert ask(worker, wire.reserve(5)) == b""
    bench.advance(5 * SECOND - 1)
    assert said(worker) == b""
    bench.advance(1 + TICK)
    assert said(worker) == b"RESERVED 1 1\r\nx\r\n"


def test_many_workers_wait_for_the_end_of_a_pause(bench: Pump):
    producer = bench.connect()
    ask(producer, wire.pause_tube(b"default", 10))
    waiting = [bench.connect() for _ in range(1200)]
    for peer in waiting:
        assert ask(peer, wire.reserve()) == b""
    fill(bench, 1200)
    bench.advance(10 * SECOND + TICK)
    assert [said(peer).startswith(b"RESERVED %d " % number) for number, peer in enumerate(waiting, 1)] == [True] * 1200


def test_large_jobs_are_given_to_workers_a_few_at_a_time(bench: Pump):
    producer = bench.connect()
    ask(producer, wire.pause_tube(b"default", 10))
    waiting = [bench.connect() for _ in range(60)]
    for peer in waiting:
        assert ask(peer, wire.reserve()) == b""
    fill(bench, 60, body=b"x" * 60000)
    bench.ticking = False
    ask(producer, wire.pause_tube(b"default", 0))
    bench.store.tick(bench.now_ns)
    assert 0 < bench.store.snapshot()["jobs:reserved"] < 30
    bench.ticking = True
    bench.settle()
    assert {len(peer.output) > 60000 for peer in waiting} == {True}


def test_a_session_being_collected_gets_no_job(bench: Pump):
    """No session may be given output then; the job goes to the next worker, or stays in the tube."""
    producer, other = bench.connect(), bench.connect()
    sessions = [bench.store.session(bench.now_ns) for _ in range(2)]
    for session in sessions:
        session.receive(wire.reserve(), bench.now_ns)
    ask(other, wire.reserve())
    with bench.store:
        del session
        sessions.clear()
    assert ask(producer, wire.put(b"1")) == b"INSERTED 1\r\n"
    assert said(other) == b"RESERVED 1 1\r\n1\r\n"
    session = bench.store.session(bench.now_ns)
    session.receive(wire.reserve(), bench.now_ns)
    with bench.store:
        del session
    bench.ticking = False
    assert ask(producer, wire.put(b"2")) == b"INSERTED 2\r\n"
    bench.store.audit()
    bench.ticking = True
    assert ask(other, wire.reserve()) == b"RESERVED 2 1\r\n2\r\n"


def test_a_session_collected_during_a_drain(bench: Pump):
    session = bench.store.session(bench.now_ns)
    session.receive(wire.reserve(), bench.now_ns)
    bench.store.begin_drain()
    with bench.store:
        del session
    bench.settle()
    assert bench.store.snapshot()["waiting"] == 0


def test_counts_of_outcomes_never_fall(bench: Pump):
    """A waiting request has no outcome yet."""
    peer, gone, producer = (bench.connect() for _ in range(3))
    before = dict.fromkeys(
        [("reserve-with-timeout", "ok"), ("reserve-with-timeout", "timed_out"), ("reserve", "ok")], 0
    )
    for act, change in (
        (lambda: ask(peer, wire.reserve(1)), {}),
        (lambda: bench.advance(SECOND + TICK), {("reserve-with-timeout", "timed_out"): 1}),
        (lambda: ask(peer, wire.reserve(1)), {}),
        (lambda: ask(gone, wire.reserve()), {}),
        (gone.close, {}),
        (lambda: ask(producer, wire.put(b"1")), {("reserve-with-timeout", "ok"): 1}),
    ):
        act()
        before |= change
        counts = {(name, status): count for name, status, count in bench.store.outcomes()}
        assert {each: counts.get(each, 0) for each in before} == before


def test_a_batch_does_not_search_all_tubes_for_each_job():
    bench = Pump(make_store(tubes=5000))
    fill(bench, 50)
    peer = bench.connect()
    for number in range(4000):
        peer.send(wire.watch(b"t%d" % number))
    said(peer)
    for _ in range(5):
        assert ask(peer, wire.batch_reserve(1000, 0)).startswith(b"JOBS 9\r\n")


def test_a_drain_ends_waits_in_slices(bench: Pump):
    waiting = [bench.connect() for _ in range(1500)]
    for peer in waiting:
        assert ask(peer, wire.reserve()) == b""
    bench.store.begin_drain()
    bench.settle()
    assert {said(peer) for peer in waiting} == {b"TIMED_OUT\r\n"}
    assert bench.store.snapshot()["waiting"] == 0


def test_the_end_of_the_drain_mode_does_not_end_a_drain(bench: Pump):
    peer = bench.connect()
    bench.store.refuse_puts(True)
    bench.store.begin_drain()
    bench.store.refuse_puts(False)
    assert ask(peer, wire.put(b"x")) == b"DRAINING\r\n"
    assert ask(peer, wire.reserve()) == b"TIMED_OUT\r\n"


def test_a_drain_waits_for_reserved_jobs(bench: Pump):
    fill(bench, 3, tube=b"work")
    peer = bench.connect()
    ask(peer, wire.watch(b"work"), wire.reserve(), wire.reserve())
    assert bench.store.held() == 2
    since = START_NS // 100_000_000
    assert bench.store.leases(10) == [(peer.session.number, b"work", 1, since)] * 2
    assert bench.store.leases(1) == [(peer.session.number, b"work", 1, since)]
    assert bench.store.holdings_of(peer.session.number) == 2
    assert bench.store.holdings_of(99) == 0
    bench.store.begin_drain()
    assert ask(peer, wire.delete(1), wire.release(2, 0), wire.reserve_job(3)) == b"DELETED\r\nRELEASED\r\nNOT_FOUND\r\n"
    assert bench.store.held() == 0


def test_the_snapshot_counts_jobs_and_memory(bench: Pump):
    fill(bench, 2)
    figures = bench.store.snapshot()
    assert (figures["jobs:ready"], figures["total_jobs"], figures["jobs_max"]) == (2, 2, (1 << 22) // JOB)
