"""counterctl holders, waiters, holdings, waits, connections and kill against the real daemon and its admin process.

The admin endpoint is on a Unix socket."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.counter import wire
from kit import daemon, peers
from kit.daemon import PATIENCE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

COUNTERCTL = (Path(sys.executable).parent / "counterctl", "--timeout", f"{PATIENCE:g}s")
TOKEN = "a-token"
NAME = b"db \xff%/+"


class Place:
    """A daemon, and the URL of its admin endpoint."""

    def __init__(self, running: daemon.Daemon, url: str) -> None:
        self.daemon = running
        self.url = url

    def ctl(self, *arguments: str | bytes, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
        env = daemon.environment({"COUNTERD_ADMIN": self.url, "COUNTERD_ADMIN_TOKEN": token})
        return subprocess.run(
            [*COUNTERCTL, *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=env,
            check=False,
        )

    def rows(self, *arguments: str | bytes) -> list[dict[str, Any]]:
        done = self.ctl(*arguments, "--output", "json")
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        return rows


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with tempfile.TemporaryDirectory() as directory:  # whose name is short enough for a Unix socket
        url = f"unix:{directory}/admin"
        settings = {"admin.enable": "true", "admin.bind": url, "admin.token": TOKEN}
        with daemon.running(tmp_path_factory.mktemp("counterd"), settings) as running:
            running.wait_for_log("admin listens on")
            yield Place(running, url)


def test_holders_are_listed_and_can_be_killed(place: Place) -> None:
    """Only the connection that kill is given."""
    with place.daemon.client() as one, place.daemon.client() as other:
        one.acquire(NAME, 2, maximum=9)
        other.acquire(NAME, 3, maximum=9)
        rows = place.rows("holders", NAME)
        assert {row["amount"]: row["age_seconds"] < PATIENCE for row in rows} == {2: True, 3: True}
        assert all(row["peer"].startswith("127.0.0.1:") for row in rows)
        (victim,) = [row["connection"] for row in rows if row["amount"] == 3]
        shown = {row["id"]: row for row in place.rows("connections", "--protocol", "counter")}
        assert shown.keys() == {row["connection"] for row in rows}
        assert (shown[victim]["holdings"], shown[victim]["tls"]) == (1, None)
        done = place.ctl("kill", victim)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
        wait_until(lambda: one.get(NAME) == 2, "what it held is given back")
        assert [row["amount"] for row in place.rows("holders", NAME)] == [2]
        again = place.ctl("kill", victim)
        assert (again.returncode, again.stderr) == (1, f"counterctl: not found: {victim}\n")


def test_the_holdings_of_a_connection(place: Place) -> None:
    """`counterctl holdings` lists what one connection holds, and says so if it holds nothing, or has ended."""
    with place.daemon.client() as one, place.daemon.client() as other:
        with place.daemon.client() as third:
            one.acquire(NAME, 2, maximum=9)
            other.acquire(NAME, 3, maximum=9)
            third.acquire(NAME, 4, maximum=9)
            one.acquire("another", 1, maximum=1)
            ids = {row["amount"]: row["connection"] for row in place.rows("holders", NAME)}
            last, first = place.rows("holdings", ids[2])
            assert (last["name"], last["amount"]) == ("another", 1)
            assert (base64.b64decode(first["name_base64"]), first["amount"]) == (NAME, 2)
            assert 0 <= last["age_seconds"] <= first["age_seconds"] < PATIENCE
            assert [row["amount"] for row in place.rows("holdings", ids[3])] == [3]
            done = place.ctl("holdings", ids[2], "--limit", "1")
            cells = done.stdout.splitlines()[1].split()
            assert (cells[:2], done.stderr) == (["another", "1"], "counterctl: showing 1 of 2 rows\n")
            other.release(NAME, 3)
            done = place.ctl("holdings", ids[3])
            assert (done.returncode, done.stderr) == (1, f"counterctl: {ids[3]} holds nothing\n")
        wait_until(lambda: one.get(NAME) == 2, "the third is gone")
        done = place.ctl("holdings", ids[4])
        assert (done.returncode, done.stderr) == (1, "counterctl: this connection does not exist, or has ended\n")


def test_holders_show_name_and_grace_time(place: Place) -> None:
    """An ended connection is listed with the rest of its grace time, and can be ended before that."""
    with place.daemon.client() as other:
        with place.daemon.connect() as connection:
            assert peers.ask(connection, wire.who(1, "billing-3")).status == 0
            assert peers.ask(connection, wire.acquire(2, b"graced", 2, 2)).status == 0
            (row,) = place.rows("holders", "graced")
            assert (row["name"], row["grace_seconds"]) == ("billing-3", None)
            (shown,) = [each for each in place.rows("connections") if each["id"] == row["connection"]]
            assert shown["name"] == "billing-3"
            assert peers.ask(connection, wire.resume(3, 60_000)).status == 0
        place.daemon.wait_for_stats(kept=1, kept_holdings=1)
        (ended,) = place.rows("holders", "graced")
        assert (ended["name"], ended["amount"], ended["peer"]) == ("billing-3", 2, None)
        assert 0 < ended["grace_seconds"] <= 60
        assert ended["connection"] == f"{row['connection'].rpartition('-')[0]}-0"
        (held,) = place.rows("holdings", ended["connection"])
        assert held["amount"] == 2
        assert place.ctl("kill", ended["connection"]).returncode == 0
        wait_until(lambda: other.get("graced") == 0, "what it held is given back")
        assert place.ctl("kill", ended["connection"]).returncode == 1


def test_kill_ends_a_connection_without_a_grace_time(place: Place) -> None:
    with place.daemon.connect() as connection, place.daemon.client() as other:
        assert peers.ask(connection, wire.resume(1, 60_000)).status == 0
        assert peers.ask(connection, wire.acquire(2, b"ended", 1, 1)).status == 0
        (row,) = place.rows("holders", "ended")
        assert place.ctl("kill", row["connection"]).returncode == 0
        wait_until(lambda: other.get("ended") == 0, "what it held is given back")


def test_waiters_and_waits(place: Place) -> None:
    """For a counter and for a rate: of a name, of all, and of one connection; and none any more at the end."""
    hour_us = 3_600_000_000
    with place.daemon.client() as holder, place.daemon.connect() as one, place.daemon.connect() as other:
        holder.acquire(NAME, 9, maximum=9)
        rate = wire.Rate(b"rate", 2, 1, hour_us, 2)
        assert peers.ask(one, wire.take(1, [rate])).status == 0
        one.sendall(wire.take(2, [wire.Permit(NAME, 4, 9)], 50_000, key=b"k", weight=3))
        place.daemon.wait_for_stats(waiters=1)
        other.sendall(wire.take(1, [wire.Permit(NAME, 5, 9), rate], 50_000, priority=2))
        one.sendall(wire.take(3, [rate], 5_000_000))
        place.daemon.wait_for_stats(waiters=3)
        first, second = place.rows("waiters", NAME)
        assert (first["position"], first["amount"], first["priority"], first["items"]) == (1, 5, 2, 2)
        assert (second["position"], second["amount"], second["key"], second["weight"]) == (2, 4, "k", 3)
        assert 0 <= first["age_seconds"] < PATIENCE
        assert 50 - PATIENCE < first["left"] <= 50
        rows = place.rows("waiters")
        assert [row["kind"] for row in rows] == ["permits", "permits", "rate"]
        assert rows[0]["connection"] == rows[2]["connection"] == second["connection"]
        assert [row["amount"] for row in place.rows("waits", second["connection"])] == [2, 4]
        assert [row["amount"] for row in place.rows("waiters", "rate")] == [2]
        done = place.ctl("holdings", second["connection"])
        assert (done.returncode, done.stderr) == (1, f"counterctl: {second['connection']} holds nothing\n")
    place.daemon.wait_for_stats(waiters=0)
    for arguments, said in (((NAME,), "nobody waits for db \\xff%/+"), ((), "nobody waits")):
        done = place.ctl("waiters", *arguments)
        assert (done.returncode, done.stderr) == (1, f"counterctl: {said}\n")


def test_kill_needs_the_token(place: Place) -> None:
    for token, said in (("", "this request needs the token"), ("another", "wrong token")):
        done = place.ctl("kill", "counter-1-1", token=token)
        assert done.returncode == 1
        assert said in done.stderr
        assert "COUNTERD_ADMIN_TOKEN" in done.stderr


def test_a_counter_without_holders(place: Place) -> None:
    done = place.ctl("holders", "nothing")
    assert (done.returncode, done.stderr) == (1, "counterctl: nobody holds nothing\n")


def test_connections_are_read_page_by_page(place: Place) -> None:
    """The server's pages have at most a thousand rows."""
    clients = []
    try:
        for _ in range(1100):
            clients.append(place.daemon.connect())
        with place.daemon.client() as client:
            wait_until(lambda: client.stats()["curr_connections"] == "1101", "all are accepted")
            ids = [row["id"] for row in place.rows("connections")]
        assert len(ids) == len({*ids}) == 1101
    finally:
        for each in clients:
            each.close()
