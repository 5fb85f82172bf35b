"""The beanstalk protocol's journal: what is written of jobs, when replies are sent, and the state after a restart."""

from __future__ import annotations

import sqlite3
import zlib
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.beanstalk import _journal, journal, wire
from kit.journaled import Journaled
from kit.pump import UNIX_NS
from unit.protocols.beanstalk.asking import SECOND, TICK, ask, restore, said, told

if TYPE_CHECKING:
    from kit.pump import Peer

DAY = 86400 * SECOND
ID_MAX = _journal.CONSTANTS["ID_MAX"]
LIMITS_MAX = 4096  # of _session.pyx


def figures(peer: Peer, number: int) -> dict[str, str]:
    body = ask(peer, wire.stats_job(number)).decode()
    return dict(line.split(": ") for line in body.split("\r\n", 1)[1].strip().split("\n")[1:])


@pytest.mark.parametrize(
    ("command", "reply"),
    [
        (wire.put(b"b"), b"INSERTED 5\r\n"),
        (wire.delete(1), b"DELETED\r\n"),
        (wire.delete(4), b"DELETED\r\n"),
        (wire.release(4, 1, 2), b"RELEASED\r\n"),
        (wire.bury(4, 1), b"BURIED\r\n"),
        (wire.touch(4), b"TOUCHED\r\n"),
        (wire.kick_job(2), b"KICKED\r\n"),
        (wire.kick(5), b"KICKED 1\r\n"),
        (wire.clear_tube(b"default", "all"), b"CLEARED 3\r\n"),
    ],
)
def test_replies_to_changes_wait_for_the_disk(kept: Journaled, command: bytes, reply: bytes):
    peer = kept.connect()
    told(kept, peer, wire.put(b"1"), wire.put(b"2", delay=9), wire.put(b"3"), wire.put(b"4", priority=0))
    told(kept, peer, wire.reserve())
    assert ask(peer, command, wire.list_tube_used()) == b""
    assert kept.take()
    kept.write()
    assert said(peer) == b""
    kept.reach()
    assert said(peer) == reply + b"USING default\r\n"


def test_replies_to_requests_without_changes_do_not_wait(kept: Journaled):
    peer = kept.connect()
    told(kept, peer, wire.put(b"1"))
    assert ask(peer, wire.peek(1)) == b"FOUND 1 1\r\n1\r\n"
    assert ask(peer, wire.delete(7)) == b"NOT_FOUND\r\n"
    assert ask(peer, wire.reserve()) == b"RESERVED 1 1\r\n1\r\n"


def test_a_waiting_worker_gets_a_job_before_it_is_on_disk(kept: Journaled):
    worker, peer = kept.connect(), kept.connect()
    worker.send(wire.reserve())
    assert ask(peer, wire.put(b"1")) == b""
    assert said(worker) == b"RESERVED 1 1\r\n1\r\n"


def test_one_piece_is_written_at_a_time(kept: Journaled):
    peer, other = kept.connect(), kept.connect()
    peer.send(wire.put(b"1"))
    assert kept.take()
    other.send(wire.put(b"2"))
    assert _journal.take(kept.bench.store, kept.bench.now_ns) is None
    kept.write()
    kept.reach()
    assert (said(peer), said(other)) == (b"INSERTED 1\r\n", b"")
    kept.commit()
    assert said(other) == b"INSERTED 2\r\n"


def test_a_job_put_and_deleted_within_a_piece_is_not_written(kept: Journaled):
    peer = kept.connect()
    peer.send(wire.put(b"1") + wire.reserve() + wire.delete(1))
    assert kept.take()
    assert kept.piece is not None
    assert _journal.rows(kept.piece[1], 0)[2:] == ([], [], [], [], [], [])
    kept.reach()
    assert said(peer) == b"INSERTED 1\r\nRESERVED 1 1\r\n1\r\nDELETED\r\n"
    assert kept.bench.store.snapshot()["used_memory"] == 248


def test_a_job_is_written_once_in_a_piece_and_its_body_once(kept: Journaled):
    peer = kept.connect()
    told(kept, peer, wire.put(b"1"))
    for _ in range(3):
        peer.send(wire.reserve() + wire.release(1, 7, 0))
    assert kept.take()
    assert kept.piece is not None
    _, _, whole, _, changed, gone, _, _ = _journal.rows(kept.piece[1], 0)
    assert (whole, gone, len(changed)) == ([], [], 1)
    assert changed[0][2] == 7


def test_jobs_are_restored_with_their_state(kept: Journaled):
    peer = kept.connect()
    long = bytes(range(256)) * 20
    told(kept, peer, wire.use(b"t"), wire.put(b"", priority=5, ttr=9), wire.put(long, delay=100), wire.put(b"buried"))
    told(kept, peer, wire.watch(b"t"), wire.reserve_job(3), wire.bury(3, 77), wire.reserve_job(1))
    kept.crash(10 * SECOND)
    assert kept.restored == 3
    peer = kept.connect()
    assert ask(peer, wire.peek(2)) == b"FOUND 2 5120\r\n" + long + b"\r\n"
    one, two, three = (figures(peer, number) for number in (1, 2, 3))
    assert (one["tube"], one["state"], one["pri"], one["reserves"], one["timeouts"]) == ('"t"', "ready", "5", "1", "1")
    assert (two["state"], two["delay"], two["time-left"], two["age"]) == ("delayed", "100", "90", "10")
    assert (three["state"], three["pri"], three["buries"], three["reserves"]) == ("buried", "77", "1", "1")


def test_a_time_to_run_goes_on_after_a_restart(kept: Journaled):
    """Any connection may end such a job, as the one that reserved it is gone."""
    peer = kept.connect()
    told(kept, peer, wire.put(b"1", ttr=10) * 4)
    told(kept, peer, wire.reserve() * 4)
    kept.crash(5 * SECOND)
    peer, other = kept.connect(), kept.connect()
    assert figures(peer, 1)["state"] == "reserved"
    assert ask(peer, wire.reserve(0)) == b"TIMED_OUT\r\n"
    assert told(kept, peer, wire.delete(1), wire.bury(2, 0), wire.touch(3)) == b"DELETED\r\nBURIED\r\nTOUCHED\r\n"
    assert ask(other, wire.delete(3)) == b"NOT_FOUND\r\n"  # it has a worker again
    kept.bench.advance(5 * SECOND + TICK)
    assert figures(peer, 4)["state"] == "ready"
    assert figures(peer, 3)["state"] == "reserved"
    peer.close()
    assert figures(other, 3)["state"] == "ready"


def test_a_drain_does_not_wait_for_jobs_reserved_before_a_restart(kept: Journaled):
    peer = kept.connect()
    told(kept, peer, wire.put(b"1"), wire.reserve())
    assert kept.bench.store.held() == 1
    kept.crash()
    assert kept.bench.store.held() == 0


def test_ids_are_not_used_again_after_a_restart(kept: Journaled):
    peer = kept.connect()
    told(kept, peer, wire.put(b"1"), wire.delete(1))
    seen = []
    for _ in range(3):
        peer.send(wire.put(b"1"))  # nobody is told, but a worker
        worker = kept.connect()
        seen.append(int(ask(worker, wire.reserve()).split()[1]))
        kept.crash()
        peer = kept.connect()
    assert sorted(set(seen)) == seen


def test_after_a_clean_end_no_ids_are_skipped(kept: Journaled):
    peer = kept.connect()
    assert told(kept, peer, wire.put(b"1"), wire.put(b"2"), wire.delete(2)).count(b"INSERTED") == 2
    journal.release(kept.database, **_journal.end(kept.bench.store))
    assert ask(peer, wire.put(b"3")) == b"INTERNAL_ERROR\r\n"  # it would get an id that the next store gives
    kept.crash()
    assert told(kept, kept.connect(), wire.put(b"3")) == b"INSERTED 3\r\n"


def test_only_ids_reserved_in_the_journal_are_used(kept: Journaled):
    store = kept.bench.store
    peer = kept.connect()
    _journal.begin(store, 10, 12)
    assert ask(peer, wire.put(b"1") * 3) == b""
    kept.commit()
    assert said(peer) == b"INSERTED 11\r\nINSERTED 12\r\nINTERNAL_ERROR\r\n"
    assert told(kept, peer, wire.put(b"1")) == b"INSERTED 13\r\n"


def test_ids_are_reserved_before_the_last_is_used():
    """However long the period is."""
    kept = Journaled(journal_period_ns=3600 * SECOND, journal_lag_ns=0)
    store = kept.bench.store
    peer = kept.connect()
    assert ask(peer, wire.put(b"1")) == b"INSERTED 1\r\n"
    kept.commit()
    _journal.begin(store, 10, 20)
    assert ask(peer, wire.put(b"1") * 10).count(b"INSERTED") == 10
    assert store.next_deadline() == 0
    kept.commit()
    assert ask(peer, wire.put(b"1")) == b"INSERTED 21\r\n"
    assert store.next_deadline() > kept.bench.now_ns


def test_an_unchanged_limit_is_not_written_again(kept: Journaled):
    peer, other = kept.connect(), kept.connect()
    for _ in range(3):
        assert ask(peer, wire.limit_reserves(b"a", 3, b"b")) == b""
    assert ask(other, wire.limit_reserves(b"a", 3, b"b")) == b"", "it waits for the first"
    kept.commit()
    assert (said(peer), said(other)) == (b"LIMITED\r\n" * 3, b"LIMITED\r\n")
    assert not kept.take()
    assert told(kept, peer, wire.limit_reserves(b"c", 0, b"c")) == b"LIMITED\r\n"


def test_restored_buried_jobs_are_kicked_in_their_order(kept: Journaled):
    peer = kept.connect()
    told(kept, peer, *(wire.put(b"x") for _ in range(3)))
    for number in (3, 1, 2):
        told(kept, peer, wire.reserve_job(number), wire.bury(number, 0))
        kept.bench.advance(SECOND)
    kept.crash()
    peer = kept.connect()
    for number in (3, 1, 2):
        assert ask(peer, wire.peek_next("buried")).split()[1] == b"%d" % number
        told(kept, peer, wire.kick(1))


# ---- a disk that fails ----


def test_a_put_that_cannot_be_written_is_refused_and_undone(kept: Journaled):
    peer, worker = kept.connect(), kept.connect()
    told(kept, peer, wire.put(b"old", priority=9))
    body = b"INSERTED 2\r\n"  # which is no reply
    peer.send(wire.put(body) + wire.peek(2) + wire.stats_job(2) + wire.put(b"worked on") + wire.delete(2))
    assert ask(worker, wire.reserve_job(3)) == b"RESERVED 3 9\r\nworked on\r\n"
    assert kept.take()
    kept.refuse()
    replies = said(peer)
    assert replies.startswith(b"INSERTED 2\r\nFOUND 2 12\r\n" + body + b"\r\nOK ")  # it came and went
    assert replies.endswith(b"\r\nINTERNAL_ERROR\r\nINTERNAL_ERROR\r\n")
    # From now on at once. What is not to be written goes on.
    assert ask(peer, wire.put(b"new")) == b"INTERNAL_ERROR\r\n"
    assert ask(peer, wire.reserve(), wire.touch(1)) == b"RESERVED 1 3\r\nold\r\nTOUCHED\r\n"
    lasting = (wire.delete(1), wire.release(1, 0, 0), wire.bury(1, 0), wire.kick(1), wire.clear_tube(b"default"))
    assert ask(peer, *lasting, wire.kick_job(1)) == b"INTERNAL_ERROR\r\n" * 6
    assert ask(worker, wire.release(3, 0, 0)) == b"INTERNAL_ERROR\r\n"
    kept.write()
    kept.reach()
    assert told(kept, worker, wire.release(3, 0, 0)) == b"RELEASED\r\n"
    assert told(kept, peer, wire.put(b"again"), wire.delete(1)) == b"INSERTED 4\r\nDELETED\r\n"
    kept.crash()
    peer = kept.connect()
    assert [ask(peer, wire.peek(number))[:5] for number in (1, 2, 3, 4)] == [b"NOT_F", b"NOT_F", b"FOUND", b"FOUND"]


def test_a_refused_job_stays_if_a_worker_has_had_it(kept: Journaled):
    peer, worker, other = kept.connect(), kept.connect(), kept.connect()
    peer.send(b"".join(wire.put(b"%d" % number) for number in (1, 2, 3)))
    ask(worker, wire.reserve_job(1), wire.reserve_job(2))
    worker.send(wire.release(1, 0, 0) + wire.bury(2, 0))
    ask(other, wire.reserve_job(3))
    other.close()
    assert kept.take()
    kept.refuse()
    assert said(peer) == b"INTERNAL_ERROR\r\n" * 3
    assert said(worker) == b"INTERNAL_ERROR\r\n" * 2  # that was done, and may be undone by a crash
    kept.write()
    kept.reach()
    kept.commit()
    kept.crash()
    assert kept.restored == 3


def test_a_full_disk_undoes_puts_and_nothing_else(kept: Journaled):
    peer, other = kept.connect(), kept.connect()
    told(kept, peer, wire.put_unique(b"old", b"k", 9), wire.put(b"older"))
    other.send(wire.delete(1))
    peer.send(wire.put(b"3") + wire.put_unique(b"4", b"k2", 0) + wire.delete(2))
    assert kept.take()
    assert kept.piece is not None
    _journal.fill(kept.bench.store, True, kept.bench.now_ns)
    assert kept.bench.store.snapshot()["journal_full"] == 1
    peer.send(wire.put(b"5") + wire.limit_reserves(b"a", 1, b"b"))
    assert said(peer) == said(other) == b""  # nothing is on disk yet
    renewed = _journal.renew(kept.bench.store, kept.piece[1], kept.bench.now_ns)
    assert renewed is not None
    assert len(renewed) < len(kept.piece[1])
    assert _journal.growth(renewed, 1000) == 0
    kept.piece = kept.piece[0], renewed
    kept.write()
    kept.reach()
    assert said(other) == b"DELETED\r\n"
    assert said(peer) == b"INTERNAL_ERROR\r\n" * 2 + b"DELETED\r\n" + b"INTERNAL_ERROR\r\n" * 2
    assert kept.bench.store.snapshot()["jobs"] == 0
    _journal.fill(kept.bench.store, False, kept.bench.now_ns)
    assert told(kept, peer, wire.put_unique(b"6", b"k2", 0)) == b"INSERTED 5\r\n"
    kept.commit()
    kept.crash()
    assert kept.restored == 1


def test_a_full_disk_keeps_what_was_acknowledged_or_given_to_a_worker(kept: Journaled):
    peer, worker = kept.connect(), kept.connect()
    peer.send(wire.put(b"1"))
    assert ask(worker, wire.reserve_job(1)) == b"RESERVED 1 1\r\n1\r\n"
    assert kept.take()
    assert kept.piece is not None
    _journal.fill(kept.bench.store, True, kept.bench.now_ns)
    assert _journal.renew(kept.bench.store, kept.piece[1], kept.bench.now_ns) == kept.piece[1]
    kept.write()
    kept.reach()
    assert said(peer) == b"INTERNAL_ERROR\r\n"


def test_replies_on_a_full_disk_are_changed_in_slices(kept: Journaled):
    peers = [kept.connect() for _ in range(40)]
    for peer in peers:
        peer.send(wire.put(b"x") * 40)
    assert kept.take()
    assert kept.piece is not None
    store = kept.bench.store
    _journal.fill(store, True, kept.bench.now_ns)
    assert _journal.renew(store, kept.piece[1], kept.bench.now_ns) is None
    assert store.next_deadline() == 0
    while (renewed := _journal.renew(store, kept.piece[1], kept.bench.now_ns)) is None:
        store.tick(kept.bench.now_ns)
    assert _journal.growth(renewed, 1000) == 0
    kept.piece = kept.piece[0], renewed
    kept.write()
    kept.reach()
    assert {said(peer) for peer in peers} == {b"INTERNAL_ERROR\r\n" * 40}
    assert store.snapshot()["jobs"] == 0
    store.audit()


def test_unchanged_replies_are_examined_once(kept: Journaled):
    peer, worker = kept.connect(), kept.connect()
    for first in (1, 1001):
        peer.send(wire.put(b"x") * 1000)
        worker.send(b"".join(wire.delete(id_) for id_ in range(first, first + 1000)))
    peer.send(wire.put(b"x"))
    assert kept.take()
    _journal.fill(kept.bench.store, True, kept.bench.now_ns)
    for _ in range(10):
        kept.bench.store.tick(kept.bench.now_ns)
    kept.renew()
    kept.write()
    kept.reach()
    assert said(peer) == b"".join(b"INSERTED %d\r\n" % id_ for id_ in range(1, 2001)) + b"INTERNAL_ERROR\r\n"


def test_a_refused_ready_job_does_not_come_back_with_a_kick(kept: Journaled):
    peer = kept.connect()
    peer.send(wire.put(b"1") + wire.put(b"2", delay=5))
    assert kept.take()
    kept.refuse()
    assert said(peer) == b"INTERNAL_ERROR\r\n" * 2
    assert kept.bench.store.snapshot()["jobs"] == 0
    kept.write()  # it was on its way, and the disk has it after all
    kept.reach()
    kept.commit()
    kept.crash()
    assert kept.restored == 0


def test_late_refusals_are_counted(kept: Journaled):
    """Beside the first count of each, as a count that falls is a restart to Prometheus."""
    peer = kept.connect()
    told(kept, peer, wire.put_unique(b"1", b"k", 0))
    peer.send(wire.put(b"2") + wire.put_unique(b"3", b"k", 0) + wire.put_unique(b"4", b"l", 0) + wire.delete(1))
    assert kept.take()
    kept.refuse()
    assert [line.split()[0] for line in said(peer).splitlines()] == [b"INTERNAL_ERROR"] * 4
    counted = kept.bench.store.outcomes()
    assert {each for each in counted if each[0].startswith(("put", "delete"))} == {
        ("delete", "ok", 1), ("delete", "internal_error", 1), ("put", "ok", 1), ("put", "internal_error", 1),
        ("put-unique", "ok", 2), ("put-unique", "exists", 1), ("put-unique", "internal_error", 2),
    }  # fmt: skip


def test_a_job_stays_if_its_connection_ended_before_the_reply(kept: Journaled):
    peer = kept.connect()
    peer.send(wire.put(b"1"))
    peer.close()
    assert kept.take()
    kept.refuse()
    assert kept.bench.store.snapshot()["jobs"] == 1


# ---- without replies that wait ----


def test_with_a_period_replies_do_not_wait():
    kept = Journaled(journal_period_ns=5_000_000, journal_lag_ns=10_000_000)
    peer = kept.connect()
    assert ask(peer, wire.put(b"1")) == b"INSERTED 1\r\n"
    kept.commit()
    assert ask(peer, wire.put(b"2")) == b"INSERTED 2\r\n"
    assert not kept.take()
    due_ns = kept.bench.store.next_deadline()
    assert due_ns == kept.bench.now_ns + 5_000_000
    kept.bench.advance(4_999_999)
    assert not kept.take()
    kept.bench.advance(1)
    assert kept.take()
    # A failure refuses what is put from then on, and nothing that was promised.
    kept.refuse()
    assert ask(peer, wire.put(b"3"), wire.peek(2)) == b"INTERNAL_ERROR\r\nFOUND 2 1\r\n2\r\n"


def test_changes_beyond_one_piece_follow_within_the_period():
    kept = Journaled(journal_period_ns=5_000_000_000, journal_lag_ns=10_000_000_000)
    peer = kept.connect()
    count = 2 * _journal.CONSTANTS["CHANGES_MAX"] + 1
    for _ in range(0, count, 1000):
        assert ask(peer, wire.put(b"x") * 1000).count(b"INSERTED") == 1000
    pieces = 0
    while kept.take():
        kept.write()
        kept.reach()
        pieces += 1
    assert pieces == 3
    assert kept.bench.store.snapshot()["journal_behind"] == 0
    assert ask(peer, wire.put(b"x")).startswith(b"INSERTED")
    assert not kept.take()
    _journal.hurry(kept.bench.store)
    assert kept.take()


def test_replies_wait_while_a_burst_cannot_be_written_in_time():
    """Although it is younger than the period: what is acknowledged has to be on disk after two periods."""
    kept = Journaled(journal_period_ns=100_000_000, journal_lag_ns=200_000_000)
    peer = kept.connect()
    bytes_of_a_piece = 1 << 18
    acknowledged = 0
    while ask(peer, wire.put(b"x" * 10_000)):
        acknowledged += 1
    assert bytes_of_a_piece * 4 < acknowledged * 10_000 < bytes_of_a_piece * 6  # 20 ms each, if nothing is known
    assert kept.take()  # that does not wait for the period either
    for _ in range(acknowledged):
        kept.take()
        kept.write()
        kept.bench.advance(1_000_000)
        kept.reach()
        if kept.bench.store.snapshot()["journal_behind"] == 0:
            break
    assert said(peer).count(b"INSERTED") == 1
    again = 0
    while ask(peer, wire.put(b"x" * 10_000)) and again < 10 * acknowledged:
        again += 1
    assert again > 2 * acknowledged  # the disk is faster than it was thought to be


def test_replies_wait_for_a_journal_that_is_too_far_behind():
    kept = Journaled(journal_period_ns=5_000_000, journal_lag_ns=10_000_000)
    peer, other = kept.connect(), kept.connect()
    assert ask(peer, wire.put(b"1")) == b"INSERTED 1\r\n"
    assert kept.take()
    kept.write()
    assert ask(peer, wire.put(b"2")) == b"INSERTED 2\r\n"
    kept.bench.advance(10_000_000)
    assert ask(peer, wire.put(b"3")) == b"INSERTED 3\r\n"
    kept.bench.advance(1)
    assert ask(peer, wire.put(b"4")) == b""
    assert ask(other, wire.peek(4)) == b"FOUND 4 1\r\n4\r\n"
    kept.reach()  # of the first alone: what came next is as old as that by now
    assert said(peer) == b""
    assert kept.take()
    assert ask(other, wire.put(b"5")) == b""
    kept.write()
    kept.reach()
    assert (said(peer), said(other)) == (b"INSERTED 4\r\n", b"")
    kept.bench.advance(10_000_000)
    assert ask(peer, wire.put(b"6")) == b"INSERTED 6\r\n"
    kept.commit()
    assert said(other) == b"INSERTED 5\r\n"
    kept.bench.advance(1 << 40)  # nothing is behind meanwhile
    assert ask(peer, wire.put(b"7")) == b"INSERTED 7\r\n"


# ---- what cannot be restored ----


def test_a_damaged_body_is_named(kept: Journaled):
    told(kept, kept.connect(), wire.put(b"good"), wire.put(b"bad"))
    kept.database.execute("UPDATE jobs SET body = x'626164ff' WHERE id = 2")
    with pytest.raises(ValueError, match="job 2: its body is damaged"):
        list(journal.read(kept.database))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("state", "0"), ("state", "5"), ("priority", "-1"), ("ttr", "0"), ("ttr", str(1 << 32)),
        ("tube", "''"), ("tube", "'-a'"), ("tube", "'a b'"), ("tube", f"'{'t' * 201}'"), ("tube", "x'ff'"),
        ("key", "''"), ("key", "'a b'"), ("key", "x'ff'"), ("id", "0"), ("id", "-1"), ("id", f"{ID_MAX + 1}"),
        ("created", "-1"), ("since", "-1"), ("due", "-1"),
    ],
)  # fmt: skip
def test_an_invalid_row_is_named(kept: Journaled, column: str, value: str):
    told(kept, kept.connect(), wire.put(b"1"))
    kept.database.execute(f"UPDATE jobs SET {column} = {value}")
    with pytest.raises(ValueError, match=r"job [-0-9]+: ") as raised:
        list(journal.read(kept.database))
    assert list(journal.problems(kept.database)) == [str(raised.value)]
    assert list(journal.rescue(kept.database, sqlite3.DatabaseError))[-1] == b""


def test_the_largest_id_is_restored(kept: Journaled):
    told(kept, kept.connect(), wire.put(b"1"))
    kept.database.execute("UPDATE jobs SET id = ?", (ID_MAX,))
    kept.crash()
    assert ask(kept.connect(), wire.peek(ID_MAX)) == b"FOUND %d 1\r\n1\r\n" % ID_MAX


@pytest.mark.parametrize("value", ["'x'", "-1", str(ID_MAX + 1), str((1 << 63) - 1)])
def test_an_invalid_last_id_is_named(kept: Journaled, value: str):
    told(kept, kept.connect(), wire.put(b"1"))
    kept.database.execute(f"UPDATE numbers SET value = {value}")
    (problem,) = journal.problems(kept.database)
    assert problem.startswith("the last id cannot be ")
    lost, *pieces = journal.rescue(kept.database, sqlite3.DatabaseError)
    assert lost == b""
    assert [_journal.rows(piece, 0)[2][0][0] for piece in pieces] == [1]
    with pytest.raises(ValueError, match="the last id cannot be "):
        kept.crash()


def test_a_key_of_two_jobs_is_named(kept: Journaled):
    told(kept, kept.connect(), wire.put(b"1"), wire.put(b"2"), wire.put(b"3"))
    kept.database.execute("UPDATE jobs SET key = 'k' WHERE id > 1")
    with pytest.raises(ValueError, match="key k occurs twice"):
        restore(kept, Journaled())
    assert list(journal.problems(kept.database)) == ["job 3: another job has the same key k"]
    assert rescue(kept) == 1
    assert kept.restored == 3
    assert ask(kept.connect(), wire.put_unique(b"x", b"k")) == b"EXISTS 2\r\n"


def rescue(kept: Journaled) -> int:
    """Goes on with what can be rescued from the journal; returns how many places are lost."""
    pieces = list(journal.rescue(kept.database, sqlite3.DatabaseError))
    for table in ("jobs", "bodies", "keys", "limits"):
        kept.database.execute(f"DELETE FROM {table}")
    for piece in filter(None, pieces):
        journal.write(kept.database, piece)
    assert list(journal.problems(kept.database)) == []
    kept.crash()
    return pieces.count(b"")


def test_valid_rows_are_rescued(kept: Journaled):
    peer = kept.connect()
    told(kept, peer, wire.put_unique(b"1", b"k", 100), wire.delete(1), wire.put(b"2"), wire.put(b"3"))
    told(kept, peer, wire.limit_reserves(b"a", 2, b"b"))
    kept.database.execute("INSERT INTO keys VALUES ('a b', 1, 1, 1)")
    kept.database.execute("INSERT INTO limits VALUES ('0', 0, '')")
    kept.database.execute("UPDATE jobs SET id = -3 WHERE id = 3")
    assert rescue(kept) == 3
    peer = kept.connect()
    assert ask(peer, wire.put_unique(b"x", b"k")) == b"EXISTS 1\r\n"
    assert b'max-reserves: 2\nretire-to: "b"\n' in ask(peer, wire.inspect_tube(b"a"))
    assert ask(peer, wire.reserve(0), wire.reserve(0)) == b"RESERVED 2 1\r\n2\r\nTIMED_OUT\r\n"


# ---- a clock that is wrong ----


def test_restoring_after_the_clock_was_set_back(kept: Journaled):
    """Nothing is later than now, and no time is longer than was asked for."""
    bench = kept.bench
    bench.store.set_wall(UNIX_NS + DAY, bench.now_ns)
    peer = kept.connect()
    told(kept, peer, wire.put(b"1"), wire.put(b"2", delay=9), wire.put(b"3", priority=0, ttr=7))
    told(kept, peer, wire.reserve(), wire.reserve_job(1), wire.bury(1, 0))
    kept.crash()
    peer = kept.connect()
    assert [figures(peer, number)["age"] for number in (1, 2, 3)] == ["0", "0", "0"]
    assert [figures(peer, number)["time-left"] for number in (2, 3)] == ["9", "7"]
    bench = kept.bench
    bench.advance(7 * SECOND + TICK)
    assert told(kept, peer, wire.reserve_job(3), wire.bury(3, 0)) == b"RESERVED 3 1\r\n3\r\nBURIED\r\n"
    assert ask(peer, wire.peek_next("buried")) == b"FOUND 1 1\r\n1\r\n"


def test_restoring_jobs_older_than_the_machines_start(kept: Journaled):
    told(kept, kept.connect(), wire.put(b"1"), wire.put(b"2"))
    kept.database.execute("UPDATE jobs SET state = 4, created = id, since = id")
    kept.crash()  # which audits what was taken up
    peer = kept.connect()
    assert ask(peer, wire.peek_next("buried")) == b"FOUND 1 1\r\n1\r\n"
    assert figures(peer, 1)["age"] == str((UNIX_NS - 1) // SECOND)


def test_restoring_after_the_clock_was_set_to_1970(kept: Journaled):
    """Jobs are older than that, and the journal stays valid."""
    peer, bench = kept.connect(), kept.bench
    told(kept, peer, wire.put(b"1"), wire.put(b"2"))
    bench.advance(SECOND)
    bench.store.set_wall(0, bench.now_ns)
    told(kept, peer, wire.reserve_job(1), wire.release(1, 3, 0))
    assert kept.database.execute("SELECT created FROM jobs WHERE id = 1").fetchall() == [(0,)]
    assert list(journal.problems(kept.database)) == []
    kept.crash()
    assert kept.restored == 2


def test_restoring_with_a_memory_limit_that_is_too_small(kept: Journaled):
    told(kept, kept.connect(), *[wire.put(b"x" * 60000) for _ in range(20)])
    with pytest.raises(MemoryError, match=r"more jobs than beanstalk\.memory_limit allows"):
        restore(kept, Journaled(memory_limit=1 << 20))


def test_restoring_a_job_longer_than_max_job_size(kept: Journaled):
    told(kept, kept.connect(), wire.put(b"x" * 1000))
    with pytest.raises(MemoryError, match=r"^job 1 has 1000 bytes, more than beanstalk\.max_job_size allows$"):
        restore(kept, Journaled(job_size_max=999))
    other = Journaled(job_size_max=1000)
    restore(kept, other)
    assert ask(other.connect(), wire.reserve()).startswith(b"RESERVED 1 1000\r\n")


def test_large_jobs_are_restored_a_few_at_a_time(kept: Journaled):
    """And in the order in which they entered their states, in which they are kicked later."""
    peer = kept.connect()
    told(kept, peer, *[wire.put(b"x" * 60_000)] * 20, *[wire.put(b"y", priority=1)] * 600)
    for number in range(20, 0, -1):
        kept.bench.advance(SECOND)
        told(kept, peer, wire.reserve_job(number), wire.bury(number, 0))
    pieces = list(journal.read(kept.database))
    assert max(map(len, pieces)) < journal.BYTES_AT_ONCE + 100_000
    assert len(pieces) > 3
    kept.crash()
    assert ask(kept.connect(), wire.peek_next("buried")).startswith(b"FOUND 20 60000\r\n")


def test_restoring_more_tubes_than_max_tubes(kept: Journaled):
    told(kept, kept.connect(), *[wire.use(b"t%d" % number) + wire.put(b"x") for number in range(10)])
    with pytest.raises(MemoryError, match=r"more tubes than beanstalk\.max_tubes"):
        restore(kept, Journaled(tubes=5))


def test_long_bodies_have_rows_of_their_own_which_end_with_their_jobs(kept: Journaled):
    peer = kept.connect()
    long = b"x" * (journal.BODY_INLINE_MAX + 1)
    told(kept, peer, wire.put(long), wire.put(long[1:]))
    assert kept.database.execute("SELECT id, body FROM bodies").fetchall() == [(1, long)]
    assert kept.database.execute("SELECT checksum FROM jobs WHERE id = 1").fetchone() == (zlib.crc32(long),)
    told(kept, peer, wire.delete(1), wire.delete(2))
    assert kept.database.execute("SELECT count(*) FROM bodies").fetchone() == (0,)


def test_writing_a_piece_twice_changes_nothing(kept: Journaled):
    peer = kept.connect()
    told(kept, peer, wire.put(b"1"), wire.put(b"2"))
    peer.send(wire.delete(1) + wire.put(b"3") + wire.reserve_job(2) + wire.bury(2, 1))
    assert kept.take()
    kept.write()
    kept.write()
    kept.reach()
    kept.crash()
    assert kept.restored == 2


def test_changes_are_collected_in_slices(kept: Journaled):
    peer = kept.connect()
    for _ in range(5):
        peer.send(wire.put(b"x" * 100) * 1000)
    pieces = 0
    while kept.take():
        assert kept.piece is not None
        assert len(kept.piece[1]) < 300_000
        kept.write()
        kept.reach()
        pieces += 1
    assert pieces > 1
    assert said(peer).count(b"INSERTED") == 5000


def test_limits_of_reserves_are_restored(kept: Journaled):
    peer = kept.connect()
    assert (
        told(kept, peer, wire.limit_reserves(b"a", 2, b"dead"), wire.limit_reserves(b"b", 3, b"b"))
        == b"LIMITED\r\n" * 2
    )
    peer.send(wire.limit_reserves(b"c", 4, b"c"))
    kept.crash()
    peer = kept.connect()
    assert b'max-reserves: 2\nretire-to: "dead"\n' in ask(peer, wire.inspect_tube(b"a"))
    assert b'max-reserves: 3\nretire-to: ""\n' in ask(peer, wire.inspect_tube(b"b"))
    assert ask(peer, wire.stats_tube(b"c")) == b"NOT_FOUND\r\n"  # nobody was told
    told(kept, peer, wire.limit_reserves(b"a", 0, b"a"))
    kept.crash()
    assert ask(kept.connect(), wire.stats_tube(b"a")) == b"NOT_FOUND\r\n"


def test_changes_are_written_in_their_order(kept: Journaled):
    """A change after a limit of reserves is not written before it."""
    peer, other, last = kept.connect(), kept.connect(), kept.connect()
    peer.send(wire.put(b"x" * 60_000) * 5)  # which fill a piece
    other.send(wire.limit_reserves(b"a", 1, b"a"))
    last.send(wire.put(b"2"))
    assert kept.take()
    kept.write()
    kept.reach()
    assert (said(peer).count(b"INSERTED"), said(other), said(last)) == (5, b"", b"")
    kept.commit()
    assert (said(other), said(last)) == (b"LIMITED\r\n", b"INSERTED 6\r\n")


def test_limits_set_together_are_written_together(kept: Journaled):
    """The last one counts."""
    peer = kept.connect()
    for number in range(1, 6):
        peer.send(wire.limit_reserves(b"a", number, b"a") + wire.limit_reserves(b"t%d" % number, 1, b"a"))
    assert kept.take()
    kept.write()
    kept.reach()
    assert said(peer) == b"LIMITED\r\n" * 10
    assert not kept.take()
    found = kept.database.execute("SELECT tube, reserves FROM limits ORDER BY tube").fetchall()
    assert found == [("a", 5), *((f"t{number}", 1) for number in range(1, 6))]


def test_unwritten_limits_are_bounded(kept: Journaled):
    peer = kept.connect()
    for number in range(1, LIMITS_MAX + 1):
        peer.send(wire.limit_reserves(b"a", number, b"a"))
    assert ask(kept.connect(), wire.limit_reserves(b"a", 1, b"a")) == b"INTERNAL_ERROR\r\n"
    kept.commit()
    assert said(peer) == b"LIMITED\r\n" * LIMITS_MAX
    assert told(kept, kept.connect(), wire.limit_reserves(b"a", 1, b"a")) == b"LIMITED\r\n"
    kept.refuse()
    assert ask(kept.connect(), wire.limit_reserves(b"new", 1, b"a")) == b"INTERNAL_ERROR\r\n"
    assert ask(kept.connect(), wire.inspect_tube(b"new")) == b"NOT_FOUND\r\n"


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ("'', 1, 'x'", ""), ("'a b', 1, ''", "a b"), ("'a', 0, ''", "a"), ("'a', -1, ''", "a"), ("'a', 'x', ''", "a"),
        ("'a', 1, 'a b'", "a"), ("'a', 1, x'ff'", "a"),
    ],
)  # fmt: skip
def test_an_invalid_limit_is_named(kept: Journaled, row: str, named: str):
    kept.database.execute(f"INSERT INTO limits VALUES ({row})")
    with pytest.raises(ValueError, match=f"the limit of tube {named}: ") as raised:
        list(journal.read(kept.database))
    assert list(journal.problems(kept.database)) == [str(raised.value)]


def test_changes_on_disk_are_not_refused(kept: Journaled):
    peer = kept.connect()
    peer.send(wire.put(b"1"))
    assert kept.take()
    kept.write()
    peer.send(wire.put(b"2") + wire.delete(1))
    kept.bench.store.reach(1, kept.bench.now_ns)
    kept.piece = None
    kept.refuse()
    assert said(peer) == b"INSERTED 1\r\nINTERNAL_ERROR\r\nINTERNAL_ERROR\r\n"


def test_replies_are_refused_in_slices(kept: Journaled):
    peers = [kept.connect() for _ in range(40)]
    for peer in peers:
        for _ in range(40):
            peer.send(wire.put(b"x"))
    bench = kept.bench
    _journal.refuse(bench.store, bench.now_ns)
    left = [bench.store.snapshot()["jobs"]]
    for _ in range(4):
        bench.store.tick(bench.now_ns)
        left.append(bench.store.snapshot()["jobs"])
        bench.store.audit()
    assert 1000 < left[0] < 1600
    assert left[1] < left[0]
    assert left[-1] == 0
    bench.settle()
    assert {said(peer) for peer in peers} == {b"INTERNAL_ERROR\r\n" * 40}


def test_a_journal_that_recovers_while_replies_are_refused(kept: Journaled):
    peers = [kept.connect() for _ in range(40)]
    for peer in peers:
        for _ in range(40):
            peer.send(wire.put(b"x"))
    _journal.refuse(kept.bench.store, kept.bench.now_ns)
    kept.commit()
    answers = b"".join(said(peer) for peer in peers)
    refused = answers.count(b"INTERNAL_ERROR\r\n")
    assert 0 < refused < 600
    assert answers.count(b"INSERTED ") == 1600 - refused == kept.bench.store.snapshot()["jobs"]
    kept.crash()
    assert kept.restored == 1600 - refused


def test_after_a_failure_with_nothing_to_write_no_reply_waits():
    kept = Journaled(journal_period_ns=5_000_000, journal_lag_ns=10_000_000)
    peer = kept.connect()
    assert ask(peer, wire.put(b"1")) == b"INSERTED 1\r\n"
    kept.bench.advance(5_000_000)
    kept.commit()
    kept.refuse()
    assert ask(peer, wire.put(b"2")) == b"INTERNAL_ERROR\r\n"
    kept.bench.advance(20_000_000)
    kept.bench.store.reach(0, kept.bench.now_ns)
    assert ask(peer, wire.put(b"2")) == b"INSERTED 2\r\n"
