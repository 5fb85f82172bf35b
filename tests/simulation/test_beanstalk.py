"""That the beanstalk protocol's world notices: each promise is broken once, by engine, disk or books.

A promise that the books do not keep is one that the engine breaks, as far as anybody can tell who compares the two.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.beanstalk import _journal
from property.beanstalk_model import GONE, SECOND
from simulation import run
from simulation.beanstalk import BeanstalkWorld
from simulation.disk import Disk
from simulation.queues import Books

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 3_000
WORLDS = 16
PERIOD_NS = 5_000_000


def wrap(patch: pytest.MonkeyPatch, owner: type, name: str, around: Callable[..., Any]) -> None:
    """Has a method called through `around`, which is told what there was."""
    before = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **names: around(before, *args, **names))


# ---- the engine, behind the books' back -----------------------------------------------------------------------------


def a_job_is_lost(patch: pytest.MonkeyPatch) -> None:
    def step(before: Any, world: Any, *args: Any) -> None:
        ready = [job.number for job in world.books.jobs.values() if job.state == "ready"]
        if world.steps % 100 == 0 and ready and world.disk is None:
            world.ask(f"delete {ready[0]}")
        before(world, *args)

    wrap(patch, BeanstalkWorld, "step", step)


def a_job_comes_from_nowhere(patch: pytest.MonkeyPatch) -> None:
    def step(before: Any, world: Any, *args: Any) -> None:
        if world.steps % 100 == 0 and world.disk is None:
            world.observer.receive(b"put 1 0 1 1\r\nx\r\n", world.now)
        before(world, *args)

    wrap(patch, BeanstalkWorld, "step", step)


def a_job_is_kicked_by_nobody(patch: pytest.MonkeyPatch) -> None:
    def step(before: Any, world: Any, *args: Any) -> None:
        late = [job.number for job in world.books.jobs.values() if job.state == "delayed"]
        if world.steps % 10 == 0 and late:
            world.ask(f"kick-job {late[0]}")
        before(world, *args)

    wrap(patch, BeanstalkWorld, "step", step)


def its_clock_is_slow(patch: pytest.MonkeyPatch) -> None:
    def tick(before: Any, world: Any) -> None:
        store, world.store = world.store, Proxy(world.store)
        before(world)
        world.store = store

    class Proxy:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def tick(self, now: int) -> None:
            self.store.tick(now - PERIOD_NS)

    wrap(patch, BeanstalkWorld, "tick", tick)


def it_wakes_up_late(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, BeanstalkWorld, "check_due", lambda before, world, due: before(world, due + 2 * PERIOD_NS))


def replies_change_places(patch: pytest.MonkeyPatch) -> None:
    def answered(before: Any, world: Any, link: Any, output: bytes) -> None:
        first, end, rest = output.partition(b"\r\n")
        second, end_too, rest = rest.partition(b"\r\n")
        plain = end_too and not first.startswith((b"RES", b"FOU", b"OK", b"JOBS"))
        swapped = second + end_too + first + end + rest if plain and b" " not in second else output
        before(world, link, swapped)

    wrap(patch, BeanstalkWorld, "answered", answered)


def a_job_is_given_to_two(patch: pytest.MonkeyPatch) -> None:
    def answered(before: Any, world: Any, link: Any, output: bytes) -> None:
        held = [job for job in world.books.jobs.values() if job.holder not in (link.number, GONE)]
        if output == b"TIMED_OUT\r\n" and held:
            output = b"RESERVED %d %d\r\n%b\r\n" % (held[0].number, len(held[0].body), held[0].body)
        before(world, link, output)

    wrap(patch, BeanstalkWorld, "answered", answered)


# ---- the disk -------------------------------------------------------------------------------------------------------


def nothing_is_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Disk, "commit", lambda disk: None)


def half_is_written(patch: pytest.MonkeyPatch) -> None:
    def commit(before: Any, disk: Any) -> None:
        before(disk)
        disk.database.execute("UPDATE jobs SET kicks = kicks + 1 WHERE state = 4")

    wrap(patch, Disk, "commit", commit)


def ids_begin_anew(patch: pytest.MonkeyPatch) -> None:
    def restore(before: Any, disk: Any, store: Any) -> int:
        last_id: int = before(disk, store)
        _journal.begin(store, 0, 1000)
        return last_id

    wrap(patch, Disk, "restore", restore)


def a_key_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def commit(before: Any, disk: Any) -> None:
        before(disk)
        disk.database.execute("DELETE FROM keys")

    wrap(patch, Disk, "commit", commit)


def nobody_is_told_that_it_fails(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Disk, "fail", lambda disk: None)


# ---- the books ------------------------------------------------------------------------------------------------------


def times_to_run_are_longer(patch: pytest.MonkeyPatch) -> None:
    def reserve(before: Any, books: Any, peer: Any, job: Any) -> bytes:
        reply: bytes = before(books, peer, job)
        job.due += PERIOD_NS
        return reply

    wrap(patch, Books, "reserve", reserve)


def delays_are_longer(patch: pytest.MonkeyPatch) -> None:
    def make_delayed(before: Any, books: Any, job: Any) -> None:
        before(books, job)
        job.due += PERIOD_NS

    wrap(patch, Books, "make_delayed", make_delayed)


def delays_are_shorter(patch: pytest.MonkeyPatch) -> None:
    def make_delayed(before: Any, books: Any, job: Any) -> None:
        before(books, job)
        job.due -= PERIOD_NS

    wrap(patch, Books, "make_delayed", make_delayed)


def the_last_is_reserved_first(patch: pytest.MonkeyPatch) -> None:
    def first_ready(_before: Any, books: Any, names: list[str]) -> Any:
        ready = [job for job in books.jobs.values() if job.state == "ready" and job.tube in names]
        ready = [job for job in ready if not books.is_paused(job.tube)]
        return max(ready, key=lambda job: (job.priority, job.number), default=None)

    wrap(patch, Books, "first_ready", first_ready)


def who_came_last_is_served_first(patch: pytest.MonkeyPatch) -> None:
    def wait(before: Any, books: Any, peer: Any, until: int, **names: Any) -> Any:
        reply = before(books, peer, until, **names)
        peer.serial = -books.serial
        return reply

    wrap(patch, Books, "wait", wait)


def deadlines_are_nearer(patch: pytest.MonkeyPatch) -> None:
    def is_pressed(_before: Any, books: Any, peer: Any) -> bool:
        return any(job.holder == peer.number and job.due - SECOND * 9 // 10 <= books.now for job in books.jobs.values())

    wrap(patch, Books, "is_pressed", is_pressed)


def nobody_ends(patch: pytest.MonkeyPatch) -> None:
    """Their jobs stay with those that have gone, until the time to run ends."""

    def left(before: Any, books: Any, number: int) -> None:
        before(books, number)
        books.leaving.clear()

    wrap(patch, Books, "left", left)


def jobs_retire_later(patch: pytest.MonkeyPatch) -> None:
    def is_retired(_before: Any, books: Any, job: Any) -> bool:
        most = books.tubes[job.tube].reserves_max
        return job.state == "reserved" and most != 0 and job.counts["reserves"] > most

    wrap(patch, Books, "is_retired", is_retired)


def hand_overs_are_not_seen(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Books, "given", lambda _before, _books, *_: {})


def half_closed_connections_wait(patch: pytest.MonkeyPatch) -> None:
    def end_wait(before: Any, books: Any, peer: Any, reply: bytes) -> None:
        if not peer.hung:
            before(books, peer, reply)

    wrap(patch, Books, "end_wait", end_wait)


DEFECTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    a_job_is_lost: "lost",
    a_job_comes_from_nowhere: "gone",
    a_job_is_kicked_by_nobody: "early",
    its_clock_is_slow: "waits",
    it_wakes_up_late: "late",
    replies_change_places: "replies",
    nothing_is_written: "durable",
    half_is_written: "torn",
    ids_begin_anew: "ids",
    a_key_is_forgotten: "durable",
    nobody_is_told_that_it_fails: "progress",
    a_job_is_given_to_two: "one worker",
    times_to_run_are_longer: "early",
    delays_are_longer: "early",
    delays_are_shorter: "late",
    the_last_is_reserved_first: "priority",
    who_came_last_is_served_first: "turn",
    deadlines_are_nearer: "deadline soon",
    hand_overs_are_not_seen: "idle",
    half_closed_connections_wait: "waits",
    nobody_ends: "early",
    jobs_retire_later: "retired",
}


# The world in which a defect is noticed, where it is not one of the first: it is looked at first.
NOTICED_IN = {
    nothing_is_written: 7,
    a_key_is_forgotten: 7,
    nobody_is_told_that_it_fails: 29,
    jobs_retire_later: 38,
}


@pytest.mark.parametrize(("defect", "promise"), DEFECTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_told(
    defect: Callable[[pytest.MonkeyPatch], None],
    promise: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    defect(monkeypatch)
    told = ""
    for seed in (NOTICED_IN.get(defect, 1), *range(1, WORLDS + 1)):
        fine = run.simulate("beanstalk", STEPS, seed, 1, lambda: 0.0)
        told += capsys.readouterr().out
        if not fine and f": {promise}: " in told:
            return
    pytest.fail(f"nobody noticed: {told}")
