"""The beanstalk dialect: requests byte for byte, and the comparison of a load's tubes with its known jobs."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from counterd.bench.dialects import beanstalk
from counterd.bench.plan import Plan, read_work
from counterd.errors import ProtocolError
from kit.machine import PATIENCE
from kit.scripted import Hangup
from kit.scripted.beanstalk import Asked, Queue

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GIVE_BACK_S": 0.05, "PAUSE_S": 0.001, "AT_ONCE": 7}.items():
        monkeypatch.setattr(beanstalk, name, value)


@pytest.fixture
def queue() -> Iterator[Queue]:
    with Queue() as started:
        yield started


def plan_of(queue: Queue, **options: Any) -> Plan:
    work = read_work("cycle")
    return Plan(protocol="beanstalk", work=work, port=queue.address.port, verify=True, **{"processes": 2, **options})


def tube(index: int) -> bytes:
    return b"counterbench-%07x-%08x" % (os.getpid() & 0xFFFFFFF, index)


def fill(queue: Queue, index: int, *bodies: bytes) -> None:
    queue.jobs.setdefault(tube(index), {}).update({next(queue.ids): body for body in bodies})


def judged(queue: Queue, stored: set[int], perhaps: set[int]) -> list[str]:
    board: Any = SimpleNamespace(jobs=lambda: (stored, perhaps))
    return beanstalk.when_gone(plan_of(queue), board)


def numbered(*numbers: int) -> list[bytes]:
    return [b"%08xvvv" % number for number in numbers]


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 50])
def test_all_jobs_are_taken_from_the_tubes_of_each_process(count: int, queue: Queue) -> None:
    fill(queue, 0, *numbered(*range(count)))
    fill(queue, 1, *numbered(1000))
    fill(queue, 2, b"of another load")
    queue.delayed.update(list(queue.jobs[tube(0)])[::2])
    assert beanstalk.take(plan_of(queue)) == dict.fromkeys([b"%08x" % number for number in (*range(count), 1000)], 1)
    assert queue.left() == [b"of another load"]


def test_known_jobs_in_the_tubes_are_no_violation(queue: Queue) -> None:
    fill(queue, 0, *numbered(1, 2, 3))
    fill(queue, 1, *numbered(4))
    assert judged(queue, {1, 2, 4}, {3, 9}) == []


def test_lost_surplus_and_duplicate_jobs_are_violations(queue: Queue) -> None:
    fill(queue, 0, *numbered(1, 2, 2, 5), b"another", b"nothing hexadecimal")
    assert judged(queue, {1, 2, 3}, {9}) == [
        "1 job: lost, 0.05 s after the last connection was closed",
        "2 jobs: still there, although they had ended or were never put",
        "1 job: there more than once",
    ]


def test_jobs_that_come_back_in_time_are_no_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beanstalk, "GIVE_BACK_S", PATIENCE)

    class Late(Queue):
        def answer(self, asked: Asked) -> bytes:
            if asked.words[0] == b"kick" and len(self.of(b"kick")) == 5:
                fill(self, 0, *numbered(1))
            return self.right_answer(asked)

    with Late() as queue:
        assert judged(queue, {1}, set()) == []


def test_a_closed_connection_is_an_error() -> None:
    class Closing(Queue):
        def answer(self, asked: Asked) -> bytes:
            raise Hangup

    with Closing() as queue, pytest.raises((ProtocolError, OSError)):
        beanstalk.take(plan_of(queue))


def test_requests_byte_for_byte() -> None:
    plan = Plan(protocol="beanstalk", work=read_work("cycle"), value_size=12)
    assert beanstalk.requests_of(plan, b"0000abcd") == {
        "noop": b"list-tube-used\r\n",
        "put": b"put 65536 0 3600 12\r\n0000abcdvvvv\r\n",
        "reserve": b"reserve-with-timeout 5\r\n",
        "delete": b"delete ",
        "use": b"use 0000abcd\r\n",
        "watch": b"watch 0000abcd\r\n",
        "ignore": b"ignore default\r\n",
    }
    short = beanstalk.requests_of(replace(plan, value_size=3, delay=7), b"0000abcd")
    assert short["put"] == b"put 65536 7 3600 3\r\n000\r\n"
    assert beanstalk.requests_of(replace(plan, delay=7), b"0000abcd")["reserve"] == b"reserve-with-timeout 12\r\n"
    fan = beanstalk.requests_of(replace(plan, work=read_work("fan"), value_size=25), b"0000abcd")
    assert fan["put"] == b"put 65536 0 3600 25\r\n0000abcd" + beanstalk.STAMP + b"v\r\n"
    assert fan["reserve"] == b"reserve\r\n"


def test_names_of_tubes() -> None:
    plan = Plan(protocol="beanstalk", work=read_work("cycle"))
    tube = b"counterbench-1234abc-"
    assert beanstalk.tubes_of(plan, 0x1234ABC) == {"tube": tube, "number": b""}
