"""`counterctl smockron` against a real master."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kit import daemon, gates
from kit.daemon import wait_until
from kit.gates import DAY_MS, SETTINGS, Gate, gate
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNTERCTL = str(Path(sys.executable).with_name("counterctl"))
DONE = (0, "", "")


class Place:
    """A daemon, and the address of it for counterctl."""

    def __init__(self, running: daemon.Daemon) -> None:
        self.daemon = running
        self.address, self.control = gates.addresses(running)
        admin = running.address_of("admin")
        self.environment = daemon.environment(
            {
                "SMOCKRON_URL": f"smockron://{self.address.host}:{self.address.port}",
                "COUNTERD_ADMIN": f"http://{admin.host}:{admin.port}",
            }
        )

    def command(self, *arguments: str | bytes) -> list[str | bytes]:
        options = ["--control-port", str(self.control.port), "--timeout", f"{PATIENCE:g}s"]
        return [COUNTERCTL, "smockron", *options, *arguments]

    def ask(self, *arguments: str | bytes) -> tuple[int, str, str]:
        """Runs counterctl. Returns (status, stdout, stderr)."""
        done = subprocess.run(
            self.command(*arguments), capture_output=True, timeout=PATIENCE, env=self.environment, check=False
        )
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def rows(self, *arguments: str | bytes) -> Any:
        status, stdout, stderr = self.ask(*arguments, "--output", "json")
        assert (status, stderr) == (0, "")
        return json.loads(stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("daemon")
    rules = {**gates.RULES, "calm": {"rate": "1/day", "burst": 100}}
    settings = {**SETTINGS, "smockron.rules": gates.write_rules(directory, rules)}
    with daemon.running(directory, {**settings, "admin.enable": "true", "admin.bind": "127.0.0.1:0"}) as running:
        yield Place(running)
        assert not running.lines("ERROR|Traceback")


@pytest.fixture
def ear(place: Place) -> Iterator[Gate]:
    with gate(place.daemon) as found:
        yield found


def test_sent_messages_cause_control_messages(place: Place, ear: Gate) -> None:
    assert place.ask("send", "login", "accepted", "me") == DONE
    told = ear.told()
    assert (told.domain, told.word, told.identifier) == (b"login", "DELAY_UNTIL", b"me")
    ahead_ms = time.time_ns() // 1_000_000 + 3_600_000
    assert place.ask("send", "login", "delayed", "you", "--until", str(ahead_ms), "--log-info", "curl") == DONE
    assert ear.told().time_ms == ahead_ms + DAY_MS
    assert place.ask("send", "login", "accepted", "they", "--time", str(ahead_ms)) == DONE
    assert ear.told().time_ms == ahead_ms + DAY_MS
    assert place.ask("send", "login", "rejected", "nobody") == DONE
    assert place.ask("forget", "login", "me") == (0, "", "counterctl: asked the master to forget me in login\n")
    assert ear.told().word == "FORGET"


def test_throttled_lists_delayed_identifiers(place: Place, ear: Gate) -> None:
    for identifier in (b"wait-1", b"wait-2", b"wait-2"):
        ear.account(b"login", identifier)
    rows = place.rows("throttled", "--match", "wait-")
    assert [(row["identifier"], row["domain"]) for row in rows] == [("wait-2", "login"), ("wait-1", "login")]
    assert [round(row["wait"] / 86_400, 2) for row in rows] == [2, 1]
    status, stdout, stderr = place.ask("throttled", "--match", "wait-", "--limit", "1")
    assert (status, stderr) == (0, "counterctl: showing 1 of 2 rows\n")
    assert stdout.splitlines()[1].split()[:2] == ["wait-2", "login"]


def test_domains_lists_each_domain(place: Place, ear: Gate) -> None:
    ear.account(b"calm", b"me", 3)
    rows = {row["domain"]: row for row in place.rows("domains", "--sort", "accepted")}
    expected = {
        "domain": "calm", "interval": 86_400, "burst": 8_640_000, "identifiers": 1, "accepted": 3, "delayed": 0,
        "rejected": 0, "told": 0,
    }  # fmt: skip
    assert expected.items() <= rows["calm"].items()
    assert rows["login"]["interval"] == 86_400


def test_watch_as_json(place: Place, ear: Gate) -> None:
    watching = subprocess.Popen(
        place.command("watch", "login", "nowhere", "--output", "json"), stdout=subprocess.PIPE, env=place.environment
    )
    assert watching.stdout is not None

    with watching:
        wait_until(lambda: subscriptions(place.daemon) == 3, "its two topics, and that of the gatekeeper here")
        ear.account(b"api", b"not this", 3)
        ear.account(b"login", b"seen\xff")
        row = json.loads(watching.stdout.readline())
        assert (row["domain"], row["identifier"], row["word"]) == ("login", "seen\\xff", "DELAY_UNTIL")
        assert round(row["wait"] / 86_400, 2) == 1
        assert row["until_ms"] > time.time_ns() // 1_000_000
        watching.send_signal(signal.SIGINT)
        assert watching.wait(PATIENCE) == 0


def test_watch_as_a_table(place: Place, ear: Gate) -> None:
    command = place.command("watch", "login")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=place.environment) as watching:
        wait_until(lambda: subscriptions(place.daemon) == 2, "its topic, and that of the gatekeeper here")
        ear.account(b"login", b"me")
        assert watching.stdout is not None
        assert re.fullmatch(r"[0-9:.]+  login  me  DELAY_UNTIL  [0-9]+ h(ours)?\n", watching.stdout.readline())
        watching.send_signal(signal.SIGINT)
        assert watching.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (
            ("send", "login", "accepted", "me", "--until", "5"),
            2,
            "--until is required if the request was delayed, and not allowed otherwise",
        ),
        (
            ("send", "login", "delayed", "me"),
            2,
            "--until is required if the request was delayed, and not allowed otherwise",
        ),
        (("send", "login", "forgotten", "me"), 2, "'forgotten' is not one of 'accepted', 'delayed', 'rejected'"),
        (("send", "login\0".replace("\0", "x" * 300), "accepted", "me"), 2, "a domain has 0 to 255 bytes, not 305"),
        (("throttled", "--limit", "0"), 2, "--limit"),
    ],
)
def test_wrong_arguments_are_refused(place: Place, arguments: tuple[str, ...], status: int, text: str) -> None:
    found, stdout, stderr = place.ask(*arguments)
    assert (found, stdout) == (status, "")
    assert text in stderr


@pytest.mark.parametrize("where", [("--socket", "/run/nowhere"), ("--port", "65535")])
@pytest.mark.parametrize("command", ["watch", "gate"])
def test_the_control_address_is_given_or_the_next_port(where: tuple[str, str], command: str) -> None:
    done = daemon.run("smockron", *where, command, program=[COUNTERCTL])
    assert (done.returncode, "has no address for control messages" in done.stderr) == (2, True), done.stderr


def test_the_wrong_port_and_other_servers_are_errors(place: Place) -> None:
    control = f"smockron://{place.control.host}:{place.control.port}"
    assert place.ask("-u", control, "send", "login", "accepted", "me") == (
        1,
        "",
        f"counterctl: {place.control.host}:{place.control.port} does not accept this kind of connection: "
        "it is of type PUB\n",
    )
    admin = place.environment["COUNTERD_ADMIN"].replace("http", "smockron")
    status, _, stderr = place.ask("-u", admin, "send", "login", "accepted", "me")
    assert status == 3
    assert "does not speak the smockron protocol: these bytes are not ZMTP" in stderr
    status, _, stderr = place.ask("-u", "smockron://127.0.0.1:1", "send", "login", "accepted", "me")
    assert (status, stderr) == (3, "counterctl: cannot connect to 127.0.0.1:1: Connection refused\n")


def test_a_watch_ends_with_its_server(tmp_path: Path) -> None:
    settings = {**SETTINGS, "smockron.rules": gates.write_rules(tmp_path)}
    with daemon.running(tmp_path / "daemon", settings) as running:
        one, other = gates.addresses(running)
        watching = subprocess.Popen(
            [COUNTERCTL, "smockron", "-p", str(one.port), "--control-port", str(other.port), "watch"],
            stderr=subprocess.PIPE,
            env=daemon.environment(),
        )
        with watching:
            wait_until(lambda: subscriptions(running) == 1, "it watches")
            running.kill()
            assert watching.wait(PATIENCE) == 3
            assert watching.stderr is not None
            assert watching.stderr.read().endswith(f"{other.host}:{other.port} closed the connection\n".encode())


def subscriptions(running: daemon.Daemon) -> int:
    """How many subscriptions the daemon has."""
    count = len(running.lines("stats of smockron"))
    running.send_signal(signal.SIGUSR1)
    line = running.wait_for_log("stats of smockron", count + 1)
    return int(line.partition(" subscriptions=")[2].split()[0])
