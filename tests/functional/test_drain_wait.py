"""drain.mode = wait: the daemon waits for holdings to come back, and logs what it waits for."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from counterd import errors
from counterd.protocols.beanstalk import wire as jobs
from counterd.protocols.beanstalk.wire import Reply, Status
from counterd.protocols.counter import wire
from kit import peers

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from kit import daemon


def test_a_drain_waits_for_holdings(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.timeout": 60}, arguments=["--set", "drain.mode=wait"])
    with counterd.client() as client, counterd.connect() as other:
        client.acquire("jobs", 3, maximum=3)
        client.acquire("mail", maximum=3)
        peers.ask(other, wire.acquire(1, b"jobs 2", 1, 1))
        counterd.send_signal(signal.SIGTERM)
        line = counterd.wait_for_log("waiting for 3 holdings of counter")
        port = other.getsockname()[1]
        assert "3 of jobs by 127.0.0.1:" in line
        assert f"1 of jobs 2 by 127.0.0.1:{port} for " in line
        with pytest.raises(ConnectionRefusedError):
            counterd.connect().close()
        with pytest.raises(errors.NotAvailable, match="Draining"):
            client.acquire("more", maximum=9)
        assert client.get("jobs") == 3
        client.release("jobs", 3)
        other.close()
        assert counterd.process.poll() is None
        client.release("mail")
    assert counterd.ended() == 0
    assert counterd.lines("all holdings were given back")
    assert not counterd.lines("WARN|ERROR")


def test_a_drain_without_holdings_ends_at_once(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.mode": "wait", "drain.timeout": 60})
    assert counterd.stop() == 0
    assert counterd.lines("all holdings were given back")


def test_a_drain_ends_at_its_timeout(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.mode": "wait", "drain.timeout": 1})
    with counterd.client() as client:
        client.acquire("jobs", maximum=3)
        assert counterd.stop() == 0
        assert counterd.lines("WARN.*draining: 1 holding not given back within")
        with pytest.raises(errors.ConnectionLost):
            client.noop()


def test_a_drain_ends_when_grace_times_end(start: Callable[..., daemon.Daemon]) -> None:
    """No client is connected, and none could connect: only the drain itself wakes the store."""
    counterd = start({"counter.resume_max": 3600, "drain.mode": "wait", "drain.timeout": 3600})
    with counterd.connect() as holder:
        assert peers.ask(holder, wire.resume(1, 3_600_000)).status == 0
        assert peers.ask(holder, wire.acquire(1, b"jobs", 1, 1)).status == 0
    counterd.wait_for_stats(kept_holdings=1, curr_connections=1)
    assert counterd.stop() == 0
    assert counterd.lines("all holdings were given back")


def test_a_second_signal_ends_the_wait(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.mode": "wait", "drain.timeout": 60}, status=1)
    with counterd.client() as client:
        client.acquire("jobs", maximum=3)
        counterd.send_signal(signal.SIGTERM)
        counterd.wait_for_log("waiting for 1 holding")
        assert counterd.stop() == 1


def ask(connection: socket.socket, command: bytes) -> Reply:
    """Sends a command of the beanstalk protocol, and returns the reply."""
    connection.sendall(command)
    return reply(connection)


def reply(connection: socket.socket) -> Reply:
    parser = jobs.Parser()
    while not (replies := parser.feed(connection.recv(65536))):
        pass
    return replies[0]


def test_workers_finish_their_jobs_and_puts_are_refused(start: Callable[..., daemon.Daemon]) -> None:
    settings = {
        "counter.enable": "false",
        "beanstalk.enable": "true",
        "beanstalk.port": "0",
        "beanstalk.bind": "127.0.0.1",
        "drain.mode": "wait",
        "drain.timeout": 60,
    }
    counterd = start(settings)
    with counterd.connect() as producer, counterd.connect() as worker, counterd.connect() as waiting:
        for body in (b"one", b"two"):
            assert ask(producer, jobs.put(body)).status is Status.INSERTED
        assert ask(worker, jobs.reserve()).body == b"one"
        ask(waiting, jobs.watch(b"other"))
        ask(waiting, jobs.ignore(b"default"))
        waiting.sendall(jobs.reserve())
        assert jobs.read_dictionary(ask(producer, jobs.stats()).body)["draining"] == "false"
        counterd.send_signal(signal.SIGTERM)
        assert "1 of default by 127.0.0.1:" in counterd.wait_for_log("waiting for 1 holding of beanstalk")
        assert ask(producer, jobs.put(b"three")).status is Status.DRAINING
        assert jobs.read_dictionary(ask(producer, jobs.stats()).body)["draining"] == "true"
        assert reply(waiting).status is Status.TIMED_OUT
        assert ask(producer, jobs.reserve(0)).status is Status.TIMED_OUT, "though a job is ready"
        assert ask(worker, jobs.touch(1)).status is Status.TOUCHED
        assert ask(producer, jobs.peek_next("ready")).body == b"two"
        assert counterd.process.poll() is None
        assert ask(worker, jobs.delete(1)).status is Status.DELETED
    assert counterd.ended() == 0
    assert counterd.lines("all holdings were given back")
    assert not counterd.lines("WARN|ERROR")
