"""The beanstalk protocol for counterbench: its requests, the removal of its jobs, and the checks of --verify.

Floor 5 (ARCHITECTURE.md), pure Python. Each load process puts jobs into its own tube. After the connections of the
load were closed, all remaining jobs are taken out of the tubes, even delayed jobs. The remaining jobs are compared with
the jobs that the load processes remember.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from counterd.bench.connection import LoadError, asked, resolve
from counterd.bench.dialect import NOOP, NUMBERED_SIZE, SIZED, VALUE, Checks, Dialect, Op
from counterd.errors import CounterdError
from counterd.protocols.beanstalk import wire
from counterd.protocols.beanstalk.wire import NUMBER_MAX, Parser, Reply, Status
from counterd.units import several

if TYPE_CHECKING:
    import socket

    from counterd.bench._board import Board
    from counterd.bench.options import Options

STAMP = b"t" * 16  # stands for the time, in hexadecimal
TTR = 3600  # seconds: no load reserves a job for longer
GIVE_UP_S = 5  # how long a reserve in a cycle waits for a due job, which exists unless its put was refused
GIVE_BACK_S = 30.0
PAUSE_S = 0.02
AT_ONCE = 500  # jobs
TUBE = Op(names="tube")
HEXADECIMAL = frozenset(b"0123456789abcdef")


def requests_of(plan: Options, name: bytes) -> dict[str, bytes]:
    """Returns each kind of request for a name. The name is that of a tube, or the number of a job.

    In a fan, the time of the put follows the number. A delete is not complete, because the id of the job is not known
    yet.
    """
    body = name + (STAMP if plan.fans() else b"") + VALUE * plan.buffer_size
    wait = None if plan.fans() else plan.delay + GIVE_UP_S
    return {
        "noop": wire.list_tube_used(),
        "put": wire.put(body[: plan.buffer_size], delay=plan.delay, ttr=TTR),
        "reserve": wire.reserve(wait),
        "delete": b"delete ",
        "use": b"use %b\r\n" % name,
        "watch": b"watch %b\r\n" % name,
        "ignore": wire.ignore(b"default"),
    }


def tubes_of(_plan: Options, run: int) -> dict[str, bytes]:
    """Returns the tube of a process without the number of the process.

    run: the low 28 bits make the tubes of each run differ.
    """
    tube = b"counterbench-%07x-" % (run & 0xFFFFFFF)
    return {"tube": tube, "number": b""}


def tidy(plan: Options) -> None:
    """Removes the jobs that the load has left. A load of put leaves its jobs on purpose, so they stay."""
    if "put" not in plan.work.weights:
        with contextlib.suppress(CounterdError, LoadError, OSError):  # the run has its figures even if this fails
            take(plan)


def take(plan: Options) -> Counter[bytes]:
    """Deletes all jobs in the tubes of this process's load, except reserved jobs. Counts the beginnings of the bodies.

    Raises OSError or ProtocolError.
    """
    found: Counter[bytes] = Counter()
    with resolve(plan).connect() as connection:
        for index in range(plan.processes):
            tube = tubes_of(plan, os.getpid())["tube"] + b"%08x" % index
            _asked(connection, [wire.use(tube), wire.watch(tube), wire.ignore(b"default"), wire.kick(NUMBER_MAX)])
            while True:
                answers = _asked(connection, [wire.reserve(0)] * AT_ONCE)
                jobs = [each for each in answers if each.status == Status.RESERVED]
                _asked(connection, [wire.delete(job.number or 0) for job in jobs])
                found.update(job.body[:NUMBERED_SIZE] for job in jobs)
                if len(jobs) < AT_ONCE:
                    break
            _asked(connection, [wire.watch(b"default"), wire.ignore(tube)])
    return found


def when_gone(plan: Options, board: Board) -> list[str]:
    """Returns the violations that remain after all connections were closed.

    Violations are jobs that should exist but do not after GIVE_BACK_S, and jobs that exist but should not.
    """
    stored, perhaps = board.jobs()
    found = take(plan)
    end = time.monotonic() + GIVE_BACK_S
    while stored - _numbers(found) and time.monotonic() < end:
        time.sleep(PAUSE_S)
        found += take(plan)
    findings = {
        f"lost, {GIVE_BACK_S:g} s after the last connection was closed": len(stored - _numbers(found)),
        "still there, although they had ended or were never put": len(_numbers(found) - stored - perhaps),
        "there more than once": sum(times > 1 for times in found.values()),
    }
    return [f"{several(count, 'job')}: {what}" for what, count in findings.items() if count]


def _numbers(found: Counter[bytes]) -> set[int]:
    """Returns the numbers of jobs, with -1 for a body that does not begin with a number."""
    return {int(body, 16) if HEXADECIMAL.issuperset(body) else -1 for body in found}


def _asked(connection: socket.socket, requests: list[bytes]) -> list[Reply]:
    return asked(connection, requests, Parser(), "looked for jobs")


DIALECT = Dialect(
    name="beanstalk",
    order=3,
    port=wire.PORT,
    ops={"noop": NOOP, **{role: Op(role, options=SIZED) for role in ("put", "cycle", "fan")}},
    inner={"reserve": Op("reserve", ""), "delete": Op("delete", ""), "use": TUBE, "watch": TUBE, "ignore": NOOP},
    work="cycle",
    help="beanstalk also works with beanstalkd.",
    ops_help="put (the jobs stay), cycle (put, reserve and delete in turn), noop, a mix, or fan: some connections put, "
    "the others wait, and latency is from put to RESERVED",
    kind="jobs",
    requests=requests_of,
    names=tubes_of,
    name_size_max=200,
    opening=("use", "watch", "ignore"),
    options=frozenset(),
    checks=lambda plan: Checks(lambda _: [], lambda board: when_gone(plan, board)),
    tidy=tidy,
    broken="a job was not delivered as it was put, and once,",
    kept="no job was lost, and none was delivered twice",
)
