"""Histories of a real daemon whose workers and clients share counters have an order. Some are killed while they hold
permits."""

from __future__ import annotations

import contextlib
import socket
from itertools import count
from random import Random
from threading import Thread
from typing import TYPE_CHECKING, Any

from history import Closed, Recorder, beanstalk, check, load
from history.beanstalk import Bury, Delete, JobModel, Put, Release, Reserve, Touch, jobs
from history.borrowers import JOB_CALLS
from history.loans import LentModel, as_acquires, excused, gates, lent
from history.takes import Take, prepared
from history.test_daemon_takes import call
from history.waiting import mistakes
from kit.daemon import running
from kit.jobs import Peer
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from pathlib import Path

    from kit.daemon import Daemon

SETTINGS = {"beanstalk.enable": "true", "beanstalk.port": 0, "beanstalk.bind": "127.0.0.1"}
COUNTERS = {b"00": 6, b"01": 5}  # the most for jobs: more than for clients, so that there is some left for them
WORKERS, CLIENTS = 4, 4
CALLS = 60
DYING = 0.05  # of a worker's calls, those after which it goes with what it has
LATE_NS = 5_000_000_000  # by which a busy machine may be late


def work(daemon: Daemon, directory: Path, number: int, paths: list[Path]) -> None:
    """Puts, reserves and ends jobs; connects again when the daemon has gone."""
    rng, bodies, calls = Random(number), count(), 0
    for life in count():
        client = number * 1000 + life
        paths.append(directory / f"{client}.worker")
        mine: list[int] = []
        connected = socket.create_connection(daemon.address_of("beanstalk"), PATIENCE)
        with Recorder(paths[-1], client) as recorder, contextlib.closing(connected):
            peer = Peer(connected)
            while calls < CALLS:
                calls += 1
                asked = chosen(rng, mine, b"%d of %d" % (next(bodies), number))
                token = recorder.start(asked)
                answer = beanstalk.told(peer.ask(beanstalk.request(asked)))
                recorder.end(token, answer)
                if answer[0] == "RESERVED":
                    mine.append(answer[1] or 0)
                if rng.random() < DYING:
                    break
            recorder.closing()
        if calls == CALLS:
            return


def chosen(rng: Random, mine: list[int], body: bytes) -> Any:
    dice = rng.random()
    if dice < 0.3:
        name = rng.choice(sorted(COUNTERS))
        return Put(b"default", rng.randint(1, 3), 0, 1, body, 0, name, rng.randint(2, COUNTERS[name]))
    if dice < 0.6 or not mine:
        return Reserve(b"default", rng.choice((0, 0, 0, 1)))
    job = mine.pop()
    return rng.choice((Delete(job), Delete(job), Release(job, 1, 0), Bury(job, 1), Touch(job)))


def test_daemon_has_an_order_for_jobs_and_clients(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.client" for number in range(CLIENTS)]
    shape = {"groups": 1, "rates": False, "waits_ms": (0, 5, 50)}
    with running(tmp_path / "daemon", SETTINGS) as daemon:
        daemon.addresses = [daemon.address_of("counter")]
        threads = [Thread(target=call, args=(daemon, paths[number], number, shape)) for number in range(CLIENTS)]
        threads += [Thread(target=work, args=(daemon, tmp_path, 1 + number, paths)) for number in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        daemon.wait_for_stats(curr_connections=1, holdings=0, waiters=0)
        for path in paths:
            with Recorder(path, int(path.stem)) as recorder:
                recorder.closed()
    operations = load(paths)
    assert sum(one.call == Closed() and one.ended is not None for one in operations) == len(paths)
    of_jobs = [one for one in operations if isinstance(one.call, (*JOB_CALLS, Closed))]
    others = [one for one in operations if not isinstance(one.call, (*JOB_CALLS, Closed))]
    loans = lent(of_jobs)
    closed = [one for one in loans if isinstance(one.call, Closed)]
    assert check(jobs(of_jobs), JobModel(late_ns=LATE_NS)) is None
    assert mistakes([*others, *closed, *as_acquires(loans, LATE_NS)], late_ns=LATE_NS) == []
    history = list(excused(prepared([*others, *loans])))
    assert check(history, LentModel(history, gates(of_jobs), late_ns=LATE_NS)) is None
    reserved = sum(one.answer is not None and one.answer[0] == "RESERVED" for one in of_jobs)
    granted = sum(isinstance(one.call, Take) and one.answer is not None and one.answer[0] == 0 for one in others)
    assert min(reserved, granted, len(paths) - CLIENTS - WORKERS) > 0
