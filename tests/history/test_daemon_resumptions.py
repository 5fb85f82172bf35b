"""Clients whose connections are cut keep their holdings throughout, and these come back when the clients are gone.

Each history has the calls of programs with Client(resume=): one client is one connection there, however often it
reconnects."""

from __future__ import annotations

import subprocess
import sys
from random import Random
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Client
from counterd.errors import NotAvailable
from history import Recorder, check, load
from history.counter import NOT_AVAILABLE, OK, Acquire, Get, Release
from history.resumptions import Resume
from history.takes import TakeModel, prepared
from history.waiting import mistakes
from kit.cuts import HOST, Relay
from kit.daemon import Daemon, running, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CLIENTS = 4
PHASES = 3
CALLS = 25  # of a client, in a phase
GRACE_S = 60
BRIEF_MS = 700
LATE_NS = 5_000_000_000  # by which a busy machine may be late
MAXIMA = {"a": 2, "b": 5}
OWN = "own"  # each holds one all the time: a connection that holds nothing has no grace time
OBSERVER = 99
CHILD = """
import sys
from counterd.client import Client
with Client(sys.argv[1], int(sys.argv[2]), resume=float(sys.argv[3])) as client:
    client.acquire("a", 2, maximum=2)
    print("holds", flush=True)
    sys.stdin.read()
"""


class Caller:
    """A client behind a relay that cuts its connection; records what it holds."""

    def __init__(self, daemon: Daemon, directory: Path, number: int) -> None:
        self.rng = Random(number)
        self.path = directory / str(number)
        self.recorder = Recorder(self.path, number)
        self.relay = Relay(daemon.address)
        self.client = Client(HOST, self.relay.port, resume=GRACE_S)
        self.held = dict.fromkeys((OWN, *MAXIMA), 0)

    def call(self) -> None:
        """Makes the calls of a phase. Each fourth one meets a connection that was cut, or loses its reply."""
        if not self.held[OWN]:
            self.acquire(OWN, 1, CLIENTS)
        for _ in range(CALLS):
            dice = self.rng.random()
            if dice < 0.12:
                self.relay.cut()
            elif dice < 0.24:
                self.client.noop()  # it has gone on, so the reply that is lost is that of the call
                self.relay.muted = True
            name = self.rng.choice([*MAXIMA])
            if self.held[name] and self.rng.random() < 0.5:
                token = self.recorder.start(Release(name, self.held[name]))
                self.client.release(name, self.held[name])
                self.recorder.end(token, (OK, None))
                self.held[name] = 0
            else:
                self.acquire(name, self.rng.randint(1, 2), MAXIMA[name])
        self.client.noop()

    def acquire(self, name: str, amount: int, maximum: int) -> None:
        token = self.recorder.start(Acquire(name, amount, maximum))
        try:
            self.client.acquire(name, amount, maximum=maximum)
        except NotAvailable:
            self.recorder.end(token, (NOT_AVAILABLE, None))
        else:
            self.recorder.end(token, (OK, amount))
            self.held[name] += amount

    def close(self) -> None:
        """Says Goodbye."""
        self.recorder.closing()
        self.client.close()
        self.relay.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with running(tmp_path / "daemon") as made:
        yield made


def get(recorder: Recorder, client: Client, name: str) -> int:
    token = recorder.start(Get(name))
    found = client.get(name, 0)
    recorder.end(token, (OK, found))
    return found


def wrong(paths: list[Path]) -> list[Any]:
    """A request whose reply is lost is asked again, and then once too often granted for a moment: so others may be
    refused what nobody keeps.
    """
    operations = [one for one in load(paths) if one.answer is None or one.answer[0] != NOT_AVAILABLE]
    history = prepared(operations, late_ns=LATE_NS)
    return [*mistakes(operations, late_ns=LATE_NS), *filter(None, [check(history, TakeModel(history))])]


def test_clients_whose_connections_are_cut_lose_nothing(daemon: Daemon, tmp_path: Path) -> None:
    callers = [Caller(daemon, tmp_path, number) for number in range(1, CLIENTS + 1)]
    observed = tmp_path / "observer"
    with daemon.client() as observer, Recorder(observed, OBSERVER) as recorder:
        for _ in range(PHASES):
            threads = [Thread(target=caller.call) for caller in callers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for name in (OWN, *MAXIMA):
                held = sum(caller.held[name] for caller in callers)
                wait_until(lambda name=name, held=held: observer.get(name, 0) == held, "all is as it was told")
                assert get(recorder, observer, name) == held
        assert daemon.stats()["resumed"] > CLIENTS
        for caller in callers:
            caller.close()
        daemon.wait_for_stats(curr_connections=2, holdings=0, kept=0)
        for caller in callers:
            caller.recorder.closed()
            caller.recorder.close()
        assert [get(recorder, observer, name) for name in MAXIMA] == [0, 0]
    assert wrong([observed, *(caller.path for caller in callers)]) == []


def test_holdings_of_a_killed_client_stay_for_its_grace_time(daemon: Daemon, tmp_path: Path) -> None:
    paths = [tmp_path / "killed", tmp_path / "observer"]
    address = daemon.address
    command = [sys.executable, "-c", CHILD, address.host, str(address.port), str(BRIEF_MS / 1000)]
    with daemon.client() as observer, Recorder(paths[0], 1) as killed, Recorder(paths[1], OBSERVER) as recorder:
        killed.end(killed.start(Resume(BRIEF_MS)), (OK, BRIEF_MS))
        token = killed.start(Acquire("a", 2, 2))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == b"holds\n"
            killed.end(token, (OK, 2))
            killed.closing()
            child.kill()
        daemon.wait_for_stats(curr_connections=2)
        killed.closed()
        while get(recorder, observer, "a"):
            pass
        daemon.wait_for_stats(holdings=0, kept=0, expired_stays=1)
    assert wrong(paths) == []
