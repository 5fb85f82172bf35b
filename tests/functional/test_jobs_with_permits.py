"""Jobs that hold permits of counters, in a real daemon with both protocols: which jobs get them, and what happens
when a worker, or the daemon, is killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Client as Counters
from counterd.client.beanstalk import Client, Refused
from counterd.protocols.beanstalk import wire
from counterd.protocols.counter import wire as permits
from kit import daemon
from kit.daemon import PATIENCE, wait_until
from kit.jobs import Peer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kit.daemon import Daemon

BOTH = {"counter.port": "0", "beanstalk.enable": "true", "beanstalk.port": "0", "beanstalk.bind": "127.0.0.1"}
WORKER = """
import sys
from counterd.client.beanstalk import Client

client = Client("127.0.0.1", int(sys.argv[1]))
print(client.reserve().id, flush=True)
sys.stdin.read()
"""
TURNS = 20


@contextlib.contextmanager
def running(directory: Path, **settings: Any) -> Iterator[Daemon]:
    with daemon.running(directory / "d", {**BOTH, **settings}) as counterd:
        yield counterd


@pytest.fixture
def counterd(tmp_path: Path) -> Iterator[Daemon]:
    with running(tmp_path) as made:
        yield made


def jobs(counterd: Daemon) -> Client:
    return Client("127.0.0.1", counterd.address_of("beanstalk").port, timeout=PATIENCE)


def counters(counterd: Daemon) -> Counters:
    return Counters("127.0.0.1", counterd.address_of("counter").port, timeout=PATIENCE)


@contextlib.contextmanager
def worker(counterd: Daemon) -> Iterator[subprocess.Popen[str]]:
    """A process that waits for a job, writes its id, and keeps it."""
    port = str(counterd.address_of("beanstalk").port)
    command = [sys.executable, "-c", WORKER, port]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def told(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def test_the_permit_of_a_killed_worker_comes_back(counterd: Daemon) -> None:
    with jobs(counterd) as producer, counters(counterd) as client, worker(counterd) as process:
        job = producer.put("x", concurrency=("shop", 1))
        assert told(process) == job
        assert client.get("shop") == 1
        with worker(counterd) as second:
            wait_until(lambda: producer.stats()["current-waiting"] == "1", "the second worker waits")
            process.kill()
            assert told(second) == job
            assert client.get("shop") == 1
            second.kill()
            with client.hold("shop", maximum=1, timeout=PATIENCE):  # waits in the server until it is back
                assert producer.reserve(0) is None
                assert (producer.inspect_tube("default") or {})["current-jobs-blocked"] == "1"
        found = producer.reserve(int(PATIENCE))
        assert found is not None
        assert found.id == job


def test_jobs_and_clients_take_turns(counterd: Daemon) -> None:
    """One permit, for which a client waits whenever a job has it, and a job whenever the client has it."""
    shop = permits.Permit(b"shop", 1, 1)
    parser = permits.ResponseParser()
    (address,) = counterd.served("counter listens on")
    with jobs(counterd) as producer, socket.create_connection(address, PATIENCE) as client:
        for number in range(TURNS):
            producer.put(str(number), concurrency=("shop", 1))
        worker = Peer(socket.create_connection(counterd.address_of("beanstalk"), PATIENCE))

        def granted() -> int:
            """Waits for the reply to a Take. Returns its opaque."""
            while True:
                for response in parser.feed(client.recv(4096)):
                    assert response.status == permits.Status.NO_ERROR
                    if response.opcode == permits.Opcode.TAKE:
                        return response.opaque

        client.sendall(permits.take(0, [shop], 1))
        assert granted() == 0
        for turn in range(TURNS):
            worker.socket.sendall(wire.reserve())
            wait_until(lambda: producer.stats()["current-waiting"] == "1", "the worker waits")
            client.sendall(permits.take(turn + 1, [shop], 60_000) + permits.release(0, b"shop", 1))
            (reserved,) = worker.ask_all([b""])
            assert reserved.body == str(turn).encode()
            assert reserved.number is not None
            assert worker.ask(wire.delete(reserved.number)).status is wire.Status.DELETED
            assert granted() == turn + 1
        worker.close()


def test_beanstalk_is_listed_as_a_holder(tmp_path: Path) -> None:
    with running(tmp_path, **{"admin.enable": "true", "admin.bind": "127.0.0.1:0"}) as counterd:
        counterd.wait_for_log("admin listens on")
        host, port = counterd.address_of("admin")
        with jobs(counterd) as client:
            client.put("x", concurrency=("shop", 2))
            assert client.reserve(0) is not None
            asked = http.client.HTTPConnection(host, port, timeout=PATIENCE)
            asked.request("GET", "/holders?name=shop")
            (row,) = json.loads(asked.getresponse().read())["rows"]
            asked.close()
            assert (row["connection"], row["peer"], row["amount"]) == ("", "beanstalk", 1)


def test_reserved_jobs_keep_their_permits_after_a_restart(tmp_path: Path) -> None:
    journal = {"beanstalk.journal": str(tmp_path / "journal")}
    with running(tmp_path, **journal) as counterd, jobs(counterd) as client:
        first = client.put("x", concurrency=("shop", 1), ttr=600)
        second = client.put("y", concurrency=("shop", 1))
        job = client.reserve(0)
        assert job is not None
        assert job.touch(), "it is on disk"
        counterd.kill()
    (tmp_path / "again").mkdir()
    with running(tmp_path / "again", **journal) as counterd, jobs(counterd) as client, counters(counterd) as other:
        assert other.get("shop") == 1
        assert client.reserve(0) is None
        assert client.delete(first)
        job = client.reserve(int(PATIENCE))
        assert job is not None
        assert job.id == second


def test_without_counters_the_put_is_refused(tmp_path: Path) -> None:
    off = {"counter.enable": "false", "counter.port": "", "counter.bind": ""}
    with running(tmp_path, **off) as counterd, jobs(counterd) as client:
        with pytest.raises(Refused, match=r"counter\.enable is off"):
            client.put("x", concurrency=("shop", 1))
        assert client.put("x") == 1


def test_a_drain_waits_for_jobs_and_not_for_their_permits(tmp_path: Path) -> None:
    settings = {"drain.mode": "wait", "drain.timeout": "60"}
    with running(tmp_path, **settings) as counterd, jobs(counterd) as client:
        client.put("x", concurrency=("shop", 1))
        job = client.reserve(0)
        assert job is not None
        counterd.send_signal(signal.SIGTERM)
        counterd.wait_for_log("counterd grants nothing new")
        assert job.delete()
        counterd.wait_for_log("all holdings were given back")
        assert counterd.ended() == 0
