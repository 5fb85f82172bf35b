"""The command counterctl as a process, against the real daemon and against other servers."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from counterd.protocols.counter.wire import Opcode
from kit import daemon
from kit.daemon import PATIENCE
from kit.scripted import Hangup
from kit.scripted.counter import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from counterd.client import Client
    from kit.daemon import Daemon
    from kit.scripted.counter import Request

SCRIPT = Path(sys.executable).parent / "counterctl"


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment without variables that would change the result: an address, or PYTHONUNBUFFERED."""
    kept = daemon.environment({"PATH": f"{SCRIPT.parent}:{os.environ['PATH']}"})
    others = {name: text for name, text in kept.items() if not name.startswith(("COUNTERD_", "PYTHON"))}
    return {**others, **(extra or {})}


def ctl(port: int, *arguments: str | bytes, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Runs counterctl until it ends."""
    return subprocess.run(
        [SCRIPT, "-p", str(port), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(env),
        check=False,
    )


@contextmanager
def running(port: int, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Runs counterctl during the block, with pipes for all three streams."""
    process = subprocess.Popen(
        [SCRIPT, "-p", str(port), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str, str]:
    """Sends a signal. Returns (status, the rest of stdout, stderr)."""
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE)
    return process.returncode, stdout, stderr


@pytest.fixture(scope="module")
def counterd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon.running(tmp_path_factory.mktemp("daemon")) as served:
        yield served


@pytest.fixture
def client(counterd: Daemon) -> Iterator[Client]:
    with counterd.client() as connected:
        yield connected


def used(client: Client, name: str) -> int:
    return next((entry.consumption for entry in client.dump() if entry.name == name.encode()), 0)


# ---- what it shows ----


def test_get_dump_and_stats_show_permits_in_use(counterd: Daemon, client: Client) -> None:
    client.acquire("shown", 3, maximum=10)
    client.acquire(b"shown\xff", 1, maximum=10)
    done = ctl(counterd.address.port, "get", "shown", b"shown\xff", "nothing")
    assert (done.returncode, done.stderr) == (1, "")
    rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert rows == [["name", "consumption"], ["shown", "3"], [r"shown\xff", "1"], ["nothing", "not found"]]
    done = ctl(counterd.address.port, "dump", "--match", "shown*", "--held", "--output", "json")
    assert [
        tuple(row[field] for field in ("name", "consumption", "peak", "limit")) for row in json.loads(done.stdout)
    ] == [
        ("shown", 3, 3, 10),
        (r"shown\xff", 1, 1, 10),
    ]
    figures = json.loads(ctl(counterd.address.port, "stats", "--output", "json").stdout)
    assert figures["pid"] == counterd.pid


def test_the_environment_variable_sets_the_server(short_path: Path, start: Callable[..., Daemon]) -> None:
    path = str(short_path / "socket")
    start({"counter.socket": path})
    done = subprocess.run(
        [SCRIPT, "ping"],
        capture_output=True,
        text=True,
        env=environment({"COUNTERD_URL": f"counter+unix://{path}"}),
        check=True,
    )
    assert done.stdout.startswith(f"{path} answered in ")


def test_bench_uses_the_same_server(counterd: Daemon) -> None:
    done = ctl(counterd.address.port, "bench", "-n", "100", "-r", "10", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert "requests per second" in done.stdout
    names = json.loads(ctl(counterd.address.port, "dump", "--output", "json").stdout)
    assert len(names) >= 10


# ---- what it holds ----


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("options", [["--for", "5m"], []])
def test_a_signal_ends_a_hold(
    counterd: Daemon, client: Client, number: signal.Signals, status: int, options: list[str]
) -> None:
    with running(counterd.address.port, "acquire", "held", "2", "10", *options) as process:
        assert line_of(process) == f"acquired 2 of held (maximum 10) {'for 5 min' if options else 'until Ctrl-C'}\n"
        assert used(client, "held") == 2
        assert end(process, number) == (status, "", "counterctl: released 2 of held\n")
    assert used(client, "held") == 0  # by a release: the end of its connection would come a moment later


def test_the_end_of_stdin_ends_a_hold(counterd: Daemon, client: Client) -> None:
    with running(counterd.address.port, "acquire", "until", "2", "10", "--until-stdin-closes") as process:
        assert line_of(process) == "acquired 2 of until (maximum 10) until standard input is closed\n"
        assert process.stdin is not None
        process.stdin.write("this is not the end\n")
        process.stdin.flush()
        other = ctl(counterd.address.port, "acquire", "until", "9", "10")
        assert (other.returncode, other.stdout) == (1, "")
        assert other.stderr == "counterctl: 9 of until not available: 2 of 10 are in use\n"
        assert process.poll() is None
        assert process.communicate(timeout=PATIENCE) == ("", "counterctl: released 2 of until\n")
    assert process.returncode == 0
    assert used(client, "until") == 0


def wait_for_waiters(client: Client, count: int) -> None:
    daemon.wait_until(lambda: int(client.stats()["waiters"]) == count, f"{count} wait")


def test_a_hold_waits_in_the_queue_of_the_server(counterd: Daemon, client: Client) -> None:
    client.acquire("awaited", 3, maximum=3)
    words = ("awaited", "3", "3", "--wait", "5m", "--for", "0")
    late, urgent = ("hold", *words, "--fair-key", "a", "--weight", "2"), ("acquire", *words, "--priority", "9")
    with running(counterd.address.port, *late) as one:
        wait_for_waiters(client, 1)
        with running(counterd.address.port, *urgent) as other:
            wait_for_waiters(client, 2)
            for process in (one, other):
                assert process.stderr is not None
                assert process.stderr.readline() == "counterctl: waiting for 3 of awaited: 3 of 3 are in use\n"
            before = client.stats()["command:acquire"]
            client.release("awaited", 3)
            for process in (other, one):
                assert line_of(process) == "acquired 3 of awaited (maximum 3) for 0 s\n"
            assert client.stats()["command:acquire"] == before


def test_take_gets_all_items_or_none(counterd: Daemon, client: Client) -> None:
    words = ("take", "calls=2/3", "lock", "--rate", "tokens=7@10/1440m")
    with running(counterd.address.port, *words) as process:
        rows = [line_of(process) for _ in range(3)]
        number = rows[0].rpartition(" ")[2].strip(")\n")
        assert rows == [
            f"took 2 of calls (maximum 3, grant {number})\n",
            f"took 1 of lock (maximum 1, grant {number})\n",
            f"took 7 of tokens (maximum 10, grant {number})\n",
        ]
        assert used(client, "calls") == 2
        other = ctl(counterd.address.port, "take", "calls=1/3", "lock")
        assert (other.returncode, other.stdout) == (1, "")
        assert other.stderr == "counterctl: 1 of lock not available: 1 of 1 are in use\n"
        other = ctl(counterd.address.port, "take", "--rate", "tokens=7@10/1440m", "--wait", "10ms")
        assert other.returncode == 1
        said = "7 of tokens not available within 0.01 s: 7 of 10 are in use; enough units may be available in 9 h"
        assert other.stderr == f"counterctl: {said}\n"
        assert used(client, "calls") == 2
        assert end(process, signal.SIGINT) == (130, "", "counterctl: released 2 of calls, 1 of lock\n")
    assert (used(client, "calls"), used(client, "lock")) == (0, 0)


def test_take_reports_what_it_waits_for_until_a_signal(counterd: Daemon, client: Client) -> None:
    client.acquire("calls", 2, maximum=3)
    words = ("take", "calls=2/3", "free", "--rate", "tokens=7@10/1440m", "--wait", "5m")
    with running(counterd.address.port, *words) as process:
        assert process.stderr is not None
        assert [process.stderr.readline() for _ in range(3)] == [
            "counterctl: waiting for 2 of calls: 2 of 3 are in use\n",
            "counterctl: waiting for 1 of free: 0 of 1 are in use\n",
            "counterctl: waiting for 7 of tokens\n",
        ]
        assert end(process, signal.SIGTERM) == (143, "", "")
    wait_for_waiters(client, 0)


def test_take_of_only_rates_does_not_hold(counterd: Daemon) -> None:
    done = ctl(counterd.address.port, "take", "--rate", "alone=3@10/1440m/20", "--output", "json")
    assert (done.returncode, done.stderr) == (0, "")
    row = json.loads(done.stdout)
    assert (row["name"], row["amount"], row["maximum"], row["grant"] > 0) == ("alone", 3, 20, True)


def test_take_settles_the_used_units(counterd: Daemon) -> None:
    words = ("take", "--rate", "settled=7@10/1440m", "--rate", "other=1@10/1440m", "--settle")
    with running(counterd.address.port, *words) as process:
        assert [line_of(process)[:15] for _ in range(2)] == ["took 7 of settl", "took 1 of other"]
        assert process.stdin is not None
        process.stdin.write("settled=3\n")
        process.stdin.flush()
        assert process.stderr is not None
        assert process.stderr.readline() == "counterctl: settled settled: 3 used\n"
        other = ctl(counterd.address.port, "take", "--rate", "settled=8@10/1440m")
        assert ": 3 of 10 are in use; enough units may be available in " in other.stderr
        assert ctl(counterd.address.port, "take", "--rate", "settled=7@10/1440m").returncode == 0
        assert process.communicate("other=0", timeout=PATIENCE) == ("", "counterctl: settled other: 0 used\n")
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("told", "status", "message"),
    [
        ("twice=3\ntwice=3\n", 1, "counterctl: settled twice: 3 used\ncounterctl: Not found"),
        ("what\n", 2, "counterctl: expected a line NAME=USED, not what\n"),
        ("what=1\n", 2, "what is not a rate of this Take that can be settled"),
    ],
)
def test_invalid_settlements_are_errors(counterd: Daemon, told: str, status: int, message: str) -> None:
    with running(counterd.address.port, "take", "--rate", "twice=7@1000/1s", "--settle") as process:
        _, said = process.communicate(told, timeout=PATIENCE)
    assert (process.returncode, message in said) == (status, True), said


def test_commands_for_counters_send_their_name(counterd: Daemon, client: Client) -> None:
    """All that connect for counters; no other command."""
    before = int(client.stats()["command:who"])
    for words in (
        ["hold", "who", "1", "2", "--for", "0"],
        ["take", "who", "--for", "0"],
        ["run", "who", "-m", "2", "true"],
        ["ping"],
    ):
        done = ctl(counterd.address.port, "--name", "nightly", *words)
        assert done.returncode == 0, done.stderr
    assert int(client.stats()["command:who"]) == before + 4
    done = ctl(counterd.address.port, "--name", "a\nb", "ping")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)


def test_name_is_refused_for_other_protocols() -> None:
    words = [SCRIPT, "--name", "nightly", "beanstalk", "tubes"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE, env=environment(), check=False)
    assert (done.returncode, "--name is for connections of the counter protocol" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["take"], "name at least one counter or --rate"),
        (["take", "a=2/1"], "AMOUNT must be 1 to MAX, not 2"),
        (["take", "a", "a"], "twice"),
        (["take", "--rate", "a=1/5"], "expected NAME=UNITS[@LIMIT/PERIOD[/BURST]]"),
        (["take", "a", "--settle"], "--settle needs a --rate"),
        (["take", "--rate", "a=1@5/1s", "--settle", "--for", "1s"], "either --for or --settle"),
        (["take", "a", "--for", "1s", "--until-stdin-closes"], "either --for or --until-stdin-closes"),
    ],
)
def test_invalid_takes_are_refused(counterd: Daemon, words: list[str], message: str) -> None:
    done = ctl(counterd.address.port, *words)
    assert (done.returncode, message in done.stderr, "Traceback" in done.stderr) == (2, True, False)


def test_stdin_that_was_never_open_ends_a_hold_at_once(counterd: Daemon) -> None:
    command = f"exec {SCRIPT} -p {counterd.address.port} acquire closed 1 1 --until-stdin-closes <&-"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE, env=environment(), check=False
    )
    assert (done.returncode, done.stderr) == (0, "counterctl: released 1 of closed\n")


def test_a_hold_ends_with_its_daemon(start: Callable[..., Daemon]) -> None:
    served = start()
    with running(served.address.port, "acquire", "a", "1", "1", "--for", "5m") as process:
        line_of(process)
        served.stop()
        _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3
    assert stderr.count("\n") == 1
    assert stderr.startswith("counterctl: ")


# ---- what it watches ----


def test_watch_shows_changes(counterd: Daemon, client: Client) -> None:
    with running(counterd.address.port, "watch", "watched", "--interval", "10ms", "--output", "json") as process:
        assert json.loads(line_of(process))["consumption"] is None
        client.acquire("watched", 4, maximum=10)
        row = json.loads(line_of(process))
        assert (row["name"], row["consumption"]) == ("watched", 4)
        assert row["time"].endswith("+00:00")
        client.release("watched", 4)
        assert json.loads(line_of(process))["consumption"] == 0
        assert end(process, signal.SIGINT) == (0, "", "")


class Restarting(Server):
    """Closes the first connection at the third Get, and the second one at once; then the value is 7, and then 8."""

    def answer(self, request: Request) -> bytes:
        asked, peer = len(self.asked(Opcode.GET)), self.peer_of(request)
        if peer.number == 1 or (peer.number == 0 and asked == 3):
            raise Hangup
        self.used[request.name] = 0 if peer.number == 0 else 7 if asked < 6 else 8
        return super().answer(request)


def test_watch_connects_again() -> None:
    with Restarting() as server, running(server.address.port, "watch", "a", "--interval", "20ms") as process:
        where = f"127.0.0.1:{server.address.port}"
        assert [line_of(process).split()[1:] for _ in range(3)] == [["a", "0"], ["a", "7"], ["a", "8"]]
        status, _, stderr = end(process, signal.SIGINT)
    lost, found = stderr.splitlines()
    assert status == 0
    why = "it may expect TLS, have no room, or not allow this address"  # a new connection was closed at once
    assert lost == f"counterctl: {where} closed the connection: {why}; trying again"
    assert found == f"counterctl: reconnected to {where}"
    moments = [request.seconds for request in server.asked(Opcode.GET)]
    # But for the call that the client makes again by itself it never asks faster than it was told to.
    assert sum(after - before <= 0.019 for before, after in itertools.pairwise(moments)) <= 1


# ---- where there is no counterd ----


def test_the_error_if_no_server_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        done = ctl(port, "ping")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == f"counterctl: cannot connect to 127.0.0.1:{port}: Connection refused\n"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"-ERR unknown command '\\x90'\r\n", "does not speak the counter protocol: "),
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n", "does not speak the counter protocol: "),
        (b"", "closed the connection"),
        (None, "did not answer within 0.2 s"),
    ],
)
def test_a_server_of_another_protocol(answer: bytes | None, why: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                if answer is None:
                    connection.recv(100)
                else:
                    connection.sendall(answer)

        other = threading.Thread(target=serve)
        other.start()
        limit = "0.2s" if answer is None else "10s"
        done = ctl(listener.getsockname()[1], "--timeout", limit, "get", "a")
        other.join()
    assert (done.returncode, done.stdout) == (3, "")
    assert why in done.stderr
    assert done.stderr.count("\n") == 1


# ---- where nobody reads ----


def test_a_pipe_closed_early_is_no_error(counterd: Daemon, client: Client) -> None:
    """More output than a pipe holds."""
    for index in range(5):
        client.acquire(b"%d" % index + b"x" * 60_000, 1, maximum=1)
    command = f"{SCRIPT} -p {counterd.address.port} dump --output csv | head -1; echo ${{PIPESTATUS[@]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE, env=environment(), check=False
    )
    assert (done.stdout.startswith("name,consumption"), done.stderr) == (True, "")
    assert done.stdout.splitlines()[1:] == ["141 0"]


def test_a_pipe_closed_before_any_output(counterd: Daemon) -> None:
    """Less output than a buffer holds: it is only noticed at the end."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [SCRIPT, "-p", str(counterd.address.port), "stats"],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=PATIENCE,
            env=environment(),
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_full_disk_is_an_error(counterd: Daemon) -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [SCRIPT, "-p", str(counterd.address.port), "stats"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            env=environment(),
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "counterctl: No space left on device\n")


@pytest.mark.parametrize("command", ["ping", "stats", "dump", "acquire name 1 1"])
def test_closed_standard_output_is_an_error(counterd: Daemon, command: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -p {counterd.address.port} {command} >&-', SCRIPT],
        stderr=subprocess.PIPE, text=True, timeout=PATIENCE, env=environment(), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, "counterctl: standard output: Bad file descriptor")
    assert "Traceback" not in done.stderr


def test_a_command_without_output_needs_none(counterd: Daemon) -> None:
    done = subprocess.run(
        ["sh", "-c", f'"$0" -p {counterd.address.port} run name --max 1 true >&-', SCRIPT],
        stderr=subprocess.PIPE, text=True, timeout=PATIENCE, env=environment(), check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


# ---- in a shell ----


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("counterctl du", ["dump"]),
        ("counterctl dump --so", ["--sort"]),
        ("counterctl dump --sort p", ["peak"]),
        ("counterctl throttr pu", ["publish", "purge"]),
        ("counterctl --output ", ["csv", "json", "table"]),
    ],
)
def test_bash_completes_commands_and_options(words: str, expected: list[str]) -> None:
    assert completed(words) == expected


def test_bash_completes_names_of_counters(counterd: Daemon, client: Client) -> None:
    for name in (b"tab-one", b"tab:two", b"tab with spaces", b"tab\xff", b"tab\n", b"other-tab"):
        client.acquire(name, maximum=1)
    before = f"counterctl -p {counterd.address.port}"
    assert completed(f"{before} get ta") == ["tab-one", "tab:two"]
    assert completed(f"{before} get tab-one oth") == ["other-tab"]
    assert completed(f"{before} holders tab-") == ["tab-one"]
    assert completed("counterctl -p 1 get ta") == completed(f"{before} --socket x get ta") == []


def completed(words: str) -> list[str]:
    """The completions that bash offers at the end of these words. Nothing else may be printed."""
    code = f"""
eval "$(counterctl completion bash)"
complete -p counterctl >/dev/null || exit 1
read -ra COMP_WORDS <<<"{words}"
[[ "{words}" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_counterctl_completion counterctl
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "--norc", "-c", code], capture_output=True, text=True, timeout=PATIENCE, env=environment(), check=True
    )
    assert done.stderr == ""
    return sorted(done.stdout.split())


def test_a_terminal_shows_a_table(counterd: Daemon, client: Client) -> None:
    client.acquire("seen", 3, maximum=10)
    master, slave = os.openpty()
    with os.fdopen(slave, "wb") as terminal:
        subprocess.run(
            [SCRIPT, "-p", str(counterd.address.port), "get", "seen"],
            stdout=terminal,
            timeout=PATIENCE,
            env=environment({"TERM": "xterm"}),
            check=True,
        )
        text = os.read(master, 65536).decode()
    os.close(master)
    assert "seen" in text
    assert "\N{BOX DRAWINGS LIGHT HORIZONTAL}" in text
