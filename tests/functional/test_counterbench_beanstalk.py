"""counterbench against the beanstalk protocol of a real daemon, a real beanstalkd, and a scripted queue."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.beanstalk.wire import Parser, delete, read_dictionary, stats
from kit import daemon, reference
from kit.loading import Place, load, load_fails
from kit.scripted import Hangup
from kit.scripted.beanstalk import Asked, Queue

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from counterd.bench.result import Run

PLAN = {"protocol": "beanstalk"}
SHORT = {"counterd.bench.dialects.beanstalk.GIVE_BACK_S": 0.1}


class Reference:
    """A beanstalkd."""

    def __init__(self, address: reference.Address) -> None:
        self.address = address


@contextlib.contextmanager
def serving(kind: str, directory: Path, **settings: str) -> Iterator[Any]:
    """Runs a daemon with the protocol and these settings of it, or the real beanstalkd."""
    if kind == "beanstalkd":
        with reference.beanstalkd() as address:
            yield Reference(address)
        return
    place = Place(str(directory / "s"))
    fixed = {"enable": "true", "port": "0", "bind": "127.0.0.1", "socket": place.path}
    with daemon.running(directory, {f"beanstalk.{key}": value for key, value in {**fixed, **settings}.items()}):
        yield place


def connect(server: Any) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX if isinstance(server, Place) else socket.AF_INET)
    connection.settimeout(daemon.PATIENCE)
    connection.connect(server.path if isinstance(server, Place) else server.address)
    return connection


def jobs(server: Any) -> Counter[str]:
    """The numbers of jobs, by their state."""
    parser = Parser()
    with connect(server) as connection:
        connection.sendall(stats())
        while not (replies := parser.feed(connection.recv(10_000))):
            pass
    figures = read_dictionary(replies[0].body)
    states = {state: int(figures[f"current-jobs-{state}"]) for state in ("ready", "reserved", "delayed", "buried")}
    return +Counter(states)


BOTH = pytest.mark.parametrize("kind", ["counterd", pytest.param("beanstalkd", marks=pytest.mark.needs("beanstalkd"))])

OUTCOMES = {
    "noop": {"answered"},
    "put": {"inserted"},
    "cycle": {"inserted", "reserved", "deleted"},
    "mix:put=1,cycle=9,noop=1": {"answered", "inserted", "reserved", "deleted"},
}


@BOTH
def test_every_kind_of_request(kind: str, short_path: Path) -> None:
    with serving(kind, short_path) as server:
        for work, outcomes in OUTCOMES.items():
            for depth, processes in ((1, 1), (50, 2)):
                run = load(server, requests=2000, connections=4, depth=depth, processes=processes, work=work, **PLAN)
                assert (run.requests, run.errors, set(run.outcomes)) == (2000, {}, outcomes)


@BOTH
def test_a_load_of_producers_and_workers(kind: str, short_path: Path) -> None:
    with serving(kind, short_path) as server:
        for more in ({}, {"depth": 30, "producers": 3}, {"depth": 9, "producers": 2, "processes": 2}, {"rate": 5e4}):
            run = load(server, requests=2000, connections=60, work="fan", **PLAN, **more)
            assert (run.requests, run.latency.get_total_count(), run.errors) == (2000, 2000, {})
            assert run.outcomes == {"inserted": 2000, "reserved": 2000, "deleted": 2000}
            assert run.service is None
            assert run.grants is not None
            assert run.grants.least > 0 or kind == "beanstalkd", "producers are not counted, and workers wait in turn"
        assert jobs(server) == {}


@BOTH
def test_verification_finds_no_lost_or_duplicate_jobs(kind: str, short_path: Path) -> None:
    with serving(kind, short_path) as server:
        for more in (
            {"work": "put", "depth": 100, "processes": 2, "value_size": 8},
            {"work": "put", "depth": 100, "delay": 3600},
            {"work": "cycle", "depth": 20, "processes": 3, "connections": 10},
            {"work": "cycle", "rate": 1e5, "connections": 10},
            {"work": "fan", "depth": 20, "connections": 100, "producers": 2},
            {"work": "mix:put=2,cycle=9", "depth": 7},
        ):
            run = load(server, requests=3000, verify=True, **PLAN, **more)
            assert (run.requests, run.violations, run.errors) == (3000, [], {})
            assert jobs(server) == {}, "what verify knows of is gone"


@BOTH
def test_delayed_jobs(kind: str, short_path: Path) -> None:
    with serving(kind, short_path) as server:
        began = time.monotonic()
        run = load(server, requests=100, connections=20, work="fan", depth=100, delay=1, verify=True, **PLAN)
        assert (run.requests, run.violations, run.errors) == (100, [], {})
        assert 0 < run.seconds < time.monotonic() - began - 1.0, "the delay is no part of it"
        assert run.latency.get_min_value() < 1e9, "it counts from when they are due"
        run = load(server, requests=30, connections=5, depth=6, delay=1, verify=True, work="cycle", **PLAN)
        assert (run.requests, run.violations, run.errors) == (30, [], {})
        assert run.latency.get_max_value() >= 0.9e9, "here a reserve waits"


@BOTH
def test_jobs_left_in_the_tubes(kind: str, short_path: Path) -> None:
    with serving(kind, short_path) as server:
        load(server, requests=100, work="cycle", depth=5, **PLAN)
        load(server, requests=100, work="fan", depth=5, **PLAN)
        assert jobs(server) == {}
        load(server, requests=100, work="put", depth=5, **PLAN)
        load(server, requests=50, work="put", delay=1000, **PLAN)
        load(server, requests=90, work="cycle", depth=5, **PLAN)
        assert jobs(server) == {"ready": 100, "delayed": 50}, "nobody touches what another load has put"


def test_refused_puts_are_errors(short_path: Path) -> None:
    with serving("counterd", short_path, max_job_size="99") as server:
        run = load(server, requests=50, work="put", **PLAN)
        assert (run.requests, run.errors) == (0, {"error reply": 50})
        assert "an error to put: b'JOB_TOO_BIG\\r\\n'" in run.evidence[0]


def test_a_load_whose_tube_is_refused_does_not_use_the_default_tube() -> None:
    class Full(Queue):
        def answer(self, asked: Asked) -> bytes:
            return b"OUT_OF_MEMORY\r\n" if asked.words[0] == b"use" else self.right_answer(asked)

    with Full() as queue:
        said = load_fails(queue, requests=50, work="put", **PLAN)
        assert said.startswith("LoadError: no connection is left before the load has begun: error reply (2)")
        assert "an error to use: b'OUT_OF_MEMORY" in said
        assert queue.of(b"put") == []


# ---- what is asked ----


@pytest.fixture
def queue() -> Iterator[Queue]:
    with Queue() as started:
        yield started


LOAD = (b"put", b"reserve", b"reserve-with-timeout", b"delete")


def test_each_process_has_a_tube_of_its_own(queue: Queue) -> None:
    load(queue, requests=8, connections=4, processes=2, work="put", **PLAN)
    tubes = {each.words[1] for each in queue.of(b"use")}
    assert {each.words[1] for each in queue.of(b"watch")} == tubes == queue.jobs.keys() - {b"default"}
    assert sorted(tube[-9:] for tube in tubes) == [b"-00000000", b"-00000001"], "one for each load process"
    assert all(re.fullmatch(rb"counterbench-[0-9a-f]{7}-[0-9a-f]{8}", tube) for tube in tubes)
    assert {each.words[1] for each in queue.of(b"ignore")} == {b"default"}


@pytest.mark.parametrize("size", [0, 7, 8, 24, 5000])
def test_the_bodies_of_jobs(size: int, queue: Queue) -> None:
    load(queue, requests=50, depth=5, processes=2, work="put", value_size=size, delay=7, **PLAN)
    asked = queue.of(b"put")
    assert {len(each.body) for each in asked} == {size}
    assert len({each.body for each in asked}) == (50 if size >= 8 else 1)
    assert {tuple(each.words) for each in asked} == {(b"put", b"65536", b"7", b"3600", b"%d" % size)}


def test_the_requests_of_a_cycle(queue: Queue) -> None:
    load(queue, requests=9, connections=1, work="cycle", **PLAN)
    asked = [each.words[0] for each in queue.seen if each.words[0] in LOAD]
    assert asked[:9] == [b"put", b"reserve-with-timeout", b"delete"] * 3
    assert [each.words[1] for each in queue.of(b"delete")] == [b"1", b"2", b"3"]


def test_a_cycle_with_many_in_flight(queue: Queue) -> None:
    load(queue, requests=10, connections=1, depth=5, work="cycle", **PLAN)
    asked = [each.words[0] for each in queue.seen if each.words[0] in LOAD]
    put, reserve = b"put", b"reserve-with-timeout"
    assert asked[:10] == [put, reserve, put, reserve, put, b"delete", b"delete", reserve, put, reserve]


def test_producers_and_workers_of_a_fan_have_their_own_connections(queue: Queue) -> None:
    load(queue, requests=60, connections=6, producers=2, depth=3, work="fan", **PLAN)
    putting, waiting = ({each.connection for each in queue.of(word)} for word in (b"put", b"reserve"))
    assert (len(putting), len(waiting), putting & waiting) == (2, 4, set())
    for number in waiting:
        asked = [each.words[0] for each in queue.seen if each.connection == number and each.words[0] in LOAD]
        assert asked == [b"reserve", b"delete"] * (len(asked) // 2) + [b"reserve"]


def test_as_many_jobs_as_are_in_flight() -> None:
    class Counting(Queue):
        ready_max = 0

        def answer(self, asked: Asked) -> bytes:
            found = self.right_answer(asked)
            self.ready_max = max(self.ready_max, len(self.left()))
            return found

    with Counting() as queue:
        run = load(queue, requests=200, connections=5, producers=2, depth=4, work="fan", **PLAN)
        assert run.requests == 200
        assert queue.ready_max <= 8


def test_the_latency_in_a_fan_begins_at_the_intended_time_of_the_put() -> None:
    class Slow(Queue):
        def answer(self, asked: Asked) -> bytes:
            waits = asked.words[0] == b"reserve" and len(self.of(b"put")) < 10
            return b"" if waits else self.right_answer(asked)

    with Slow() as queue:
        run = load(queue, requests=10, connections=3, depth=10, rate=50.0, work="fan", **PLAN)
        assert (run.requests, run.errors) == (10, {})
        assert run.latency.get_max_value() >= 0.17e9, "the first was to be there 9 * 20 ms before the last was put"
        assert run.latency.get_min_value() < run.latency.get_max_value() - 0.1e9


# ---- what cannot be ----


def judged(queue: Queue, **options: Any) -> Run:
    return load(queue, patches=SHORT, verify=True, **{"requests": 90, "work": "cycle", **options}, **PLAN)


def test_a_lost_job_is_a_violation() -> None:
    class Losing(Queue):
        def answer(self, asked: Asked) -> bytes:
            found = self.right_answer(asked)
            if found.startswith((b"INSERTED 20\r", b"INSERTED 30\r")):
                self.jobs[self.tubes[asked.connection]].pop(int(found.split()[1]))
            return found

    with Losing() as queue:
        text = "2 jobs: lost, 0.1 s after the last connection was closed"
        assert judged(queue, work="put").violations == [text]


@pytest.mark.parametrize("twice", [b"RESERVED 2 ", b"DELETED"])
def test_a_job_delivered_twice_is_a_violation(twice: bytes) -> None:
    """While it is reserved, or after it was deleted."""

    class Repeating(Queue):
        repeated = False

        def answer(self, asked: Asked) -> bytes:
            found = self.right_answer(asked)
            if found.startswith(twice) and not self.repeated:
                self.repeated = True
                job = int((found if twice != b"DELETED" else b" ".join(asked.words)).split()[1])
                self.jobs[self.tubes[asked.connection]][job] = b"%08x" % (job - 1) + b"v" * 92
            return found

    with Repeating() as queue:
        run = judged(queue, connections=1, depth=9)
        assert run.violations is not None
        assert run.violations[0].startswith(
            "a job was not delivered as it was put, and once, 1 times; the first time: job "
        )
        assert run.violations[0].endswith(
            "was delivered twice" if twice != b"DELETED" else "but nobody had put it, or it had ended"
        )


def test_a_deleted_job_that_still_exists_is_a_violation() -> None:
    class Keeping(Queue):
        def answer(self, asked: Asked) -> bytes:
            if asked.words[0] == b"kick" and len(self.of(b"kick")) == 1:
                self.jobs[self.tubes[asked.connection]] |= {999: b"00000000" + b"v" * 92, 1000: b"another"}
            return self.right_answer(asked)

    with Keeping() as queue:
        text = "2 jobs: still there, although they had ended or were never put"
        assert judged(queue, connections=1).violations == [text], "with one, the first job put is the first to end"


def test_a_duplicate_job_is_a_violation() -> None:
    class Doubling(Queue):
        def answer(self, asked: Asked) -> bytes:
            if asked.words[0] == b"kick":
                jobs = self.jobs[self.tubes[asked.connection]]
                jobs[999] = jobs[min(jobs)]
            return self.right_answer(asked)

    with Doubling() as queue:
        assert judged(queue, work="put").violations == ["1 job: there more than once"]


@pytest.mark.parametrize("work", ["cycle", "fan"])
def test_a_changed_body_is_a_violation(work: str) -> None:
    class Changing(Queue):
        def answer(self, asked: Asked) -> bytes:
            return self.right_answer(asked).replace(b"v\r\n", b"w\r\n")

    with Changing() as queue:
        run = judged(queue, work=work, requests=3)
        assert run.violations is not None
        assert run.violations[0].endswith("job 1 was delivered with another body")


@pytest.mark.parametrize("was_done", [False, True])
def test_a_job_of_a_closed_connection_may_come_back(was_done: bool) -> None:
    """Or was deleted: that cannot be known."""

    class Closing(Queue):
        closed = b""

        def answer(self, asked: Asked) -> bytes:
            if asked.words[0] == b"delete" and not self.closed:
                self.closed = asked.words[1]
                if was_done:
                    self.right_answer(asked)
                raise Hangup
            return self.right_answer(asked)

    with Closing() as queue:
        run = judged(queue, connections=3, requests=300)
        assert (run.violations, run.errors) == ([], {"closed by the server": 1, "unanswered": 1})
        again = [each.words[1] for each in queue.of(b"delete")].count(queue.closed)
        assert again == (1 if was_done else 2), "what was not deleted was delivered again"


def test_a_connection_that_ends_between_a_reserve_and_its_delete() -> None:
    class Closing(Queue):
        closed = False

        def hold_back(self, asked: Asked) -> None:
            if asked.words[0] == b"reserve-with-timeout" and not self.closed:
                self.closed = True
                peer = self.peers[asked.connection]
                peer.socket.sendall(b"RESERVED 1 100\r\n00000000" + b"v" * 92 + b"\r\n")
                raise Hangup

    with Closing() as queue:
        run = judged(queue, connections=1, depth=5)
        assert run.violations == []
        assert run.errors["closed by the server"] == 1


def test_a_put_may_be_answered_after_its_job_was_deleted() -> None:
    class Late(Queue):
        def hold_back(self, asked: Asked) -> None:
            if asked.words[0] == b"put":
                daemon.wait_until(lambda: len(self.of(b"delete")) == len(self.of(b"put")), "the job has ended")
                daemon.wait_until(lambda: not self.reserved[self.of(b"delete")[-1].connection], "and that is said")

    with Late() as queue:
        run = judged(queue, requests=20, work="fan")
        assert (run.violations, run.errors, run.requests) == ([], {}, 20)


def test_a_producer_continues_after_a_lost_connection() -> None:
    class Closing(Queue):
        closed = False

        def answer(self, asked: Asked) -> bytes:
            if asked.words[0] == b"put" and not self.closed and len(self.of(b"put")) > 20:
                self.closed = True
                raise Hangup
            return self.right_answer(asked)

    with Closing() as queue:
        run = load(queue, requests=100, connections=4, work="fan", **PLAN)
        assert (run.requests, run.errors) == (99, {"closed by the server": 1, "unanswered": 1})


def test_a_fan_goes_on_when_puts_are_refused() -> None:
    class Refusing(Queue):
        def answer(self, asked: Asked) -> bytes:
            refuses = asked.words[0] == b"put" and len(self.of(b"put")) % 2
            return b"DRAINING\r\n" if refuses else self.right_answer(asked)

    with Refusing() as queue:
        run = load(queue, requests=50, connections=4, work="fan", **PLAN)
        assert (run.requests, run.errors) == (25, {"error reply": 25})


def test_a_server_that_closes_during_the_verification() -> None:
    class Closing(Queue):
        def answer(self, asked: Asked) -> bytes:
            if asked.words[0] == b"kick":
                raise Hangup
            return self.right_answer(asked)

    with Closing() as queue:
        text = "it is not known how much is in use: the server closed a connection that looked for jobs"
        assert judged(queue).violations == [text]
        run = load(queue, requests=9, work="cycle", **PLAN)
        assert (run.requests, run.errors) == (9, {}), "without --verify nobody has to know"


WRONG = {
    b"put": [b"DELETED\r\n", b"INSERTED 5", b"ok\r\n", b"\r\n"],
    b"reserve-with-timeout": [
        b"RESERVED 1 99\r\n" + b"v" * 99 + b"\r\n", b"RESERVED 1\r\n", b"RESERVED 1 100\r\n" + b"v" * 102,
        b"RESERVED 1 100 \r\n" + b"v" * 100 + b"\r\n", b"INSERTED 1\r\n",
    ],
    b"delete": [b"RELEASED\r\n!", b"DELETED 1\r\n"],
}  # fmt: skip


@pytest.mark.parametrize(("word", "wrong"), [(word, wrong) for word, many in WRONG.items() for wrong in many])
def test_invalid_answers_are_errors(word: bytes, wrong: bytes) -> None:
    class Wrong(Queue):
        def answer(self, asked: Asked) -> bytes:
            return wrong + b"x" * 600 if asked.words[0] == word else self.right_answer(asked)

    with Wrong() as queue:
        run = load(queue, requests=3, connections=1, work="cycle", **PLAN)
        assert set(run.errors) == {"wrong answer", "unanswered"}
        assert re.match(r"an impossible reply to (put|reserve|delete): ", run.evidence[0])


REFUSED = [
    (b"put", b"OUT_OF_MEMORY"), (b"put", b"DRAINING"), (b"put", b"BURIED 7"), (b"put", b"INTERNAL_ERROR"),
    (b"reserve-with-timeout", b"TIMED_OUT"), (b"reserve-with-timeout", b"DEADLINE_SOON"), (b"delete", b"NOT_FOUND"),
]  # fmt: skip


@pytest.mark.parametrize(("word", "status"), REFUSED)
def test_refusals_are_failures(word: bytes, status: bytes) -> None:
    class Refusing(Queue):
        def answer(self, asked: Asked) -> bytes:
            return status + b"\r\n" if asked.words[0] == word else self.right_answer(asked)

    with Refusing() as queue:
        run = load(queue, requests=30, connections=1, work="put" if word == b"put" else "cycle", **PLAN)
        assert run.errors["error reply"] == 30 - run.requests > 0
        assert run.evidence[0].startswith("an error to ")


def test_an_id_of_any_length(queue: Queue) -> None:
    for first in (1, 10**9 - 1, (1 << 64) - 4):
        queue.ids = iter(range(first, first + 4))
        run = load(queue, requests=9, connections=1, work="cycle", **PLAN)
        assert (run.requests, run.errors) == (9, {})
        assert [each.words for each in queue.of(b"delete")][-3:] == [
            delete(first + number).split() for number in range(3)
        ]


def test_jobs_that_no_worker_gets_are_unanswered() -> None:
    class Keeping(Queue):
        def answer(self, asked: Asked) -> bytes:
            return b"" if asked.words[0] == b"reserve" else self.right_answer(asked)

    with Keeping() as queue:
        run = load(queue, requests=7, connections=3, depth=7, work="fan", patches={"counterd.bench._load.GRACE_S": 0.2},
                   **PLAN)  # fmt: skip
        assert (run.requests, run.errors) == (0, {"unanswered": 7})
        assert queue.left() == [], "they are taken out all the same"
