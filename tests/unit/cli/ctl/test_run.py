"""counterctl run: which options belong to the command, its environment, and which signals are passed on."""

from __future__ import annotations

import os
import signal

import click
import pytest

from counterd.cli.ctl.holding import Permits
from counterd.cli.ctl.run import EXIT_FAILED, Taken, environment, run, spawn


def parsed(*words: str) -> dict[str, object]:
    return run.make_context("run", list(words)).params


@pytest.mark.parametrize(
    "words",
    [
        ("jobs", "--max", "3", "-q", "ls", "-n", "1"),
        ("jobs", "--max", "3", "-q", "--", "ls", "-n", "1"),
        ("--max", "3", "jobs", "-q", "ls", "-n", "1"),
        ("--max=3", "-q", "jobs", "ls", "-n", "1"),
        ("-qm3", "jobs", "--", "ls", "-n", "1"),
        ("-q", "-m3", "--", "jobs", "ls", "-n", "1"),
    ],
)
def test_options_end_where_the_command_begins(words: tuple[str, ...]) -> None:
    found = parsed(*words)
    assert (found["name"], found["command"]) == (b"jobs", ("ls", "-n", "1"))
    assert (found["maximum"], found["quiet"], found["resources"]) == (3, True, 1)


def test_a_second_double_dash_belongs_to_the_command() -> None:
    assert parsed("jobs", "-m", "1", "--", "--", "ls")["command"] == ("--", "ls")
    assert parsed("-m", "1", "--", "jobs", "--", "-q")["command"] == ("--", "-q")


def test_a_name_may_look_like_an_option() -> None:
    found = parsed("--max", "1", "--", "-n", "ls", "-q")
    assert (found["name"], found["command"], found["quiet"]) == (b"-n", ("ls", "-q"), False)


@pytest.mark.parametrize("words", [(), ("jobs", "ls"), ("jobs", "-m", "1"), ("-x", "jobs", "ls"), ("jobs", "-m")])
def test_usage_errors_have_a_status_of_their_own(words: tuple[str, ...]) -> None:
    with pytest.raises(click.UsageError) as raised:
        parsed(*words)
    assert raised.value.exit_code == EXIT_FAILED


def test_the_environment_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COUNTERD_FD", "7")
    monkeypatch.setenv("HOME", "/home/somebody")
    for ours in ("COUNTERD_BUILD", "COUNTERD_EXAMPLES"):  # of the tests themselves
        monkeypatch.delenv(ours, raising=False)
    told = environment(Permits(b"db:\xff", 2, 10), 12)
    assert {key: value for key, value in told.items() if key.startswith(b"COUNTERD_")} == {
        b"COUNTERD_NAME": b"db:\xff",
        b"COUNTERD_PERMITS": b"2",
        b"COUNTERD_RESOURCES": b"2",
        b"COUNTERD_MAXIMUM": b"10",
        b"COUNTERD_FD": b"12",
    }
    assert told[b"HOME"] == b"/home/somebody"
    assert b"COUNTERD_FD" not in environment(Permits(b"db", 2, 10), None), "that of an outer one"


@pytest.mark.parametrize(("code", "sent"), [(0, True), (-1, True), (-6, True), (0x80, False), (1, False)])
def test_signals_from_the_kernel_are_distinguished(code: int, sent: bool) -> None:
    """Sent: SI_USER, SI_QUEUE, SI_TKILL. Not sent: SI_KERNEL, and the codes of single signals."""
    assert Taken(signal.SIGINT, code, 1).was_sent() is sent


def test_a_command_gets_the_given_signal_mask() -> None:
    code = "import signal, os; os._exit(len(signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    for mask in (set[signal.Signals](), {signal.SIGUSR1, signal.SIGUSR2}):
        pid = spawn(("python3", "-c", code), dict(os.environb), mask)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(mask)
