"""The Unix socket: served, with its mode, never taken from a running daemon, and removed only if it is still our
own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from counterd.client import Client
from kit import daemon

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def path(short_path: Path) -> Path:
    return short_path / "counterd"


def refused(tmp_path: Path, path: Path) -> str:
    """Starts a daemon that must not come up, and returns its error message."""
    config = tmp_path / "refused.conf"
    config.write_text(daemon.config_text({"counter.socket": path}))
    result = daemon.run("-c", config)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    prefix = f"{config}:4: counter.socket: cannot listen on {path}: "
    assert line.startswith(prefix)
    return line.removeprefix(prefix)


def test_the_unix_socket_is_served_beside_tcp(path: Path, start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.socket": path})
    assert counterd.lines(f"listens on 127.0.0.1:[0-9]+, unix:{path}$")
    with Client(path=path) as client, counterd.client() as other:
        client.acquire("shared", 2, maximum=3)
        assert other.get("shared") == 2
    counterd.wait_for_stats(holdings=0)


def test_the_unix_socket_is_served_alone(path: Path, start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.socket": path, "counter.bind": " "})
    assert counterd.addresses == []
    with Client(path=path) as client:
        assert client.acquire("jobs", maximum=1) == 1


@pytest.mark.parametrize("mode", ["", "0600", "0666", "0777"])
def test_the_socket_file_has_its_mode(mode: str, path: Path, start: Callable[..., daemon.Daemon]) -> None:
    before = os.umask(0o077)
    try:
        start({"counter.socket": path, "counter.socket_mode": mode})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.lstat().st_mode) == int(mode or "0660", 8)


def test_the_longest_path(short_path: Path, start: Callable[..., daemon.Daemon]) -> None:
    path = short_path / ("s" * (106 - len(str(short_path))))
    assert len(str(path)) == 107
    start({"counter.socket": path})
    with Client(path=path) as client:
        client.noop()


def test_the_socket_file_is_removed_at_the_end(path: Path, start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.socket": path})
    assert path.is_socket()
    assert counterd.stop() == 0
    assert not path.exists()


def test_the_socket_of_a_running_daemon_is_not_taken_over(
    path: Path, tmp_path: Path, start: Callable[..., daemon.Daemon]
) -> None:
    start({"counter.socket": path})
    with Client(path=path) as client:
        client.acquire("jobs", maximum=1)
        identity = path.lstat().st_ino
        assert "another process listens" in refused(tmp_path, path)
        assert path.lstat().st_ino == identity
        with Client(path=path) as other:
            assert other.get("jobs") == 1


def test_the_socket_of_a_busy_daemon_is_not_taken_over(path: Path, tmp_path: Path) -> None:
    """Its backlog is full."""
    with contextlib.ExitStack() as stack:
        busy = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        busy.bind(str(path))
        busy.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(str(path))
        assert "another process listens" in refused(tmp_path, path)
        assert path.is_socket()


@pytest.mark.needs("root")
def test_another_user_cannot_prevent_the_start(path: Path, start: Callable[..., daemon.Daemon]) -> None:
    """By locking the folder, which every user can open."""
    path.parent.chmod(0o755)
    code = (
        "import fcntl, os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534);"
        "fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, path.parent]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"\n"
        counterd = start({"counter.socket": path})
        assert counterd.stop() == 0
    assert list(path.parent.iterdir()) == []


def test_a_stale_file_is_replaced(path: Path, start: Callable[..., daemon.Daemon]) -> None:
    """Left by a killed daemon."""
    first = start({"counter.socket": path}, status=-signal.SIGKILL)
    first.process.kill()
    first.ended()
    assert path.is_socket()
    second = start({"counter.socket": path})
    with Client(path=path) as client:
        assert client.stats()["pid"] == str(second.pid)


def test_another_socket_in_its_place_is_kept(path: Path, start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.socket": path})
    path.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(path))
        other.listen()
        assert counterd.stop() == 0
        assert path.is_socket()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.connect(str(path))


def test_a_file_in_its_place_is_kept(path: Path, start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.socket": path})
    path.unlink()
    path.write_text("precious")
    assert counterd.stop() == 0
    assert path.read_text() == "precious"


def test_a_removed_socket_file_is_no_error(path: Path, start: Callable[..., daemon.Daemon]) -> None:
    counterd = start({"counter.socket": path})
    path.unlink()
    assert counterd.stop() == 0
    assert not counterd.lines("ERROR|Traceback")


def test_a_file_is_never_deleted(path: Path, tmp_path: Path) -> None:
    path.write_text("precious")
    assert refused(tmp_path, path) == "exists and is not a socket"
    assert path.read_text() == "precious"


def test_a_directory_is_never_deleted(path: Path, tmp_path: Path) -> None:
    path.mkdir()
    assert refused(tmp_path, path) == "exists and is not a socket"
    assert path.is_dir()


def test_a_link_is_never_deleted(path: Path, tmp_path: Path) -> None:
    """Not even one to a stale socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(str(path.with_name("stale")))
    path.symlink_to("stale")
    assert refused(tmp_path, path) == "exists and is not a socket"
    assert path.is_symlink()
    assert path.is_socket()


def test_the_error_for_a_missing_directory(tmp_path: Path, short_path: Path) -> None:
    assert refused(tmp_path, short_path / "absent" / "counterd") == "No such file or directory"


def test_a_failed_start_leaves_no_socket(path: Path, tmp_path: Path) -> None:
    """Here its port is in use: the file that was created meanwhile is removed."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        config = tmp_path / "a.conf"
        config.write_text(daemon.config_text({"counter.port": other.getsockname()[1], "counter.socket": path}))
        result = daemon.run("-c", config)
    assert result.returncode == 2
    assert "address already in use" in result.stderr
    assert not path.exists()
