"""`counterctl run` as a process: the command, its permits, and what happens when either ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit.daemon import PATIENCE, Daemon, environment, running, wait_until
from kit.terminals import terminal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd.client import Client

COUNTERCTL = (sys.executable, "-c", "from counterd.cli.ctl import main; main()")

# In a process group of its own, but in this session: one that nobody else is in the session of cannot be stopped.
GROUPED = (sys.executable, "-c", "import os; os.setpgid(0, 0); from counterd.cli.ctl import main; main()")

# A command that tells each signal, and ends with the status 9 by SIGUSR2.
TELLS = (
    sys.executable,
    "-c",
    """
import os, signal
numbers = [getattr(signal, "SIG" + name) for name in ("TERM", "HUP", "INT", "QUIT", "USR1", "USR2", "CONT")]
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print("ready", flush=True)
while True:
    number = signal.sigwait(numbers)
    print(number.name, flush=True)
    if number == signal.SIGUSR2:
        os._exit(9)
""",
)
READY = ("sh", "-c", 'echo "ready $$"; read line; exit 3')  # until its stdin ends


@pytest.fixture(scope="module")
def counterd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture
def client(counterd: Daemon) -> Iterator[Client]:
    with counterd.client() as client:
        yield client


def words(counterd: Daemon, *arguments: object, program: tuple[str, ...] = COUNTERCTL) -> list[str]:
    return [*program, "-p", str(counterd.address.port), "run", *map(str, arguments)]


def run(counterd: Daemon, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    given = {"stdin": subprocess.DEVNULL} if "input" not in options else {}
    return subprocess.run(
        words(counterd, *arguments),
        capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment(), **given, **options,
    )  # fmt: skip


@contextlib.contextmanager
def begun(counterd: Daemon, *arguments: object, program: tuple[str, ...] = GROUPED) -> Iterator[subprocess.Popen[str]]:
    """Runs counterctl during the block, with a time limit; its command ends with it."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        words(counterd, *arguments, program=program), stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment()
    ) as process:

        def end() -> None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(PATIENCE, end)
        timer.start()
        try:
            yield process
        finally:
            timer.cancel()
            timer.join()
            end()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip("\n")


def in_use(client: Client, name: str) -> int:
    return next((entry.consumption for entry in client.dump() if entry.name == name.encode()), 0)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [0, 1, 3, 124, 255])
def test_the_exit_status_is_that_of_the_command(counterd: Daemon, status: int) -> None:
    found = run(counterd, "a", "--max", 1, "--", "sh", "-c", f"exit {status}")
    assert (found.returncode, found.stdout, found.stderr) == (status, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGSEGV])
def test_a_command_that_a_signal_ended(counterd: Daemon, number: signal.Signals) -> None:
    found = run(counterd, "a", "--max", 1, "--", "sh", "-c", f"ulimit -c 0; kill -{number.value} $$")
    assert (found.returncode, found.stderr) == (128 + number, "")


def test_an_interrupted_command_interrupts_counterctl(counterd: Daemon) -> None:
    """Its status to a shell is 130 as well; but a shell loop around it ends only if counterctl itself dies of
    SIGINT."""
    found = run(counterd, "a", "--max", 1, "--", "sh", "-c", "kill -INT $$")
    assert (found.returncode, found.stderr) == (-signal.SIGINT, "")


def test_the_command_has_the_standard_files(counterd: Daemon) -> None:
    found = run(counterd, "a", "--max", 1, "sh", "-c", "tr a-z A-Z; echo wrong >&2", input="some words")
    assert (found.returncode, found.stdout, found.stderr) == (0, "SOME WORDS", "wrong\n")


def test_options_behind_the_command_belong_to_it(counterd: Daemon) -> None:
    found = run(counterd, "-n", 2, "a", "--max", 3, "echo", "-n", "--max", "--", "-q")
    assert (found.returncode, found.stdout) == (0, "--max -- -q")


def test_the_environment_of_the_command(counterd: Daemon) -> None:
    code = 'echo "$COUNTERD_NAME, $COUNTERD_PERMITS of $COUNTERD_MAXIMUM"; test -S /dev/fd/$COUNTERD_FD'
    found = run(counterd, "a name", "--max", 5, "-n", 2, "sh", "-c", code)
    assert (found.returncode, found.stdout) == (0, "a name, 2 of 5\n")


def test_with_close_the_command_has_no_descriptor(counterd: Daemon) -> None:
    code = 'test -z "$COUNTERD_FD" && for file in /proc/$$/fd/*; do test ! -S $file || exit 1; done'
    assert run(counterd, "a", "--max", 1, "--close", "sh", "-c", code).returncode == 0
    assert run(counterd, "a", "--max", 1, "--", *COUNTERCTL, "-p", counterd.address.port, "run", "b", "--max", 1,
               "--close", "sh", "-c", 'test -z "$COUNTERD_FD"').returncode == 0  # fmt: skip


def test_a_script_without_a_shebang_runs(counterd: Daemon, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('echo "$1"; exit 4\n')
    script.chmod(0o755)
    found = run(counterd, "a", "--max", 1, script, "word")
    assert (found.returncode, found.stdout) == (4, "word\n")


# ---- its own failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["no-such-command", ""])
def test_a_missing_command_has_status_127(counterd: Daemon, client: Client, command: str) -> None:
    found = run(counterd, "missing", "--max", 1, "--", command)
    assert found.returncode == 127
    assert found.stderr == f"counterctl: cannot run {command}: No such file or directory\n"
    wait_until(lambda: in_use(client, "missing") == 0, "what was held comes back")


def test_a_command_that_cannot_be_executed_has_status_126(counterd: Daemon, client: Client, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("exit 0")
    found = run(counterd, "denied", "--max", 1, file)
    assert found.returncode == 126
    assert found.stderr == f"counterctl: cannot run {file}: Permission denied\n"
    wait_until(lambda: in_use(client, "denied") == 0, "what was held comes back")


@pytest.mark.parametrize(
    ("server", "status", "message"),
    [
        (("-p", "1"), 125, "counterctl: cannot connect to 127.0.0.1:1"),
        (("-h", "no..host"), 2, "Error: 'no..host': 'no..host' is not a valid host name"),
    ],
)
def test_the_error_if_no_server_listens(server: tuple[str, str], status: int, message: str) -> None:
    found = subprocess.run(
        [*COUNTERCTL, *server, "run", "a", "--max", "1", "echo", "ran"],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (status, "")
    assert found.stderr.splitlines()[-1].startswith(message)
    assert status == 2 or found.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("a", "--max", 1),
        ("a", "true"),
        ("a", "--max", 1, "-n", 2, "true"),
        ("a", "--max", 1, "--nonsense", "true"),
        ("a", "--max", 1, "--wait", "soon", "true"),
        ("", "--max", 1, "true"),
        (),
    ],
)
def test_usage_errors_have_status_125(counterd: Daemon, arguments: tuple[object, ...]) -> None:
    found = run(counterd, *arguments)
    assert found.returncode == 125
    assert "Error: " in found.stderr


# ---- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wait", "within"), [("0", ""), ("200ms", " within 0.2 s")])
def test_a_wait_times_out(counterd: Daemon, client: Client, wait: str, within: str) -> None:
    with client.hold("busy", 2, maximum=3):
        found = run(counterd, "busy", "-n", 2, "--max", 3, "--wait", wait, "echo", "ran")
        silent = run(counterd, "-q", "busy", "-n", 2, "--max", 3, "--wait", wait, "echo", "ran")
    assert (silent.returncode, silent.stdout, silent.stderr) == (124, "", "")
    assert (found.returncode, found.stdout) == (124, "")
    assert found.stderr == f"counterctl: 2 of busy not available{within}: 2 of 3 are in use\n"


@pytest.mark.parametrize("quiet", [False, True])
def test_run_waits_for_a_release(counterd: Daemon, client: Client, quiet: bool) -> None:
    arguments = ["late", "--max", 1, *(["-q"] if quiet else []), "sh", "-c", "exit 5"]
    with begun(counterd, *arguments) as process:
        with client.hold("late", maximum=1):
            if quiet:
                with pytest.raises(subprocess.TimeoutExpired):
                    process.wait(1.5)
            else:
                assert process.stderr is not None
                assert process.stderr.readline() == "counterctl: waiting for 1 of late: 1 of 1 are in use\n"
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (5, "", "")


def test_a_wait_keeps_its_place_in_the_queue(counterd: Daemon, client: Client) -> None:
    """Also after the message that it waits: one request, and the first in the queue stays the first."""
    with counterd.client() as other:
        other.acquire("place", maximum=1)
        with begun(counterd, "place", "--max", 1, "sh", "-c", "echo ran") as process:
            assert process.stderr is not None
            assert process.stderr.readline() == "counterctl: waiting for 1 of place: 1 of 1 are in use\n"
            before = int(client.stats()["command:take"])
            waiting = threading.Thread(target=lambda: enter(client))
            waiting.start()
            wait_until(lambda: int(other.stats()["waiters"]) == 2, "both wait")
            other.release("place")
            assert line(process) == "ran"
            waiting.join(PATIENCE)
            assert int(client.stats()["command:take"]) == before + 1


def enter(client: Client) -> None:
    with client.hold("place", maximum=1):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait(counterd: Daemon, client: Client, number: signal.Signals) -> None:
    with client.hold("wanted", maximum=1), begun(counterd, "wanted", "--max", 1, "echo", "ran") as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (-number, "", "")


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_signals_are_passed_to_the_command_once(counterd: Daemon) -> None:
    numbers = [signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGTERM]
    with begun(counterd, "signals", "--max", 1, *TELLS) as process:
        assert line(process) == "ready"
        for number in numbers:
            process.send_signal(number)
            assert line(process) == number.name
        process.send_signal(signal.SIGUSR2)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (9, "SIGUSR2\n", "")


def test_a_signal_from_the_terminal_is_not_passed_on_again(counterd: Daemon) -> None:
    with terminal(words(counterd, "keys", "--max", 1, *TELLS)) as screen:
        screen.wait_for(b"ready")
        at = 0
        for key, name in [(b"\x03", b"SIGINT"), (b"\x1c", b"SIGQUIT"), (b"\x03", b"SIGINT")]:
            screen.type(key)
            at = screen.wait_for(name, at)
        screen.process.send_signal(signal.SIGTERM)
        screen.wait_for(b"SIGTERM")
        screen.process.send_signal(signal.SIGUSR2)
        assert screen.ended() == 9
    assert re.findall(rb"SIG\w+", screen.shown) == [b"SIGINT", b"SIGQUIT", b"SIGINT", b"SIGTERM", b"SIGUSR2"]


def test_a_signal_of_the_command_to_its_group_is_not_returned(counterd: Daemon) -> None:
    code = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(0, signal.SIGTERM)
print(signal.sigtimedwait([signal.SIGTERM], 1) is not None, signal.sigtimedwait([signal.SIGTERM], 0.5) is not None)
"""
    arguments = words(counterd, "group", "--max", 1, sys.executable, "-c", code)
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)
    out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "True False\n")


def test_ignored_signals_stay_ignored_in_the_command(counterd: Daemon) -> None:
    """As under nohup; but a command that handles the signal gets it."""
    ignoring = ("sh", "-c", 'trap "" HUP; exec "$@"', "sh", *GROUPED)
    with begun(counterd, "nohup", "--max", 1, *READY, program=ignoring) as process:
        command = int(line(process).split()[1])
        process.send_signal(signal.SIGHUP)
        os.kill(command, signal.SIGHUP)
        process.communicate("end\n", timeout=PATIENCE)
    assert process.returncode == 3
    with begun(counterd, "nohup", "--max", 1, *TELLS, program=ignoring) as process:
        assert line(process) == "ready"
        process.send_signal(signal.SIGHUP)
        assert line(process) == "SIGHUP"


def test_signals_ignored_by_python_have_their_default_in_the_command(counterd: Daemon) -> None:
    found = run(counterd, "pipes", "--max", 1, "grep", "-E", "SigBlk|SigIgn", "/proc/self/status")
    blocked, ignored = (int(each.split()[1], 16) for each in found.stdout.splitlines())
    assert ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1)) == 0
    assert blocked == 0


def test_counterctl_and_the_command_stop_and_continue_together(counterd: Daemon) -> None:
    def state(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    with begun(counterd, "stopped", "--max", 1, *READY) as process:
        command = int(line(process).split()[1])
        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: state(process.pid) == state(command) == "T", "both are stopped")
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: "T" not in (state(process.pid), state(command)), "both go on")
        process.communicate("end\n", timeout=PATIENCE)
    assert process.returncode == 3


# ---- the permits -----------------------------------------------------------------------------------------------------


def test_permits_are_held_while_the_command_runs(counterd: Daemon, client: Client) -> None:
    with begun(counterd, "held", "-n", 2, "--max", 5, *READY) as process:
        assert line(process).startswith("ready")
        assert client.get("held") == 2
        process.communicate("end\n", timeout=PATIENCE)
        wait_until(lambda: client.get("held") == 0, "what was held comes back")


def test_permits_outlast_a_killed_counterctl(counterd: Daemon, client: Client) -> None:
    with begun(counterd, "killed", "--max", 1, *READY) as process:
        command = int(line(process).split()[1])
        process.kill()
        process.wait(PATIENCE)
        connections = counterd.stats()["curr_connections"]
        assert client.get("killed") == 1
        os.kill(command, signal.SIGKILL)
        wait_until(lambda: client.get("killed") == 0, "what was held comes back")
        assert counterd.stats()["curr_connections"] == connections - 1


def test_with_close_permits_end_with_counterctl(counterd: Daemon, client: Client) -> None:
    with begun(counterd, "closed", "--max", 1, "--close", *READY) as process:
        command = int(line(process).split()[1])
        assert client.get("closed") == 1
        process.kill()
        wait_until(lambda: client.get("closed") == 0, "what was held comes back")
        os.kill(command, 0)
        assert process.stdin is not None
        process.stdin.close()


def test_permits_end_with_the_command_despite_background_processes(counterd: Daemon, client: Client) -> None:
    found = run(counterd, "left", "--max", 1, "sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!")
    left = int(found.stdout)
    try:
        os.kill(left, 0)
        wait_until(lambda: client.get("left") == 0, "what was held comes back")
    finally:
        os.kill(left, signal.SIGKILL)


# ---- a server that goes ----------------------------------------------------------------------------------------------


def test_the_command_ends_with_the_server(start: Callable[..., Daemon]) -> None:
    counterd = start()
    with begun(counterd, "a", "-n", 2, "--max", 2, *READY) as process:
        assert line(process).startswith("ready")
        counterd.stop()
        out, err = process.communicate(timeout=PATIENCE)
    where = f"127.0.0.1:{counterd.address.port}"
    assert (process.returncode, out) == (125, "")
    assert err == f"counterctl: lost the connection to {where}, and with it 2 of a: sh is ended\n"


def test_with_on_lost_ignore_the_command_outlives_the_server(start: Callable[..., Daemon]) -> None:
    counterd = start(status=-signal.SIGKILL)
    with begun(counterd, "a", "--max", 2, "--on-lost", "ignore", *READY) as process:
        assert line(process).startswith("ready")
        counterd.process.kill()
        counterd.process.wait(PATIENCE)
        assert process.stderr is not None
        where = f"127.0.0.1:{counterd.address.port}"
        said = f"counterctl: lost the connection to {where}, and with it 1 of a: sh continues without them\n"
        assert process.stderr.readline() == said
        out, err = process.communicate("end\n", timeout=PATIENCE)
    assert (process.returncode, out, err) == (3, "", "")


def test_a_command_that_does_not_end_is_killed(start: Callable[..., Daemon]) -> None:
    counterd = start()
    code = "import os; os.setpgid(0, 0); from counterd.cli.ctl import main, run; run.GRACE_S = 0.3; main()"
    with begun(counterd, "a", "--max", 2, *TELLS, program=(sys.executable, "-c", code)) as process:
        assert line(process) == "ready"
        counterd.stop()
        assert line(process) == "SIGTERM"
        out, _ = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (125, "")
