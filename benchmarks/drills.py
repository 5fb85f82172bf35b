#!/usr/bin/env python3
"""Operations rehearsed: a real daemon is drained, misconfigured, starved and attacked while clients are at work.

    python benchmarks/drills.py [--only TEXT] [--seconds 3] [--smoke]

drain        in both modes        reload    of files with mistakes      rotation  of the certificate
descriptors  none left            output    nobody reads it, disk full  clock     an hour back, and forth
admin        attacked, killed, stopped

The clients (crowd.py) keep books of what they were granted. In each drill these are compared with what the server says
is held, counter by counter, and after all clients have gone nothing may be held. Exit status: 1 if a promise is not
kept. The daemon is bound to one core and everything else to another; times are for comparing within a run.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import glob
import http.client
import json
import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

sys.path.insert(0, str(Path(__file__).parent))

import trustme

from counterd.client import Client, throttr
from counterd.errors import CounterdError
from crowd import Figures, Handle
from peers import servers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")

PATIENCE = 15.0  # seconds; longer than anything takes that works
POLL_S = 0.005
HOUR_S = 3600
FAKETIME = "/usr/lib/*/faketime/libfaketime.so.1"
SMALL_PIPE = 4096  # bytes: is full soon
QUEUED_LINES = 1024  # that the daemon keeps for whoever reads slowly
RESERVED = 64  # descriptors that the daemon keeps for itself
REPLACED_S = 40.0  # within which an admin process that hangs is replaced


class Report:
    """What is printed, and whether all promises were kept."""

    def __init__(self) -> None:
        self.kept = True

    def title(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def figure(self, what: str, value: object) -> None:
        print(f"  {what:64}{value if isinstance(value, (str, int)) else f'{value:,.2f}':>14}", flush=True)

    def promise(self, what: str, value: object, kept: bool) -> None:
        self.kept &= kept
        print(f"  {what:64}{value!s:>14}  {'kept' if kept else 'NOT KEPT'}", flush=True)

    def load(self, what: str, during: Figures, before: Figures | None = None) -> None:
        """Requests, and what became of them. before: what these are compared with, if they are."""
        self.figure(f"{what}: requests a second", f"{during.rate:,.0f}")
        self.figure(f"{what}: p99, ms", during.p99_ms)
        if before is not None:
            self.figure(f"{what}: requests a second, beside those before", during.rate / before.rate)
            self.figure(f"{what}: p99, beside that before", during.p99_ms / before.p99_ms)
        self.figure(f"{what}: slowest request, ms", during.longest_ms)
        self.nothing_failed(what, during)

    def nothing_failed(self, what: str, figures: Figures) -> None:
        said = "".join(f"\n    {each}" for each in figures.failed[:3])
        self.promise(f"{what}: requests that failed, of {figures.requests + figures.came:,}", f"{len(figures.failed)}{said}",
                     not figures.failed)  # fmt: skip


class Stage:
    """What all drills need: a directory, certificates of one authority, and the options."""

    def __init__(self, directory: Path, options: argparse.Namespace) -> None:
        self.directory = directory
        self.seconds: float = options.seconds
        self.is_smoke: bool = options.smoke
        self.cores = servers.two_cores()
        os.sched_setaffinity(0, {self.cores[1]})
        self.report = Report()
        self.cert = directory / "cert.pem"
        self._authority = trustme.CA()
        self._daemons = 0
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._authority.configure_trust(self.context)

    def issue(self) -> None:
        """Puts a new certificate in the place of the old one, at once."""
        new = self.cert.with_suffix(".new")
        self._authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(new))
        new.replace(self.cert)

    @contextlib.contextmanager
    def daemon(
        self, settings: Mapping[str, str] | None = None, *, environment: Mapping[str, str] | None = None,
        descriptors: int = 0, stderr: int | None = None,
    ) -> Iterator[Daemon]:  # fmt: skip
        """One that runs, with clients at work. descriptors: the limit, if any. stderr: in place of a file."""
        self._daemons += 1
        directory = self.directory / str(self._daemons)
        directory.mkdir()
        self.issue()
        daemon = Daemon(self, directory, settings or {})
        try:
            daemon.start(environment or {}, descriptors, stderr)
            yield daemon
        finally:
            daemon.end()


class Daemon:
    """One that runs. process, crowd: it, and its clients. control: a client of the drill's own, which holds nothing."""

    process: subprocess.Popen[bytes]
    crowd: Handle
    control: Client

    def __init__(self, stage: Stage, directory: Path, settings: Mapping[str, str]) -> None:
        self.stage = stage
        self.path = str(directory / "counter")
        self.log = directory / "log"
        self._admin = str(directory / "admin")
        self._config = directory / "counterd.conf"
        self._settings = {
            "counter.enable": "true", "counter.port": "0", "counter.bind": "127.0.0.1", "counter.socket": self.path,
            "counter.buckets": "10000", "counter.tls.cert": str(stage.cert), "admin.enable": "true",
            "admin.bind": f"unix:{self._admin}", "drain.timeout": "30", **settings,
        }  # fmt: skip
        self._ending: list[Callable[[], object]] = []

    def start(self, environment: Mapping[str, str], descriptors: int, stderr: int | None) -> None:
        self.write()
        core, _ = self.stage.cores
        limit = ["prlimit", f"--nofile={descriptors}"] if descriptors else []
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*limit, "taskset", "--cpu-list", str(core), sys.executable, "-m", "counterd", "-c", str(self._config)],
                stdin=subprocess.DEVNULL, stderr=log if stderr is None else stderr, start_new_session=True,
                env={**os.environ, **environment},
            )  # fmt: skip
        self._ending.append(self._stop)
        self.addresses = wait_until(self._served, "it is up")
        self.crowd = Handle(self.path, self.port("counter"), self.stage.context)
        self._ending.append(self.crowd.end)
        self.control = Client(path=self.path)
        self._ending.append(self.control.close)

    def end(self) -> None:
        for step in reversed(self._ending):
            step()

    def write(self, **changes: str) -> None:
        """Its configuration file. In a keyword, `__` stands for the dot of a key."""
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        self._config.write_text("".join(f"{key} = {value}\n" for key, value in {**self._settings, **changed}.items()))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def reload(self, word: str) -> None:
        """Has it read its file again, and waits for a line with that word."""
        before = self.lines(word)
        self.signal(signal.SIGHUP)
        wait_until(lambda: len(self.lines(word)) > len(before), f"a line with {word!r}")

    def lines(self, word: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if word in line]

    def port(self, room: str) -> int:
        return int(self.addresses[room]["addresses"][0].rsplit(":", 1)[1])

    # ---- what it says ----

    def ask(self, path: str) -> tuple[int, bytes]:
        """Status and body of the admin endpoint's answer. Raises OSError."""
        connection = http.client.HTTPConnection("localhost")
        with self.connect_admin() as connection.sock:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()

    def connect_admin(self) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(PATIENCE)
        connected.connect(self._admin)
        return connected

    def stats(self) -> dict[str, Any]:
        return json.loads(self.ask("/stats")[1])

    def figures(self) -> dict[str, int]:
        """Those of the counter room, over its own protocol: that works whatever the admin endpoint does."""
        return {name: int(value) for name, value in self.control.stats().items() if value.isdecimal()}

    def is_alive(self) -> bool:
        try:
            return self.ask("/livez")[0] == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def admin_pid(self) -> int | None:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(found[0]) if found else None

    # ---- promises of all drills ----

    def agrees(self, when: str) -> None:
        """What the server says is held is what the clients' books say; they stand still meanwhile."""
        books = self.crowd.call("pause")

        def equal() -> bool:
            seen = {entry.name: entry.consumption for entry in self.control.dump() if entry.consumption}
            figures = self.figures()
            return (seen, figures["holdings"], figures["holdings_leaving"]) == (books.permits, books.holdings, 0)

        self.stage.report.promise(f"{when}: held as in the clients' books, permits", sum(books.permits.values()), holds(equal))
        self.crowd.call("resume")

    def is_left_empty(self) -> None:
        """After all clients have gone with what they held, nothing is."""
        self.crowd.call("hang_up")

        def empty() -> bool:
            figures = self.figures()
            return not (figures["holdings"] or figures["holdings_leaving"] or figures["busy"]) and figures["curr_connections"] == 1

        self.stage.report.promise("all clients gone: held, and leaving", 0, holds(empty))
        self.stage.report.promise("internal errors", self.figures()["internal_errors"], self.figures()["internal_errors"] == 0)

    # ---- inside ----

    def _served(self) -> dict[str, Any] | None:
        if self.process.poll() is not None:
            raise RuntimeError(f"counterd did not come up: {self.log.read_text()}")
        try:
            found = self.stats()
        except (OSError, http.client.HTTPException):
            return None
        return found["rooms"] if found["state"] == "ready" else None

    def _stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def wait_until(condition: Callable[[], T], what: str, seconds: float = PATIENCE) -> T:
    end = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > end:
            raise RuntimeError(f"not within {seconds:g} s: {what}")
        time.sleep(POLL_S)
    return result


def holds(condition: Callable[[], bool]) -> bool:
    """Whether it becomes true: what a client has sent or closed is on its way for a moment."""
    with contextlib.suppress(RuntimeError):
        return wait_until(condition, "", 5.0)
    return False


# ---- drain ----


def drain(stage: Stage) -> None:
    report = stage.report
    report.title("drain.mode = wait: SIGTERM under load")
    with stage.daemon({"drain.mode": "wait"}) as daemon:
        before = daemon.crowd.measure(stage.seconds)
        daemon.agrees("before")
        daemon.crowd.call("come", False)
        daemon.crowd.call("mark")
        daemon.signal(signal.SIGTERM)
        begun = time.monotonic()
        wait_until(lambda: daemon.ask("/readyz")[0] == http.client.SERVICE_UNAVAILABLE, "it is not ready")
        report.figure("SIGTERM to /readyz red, ms", 1e3 * (time.monotonic() - begun))
        time.sleep(stage.seconds)
        during = daemon.crowd.call("mark")
        report.load("while it waits", during, before)
        report.promise("acquires answered with 0x21 Draining", during.draining, during.draining > 0)
        report.promise("permits given back meanwhile", during.released, during.released > 0)
        daemon.agrees("while it waits")
        report.promise("new connections", "refused", is_refused(daemon))
        held = sum(daemon.crowd.call("pause").permits.values())
        daemon.control.close()
        daemon.crowd.call("let_go")
        daemon.crowd.call("resume")
        status = daemon.process.wait(PATIENCE)
        ended = time.monotonic()
        last = daemon.crowd.call("mark")
        report.figure("the last releases, permits", held)
        report.figure("drain in all, s", ended - begun)
        report.figure("the last release to the end of the process, ms", 1e3 * (ended - last.last_release))
        report.promise("permits cut off", last.lost, last.lost == 0)
        report.promise("ended because nothing was held", status, status == 0 and bool(daemon.lines("nothing is held any more")))
    report.title("drain.mode = close: SIGTERM under load")
    with stage.daemon() as daemon:
        daemon.agrees("before")
        daemon.crowd.call("come", False)
        time.sleep(stage.seconds)
        daemon.control.close()
        daemon.crowd.call("mark")
        daemon.signal(signal.SIGTERM)
        begun = time.monotonic()
        status = daemon.process.wait(PATIENCE)
        report.figure("SIGTERM to the end of the process, ms", 1e3 * (time.monotonic() - begun))
        books = daemon.crowd.call("pause")
        cut = daemon.crowd.call("mark")
        report.figure("permits held then, which their holders were told are lost", cut.lost)
        report.promise("clients that were told", cut.cut, books.clients == 0)
        report.promise("clients that heard anything else, or nothing", len(cut.failed) - cut.cut, len(cut.failed) == cut.cut)
        report.promise("exit status", status, status == 0)


def is_refused(daemon: Daemon) -> bool:
    for family, address in ((socket.AF_UNIX, daemon.path), (socket.AF_INET, ("127.0.0.1", daemon.port("counter")))):
        with socket.socket(family) as sock, contextlib.suppress(ConnectionRefusedError, FileNotFoundError):
            sock.connect(address)
            return False
    return True


# ---- reload ----


def reload(stage: Stage) -> None:
    report = stage.report
    report.title("a reload with a mistake, under load")
    with stage.daemon() as daemon:
        unreadable = stage.directory / "unreadable.pem"
        unreadable.write_bytes(stage.cert.read_bytes())
        unreadable.chmod(0)
        garbage = stage.directory / "garbage.pem"
        garbage.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
        mistakes = {
            "a key that does not exist": {"counter__max_conections": "1"},
            "a certificate that is none": {"counter__tls__cert": str(garbage)},
            "a file that cannot be read": {"counter__tls__cert": str(unreadable)},
            "a file that is not there": {"counter__tls__client_ca": str(stage.directory / "missing.pem")},
        }
        before = daemon.crowd.measure(stage.seconds)
        daemon.crowd.call("come", False)
        daemon.agrees("before")
        config, serial = daemon.ask("/config"), serial_of(stage, daemon)
        opened = daemon.figures()["total_connections"]
        daemon.crowd.call("mark")
        refused = 0
        end = time.monotonic() + stage.seconds
        while refused < len(mistakes) or time.monotonic() < end:
            # With a change that would throw them all out, if it were taken over.
            daemon.write(counter__max_connections="1", counter__idle_timeout="1", **list(mistakes.values())[refused % len(mistakes)])
            daemon.reload("not reloaded:")
            refused += 1
        report.load(f"{refused} reloads", daemon.crowd.call("mark"), before)
        for what in mistakes:
            report.figure(f"tried: {what}", "")
        report.promise("reloads that were refused", refused, not daemon.lines(" reloaded "))
        report.promise("connections that were closed or opened", daemon.figures()["total_connections"] - opened,
                       daemon.figures()["total_connections"] == opened)  # fmt: skip
        report.promise("/config says the same", "", daemon.ask("/config") == config)
        report.promise("the certificate is the same", "", serial_of(stage, daemon) == serial)
        daemon.agrees("after")
        daemon.write()
        daemon.reload(" reloaded ")
        report.promise("a reload without a mistake", "works", True)
        daemon.is_left_empty()


def serial_of(stage: Stage, daemon: Daemon) -> str:
    """Of the certificate that a new connection sees."""
    with (
        socket.create_connection(("127.0.0.1", daemon.port("counter")), PATIENCE) as sock,
        stage.context.wrap_socket(sock, server_hostname="127.0.0.1") as secured,
    ):
        return serial(secured)


def serial(secured: ssl.SSLSocket) -> str:
    seen = secured.getpeercert()
    assert seen is not None
    return str(seen["serialNumber"])


# ---- rotation ----


def rotation(stage: Stage) -> None:
    report = stage.report
    report.title("the certificate rotated, under load")
    with stage.daemon() as daemon, contextlib.ExitStack() as stack:
        before = daemon.crowd.measure(stage.seconds)
        seen, old = [serial_of(stage, daemon)], Client("127.0.0.1", daemon.port("counter"), tls=stage.context)
        stack.callback(old.close)
        old.acquire("held throughout", maximum=1)
        rotations = 2 if stage.is_smoke else 10
        for _ in range(rotations):
            stage.issue()
            daemon.reload(" reloaded ")
            seen.append(serial_of(stage, daemon))
            time.sleep(stage.seconds / rotations)
        during = daemon.crowd.call("mark")
        report.load(f"{rotations} rotations", during, before)
        report.promise("clients that came and went meanwhile", during.came, during.came > 0)
        report.promise("certificates that new connections saw", len(set(seen)), len(set(seen)) == rotations + 1)
        old.release("held throughout")  # raises if the connection was not the same all the time
        old.close()
        report.promise("a connection from before", "stands", True)
        daemon.agrees("after")
        daemon.is_left_empty()


# ---- descriptors ----


def descriptors(stage: Stage) -> None:
    report = stage.report
    report.title("no descriptor left, under load")
    limit = 2 * RESERVED
    with stage.daemon(descriptors=limit) as daemon:
        before = daemon.crowd.measure(stage.seconds)
        daemon.crowd.call("come", False)
        daemon.agrees("before")
        daemon.crowd.call("mark")
        intrude(daemon, "rejected:max_connections", f"RLIMIT_NOFILE {limit}, of which {RESERVED} are kept back", stage.seconds)
        used = len(os.listdir(f"/proc/{daemon.process.pid}/fd"))
        allowed = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (used + 5, limit))
        restarts = daemon.stats()["admin"]["restarts"]
        intrude(daemon, "rejected:descriptors", "the kernel has none left (EMFILE)", stage.seconds)
        report.load("meanwhile", daemon.crowd.call("mark"), before)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, allowed)
        report.promise("restarts of the admin process", daemon.stats()["admin"]["restarts"] - restarts,
                       daemon.stats()["admin"]["restarts"] == restarts)  # fmt: skip
        daemon.agrees("after")
        daemon.crowd.call("come", True)
        after = daemon.crowd.measure(stage.seconds)
        report.nothing_failed("recovered", after)
        report.promise("clients that could come again", after.came, after.came > 0)
        daemon.is_left_empty()


def intrude(daemon: Daemon, cause: str, what: str, seconds: float) -> None:
    """Connects more often than there is room for; who is not let in is closed at once, and counted."""
    report = daemon.stage.report
    before = daemon.figures()[cause]
    with contextlib.ExitStack() as stack:
        intruders = []
        for _ in range(100):
            intruders.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            intruders[-1].connect(daemon.path)
        wait_until(lambda: daemon.figures()["curr_connections"] > 1, "they were looked at")
        time.sleep(seconds / 4)
        refused = sum(is_closed(each) for each in intruders)
        counted = daemon.figures()[cause] - before
        report.promise(f"{what}: turned away, of {len(intruders)}", refused, 0 < refused < len(intruders))
        report.promise(f"{what}: counted as {cause}", counted, counted == refused)
        alive = daemon.ask("/livez")[0], daemon.ask("/stats")[0]
        report.promise(f"{what}: /livez and /stats", f"{alive[0]}, {alive[1]}", alive == (200, 200))
    wait_until(lambda: daemon.figures()["curr_connections"] < 20, "they have gone")


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


# ---- output ----


def output(stage: Stage) -> None:
    report = stage.report
    report.title("standard error is a pipe that nobody reads, log.level = debug")
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, SMALL_PIPE)
    try:
        with stage.daemon({"log.level": "debug"}, stderr=writing) as daemon:
            lost = lose_lines(daemon)
            os.set_blocking(reading, False)
            said = wait_until(lambda: lines_lost(reading, daemon), "it says how many lines were lost")
            counted = daemon.figures()["log_lines_lost"]
            report.promise("read again: lines that it says were lost", said, lost <= said == counted)
            daemon.is_left_empty()
            drain_pipe(reading)
    finally:
        os.close(reading)
        os.close(writing)
    report.title("standard error is on a disk that is full (/dev/full), log.level = debug")
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with stage.daemon({"log.level": "debug"}, stderr=full) as daemon:
            lose_lines(daemon)
            daemon.is_left_empty()
    finally:
        os.close(full)


def lose_lines(daemon: Daemon) -> int:
    """Has it log more than fits anywhere, and returns how many lines were lost."""
    report = daemon.stage.report
    before = daemon.crowd.measure(daemon.stage.seconds)
    end = time.monotonic() + daemon.stage.seconds
    connections = 0
    while time.monotonic() < end or connections < QUEUED_LINES:  # two lines each
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(daemon.path)
        connections += 1
    report.load(f"{connections:,} connections, two lines each", daemon.crowd.call("mark"), before)
    lost = daemon.figures()["log_lines_lost"]
    report.promise("lines lost and counted", lost, lost > 0)
    daemon.agrees("after")
    return lost


def drain_pipe(reading: int) -> bytes:
    said = b""
    with contextlib.suppress(BlockingIOError):
        while read := os.read(reading, 1 << 16):
            said += read
    return said


_SAID: list[bytes] = []


def lines_lost(reading: int, daemon: Daemon) -> int:
    """What it has said were lost in all, once that is all that was."""
    _SAID.append(drain_pipe(reading))
    said = sum(map(int, re.findall(rb"log lines were lost lines=(\d+)", b"".join(_SAID))))
    return said if said == daemon.figures()["log_lines_lost"] else 0


# ---- clock ----


def clock(stage: Stage) -> None:
    report = stage.report
    report.title("the clock steps an hour back, two forth, and one back, under load")
    library = next(iter(glob.glob(FAKETIME)), None)
    if library is None:
        raise SystemExit("no libfaketime: apt-get install faketime")
    shift = stage.directory / "shift"
    shift.write_text("+0")
    environment = {
        "LD_PRELOAD": library, "FAKETIME_TIMESTAMP_FILE": str(shift), "FAKETIME_NO_CACHE": "1", "NO_FAKE_STAT": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip
    settings = {"counter.stats_interval": "10", "throttr.enable": "true", "throttr.port": "0", "throttr.bind": "127.0.0.1"}
    with stage.daemon(settings, environment=environment) as daemon:
        before = daemon.crowd.measure(stage.seconds)
        daemon.agrees("before")
        window, begun = daemon.figures()["window"], time.monotonic()
        daemon.crowd.call("mark")
        steps = (-HOUR_S, HOUR_S, 0)
        with throttr.Client("127.0.0.1", daemon.port("throttr")) as keys:
            for offset in steps:
                late = lifetimes(keys, stage, lambda offset=offset: shift.write_text(f"{offset:+d}"))
                report.promise(f"{offset:+d} s: the log's time is off by, s", offset, abs(logged_offset(daemon) - offset) < 5)
                slack = 1000 if stage.is_smoke else 250
                report.promise(f"{offset:+d} s: keys with a TTL go late by at most, ms", f"{late:.0f}", -5 <= late <= slack)
        turned = daemon.figures()["window"] - window
        most = (time.monotonic() - begun) / 10 + 1 + len(steps)
        report.promise("statistics windows that began", turned, turned <= most)
        report.load("meanwhile", daemon.crowd.call("mark"), before)
        daemon.agrees("after")
        daemon.is_left_empty()


def lifetimes(keys: throttr.Client, stage: Stage, step: Callable[[], object]) -> float:
    """Makes keys before and after a step of the clock; how much later than due the last of them goes, ms."""
    ttl_ms = int(300 * (1 if stage.is_smoke else 5 * stage.seconds))
    due = {}
    for number in range(10):
        if number == 5:
            step()
        name, due_ms = f"key {number}", ttl_ms + 10 * number
        due[name] = time.monotonic() + due_ms / 1e3
        if not keys.set(name, "value", due_ms, throttr.TTLType.MILLISECONDS):
            raise RuntimeError("a key cannot be set")
    worst = -float("inf")
    while due:
        for name, moment in list(due.items()):
            if keys.get(name) is None:
                late = 1e3 * (time.monotonic() - moment)
                worst = max(worst, late) if late >= 0 else late
                if late < -5:
                    return late  # too early
                del due[name]
        time.sleep(0.002)
    return worst


def logged_offset(daemon: Daemon) -> float:
    """Seconds between the time that the daemon logs and the real one."""
    before = len(daemon.lines("stats of counter"))
    daemon.signal(signal.SIGUSR1)
    lines = wait_until(lambda: daemon.lines("stats of counter")[before:], "a line")
    logged = datetime.fromisoformat(lines[0].split()[0].replace("Z", "+00:00"))
    return (logged - datetime.now(timezone.utc)).total_seconds()


# ---- the admin endpoint ----


def admin(stage: Stage) -> None:
    report = stage.report
    report.title("the admin endpoint attacked, its process killed and stopped, under load")
    with stage.daemon() as daemon:
        before = daemon.crowd.measure(stage.seconds)
        report.figure("before: requests a second", f"{before.rate:,.0f}")
        report.figure("before: p99, ms", before.p99_ms)
        for name, attack in ATTACKS.items():
            daemon.crowd.call("mark")
            with contextlib.ExitStack() as stack:
                done = attack(daemon, stack, time.monotonic() + stage.seconds)
                figures = daemon.crowd.call("mark")
            report.load(f"{name} ({done:,})", figures, before)
            wait_until(daemon.is_alive, "/livez answers")
        restarts = daemon.stats()["admin"]["restarts"]
        report.promise("restarts of its process by attacks", restarts, restarts == 0)
        replace(daemon, before)
        hang(daemon, before)
        daemon.agrees("after")
        daemon.is_left_empty()


def slow(daemon: Daemon, stack: contextlib.ExitStack, end: float) -> int:
    """Requests that come byte by byte."""
    sent, found = 0, []
    while time.monotonic() < end:
        if len(found) < 100:
            with contextlib.suppress(OSError):
                found.append(stack.enter_context(daemon.connect_admin()))
        for sock in found:
            with contextlib.suppress(OSError):
                sent += sock.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n"[sent % 41 :][:1])
        time.sleep(POLL_S)
    return sent


def oversized(daemon: Daemon, stack: contextlib.ExitStack, end: float) -> int:
    """Request lines, fields and bodies that are too long."""
    tried = 0
    big = b"x" * (1 << 20)
    shapes = (b"GET /%b HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nA: %b\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n%b")
    while time.monotonic() < end:
        with contextlib.suppress(OSError), daemon.connect_admin() as sock:
            sock.sendall(shapes[tried % len(shapes)] % big)
            sock.recv(1000)
        tried += 1
    return tried


def flood(daemon: Daemon, stack: contextlib.ExitStack, end: float) -> int:
    """Connections that ask for the largest table, and go without the answer."""
    tried = 0
    while time.monotonic() < end:
        with contextlib.suppress(OSError), daemon.connect_admin() as sock:
            sock.sendall(b"GET /counters?limit=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8)
        tried += 1
    return tried


def unread(daemon: Daemon, stack: contextlib.ExitStack, end: float) -> int:
    """Streams of events that nobody reads."""
    for number in range(32):
        with contextlib.suppress(OSError):
            sock = stack.enter_context(daemon.connect_admin())
            sock.sendall(b"GET /events?table=counters&limit=%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % (number + 1))
    time.sleep(max(0.0, end - time.monotonic()))
    return 32


ATTACKS = {"slow requests, bytes": slow, "oversized requests": oversized, "floods": flood, "streams unread": unread}


def replace(daemon: Daemon, before: Figures) -> None:
    """SIGKILL to its process."""
    report = daemon.stage.report
    restarts = daemon.stats()["admin"]["restarts"]
    daemon.crowd.call("mark")
    begun = time.monotonic()
    os.kill(daemon.admin_pid() or 0, signal.SIGKILL)
    wait_until(lambda: daemon.is_alive() and daemon.stats()["admin"]["restarts"] > restarts, "another one answers")
    report.figure("killed: until another one answers, s", time.monotonic() - begun)
    report.load("killed", daemon.crowd.call("mark"), before)
    report.promise("killed: restarts counted", 1, daemon.stats()["admin"]["restarts"] == restarts + 1)


def hang(daemon: Daemon, before: Figures) -> None:
    """SIGSTOP to its process. Its replacement takes a while, which a short run does not wait for."""
    report = daemon.stage.report
    restarts = daemon.stats()["admin"]["restarts"]
    stopped = daemon.admin_pid() or 0
    daemon.crowd.call("mark")
    begun = time.monotonic()
    os.kill(stopped, signal.SIGSTOP)
    if daemon.stage.is_smoke:
        time.sleep(daemon.stage.seconds)
        os.kill(stopped, signal.SIGCONT)
        wait_until(daemon.is_alive, "it goes on")
    else:
        wait_until(lambda: daemon.admin_pid() not in (stopped, None), "it is replaced", REPLACED_S)
        wait_until(daemon.is_alive, "the new one answers")
        report.figure("stopped: until another one answers, s", time.monotonic() - begun)
        report.promise("stopped: restarts counted", 1, daemon.stats()["admin"]["restarts"] == restarts + 1)
    report.load("stopped", daemon.crowd.call("mark"), before)


DRILLS: dict[str, Callable[[Stage], None]] = {
    "drain": drain, "reload": reload, "rotation": rotation, "descriptors": descriptors, "output": output,
    "clock": clock, "admin": admin,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"only those of {', '.join(DRILLS)} that contain this")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each part of a drill")
    parser.add_argument("--smoke", action="store_true", help="tiny durations: are the promises kept that are no times")
    options = parser.parse_args()
    if options.smoke:
        options.seconds = 0.1
    with tempfile.TemporaryDirectory() as directory:
        stage = Stage(Path(directory), options)
        for name, drill in DRILLS.items():
            if options.only in name:
                drill(stage)
    print("\nall promises were kept" if stage.report.kept else "\nNOT ALL PROMISES WERE KEPT")
    sys.exit(0 if stage.report.kept else 1)


if __name__ == "__main__":
    main()
