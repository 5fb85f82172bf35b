"""Logs that are not read, and logs for programs."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import signal
from typing import TYPE_CHECKING

from counterd.client import Client
from counterd.errors import ConnectionLost
from kit import daemon

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def test_the_daemon_serves_while_its_log_is_not_read(tmp_path: Path, short_path: Path) -> None:
    path = str(short_path / "s")
    reading, writing = os.pipe()
    try:
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        with daemon.running(tmp_path / "d", {"counter.socket": path, "counter.bind": " "}, stderr=writing) as counterd:
            with daemon.wait_until(lambda: connected(path), "it listens") as client:
                counterd.config.write_text("nonsense\n" * 3000)  # a line each
                counterd.send_signal(signal.SIGHUP)
                daemon.wait_until(lambda: int(client.stats()["log_lines_lost"]) > 0, "lines are lost")
                client.acquire("jobs", maximum=1)
                assert counterd.process.poll() is None
                client.release("jobs")
                lost = int(client.stats()["log_lines_lost"])
            # It ends, although a thread of it waits for the pipe.
            assert counterd.stop() == 0
            os.close(writing)
            writing = -1
            assert 1500 < lost < 3000
            # What was written is whole lines but for the last.
            lines = os.read(reading, 65536).decode().split("\n")
            assert all(re.match(r"2[0-9-]{9}T[0-9:.]{12}Z (INFO |ERROR|WARNING) ", line) for line in lines[:-1])
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def test_logging_goes_on_when_the_log_is_read_again(tmp_path: Path, short_path: Path) -> None:
    path = str(short_path / "s")
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    written = bytearray()

    def told() -> int:
        """The number of lines that the log reports as lost so far."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(reading, 65536):
                written.extend(data)
        return sum(map(int, re.findall(rb"WARNING log lines were lost lines=([0-9]+)\n", written)))

    try:
        settings = {"counter.socket": path, "counter.bind": " "}
        with daemon.running(tmp_path / "d", settings, stderr=writing) as counterd:
            os.close(writing)
            writing = -1
            with daemon.wait_until(lambda: connected(path), "it listens") as client:
                counterd.config.write_text("nonsense\n" * 3000)
                counterd.send_signal(signal.SIGHUP)
                daemon.wait_until(lambda: int(client.stats()["log_lines_lost"]) > 0, "lines are lost")
                lost = int(client.stats()["log_lines_lost"])
                daemon.wait_until(lambda: told() == lost, f"it is told that {lost} lines were lost")
                counterd.send_signal(signal.SIGUSR1)
                daemon.wait_until(lambda: told() == lost and b"stats of counter" in written, "statistics are logged")
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


def test_the_daemon_serves_after_its_log_is_closed(tmp_path: Path, short_path: Path) -> None:
    """EPIPE for each line, and SIGPIPE for none."""
    path = str(short_path / "s")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        settings = {"counter.socket": path, "counter.bind": " "}
        with (
            daemon.running(tmp_path / "d", settings, stderr=writing) as counterd,
            daemon.wait_until(lambda: connected(path), "it listens") as client,
        ):
            daemon.wait_until(lambda: int(client.stats()["log_lines_lost"]) >= 2, "lines are lost")
            counterd.send_signal(signal.SIGUSR1)
            daemon.wait_until(lambda: int(client.stats()["log_lines_lost"]) >= 3, "another line is lost")
            assert client.acquire("jobs", maximum=1) == 1
    finally:
        os.close(writing)


def connected(path: str) -> Client | None:
    """Returns a client that was answered: before that, a signal can come too early."""
    with contextlib.suppress(ConnectionLost):
        client = Client(path=path, timeout=daemon.PATIENCE)
        client.noop()
        return client
    return None


def test_log_lines_in_json(start: Callable[..., daemon.Daemon], tmp_path: Path) -> None:
    counterd = start({"log.format": "json", "log.level": "debug", "counter.max_connections": 1})
    with counterd.client() as client:
        client.noop()
        for _ in range(3):
            with contextlib.suppress(ConnectionLost), counterd.client() as refused:
                refused.noop()
        counterd.config.write_text('counter.enable = "perhaps\n')
        counterd.send_signal(signal.SIGHUP)
        counterd.wait_for_log("not reloaded")
        counterd.send_signal(signal.SIGUSR1)
        counterd.wait_for_log("stats of counter")
    assert counterd.stop() == 0
    records = [json.loads(line) for line in counterd.log]
    assert len(records) >= 8
    for record in records:
        assert list(record)[:3] == ["ts", "level", "msg"]
        assert re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}\.[0-9]{3}Z", record["ts"])
        assert record["level"] in ("debug", "info", "warning", "error")
    assert {"debug", "info", "warning", "error"} == {record["level"] for record in records}
    (ready,) = (record for record in records if record["msg"].startswith("ready"))
    assert ready["pid"] == counterd.pid
    assert {record["cause"] for record in records if "cause" in record} == {"rejected:max_connections"}


def test_bytes_from_peers_are_not_logged(
    start: Callable[..., daemon.Daemon], capfd: pytest.CaptureFixture[str]
) -> None:
    """Names may be secrets of the application."""
    counterd = start({"log.level": "debug"})
    with counterd.client() as client:
        client.acquire("s3cr3t-name", maximum=1)
        client.dump()
    with counterd.connect() as connection:
        connection.sendall(b"s3cr3t-name" * 10)
        assert connection.recv(100)
    counterd.stop()
    assert not counterd.lines("s3cr3t")
    assert "s3cr3t" not in "".join(capfd.readouterr())


def test_a_refused_connection_is_logged_with_the_limit(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.max_connections": 2, "counter.max_connections_per_address": 1})
    with counterd.client() as client:
        client.noop()
        with counterd.connect() as refused:
            assert refused.recv(1) == b""
        line = counterd.wait_for_log("WARNING connection refused: 127.0.0.1 has 1 open")
        assert 'protocol=counter limit="counter.max_connections_per_address = 1" cause=rejected:per_address' in line
        counterd.reload({"counter.max_connections": 1})
        with counterd.connect() as refused:
            assert refused.recv(1) == b""
        line = counterd.wait_for_log("WARNING connection refused: 1 connections are open")
        assert 'protocol=counter limit="counter.max_connections = 1" cause=rejected:max_connections' in line


def test_the_debug_level_logs_connections(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"log.level": "debug"})
    with counterd.client() as client:
        client.noop()
        opened = counterd.wait_for_log("DEBUG connection opened")
        client.noop()
    closed = counterd.wait_for_log("DEBUG connection closed")
    found = re.search(r" id=(counter-[0-9]+-[0-9]+) peer=(127\.0\.0\.1:[0-9]+)$", opened)
    assert found
    assert closed.endswith(f" id={found[1]} peer={found[2]} requests=2")
    counterd.reload({})
    counterd.stats()
    assert len(counterd.lines("DEBUG connection")) == 2
    counterd.reload({"log.level": "debug"})
    with counterd.client() as client:
        client.noop()
        counterd.wait_for_log("DEBUG connection opened", 2)
