"""`counterctl throttr` as a process, against the real daemon."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client.throttr import Client
from kit import daemon
from kit.daemon import PATIENCE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.daemon import Address

SCRIPT = Path(sys.executable).parent / "counterctl"
SETTINGS = {"throttr.enable": "true", "throttr.port": "0", "throttr.bind": "127.0.0.1"}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    with daemon.running(tmp_path_factory.mktemp("daemon"), SETTINGS) as served:
        yield served.address_of("throttr")


def environment() -> dict[str, str]:
    """The environment without variables that the caller may have set."""
    return {name: text for name, text in daemon.environment().items() if not name.startswith(("THROTTR_", "PYTHON"))}


def command(address: Address, *arguments: str | bytes) -> list[str | bytes | Path]:
    return [SCRIPT, "throttr", "-p", str(address.port), *arguments]


def ask(address: Address, *arguments: str | bytes) -> tuple[int, str, str]:
    """Runs counterctl. Returns (status, stdout, stderr)."""
    done = subprocess.run(
        command(address, *arguments),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env=environment(),
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def rows(address: Address, *arguments: str | bytes) -> Any:
    status, stdout, stderr = ask(address, *arguments, "--output", "json")
    assert (status, stderr) == (0, "")
    return json.loads(stdout)


DONE = (0, "", "")


def test_a_quota_from_insert_to_purge(address: Address) -> None:
    assert ask(address, "insert", "user:7", "100", "--ttl", "10m") == DONE
    refused = "counterctl: user:7 exists already, or the server's memory is full\n"
    assert ask(address, "insert", "user:7", "100", "--ttl", "10m") == (1, "", refused)
    assert ask(address, "decr", "user:7", "30") == DONE
    assert ask(address, "incr", "user:7") == DONE
    assert ask(address, "incr", "user:7", "--ttl", "5m") == DONE
    (found,) = rows(address, "query", "user:7")
    assert (found["key"], found["quota"]) == ("user:7", 71)
    assert 800 < found["ttl"] < 900
    status, _, stderr = ask(address, "decr", "user:7", "72")
    assert (status, stderr) == (
        1,
        "counterctl: user:7: the quota does not exist, or its new value would be out of range\n",
    )
    assert ask(address, "update", "user:7", "5") == DONE
    assert ask(address, "update", "user:7", "--ttl", "2m") == DONE
    status, stdout, _ = ask(address, "query", "user:7", "none")
    assert (status, stdout.split()[3:]) == (1, ["user:7", "5", "1", "min", "none", "not", "found", "-"])
    assert rows(address, "stat", "user:7")[0]["writes"] == 5
    assert ask(address, "purge", "user:7") == DONE
    assert ask(address, "purge", "user:7", "x") == (1, "", "counterctl: not found: user:7, x\n")
    assert ask(address, "update", "user:7", "--ttl", "2m") == (1, "", "counterctl: user:7: not found\n")


def test_a_ttl_that_does_not_fit_the_keys_unit_is_refused(address: Address) -> None:
    assert ask(address, "insert", "steps", "1", "--ttl", "90s") == DONE
    line = "counterctl: the time to live of steps changes in steps of 1 s; 0.5 s is not a multiple\n"
    assert ask(address, "incr", "steps", "--ttl", "500ms") == (2, "", line)


def test_numbers_beyond_the_value_size_are_refused(address: Address) -> None:
    assert ask(address, "insert", "wide", "65536", "--ttl", "1s") == (
        2,
        "",
        "counterctl: quota must be 0 to 65535, not 65536: value_size is uint16\n",
    )


def test_buffers_of_text_and_bytes(address: Address) -> None:
    assert ask(address, "set", "b:text", "hello", "--ttl", "10m") == DONE
    assert ask(address, "set", "b:bytes", b"\xff\x01", "--ttl", "20m") == DONE
    text, data = rows(address, "get", "b:text", "b:bytes")
    assert text["value"] == "hello"
    assert (data["value"], data["value_base64"]) == (r"\xff\x01", "/wE=")
    assert [row["key"] for row in rows(address, "list", "--match", "b:*", "--sort", "expires")] == ["b:text", "b:bytes"]
    (largest,) = rows(address, "list", "--match", "b:*", "--sort", "size", "--limit", "1")
    assert (largest["key"], largest["type"], largest["bytes_used"]) == ("b:text", "buffer", 5)
    assert rows(address, "info")["buffers"] == 2


@contextmanager
def subscriber(address: Address, *channels: str) -> Iterator[subprocess.Popen[str]]:
    """Runs counterctl, which shows events, during the block; then Ctrl-C must end it well, without further events."""
    process = subprocess.Popen(
        command(address, "subscribe", *channels, "--output", "json"),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with process:
        try:
            yield process
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=PATIENCE) == ("", "")
            assert process.returncode == 0
        finally:
            process.kill()


def event_of(process: subprocess.Popen[str]) -> Any:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def test_subscriptions_and_events(address: Address) -> None:
    assert ask(address, "publish", "news", "x") == (1, "", "counterctl: news has no subscribers\n")
    with subscriber(address, "news") as process, Client(*address, timeout=PATIENCE) as client:
        wait_until(lambda: client.channel("news"), "a subscription")
        client.publish("*", "to everybody")  # which it did not ask for
        assert ask(address, "publish", "news", b"\xfe") == DONE
        event = event_of(process)
        assert (event["channel"], event["payload_base64"]) == ("news", "/g==")
        assert "news" in [row["channel"] for row in rows(address, "channels")]
        assert {row["kind"] for row in rows(address, "connections")} == {"tcp"}


def test_a_subscriber_gets_each_event_once(address: Address) -> None:
    with subscriber(address, "*", "other") as process, Client(*address, timeout=PATIENCE) as client:
        wait_until(lambda: client.channel("other"), "a subscription")
        for payload in ("1", "2"):
            client.publish("*", payload)
        assert [event_of(process)["payload"] for _ in range(2)] == ["1", "2"]


def test_another_value_size_is_named(address: Address) -> None:
    status, stdout, stderr = ask(
        address, "--timeout", "0.5s", "--value-size", "uint64", "insert", "w", "1", "--ttl", "1s"
    )
    assert (status, stdout) == (3, "")
    assert stderr.count("\n") == 1
