"""`counterctl top` in a terminal: what it shows, what keys do, and that it restores the terminal."""

from __future__ import annotations

import itertools
import re
import signal
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from counterd.client import Client
from counterd.errors import ConnectionLost
from counterd.protocols.beanstalk import wire
from counterd.protocols.counter import wire as counter
from counterd.version import __version__
from kit import reference
from kit.daemon import PATIENCE, Daemon, environment, running, wait_until
from kit.terminals import SCREEN_OFF, SCREEN_ON, UNKNOWN, Terminal, terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

COUNTERCTL = (sys.executable, "-c", "from counterd.cli.ctl import main; main()")

# What a shell does with a job that is stopped.
SHELL = """
import os, signal, subprocess, sys, termios

def becomes_job():
    os.setpgid(0, 0)
    os.tcsetpgrp(0, os.getpid())
    signal.signal(signal.SIGTTOU, signal.SIG_DFL)

signal.signal(signal.SIGTTOU, signal.SIG_IGN)
before = termios.tcgetattr(0)
job = subprocess.Popen(sys.argv[1:], preexec_fn=becomes_job).pid
assert os.WIFSTOPPED(os.waitpid(job, os.WUNTRACED)[1])
os.tcsetpgrp(0, os.getpgrp())
print("stopped, terminal as before:", termios.tcgetattr(0) == before, flush=True)
os.tcsetpgrp(0, job)
os.kill(job, signal.SIGCONT)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(job, 0)[1]))
"""


@pytest.fixture
def counterd(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon for each test, as idle counters of another test would be listed."""
    with running(tmp_path) as daemon:
        yield daemon


@pytest.fixture
def client(counterd: Daemon) -> Iterator[Client]:
    with counterd.client() as client:
        yield client


def top(port: int, *arguments: object) -> list[str]:
    where = ("-p", str(port), "--timeout", f"{PATIENCE:g}s")
    return [*COUNTERCTL, *where, "top", "-i", "200ms", *map(str, arguments)]


def listed(seen: Terminal) -> list[str]:
    """The names in the list, as shown."""
    lines = seen.screen()
    start = next((at for at, line in enumerate(lines) if line.startswith("name")), len(lines))
    return [line.split()[0] for line in lines[start + 1 : -1] if line]


def wait_for_list(seen: Terminal, *names: str) -> None:
    try:
        wait_until(lambda: listed(seen) == list(names), f"{names} are listed")
    except AssertionError as error:
        raise AssertionError(f"{error}; there is {seen.screen()}") from None


def test_holders_and_connections_are_shown_and_one_is_killed(start: Callable[..., Daemon], short_path: Path) -> None:
    url = f"unix:{short_path / 'admin'}"
    counterd = start({"admin.enable": "true", "admin.bind": url, "admin.token": "a-token"})
    counterd.wait_for_log("admin listens on")
    command = top(counterd.address.port, "--admin", url)
    with (
        counterd.client() as one,
        counterd.client() as two,
        terminal(command, env={"COUNTERD_ADMIN_TOKEN": "a-token"}) as seen,
    ):
        one.acquire("seats", 4, maximum=5)
        two.acquire("calls", 2, maximum=8)
        wait_for_list(seen, "seats", "calls")
        seen.type(b"\x1b[B\r")
        wait_for_line(seen, "holders of calls")
        wait_for_line(seen, "1 holder ")
        seen.type(b"k")
        wait_for_line(seen, "close counter-")
        seen.type(b"n")
        wait_for_line(seen, "1 holder ")
        assert two.get("calls") == 2
        two.acquire("others", 1, maximum=8)
        seen.type(b"\r")
        wait_for_line(seen, "holdings of counter-")
        wait_for_line(seen, "2 holdings ")
        wait_for_line(seen, "others")
        seen.type(b"\x1b")
        wait_for_list(seen, "seats", "calls", "others")
        seen.type(b"\x1b[B\r")
        wait_for_line(seen, "holders of calls")
        wait_for_line(seen, "1 holder ")
        seen.type(b"ky")
        wait_for_line(seen, "no holders")
        with pytest.raises(ConnectionLost):
            two.noop()
        seen.type(b"\t")
        wait_for_line(seen, "connections")
        wait_for_line(seen, "id ")
        seen.type(b"\x1b")
        wait_for_list(seen, "seats", "calls", "others")
        assert one.get("seats") == 4
        seen.type(b"q")
        assert seen.ended() == 0


def test_waiters_are_shown(start: Callable[..., Daemon], short_path: Path) -> None:
    url = f"unix:{short_path / 'admin'}"
    counterd = start({"admin.enable": "true", "admin.bind": url})
    counterd.wait_for_log("admin listens on")
    with counterd.client() as holder, counterd.connect() as peer:
        holder.acquire("seats", 4, maximum=4)
        rate = counter.Rate(b"calls", 3, 5, 3_600_000_000, 9)
        peer.sendall(counter.take(1, [rate]) + counter.take(2, [counter.Permit(b"seats", 2, 4)], 600_000))
        counterd.wait_for_stats(waiters=1)
        with terminal(top(counterd.address.port, "--admin", url), columns=120) as seen:
            wait_for_list(seen, "seats")
            seen.type(b"w")
            wait_for_line(seen, "queue of seats")
            wait_for_line(seen, "1 waiter ")
            seen.type(b"\rw")
            wait_for_line(seen, "waits of counter-")
            wait_for_line(seen, "1 wait ")
            seen.type(b"\t")
            wait_for_line(seen, "id ")
            seen.type(b"\t")
            wait_for_line(seen, "rates by usage")
            wait_for_line(seen, "1 rate ")
            assert below(seen, "rates by usage")[0].split()[:5] == ["calls", "6", "9", "5", "1"]
            seen.type(b"q")
            assert seen.ended() == 0


def test_tables_of_other_protocols_are_shown(start: Callable[..., Daemon], short_path: Path) -> None:
    url = f"unix:{short_path / 'admin'}"
    path = short_path / "jobs"
    settings = {"beanstalk.enable": "true", "beanstalk.bind": " ", "beanstalk.socket": path}
    counterd = start({"admin.enable": "true", "admin.bind": url, **settings})
    counterd.wait_for_log("admin listens on")
    port = counterd.address_of("counter").port
    with (
        socket.socket(socket.AF_UNIX) as worker,
        terminal(top(port, "--admin", url), columns=110) as seen,
    ):
        worker.connect(str(path))
        for tube, jobs in ((b"mail", 2), (b"orders", 3)):
            worker.sendall(wire.use(tube) + jobs * wire.put(b"x"))
        worker.sendall(wire.use(b"mail") + wire.watch(b"mail") + wire.reserve())
        wait_until(lambda: any("every" in line for line in seen.screen()), "the first screen")
        seen.type(b"\t")
        wait_for_line(seen, "beanstalk-")
        seen.type(b"\t")
        wait_for_line(seen, "tubes by ready")
        wait_for_line(seen, "orders ")
        lines = [line.split() for line in seen.screen()]
        at = lines.index(["tubes", "by", "ready"])
        assert lines[at + 1][:4] == ["tube", "ready", "reserved", "delayed"]
        assert [line[:3] for line in lines[at + 2 : at + 4]] == [["orders", "3", "0"], ["mail", "1", "1"]]
        seen.type(b"s")
        wait_for_line(seen, "tubes by reserved")
        wait_until(lambda: below(seen, "tubes by reserved")[0].startswith("mail "), "its order")
        seen.type(b"\x1b")
        wait_for_line(seen, "0 counters")
        seen.type(b"\t")
        wait_for_line(seen, "beanstalk-")
        seen.type(b"\r")
        wait_for_line(seen, "holdings of beanstalk-")
        wait_for_line(seen, "1  ")
        assert below(seen, "holdings of")[0].split()[:2] == ["1", "mail"]
        seen.type(b"q")
        assert seen.ended() == 0


def test_a_server_without_counters(start: Callable[..., Daemon], short_path: Path) -> None:
    url = f"unix:{short_path / 'admin'}"
    jobs = {"beanstalk.enable": "true", "beanstalk.bind": " ", "beanstalk.socket": short_path / "jobs"}
    counterd = start({"counter.enable": "false", "counter.port": "", "admin.enable": "true", "admin.bind": url, **jobs})
    counterd.wait_for_log("admin listens on")
    with terminal(top(1, "--admin", url), columns=110) as seen:
        wait_for_line(seen, "tubes by ready")
        wait_for_line(seen, "default ")
        assert seen.screen()[1].startswith("no answer: cannot connect to 127.0.0.1:1: ")
        seen.type(b"\t\t")
        wait_for_line(seen, "no connections")
        seen.type(b"q")
        assert seen.ended() == 0


def below(seen: Terminal, beginning: str) -> list[str]:
    """The rows of a page from the one whose first line begins so."""
    lines = seen.screen()
    start = next((at for at, line in enumerate(lines) if line.startswith(beginning)), len(lines))
    return [*lines[start + 2 :], ""]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "name the admin endpoint with --admin"), (("--admin", "http://127.0.0.1:1"), "cannot connect to the admin")],
)
def test_without_an_admin_endpoint_counters_are_shown(
    counterd: Daemon, client: Client, arguments: tuple[str, ...], said: str
) -> None:
    with client.hold("seats", 4, maximum=5), terminal(top(counterd.address.port, *arguments), columns=120) as seen:
        wait_for_list(seen, "seats")
        seen.type(b"\r")
        wait_until(lambda: any(said in line for line in seen.screen()), said)
        seen.type(b"\x1b")
        wait_for_list(seen, "seats")
        seen.type(b"q")
        assert seen.ended() == 0


def wait_for_line(seen: Terminal, beginning: str) -> None:
    try:
        wait_until(lambda: any(line.startswith(beginning) for line in seen.screen()), beginning)
    except AssertionError as error:
        raise AssertionError(f"{error}; there is {seen.screen()}") from None


def test_counters_and_rates_are_shown(counterd: Daemon, client: Client) -> None:
    with (
        client.hold("seats", 4, maximum=5),
        client.hold("calls", 2, maximum=8),
        client.hold("jobs", 3, maximum=9),
        terminal(top(counterd.address.port)) as seen,
    ):
        before = seen.attributes()
        wait_for_list(seen, "seats", "jobs", "calls")
        assert seen.attributes() != before
        wait_until(lambda: re.search(r"stats +[1-9][0-9.]*/s", "\n".join(seen.screen())), "a rate")
        lines = seen.screen()
        assert lines[0].startswith(f"counterd {__version__} at 127.0.0.1:{counterd.address.port}   up 00:00:")
        assert lines[0].endswith("every 0.2 s")
        seen.type(b"\x1b[D")
        wait_for_list(seen, "calls", "jobs", "seats")
        seen.type(b"r")
        wait_for_list(seen, "seats", "jobs", "calls")
        seen.type(b"/s\r")
        wait_for_list(seen, "seats", "jobs", "calls")
        seen.type(b"/x\x7fe")
        wait_for_list(seen, "seats")
        seen.type(b"\x1b")
        wait_for_list(seen, "seats", "jobs", "calls")
        seen.type(b"/\x7fob\r")
        wait_for_list(seen, "jobs")
        seen.type(b"h")
        wait_until(lambda: any("any key closes it" in line for line in seen.screen()), "the help")
        seen.type(b"hq")
        assert seen.ended() == 0
        assert seen.attributes() == before
        assert seen.shown.index(SCREEN_ON) < seen.shown.rindex(SCREEN_OFF)
        assert seen.shown.rindex(b"\x1b[?25h") > seen.shown.rindex(b"\x1b[?25l"), "the cursor is there again"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_restores_the_terminal(counterd: Daemon, number: signal.Signals) -> None:
    with terminal(top(counterd.address.port)) as seen:
        before = seen.attributes()
        seen.wait_for(b"every")
        if number == signal.SIGINT:
            seen.type(b"\x03")
        else:
            seen.process.send_signal(number)
        assert seen.ended() == 128 + number
        assert seen.attributes() == before
        assert SCREEN_OFF in seen.shown[seen.shown.index(SCREEN_ON) :]
        assert b"Traceback" not in seen.shown


def test_top_can_be_stopped_and_continued(counterd: Daemon) -> None:
    with terminal([sys.executable, "-c", SHELL, *top(counterd.address.port)]) as seen:
        seen.wait_for(b"every")
        seen.type(b"\x1a")
        at = seen.wait_for(b"stopped, terminal as before: True")
        assert SCREEN_OFF in seen.shown[:at]
        seen.wait_for(SCREEN_ON, at)
        wait_for_all_lines(seen)
        seen.type(b"q")
        assert seen.ended() == 0


def test_top_follows_the_size_of_the_terminal(counterd: Daemon) -> None:
    """Of the terminal itself, not of exported variables."""
    env = {"COLUMNS": "40", "LINES": "9", "TTY_COMPATIBLE": "0"}
    with terminal(top(counterd.address.port), columns=80, rows=24, env=env) as seen:
        for size in ((150, 40), (150, 20), (30, 8)):
            wait_for_all_lines(seen)
            seen.resize(*size)
        wait_for_all_lines(seen)
        seen.type(b"q")
        assert seen.ended() == 0


def wait_for_all_lines(seen: Terminal) -> None:
    wait_until(lambda: UNKNOWN not in seen.screen(), "all lines")


@pytest.mark.parametrize(("columns", "rows", "count"), [(40, 16, 7), (40, 24, 11), (80, 24, 11)])
def test_a_small_terminal_shows_counters(counterd: Daemon, client: Client, columns: int, rows: int, count: int) -> None:
    for number in range(30):
        client.acquire(f"c{number:02}", maximum=1)
    with terminal(top(counterd.address.port), columns=columns, rows=rows) as seen:
        wait_for_list(seen, *(f"c{number:02}" for number in range(count)))
        wait_for_line(seen, "requests ")
        seen.type(b"q")
        assert seen.ended() == 0


def test_only_changed_lines_are_written(counterd: Daemon, client: Client) -> None:
    with client.hold("seats", 4, maximum=5), terminal(top(counterd.address.port)) as seen:
        wait_for_list(seen, "seats")  # which the first drawing did not have yet
        seen.type(b"q")
        assert seen.ended() == 0
    written = re.findall(rb"\x1b\[([0-9]+);1H(.*?)(?=\x1b\[[0-9]+;1H|\x1b\[\?)", seen.shown, re.DOTALL)
    of_rows = [[line for at, line in written if int(at) == row] for row in range(1, 25)]
    assert all(of_rows)
    assert all(line != after for lines in of_rows for line, after in itertools.pairwise(lines))


@pytest.mark.parametrize("how", ["Ctrl-L", "continued", "resized", "not stopped"])
def test_all_lines_are_written_if_the_terminals_content_may_differ(counterd: Daemon, how: str) -> None:
    with terminal(top(counterd.address.port)) as seen:
        wait_for_all_lines(seen)
        seen.spoil()
        if how == "Ctrl-L":
            seen.type(b"\x0c")
        elif how == "continued":
            seen.process.send_signal(signal.SIGSTOP)
            seen.process.send_signal(signal.SIGCONT)
        elif how == "resized":
            seen.resize(40, 16)
            seen.resize(80, 24)
        else:
            seen.type(b"\x1a")  # which cannot stop it, as no shell in its session could continue it
            seen.wait_for(SCREEN_OFF)
        wait_for_all_lines(seen)
        seen.type(b"q")
        assert seen.ended() == 0


def test_pausing_and_changing_the_interval(counterd: Daemon, client: Client) -> None:
    with terminal(top(counterd.address.port)) as seen:
        seen.wait_for(b"every 0.2 s")
        seen.type(b"+")
        seen.wait_for(b"every 0.5 s")
        seen.type(b" ")
        seen.wait_for(b"paused")
        asked = wait_until_quiet(client)
        assert client.stats()["command:dump"] == asked
        seen.type(b" ")
        wait_until(lambda: client.stats()["command:dump"] != asked, "it asks again")
        seen.type(b"q")
        assert seen.ended() == 0


def wait_until_quiet(client: Client) -> str:
    """Waits until a second passes without a Dump. Returns how many there were."""
    while True:
        asked = client.stats()["command:dump"]
        time.sleep(1)
        if client.stats()["command:dump"] == asked:
            return asked


def test_a_restarted_server_is_shown_again(start: Callable[..., Daemon]) -> None:
    counterd = start()
    port = counterd.address.port
    with terminal(top(port)) as seen:
        wait_until(lambda: any(line.startswith("0 counters") for line in seen.screen()), "its list")
        counterd.stop()
        wait_until(lambda: seen.screen()[1].startswith("no answer: "), "that it has gone")
        again = start({"counter.port": str(port)})
        with again.client() as client, client.hold("back", maximum=1):
            wait_for_list(seen, "back")
            wait_until(lambda: seen.screen()[1] == "", "that it is back")
        seen.type(b"q")
        assert seen.ended() == 0


@pytest.mark.needs("yrmcdsd")
def test_the_reference_server(tmp_path: Path) -> None:
    with (
        reference.running(tmp_path) as address,
        Client(*address) as client,
        client.hold("seats", 2, maximum=4),
        terminal([*COUNTERCTL, "-h", address.host, "-p", address.port, "top"]) as seen,
    ):
        wait_for_list(seen, "seats")
        wait_until(lambda: any(line.startswith("objects ") for line in seen.screen()), "its figures")
        seen.type(b"q")
        assert seen.ended() == 0


def test_no_colours_with_no_color(counterd: Daemon) -> None:
    with terminal(top(counterd.address.port), env={"NO_COLOR": "1"}) as seen:
        seen.wait_for(b"list 0.0 s old")
        seen.type(b"q")
        assert seen.ended() == 0
    assert not re.search(rb"\x1b\[[0-9;]*\b(3[0-7]|9[0-7])\b[0-9;]*m", seen.shown)


def test_top_needs_a_terminal(counterd: Daemon) -> None:
    found = subprocess.run(
        top(counterd.address.port), capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment()
    )
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("counterctl: top needs a terminal; ")
    with terminal(top(counterd.address.port), env={"TERM": "dumb"}) as seen:
        assert seen.ended() == 2
    assert b"\x1b" not in seen.shown


def test_a_missing_server_is_an_error_before_anything_is_drawn() -> None:
    with terminal(top(1)) as seen:
        assert seen.ended() == 3
    assert seen.shown.startswith(b"counterctl: cannot connect to 127.0.0.1:1")
    assert SCREEN_ON not in seen.shown
    with terminal(top(1, "--admin", "http://127.0.0.1:1")) as seen:
        assert seen.ended() == 3
    assert b"refused; cannot connect to the admin endpoint at http://127.0.0.1:1: " in seen.shown
