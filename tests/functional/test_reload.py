"""SIGHUP and SIGUSR1: which settings change, which do not, and that a mistake changes nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from typing import TYPE_CHECKING

import pytest

from counterd import errors
from counterd.protocols.counter import wire
from kit import daemon, peers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_reload_changes_the_log_level(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    counterd.config.write_text(daemon.config_text({"log.level": "error", "counter.max_connections": 7}))
    counterd.send_signal(signal.SIGHUP)
    counterd.wait_for_stats(connections_max=7)
    counterd.send_signal(signal.SIGUSR1)
    counterd.stats()
    counterd.reload({"log.level": "debug"})
    assert not counterd.lines("stats of")
    assert len(counterd.lines("reloaded")) == 1
    counterd.send_signal(signal.SIGUSR1)
    counterd.wait_for_log("stats of")


def test_a_reload_changes_the_log_format(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    counterd.reload({"log.format": "json"})
    record = json.loads(counterd.lines("reloaded")[0])
    assert (record["level"], record["msg"]) == ("info", f"reloaded {counterd.config}: log.format")


def test_a_reload_changes_max_connections(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.max_connections": 5})
    with counterd.client() as first, counterd.client() as second:
        first.noop()
        second.noop()
        counterd.reload({"counter.max_connections": 1})
        assert counterd.lines(r"reloaded .*: counter\.max_connections$")
        assert first.stats()["connections_max"] == "1"
        with counterd.connect() as third:
            assert peers.ends(third)
        second.noop()  # who is in stays in
        counterd.reload({"counter.max_connections": 3})
        with counterd.client() as third:
            third.noop()


def test_a_reload_changes_listener_keys(start: Callable[..., daemon.Daemon]) -> None:
    both = {"throttr.enable": "true", "throttr.port": 0, "throttr.bind": "127.0.0.1", "throttr.max_connections": 9}
    counterd = start({**both, "listener.max_connections": 5, "counter.max_connections": ""})
    assert counterd.stats()["connections_max"] == 5
    counterd.reload({**both, "listener.max_connections": 6, "listener.socket_mode": "600"})
    assert counterd.stats()["connections_max"] == 6
    assert counterd.lines(r": listener\.max_connections$")
    assert len(counterd.lines(rf"WARN.* {counterd.config}:9: listener\.socket_mode needs a restart to change$")) == 1
    assert len(counterd.lines("needs a restart")) == 1
    counterd.reload({**both, "listener.max_connections": 6, "counter.max_connections": 7})
    assert counterd.stats()["connections_max"] == 7
    assert counterd.lines(r": counter\.max_connections$")


def test_a_reload_changes_holdings_per_connection(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    with counterd.client() as client:
        for name in ("a", "b"):
            client.acquire(name, maximum=9)
        counterd.reload({"counter.holdings_per_connection": 2})
        with pytest.raises(errors.OutOfMemory):
            client.acquire("c", maximum=9)
        client.acquire("a", maximum=9)
        counterd.reload({"counter.holdings_per_connection": 3})
        client.acquire("c", maximum=9)
        counterd.reload({})
        client.acquire("d", maximum=9)


def test_a_reload_changes_the_timeouts_of_readers(start: Callable[..., daemon.Daemon]) -> None:
    """Also for existing connections."""
    counterd = start({"counter.user_timeout": 3600})
    with counterd.connect() as holder, counterd.connect(receive_buffer=8192) as connection:
        peers.acquire_many(holder, [b"counter %d" % number for number in range(20_000)])
        connection.sendall(wire.dump(1) * 50)
        counterd.wait_for_stats(stuck_outputs=1)
        counterd.reload({"counter.user_timeout": 1})
        counterd.wait_for_stats(slow_readers=1)


def test_a_reload_changes_drain_timeout(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"drain.timeout": 3600})
    with counterd.connect() as holder, counterd.connect(receive_buffer=8192) as connection:
        peers.acquire_many(holder, [b"counter %d" % number for number in range(20_000)])
        connection.sendall(wire.dump(1) * 50)
        counterd.wait_for_stats(stuck_outputs=1)
        counterd.reload({"drain.timeout": 0})
        assert counterd.stop() == 0


def test_a_reload_without_changes(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    counterd.reload({})
    assert counterd.lines(r"reloaded .*: nothing changed$")
    assert not counterd.lines("WARNING|ERROR")


def test_a_reload_names_settings_that_need_a_restart(start: Callable[..., daemon.Daemon], short_path: Path) -> None:
    counterd = start()
    settings = {"counter.socket": str(short_path / "s"), "counter.buckets": 5, "counter.max_connections": 7}
    counterd.reload(settings)
    assert counterd.lines(rf"WARN.* {counterd.config}:4: counter\.socket needs a restart to change$")
    assert counterd.lines(rf"WARN.* {counterd.config}:5: counter\.buckets needs a restart to change$")
    assert len(counterd.lines("needs a restart")) == 2
    assert counterd.lines(r"reloaded .*: counter\.max_connections$")
    figures = counterd.stats()
    assert (figures["buckets"], figures["connections_max"]) == (1_000_000, 7)
    assert not (short_path / "s").exists()
    counterd.reload(settings)
    assert len(counterd.lines("needs a restart")) == 4  # it still does


def test_a_broken_file_changes_nothing(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.max_connections": 5})
    counterd.config.write_text("counter.enable = true\ncounter.max_connections = 7\nlog.level = loud\nnonsense\n")
    counterd.send_signal(signal.SIGHUP)
    assert counterd.wait_for_log(f"ERROR not reloaded: {counterd.config}:3: log.level: ")
    assert counterd.wait_for_log(f"ERROR not reloaded: {counterd.config}:4: ")
    assert counterd.stats()["connections_max"] == 5
    assert not counterd.lines(" reloaded ")
    counterd.reload({"counter.max_connections": 6})
    assert counterd.stats()["connections_max"] == 6


def test_a_missing_file_changes_nothing(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.max_connections": 5})
    counterd.config.unlink()
    counterd.send_signal(signal.SIGHUP)
    counterd.wait_for_log(f"not reloaded: {counterd.config}: cannot be read")
    assert counterd.stats()["connections_max"] == 5


def test_a_file_replaced_by_a_pipe_does_not_block(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    counterd.config.unlink()
    os.mkfifo(counterd.config)
    counterd.send_signal(signal.SIGHUP)
    counterd.wait_for_log("not reloaded: .*is not a regular file")
    assert counterd.stats()["curr_connections"] == 1


def test_a_reload_without_a_thread_changes_nothing(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start(program=daemon.without_thread("run_in_thread"))
    counterd.send_signal(signal.SIGHUP)
    counterd.wait_for_log("ERROR not reloaded: cannot start a thread: can't start new thread")
    assert counterd.stats()["internal_errors"] == 0
    assert not counterd.lines("internal error")


def test_reloads_run_one_after_the_other(start: Callable[..., daemon.Daemon]) -> None:
    """However fast they come, the last content of the file is in force."""
    counterd = start()
    for number in range(20):
        counterd.config.write_text(daemon.config_text({"counter.max_connections": 10 + number}))
        counterd.send_signal(signal.SIGHUP)
    counterd.wait_for_stats(connections_max=29)
    assert counterd.stats()["internal_errors"] == 0


def test_set_overrides_the_file_in_a_reload(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.max_connections": 5}, arguments=["--set", "counter.max_connections=6"])
    counterd.reload({"counter.max_connections": 7})
    assert counterd.lines("nothing changed")
    assert counterd.stats()["connections_max"] == 6


def test_holdings_outlive_a_reload(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    with counterd.client() as client, counterd.client() as other:
        client.acquire("jobs", 3, maximum=3)
        for level in ("debug", "info", "warning", "info"):
            counterd.config.write_text(counterd.config.read_text() + f"#\nlog.level = {level}\n#")
            counterd.send_signal(signal.SIGHUP)
            assert other.get("jobs") == 3
        client.release("jobs", 3)


def test_sigusr1_logs_the_stats(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start()
    with counterd.client() as client:
        client.acquire("jobs", 3, maximum=3)
        client.stats()
        counterd.send_signal(signal.SIGUSR1)
        line = counterd.wait_for_log("INFO +stats of counter ")
        figures = dict(re.findall(r" ([a-z_:]+)=([0-9]+)", line))
        wanted = {"curr_connections": "1", "holdings": "1", "command:acquire": "1", "pid": str(counterd.pid)}
        assert wanted.items() <= figures.items()
        assert client.stats().keys() - {"version"} <= figures.keys()


def test_the_stats_are_logged_as_numbers_in_json(start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"log.format": "json"})
    counterd.send_signal(signal.SIGUSR1)
    record = json.loads(counterd.wait_for_log("stats of counter"))
    assert record["curr_connections"] == 0
    assert record["pid"] == counterd.pid


def test_a_window_turns_at_a_multiple_of_its_interval(start: Callable[..., daemon.Daemon]) -> None:
    """The only test that has to wait for the clock: the shortest interval is 10 s."""
    interval = 10
    counterd = start()
    counterd.reload({"counter.stats_interval": interval})
    assert counterd.lines(r"reloaded .*: counter\.stats_interval$")
    # A reload within a second of a boundary may be that late for it: keep away from it.
    if (left := interval - time.time() % interval) < 2:
        time.sleep(left + 1.2)
    with counterd.client() as client, counterd.client() as other:
        began = time.time()
        boundary = (began // interval + 1) * interval
        client.acquire("idle", 2, maximum=3)
        client.release("idle", 2)
        client.acquire("held", 3, maximum=3)
        client.release("held", 2)
        assert other.get("idle") == 0
        window = int(other.stats()["window"])
        while time.time() < boundary - 0.2:
            assert other.get("idle") == 0
            time.sleep(0.1)
        assert {entry.name: entry.peak for entry in other.dump()} == {b"idle": 2, b"held": 3}
        while int(other.stats()["window"]) == window:
            assert time.time() < boundary + 2
            time.sleep(0.01)
        assert time.time() >= boundary
        with pytest.raises(errors.NotFound):
            other.get("idle")
        assert other.get("held") == 1
        assert other.dump() == [wire.DumpEntry(b"held", 1, 1, limit=3)]
        assert int(other.stats()["expired"]) == 1
