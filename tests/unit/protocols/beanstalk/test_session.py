"""The beanstalk protocol's session: frames however they are cut, lines that are too long, waits, kicks in slices."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from conformance.beanstalk.engine import make_store
from counterd.protocols.beanstalk import wire
from kit.permits import LentPump
from kit.pump import Pump
from unit.protocols.beanstalk.asking import SECOND, TICK, ask, fill, said, told

if TYPE_CHECKING:
    from kit.journaled import Journaled
    from kit.pump import Peer

LONG = b"put " + b"x" * 400
# Everything that a parser can meet: bodies with ends of lines, bodies that are too big, lines that are too long.
STREAM = b"".join(
    [
        wire.use(b"t"), wire.put(b"a\r\nb", 5), wire.put(b"", 1), b"put 0 0 60 40\r\n" + b"y" * 40 + b"\r\n",
        b"\r\n", b"put 0 0 60 2\r\nabcd", b"nonsense\r\n", LONG, b"\r\n", LONG, b"\r", b"\r\n", LONG, b"\rx\n\r\n",
        b"put 1 2\r\n", wire.watch(b"t"), wire.ignore(b"default"), wire.reserve(0), wire.reserve(),
        wire.stats_tube(b"t"), wire.delete(1), wire.bury(2, 0), wire.kick(9), wire.peek_next("ready"),
        wire.list_tubes_watched(), b"foo\0bar\r\n", wire.list_tubes(),
    ]
)  # fmt: skip
ANSWERS = 23


def small() -> Pump:
    return Pump(make_store(job_size_max=30))


def answered(stream: bytes, cuts: list[int]) -> bytes:
    bench = small()
    peer = bench.connect()
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        if start < end:
            peer.send(stream[start:end])
    bench.store.audit()
    return said(peer)


def test_a_stream_is_answered_as_a_whole():
    answer = answered(STREAM, [])
    parser = wire.Parser()
    assert len(parser.feed(answer)) == ANSWERS
    assert not parser.is_within


@pytest.mark.parametrize("cut", range(1, len(STREAM)))
def test_a_stream_cut_once_gets_the_same_replies(cut: int):
    assert answered(STREAM, [cut]) == answered(STREAM, [])


def test_a_stream_sent_byte_by_byte_gets_the_same_replies():
    assert answered(STREAM, list(range(1, len(STREAM)))) == answered(STREAM, [])


@pytest.mark.parametrize("seed", range(50))
def test_a_stream_cut_anywhere_gets_the_same_replies(seed: int):
    cuts = sorted(random.Random(seed).sample(range(1, len(STREAM)), 8))
    assert answered(STREAM, cuts) == answered(STREAM, [])


def test_a_line_without_an_end_uses_no_memory(bench: Pump):
    """It is thrown away as it comes."""
    peer = bench.connect()
    for _ in range(100):
        peer.send(b"x" * 10_000)
    assert said(peer) == b""
    assert ask(peer, b"\r\n", wire.use(b"t")) == b"BAD_FORMAT\r\nUSING t\r\n"


def test_a_body_that_is_too_big_uses_no_memory():
    bench = small()
    peer = bench.connect()
    peer.send(b"put 0 0 60 4294967295\r\n")
    for _ in range(10):
        peer.send(b"x" * 10_000)
    assert said(peer) == b""
    assert bench.store.snapshot()["used_memory"] == bench.store.snapshot()["tubes"] * 248


def test_requests_behind_a_waiting_reserve_wait(bench: Pump):
    peer, other = bench.connect(), bench.connect()
    assert ask(peer, wire.reserve(), wire.use(b"t"), wire.put(b"mine"), wire.reserve()) == b""
    assert peer.session.state == 2
    assert ask(other, wire.put(b"one")) == b"INSERTED 1\r\n"
    assert said(peer) == b"RESERVED 1 3\r\none\r\nUSING t\r\nINSERTED 2\r\n"
    assert ask(other, wire.put(b"two")) == b"INSERTED 3\r\n"
    assert said(peer) == b"RESERVED 3 3\r\ntwo\r\n"


def test_a_wait_ends_at_its_time_and_never_before(bench: Pump):
    peer = bench.connect()
    assert ask(peer, wire.reserve(2)) == b""
    bench.advance(2 * SECOND - 1)
    assert said(peer) == b""
    bench.advance(1 + TICK)
    assert said(peer) == b"TIMED_OUT\r\n"


def test_deadline_soon_ends_a_wait(bench: Pump):
    peer = bench.connect()
    assert ask(peer, wire.put(b"x", ttr=3), wire.reserve(), wire.reserve()) == b"INSERTED 1\r\nRESERVED 1 1\r\nx\r\n"
    bench.advance(2 * SECOND - 1)
    assert said(peer) == b""
    bench.advance(1 + TICK)
    assert said(peer) == b"DEADLINE_SOON\r\n"
    assert ask(peer, wire.reserve(0), wire.touch(1), wire.reserve(0)) == b"DEADLINE_SOON\r\nTOUCHED\r\nTIMED_OUT\r\n"


def test_a_worker_can_reserve_its_own_timed_out_job_again(bench: Pump):
    peer = bench.connect()
    assert ask(peer, wire.put(b"x", ttr=1), wire.reserve()) == b"INSERTED 1\r\nRESERVED 1 1\r\nx\r\n"
    bench.advance(SECOND + TICK)
    assert ask(peer, wire.reserve(0)) == b"RESERVED 1 1\r\nx\r\n"


def test_a_ready_job_is_reserved_instead_of_deadline_soon(bench: Pump):
    peer = bench.connect()
    assert ask(peer, wire.put(b"x", ttr=1), wire.put(b"y"), wire.reserve(), wire.reserve()).count(b"RESERVED") == 2


@pytest.mark.parametrize("way", ["half_close", "close", "hang_up", "drain"])
def test_a_wait_ends_with_its_connection_or_a_drain(bench: Pump, way: str):
    """Afterwards no session is in the queue: a job goes to the next worker."""
    peer, second, other = bench.connect(), bench.connect(), bench.connect()
    assert ask(peer, wire.reserve()) == ask(second, wire.reserve()) == b""
    if way == "half_close":
        peer.half_close()
    elif way == "close":
        peer.close()
    elif way == "hang_up":
        peer.session.hang_up(bench.now_ns)
        bench.settle()
    else:
        bench.store.begin_drain()
        bench.settle()
    assert said(peer) == (b"" if way == "close" else b"TIMED_OUT\r\n")
    bench.store.audit()
    if way == "drain":
        assert said(second) == b"TIMED_OUT\r\n"
        assert ask(other, wire.put(b"x"), wire.reserve()) == b"DRAINING\r\nTIMED_OUT\r\n"
    else:
        assert ask(other, wire.put(b"x")) == b"INSERTED 1\r\n"
        assert said(second) == b"RESERVED 1 1\r\nx\r\n"


def test_a_wait_causes_no_ticks(bench: Pump):
    """Nothing is due, however many wait."""
    peers = [bench.connect() for _ in range(1000)]
    for peer in peers:
        assert ask(peer, wire.reserve()) == b""
    assert bench.store.next_deadline() == -1
    assert bench.turn() == (False, False)


def test_quit_answers_earlier_requests(bench: Pump):
    peer = bench.connect()
    assert ask(peer, wire.use(b"t"), wire.quit(), wire.use(b"u")) == b"USING t\r\n"
    assert peer.session.closing


def test_a_kick_goes_on_in_slices(bench: Pump):
    """Others are served meanwhile, and the reply has the number of all kicked jobs."""
    count = 5000
    fill(bench, count, delay=100)
    peer, other = bench.connect(), bench.connect()
    peer.session.owner = None  # so that only this test takes its output
    output = peer.session.receive(wire.kick(4000) + wire.use(b"t"), bench.now_ns)
    turns = 0
    while peer.session.more:
        assert output == b""
        assert ask(other, wire.list_tube_used()) == b"USING default\r\n"
        output += peer.session.take_output(bench.now_ns)
        turns += 1
        bench.store.audit()
    assert turns > 3
    assert output == b"KICKED 4000\r\nUSING t\r\n"
    assert bench.store.snapshot()["jobs:ready"] == 4000
    assert bench.store.snapshot()["jobs:delayed"] == count - 4000


def test_a_kick_takes_only_buried_jobs_if_there_are_any(bench: Pump):
    fill(bench, 3, delay=100)
    peer = bench.connect()
    ask(peer, wire.reserve_job(2), wire.bury(2, 0))
    assert ask(peer, wire.kick(10), wire.kick(10)) == b"KICKED 1\r\nKICKED 2\r\n"


def test_kicked_jobs_go_to_waiting_workers(bench: Pump):
    fill(bench, 2, delay=100)
    peer, waiting = bench.connect(), bench.connect()
    assert ask(waiting, wire.reserve()) == b""
    assert ask(peer, wire.kick(10)) == b"KICKED 2\r\n"
    assert said(waiting) == b"RESERVED 1 1\r\nx\r\n"


def test_watched_tubes_are_bounded():
    bench = Pump(make_store(memory_limit=1 << 24, tubes=5000))
    peer = bench.connect()
    for number in range(4095):
        assert ask(peer, wire.watch(b"t%d" % number)) == b"WATCHING %d\r\n" % (number + 2)
    assert ask(peer, wire.watch(b"more"), wire.watch(b"t7"), wire.stats_tube(b"more")) == (
        b"OUT_OF_MEMORY\r\nWATCHING 4096\r\nNOT_FOUND\r\n"
    )
    assert ask(peer, wire.ignore(b"t7"), wire.watch(b"more")) == b"WATCHING 4095\r\nWATCHING 4096\r\n"
    peer.close()
    assert bench.store.snapshot()["tubes"] == 1


def test_statistics_have_the_protocols_fields(bench: Pump):
    peer = bench.connect()
    ask(peer, wire.put(b"x", 1023), wire.put(b"y", 1024), wire.reserve(), b"nonsense\r\n")
    figures = wire.read_dictionary(wire.Parser().feed(ask(peer, wire.stats()))[0].body)
    told = {name: figures[name] for name in (
        "current-jobs-urgent", "current-jobs-ready", "current-jobs-reserved", "cmd-put", "cmd-reserve", "cmd-stats",
        "current-producers", "current-workers", "current-connections", "total-jobs", "max-job-size", "draining",
        "hostname",
    )}  # fmt: skip
    assert list(told.values()) == ["0", "1", "1", "2", "1", "1", "1", "1", "1", "2", "65535", "false", "here"]
    bench.store.refuse_puts(True)
    figures = wire.read_dictionary(wire.Parser().feed(ask(peer, wire.stats()))[0].body)
    assert figures["draining"] == "true"
    assert ask(peer, wire.put(b"z"), wire.reserve()) == b"DRAINING\r\nRESERVED 2 1\r\ny\r\n"


def test_outcomes_are_counted(bench: Pump):
    peer = bench.connect()
    ask(peer, wire.put(b"x"), wire.delete(9), wire.delete(1), wire.reserve(0), b"nonsense\r\n", b"delete\r\n")
    ask(peer, b"put 0 0 60 70000\r\n" + b"x" * 70002)
    assert ask(peer, wire.reserve(1)) == b""
    bench.advance(SECOND + TICK)
    assert sorted(bench.store.outcomes()) == [
        ("delete", "not_found", 1), ("delete", "ok", 1), ("put", "job_too_big", 1), ("put", "ok", 1),
        ("reserve-with-timeout", "timed_out", 2), ("unknown", "bad_format", 1), ("unknown", "unknown_command", 1),
    ]  # fmt: skip


def test_a_garbage_collected_session_leaves_the_queue(bench: Pump):
    """As where net could not make a connection of it."""
    session = bench.store.session(bench.now_ns)
    assert session.receive(wire.reserve(), bench.now_ns) == b""
    del session
    bench.settle()
    bench.store.audit()
    fill(bench, 1)
    assert bench.store.snapshot()["jobs:ready"] == 1


def test_a_worker_that_does_not_read_gets_no_job_until_it_reads(bench: Pump):
    peer, other = bench.connect(), bench.connect()
    assert ask(peer, wire.reserve()) == b""
    peer.deaf = True
    assert ask(other, wire.put(b"x" * 60_000)) == b"INSERTED 1\r\n"
    assert said(peer) == b""
    peer.deaf = False
    peer.pull()
    assert said(peer) == b"RESERVED 1 60000\r\n" + b"x" * 60_000 + b"\r\n"


def hold(bench: Pump, count: int) -> Peer:
    peer = bench.connect()
    for _ in range(count):
        assert ask(peer, wire.reserve(0)).startswith(b"RESERVED")
    return peer


def test_jobs_of_an_ended_connection_become_ready(bench: Pump):
    """In slices, and waiting workers get them first."""
    fill(bench, 3000)
    peer, waiting = hold(bench, 3000), bench.connect()
    assert ask(waiting, wire.reserve()) == b""
    assert bench.store.held() == bench.store.holdings_of(peer.session.number) == 3000
    bench.ticking = False
    peer.close()
    assert bench.store.next_deadline() == 0
    bench.store.tick(bench.now_ns)
    assert 0 < bench.store.snapshot()["jobs:ready"] < 3000
    bench.ticking = True
    bench.settle()
    assert said(waiting).startswith(b"RESERVED 1 ")
    assert bench.store.held() == 1
    assert bench.store.snapshot()["given_back"] == 3000


# ---- what beanstalkd does not have -----------------------------------------------------------------------------------


def test_batch_reserve_returns_several_jobs(bench: Pump):
    fill(bench, 5)
    peer = bench.connect()
    assert ask(peer, b"batch-reserve 3 0\r\n", b"batch-reserve 9 0\r\n", b"batch-reserve 1 0\r\n") == (
        b"JOBS 3\r\n" + b"".join(b"RESERVED %d 1\r\nx\r\n" % number for number in (1, 2, 3))
        + b"JOBS 2\r\nRESERVED 4 1\r\nx\r\nRESERVED 5 1\r\nx\r\nTIMED_OUT\r\n"
    )  # fmt: skip
    assert ask(peer, b"batch-reserve 0 0\r\n", b"batch-reserve 1\r\n") == b"BAD_FORMAT\r\n" * 2


def test_a_waiting_batch_reserve_gets_the_first_job(bench: Pump):
    peer, other = bench.connect(), bench.connect()
    assert ask(peer, b"batch-reserve 10 5\r\n") == b""
    assert ask(other, wire.put(b"a"), wire.put(b"b")) == b"INSERTED 1\r\nINSERTED 2\r\n"
    assert said(peer) == b"JOBS 1\r\nRESERVED 1 1\r\na\r\n"


def test_a_batch_is_limited_to_the_size_of_a_reply(bench: Pump):
    """But it always has one job."""
    fill(bench, 3, body=b"y" * 30_000)
    fill(bench, 1, body=b"z" * 65_535)
    fill(bench, 2000)
    peer = bench.connect()
    said_first = ask(peer, b"batch-reserve 5000 0\r\n")
    assert said_first.startswith(b"JOBS 2\r\n")
    assert ask(peer, b"batch-reserve 5000 0\r\n").startswith(b"JOBS 1\r\nRESERVED 3 30000\r\n")
    assert ask(peer, b"batch-reserve 5000 0\r\n").startswith(b"JOBS 1\r\nRESERVED 4 65535\r\n")
    assert ask(peer, b"batch-reserve 5000 0\r\n").startswith(b"JOBS 1000\r\n")


def test_a_tube_is_cleared_by_state(bench: Pump):
    fill(bench, 2, tube=b"t")
    fill(bench, 3, tube=b"t", delay=9)
    fill(bench, 1, tube=b"u")
    peer = bench.connect()
    ask(peer, wire.reserve_job(1), wire.reserve_job(2), wire.bury(2, 0))
    assert ask(peer, b"clear-tube t delayed\r\n", b"clear-tube t delayed\r\n", b"clear-tube t ready\r\n") == (
        b"CLEARED 3\r\nCLEARED 0\r\nCLEARED 0\r\n"
    )
    assert ask(peer, b"clear-tube t all\r\n", wire.stats_job(1)).startswith(b"CLEARED 1\r\nOK")
    assert ask(peer, b"clear-tube none all\r\n", b"clear-tube t reserved\r\n") == b"NOT_FOUND\r\nBAD_FORMAT\r\n"
    assert ask(peer, b"clear-tube u all\r\n", wire.stats_tube(b"u")) == b"CLEARED 1\r\nNOT_FOUND\r\n"


def test_a_tube_is_cleared_in_slices(bench: Pump):
    """Also if nothing else needs it; jobs put meanwhile may be cleared as well, but no more than there were."""
    fill(bench, 3000, tube=b"t")
    peer, other = bench.connect(), bench.connect()
    peer.session.owner = None
    output = peer.session.receive(b"clear-tube t all\r\n", bench.now_ns)
    turns = 0
    while peer.session.more:
        assert ask(other, wire.list_tube_used()) == b"USING default\r\n"
        output += peer.session.take_output(bench.now_ns)
        turns += 1
        bench.store.audit()
    assert turns > 3
    assert output == b"CLEARED 3000\r\n"
    assert bench.store.snapshot()["tubes"] == 1


def test_large_jobs_are_kicked_to_workers_in_slices():
    """Writing the replies counts as work too."""
    bench = Pump(make_store(memory_limit=1 << 24, job_size_max=64_000))
    fill(bench, 50, body=b"x" * 64_000)
    peer = bench.connect()
    for number in range(1, 51):
        ask(peer, wire.reserve_job(number), wire.bury(number, 0))
    workers = [bench.connect() for _ in range(50)]
    for worker in workers:
        ask(worker, wire.reserve())
    peer.session.owner = None
    output = peer.session.receive(wire.kick(50), bench.now_ns)
    turns = 0
    while peer.session.more:
        turns += 1
        output += peer.session.take_output(bench.now_ns)
    assert turns > 5
    assert output == b"KICKED 50\r\n"
    bench.settle()
    assert [said(worker)[:9] for worker in workers] == [b"RESERVED "] * 50


def test_a_clear_deletes_no_more_jobs_than_the_state_had(bench: Pump):
    fill(bench, 3000, tube=b"t")
    fill(bench, 3000, tube=b"t", delay=9)
    peer, other = bench.connect(), bench.connect()
    ask(other, wire.use(b"t"))
    peer.session.owner = None
    output = peer.session.receive(b"clear-tube t ready\r\n", bench.now_ns)
    while peer.session.more:
        ask(other, wire.put(b"new"))
        output += peer.session.take_output(bench.now_ns)
    assert output == b"CLEARED 3000\r\n"


# What the parts of a command cost: see PUT_STEPS and its neighbours in _session.pyx.
COSTS = {
    b"list-tube-used\r\n": 1,
    wire.put(b"x"): 1 + 16,
    wire.put(b"x" * 64): 2 + 16,
    wire.put(b"x", delay=1): 1 + 16 + 8,
    wire.put_limited(b"x", b"name", 1): 1 + 16 + 12,
    b"limit-reserves a 1 b\r\n": 1 + 8,
    wire.reserve(0): 1 + 1 + 8,
}


@pytest.mark.parametrize("command", COSTS, ids=lambda command: command[:20].decode())
def test_the_work_of_each_command_counts_for_the_bound_of_a_call(command: bytes):
    lent = LentPump(make_store())
    peer = lent.connect()
    fill(lent, 600)
    session = peer.session
    done = session.requests
    session.receive(command * 5000, lent.now_ns)
    assert lent.store.budget <= 0
    assert session.more
    assert session.requests - done == -(-4096 // COSTS[command])


LONG_COMMANDS = [wire.kick(5000), b"clear-tube default delayed\r\n", wire.list_tubes_watched(), wire.list_tubes()]
LONG_COMMANDS += [wire.list_jobs(b"default", count=1000)]


@pytest.mark.parametrize("command", LONG_COMMANDS, ids=lambda command: command.split()[0].decode())
@pytest.mark.parametrize("way", ["eof", "closed"])
def test_a_connection_that_ends_during_a_long_command(bench: Pump, command: bytes, way: str):
    fill(bench, 4000, delay=9)
    peer = bench.connect()
    for number in range(900):
        ask(peer, wire.watch(b"%d" % number + b"t" * 100))
    peer.session.owner = None
    output = peer.session.receive(command, bench.now_ns)
    assert peer.session.more
    if way == "closed":
        peer.session.closed(bench.now_ns)
    else:
        output += peer.session.eof(bench.now_ns)
        while peer.session.more:
            output += peer.session.take_output(bench.now_ns)
            bench.store.audit()
        assert output.startswith((b"KICKED 4000", b"CLEARED 4000", b"OK "))
        assert peer.session.closing
    bench.settle()
    bench.store.audit()
    assert bench.store.snapshot()["tubes"] == 1


# ---- jobs that fail again and again ----


def state(peer: Peer, number: int) -> tuple[str, str, str]:
    """Tube, state and reserves of a job."""
    body = ask(peer, wire.stats_job(number)).decode().split("\r\n", 1)[1]
    told = dict(line.split(": ") for line in body.strip().split("\n")[1:])
    return told["tube"].strip('"'), told["state"], told["reserves"]


@pytest.mark.parametrize(
    ("other", "retired"), [(b"dead", ("dead", "ready", "2")), (b"default", ("default", "buried", "2"))]
)
@pytest.mark.parametrize("how", ["release", "delay", "time", "death"])
def test_a_job_reserved_too_often_is_retired(bench: Pump, how: str, other: bytes, retired: tuple[str, str, str]):
    peer = bench.connect()
    assert ask(peer, wire.limit_reserves(b"default", 2, other), wire.put(b"x", ttr=5)) == b"LIMITED\r\nINSERTED 1\r\n"
    for _ in range(2):
        assert state(peer, 1)[1] == "ready"
        worker = bench.connect()
        assert ask(worker, wire.reserve()) == b"RESERVED 1 1\r\nx\r\n"
        if how == "time":
            bench.advance(5 * SECOND + TICK)
        elif how != "death":
            ask(worker, wire.release(1, 0, int(how == "delay")))
            if how == "delay" and state(peer, 1)[2] == "1":
                bench.advance(SECOND + TICK)
        worker.close()
    assert state(peer, 1) == retired
    assert bench.store.snapshot()["retired"] == 1


def test_a_deleted_or_kicked_job_is_not_retired(bench: Pump):
    peer = bench.connect()
    ask(peer, wire.limit_reserves(b"default", 1, b"dead"), wire.put(b"x"), wire.reserve())
    assert ask(peer, wire.bury(1), wire.kick(1), wire.reserve(), wire.delete(1)).endswith(b"DELETED\r\n")
    # A kick gives it another try, and one alone.
    ask(peer, wire.put(b"y"), wire.reserve(), wire.bury(2), wire.kick(1), wire.reserve(), wire.release(2))
    assert state(peer, 2) == ("dead", "ready", "2")


def test_a_limit_of_reserves_keeps_both_tubes_alive(bench: Pump):
    peer = bench.connect()
    ask(peer, wire.limit_reserves(b"a", 3, b"b"))
    told = ask(peer, wire.inspect_tube(b"a"))
    assert b'max-reserves: 3\nretire-to: "b"\n' in told
    assert bench.store.snapshot()["tubes"] == 3
    ask(peer, wire.limit_reserves(b"a", 4, b"c"))
    assert ask(peer, wire.stats_tube(b"b")) == b"NOT_FOUND\r\n"
    ask(peer, wire.limit_reserves(b"a", 0, b"c"))
    assert bench.store.snapshot()["tubes"] == 1


def test_jobs_retired_to_a_full_tube_are_buried():
    bench = Pump(make_store(tube_jobs_max=1))
    peer = bench.connect()
    ask(peer, wire.use(b"dead"), wire.put(b"x"), wire.use(b"default"), wire.limit_reserves(b"default", 1, b"dead"))
    ask(peer, wire.put(b"y"), wire.reserve(), wire.release(2))
    assert state(peer, 2) == ("default", "buried", "1")
    bench.store.audit()


@pytest.mark.parametrize(("names", "reply"), [(b"new 1 new2", b"OUT_OF_MEMORY\r\n"), (b"-x 1 a", b"BAD_FORMAT\r\n")])
def test_invalid_limits_of_reserves_are_refused(names: bytes, reply: bytes):
    bench = Pump(make_store(tubes=2))
    peer = bench.connect()
    assert ask(peer, b"limit-reserves %b\r\n" % names) == reply
    bench.store.audit()
    assert bench.store.snapshot()["tubes"] == 1


def test_the_time_from_put_to_reserve_is_measured(bench: Pump):
    peer = bench.connect()
    ask(peer, wire.put(b"1"))
    bench.advance(3 * SECOND)
    ask(peer, wire.put(b"2"))
    bench.advance(SECOND)
    assert b"age-of-oldest-ready: 4\ntime-in-queue: 0.000000\n" in ask(peer, wire.inspect_tube(b"default"))
    ask(peer, wire.reserve() * 2)
    assert b"age-of-oldest-ready: 0\ntime-in-queue: 2.500000\n" in ask(peer, wire.inspect_tube(b"default"))


# ---- keys ----


def test_put_unique_puts_a_key_once(bench: Pump):
    peer, other = bench.connect(), bench.connect()
    long = b"k" * 150
    assert ask(peer, wire.put_unique(b"1", b"k"), wire.put_unique(b"2", long)) == b"INSERTED 1\r\nINSERTED 2\r\n"
    ask(other, wire.use(b"another"))
    assert ask(other, wire.put_unique(b"3", b"k"), wire.put_unique(b"4", long)) == b"EXISTS 1\r\nEXISTS 2\r\n"
    assert ask(peer, wire.reserve(), wire.put_unique(b"5", b"k")) == b"RESERVED 1 1\r\n1\r\nEXISTS 1\r\n"
    assert ask(peer, wire.delete(1), wire.put_unique(b"6", b"k")) == b"DELETED\r\nINSERTED 3\r\n"
    assert b'key: "k"\n' in ask(peer, wire.stats_job(3))
    assert b"key" not in ask(peer, wire.put(b"x"), wire.stats_job(4))
    figures = bench.store.snapshot()
    assert (figures["keys"], figures["jobs"], figures["total_jobs"]) == (2, 3, 4)


def test_a_key_stays_in_use_for_its_time_after_its_job(bench: Pump):
    peer = bench.connect()
    ask(peer, wire.put_unique(b"1", b"k", 10), wire.delete(1))
    assert ask(peer, wire.put_unique(b"2", b"k", 99)) == b"EXISTS 1\r\n"
    bench.advance(10 * SECOND - 1)
    assert ask(peer, wire.put_unique(b"2", b"k")) == b"EXISTS 1\r\n"
    bench.advance(1)
    assert ask(peer, wire.put_unique(b"2", b"k", 5)) == b"INSERTED 2\r\n"
    ask(peer, wire.clear_tube(b"default"))
    assert bench.store.snapshot()["keys"] == 1
    bench.advance(5 * SECOND + TICK)
    assert bench.store.snapshot()["keys"] == 0
    assert bench.store.snapshot()["used_memory"] == 248


@pytest.mark.parametrize("ending", [b"", b" k", b" k x", b" -k 1", b" k 2147483648", b" k 1 2"])
def test_an_invalid_put_unique_is_refused(bench: Pump, ending: bytes):
    peer = bench.connect()
    assert ask(peer, b"put-unique 1 0 60 1%b\r\n" % ending) == b"BAD_FORMAT\r\n"


def test_put_unique_has_the_refusals_of_put():
    bench = Pump(make_store(job_size_max=10, tube_jobs_max=1))
    peer = bench.connect()
    assert ask(peer, wire.put_unique(b"x" * 11, b"k")) == b"JOB_TOO_BIG\r\n"
    assert ask(peer, b"put-unique 1 0 60 1 k 0\r\nxyz") == b"EXPECTED_CRLF\r\n"
    assert ask(peer, wire.put(b"x"), wire.put_unique(b"x", b"k")) == b"INSERTED 1\r\nOUT_OF_MEMORY\r\n"
    assert bench.store.snapshot()["keys"] == 0


def test_a_key_uses_memory(bench: Pump):
    peer = bench.connect()
    before = bench.store.snapshot()["used_memory"]
    ask(peer, wire.put_unique(b"", b"k" * 40))
    assert bench.store.snapshot()["used_memory"] - before == 136 + 104


@pytest.mark.parametrize("command", [wire.kick(5), wire.clear_tube(b"default", "buried")])
def test_a_long_command_behind_held_replies_is_refused_after_a_failure(kept: Journaled, command: bytes):
    peer = kept.connect()
    told(kept, peer, wire.put(b"1"))
    told(kept, peer, wire.reserve(), wire.bury(1, 0))
    assert ask(peer, wire.put(b"2"), command) == b""
    kept.refuse()
    assert said(peer) == b"INTERNAL_ERROR\r\n" * 2
    kept.commit()
    assert told(kept, peer, command).endswith(b"ED 1\r\n")
