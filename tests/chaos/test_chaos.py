"""Chaos for a few seconds, always with the same seed; and its parts find the defects that they have to find."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from chaos import clients, dialects, faults, rounds, sentinel_rules, smockron_daemon, verdict
from chaos.beanstalk_daemon import Listing
from chaos.counter_dialect import CounterDialect
from chaos.dialect import JOBS, LENT
from chaos.killable import KILLER
from chaos.monitor import Sample
from chaos.processes import Slot
from conformance.beanstalk.engine import make_store as make_beanstalk_store
from conformance.sentinel.engine import make_store
from conformance.smockron.engine import Pump as GateBench
from conformance.smockron.engine import make_store as make_smockron_store
from counterd.json_documents import DocumentError
from counterd.protocols.counter.wire import Opcode, Response
from counterd.protocols.sentinel.rules import RulesError, parse_rules
from counterd.protocols.sentinel.wire import ResponseParser
from counterd.protocols.smockron.rules import parse_rules as parse_limits
from history import Operation, Recorder, beanstalk, counter, resumptions, sentinel, smockron, takes

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

WEIGHTS = {**faults.BY_CLIENT, **faults.BY_DRIVER, **faults.BY_LINK, **faults.BY_FAR_CLIENT, **faults.BY_CLOCK}


@pytest.mark.needs("ip", "tc", "faketime", "networks", partly=True)
def test_no_promise_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """In two rounds, of which the first has each kind of fault that this machine supports."""
    monkeypatch.setattr(verdict, "CONFIGURATIONS_MAX", 20_000)  # what is too hard for these is too slow here
    said: list[str] = []
    figures = rounds.run("1", 0.0, 2.0, said.append)
    assert figures.violations == [], "\n".join([*said, *figures.violations])
    assert figures.rounds == 2
    assert figures.operations > 0
    assert figures.names > 10 * figures.undecided  # or the verdict says little
    assert set(figures.faults) >= set(faults.BY_DRIVER)
    assert set(figures.faults) & set(faults.BY_CLIENT)  # which of them find somebody to play them, time decides


def test_a_seed_gives_the_same_schedule() -> None:
    def schedule(seed: str, number: int) -> list[faults.Fault]:
        return faults.schedule(seed, number, 20, 8, WEIGHTS)

    assert schedule("7", 3) == schedule("7", 3)
    assert len({str(schedule(seed, number)) for seed in "78" for number in (3, 4)}) == 4
    assert sorted(fault.kind for fault in schedule("7", 0)) == sorted(WEIGHTS)
    assert len(schedule("7", 3)) == 20


# ---- the verdict ----

A, B = clients.IDS + 1, 2 * clients.IDS + 1  # clients of workers 1 and 2
NAME = b"hot 0"


def ends(disturbed_ns: int | None = None, **changes: Any) -> verdict.Ends:
    """The ends of connections: worker 1 was killed at 50, worker 2 left; all had gone at 1000."""
    first = {"said": [], "killed_ns": 50, "was_stopped": False, "slot": Slot("counter", "far"), **changes}
    second = {"said": [], "killed_ns": None, "was_stopped": False, "slot": Slot("counter", "unix")}
    return verdict.Ends({1: SimpleNamespace(**first), 2: SimpleNamespace(**second)}, disturbed_ns, 1000)  # type: ignore[dict-item]


def acquired(client: int, name: bytes, started: int, ended: int | None, status: int = 0) -> Operation:
    answer = None if ended is None else (status, None if status else 1)
    return Operation(client, counter.Acquire(name, 1, 1), started, ended, answer)


def closed_of_a(*samples: Sample, disturbed_ns: int | None = None, **changes: Any) -> tuple[int, int | None]:
    operations = [acquired(A, dialects.sign_of_life(A), 10, 15), acquired(A, NAME, 20, 25)]
    closed = verdict.closing(A, operations, samples, ends(disturbed_ns, **changes))
    return closed.started, closed.ended


def test_the_end_of_a_killed_client_is_between_its_kill_and_the_first_dump_without_it() -> None:
    alive = {dialects.sign_of_life(A): 1}
    assert closed_of_a() == (50, 1000)
    before, still, settling, gone = (
        Sample(40, 49, {}, 49),
        Sample(60, 64, alive, 65),
        Sample(70, 74, {}, None),
        Sample(80, 84, {dialects.sign_of_life(A): 0}, 85),
    )
    assert closed_of_a(before, still, settling, gone, Sample(90, 94, {}, 95)) == (50, 85)


def test_a_client_behind_a_cut_link_may_end_when_the_link_is_cut() -> None:
    assert closed_of_a(disturbed_ns=30) == (30, 1000)
    assert closed_of_a(disturbed_ns=5) == (20, 1000)  # but has been there when it was answered
    assert closed_of_a(disturbed_ns=30, slot=Slot("counter", "unix")) == (50, 1000)


@pytest.mark.parametrize(("complaint", "is_told"), [("lost", False), ("wrong", True)])
def test_a_stopped_client_may_lose_its_connection_but_gets_no_invalid_answer(complaint: str, is_told: bool) -> None:
    said = [[complaint, A, "why"]]
    assert list(verdict.complaints(ends(said=said))) == said
    assert list(verdict.complaints(ends(said=said, was_stopped=True))) == (said if is_told else [])


def judged(path: Path, maximum: int, shown: int) -> list[str]:
    """The verdict on a history: two clients are granted one each, a Dump shows so many, then one leaves and the other
    is killed.
    """
    killed_ns = 0
    with Recorder(path, A) as first, Recorder(path, B) as second:
        for recorder in (first, second):
            recorder.end(recorder.start(counter.Acquire(dialects.sign_of_life(recorder.client), 1, 1)), (0, 1))
            recorder.end(recorder.start(counter.Acquire(NAME, 1, maximum)), (0, 1))
        sample = Sample(time.monotonic_ns(), time.monotonic_ns(), {NAME: shown}, None)
        killed_ns = time.monotonic_ns()
        second.closing()
    knows = ends(killed_ns=killed_ns)._replace(settled_ns=time.monotonic_ns())
    return verdict.judge([path], {**dict.fromkeys(dialects.DIALECTS, ()), "counter": [sample]}, knows).violations


def test_records_and_dumps_have_to_agree(tmp_path: Path) -> None:
    assert judged(tmp_path / "right", 2, 2) == []
    (too_many,) = judged(tmp_path / "too many", 1, 2)
    (too_few,) = judged(tmp_path / "too few", 2, 1)
    assert "Acquire" in too_many
    assert "Get" in too_few


TEAM = ((b"team 0 a", 1, 1), (b"team 0 b", 1, 1))  # permits


@pytest.mark.parametrize(
    ("grants", "is_right"), [((1, 2), True), ((2, 1), False), ((1, 1), False)], ids=["right", "falls", "twice"]
)
def test_takes_are_checked_by_the_numbers_of_their_grants(tmp_path: Path, grants: Any, is_right: bool) -> None:
    path = tmp_path / "history"
    with Recorder(path, B) as recorder:
        recorder.end(recorder.start(counter.Acquire(dialects.sign_of_life(B), 1, 1)), (0, 1))
        for opaque, number in enumerate(grants, 1):
            recorder.end(recorder.start(takes.Take(opaque, TEAM[opaque - 1 : opaque])), (0, (number, (0,))))
        recorder.closing()
    knows = ends()._replace(settled_ns=time.monotonic_ns())
    violations = verdict.judge([path], dict.fromkeys(dialects.DIALECTS, ()), knows).violations
    assert bool(violations) != is_right, violations


@pytest.mark.parametrize("is_half", [False, True])
def test_a_dump_shows_all_items_of_a_grant(tmp_path: Path, is_half: bool) -> None:
    path = tmp_path / "history"
    with Recorder(path, B) as recorder:
        recorder.end(recorder.start(counter.Acquire(dialects.sign_of_life(B), 1, 1)), (0, 1))
        recorder.end(recorder.start(takes.Take(1, TEAM)), (0, (1, (0, 0))))
        shown = {TEAM[0][0]: 1, TEAM[1][0]: 0 if is_half else 1}
        sample = Sample(time.monotonic_ns(), time.monotonic_ns(), shown, None)
        recorder.closing()
    knows = ends()._replace(settled_ns=time.monotonic_ns())
    found = verdict.judge([path], {**dict.fromkeys(dialects.DIALECTS, ()), "counter": [sample]}, knows).violations
    assert bool(found) == is_half, found


def judged_after_kill(path: Path, gone_ms: int, *, takes_sign: bool = True, every_ms: int = 100) -> list[str]:
    """The verdict on a killed client with a grace time of a second; a Dump shows what it holds until gone_ms."""
    with Recorder(path, A) as recorder:
        if takes_sign:
            recorder.end(recorder.start(counter.Acquire(dialects.sign_of_life(A), 1, 1)), (0, 1))
        recorder.end(recorder.start(resumptions.Resume(1000)), (0, 1000))
        recorder.end(recorder.start(counter.Acquire(NAME, 1, 1)), (0, 1))
    killed_ns = time.monotonic_ns()
    samples = []
    for after_ms in range(1, 10_000, every_ms):
        shown = {NAME: 1, **({dialects.sign_of_life(A): 1} if takes_sign else {})} if after_ms < gone_ms else {}
        start_ns = killed_ns + after_ms * 1_000_000
        samples.append(Sample(start_ns, start_ns + 1, shown, start_ns + 2))
    knows = ends(killed_ns=killed_ns, slot=Slot("counter", "unix"))._replace(settled_ns=killed_ns + (10 << 30))
    return verdict.judge([path], {**dict.fromkeys(dialects.DIALECTS, ()), "counter": samples}, knows).violations


@pytest.mark.parametrize(
    ("gone_ms", "is_right"),
    [(0, False), (500, False), (1100, True), (9000, False)],
    ids=["0", "early", "right", "late"],
)
def test_holdings_of_a_killed_client_stay_for_its_grace_time(tmp_path: Path, gone_ms: int, is_right: bool) -> None:
    found = judged_after_kill(tmp_path / "history", gone_ms)
    assert bool(found) != is_right, found


def test_unseen_clients_and_slow_dumps_are_no_violation(tmp_path: Path) -> None:
    """A client that no dump shows, and a machine on which nothing ran for seconds."""
    assert judged_after_kill(tmp_path / "unseen", 1100, takes_sign=False) == []
    assert judged_after_kill(tmp_path / "asleep", 9000, every_ms=4000) == []


def test_a_resuming_client_keeps_its_state_and_repeats_an_unanswered_resume() -> None:
    def side(client: int) -> CounterDialect:
        return CounterDialect(random.Random(1), 0, client)

    CounterDialect.resumables.clear()
    first = side(A)
    first.token, first.held[NAME] = b"y" * 12, 2
    first.offer_token(is_far=False)
    second = side(B)
    call, _ = second.hello()
    assert (call.old, second.presents.token) == (A, b"y" * 12)
    second.offer_token(is_far=False)
    third = side(B + 1)
    assert third.presents == second.presents
    call, _ = third.hello()
    told = third.take(call, Response(Opcode.RESUME, 0, third.opaque, b"x" * 12 + (40).to_bytes(4, "big")))
    assert (told, third.token, third.held) == ((0, 40), b"x" * 12, first.held)
    third.asked.append(1)
    third.offer_token(is_far=True)
    assert not CounterDialect.resumables


# ---- the sentinel protocol ----


def test_a_partial_sample_says_nothing_about_other_counters() -> None:
    name = dialects.sign_of_life(A)
    assert Sample(0, 1, {}, 1).lacks(name)
    assert not Sample(0, 1, {}, 1, is_whole=False).lacks(name)
    assert Sample(0, 1, {name: 0}, 1, is_whole=False).lacks(name)
    assert not Sample(0, 1, {name: 1}, 1, is_whole=False).lacks(name)
    others = [Sample(60, 64, {}, 65, is_whole=False), Sample(80, 84, {name: 0}, 85, is_whole=False)]
    knows = ends(slot=Slot("sentinel", "unix"))
    closed = verdict.closing(A, [Operation(A, sentinel.Acquire(1, 1), 20, 25, (0, 7))], others, knows)
    assert (closed.started, closed.ended) == (50, 85)


def judged_tokens(path: Path, *rows: tuple[Any, Any], **known: Any) -> list[str]:
    """The verdict on a client of the sentinel protocol that gets these answers, and leaves."""
    with Recorder(path, B) as recorder:
        for call, answer in rows:
            recorder.end(recorder.start(call), answer)
        recorder.closing()
    knows = ends()._replace(settled_ns=time.monotonic_ns(), **known)
    knows.workers[2].slot = Slot("sentinel", "unix")
    return verdict.judge([path], dict.fromkeys(dialects.DIALECTS, ()), knows).violations


def test_tokens_are_checked_with_the_rules_of_their_time(tmp_path: Path) -> None:
    one, more = (sentinel.Acquire(1, 1), (0, 7)), (sentinel.Acquire(1, 1), (0, 8))
    assert judged_tokens(tmp_path / "right", one) == []
    (too_many,) = judged_tokens(tmp_path / "too many", one, more)
    assert "Acquire" in too_many
    loads = [
        Operation(faults.RULER, sentinel.Load(key, rule), 0, 1, True)
        for key, rule in sentinel_rules.rules({1: {"count": 2}}).items()
    ]
    assert judged_tokens(tmp_path / "changed", one, more, loads=loads) == []
    (repeated,) = judged_tokens(tmp_path / "repeated", one, (sentinel.Acquire(4, 1), (0, 7)))
    assert "token 7 was granted 2 times" in repeated
    refused = (sentinel.Acquire(4, 1), (5, 0)), (sentinel.Flow(201, 1), (-2, 0, 0))
    assert len(judged_tokens(tmp_path / "refused", *refused)) == 2
    assert judged_tokens(tmp_path / "short", *refused, short=frozenset({"sentinel"}), limited=True) == []


def test_generated_rules_are_valid_and_generated_mistakes_are_not() -> None:
    assert all(sentinel_rules.rules(changes) != sentinel_rules.rules() for changes in sentinel_rules.CHANGES)
    for mistake in sentinel_rules.MISTAKES:
        with pytest.raises(RulesError):
            parse_rules(mistake)


def test_garbage_for_sentinel_gets_one_answer() -> None:
    session, side = make_store().session(0), dialects.SentinelDialect(random.Random(1), 0, A)
    for _ in range(100):
        (answer,) = ResponseParser().feed(session.receive(side.garbage(), 0))
        side.take(dialects.GARBAGE, answer)
    assert not side.asked
    assert not session.receive(side.truncated(), 0)


# ---- the beanstalk protocol ----

PUT, INSERTED = beanstalk.Put(b"tube-0", 1, 0, 60, b"1 of 1"), ("INSERTED", 7, b"")
RESERVE, RESERVED = beanstalk.Reserve(b"tube-0", 0), ("RESERVED", 7, b"1 of 1")


def judged_jobs(
    path: Path, *rows: tuple[Any, Any], left: frozenset[int] = frozenset(), is_killed: bool = False
) -> list[str]:
    """The verdict on a client of the beanstalk protocol that gets these answers, and leaves; and on the jobs that
    remain.

    is_killed: whether the daemon is killed after that.
    """
    with Recorder(path, B) as recorder:
        for call, answer in rows:
            recorder.end(recorder.start(call), answer)
        recorder.closing()
    gone_ns = time.monotonic_ns()
    restart = Operation(KILLER, beanstalk.Restarted(), gone_ns + 1, gone_ns + 2, ("OK", None, b""))
    listing = Listing(gone_ns + 3, gone_ns + 4, left)
    knows = ends()._replace(settled_ns=gone_ns, jobs={"beanstalk": listing}, restarts=[restart] if is_killed else [])
    knows.workers[2].slot = Slot("beanstalk", "unix")
    return verdict.judge([path], dict.fromkeys(dialects.DIALECTS, ()), knows).violations


def test_the_jobs_left_are_those_that_were_not_ended(tmp_path: Path) -> None:
    taken = (PUT, INSERTED), (RESERVE, RESERVED)
    ended = *taken, (beanstalk.Delete(7), ("DELETED", None, b""))
    assert judged_jobs(tmp_path / "left", *taken, left=frozenset({7})) == []
    assert judged_jobs(tmp_path / "ended", *ended) == []
    (lost,) = judged_jobs(tmp_path / "lost", *taken)
    (back,) = judged_jobs(tmp_path / "back", *ended, left=frozenset({7}))
    (twice,) = judged_jobs(tmp_path / "twice", *taken, (RESERVE, RESERVED), left=frozenset({7}))
    assert "Peek" in lost
    assert "Peek" in back
    assert "Reserve" in twice


@pytest.mark.parametrize(("maximum", "is_ended", "is_right"), [(2, False, True), (1, True, True), (1, False, False)])
def test_jobs_and_clients_share_their_counters(tmp_path: Path, maximum: int, is_ended: bool, is_right: bool) -> None:
    """A worker has a job, or has ended it, when a client is granted a permit of the job's counter."""
    (lent, *_), path = LENT, tmp_path / "history"
    put = beanstalk.Put(b"tube-0", 1, 0, 60, b"1 of 1", 0, lent, 1)
    with Recorder(path, A) as client, Recorder(path, B) as worker:
        client.end(client.start(counter.Acquire(dialects.sign_of_life(A), 1, 1)), (0, 1))
        told: list[tuple[Any, Any]] = [(put, INSERTED), (RESERVE, RESERVED)]
        told += [(beanstalk.Delete(7), ("DELETED", None, b""))] if is_ended else []
        for call, answer in told:
            worker.end(worker.start(call), answer)
        client.end(client.start(counter.Acquire(lent, 1, maximum)), (0, 1))
        killed_ns = time.monotonic_ns()
        worker.closing()
    knows = ends(killed_ns=killed_ns)._replace(settled_ns=time.monotonic_ns())
    knows.workers[2].slot = Slot(JOBS, "unix")
    found = verdict.judge([path], dict.fromkeys(dialects.DIALECTS, ()), knows).violations
    assert bool(found) != is_right, found


def test_a_killed_daemon_keeps_at_least_acknowledged_jobs(tmp_path: Path) -> None:
    """refused: its put was, but a worker had it, which only matters for a daemon that goes on."""
    put, refused = (PUT, INSERTED), ((PUT, ("INTERNAL_ERROR", None, b"")), (RESERVE, RESERVED))
    assert judged_jobs(tmp_path / "left", put, left=frozenset({7}), is_killed=True) == []
    assert judged_jobs(tmp_path / "refused", *refused, is_killed=True) == []
    (lost,) = judged_jobs(tmp_path / "lost", put, is_killed=True)
    (gone,) = judged_jobs(tmp_path / "gone", *refused)
    assert "Peek" in lost
    assert "Peek" in gone


def test_clients_of_a_killed_daemon_may_lose_their_connections() -> None:
    said = [["lost", A, "why"]]
    restarts = [Operation(KILLER, beanstalk.Restarted(), 20, 30, ("OK", None, b""))]
    for dialect, complaints in (("beanstalk", []), ("counter", said)):
        knows = ends(said=said, slot=Slot(dialect, "unix"))._replace(restarts=restarts)
        assert list(verdict.complaints(knows)) == complaints


def test_garbage_for_beanstalk_gets_one_answer() -> None:
    store = make_beanstalk_store()
    session, side = store.session(0), dialects.BeanstalkDialect(random.Random(1), 0, A)
    for _ in range(100):
        (answer,) = side.feed(session.receive(side.garbage(), 0))
        side.take(dialects.GARBAGE, answer)
    assert not session.receive(side.truncated(), 0)
    assert store.snapshot()["jobs"] == 0


# ---- the smockron protocol ----

LOGIN_MS = 200  # that each request of the domain uses up; its burst is 0


def judged_gates(path: Path, *moments_ms: int, after_kill_ms: int | None = None) -> list[str]:
    """The verdict on a gatekeeper that reported three requests, and a subscriber that was told these moments, from the
    first on.

    after_kill_ms: the daemon is killed then, and another subscriber is told this moment of one more request.
    """
    limits = [Operation(smockron_daemon.RULER, smockron_daemon.load_of({}), 0, 0, True)]
    falls = []
    with Recorder(path, A) as gate, Recorder(path, B) as first, Recorder(path, B + 1) as second:
        listened(gate, first, 3, moments_ms)
        if after_kill_ms is not None:
            falls.append(Operation(KILLER, smockron.Restarted(), time.monotonic_ns(), time.monotonic_ns(), True))
            listened(gate, second, 1, [after_kill_ms])
    knows = ends(killed_ns=None, slot=Slot("smockron", "unix"))
    knows = knows._replace(settled_ns=time.monotonic_ns(), limits=limits, falls=falls)
    knows.workers[2].slot = Slot("smockron-control", "unix")
    return verdict.judge([path], dict.fromkeys(dialects.DIALECTS, ()), knows).violations


def listened(gate: Recorder, listener: Recorder, count: int, moments_ms: Iterable[int]) -> None:
    """Records so many requests, and a subscriber that had subscribed before them and heard these moments."""
    listener.end(listener.start(smockron.Subscribe(b"login")), True)
    now_ms = time.time_ns() // smockron.NS_PER_MS
    for _ in range(count):
        gate.end(gate.start(smockron.Account(b"login", b"x", "ACCEPTED", 0)), True)
    for moment_ms in moments_ms:
        told = smockron.Told(((b"login", "DELAY_UNTIL", b"x", now_ms + moment_ms),))
        listener.end(listener.start(told), True)
    listener.end(listener.start(smockron.Ping()), True)
    gate.closing()
    listener.closing()


def test_control_messages_follow_from_accounted_requests(tmp_path: Path) -> None:
    first, second, third = LOGIN_MS, 2 * LOGIN_MS, 3 * LOGIN_MS
    assert judged_gates(tmp_path / "right", first, second, third) == []
    planted = {
        "missed": (first, third),
        "missed last": (first, second),
        "twice": (first, second, second),
        "too long": (first, second, third + LOGIN_MS),
        "too short": (first, second, third - LOGIN_MS // 2),
        "invented": (first, second, third, third + LOGIN_MS),
        "not in order": (second, first, third),
    }
    for name, moments_ms in planted.items():
        assert judged_gates(tmp_path / name, *moments_ms), name


def test_a_killed_master_has_forgotten_all_identifiers(tmp_path: Path) -> None:
    told = LOGIN_MS, 2 * LOGIN_MS, 3 * LOGIN_MS
    assert judged_gates(tmp_path / "gone", *told, after_kill_ms=LOGIN_MS) == []
    assert judged_gates(tmp_path / "kept", *told, after_kill_ms=4 * LOGIN_MS)


def test_generated_limits_are_valid_and_generated_mistakes_are_not() -> None:
    assert all(smockron_daemon.load_of(changes) != smockron_daemon.load_of({}) for changes in smockron_daemon.CHANGES)
    for mistake in smockron_daemon.MISTAKES:
        with pytest.raises(DocumentError):
            parse_limits(mistake)


@pytest.mark.parametrize("dialect", smockron_daemon.DIALECTS)
def test_garbage_for_smockron_ends_the_connection(dialect: str) -> None:
    bench = GateBench(make_smockron_store())
    side = dialects.DIALECTS[dialect](random.Random(1), 0, A)
    _, hello = side.hello()
    for _ in range(30):
        patient, other = (
            bench.connect_by_name(dialect.removeprefix("smockron-")),
            bench.connect_by_name(dialect.removeprefix("smockron-")),
        )
        patient.send(hello + side.truncated())
        other.send(hello + side.garbage())
        assert not patient.session.closing
        assert other.session.closing
