"""An operator's day with the units of deploy/systemd; the test plays systemd at the level of its sockets.

It opens the sockets of counterd.socket and passes them on, receives READY=1 and the watchdog's messages, runs the
lines of ExecReload, stops with KillSignal, and starts again while clients wait. The command lines and numbers are
read from the units."""

from __future__ import annotations

import queue
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from counterd.client import Client
from counterd.control.config.keys import settings_for
from kit import daemon
from kit.needs import has_ipv6

if TYPE_CHECKING:
    from collections.abc import Iterator

DEPLOY = Path(__file__).parents[2] / "deploy"
SYSTEMD = DEPLOY / "systemd"
WATCHDOG_US = 400_000  # less than WatchdogSec, so that it need not be waited for
FIRST_PASSED = 3

# As the process that becomes the service: the sockets from descriptor 3 on, and LISTEN_PID, which only it can know.
BECOME = f"""\
import fcntl, os, sys
high = [fcntl.fcntl(int(each), fcntl.F_DUPFD, 100) for each in sys.argv[1].split(",")]
for number, descriptor in enumerate(high, {FIRST_PASSED}):
    os.dup2(descriptor, number)
    os.close(descriptor)
os.environ["LISTEN_PID"] = str(os.getpid())
os.execv(sys.argv[2], sys.argv[2:])
"""


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a unit; each may occur several times."""
    settings: dict[str, list[str]] = {}
    for line in (SYSTEMD / name).read_text("utf-8").splitlines():
        if match := re.fullmatch(r"(\w+)=(.*)", line):
            settings.setdefault(match[1], []).append(match[2])
    return settings


class Systemd:
    """Stands for systemd. said: the messages that the service has sent and no test has asked for yet."""

    def __init__(self, folder: Path, config: Path) -> None:
        self.service = unit("counterd.service")
        self.config = config
        self.said: list[str] = []
        self._clients: list[Client] = []
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.bind(str(folder / "notify"))
        streams = [each for each in unit("counterd.socket")["ListenStream"] if "::" not in each or has_ipv6()]
        self.sockets = [self._listen(folder, each) for each in streams]
        self._heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen_always)
        self._listener.start()

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self._notify.getsockname())
        self._listener.join()
        for each in (*self._clients, self._notify, *self.sockets):
            each.close()

    def _listen_always(self) -> None:
        """Reads messages all the time, as systemd does: a few unread messages of the watchdog would fill the socket."""
        while message := self._notify.recv(4096):
            self._heard.put(message)

    def _listen(self, folder: Path, stream: str) -> socket.socket:
        """Opens a socket of the .socket unit: on a free port, or in the folder."""
        if stream.startswith("/"):
            listening = socket.socket(socket.AF_UNIX)
            listening.bind(str(folder / Path(stream).name))
        else:
            host = stream.rpartition(":")[0].strip("[]")
            listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            listening.bind((host, 0))
        listening.listen()
        return listening

    def command(self, line: str, main_pid: int = 0) -> list[str]:
        """A command line of the unit, with the paths of this installation and configuration."""
        words = shlex.split(line.replace("$MAINPID", str(main_pid)))
        here = {"/opt/counterd/bin/counterd": str(daemon.SCRIPT), "/etc/counterd/counterd.conf": str(self.config)}
        return [here.get(word, word) for word in words]

    def start(self) -> daemon.Daemon:
        (line,) = self.service["ExecStart"]
        descriptors = [each.fileno() for each in self.sockets]
        (name,) = unit("counterd.socket")["FileDescriptorName"]
        process = subprocess.Popen(
            [sys.executable, "-c", BECOME, ",".join(map(str, descriptors)), *self.command(line)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=descriptors,
            env=daemon.environment(
                {
                    "NOTIFY_SOCKET": self._notify.getsockname(),
                    "LISTEN_FDS": str(len(descriptors)),
                    "LISTEN_FDNAMES": ":".join([name] * len(descriptors)),
                    "WATCHDOG_USEC": str(WATCHDOG_US),
                }
            ),
            cwd="/",
        )
        return daemon.Daemon(process, self.config)

    def hear(self, wanted: str) -> list[str]:
        """Waits for a message with a line that begins like this, and returns its lines."""
        deadline = time.monotonic() + daemon.PATIENCE
        while True:
            lines = self._heard.get(timeout=max(deadline - time.monotonic(), 0)).decode().splitlines()
            if any(line.startswith(wanted) for line in lines):
                return lines

    def reload(self, main_pid: int) -> list[subprocess.CompletedProcess[str]]:
        """Does `systemctl reload`: runs one command after the other, until one fails."""
        done = []
        for line in self.service["ExecReload"]:
            command = self.command(line, main_pid)
            done.append(subprocess.run(command, capture_output=True, text=True, check=False))
            if done[-1].returncode:
                break
        return done

    def client(self, number: int) -> Client:
        """Opens a client of one of the sockets, which is closed after the test."""
        address = self.sockets[number].getsockname()
        where = {"path": address} if isinstance(address, str) else {"host": address[0], "port": address[1]}
        self._clients.append(Client(**where, timeout=daemon.PATIENCE))
        return self._clients[-1]


@pytest.fixture
def systemd(short_path: Path, tmp_path: Path) -> Iterator[Systemd]:
    config = tmp_path / "counterd.conf"
    config.write_text("counter.enable = true\n")
    played = Systemd(short_path, config)
    yield played
    played.close()


@pytest.fixture
def service(systemd: Systemd) -> Iterator[daemon.Daemon]:
    started = systemd.start()
    yield started
    if started.process.poll() is None:
        started.process.kill()
    started.ended()


@pytest.mark.needs("kill")
def test_an_operators_day(systemd: Systemd, service: daemon.Daemon) -> None:
    systemd.hear("READY=1")
    held = systemd.client(0)
    held.acquire("jobs", 2, maximum=3)
    for number in range(1, len(systemd.sockets)):
        with systemd.client(number) as client:
            assert client.get("jobs") == 2
    systemd.hear("WATCHDOG=1")

    # A file with a mistake: systemctl says so, and the daemon hears nothing of it; told nevertheless, it goes on.
    systemd.config.write_text("counter.enable = true\ncounter.max_conections = 1\n")
    (check,) = systemd.reload(service.pid)
    assert check.returncode == 2
    assert "counter.max_connections" in check.stderr
    service.send_signal(signal.SIGHUP)
    service.wait_for_log("not reloaded")
    systemd.hear("READY=1")

    systemd.config.write_text("counter.enable = true\ncounter.max_connections = 7\n")
    assert [done.returncode for done in systemd.reload(service.pid)] == [0, 0]
    reloading = systemd.hear("RELOADING=1")
    assert re.fullmatch("MONOTONIC_USEC=[0-9]+", reloading[1])
    systemd.hear("READY=1")
    assert held.stats()["connections_max"] == "7"
    assert held.get("jobs") == 2, "what was held is held"

    # Stopped, and started again: the sockets are systemd's, so who comes meanwhile waits.
    service.send_signal(signal.SIGTERM)
    systemd.hear("STOPPING=1")
    held.close()
    assert service.ended() == 0
    waiting = [socket.create_connection(systemd.sockets[0].getsockname()), socket.socket(socket.AF_UNIX)]
    waiting[1].connect(systemd.sockets[-1].getsockname())
    again = systemd.start()
    try:
        systemd.hear("READY=1")
        again.wait_for_log(r"\bready\b")
        with systemd.client(0) as client:
            assert client.stats()["curr_connections"] == str(1 + len(waiting))
    finally:
        for each in waiting:
            each.close()
        assert again.stop() == 0


def healthy(port: int) -> bool:
    """Returns the status of the image's HEALTHCHECK."""
    code = re.search(r'CMD \["python", "-c", "(.*)"\]', (DEPLOY / "container" / "Containerfile").read_text("utf-8"))
    assert code
    command = [sys.executable, "-c", code[1].replace("11216", str(port))]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


def test_the_image_is_healthy_while_it_is_ready(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"admin.enable": "true", "admin.bind": f"127.0.0.1:{port}", "drain.mode": "wait"}
    with daemon.running(tmp_path, settings) as running, running.client() as holder:
        daemon.wait_until(lambda: healthy(port), "a health check that succeeds")
        holder.acquire("jobs", maximum=1)
        running.send_signal(signal.SIGTERM)
        running.wait_for_log("draining: waiting for 1 holding")
        assert not healthy(port), "it drains: a balancer is to send nobody here"
        holder.close()
        assert running.ended() == 0
        assert not healthy(port)


def test_the_timeouts_of_the_unit_are_consistent() -> None:
    service = unit("counterd.service")
    drain = settings_for(())["drain.timeout"].default
    assert int(service["TimeoutStopSec"][0]) > drain
    assert service["KillMode"] == ["mixed"], "the admin process answers while the daemon drains"
    assert int(service["WatchdogSec"][0]) * 1_000_000 > WATCHDOG_US
    assert service["RestartPreventExitStatus"] == ["2"]
    assert service["Type"] == ["notify"]
