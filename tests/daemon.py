"""Runs the real counterd for the tests: a process of its own, real sockets, a real configuration file.

It listens on a free port of the loopback interface, is ended by its pid, and must then exit as the test says.
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
from machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MODULE = (sys.executable, "-m", "counterd")
SCRIPT = Path(sys.executable).parent / "counterd"

POLL = 0.01  # seconds

# One address, so that a free port is found at once; "" leaves a key out of the file.
DEFAULTS = {"counter.enable": "true", "counter.port": "0", "counter.bind": "127.0.0.1"}

T = TypeVar("T")


class Address(NamedTuple):
    """Where a protocol is served over TCP."""

    host: str
    port: int


def wait_until(condition: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    """Asks again and again until the condition is true, and returns what it gave."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(POLL)
    return result


def config_text(settings: Mapping[str, Any]) -> str:
    """A configuration file with these settings over DEFAULTS; a line each, in order."""
    merged = {**DEFAULTS, **settings}
    return "".join(f"{key} = {value}\n" for key, value in merged.items() if value != "")


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the daemon inherits: nothing that a service manager or CI may have set for the tests themselves."""
    kept = {key: value for key, value in os.environ.items() if key not in ("NOTIFY_SOCKET", "PYTHONPATH")}
    return {**kept, **(extra or {})}


def after(code: str) -> tuple[str, ...]:
    """A program that runs the Python code and then becomes counterd, as the same process."""
    return (sys.executable, "-c", f"{code}\nimport os, sys\nos.execv(sys.argv[1], sys.argv[1:])", *MODULE)


def within(code: str) -> tuple[str, ...]:
    """A program that runs the Python code and then counterd's main(), which finds what the code has changed."""
    return (
        sys.executable,
        "-c",
        f"{code}\nfrom counterd.cli.daemon import main\nimport sys\nsys.exit(main(sys.argv[1:]))",
    )


def without_thread(name: str) -> tuple[str, ...]:
    """Counterd where the system gives it no thread of that name, as if a limit of processes were reached."""
    return within(f"""\
import threading
start = threading.Thread.start
def refuse(thread):
    if thread.name == {name!r}:
        raise RuntimeError("can't start new thread")
    start(thread)
threading.Thread.start = refuse""")


def run(*arguments: str | Path, program: Sequence[str | Path] = MODULE) -> subprocess.CompletedProcess[str]:
    """Runs the command until it ends by itself."""
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
    """A counterd that runs.

    process, pid: it. config: its configuration file. log: the lines of its stderr so far. addresses: where it listens,
    with the first of its rooms. path: that room's Unix socket, if it has one. exit_status: what it has to end with.
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

    # ---- what it says ----

    def wait_for_log(self, pattern: str, count: int = 1, seconds: float = PATIENCE) -> str:
        """Waits for the count-th line that the pattern is found in, and returns it."""

        def found() -> str | None:
            lines = self.lines(pattern)
            assert len(lines) >= count or self.process.poll() is None, f"it ended: {self.log}"
            return lines[count - 1] if len(lines) >= count else None

        try:
            return wait_until(found, f"line {count} with {pattern!r}", seconds) or ""
        except AssertionError as error:
            raise AssertionError(f"{error}; the log has {self.log}") from None

    def lines(self, pattern: str) -> list[str]:
        """The lines so far that the pattern is found in."""
        return [line for line in list(self.log) if re.search(pattern, line)]

    def stats(self) -> dict[str, int]:
        """The figures it answers to Stats, without those that are not numbers. Takes a connection of its own."""
        with self.client() as client:
            return numbers(client.stats())

    def wait_for_stats(self, seconds: float = PATIENCE, **wanted: int) -> dict[str, int]:
        """Waits until these figures are as given. In a keyword, `__` stands for the colon of a name."""
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

    def logged_stats(self, rooms: Sequence[str], seconds: float = PATIENCE) -> dict[str, str]:
        """By room, the line with what only it knows of itself."""
        before = {room: len(self.lines(f"stats of {room}")) for room in rooms}
        self.send_signal(signal.SIGUSR1)
        return {room: self.wait_for_log(f"stats of {room}", count + 1, seconds) for room, count in before.items()}

    # ---- its process ----

    def cpu(self) -> float:
        """Seconds of a processor that it has taken, however busy the machine is: all its threads."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def rss(self) -> int:
        """Bytes of memory it has."""
        return int(self.status("VmRSS").split()[0]) * 1024

    def status(self, field: str) -> str:
        """A field of /proc/PID/status."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{field}:"))

    def descriptors(self) -> int:
        """How many descriptors it has open."""
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def send_signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, seconds: float = PATIENCE) -> int:
        """Waits until it has ended, and returns its exit status."""
        status = self.process.wait(seconds)
        if self._reader is not None:
            self._reader.join(PATIENCE)
            assert not self._reader.is_alive(), "somebody else keeps its stderr open"
        return status

    def kill(self) -> None:
        """With SIGKILL; waits until it has ended, and its processes too."""
        self.exit_status = -signal.SIGKILL
        self.stop(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Asks it to end, and returns its exit status."""
        self.send_signal(number)
        return self.ended()

    def reload(self, settings: Mapping[str, Any]) -> None:
        """Gives it another configuration file and waits until it has been read."""
        count = len(self.lines("reloaded"))
        self.config.write_text(config_text(settings))
        self.send_signal(signal.SIGHUP)
        self.wait_for_log("reloaded", count + 1)

    # ---- connections to it ----

    @property
    def address(self) -> Address:
        return self.addresses[0]

    def client(self, timeout: float = PATIENCE) -> Client:
        """A client, over TCP if that is served."""
        where = self.address if self.addresses else ()
        client = Client(*where, path=None if where else self.path, timeout=timeout)
        client.fileno()  # connects
        return client

    def connect(self, *, unix: bool = False, receive_buffer: int = 0) -> socket.socket:
        """A socket that is connected to it. receive_buffer: bytes, to make its sender wait soon; 0 is the usual."""
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
        """Waits for the line that says so, and learns from the one before where it listens."""
        self.wait_for_log(r"\bready\b")
        self.addresses = self.served("listens on")

    def served(self, pattern: str) -> list[Address]:
        """The addresses in the first line of the log that the pattern is found in."""
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
    """A counterd while the block runs; ended with SIGTERM unless it has ended already. Its exit status is checked.

    settings: over DEFAULTS; text: or the whole file. arguments: more of the command line. stderr: a descriptor in
    place of `log`, and then nobody waits until it is ready.
    """
    directory.mkdir(exist_ok=True)
    config = directory / "counterd.conf"
    config.write_text(config_text(settings or {}) if text is None else text)
    process = subprocess.Popen(
        [*program, "-c", str(config), *arguments],
        stdin=subprocess.DEVNULL,
        stderr=stderr,
        env=environment(env),
        cwd="/",
    )
    daemon = Daemon(process, config, status)
    daemon.path = (settings or {}).get("counter.socket")
    try:
        if stderr == subprocess.PIPE:
            daemon.wait_until_ready()
        yield daemon
        if process.poll() is None:
            process.terminate()
        assert daemon.ended() == daemon.exit_status, daemon.log
    finally:
        if process.poll() is None:
            process.kill()
        daemon.ended()


def numbers(figures: Mapping[str, str]) -> dict[str, int]:
    """The figures that are numbers."""
    return {name: int(value) for name, value in figures.items() if value.isdecimal()}
