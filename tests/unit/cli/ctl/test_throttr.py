"""Times in the units of the throttr protocol, and the server's address in the throttr commands.

The commands run against the real server in tests/functional/test_counterctl_throttr.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from counterd.cli.ctl import main
from counterd.cli.ctl.output import Kind
from counterd.cli.ctl.throttr import ThrottrTarget, called, figure, seconds_of, units_of
from counterd.client._addresses import Address
from counterd.client.throttr import Event, KeyType, TTLType
from counterd.errors import EventsLost
from kit.scripted.script import Script


@pytest.mark.parametrize(
    ("ttl", "size", "expected"),
    [
        (60.0, "uint16", (60, TTLType.SECONDS)),
        (255.0, "uint8", (255, TTLType.SECONDS)),
        (300.0, "uint8", (5, TTLType.MINUTES)),
        (1.5, "uint16", (1500, TTLType.MILLISECONDS)),
        (0.1, "uint8", (100, TTLType.MILLISECONDS)),
        (1e-6, "uint64", (1, TTLType.MICROSECONDS)),
    ],
)
def test_times_are_whole_units(ttl: float, size: str, expected: tuple[int, int]) -> None:
    assert units_of(ttl, ThrottrTarget(Address(), 1.0, size)) == expected


@pytest.mark.parametrize(("ttl", "size"), [(0.0, "uint16"), (0.256, "uint8")])
def test_times_that_fit_no_unit_are_refused(ttl: float, size: str) -> None:
    with pytest.raises(ValueError, match="a TTL of"):
        units_of(ttl, ThrottrTarget(Address(), 1.0, size))


@pytest.mark.parametrize(
    ("ttl", "ttl_type", "seconds"),
    [(5, TTLType.MINUTES, 300), (1500, TTLType.MILLISECONDS, 1.5), (2000, TTLType.MILLISECONDS, 2), (7, 99, 7)],
)
def test_the_ttl_in_seconds(ttl: int, ttl_type: int, seconds: float) -> None:
    assert repr(seconds_of(ttl, ttl_type)) == repr(seconds)


def test_names_of_enum_members() -> None:
    assert (called(KeyType.BUFFER), called(7)) == ("buffer", "7")


def test_figures_have_their_kinds() -> None:
    kinds = [figure(name).kind for name in ("keys", "read_bytes", "write_bytes_per_minute", "running_since", "version")]
    assert kinds == [Kind.NUMBER, Kind.SIZE, Kind.SIZE, Kind.WHEN, Kind.TEXT]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-p", "1", "throttr", "info"], "write the address of the keys after"),
        (["throttr", "-u", "counter://a", "info"], "expected throttr://HOST:PORT"),
        (["throttr", "incr", "k", "1", "--ttl", "1s"], "use either the amount or --ttl"),
        (["throttr", "update", "k"], "use either QUOTA or --ttl"),
        (["throttr", "insert", "k", "1"], "Missing option '--ttl'"),
        (["throttr", "query", "k" * 256], "a key has 0 to 255 bytes"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], why: str) -> None:
    done = CliRunner().invoke(main, arguments, env={"COUNTERD_URL": None, "THROTTR_URL": None})
    assert done.exit_code == 2
    assert why in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "where"),
    [
        (["throttr", "-p", "1", "info"], None, "127.0.0.1:1"),
        (["throttr", "info"], "throttr://127.0.0.1:1", "127.0.0.1:1"),
        (["throttr", "info"], "throttr+unix:///none", "/none"),
    ],
)
def test_the_address_of_the_server(arguments: list[str], environment: str | None, where: str) -> None:
    done = CliRunner().invoke(main, arguments, env={"COUNTERD_URL": "counter://other", "THROTTR_URL": environment})
    assert done.exit_code == 3
    assert done.stderr.startswith(f"counterctl: cannot connect to {where}: ")


def silence(connection: Any) -> None:
    while connection.recv(4096):
        pass


def test_the_timeout_may_stand_before_or_after_the_subcommand() -> None:
    for arguments in (["--timeout", "150ms", "throttr"], ["--timeout", "9s", "throttr", "--timeout", "150ms"]):
        with Script(silence) as running:
            done = CliRunner().invoke(main, [*arguments, "-p", str(running.port), "info"])
        assert done.exit_code == 3
        assert "did not answer within 0.15 s" in done.stderr


class Events:
    """Stands for a client: some events, and a gap."""

    def __init__(self, *events: Event | BaseException) -> None:
        self._events = list(events)

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def subscribe(self, channel: bytes) -> bool:
        return True

    def next_event(self) -> Event:
        event = self._events.pop(0)
        if isinstance(event, BaseException):
            raise event
        return event


def test_lost_events_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Events(Event(b"a", b"1"), EventsLost(3), Event(b"a", b"2"), KeyboardInterrupt())
    monkeypatch.setattr(ThrottrTarget, "connect", lambda _: client)
    done = CliRunner().invoke(main, ["throttr", "subscribe", "a", "--output", "json"])
    assert done.exit_code == 0
    assert [json.loads(line)["payload"] for line in done.stdout.splitlines()] == ["1", "2"]
    assert done.stderr == f"counterctl: {EventsLost(3)}\n"
