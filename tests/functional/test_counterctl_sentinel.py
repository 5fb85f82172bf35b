"""`counterctl sentinel` as a process, against the real daemon and its admin process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client.sentinel import Client
from kit import daemon
from kit.daemon import PATIENCE, wait_until
from kit.sentinels import connected, flow, param

if TYPE_CHECKING:
    from collections.abc import Iterator

SENTINEL = (Path(sys.executable).parent / "counterctl", "--timeout", f"{PATIENCE:g}s", "sentinel")
LARGEST = 2**63 - 1  # of a flow's id, and more than a floating number has
SETTINGS = {
    "counter.enable": "false",
    "sentinel.enable": "true",
    "sentinel.port": "0",
    "sentinel.bind": "127.0.0.1",
    "admin.enable": "true",
    "admin.bind": "127.0.0.1:0",
}
FLOWS = [
    flow(LARGEST, 5, clientOfflineTime=600_000, resourceTimeout=600_000),
    flow(104, 1, resourceTimeout=50, resourceTimeoutStrategy=1),
    flow(105, 2, grade=1, windowIntervalMs=60_000, sampleCount=60),
    flow(106, 1, grade=1, windowIntervalMs=60_000, sampleCount=60),
]
RULES = {"default": {"flowRules": FLOWS, "paramFlowRules": [param(201, 1, windowIntervalMs=60_000, sampleCount=60)]}}
DONE = (0, "", "")


class Place:
    """A daemon, and the address of it for counterctl."""

    def __init__(self, running: daemon.Daemon) -> None:
        self.daemon = running
        self.address = running.address_of("sentinel")
        admin = running.address_of("admin")
        where = {
            "SENTINEL_URL": f"sentinel://{self.address.host}:{self.address.port}",
            "COUNTERD_ADMIN": f"http://{admin.host}:{admin.port}",
        }
        self.environment = daemon.environment(where)

    def ask(self, *arguments: str) -> tuple[int, str, str]:
        """Runs counterctl. Returns (status, stdout, stderr)."""
        done = subprocess.run(
            [*SENTINEL, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=self.environment,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    def rows(self, *arguments: str) -> Any:
        status, stdout, stderr = self.ask(*arguments, "--output", "json")
        assert (status, stderr) == (0, "")
        return json.loads(stdout)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("daemon")
    rules = directory / "rules.json"
    rules.write_text(json.dumps(RULES))
    with daemon.running(directory / "daemon", {**SETTINGS, "sentinel.rules": rules}) as running:
        yield Place(running)


def test_a_token_from_acquire_to_release(place: Place) -> None:
    process = subprocess.Popen(
        [
            *SENTINEL,
            "acquire",
            str(LARGEST),
            "2",
            "--for",
            "10m",
            "--output",
            "json",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=place.environment,
    )
    with process, Client(*place.address, timeout=PATIENCE) as other:
        try:
            assert process.stdout is not None
            taken = json.loads(process.stdout.readline())
            assert (taken["flow"], taken["count"]) == (str(LARGEST), 2)
            mine = other.acquire(LARGEST)
            first, second = place.rows("tokens", "--flow", str(LARGEST))
            assert (first["token"], first["flow"], first["count"]) == (taken["token"], str(LARGEST), 2)
            assert first["connection"].startswith("sentinel-")
            done = subprocess.run(
                [*SENTINEL[:-1], "holdings", second["connection"], "--output", "json"],
                capture_output=True, timeout=PATIENCE, env=place.environment, check=True,
            )  # fmt: skip
            (held,) = json.loads(done.stdout)
            assert (held["token"], held["flow"], held["count"]) == (str(mine.id), str(LARGEST), 1)
            assert (second["token"], second["count"], second["kept"]) == (str(mine.id), 1, 0)
            assert 0 <= second["held"] < PATIENCE < second["left"]
            line = f"counterctl: blocked: 3 of flow {LARGEST}\n"
            assert place.ask("acquire", str(LARGEST), "3") == (1, "", line)
            (listed,) = [row for row in place.rows("flows", "--sort", "blocked") if row["flow"] == str(LARGEST)]
            assert [listed[key] for key in ("limits", "threshold", "now", "passed", "blocked", "expired")] == [
                *("concurrency", 5, 3, 3, 3, 0)
            ]
            assert place.ask("tokens", "--sort", "count", "--limit", "1", "--output", "csv")[2].endswith(
                "1 of 2 rows\n"
            )
            assert place.ask("release", taken["token"]) == DONE
        finally:
            process.terminate()
        _, stderr = process.communicate(timeout=PATIENCE)
        assert (process.returncode, stderr.count("\n")) == (3, 1)
        assert "lost 2 of flow" in stderr
    gone = f"counterctl: no token {taken['token']}: it was released before, or its lease has expired\n"
    for command in ("release", "keep"):
        assert place.ask(command, taken["token"]) == (1, "", gone)


def test_a_token_of_an_ended_connection_has_no_owner(place: Place) -> None:
    """Not even after it was kept by hand, and never the client that has the connection's number now."""
    with connected(place.daemon) as peer:
        token = str(peer.acquire(1, LARGEST).token_id)
    with connected(place.daemon) as another:
        assert another.acquire(1, LARGEST).token_id
        status, stdout, _ = place.ask("keep", token)
        assert (status, stdout.startswith(f"token {token} is leased for "), stdout.endswith(" min more\n")) == (
            0,
            True,
            True,
        )

        def owners() -> dict[str, str | None]:
            return {row["token"]: row["connection"] for row in place.rows("tokens")}

        wait_until(lambda: owners()[token] is None, "its connection is seen to have gone")
        assert len([owner for owner in owners().values() if owner]) == 1
    assert "  gone  " in place.ask("tokens")[1]
    assert place.ask("release", token) == DONE


def test_a_hold_whose_lease_ends_fails(place: Place) -> None:
    status, stdout, stderr = place.ask("acquire", "104", "--for", "10m")
    assert (status, stdout.startswith("acquired 1 of flow 104 (token ")) == (3, True)
    assert stderr.startswith("counterctl: lost 1 of flow 104: ")
    wait_until(lambda: place.rows("flows", "--sort", "expired")[0]["expired"] == 1, "it is counted")


def test_calls_by_rate_and_by_value(place: Place) -> None:
    assert place.ask("flow", "105") == (0, "passed: 1 of flow 105, 1 more can pass now\n", "")
    assert place.ask("flow", "105", "2") == (1, "", "counterctl: blocked: 2 of flow 105\n")
    assert place.ask("flow", "7") == (1, "", "counterctl: no such rule (status 3): asked for 1 of flow 7\n")
    answers = [place.ask("param", "201", *values)[0] for values in (["int:5"], ["long:5", "5"], ["int:5"])]
    assert answers == [0, 0, 1]
    assert place.ask("ping", "shop")[1].endswith(": 1 connected in namespace shop\n")
