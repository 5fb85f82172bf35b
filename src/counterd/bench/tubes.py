"""What a load of jobs leaves in its tubes, and whether that is what it should be.

A side, pure Python. Each load process has put into a tube of its own. Once their connections are closed, all that is
left there is taken out, delayed jobs too: what is found is beside what the load processes know of their jobs.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from counterd.bench.asking import resolve
from counterd.bench.plan import NUMBERED_SIZE
from counterd.bench.words import names_of
from counterd.errors import ProtocolError
from counterd.protocols.beanstalk.wire import NUMBER_MAX, Parser, Status, delete, ignore, kick, reserve, use, watch
from counterd.units import several

if TYPE_CHECKING:
    import socket

    from counterd.bench._board import Board
    from counterd.bench.plan import Plan
    from counterd.protocols.beanstalk.wire import Reply

GIVE_BACK_S = 30.0
PAUSE_S = 0.02
AT_ONCE = 500  # jobs
RECEIVE_SIZE = 1 << 18
HEXADECIMAL = frozenset(b"0123456789abcdef")


def take(plan: Plan) -> Counter[bytes]:
    """Deletes what the tubes of this process's load have, but for what is reserved. Returns how the bodies begin.

    Raises OSError or ProtocolError.
    """
    found: Counter[bytes] = Counter()
    with resolve(plan).connect() as connection:
        for index in range(plan.processes):
            tube = names_of(plan, os.getpid())["use"] + b"%08x" % index
            _asked(connection, [use(tube), watch(tube), ignore(b"default"), kick(NUMBER_MAX)])
            while True:
                answers = _asked(connection, [reserve(0)] * AT_ONCE)
                jobs = [each for each in answers if each.status == Status.RESERVED]
                _asked(connection, [delete(job.number or 0) for job in jobs])
                found.update(job.body[:NUMBERED_SIZE] for job in jobs)
                if len(jobs) < AT_ONCE:
                    break
            _asked(connection, [watch(b"default"), ignore(tube)])
    return found


def when_gone(plan: Plan, board: Board) -> list[str]:
    """Violations once all connections are closed: what is not there after GIVE_BACK_S, and what should not be."""
    stored, perhaps = board.jobs()
    found = take(plan)
    end = time.monotonic() + GIVE_BACK_S
    while stored - _numbers(found) and time.monotonic() < end:
        time.sleep(PAUSE_S)
        found += take(plan)
    findings = {
        f"lost, {GIVE_BACK_S:g} s after the last connection was closed": len(stored - _numbers(found)),
        "still there, which had ended or which nobody had put": len(_numbers(found) - stored - perhaps),
        "there more than once": sum(times > 1 for times in found.values()),
    }
    return [f"{several(count, 'job')}: {what}" for what, count in findings.items() if count]


def _numbers(found: Counter[bytes]) -> set[int]:
    """Of jobs; of a body that does not begin with one it is -1."""
    return {int(body, 16) if HEXADECIMAL.issuperset(body) else -1 for body in found}


def _asked(connection: socket.socket, requests: list[bytes]) -> list[Reply]:
    """The answers, in the order of the requests."""
    parser = Parser()
    answers: list[Reply] = []
    connection.sendall(b"".join(requests))
    while len(answers) < len(requests):
        data = connection.recv(RECEIVE_SIZE)
        if not data:
            raise ProtocolError("the server closed a connection that looked for jobs")
        answers += parser.feed(data)
    return answers
