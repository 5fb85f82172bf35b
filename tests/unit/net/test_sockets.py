"""Listening sockets: which options are set and inherited, and when the file of a Unix socket is replaced."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from counterd.net import sockets
from counterd.net.sockets import BACKLOG, LOCK_SUFFIX, Keepalive, UnixSocket, locked, open_tcp, set_keepalive

if TYPE_CHECKING:
    from collections.abc import Iterator

KEEPALIVE = Keepalive(idle=11, interval=6, count=4, user_timeout=26)
TCP_OPTIONS = {
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE): 1,
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE): 11,
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL): 6,
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT): 4,
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT): 26_000,
    (socket.IPPROTO_TCP, socket.TCP_NODELAY): 1,
}


needs_ipv6 = pytest.mark.needs("ipv6")


@pytest.fixture
def path() -> Iterator[Path]:
    """A path for a socket, as pytest's own directories have names too long for some."""
    with tempfile.TemporaryDirectory(prefix="counterd-") as directory:
        yield Path(directory, "socket")


def options(of: socket.socket) -> dict[tuple[int, int], int]:
    return {key: of.getsockopt(*key) for key in TCP_OPTIONS}


def accept(listening: socket.socket) -> tuple[socket.socket, socket.socket]:
    """Both ends of a new connection."""
    client = socket.socket(listening.family)
    client.connect(listening.getsockname())
    return client, listening.accept()[0]


# ---- TCP ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_accepted_sockets_inherit_the_options(address: str) -> None:
    with open_tcp(address, 0, KEEPALIVE) as listening:
        assert not listening.getblocking()
        assert listening.getsockname()[0] == address
        assert options(listening) == TCP_OPTIONS
        client, accepted = accept(listening)
        with client, accepted:
            assert options(accepted) == TCP_OPTIONS


def test_changed_keepalive_concerns_later_connections() -> None:
    with open_tcp("127.0.0.1", 0, KEEPALIVE) as listening:
        before = accept(listening)
        set_keepalive(listening, Keepalive(idle=100, interval=50, count=2, user_timeout=200))
        after = accept(listening)
        assert options(before[1]) == TCP_OPTIONS
        assert list(options(after[1]).values()) == [1, 100, 50, 2, 200_000, 1]
        for end in (*before, *after):
            end.close()


def test_a_port_in_use_is_refused() -> None:
    """Two daemons on one port would be two limits."""
    with open_tcp("127.0.0.1", 0, KEEPALIVE) as listening:
        port = listening.getsockname()[1]
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT) == 0
        with pytest.raises(OSError, match="Address already in use") as caught:
            open_tcp("127.0.0.1", port, KEEPALIVE)
        assert caught.value.errno == errno.EADDRINUSE


def test_a_port_with_connections_in_time_wait_can_be_used() -> None:
    listening = open_tcp("127.0.0.1", 0, KEEPALIVE)
    port = listening.getsockname()[1]
    client, accepted = accept(listening)
    accepted.close()  # who closes first keeps the port in TIME_WAIT
    client.close()
    listening.close()
    open_tcp("127.0.0.1", port, KEEPALIVE).close()


@needs_ipv6
def test_an_ipv6_socket_is_for_ipv6_only() -> None:
    """So that 0.0.0.0 and :: can be configured together."""
    with open_tcp("0.0.0.0", 0, KEEPALIVE) as four, open_tcp("::", four.getsockname()[1], KEEPALIVE) as six:
        assert six.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match="Cannot assign requested address"):
        open_tcp("192.0.2.1", 0, KEEPALIVE)


@pytest.mark.parametrize("kind", ["tcp", "unix"])
def test_a_burst_of_connections_fits_the_backlog(kind: str, path: Path) -> None:
    """As far as the kernel allows: it cuts the backlog down to net.core.somaxconn."""
    allowed = min(BACKLOG, int(Path("/proc/sys/net/core/somaxconn").read_text("ascii")))
    count = min(allowed, 300)
    listening = open_tcp("127.0.0.1", 0, KEEPALIVE) if kind == "tcp" else UnixSocket(str(path), 0o600).socket
    clients = [socket.socket(listening.family) for _ in range(count)]
    for client in clients:
        client.settimeout(0.5)
        client.connect(listening.getsockname())
    if kind == "tcp":
        info = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32)
        assert struct.unpack_from("I", info, 28)[0] == allowed  # tcpi_sacked: of a listening socket, its backlog
    for end in (*clients, listening):
        end.close()


# ---- Unix -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666, 0o777, 0o000])
def test_a_unix_socket_has_its_mode_whatever_the_umask(mode: int, path: Path) -> None:
    before = os.umask(0o077)
    try:
        unix = UnixSocket(str(path), mode)
        assert os.umask(0o077) == 0o077
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.lstat().st_mode) == mode
    assert not unix.socket.getblocking()
    unix.socket.close()


def test_a_unix_socket_has_its_mode_from_its_creation(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mode that is narrowed later would come when another process may already have connected."""

    def never(*_: object, **__: object) -> None:
        raise AssertionError("chmod")

    monkeypatch.setattr(os, "chmod", never)
    monkeypatch.setattr(Path, "chmod", never)
    before = os.umask(0)
    try:
        UnixSocket(str(path), 0o620).socket.close()
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.lstat().st_mode) == 0o620


def test_a_stale_file_is_taken_over(path: Path) -> None:
    for _ in range(2):
        unix = UnixSocket(str(path), 0o600)
        client, accepted = accept(unix.socket)
        for end in (client, accepted, unix.socket):
            end.close()
    assert path.exists()


def test_the_file_of_a_running_daemon_is_not_taken_over(path: Path) -> None:
    running = UnixSocket(str(path), 0o600)
    with pytest.raises(OSError, match="another process listens") as caught:
        UnixSocket(str(path), 0o600)
    assert caught.value.errno == errno.EADDRINUSE
    assert caught.value.filename == str(path)
    client, accepted = accept(running.socket)
    for end in (client, accepted, running.socket):
        end.close()


def lock_of(path: Path) -> Path:
    return path.with_name(path.name + LOCK_SUFFIX)


@contextlib.contextmanager
def flocked(path: Path) -> Iterator[None]:
    """A process that only holds a lock on a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def test_a_lock_on_the_folder_does_not_prevent_a_start(path: Path) -> None:
    """Each user of the machine who can read the folder can lock it."""
    with flocked(path.parent):
        UnixSocket(str(path), 0o600).socket.close()


def test_the_lock_file_is_private_and_removed_afterwards(path: Path) -> None:
    before = os.umask(0)
    try:
        with locked(path):
            status = lock_of(path).lstat()
    finally:
        os.umask(before)
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o600, os.geteuid())
    assert list(path.parent.iterdir()) == []


def test_a_lock_that_is_never_released_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by another daemon of the same user that was stopped meanwhile."""
    monkeypatch.setattr("counterd.net.sockets.TIMEOUT_S", 0.05)
    lock_of(path).touch(0o600)
    with flocked(lock_of(path)):
        with pytest.raises(OSError, match=f"another process holds the lock {lock_of(path)}") as caught:
            UnixSocket(str(path), 0o600)
        assert caught.value.filename == str(lock_of(path))
        assert not path.exists()
    UnixSocket(str(path), 0o600).socket.close()
    assert not lock_of(path).exists()


def test_a_lock_that_a_killed_daemon_left_is_used_again(path: Path) -> None:
    lock_of(path).touch(0o600)
    UnixSocket(str(path), 0o600).socket.close()
    assert not lock_of(path).exists()


def test_one_daemon_at_a_time_has_the_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although each removes the file: a process that waited for the old file's lock notices that the name leads to
    another."""
    monkeypatch.setattr(sockets, "TIMEOUT_S", 60.0)  # somebody else may have the core
    inside: list[int] = []
    most = []

    def enter(number: int) -> None:
        for _ in range(20):
            with locked(path):
                inside.append(number)
                most.append(len(inside))
                os.sched_yield()
                inside.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(4)))
    assert (max(most), len(most)) == (1, 80)


def test_a_lock_on_a_removed_file_does_not_count(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is replaced between its opening and its locking, as by a daemon that was faster."""
    flock, replaced = fcntl.flock, []

    def slowly(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        if not replaced:
            replaced.append(os.fstat(descriptor).st_ino)
            lock_of(path).rename(path.with_name("old"))

    monkeypatch.setattr(fcntl, "flock", slowly)
    with locked(path):
        assert lock_of(path).lstat().st_ino not in replaced


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("link", "is a symbolic link"),
        ("link to nothing", "is a symbolic link"),
        ("fifo", "is not a regular file"),
        ("directory", "cannot be opened: Is a directory"),
        ("socket", "cannot be opened: No such device or address"),
        ("readable", "can be opened by other users: its mode is 0644"),
    ],
)
def test_a_lock_file_that_others_could_lock_is_refused(kind: str, why: str, path: Path) -> None:
    """The error says why, and the file is left as it was, also what it leads to."""
    lock, target = lock_of(path), path.with_name("target")
    target.write_text("precious")
    if kind.startswith("link"):
        lock.symlink_to(target if kind == "link" else "nothing")
    elif kind == "fifo":
        os.mkfifo(lock, 0o600)
    elif kind == "directory":
        lock.mkdir()
    elif kind == "socket":
        UnixSocket(str(lock), 0o600).socket.close()
    else:
        lock.write_text("precious")
        lock.chmod(0o644)
    before = lock.lstat()
    with pytest.raises(OSError, match=f"its lock file {lock} {why}"):
        UnixSocket(str(path), 0o600)
    assert lock.lstat() == before
    assert target.read_text() == "precious"
    assert not path.exists()
    assert not path.with_name("nothing").exists()


@pytest.mark.needs("root")
def test_a_lock_file_of_another_user_is_refused(path: Path) -> None:
    lock_of(path).touch(0o600)
    os.chown(lock_of(path), 65534, 65534)
    path.parent.chmod(0o755)  # fs.protected_regular is about folders like /tmp
    with pytest.raises(OSError, match="belongs to uid 65534"):
        UnixSocket(str(path), 0o600)
    assert lock_of(path).exists()


def test_a_hard_link_to_a_file_of_ours_loses_only_its_name(path: Path) -> None:
    target = path.with_name("target")
    target.write_text("precious")
    target.chmod(0o600)
    lock_of(path).hardlink_to(target)
    UnixSocket(str(path), 0o600).socket.close()
    assert target.read_text() == "precious"
    assert not lock_of(path).exists()


def test_the_file_of_a_daemon_with_a_full_backlog_is_not_taken_over(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        clients = []
        while True:
            clients.append(socket.socket(socket.AF_UNIX))
            clients[-1].setblocking(False)
            if clients[-1].connect_ex(str(path)) == errno.EAGAIN:
                break
        with pytest.raises(OSError, match="another process listens"):
            UnixSocket(str(path), 0o600)
        for client in clients:
            client.close()
    assert path.exists()


@pytest.mark.parametrize("kind", ["file", "directory", "link to a socket", "link to nothing", "fifo"])
def test_a_file_that_is_no_socket_is_never_removed(kind: str, path: Path) -> None:
    target = path.with_name("target")
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        if kind == "link to a socket":
            UnixSocket(str(target), 0o600).socket.close()
        path.symlink_to(target)
    before = path.lstat()
    with pytest.raises(FileExistsError, match="exists and is not a socket"):
        UnixSocket(str(path), 0o600)
    assert path.lstat() == before
    assert target.exists() == (kind == "link to a socket")


def test_a_socket_of_another_type_is_not_removed(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(path))
        with pytest.raises(OSError, match="wrong type"):
            UnixSocket(str(path), 0o600)
    assert path.exists()


@pytest.mark.parametrize("path", ["/nonexistent/socket", "/tmp/" + "x" * 200])
def test_an_impossible_path_is_an_error_of_the_system(path: str) -> None:
    with pytest.raises(OSError, match=r"No such file|path too long"):
        UnixSocket(path, 0o600)


def test_the_file_is_removed_at_the_end(path: Path) -> None:
    unix = UnixSocket(str(path), 0o600)
    unix.socket.close()
    unix.unlink()
    assert not path.exists()
    unix.unlink()


def test_the_file_of_a_successor_is_left_alone(path: Path) -> None:
    ours = UnixSocket(str(path), 0o600)
    path.rename(path.with_name("ours"))  # its inode stays in use: the successor's is another
    theirs = UnixSocket(str(path), 0o600)
    ours.unlink()
    client, accepted = accept(theirs.socket)
    for end in (client, accepted, ours.socket, theirs.socket):
        end.close()
    theirs.unlink()
    assert not path.exists()


def test_the_owner_of_the_file_can_be_set(path: Path) -> None:
    unix = UnixSocket(str(path), 0o600)
    uid, gid = (12345, 54321) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
    unix.chown(uid, gid)
    status = path.lstat()
    assert (status.st_uid, status.st_gid) == (uid, gid)
    unix.unlink()
    assert not path.exists()
    unix.socket.close()
