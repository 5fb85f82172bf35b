"""Runs the real counterd for the tests: its own process, real sockets, a real configuration file.

The daemon listens on a free port of the loopback interface and is ended by its pid. Its exit status is checked.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from counterd.client import Client
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MODULE = (sys.executable, "-m", "counterd")
SCRIPT = Path(sys.executable).parent / "counterd"

POLL = 0.01  # seconds

# One address, so that port 0 finds a free port. A value of "" omits the key from the file.
DEFAULTS = {"counter.enable": "true", "counter.port": "0", "counter.bind": "127.0.0.1"}

T = TypeVar("T")


class Address(NamedTuple):
    """The TCP address of a protocol."""

    host: str
    port: int


def wait_until(condition: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """Polls a condition until it is true. Returns its value."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(POLL)
    return result


def config_text(settings: Mapping[str, Any]) -> str:
    """Returns a configuration file with the settings merged into DEFAULTS, one line each, in order."""
    merged = {**DEFAULTS, **settings}
    return "".join(f"{key} = {value}\n" for key, value in merged.items() if value != "")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the daemon's environment, without variables that a service manager or CI has set for the tests."""
    kept = {key: value for key, value in os.environ.items() if key not in ("NOTIFY_SOCKET", "PYTHONPATH")}
    return {**kept, **(extra or {})}


def after(code: str) -> tuple[str, ...]:
    """Returns a command that runs Python code and then executes counterd in the same process."""
    return (sys.executable, "-c", f"{code}\nimport os, sys\nos.execv(sys.argv[1], sys.argv[1:])", *MODULE)


def within(code: str) -> tuple[str, ...]:
    """Returns a command that runs Python code and then counterd's main() in the same interpreter."""
    return (
        sys.executable,
        "-c",
        f"{code}\nfrom counterd.cli.daemon import main\nimport sys\nsys.exit(main(sys.argv[1:]))",
    )


def without_thread(name: str) -> tuple[str, ...]:
    """Returns a counterd that cannot start the thread of this name, as with a limit of processes."""
    return within(f"""\
import threading
start = threading.Thread.start
def refuse(thread):
    if thread.name == {name!r}:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refuse""")


def run(*arguments: str | Path, program: Sequence[str | Path] = MODULE) -> subprocess.CompletedProcess[str]:
    """Runs the command until it ends."""
    return subprocess.run(
        [*program, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(),
        cwd="/",
        check=False,
    )


class Daemon:
    """A running counterd.

    config: its configuration file. log: the lines of its stderr so far. addresses: TCP addresses of its first protocol.
    path: the Unix socket of that protocol, if it has one. exit_status: the expected one.
    """

    def __init__(self, process: subprocess.Popen[bytes], config: Path, exit_status: int = 0) -> None:
        self.process = process
        self.pid = process.pid
        self.config = config
        self.exit_status = exit_status
        self.log: list[str] = []
        self.addresses: list[Address] = []
        self.path: str | None = None
        self._reader: threading.Thread | None = None
        if process.stderr is not None:
            self._reader = threading.Thread(target=self._read)
            self._reader.start()

    # ---- log and statistics ----

    def wait_for_log(self, pattern: str, count: int = 1, seconds: float = PATIENCE) -> str:
        """Waits for the count-th line that matches the pattern, and returns it."""

        def found() -> str | None:
            lines = self.lines(pattern)
            assert len(lines) >= count or self.process.poll() is None, f"it ended: {self.log}"
            return lines[count - 1] if len(lines) >= count else None

        try:
            return wait_until(found, f"line {count} with {pattern!r}", seconds) or ""
        except AssertionError as error:
            raise AssertionError(f"{error}; the log has {self.log}") from None

    def lines(self, pattern: str) -> list[str]:
        """Returns the lines so far that match the pattern."""
        return [line for line in list(self.log) if re.search(pattern, line)]

    def stats(self) -> dict[str, int]:
        """Returns the figures of Stats that are numbers. Opens a connection for it."""
        with self.client() as client:
            return numbers(client.stats())

    def wait_for_stats(self, seconds: float = PATIENCE, **wanted: int) -> dict[str, int]:
        """Waits until the figures have these values. In a keyword, `__` stands for the colon of a name."""
        names = {name.replace("__", ":"): value for name, value in wanted.items()}
        with self.client() as client:
            figures: dict[str, int] = {}

            def equal() -> bool:
                figures.update(numbers(client.stats()))
                return all(figures[name] == value for name, value in names.items())

            try:
                wait_until(equal, f"stats {names}", seconds)
            except AssertionError as error:
                seen = {name: figures[name] for name in names}
                raise AssertionError(f"{error}; they are {seen}, the log has {self.log}") from None
            return figures

    def logged_stats(self, protocols: Sequence[str], seconds: float = PATIENCE) -> dict[str, str]:
        """Makes the daemon log its figures. Returns the line of each protocol."""
        before = {name: len(self.lines(f"stats of {name}")) for name in protocols}
        self.send_signal(signal.SIGUSR1)
        return {name: self.wait_for_log(f"stats of {name}", count + 1, seconds) for name, count in before.items()}

    # ---- its process ----

    def cpu(self) -> float:
        """Returns the CPU seconds of all its threads, which do not depend on other load."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def rss(self) -> int:
        """Returns its resident memory in bytes."""
        return int(self.status("VmRSS").split()[0]) * 1024

    def status(self, field: str) -> str:
        """Returns a field of /proc/PID/status."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{field}:"))

    def descriptors(self) -> int:
        """Returns how many descriptors it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, seconds: float = PATIENCE) -> int:
        """Waits until it has ended. Returns its exit status."""
        status = self.process.wait(seconds)
        if self._reader is not None:
            self._reader.join(PATIENCE)
            assert not self._reader.is_alive(), "somebody else keeps its stderr open"
        return status

    def kill(self) -> None:
        """Kills it with SIGKILL, and waits until it and its child processes have ended."""
        self.exit_status = -signal.SIGKILL
        self.stop(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Sends a signal that ends it, and waits. Returns its exit status."""
        self.send_signal(number)
        return self.ended()

    def reload(self, settings: Mapping[str, Any]) -> None:
        """Writes another configuration file, and waits until the daemon has reloaded it."""
        count = len(self.lines("reloaded"))
        self.config.write_text(config_text(settings))
        self.send_signal(signal.SIGHUP)
        self.wait_for_log("reloaded", count + 1)

    # ---- connections to it ----

    @property
    def address(self) -> Address:
        return self.addresses[0]

    def client(self, timeout: float = PATIENCE) -> Client:
        """Returns a connected client: over TCP if possible, else over the Unix socket."""
        where = self.address if self.addresses else ()
        client = Client(*where, path=None if where else self.path, timeout=timeout)
        client.fileno()  # connects
        return client

    def connect(self, *, unix: bool = False, receive_buffer: int = 0) -> socket.socket:
        """Returns a connected socket. receive_buffer: bytes; a small one soon blocks the daemon; 0 is the default."""
        family, address = (socket.AF_UNIX, self.path) if unix else (socket.AF_INET, self.address)
        connected = socket.socket(family, socket.SOCK_STREAM)
        try:
            connected.settimeout(PATIENCE)
            if receive_buffer:
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            connected.connect(address)
        except BaseException:
            connected.close()
            raise
        return connected

    # ---- inside ----

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.log.append(line.decode().rstrip("\n"))

    def wait_until_ready(self) -> None:
        """Waits for the line "ready", and reads the addresses from an earlier line."""
        self.wait_for_log(r"\bready\b")
        self.addresses = self.served("listens on")

    def address_of(self, port: str) -> Address:
        """Returns the first TCP address of a protocol, of another port such as smockron-control, or of admin."""
        return self.served(rf"\b{port} listens on")[0]

    def served(self, pattern: str) -> list[Address]:
        """Returns the addresses in the first line of the log that matches the pattern."""
        places = re.findall(r"(?<=[ ,])(?:\[[0-9a-f:]+\]|[0-9.]+):[0-9]+", self.lines(pattern)[0])
        split = (place.rsplit(":", 1) for place in places)
        return [Address(host.strip("[]"), int(port)) for host, port in split]


@contextlib.contextmanager
def running(
    directory: Path,
    settings: Mapping[str, Any] | None = None,
    *,
    text: str | None = None,
    arguments: Sequence[str] = (),
    program: Sequence[str | Path] = MODULE,
    status: int = 0,
    env: Mapping[str, str] | None = None,
    stderr: int = subprocess.PIPE,
) -> Iterator[Daemon]:
    """Runs a counterd during the block, ends it with SIGTERM if necessary, and checks its exit status.

    settings: merged into DEFAULTS. text: the whole configuration file instead. arguments: added to the command line.
    stderr: a descriptor in place of `log`; then this does not wait until the daemon is ready.
    """
    directory.mkdir(exist_ok=True)
    config = directory / "counterd.conf"
    config.write_text(config_text(settings or {}) if text is None else text)
    with started([*program, "-c", str(config), *arguments], config, status=status, env=env, stderr=stderr) as daemon:
        daemon.path = (settings or {}).get("counter.socket")
        if stderr == subprocess.PIPE:
            daemon.wait_until_ready()
        yield daemon


@contextlib.contextmanager
def started(
    command: Sequence[str | Path],
    config: Path = Path(),
    *,
    status: int = 0,
    env: Mapping[str, str] | None = None,
    stderr: int = subprocess.PIPE,
) -> Iterator[Daemon]:
    """Runs a program during the block, as running() does, with its stderr as the log."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr, env=environment(env), cwd="/")
    daemon = Daemon(process, config, status)
    try:
        yield daemon
        if process.poll() is None:
            process.terminate()
        assert daemon.ended() == daemon.exit_status, daemon.log
    finally:
        if process.poll() is None:
            process.kill()
        daemon.ended()


def numbers(figures: Mapping[str, str]) -> dict[str, int]:
    """Returns the figures that are numbers."""
    return {name: int(value) for name, value in figures.items() if value.isdecimal()}
