"""The commands for counters, run in this process against a server of plain sockets that the test controls."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner, Result

from counterd.cli.ctl import main
from counterd.cli.ctl.data import place
from counterd.client._addresses import Address, Tls
from counterd.protocols.counter.wire import Opcode, Status
from kit.scripted import Hangup, counter
from kit.scripted.script import Script, Step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.scripted import Peer
    from kit.scripted.counter import Request


def ctl(port: int, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["-p", str(port), *arguments], input=stdin, env={"COUNTERD_URL": None})


class Server(counter.Server):
    """Knows only the counters that were acquired. used[name]: what other clients hold."""

    def __init__(self) -> None:
        super().__init__()
        self.used[b"db:main"] = 3

    def answer(self, request: Request) -> bytes:
        if request.opcode == Opcode.GET and request.name not in self.used:
            return counter.refusal(request, Status.NOT_FOUND)
        return super().answer(request)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


# ---- ping ----


def test_ping_shows_the_response_time(server: Server) -> None:
    done = ctl(server.address.port, "ping")
    assert done.exit_code == 0
    assert done.stdout.startswith(f"127.0.0.1:{server.address.port} answered in ")
    assert done.stderr == ""


def test_repeated_pings(server: Server) -> None:
    done = ctl(server.address.port, "ping", "-c", "3", "--interval", "1ms", "--output", "json")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["seq"] for row in rows] == [1, 2, 3]
    assert all(0 < row["seconds"] < 10 for row in rows)
    assert done.stderr.startswith("counterctl: 3 replies: ")


# ---- get, stats, dump ----


def test_get_as_a_table(server: Server) -> None:
    done = ctl(server.address.port, "get", "db:main")
    assert (done.exit_code, done.stdout) == (0, "name     consumption\ndb:main            3\n")


def test_get_of_an_unknown_counter(server: Server) -> None:
    done = ctl(server.address.port, "get", "db:main", "none")
    assert (done.exit_code, done.stderr) == (1, "")
    assert done.stdout.splitlines()[1:] == ["db:main            3", "none       not found"]
    found = json.loads(ctl(server.address.port, "get", "none", "--output", "json").stdout)
    assert found == [{"name": "none", "consumption": None}]


def test_stats_as_a_table() -> None:
    def frame(connection: socket.socket) -> None:
        header = connection.recv(12)
        pairs = [(b"objects", b"1234567"), (b"used_memory", b"2048"), (b"uptime", b"7200"), (b"version", b"0.1.0")]
        body = b"".join(struct.pack(">HH", len(name), len(value)) + name + value for name, value in pairs)
        connection.sendall(bytes([0x91, header[1], 0, 0]) + struct.pack(">I", len(body)) + header[8:12] + body)

    with Script(frame) as running:
        done = ctl(running.port, "stats")
    assert [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]] == [
        ["objects", "1.23M"],
        ["used_memory", "2.00 KiB"],
        ["uptime", "2 h"],
        ["version", "0.1.0"],
    ]
    with Script(frame) as running:
        done = ctl(running.port, "stats", "--output", "json")
    assert json.loads(done.stdout) == {"objects": 1234567, "used_memory": 2048, "uptime": 7200, "version": "0.1.0"}


@pytest.fixture
def several(server: Server) -> Server:
    server.used.update({b"db:main": 2, b"db:idle": 0, b"api": 9, b"\xff": 1})
    server.counters.most.update({b"db:main": 5, b"db:idle": 7, b"api": 9, b"\xff": 1})
    server.used[b"db:main"] = 2
    return server


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], [r"api", "db:idle", "db:main", r"\xff"]),
        (["--held"], ["api", "db:main", r"\xff"]),
        (["--match", "db:*"], ["db:idle", "db:main"]),
        (["--sort", "consumption"], ["api", "db:main", r"\xff", "db:idle"]),
        (["--sort", "peak", "--limit", "2"], ["api", "db:idle"]),
        (["--limit", "0"], []),
    ],
)
def test_dump_filters_and_sorts(several: Server, arguments: list[str], names: list[str]) -> None:
    done = ctl(several.address.port, "dump", "--output", "csv", *arguments)
    header, *rows = done.stdout.splitlines()
    assert header == "name,consumption,peak,limit"
    assert [row.split(",")[0] for row in rows] == names


def test_dump_shows_consumption_and_peak(several: Server) -> None:
    done = ctl(several.address.port, "dump", "--match", "db:main")
    assert done.stdout == "name     consumption  peak  limit\ndb:main            2     5      -\n"


# ---- acquire ----


def test_acquire_releases_at_once(server: Server) -> None:
    done = ctl(server.address.port, "acquire", "db:main", "2", "10", "--for", "0")
    assert (done.exit_code, done.stdout) == (0, "acquired 2 of db:main (maximum 10) for 0 s\n")
    assert done.stderr == "counterctl: released 2 of db:main\n"
    asked = server.asked(Opcode.ACQUIRE, Opcode.RELEASE)
    assert [(each.opcode, each.resources) for each in asked] == [(Opcode.ACQUIRE, 2), (Opcode.RELEASE, 2)]
    assert server.used[b"db:main"] == 3


def test_acquire_of_more_than_is_free(server: Server) -> None:
    done = ctl(server.address.port, "acquire", "db:main", "2", "4")
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "counterctl: 2 of db:main not available: 3 of 4 are in use\n"


def test_acquire_holds_for_a_time(server: Server) -> None:
    begun = time.monotonic()
    done = ctl(server.address.port, "acquire", "db:main", "2", "10", "--for", "100ms", "--output", "json")
    assert time.monotonic() - begun >= 0.1
    assert json.loads(done.stdout) == {"name": "db:main", "permits": 2, "maximum": 10}


def test_acquire_waits_for_a_release(server: Server) -> None:
    """The server says how many are in use; with the second refusal one more is free."""

    class Freed(Server):
        def send(self, peer: Peer, replies: Iterator[bytes]) -> None:
            super().send(peer, replies)
            if len(self.asked(Opcode.ACQUIRE)) == 2:
                self.used[b"db:main"] = 2

    with Freed() as freed:
        done = ctl(freed.address.port, "acquire", "db:main", "2", "4", "--for", "0", "--wait", "1m")
    assert (done.exit_code, done.stdout) == (0, "acquired 2 of db:main (maximum 4) for 0 s\n")
    done = ctl(server.address.port, "acquire", "db:main", "2", "4", "--wait", "1ms")
    assert done.stderr == "counterctl: 2 of db:main not available within 0.001 s: 3 of 4 are in use\n"


class Leaving(Server):
    """Closes the connection as soon as the client holds something."""

    def send(self, peer: Peer, replies: Iterator[bytes]) -> None:
        super().send(peer, replies)
        if peer.held:
            raise Hangup


def test_acquire_until_the_connection_is_lost() -> None:
    with Leaving() as server:
        done = ctl(server.address.port, "acquire", "db:main", "2", "10", "--for", "2m")
    assert done.exit_code == 3
    assert done.stdout == "acquired 2 of db:main (maximum 10) for 2 min\n"
    assert done.stderr.startswith("counterctl: ")
    assert done.stderr.count("\n") == 1
    assert "released" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["a", "3", "2"], "N must be at most MAX: 3 is more than 2"),
        (["a", "0", "2"], "0 is not in the range"),
        (["a", "1", "4294967296"], "is not in the range"),
        (["", "1", "1"], "a name has 1 to 65,535 bytes"),
        (["a", "1", "1", "--for", "1s", "--until-stdin-closes"], "use either --for or --until-stdin-closes"),
    ],
)
def test_invalid_arguments_of_acquire(arguments: list[str], why: str) -> None:
    done = ctl(1, "acquire", *arguments)
    assert done.exit_code == 2
    assert why in done.stderr


# ---- errors ----


def reset(connection: socket.socket) -> None:
    connection.recv(12)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def redis(connection: socket.socket) -> None:
    connection.recv(12)
    connection.sendall(b"-ERR unknown command\r\n")


def silence(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


@pytest.mark.parametrize(
    ("step", "why"),
    [(reset, "reset by peer"), (redis, "does not speak the counter protocol: "), (silence, "did not answer")],
)
@pytest.mark.parametrize(
    "command", [["ping"], ["get", "a"], ["dump"], ["stats"], ["watch", "a"], ["acquire", "a", "1", "1"]]
)
def test_a_server_of_another_protocol(step: Step, why: str, command: list[str]) -> None:
    with Script(step) as running:
        where = f"127.0.0.1:{running.port}"
        done = ctl(running.port, "--timeout", "200ms" if step is silence else "10s", *command)
    assert (done.exit_code, done.stdout) == (3, "")
    assert done.stderr.startswith("counterctl: ")
    assert done.stderr.count("\n") == 1
    assert why in done.stderr
    assert where in done.stderr


# ---- others ----


def test_bench_gets_the_address() -> None:
    assert place(Address("127.0.0.1", 11215)) == []  # which another protocol does not have
    assert place(Address("::1", 7)) == ["--host", "::1", "--port", "7"]
    assert place(Address(path="/run/x")) == ["--socket", "/run/x"]
    assert place(Address("127.0.0.1", 11215, tls=Tls())) == ["--tls"]
    words = place(Address("a", 7, tls=Tls("c", "d")))
    assert " ".join(words) == "--host a --port 7 --tls --cacert c --cert d"


def test_bench_has_the_help_of_counterbench() -> None:
    done = ctl(1, "bench", "--help")
    assert done.exit_code == 0
    assert "--find-max" in done.stdout


def test_bench_without_a_server_is_an_error_of_counterbench() -> None:
    done = ctl(1, "bench", "-n", "1")
    assert done.exit_code == 2
    assert done.stderr.startswith("counterbench: ")
    assert "127.0.0.1:1" in done.stderr


@pytest.mark.parametrize(
    ("shell", "part"), [("bash", "complete -o"), ("zsh", "#compdef"), ("fish", "complete --no-files")]
)
def test_completion_scripts(shell: str, part: str) -> None:
    done = ctl(1, "completion", shell)
    assert done.exit_code == 0
    assert part in done.stdout
    assert "_COUNTERCTL_COMPLETE" in done.stdout
