"""Benchmarks of jobs end with an error if jobs are missing. No test measures time."""

from __future__ import annotations

import os

import pytest

from kit.scripted.beanstalk import Asked, Queue
from peers import queues, servers


def described(server: Queue) -> servers.Server:
    return servers.Server("it", "beanstalk", os.getpid(), server.address.port)


def test_the_requested_number_of_jobs_is_put() -> None:
    with Queue() as queue:
        assert queues.memory(described(queue), 2500).keys() == {"bytes each"}
        assert [len(body) for body in queue.left()] == [100] * 2500


def test_jobs_that_are_refused_are_a_failure() -> None:
    class Full(Queue):
        def answer(self, asked: Asked) -> bytes:
            return b"OUT_OF_MEMORY\r\n" if self.left()[9:] else self.right_answer(asked)

    with Full() as queue, pytest.raises(RuntimeError, match=r"it: 10 of 50 jobs: {'error reply': 40"):
        queues.memory(described(queue), 50)
