#!/usr/bin/env python3
"""Drills of operations: a real daemon is drained, misconfigured, starved and attacked while clients work.

    python tests/drills [--only TEXT] [--seconds 3] [--smoke]

drain        in both modes        reload    of files with mistakes      rotation  of the certificate
descriptors  none left            output    not read, disk full         clock     an hour back, and forth
admin        attacked, killed, stopped          floods    beside a client with few requests

The clients (crowd.py) record what they were granted. In each drill these records are compared with the server's
figures, counter by counter, and after all clients have gone nothing may be held. Exit status: 1 if a promise is
not kept. The daemon is bound to one core and everything else to another; times are for comparing within a run."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.client
import os
import re
import resource
import signal
import socket
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from counterd.client import Client, throttr
from counterd.protocols.counter import wire
from drills.floods import floods
from drills.stage import POLL_S, Stage, wait_until
from kit.machine import PATIENCE

if TYPE_CHECKING:
    import io
    import ssl
    from collections.abc import Callable

    from drills.crowd import Figures
    from drills.stage import Daemon

HOUR_S = 3600
EARLY_MS = -5  # of a TTL: two clocks are compared
LATE_MS = 60_000  # the step would be an hour of it; both processes wait for a core, on a busy machine for seconds
FAKETIME = "*/faketime/libfaketime.so.1"  # in /usr/lib
SMALL_PIPE = 4096  # bytes: is full soon
QUEUED_LINES = 1024  # that the daemon keeps for whoever reads slowly
RESERVED = 64  # descriptors that the daemon keeps for itself
REPLACED_S = 40.0  # within which an admin process that hangs is replaced


# ---- drain ----


def drain(stage: Stage) -> None:
    report = stage.report
    report.title("drain.mode = wait: SIGTERM under load")
    with stage.daemon({"drain.mode": "wait"}) as daemon:
        before = daemon.crowd.measure(stage.seconds)
        daemon.crowd.call("come", False)
        daemon.agrees("before")
        daemon.crowd.call("mark")
        daemon.signal(signal.SIGTERM)
        begun = time.monotonic()
        wait_until(lambda: daemon.status("/readyz") == http.client.SERVICE_UNAVAILABLE, "it is not ready")
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
        report.none("permits cut off", last.lost)
        said = bool(daemon.lines("all holdings were given back"))
        report.promise("ended because nothing was held; exit status", status, status == 0 and said)
    report.title("drain.mode = close: SIGTERM under load")
    with stage.daemon() as daemon:
        daemon.crowd.call("come", False)
        daemon.agrees("before")
        time.sleep(stage.seconds)
        daemon.control.close()
        daemon.crowd.call("mark")
        daemon.signal(signal.SIGTERM)
        begun = time.monotonic()
        status = daemon.process.wait(PATIENCE)
        report.figure("SIGTERM to the end of the process, ms", 1e3 * (time.monotonic() - begun))
        held = daemon.crowd.call("pause")
        cut = daemon.crowd.call("mark")
        report.figure("permits held then, which their holders were told are lost", cut.lost)
        report.promise("clients that were told", cut.cut, held.clients == 0)
        report.none("clients that heard anything else, or nothing", len(cut.failed) - cut.cut)
        report.promise("exit status", status, status == 0)


def is_refused(daemon: Daemon) -> bool:
    for family, address in ((socket.AF_UNIX, daemon.path), (socket.AF_INET, ("127.0.0.1", daemon.ports["counter"]))):
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
            "key": {"counter__max_conections": "1"},
            "certificate": {"counter__tls__cert": str(garbage)},
            "unreadable file": {"counter__tls__cert": str(unreadable)},
            "missing file": {"counter__tls__client_ca": str(stage.directory / "missing.pem")},
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
            mistake = list(mistakes.values())[refused % len(mistakes)]
            daemon.write(counter__max_connections="1", counter__idle_timeout="1", **mistake)
            daemon.reload("not reloaded:")
            refused += 1
        report.load(f"{refused} reloads", daemon.crowd.call("mark"), before)
        report.figure("mistakes: " + ", ".join(mistakes), len(mistakes))
        report.promise("reloads that were refused", refused, not daemon.lines(" reloaded "))
        report.none("connections that were closed or opened", daemon.figures()["total_connections"] - opened)
        report.promise("/config", "as before", daemon.ask("/config") == config)
        report.promise("the certificate", "as before", serial_of(stage, daemon) == serial)
        daemon.agrees("after")
        daemon.write()
        daemon.reload(" reloaded ")
        report.promise("a reload without a mistake", "works", True)
        daemon.is_left_empty()


def serial_of(stage: Stage, daemon: Daemon) -> str:
    """The serial number of the certificate that a new connection gets."""
    with (
        socket.create_connection(("127.0.0.1", daemon.ports["counter"]), PATIENCE) as sock,
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
        seen, old = [serial_of(stage, daemon)], Client("127.0.0.1", daemon.ports["counter"], tls=stage.context)
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
        intrude(daemon, "max_connections", f"RLIMIT_NOFILE {limit}, {RESERVED} kept back")
        used = len(list(Path(f"/proc/{daemon.process.pid}/fd").iterdir()))
        allowed = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, (used + 5, limit))
        restarts = daemon.stats()["admin"]["restarts"]
        intrude(daemon, "descriptors", "the kernel has none left")
        report.load("meanwhile", daemon.crowd.call("mark"), before)
        resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE, allowed)
        report.none("restarts of the admin process", daemon.stats()["admin"]["restarts"] - restarts)
        daemon.agrees("after")
        daemon.crowd.call("come", True)
        after = daemon.crowd.measure(stage.seconds)
        report.nothing_failed("recovered", after)
        report.promise("clients that could come again", after.came, after.came > 0)
        daemon.is_left_empty()


def intrude(daemon: Daemon, cause: str, what: str) -> None:
    """Opens more connections than are allowed; the surplus must be closed at once, and counted."""
    report = daemon.stage.report
    before = daemon.figures()[f"rejected:{cause}"]
    with contextlib.ExitStack() as stack:
        intruders = []
        for _ in range(100):
            intruders.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            intruders[-1].connect(daemon.path)
        wait_until(lambda: daemon.figures()["curr_connections"] > 1, "they were looked at")
        time.sleep(max(0.2, daemon.stage.seconds / 4))  # figures are made ten times a second
        refused = sum(is_closed(each) for each in intruders)
        counted = daemon.figures()[f"rejected:{cause}"] - before
        report.promise(f"{what}: turned away, of {len(intruders)} connections", refused, 0 < refused < len(intruders))
        report.promise(f"counted as {cause}", counted, counted == refused)
        statuses = [daemon.status(path) for path in ("/livez", "/metrics")]
        report.promise("/livez and /metrics meanwhile", str(statuses), statuses == [200, 200])
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
    debug = {"log.level": "debug"}
    with open(reading, "rb", 0) as tap, open(writing, "wb", 0), stage.daemon(debug, stderr=writing) as daemon:  # noqa: PTH123
        lost = lose_lines(daemon)
        told, counted = told_lost(tap, daemon)
        report.promise("read again: lines that it says were lost", told, lost <= told == counted)
        daemon.is_left_empty()
        tap.close()  # or the end would wait for somebody who reads the last lines
    report.title("standard error is on a disk that is full (/dev/full), log.level = debug")
    with open("/dev/full", "wb", 0) as full, stage.daemon(debug, stderr=full.fileno()) as daemon:  # noqa: PTH123
        lose_lines(daemon)
        daemon.is_left_empty()


def lose_lines(daemon: Daemon) -> int:
    """Makes the daemon log more than fits anywhere, and returns the number of lost lines."""
    report = daemon.stage.report
    before = daemon.crowd.measure(daemon.stage.seconds)
    end = time.monotonic() + daemon.stage.seconds
    connections = 0
    while time.monotonic() < end or connections < QUEUED_LINES:  # two lines each
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(daemon.path)
            sock.send(wire.noop(0))
            sock.recv(wire.HEADER_SIZE)  # so that it is not faster than the server: no queue of connects is full
        connections += 1
    report.load(f"{connections:,} connections, two lines each", daemon.crowd.call("mark"), before)
    lost = daemon.figures()["log_lines_lost"]
    report.promise("lines lost and counted", lost, lost > 0)
    daemon.agrees("after")
    return lost


def told_lost(tap: io.FileIO, daemon: Daemon) -> tuple[int, int]:
    """The numbers of lost lines in the log and in the metrics, once they are equal, or after a while."""
    os.set_blocking(tap.fileno(), False)
    said = b""
    end = time.monotonic() + PATIENCE
    while True:
        while read := tap.read(1 << 16):
            said += read
        told = sum(map(int, re.findall(rb"log lines were lost lines=(\d+)", said)))
        counted = daemon.figures()["log_lines_lost"]
        if told == counted or time.monotonic() > end:
            return told, counted
        time.sleep(POLL_S)


# ---- clock ----


def clock(stage: Stage) -> None:
    report = stage.report
    report.title("the clock steps an hour back, two forth, and one back, under load")
    # It makes Python's threads spin where they wait for each other, so a request beside a line that is logged may take
    # 0.3 s here: what is looked at is time, not speed.
    library = next(Path("/usr/lib").glob(FAKETIME), None)
    if library is None:
        raise SystemExit("no libfaketime: `make test-deps` installs it")
    shift = stage.directory / "shift"
    shift.write_text("+0")
    environment = {
        "LD_PRELOAD": str(library), "FAKETIME_TIMESTAMP_FILE": str(shift), "FAKETIME_NO_CACHE": "1",
        "NO_FAKE_STAT": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1",
    }  # fmt: skip
    settings = {"throttr.enable": "true", "counter.stats_interval": "10"}
    with stage.daemon(settings, environment=environment) as daemon:
        before = daemon.crowd.measure(stage.seconds)
        daemon.agrees("before")
        window, begun = daemon.figures()["window"], time.monotonic()
        daemon.crowd.call("mark")
        steps = (-HOUR_S, HOUR_S, 0)
        with throttr.Client("127.0.0.1", daemon.ports["throttr"]) as keys:
            for offset in steps:
                late = lifetimes(keys, stage, lambda offset=offset: shift.write_text(f"{offset:+d}"))
                logged = logged_offset(daemon)
                report.promise("the log's time is off by, s", f"{logged:+.1f}", abs(logged - offset) < 5)
                report.promise("keys go later than their TTL, at most ms", f"{late:.0f}", EARLY_MS <= late <= LATE_MS)
        turned = daemon.figures()["window"] - window
        most = (time.monotonic() - begun) / 10 + 1 + len(steps)
        report.promise("statistics windows that began", turned, turned <= most)
        report.load("meanwhile", daemon.crowd.call("mark"), before)
        daemon.agrees("after")
        daemon.is_left_empty()
        daemon.running.kill()  # libfaketime makes time.sleep() fail, which the end of a daemon may need


def lifetimes(keys: throttr.Client, stage: Stage, step: Callable[[], object]) -> float:
    """Inserts keys before and after a step of the clock. Returns how much later than due the last of them expires, in
    ms.
    """
    ttl_ms = int(1e3 * stage.seconds)
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
                if late < EARLY_MS:
                    return late  # too early
                del due[name]
        time.sleep(0.002)
    return worst


def logged_offset(daemon: Daemon) -> float:
    """Seconds between the daemon's logged time and the real one."""
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
        os.nice(10)  # the clients, who share a core with the attacker, are not to wait for it
        before = daemon.crowd.measure(stage.seconds)
        report.figure("before: requests a second", f"{before.rate:,.0f}")
        report.figure("before: p99, ms", before.p99_ms)
        for name, attack in ATTACKS.items():
            daemon.crowd.call("mark")
            with contextlib.ExitStack() as stack:
                done = attack(daemon, stack, time.monotonic() + stage.seconds)
                figures = daemon.crowd.call("mark")
            if attack is not nobody:
                report.figure(name, f"{done:,}")
            report.load(name, figures, before)
            wait_until(daemon.is_alive, "/livez answers")
        restarts = daemon.stats()["admin"]["restarts"]
        report.promise("restarts of its process by attacks", restarts, restarts == 0)
        replace(daemon, before)
        hang(daemon, before)
        daemon.agrees("after")
        daemon.is_left_empty()


def nobody(daemon: Daemon, stack: contextlib.ExitStack, end: float) -> int:
    """Attacks nothing: shows what it costs the clients that an attacker shares their core."""
    turns = 0
    while time.monotonic() < end:
        turns += 1
    return turns


def slow(daemon: Daemon, stack: contextlib.ExitStack, end: float) -> int:
    """Requests that come byte by byte and never end; a connection that is cut off is opened again."""
    head = b"GET /metrics HTTP/1.1\r\nA: "
    sockets = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(100)]
    sent = turn = 0
    while time.monotonic() < end:
        for number, sock in enumerate(sockets):
            try:
                sent += sock.send(head[turn : turn + 1] or b"a")
            except OSError:
                with contextlib.suppress(OSError):
                    sockets[number] = stack.enter_context(daemon.connect_admin())
        turn += 1
        time.sleep(POLL_S)
    return sent


def oversized(daemon: Daemon, stack: contextlib.ExitStack, end: float) -> int:
    """Request lines, fields and bodies that are too long."""
    tried = 0
    big = b"x" * (1 << 20)
    shapes = (b"GET /%b HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nA: %b\r\n\r\n", b"POST / HTTP/1.1\r\n\r\n%b")
    while time.monotonic() < end:
        with contextlib.suppress(OSError), daemon.connect_admin() as sock:
            sock.sendall(shapes[tried % len(shapes)] % big)
            sock.recv(1000)
        tried += 1
    return tried


def flood(daemon: Daemon, stack: contextlib.ExitStack, end: float) -> int:
    """Connections that request the largest table, and close before the answer."""
    tried = 0
    while time.monotonic() < end:
        with contextlib.suppress(OSError), daemon.connect_admin() as sock:
            sock.sendall(b"GET /counters?limit=1000 HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8)
        tried += 1
    return tried


def unread(daemon: Daemon, stack: contextlib.ExitStack, end: float) -> int:
    """Streams of events that are not read."""
    for number in range(32):
        with contextlib.suppress(OSError):
            sock = stack.enter_context(daemon.connect_admin())
            sock.sendall(b"GET /events?table=counters&limit=%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % (number + 1))
    time.sleep(max(0.0, end - time.monotonic()))
    return 32


ATTACKS = {
    "nobody attacked": nobody,
    "slow requests": slow,
    "oversized requests": oversized,
    "floods": flood,
    "streams unread": unread,
}


def replace(daemon: Daemon, before: Figures) -> None:
    """Sends SIGKILL to the admin process."""
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
    """Sends SIGSTOP to the admin process. Its replacement takes a while, for which a short run does not wait."""
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
    "clock": clock, "admin": admin, "floods": floods,
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
