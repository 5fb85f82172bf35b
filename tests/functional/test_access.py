"""Which addresses and users may connect, and the owner of the socket's file: as configured, and after a reload."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.counter import wire
from kit import daemon, peers

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable
    from pathlib import Path


# By protocol: a request, and its reply.
ASKED = {
    "counter": (wire.noop(1), wire.frame(0, 1, magic=0x91)),
    "beanstalk": (b"list-tube-used\r\n", b"USING default\r\n"),
}
PROTOCOLS = pytest.mark.parametrize("protocol", ASKED)
BEANSTALK = {"beanstalk.enable": "true", "beanstalk.port": "0", "beanstalk.bind": "127.0.0.1"}


def answers(connection: socket.socket, protocol: str) -> bool:
    request, reply = ASKED[protocol]
    with contextlib.suppress(ConnectionError):
        connection.sendall(request)
        return peers.receive(connection, len(reply)) == reply
    return False


def is_served(counterd: daemon.Daemon, unix: bool = False, protocol: str = "counter") -> bool:
    with counterd.connect(unix=unix) as connection:
        return answers(connection, protocol)


@PROTOCOLS
def test_only_allowed_networks_may_connect(protocol: str, start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({**BEANSTALK, f"{protocol}.allow": "192.0.2.0/24 127.0.0.1"})
    counterd.addresses = counterd.served(f"{protocol} listens on")
    with counterd.connect() as connection:
        assert answers(connection, protocol)
        counterd.reload({**BEANSTALK, f"{protocol}.allow": "192.0.2.0/24"})
        assert not is_served(counterd, protocol=protocol)
        line = counterd.wait_for_log("connection refused: 127.0.0.1 is not an allowed address")
        assert line.endswith(f" protocol={protocol} cause=rejected:allow")
        assert answers(connection, protocol)  # who is in stays in
        counterd.reload(BEANSTALK)
        assert is_served(counterd, protocol=protocol)


@PROTOCOLS
def test_only_allowed_users_and_groups_may_connect(
    protocol: str, start: Callable[..., daemon.Daemon], short_path: Path
) -> None:
    me, mine = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name
    other = next(user.pw_uid for user in pwd.getpwall() if user.pw_uid != os.geteuid())
    settings = {**BEANSTALK, f"{protocol}.bind": " ", f"{protocol}.socket": str(short_path / "s")}
    counterd = start(settings | {f"{protocol}.socket_allow": f"user:{other}"})
    counterd.path = str(short_path / "s")
    for allowed, served in (
        (f"user:{other}", False),
        (f"user:{me}", True),
        (f"user:{other} group:{mine}", True),
        ("", True),
    ):
        counterd.reload(settings | {f"{protocol}.socket_allow": allowed})
        assert is_served(counterd, unix=True, protocol=protocol) is served
    assert counterd.wait_for_log(f"connection refused: user {os.geteuid()} ")


@pytest.mark.needs("root")
def test_the_owner_and_mode_of_the_socket_file(start: Callable[..., daemon.Daemon], short_path: Path) -> None:
    path, nobody = short_path / "s", pwd.getpwnam("nobody")
    short_path.chmod(0o755)
    counterd = start({"counter.socket": path, "counter.socket_user": "daemon", "counter.socket_mode": "0600"})
    assert (path.stat().st_uid, path.stat().st_gid) == (pwd.getpwnam("daemon").pw_uid, os.getegid())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    counterd.stop()
    start({"counter.socket": path, "counter.socket_group": "daemon", "user": "nobody"})
    assert (path.stat().st_uid, path.stat().st_gid) == (nobody.pw_uid, grp.getgrnam("daemon").gr_gid)


def test_the_limit_of_open_files_bounds_max_connections(start: Callable[..., daemon.Daemon]) -> None:
    few = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (65, 65))"
    counterd = start({"counter.max_connections": 9}, program=daemon.after(few))
    with counterd.client() as client:
        client.noop()
        assert not is_served(counterd)
        assert 'limit="open files of the process"' in counterd.wait_for_log(
            "connection refused: 1 connections are open"
        )
