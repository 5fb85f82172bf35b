"""What systemd does for a service: its sockets, its watchdog, and the notifications that it expects."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kit import daemon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def manager(short_path: Path) -> Iterator[socket.socket]:
    """A socket like that of systemd, to which the daemon reports."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(short_path / "notify"))
        listening.settimeout(daemon.PATIENCE)
        yield listening


def passing(*listening: socket.socket, names: str | None = None) -> tuple[str, ...]:
    """The daemon, which gets these sockets as systemd would pass them."""
    code = "import os\nos.environ['LISTEN_PID'] = str(os.getpid())\n"
    code += f"os.environ['LISTEN_FDS'] = '{len(listening)}'\n"
    code += "" if names is None else f"os.environ['LISTEN_FDNAMES'] = {names!r}\n"
    # Out of the way first: one of them may be where another has to go.
    code += f"high = [os.dup2(fd, 100 + fd) for fd in {[one.fileno() for one in listening]}]\n"
    code += "for number, fd in enumerate(high, 3):\n    os.dup2(fd, number)\n    os.close(fd)"
    return daemon.after(code)


def inherit(*sockets: socket.socket) -> None:
    for one in sockets:
        one.set_inheritable(True)


@pytest.fixture
def run_with(start: Callable[..., daemon.Daemon], monkeypatch: pytest.MonkeyPatch) -> Callable[..., daemon.Daemon]:
    """Starts the daemon with sockets."""
    real = daemon.subprocess.Popen

    def run_with(settings: dict[str, object], *listening: socket.socket, names: str | None = None) -> daemon.Daemon:
        inherit(*listening)
        fds = [one.fileno() for one in listening]
        monkeypatch.setattr(daemon.subprocess, "Popen", lambda *args, **more: real(*args, **more, pass_fds=fds))
        try:
            return start(settings, program=passing(*listening, names=names))
        finally:
            monkeypatch.undo()
            for one in listening:
                one.close()

    return run_with


def test_sockets_opened_by_systemd_are_used(run_with: Callable[..., daemon.Daemon], short_path: Path) -> None:
    """Clients that connect before the daemon runs are served by it, and it does not remove the files."""
    path = short_path / "s"
    tcp = socket.create_server(("127.0.0.1", 0))
    unix = socket.socket(socket.AF_UNIX)
    unix.bind(str(path))
    unix.listen()
    with socket.create_connection(tcp.getsockname()) as early:
        counterd = run_with({"counter.socket": short_path / "not"}, tcp, unix, names="counter.tcp:counter.unix")
        port = early.getpeername()[1]
        assert counterd.lines(rf"counter listens on 127.0.0.1:{port}, unix:{path}$")
        early.settimeout(daemon.PATIENCE)
        early.sendall(bytes.fromhex("900000000000000000000000"))
        assert early.recv(100)
        with counterd.connect() as connected:
            assert connected.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        counterd.reload({"counter.max_connections": 7})
        assert not counterd.lines("restart")
        assert counterd.stats()["connections_max"] == 7
    assert counterd.stop() == 0
    assert path.exists()
    assert not (short_path / "not").exists()


def test_a_passed_socket_without_a_name_is_matched_by_address(run_with: Callable[..., daemon.Daemon]) -> None:
    tcp = socket.create_server(("127.0.0.1", 0))
    port = tcp.getsockname()[1]
    counterd = run_with({"counter.port": port, "throttr.enable": "true", "throttr.port": 0}, tcp)
    assert counterd.lines(f"counter listens on 127.0.0.1:{port}$")
    counterd.reload({"counter.port": 0, "throttr.enable": "true", "throttr.port": 0})
    assert not counterd.lines("not reloaded|restart")
    assert counterd.stats()


@pytest.mark.parametrize(
    ("settings", "address", "names", "problem"),
    [
        ({}, "127.0.0.1", None, "LISTEN_FDS: socket 0 listens on 127.0.0.1:{port}, which no protocol is"),
        ({}, "127.0.0.1", "throttr", "LISTEN_FDS: a socket was passed for throttr, but throttr.enable is false"),
        ({}, "0.0.0.0", "counter", "LISTEN_FDS: counter.bind: 0.0.0.0 can be reached from other machines by everybody"),
    ],
)
def test_passed_sockets_that_do_not_fit_are_errors(
    tmp_path: Path, settings: dict[str, object], address: str, names: str | None, problem: str
) -> None:
    config = tmp_path / "x.conf"
    config.write_text(daemon.config_text(settings))
    with socket.create_server((address, 0)) as tcp:
        inherit(tcp)
        result = daemon.subprocess.run(
            [*passing(tcp, names=names), "-c", str(config)],
            pass_fds=[tcp.fileno()],
            capture_output=True,
            text=True,
            timeout=daemon.PATIENCE,
            env=daemon.environment(),
            check=False,
        )
        assert result.returncode == 2
        (line,) = result.stderr.splitlines()
        assert line.startswith(problem.format(port=tcp.getsockname()[1]))


def fill(manager: socket.socket) -> None:
    """Fills the queue of the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, contextlib.suppress(BlockingIOError):
        sender.setblocking(False)
        while True:
            sender.sendto(b"X=1", manager.getsockname())


def test_a_notification_is_repeated_if_systemd_had_no_room(
    start: Callable[..., daemon.Daemon], manager: socket.socket
) -> None:
    """Without READY=1 systemd would end the daemon after a while, although it serves."""
    fill(manager)
    counterd = start(env={"NOTIFY_SOCKET": manager.getsockname()})
    counterd.wait_for_log("ready: counterd")
    received(manager, "READY=1")
    fill(manager)
    holder = counterd.connect()  # has a second to close its side
    counterd.send_signal(signal.SIGTERM)
    counterd.wait_for_log("stopping")
    received(manager, "STOPPING=1")
    holder.close()
    assert counterd.ended() == 0


def received(manager: socket.socket, wanted: str) -> list[str]:
    """Receives messages up to the wanted state."""
    found: list[str] = []
    while wanted not in found:
        found += manager.recv(4096).decode().split("\n")
    return found


# Its loop is stuck for a while, and nothing else of it is.
STICKS = "import signal, sys, time\nsignal.signal(signal.SIGUSR2, lambda *_: time.sleep(0.6))"


def test_a_stuck_loop_does_not_feed_the_watchdog(start: Callable[..., daemon.Daemon], manager: socket.socket) -> None:
    program = (sys.executable, "-c", f"{STICKS}\nfrom counterd.cli.daemon import main\nsys.exit(main(sys.argv[1:]))")
    counterd = start(env={"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "200000"}, program=program)
    received(manager, "READY=1")
    for _ in range(3):
        received(manager, "WATCHDOG=1")
    counterd.send_signal(signal.SIGUSR2)
    gaps, last = [], time.monotonic()
    while not gaps or max(gaps) < 0.4:
        received(manager, "WATCHDOG=1")
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    assert max(gaps) > 0.5
    received(manager, "WATCHDOG=1")


def test_reloads_and_stops_are_notified(start: Callable[..., daemon.Daemon], manager: socket.socket) -> None:
    counterd = start({"drain.timeout": 20}, env={"NOTIFY_SOCKET": manager.getsockname()})
    assert "STATUS=serving counter" in received(manager, "STATUS=serving counter")
    before = time.monotonic_ns() // 1000
    for change in ("", "nonsense\n"):  # also if nothing came of it
        counterd.config.write_text(counterd.config.read_text() + change)
        counterd.send_signal(signal.SIGHUP)
        states = received(manager, "READY=1")
        (moment,) = (int(state.partition("=")[2]) for state in states if state.startswith("MONOTONIC_USEC="))
        assert states[0] == "RELOADING=1"
        assert before <= moment <= time.monotonic_ns() // 1000
    counterd.wait_for_log(": nothing changed")
    counterd.wait_for_log("not reloaded")
    counterd.stop()
    assert received(manager, "STOPPING=1")[-1] == f"EXTEND_TIMEOUT_USEC={25_000_000}"
