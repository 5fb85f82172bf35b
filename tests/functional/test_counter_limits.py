"""The file of limits: read at the start and at each reload, all or nothing; the errors of a wrong one; and its
effect on clients and tools."""

from __future__ import annotations

import json
import signal
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import Permit, Rate
from counterd.errors import NotAvailable, NotFound
from counterd.protocols.counter import wire
from functional.test_client_queue import made
from functional.test_counterctl import ctl
from functional.test_counterctl_admin import Place
from kit import daemon, peers
from kit.shapes import SHAPES, entered, got, opened, run

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kit.daemon import Daemon

LINE = len(daemon.DEFAULTS) + 1  # of counter.limits in a file that begins with the defaults


def write(file: Path, permits: Mapping[str, int], rates: Mapping[str, tuple[int, int, int]] | None = None) -> None:
    document: dict[str, list[dict[str, Any]]] = {
        "permits": [{"name": name, "maximum": most} for name, most in permits.items()],
        "rates": [
            {"name": name, "limit": limit, "period": period, "burst": burst}
            for name, (limit, period, burst) in (rates or {}).items()
        ],
    }
    file.write_text(json.dumps(document))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "limits.json"
    write(path, {"db:*": 3}, {"calls:*": (10, 3600, 10)})
    return path


def again(counterd: Daemon, said: str = " reloaded ") -> None:
    """Makes the daemon reload its files."""
    count = len(counterd.lines(said))
    counterd.send_signal(signal.SIGHUP)
    counterd.wait_for_log(said, count + 1)


def test_limits_of_the_server_hold_for_every_client(start: Callable[..., Daemon], file: Path) -> None:
    counterd = start({"counter.limits": file})
    with counterd.client() as one, counterd.client() as other:
        one.acquire("db:main", 2, maximum=100)
        with pytest.raises(NotAvailable):
            other.acquire("db:main", 2, maximum=100)
        assert other.acquire("cache", 50, maximum=100) == 50
        with one.take(Permit("db:main", 1, maximum=100), Rate("calls:a", 7)) as taken:
            assert taken.settle("calls:a", 4) is None
        with pytest.raises(NotAvailable):
            other.take(Rate("calls:a", 7), timeout=0).__enter__()
        with pytest.raises(NotFound, match=r"No limit for the rate of item 1: send one.* of others$"):
            other.take(Permit("db:main", 1, maximum=9), Rate("others", 1), timeout=0).__enter__()


@SHAPES
def test_a_hold_of_more_than_the_limit_fails_at_once(start: Callable[..., Daemon], file: Path, shape: str) -> None:
    """However long its timeout is, and the error has the limit. An error for another reason has the right numbers."""
    counterd = start({"counter.limits": file})

    async def scenario() -> None:
        async with opened(made(shape, counterd)) as client:
            await got(client.acquire("db:main", 2, maximum=100))
            for timeout in (None, 0):
                with pytest.raises(NotAvailable, match=r"More than the limit of the server.*, maximum 3") as over:
                    await entered(client.hold("db:main", 4, maximum=100, timeout=timeout))
                assert (over.value.limit, over.value.maximum, over.value.consumption) == (3, 3, 2)
            with pytest.raises(NotAvailable, match=r"More than the limit of the server: 3.*, maximum 3$") as over:
                await got(client.acquire("db:main", 4, maximum=100))
            assert (over.value.limit, over.value.maximum) == (3, 3)
            with pytest.raises(NotAvailable) as short:
                await got(client.acquire("db:main", 2, maximum=100))
            assert (short.value.limit, short.value.maximum) == (None, 100)
            for timeout in (0, 0.01):
                with pytest.raises(NotAvailable) as short:
                    await entered(client.hold("db:main", 2, maximum=100, timeout=timeout))
                assert (short.value.limit, short.value.maximum, short.value.consumption) == (None, 3, 2)

    run(shape, scenario())


def test_counterctl_reports_the_limit(start: Callable[..., Daemon], file: Path) -> None:
    """And does not wait. A rate that the server defines needs no numbers."""
    port = start({"counter.limits": file}).address.port
    over = "counterctl: 4 of db:main not available: the server's limit is 3\n"
    done = ctl(port, "hold", "db:main", "4", "9", "--wait", "60m")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", over)
    done = ctl(port, "run", "db:main", "-n", "4", "--max", "9", "true")
    assert (done.returncode, done.stdout, done.stderr) == (124, "", over)
    done = ctl(port, "take", "db:main=4/9", "--wait", "60m")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", over)
    done = ctl(port, "take", "--rate", "calls:a=7")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("took 7 of calls:a (grant ")
    done = ctl(port, "take", "--rate", "calls:a=7")
    assert "7 of calls:a not available: 7 of 10 are in use; " in done.stderr
    done = ctl(port, "take", "--rate", "others=7")
    assert (done.returncode, "No limit for the rate of item 0: send one, " in done.stderr) == (1, True)


def test_a_reload_changes_limits_at_once_also_for_waiting_takes(start: Callable[..., Daemon], file: Path) -> None:
    counterd = start({"counter.limits": file})
    with counterd.client() as holder, counterd.connect() as one, counterd.connect() as other:
        holder.acquire("db:main", 3, maximum=100)
        one.sendall(wire.take(1, [wire.Permit(b"db:main", 2, 100)], 600_000))
        counterd.wait_for_stats(waiters=1)
        write(file, {"db:*": 3, "db:main": 5})
        again(counterd)
        assert counterd.lines(r"reloaded .*: the file of counter\.limits$")
        assert peers.ask(one, b"").status == 0
        other.sendall(wire.take(1, [wire.Permit(b"db:main", 2, 100)], 600_000))
        counterd.wait_for_stats(waiters=1)
        write(file, {"db:main": 1})
        again(counterd)
        refused = peers.ask(other, b"")
        assert refused.status == wire.Status.RESOURCE_NOT_AVAILABLE
        assert wire.decode_shortage(refused.body).text == "More than the limit of the server"
        assert holder.get("db:main") == 5, "what was granted stays granted"
        counterd.reload({})
        holder.acquire("db:main", 95, maximum=100)


def test_each_mistake_is_logged_and_changes_nothing(start: Callable[..., Daemon], file: Path) -> None:
    counterd = start({"counter.limits": file})
    file.write_text('{"permits": [{"name": "a*b", "maximum": 1}, {"name": "db:main"}], "rate": []}')
    again(counterd, "not reloaded")
    told = [line.partition("not reloaded: ")[2] for line in counterd.lines("not reloaded")]
    place = f"{counterd.config}:{LINE}: counter.limits: {file}: "
    assert told == [
        f"{place}permits[0] ('a*b'): name has a * before its last character: a * stands for the rest of a name",
        f"{place}permits[1] ('db:main'): maximum is missing",
        f"{place}'rate': unknown field; expected permits or rates",
    ]
    with counterd.client() as client, pytest.raises(NotAvailable):
        client.acquire("db:main", 4, maximum=100)


def test_counterctl_limit(start: Callable[..., Daemon], file: Path, short_path: Path) -> None:
    write(file, {"db:*": 3, "db:main": 5}, {"calls:*": (10, 3600, 20)})
    url = f"unix:{short_path / 'admin'}"
    counterd = start({"counter.limits": file, "admin.enable": "true", "admin.bind": url, "admin.token": "a-token"})
    counterd.wait_for_log("admin listens on")
    place = Place(counterd, url)
    with counterd.client() as client:
        client.acquire("db:main", 2, maximum=100)
        rows = place.rows("limit")
        assert [(row["name"], row["kind"], row["maximum"]) for row in rows] == [
            ("db:*", "permits", 3), ("db:main", "permits", 5), ("calls:*", "rate", 10),
        ]  # fmt: skip
        assert (rows[0]["period"], rows[2]["period"], rows[2]["burst"]) == (None, 3600, 20)
        (row,) = place.rows("limit", "db:main")
        assert (row["rule"], row["maximum"], row["used"], row["waiters"]) == ("db:main", 5, 2, 0)
        done = place.ctl("limit", "cache")
        assert (done.returncode, done.stderr) == (1, "counterctl: no limit applies to cache\n")
    write(file, {})
    again(counterd)
    done = place.ctl("limit")
    assert (done.returncode, done.stderr) == (1, "counterctl: the server has no limits\n")
