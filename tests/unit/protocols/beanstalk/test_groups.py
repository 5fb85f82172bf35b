"""Jobs that need a permit of a counter: which job gets one, and when it is given back."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from conformance.beanstalk.engine import make_store
from counterd.protocols.beanstalk import wire
from kit.permits import LentPump
from kit.pump import Pump
from unit.protocols.beanstalk.asking import SECOND, TICK, ask, said

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.pump import Peer

RETRY = 100_000_000
LATE = 1 << 20  # a priority


@pytest.fixture
def lent() -> Iterator[LentPump]:
    """A store that borrows permits, which is audited after the test: exactly the reserved jobs have permits then."""
    made = LentPump(make_store())
    yield made
    made.settle()
    made.store.audit()
    assert sum(made.permits.lent.values()) == made.store.snapshot()["permits"]


def put(name: bytes = b"n", maximum: int = 1, body: bytes = b"x", **more: int) -> bytes:
    return wire.put_limited(body, name, maximum, **more)


def figures(peer: Peer, tube: bytes = b"default") -> dict[str, int]:
    """The numbers of a tube's ready, blocked and reserved jobs."""
    reply = ask(peer, wire.inspect_tube(tube))
    told = wire.read_dictionary(reply.partition(b"\r\n")[2][:-2])
    return {state: int(told[f"current-jobs-{state}"]) for state in ("ready", "blocked", "reserved")}


def test_a_job_is_reserved_while_a_permit_is_free(lent: LentPump) -> None:
    peer = lent.connect()
    ask(peer, put() * 3)
    assert ask(peer, wire.reserve(0)) == b"RESERVED 1 1\r\nx\r\n"
    assert lent.permits.lent[b"n"] == 1
    assert figures(peer) == {"ready": 2, "blocked": 0, "reserved": 1}
    assert ask(peer, wire.reserve(0)) == b"TIMED_OUT\r\n"
    assert figures(peer) == {"ready": 2, "blocked": 2, "reserved": 1}
    assert ask(peer, wire.delete(1), wire.reserve(0)).endswith(b"TIMED_OUT\r\n"), "the permit was the queue's first"
    assert lent.permits.lent[b"n"] == 0, "nobody waited for the job"
    assert ask(peer, wire.reserve(0)) == b"RESERVED 2 1\r\nx\r\n"


def test_permits_taken_by_others_block_a_job(lent: LentPump) -> None:
    peer = lent.connect()
    lent.permits.take(b"n", 2)
    ask(peer, put(maximum=2))
    assert ask(peer, wire.reserve()) == b""
    assert lent.permits.waiting
    lent.permits.give(b"n")
    lent.settle()
    assert said(peer) == b"RESERVED 1 1\r\nx\r\n"
    assert lent.permits.held[b"n"] == 2


@pytest.mark.parametrize(
    "end",
    [wire.delete(1), wire.release(1, LATE), wire.release(1, delay=100), wire.bury(1), None],
    ids=["delete", "release", "delay", "bury", "disconnect"],
)
def test_the_permit_is_given_back(lent: LentPump, end: bytes | None) -> None:
    worker, other = lent.connect(), lent.connect()
    ask(worker, put(ttr=10, priority=LATE) + put(b"n", 1, b"y"))
    assert ask(worker, wire.reserve_job(1)) == b"RESERVED 1 1\r\nx\r\n"
    assert ask(other, wire.reserve()) == b""
    if end is None:
        worker.close()
    else:
        ask(worker, end)
    assert said(other) == b"RESERVED 2 1\r\ny\r\n"
    assert lent.permits.lent[b"n"] == 1


def test_the_permit_is_given_back_when_the_time_to_run_ends(lent: LentPump) -> None:
    worker, other = lent.connect(), lent.connect()
    assert ask(worker, put(ttr=2), wire.reserve(0)).endswith(b"x\r\n")
    assert ask(other, wire.reserve()) == b""
    lent.advance(2 * SECOND + TICK)
    assert said(other) == b"RESERVED 1 1\r\nx\r\n"
    assert ask(worker, wire.touch(1), wire.delete(1)) == b"NOT_FOUND\r\nNOT_FOUND\r\n"
    assert ask(other, wire.touch(1)) == b"TOUCHED\r\n"
    assert lent.permits.lent[b"n"] == 1


def test_jobs_with_other_or_no_permits_are_not_blocked(lent: LentPump) -> None:
    peer = lent.connect()
    lent.permits.take(b"n")
    ask(peer, put() * 5, put(b"m", 1, b"m"), wire.put(b"free", priority=1 << 20))
    assert ask(peer, wire.reserve(0), wire.reserve(0)) == b"RESERVED 6 1\r\nm\r\nRESERVED 7 4\r\nfree\r\n"
    assert figures(peer)["blocked"] == 5
    assert ask(peer, wire.peek_next("ready")) == b"NOT_FOUND\r\n"
    assert b'counter: "n"\nmaximum: 1\nblocked: true\n' in ask(peer, wire.stats_job(1))
    assert b"counter" not in ask(peer, wire.stats_job(7))


def test_jobs_with_and_without_permits_are_reserved_by_priority(lent: LentPump) -> None:
    peer = lent.connect()
    for priority in (5, 3, 9, 3, 1):
        ask(peer, put(maximum=9, priority=priority))
    ask(peer, wire.put(b"-", priority=4))
    got = [ask(peer, wire.reserve(0)).split()[1] for _ in range(6)]
    assert got == [b"5", b"2", b"4", b"6", b"1", b"3"]


def test_a_blocked_job_of_a_better_priority_goes_first(lent: LentPump) -> None:
    peer, worker = lent.connect(), lent.connect()
    lent.permits.take(b"n")
    ask(peer, put(priority=5))
    assert ask(worker, wire.reserve()) == b""
    ask(peer, put(priority=4))
    lent.permits.give(b"n")
    lent.settle()
    assert said(worker).startswith(b"RESERVED 2 ")


def test_a_wait_for_a_permit_has_the_maximum_of_the_first_job(lent: LentPump) -> None:
    peer, worker = lent.connect(), lent.connect()
    lent.permits.take(b"n", 2)
    ask(peer, put(maximum=1, priority=5), put(maximum=2, priority=4))
    assert ask(worker, wire.reserve()) == b""
    assert [each.maximum for each in lent.permits.waiting] == [2]
    ask(peer, put(maximum=3, priority=3))
    assert said(worker).startswith(b"RESERVED 3 ")
    assert ask(peer, wire.reserve()) == b""
    assert [each.maximum for each in lent.permits.waiting] == [2]
    ask(worker, wire.delete(2))
    assert [each.maximum for each in lent.permits.waiting] == [1]
    lent.permits.give(b"n", 2)
    lent.settle()
    assert said(peer) == b"", "one is held yet, and that is the maximum"
    ask(worker, wire.delete(3))
    assert said(peer).startswith(b"RESERVED 1 ")


def test_a_gate_waits_once_for_all_its_jobs(lent: LentPump) -> None:
    peer, workers = lent.connect(), [lent.connect() for _ in range(3)]
    ask(peer, put(maximum=2) * 1000)
    assert [ask(worker, wire.reserve())[:9] for worker in workers] == [b"RESERVED ", b"RESERVED ", b""]
    assert len(lent.permits.waiting) == 1
    for number in range(1, 999):
        done = workers[(number - 1) % 3]
        assert ask(done, wire.delete(number), wire.reserve()) == b"DELETED\r\n"
        assert said(workers[(number + 1) % 3]) == b"RESERVED %d 1\r\nx\r\n" % (number + 2)
        assert lent.permits.lent[b"n"] == 2
    lent.store.audit()


def test_gates_are_examined_in_slices(lent: LentPump) -> None:
    count = 2000
    peer = lent.connect()
    for number in range(count):
        lent.permits.take(b"%d" % number)
        ask(peer, put(b"%d" % number))
    ask(peer, wire.put(b"-", priority=1 << 30))
    turns = 0
    peer.take(peer.session.receive(wire.reserve(0), lent.now_ns))
    while not peer.output:
        turns += 1
        assert lent.turn() or turns < 3
    assert said(peer).startswith(b"RESERVED %d " % (count + 1))
    assert turns > 10
    assert figures(peer)["blocked"] == count


def test_permits_granted_without_a_waiting_worker_are_given_back(lent: LentPump) -> None:
    peer = lent.connect()
    lent.permits.take(b"n")
    ask(peer, put(), wire.reserve(0))
    assert figures(peer)["blocked"] == 1
    lent.permits.give(b"n")
    lent.settle()
    assert (figures(peer)["blocked"], lent.permits.held[b"n"]) == (0, 0)
    assert ask(peer, wire.peek_next("ready")).startswith(b"FOUND 1 ")


def test_a_paused_tube_takes_no_permit(lent: LentPump) -> None:
    peer, worker = lent.connect(), lent.connect()
    lent.permits.take(b"n")
    ask(peer, put() * 2)
    assert ask(worker, wire.reserve()) == b""
    ask(peer, wire.pause_tube(b"default", 5))
    lent.permits.give(b"n")
    lent.settle()
    assert (said(worker), lent.permits.held[b"n"]) == (b"", 0)
    lent.permits.take(b"n")
    lent.advance(5 * SECOND + TICK)
    assert (said(worker), figures(peer)["blocked"]) == (b"", 2)
    lent.permits.give(b"n")
    lent.settle()
    assert said(worker).startswith(b"RESERVED 1 ")


def test_reserve_job_needs_a_permit(lent: LentPump) -> None:
    peer = lent.connect()
    lent.permits.take(b"n")
    ask(peer, put(), put(delay=100), put(maximum=2), wire.reserve(0))
    assert ask(peer, wire.reserve_job(1), wire.reserve_job(2)) == b"NOT_FOUND\r\n" * 2
    lent.permits.give(b"n")
    lent.settle()
    assert ask(peer, wire.reserve_job(2)).startswith(b"RESERVED 2 ")
    assert ask(peer, wire.reserve_job(1)) == b"NOT_FOUND\r\n"
    assert ask(peer, wire.reserve_job(3)).startswith(b"RESERVED 3 ")
    assert ask(peer, wire.delete(2), wire.delete(3)) == b"DELETED\r\n" * 2


def test_batch_reserve_takes_a_permit_for_each_job(lent: LentPump) -> None:
    peer = lent.connect()
    ask(peer, put(maximum=3) * 5, wire.put(b"-", priority=1 << 20) * 2)
    reply = ask(peer, wire.batch_reserve(4, 0))
    assert re.findall(rb"RESERVED (\d+)", reply) == [b"1", b"2", b"3", b"6"]
    assert lent.permits.lent[b"n"] == 3
    big = b"b" * 40_000
    ask(peer, put(b"m", 9, big, priority=1) * 2)
    assert ask(peer, wire.batch_reserve(9, 0)).startswith(b"JOBS 1\r\nRESERVED 8 ")
    assert lent.permits.lent[b"m"] == 1, "what does not fit into the reply takes none"
    assert ask(peer, b"batch-reserve 0 0\r\n") == b"BAD_FORMAT\r\n"
    assert lent.permits.lent[b"m"] == 1


@pytest.mark.parametrize("state", ["ready", "all"])
def test_blocked_jobs_can_be_cleared(lent: LentPump, state: str) -> None:
    peer = lent.connect()
    lent.permits.take(b"n")
    ask(peer, put() * 3, put(b"m"), wire.put(b"-"), wire.bury(9))
    assert ask(peer, wire.reserve(0)).startswith(b"RESERVED 4 ")
    assert len(lent.permits.waiting) == 1
    assert ask(peer, wire.clear_tube(b"default", state)) == b"CLEARED 4\r\n"
    assert lent.permits.waiting == []
    assert lent.store.snapshot()["gates"] == 1


def test_a_gate_leaves_the_queue_with_its_last_job(lent: LentPump) -> None:
    peer, worker = lent.connect(), lent.connect()
    lent.permits.take(b"n")
    ask(peer, put() * 2)
    assert ask(worker, wire.reserve()) == b""
    ask(peer, wire.delete(1))
    assert len(lent.permits.waiting) == 1
    ask(peer, wire.delete(2))
    assert lent.permits.waiting == []
    ask(peer, put())
    assert len(lent.permits.waiting) == 1


def test_a_permit_for_a_deleted_job_is_given_back(lent: LentPump) -> None:
    peer, worker = lent.connect(), lent.connect()
    lent.permits.take(b"n")
    ask(peer, put())
    assert ask(worker, wire.reserve()) == b""
    lent.permits.give(b"n")
    assert lent.permits.turn()
    peer.session.receive(wire.delete(1), lent.now_ns)
    lent.settle()
    assert lent.permits.held[b"n"] == 0


def test_a_permit_for_a_larger_maximum_is_exchanged(lent: LentPump) -> None:
    peer, worker = lent.connect(), lent.connect()
    lent.permits.take(b"n")
    ask(peer, put(maximum=1, priority=5))
    assert ask(worker, wire.reserve()) == b""
    ask(peer, put(maximum=2, priority=4, delay=0))
    assert said(worker).startswith(b"RESERVED 2 ")
    assert ask(worker, wire.reserve()) == b""
    ask(peer, put(maximum=3, priority=4))
    lent.permits.give(b"n")
    lent.permits.turn()
    lent.settle()
    assert lent.permits.held[b"n"] <= 3


def test_retired_jobs_keep_their_need_of_a_permit(lent: LentPump) -> None:
    peer = lent.connect()
    ask(peer, wire.limit_reserves(b"default", 1, b"dead"), put())
    assert ask(peer, wire.reserve(0)).startswith(b"RESERVED 1 ")
    assert ask(peer, wire.release(1)) == b"RELEASED\r\n"
    assert b'tube: "dead"\n' in ask(peer, wire.stats_job(1))
    assert lent.permits.held[b"n"] == 0
    lent.permits.take(b"n")
    assert ask(peer, wire.watch(b"dead"), wire.reserve(0)) == b"WATCHING 2\r\nTIMED_OUT\r\n"
    assert figures(peer, b"dead")["blocked"] == 1


def test_a_retired_job_whose_gate_finds_no_room_is_buried() -> None:
    lent = LentPump(make_store(memory_limit=1 << 20))
    peer = lent.connect()
    ask(peer, wire.limit_reserves(b"default", 1, b"dead"), put(b"n" * 80))
    while ask(peer, wire.put(b"")).startswith(b"INSERTED"):
        pass
    assert ask(peer, wire.reserve_job(1)).startswith(b"RESERVED 1 ")
    assert ask(peer, wire.release(1)) == b"RELEASED\r\n"
    assert b'tube: "default"\nstate: buried\n' in ask(peer, wire.stats_job(1))
    lent.store.audit()


def test_without_a_lender_the_put_is_refused() -> None:
    bench = Pump(make_store())
    assert ask(bench.connect(), put(), wire.put(b"x")) == b"NOT_ENABLED\r\nINSERTED 1\r\n"


def test_put_limited_with_a_key_in_use(lent: LentPump) -> None:
    peer = lent.connect()
    unique = wire.put_limited(b"x", b"n", 1, b"k", 5)
    assert ask(peer, unique, unique, wire.put_unique(b"x", b"k")) == b"INSERTED 1\r\nEXISTS 1\r\nEXISTS 1\r\n"
    assert b'key: "k"\ncounter: "n"\n' in ask(peer, wire.stats_job(1))
    assert ask(peer, wire.reserve(0), wire.delete(1), unique).endswith(b"DELETED\r\nEXISTS 1\r\n")
    lent.advance(5 * SECOND + TICK)
    assert ask(peer, unique) == b"INSERTED 2\r\n"


def test_the_name_of_a_counter_may_contain_colons(lent: LentPump) -> None:
    peer = lent.connect()
    assert ask(peer, wire.put_limited(b"x", b":db:main:", 1), wire.reserve(0)) == b"INSERTED 1\r\nRESERVED 1 1\r\nx\r\n"
    assert lent.permits.lent[b":db:main:"] == 1
    assert b'counter: ":db:main:"\n' in ask(peer, wire.stats_job(1))


@pytest.mark.parametrize(
    "line",
    [
        b"put-limited 1 0 60 1 n 0", b"put-limited 1 0 60 1 n", b"put-limited 1 0 60 1 n x",
        b"put-limited 1 0 60 1 n 1 k:k 0", b"put-unique 1 0 60 1 k:k 0", b"use a:b",
        b"put-limited 1 0 60 1 n 1 k", b"put-limited 1 0 60 1 n 1 k 0 0", b"put-limited 1 0 60 1 -n 1",
        b"put-limited 1 0 60 1 n 4294967296", b"put-limited 1 0 60 1 n 1 k 2147483648",
    ],
)  # fmt: skip
def test_invalid_arguments_are_refused(lent: LentPump, line: bytes) -> None:
    assert ask(lent.connect(), line + b"\r\n") == b"BAD_FORMAT\r\n"


def test_only_jobs_with_permits_use_memory_for_groups(lent: LentPump) -> None:
    peer = lent.connect()

    def cost(command: bytes) -> int:
        before = lent.store.snapshot()["used_memory"]
        assert ask(peer, command).startswith(b"INSERTED")
        return int(lent.store.snapshot()["used_memory"]) - before

    assert cost(wire.put(b"")) == 136
    assert cost(put(body=b"")) == 136 + 8 + 120
    assert cost(put(body=b"")) == 136 + 8
    assert cost(put(b"n" * 37, body=b"")) == 136 + 8 + 120 + 64


def test_a_gate_that_finds_the_queue_full_tries_again(lent: LentPump) -> None:
    peer = lent.connect()
    lent.permits.room = 0
    lent.permits.take(b"n")
    assert ask(peer, put(), wire.reserve()) == b"INSERTED 1\r\n"
    lent.permits.give(b"n")
    lent.settle()
    assert said(peer) == b""
    lent.advance(RETRY + TICK)
    assert said(peer) == b"RESERVED 1 1\r\nx\r\n"


@pytest.mark.parametrize("groups", [10, 64, 2_000])
def test_gates_that_find_the_queue_full_try_again_in_turns(lent: LentPump, groups: int) -> None:
    """64 in a tenth of a second. When there is room, each gets its permit."""
    peer, worker = lent.connect(), lent.connect()
    lent.permits.room = 0
    for number in range(groups):
        lent.permits.take(b"n%d" % number)
    ask(peer, b"".join(put(b"n%d" % number, ttr=600) for number in range(groups)))
    ask(worker, wire.reserve())
    lent.advance(RETRY)
    lent.permits.asked = 0
    for _ in range(20):
        lent.advance(RETRY // 2)
    tries = min(groups * 10, 64 * 10)
    assert tries * 0.8 <= lent.permits.asked / 2 <= tries * 1.1 + 64, "each asks for a permit, then for a place"
    for number in range(groups):
        lent.permits.give(b"n%d" % number)
    for _ in range(2 + groups // 64):
        lent.advance(RETRY)
    assert said(worker).startswith(b"RESERVED ")
    for number in range(1, groups):
        assert ask(worker, wire.reserve(0)).startswith(b"RESERVED "), number


def test_new_gates_do_not_delay_those_that_try_again(lent: LentPump) -> None:
    peer, worker, other = lent.connect(), lent.connect(), lent.connect()
    lent.permits.room = 0
    lent.permits.take(b"n")
    lent.permits.take(b"m")
    ask(worker, wire.watch(b"other"), wire.reserve())
    for number in range(1_000):
        told = ask(peer, put(b"m"), wire.reserve(0), wire.delete(number + 1))
        assert told.endswith(b"TIMED_OUT\r\nDELETED\r\n")
    ask(other, wire.use(b"other"), put(b"n"))
    lent.permits.give(b"n")
    lent.advance(2 * RETRY + TICK)
    assert said(worker).startswith(b"RESERVED 1001 ")


def test_a_refused_wait_begins_again(lent: LentPump) -> None:
    peer = lent.connect()
    lent.permits.take(b"n")
    assert ask(peer, put(), wire.reserve()) == b"INSERTED 1\r\n"
    lent.permits.draining = True
    lent.settle()
    assert lent.permits.waiting == []
    lent.permits.draining = False
    lent.advance(RETRY + TICK)
    assert len(lent.permits.waiting) == 1
    lent.permits.give(b"n")
    lent.settle()
    assert said(peer).startswith(b"RESERVED 1 ")


def test_a_drain_takes_no_permits(lent: LentPump) -> None:
    peer, worker = lent.connect(), lent.connect()
    ask(peer, put() * 2)
    assert ask(peer, wire.reserve(0)).startswith(b"RESERVED 1 ")
    assert ask(worker, wire.reserve()) == b""
    lent.store.begin_drain()
    lent.settle()
    assert said(worker) == b"TIMED_OUT\r\n"
    assert ask(peer, wire.delete(1)) == b"DELETED\r\n"
    assert (lent.store.held(), lent.permits.held[b"n"]) == (0, 0)


def test_fast_workers_share_the_permits(lent: LentPump) -> None:
    """However many wait: never more than the maximum is in use, and all jobs are done, each once."""
    peer, workers = lent.connect(), [lent.connect() for _ in range(5)]
    done: list[int] = []
    ask(peer, put(maximum=3) * 40)
    for worker in workers:
        worker.send(wire.reserve())
    while len(done) < 40:
        assert lent.permits.lent[b"n"] == min(3, 40 - len(done))
        lent.store.audit()
        worker = next(worker for worker in workers if worker.output)
        number = int(said(worker).split()[1])
        done.append(number)
        worker.send(wire.delete(number) + wire.reserve())
        for each in workers:  # what was deleted just now
            each.output[:] = each.output.replace(b"DELETED\r\n", b"")
    assert sorted(done) == list(range(1, 41))
