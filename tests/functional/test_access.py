"""Who may connect, and whose the socket's file is: as configured, and as a reload says."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from typing import TYPE_CHECKING

import pytest

import daemon
from counterd.protocols.counter import wire
from functional import peers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def is_served(counterd: daemon.Daemon, unix: bool = False) -> bool:
    with counterd.connect(unix=unix) as connection, contextlib.suppress(AssertionError, ConnectionError):
        return peers.ask(connection, wire.noop(1)).status == 0
    return False


def test_networks(start: Callable[..., daemon.Daemon]) -> None:
    settings = {"counter.allow": "192.0.2.0/24 127.0.0.1"}
    counterd = start(settings)
    with counterd.client() as client:
        counterd.reload({"counter.allow": "192.0.2.0/24"})
        assert not is_served(counterd)
        line = counterd.wait_for_log("connection refused: 127.0.0.1 is not among the addresses allowed")
        assert line.endswith(" room=counter cause=rejected:allow")
        client.noop()  # who is in stays in
        counterd.reload({})
        assert is_served(counterd)


def test_users_and_groups(start: Callable[..., daemon.Daemon], short_path: Path) -> None:
    me, mine = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name
    settings = {"counter.bind": " ", "counter.socket": str(short_path / "s")}
    counterd = start(settings | {"counter.socket_allow": "user:65534"})
    for allowed, served in (
        ("user:65534", False),
        (f"user:{me}", True),
        (f"user:65534 group:{mine}", True),
        ("", True),
    ):
        counterd.reload(settings | {"counter.socket_allow": allowed})
        assert is_served(counterd, unix=True) is served
    assert counterd.wait_for_log(f"connection refused: user {os.geteuid()} ")


@pytest.mark.needs("root")
def test_whose_the_file_is(start: Callable[..., daemon.Daemon], short_path: Path) -> None:
    path, nobody = short_path / "s", pwd.getpwnam("nobody")
    short_path.chmod(0o755)
    counterd = start({"counter.socket": path, "counter.socket_user": "daemon", "counter.socket_mode": "0600"})
    assert (path.stat().st_uid, path.stat().st_gid) == (pwd.getpwnam("daemon").pw_uid, os.getegid())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    counterd.stop()
    start({"counter.socket": path, "counter.socket_group": "daemon", "user": "nobody"})
    assert (path.stat().st_uid, path.stat().st_gid) == (nobody.pw_uid, grp.getgrnam("daemon").gr_gid)


def test_the_limit_that_open_files_are(start: Callable[..., daemon.Daemon]) -> None:
    few = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (65, 65))"
    counterd = start({"counter.max_connections": 9}, program=daemon.after(few))
    with counterd.client() as client:
        client.noop()
        assert not is_served(counterd)
        assert 'limit="open files of the process"' in counterd.wait_for_log(
            "connection refused: 1 connections are open"
        )
