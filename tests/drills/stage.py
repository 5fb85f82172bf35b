"""What drills are played on: a real daemon with clients at work, its certificates, and the promises of all drills."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trustme

from counterd.client import Client
from counterd.errors import ConnectionLost
from drills.crowd import MAXIMUM, NAMES, Figures, Handle
from kit.daemon import MODULE, config_text, running, wait_until
from kit.machine import PATIENCE
from peers import servers
from ports import free_ports

if TYPE_CHECKING:
    import argparse
    import subprocess
    from collections.abc import Callable, Iterator, Mapping

    from kit.daemon import Daemon as Running

POLL_S = 0.005


class Report:
    """Prints the report, and keeps whether all promises were kept."""

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
        """Prints figures of requests. before: figures to compare them with, if any."""
        self.figure(f"{what}: requests a second", f"{during.rate:,.0f}")
        self.figure(f"{what}: p99, ms", during.p99_ms)
        if before is not None and before.requests:
            self.figure(f"{what}: requests a second, beside those before", during.rate / before.rate)
            self.figure(f"{what}: p99, beside that before", during.p99_ms / before.p99_ms)
        self.figure(f"{what}: slowest request, ms", during.longest_ms)
        self.nothing_failed(what, during)

    def nothing_failed(self, what: str, figures: Figures) -> None:
        asked = figures.requests + figures.came
        self.none(f"{what}: requests that failed, of {asked:,}", len(figures.failed))
        for text in figures.failed[:3]:
            print(f"    {text}")

    def none(self, what: str, count: int) -> None:
        self.promise(what, count, count == 0)


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
        """Replaces the certificate by a new one, atomically."""
        new = self.cert.with_suffix(".new")
        self._authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(new))
        new.replace(self.cert)

    @contextlib.contextmanager
    def daemon(
        self, settings: Mapping[str, str] | None = None, *, environment: Mapping[str, str] | None = None,
        descriptors: int = 0, stderr: int | None = None,
    ) -> Iterator[Daemon]:  # fmt: skip
        """Starts a daemon with clients that work. descriptors: the limit, if any. stderr: in place of a file."""
        self._daemons += 1
        directory = self.directory / str(self._daemons)
        directory.mkdir()
        self.issue()
        limit = ["prlimit", f"--nofile={descriptors}"] if descriptors else []
        program = (*limit, "taskset", "--cpu-list", str(self.cores[0]), *MODULE)
        with contextlib.ExitStack() as stack:
            log = stack.enter_context((directory / "log").open("wb"))
            made = Daemon(self, directory, settings or {})
            to = log.fileno() if stderr is None else stderr
            made.running = stack.enter_context(
                running(directory, made.settings, program=program, env=environment, stderr=to)
            )
            made.enter(stack)
            yield made


class Daemon:
    """A daemon with clients. running: the daemon. crowd: its clients. control: a client of the drill, which holds
    nothing.
    """

    running: Running
    crowd: Handle
    control: Client

    def __init__(self, stage: Stage, directory: Path, settings: Mapping[str, str]) -> None:
        self.stage = stage
        self.path = str(directory / "counter")
        self.log = directory / "log"
        self._admin = str(directory / "admin")
        self.ports = dict(
            zip(("counter", "throttr"), free_ports(2), strict=True)
        )  # not 0: the log that tells may block
        self.settings = {
            "counter.port": str(self.ports["counter"]),
            "counter.socket": self.path, "counter.buckets": "10000", "counter.tls.cert": str(stage.cert),
            "throttr.port": str(self.ports["throttr"]), "throttr.bind": "127.0.0.1",
            "admin.enable": "true", "admin.bind": f"unix:{self._admin}", "drain.timeout": f"{PATIENCE:g}", **settings,
        }  # fmt: skip

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self.running.process

    def enter(self, stack: contextlib.ExitStack) -> None:
        """Waits until it serves; then its clients work until the stack ends."""
        wait_until(self._serves, "it is up")
        self.crowd = Handle(self.path, self.ports["counter"], self.stage.context)
        stack.callback(self.crowd.end)
        self.control = stack.enter_context(Client(path=self.path))

    def write(self, **changes: str) -> None:
        """Writes its configuration file. In a keyword, `__` stands for the dot of a key."""
        changed = {key.replace("__", "."): value for key, value in changes.items()}
        self.running.config.write_text(config_text({**self.settings, **changed}))

    def signal(self, number: signal.Signals) -> None:
        self.running.send_signal(number)

    def reload(self, word: str) -> None:
        """Makes it read its file again, and waits for a line with that word."""
        before = self.lines(word)
        self.signal(signal.SIGHUP)
        wait_until(lambda: len(self.lines(word)) > len(before), f"a line with {word!r}")

    def lines(self, word: str) -> list[str]:
        return [line for line in self.log.read_text().splitlines() if word in line]

    # ---- what it says ----

    def ask(self, path: str) -> tuple[int, bytes]:
        """Returns status and body of the admin endpoint's answer. Raises OSError."""
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
        """The counter protocol's figures, read with that protocol, which works whatever the admin endpoint does."""
        return {name: int(value) for name, value in self.control.stats().items() if value.isdecimal()}

    def status(self, path: str) -> int:
        """0 if it does not answer."""
        try:
            return self.ask(path)[0]
        except (OSError, http.client.HTTPException):
            return 0

    def is_alive(self) -> bool:
        return self.status("/livez") == http.client.OK

    def admin_pid(self) -> int | None:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(found[0]) if found else None

    # ---- promises of all drills ----

    def agrees(self, when: str) -> None:
        """Checks that the server's holdings are those that the clients have recorded. The clients pause meanwhile."""
        held = self.crowd.call("pause")

        def equal() -> bool:
            seen = {entry.name: entry.consumption for entry in self.control.dump() if entry.consumption}
            figures = self.figures()
            return (seen, figures["holdings"], figures["holdings_leaving"]) == (held.permits, held.holdings, 0)

        permits = sum(held.permits.values())
        self.stage.report.promise(f"{when}: held as in the clients' records, permits", permits, holds(equal))
        most = max(entry.peak for entry in self.control.dump() if entry.name in NAMES)
        self.stage.report.promise(f"{when}: most of a counter at once, of {MAXIMUM}", most, most <= MAXIMUM)
        self.crowd.call("resume")

    def is_left_empty(self) -> None:
        """Ends all clients with their holdings, and checks that nothing is held afterwards."""
        self.crowd.call("hang_up")

        def empty() -> bool:
            figures = self.figures()
            left = [figures[name] for name in ("holdings", "holdings_leaving", "busy", "curr_connections")]
            return left == [0, 0, 0, 1]

        self.stage.report.promise("all clients gone: held, and leaving", 0, holds(empty))
        self.stage.report.none("internal errors", self.figures()["internal_errors"])

    # ---- inside ----

    def _serves(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"counterd did not come up: {self.log.read_text()}")
        with contextlib.suppress(ConnectionLost), Client(path=self.path) as client:
            client.noop()
            return True
        return False


def holds(condition: Callable[[], bool]) -> bool:
    """Whether the condition becomes true: what a client has sent or closed needs a moment to arrive."""
    with contextlib.suppress(AssertionError):
        return wait_until(condition, "", 5.0)
    return False
