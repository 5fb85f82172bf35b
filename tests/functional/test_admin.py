"""The admin process of a real daemon: what it serves, how it ends, and how little that disturbs the daemon."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from counterd.client import throttr
from counterd.protocols.counter import wire
from kit import daemon, needs, peers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BEGUN_S = time.time()
TOKEN = "a-token-for-tests"
SETTINGS = {"admin.enable": "true", "admin.bind": "127.0.0.1:0"}
BYTES = bytes(range(256))
EVERY_BYTE = urllib.parse.quote_from_bytes(BYTES, safe="")


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Unix(http.client.HTTPConnection):
    """An HTTP connection over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=daemon.PATIENCE)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


class Admin:
    """The admin endpoint of a running daemon."""

    def __init__(self, counterd: daemon.Daemon) -> None:
        self.counterd = counterd
        place = counterd.wait_for_log("admin listens on").split("admin listens on ")[1]
        self.path = place.removeprefix("unix:") if place.startswith("unix:") else None
        self.host, _, port = place.rpartition(":")
        self.port = 0 if self.path else int(port)

    def connection(self) -> http.client.HTTPConnection:
        if self.path:
            return Unix(self.path)
        return http.client.HTTPConnection(self.host, self.port, timeout=daemon.PATIENCE)

    def ask(self, path: str, method: str = "GET", **headers: str) -> Answer:
        with contextlib.closing(self.connection()) as connection:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return Answer(response.status, dict(response.getheaders()), response.read())

    def close(self, connection_id: str, token: str = TOKEN) -> Answer:
        return self.ask(f"/connections/{connection_id}", "DELETE", Authorization=f"Bearer {token}")

    def pid(self) -> int:
        """The pid of the current admin process."""
        children = Path(f"/proc/{self.counterd.pid}/task/{self.counterd.pid}/children")
        return int(daemon.wait_until(lambda: children.read_text().split(), "there is an admin process")[0])


@pytest.fixture(scope="module")
def counterd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[daemon.Daemon]:
    settings = {
        **SETTINGS, "admin.token": TOKEN, "throttr.enable": "true", "throttr.port": 0, "throttr.bind": "127.0.0.1"
    }  # fmt: skip
    with daemon.running(tmp_path_factory.mktemp("admin"), settings) as started:
        yield started
        assert not started.lines("ERROR|Traceback|internal")


@pytest.fixture(scope="module")
def admin(counterd: daemon.Daemon) -> Admin:
    return Admin(counterd)


# ---- what it serves -------------------------------------------------------------------------------------------------


def test_health_and_figures(admin: Admin) -> None:
    assert (admin.ask("/livez").status, admin.ask("/readyz").status) == (200, 200)
    stats = admin.ask("/stats").json
    assert (stats["pid"], stats["state"]) == (admin.counterd.pid, "ready")
    assert set(stats["protocols"]) == {"counter", "throttr"}
    assert stats["protocols"]["counter"]["addresses"] == ["{}:{}".format(*admin.counterd.address)]
    process = stats["process"]
    assert abs(process["resident_bytes"] - admin.counterd.rss()) < 8 << 20
    assert abs(process["open_fds"] - admin.counterd.descriptors()) < 3
    assert BEGUN_S - 1 < process["start_time_seconds"] < time.time()
    assert {"counters", "holders", "keys"} <= {table["name"] for table in stats["tables"]}
    assert set(stats["protocols"]["counter"]["histograms"]) == {"batch_seconds", "batch_bytes"}


def test_a_holder_is_found_and_its_connection_closed(admin: Admin) -> None:
    with admin.counterd.connect() as holder, admin.counterd.client() as other:
        assert peers.ask(holder, wire.acquire(1, BYTES, 3, 5)).status == 0
        (row,) = admin.ask(f"/counters?match={EVERY_BYTE}").json["rows"]
        assert {"name": EVERY_BYTE, "consumption": 3, "limit": 5, "peak": 3}.items() <= row.items()
        (held,) = admin.ask(f"/holders?name={EVERY_BYTE}").json["rows"]
        assert held["peer"] == "{}:{}".format(*holder.getsockname())
        assert (held["amount"], 0 <= held["age_seconds"] < 30) == (3, True)
        found = admin.ask("/connections?protocol=counter").json["rows"]
        (row,) = [row for row in found if row["id"] == held["connection"]]
        assert (row["peer"], row["requests"], row["holdings"], row["tls"]) == (held["peer"], 1, 1, None)

        assert admin.close(row["id"], "wrong").status == 401
        assert peers.ask(holder, wire.noop(2)).status == 0
        assert admin.close(row["id"]).json == {"closed": row["id"]}
        assert peers.ends(holder)
        daemon.wait_until(lambda: other.get(BYTES) == 0, "what it held comes back")
        # Its number goes to the next one, which is not closed in its place.
        with admin.counterd.connect() as next_one:
            assert peers.ask(next_one, wire.noop(3)).status == 0
            ids = [row["id"] for row in admin.ask("/connections").json["rows"]]
            assert row["id"] not in ids
            assert row["id"].rsplit("-", 1)[0] in [one.rsplit("-", 1)[0] for one in ids]
            assert admin.close(row["id"]).status == 404
            assert peers.ask(next_one, wire.noop(4)).status == 0
    figures = daemon.wait_until(lambda: counted(admin)["killed"] and counted(admin), "counted")
    assert figures["killed"] == 1


def counted(admin: Admin) -> dict[str, int]:
    return admin.ask("/stats").json["protocols"]["counter"]["figures"]


def test_the_holdings_of_a_connection(admin: Admin) -> None:
    """Of the given id. The id of an ended connection matches no other one, which may have its number."""
    with admin.counterd.connect() as holder, admin.counterd.connect() as other:
        for connection, amount in ((holder, 3), (other, 4)):
            assert peers.ask(connection, wire.acquire(1, BYTES, amount, 9)).status == 0
        ids = {row["amount"]: row["connection"] for row in admin.ask(f"/holders?name={EVERY_BYTE}").json["rows"]}
        answer = admin.ask(f"/holdings?connection={ids[3]}").json
        assert (answer["protocol"], answer["total"]) == ("counter", 1)
        (held,) = answer["rows"]
        assert (held["name"], held["amount"], 0 <= held["age_seconds"] < 30) == (EVERY_BYTE, 3, True)
        assert [row["amount"] for row in admin.ask(f"/holdings?connection={ids[4]}").json["rows"]] == [4]
        assert admin.ask(f"/subscriptions?connection={ids[3]}").status == 400
        other.close()
        daemon.wait_until(lambda: admin.ask(f"/holdings?connection={ids[4]}").status == 404, "it is gone")
        with admin.counterd.connect() as next_one:
            assert peers.ask(next_one, wire.acquire(1, b"next", 1, 1)).status == 0
            answer = admin.ask(f"/holdings?connection={ids[4]}")
            assert (answer.status, answer.json) == (404, {"error": "this connection does not exist, or has ended"})


def test_the_subscriptions_of_a_connection(admin: Admin) -> None:
    (address,) = admin.counterd.served("throttr listens on")
    with throttr.Client(*address, timeout=daemon.PATIENCE) as client:
        assert client.subscribe("news\xff")
        (row,) = admin.ask("/connections?protocol=throttr").json["rows"]
        answer = admin.ask(f"/subscriptions?connection={row['id']}").json
        assert [(row["channel"], row["times"]) for row in answer["rows"]] == [
            (urllib.parse.quote("news\xff"), 1),
            (client.whoami().hex(), 1),
            ("%2A", 1),
        ]


def test_the_longest_name(admin: Admin) -> None:
    name = b"\xff" * 65_535
    with admin.counterd.connect() as holder:
        assert peers.ask(holder, wire.acquire(1, name, 1, 1)).status == 0
        asked = urllib.parse.quote_from_bytes(name, safe="")
        (row,) = admin.ask(f"/counters?match={asked}").json["rows"]
        assert row["name"] == asked
        (held,) = admin.ask(f"/holders?name={asked}").json["rows"]
        assert held["amount"] == 1


def test_pages_of_connections(admin: Admin) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(25):
            connected = stack.enter_context(admin.counterd.connect())
            assert peers.ask(connected, wire.noop(1)).status == 0
        seen: list[str] = []
        page: dict[str, Any] = {"next": ""}
        while page["next"] is not None:
            after = f"&after={page['next']}" if page["next"] else ""
            page = admin.ask(f"/connections?limit=10{after}").json
            seen += [row["id"] for row in page["rows"]]
        assert len(set(seen)) == len(seen) >= 25


@pytest.mark.parametrize(
    "path",
    ["/counters?limit=0", "/counters?sort=size", "/counters?x=1", "/holders", "/connections?after=x", "/keys?limit=x",
     "/holdings", "/holdings?name=x"],
)  # fmt: skip
def test_mistakes_are_explained(path: str, admin: Admin) -> None:
    answer = admin.ask(path)
    assert answer.status == 400
    assert answer.json["error"]


def test_the_configuration_without_its_secret(admin: Admin) -> None:
    answer = admin.ask("/config")
    values = {value["key"]: value for value in answer.json["values"]}
    assert answer.json["path"] == str(admin.counterd.config)
    assert values["admin.token"]["value"] == "***"
    assert re.fullmatch(r".*/counterd.conf:\d+", values["admin.bind"]["origin"])
    assert values["counter.socket_mode"]["value"] == "0660"
    assert TOKEN not in answer.body.decode()


def test_requests_are_counted_in_the_metrics(admin: Admin) -> None:
    def metrics() -> dict[str, float]:
        lines = admin.ask("/metrics").body.decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    acquired = 'counterd_requests_total{operation="acquire",protocol="counter",status="ok"}'
    before = metrics().get(acquired, 0)
    with admin.counterd.client() as client:
        for _ in range(2):
            assert client.acquire("counted", 1, maximum=2)
    daemon.wait_until(lambda: metrics().get(acquired, 0) >= before + 2, "they are counted")
    now = metrics()
    assert now['counterd_connections_opened_total{protocol="counter"}'] >= 1
    assert now['counterd_batch_seconds_count{protocol="counter"}'] >= 2
    assert now["counterd_event_loop_lag_seconds_count"] > 0
    assert now["process_start_time_seconds"] > 1e9


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text;version=1.0.0"])
def test_promtool_accepts_the_metrics(accept: str, admin: Admin) -> None:
    body = admin.ask("/metrics", Accept=accept).body
    checked = subprocess.run([needs.path("promtool"), "check", "metrics"], input=body, capture_output=True, check=False)
    said = (checked.stdout + checked.stderr).decode().splitlines()
    if "openmetrics" in accept:
        # It reads the other format, where the help of a counter is under its full name.
        assert [line for line in said if not line.endswith("_total no help text")] == []
    else:
        assert (checked.returncode, said) == (0, [])


def test_the_page_and_its_events(admin: Admin) -> None:
    assert admin.ask("/").headers["Content-Type"] == "text/html; charset=utf-8"
    with contextlib.closing(admin.connection()) as connection:
        connection.request("GET", "/events?table=counters")
        response = connection.getresponse()
        seen = set()
        while seen != {b"stats", b"table"}:
            line = response.readline()
            if line.startswith(b"event: "):
                seen.add(line.split()[1])
                assert json.loads(response.readline().removeprefix(b"data: "))
        response.close()


def test_a_reload_changes_the_token(admin: Admin) -> None:
    config = admin.counterd.config.read_text()
    try:
        admin.counterd.config.write_text(config.replace(TOKEN, "another"))
        admin.counterd.send_signal(signal.SIGHUP)
        daemon.wait_until(lambda: admin.close("counter-0-0", "another").status == 404, "the new one opens")
        assert admin.close("counter-0-0").status == 401
    finally:
        admin.counterd.config.write_text(config)
        admin.counterd.send_signal(signal.SIGHUP)
    daemon.wait_until(lambda: admin.close("counter-0-0").status == 404, "the old one opens again")


# ---- what becomes of it ---------------------------------------------------------------------------------------------


def test_a_killed_admin_process_is_replaced(admin: Admin) -> None:
    first = admin.pid()
    os.kill(first, signal.SIGKILL)
    assert admin.ask("/livez").status == 200  # whoever asks meanwhile waits
    assert admin.pid() != first
    daemon.wait_until(lambda: admin.ask("/stats").json["admin"] == {"restarts": 1}, "it is counted")
    admin.counterd.wait_for_log("WARN.*the admin process exited with status -9; restarting it in 0.1 s")


def test_signals_for_the_daemon_do_not_end_the_admin_process(admin: Admin) -> None:
    assert admin.ask("/livez").status == 200  # one that is yet to start, as after the test before, they would end
    before = admin.pid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(before, number)
    assert admin.ask("/livez").status == 200
    assert admin.pid() == before


def test_a_stopped_admin_process_does_not_delay_the_daemon(admin: Admin) -> None:
    stopped = admin.pid()
    os.kill(stopped, signal.SIGSTOP)
    with contextlib.closing(admin.connection()) as connection:
        try:
            connection.request("GET", "/livez")
            with admin.counterd.client() as client:
                for number in range(200):
                    assert client.acquire(f"stopped {number}", 1, maximum=1)
        finally:
            os.kill(stopped, signal.SIGCONT)
        assert connection.getresponse().status == 200
    assert admin.pid() == stopped


def test_a_flood_of_http_requests_does_not_delay_the_daemon(admin: Admin) -> None:
    def flood() -> None:
        with contextlib.suppress(OSError), contextlib.closing(admin.connection()) as connection:
            connection.connect()
            for _ in range(100):
                connection.sock.sendall(b"GET /counters HTTP/1.1\r\nHost: localhost\r\n\r\n" * 10)

    with ThreadPoolExecutor(8) as pool:
        flooding = [pool.submit(flood) for _ in range(8)]
        with admin.counterd.client() as client:
            for number in range(200):
                assert client.acquire(f"flooded {number}", 1, maximum=1)
        for one in flooding:
            one.result()
    assert admin.ask("/livez").status == 200
    assert admin.ask("/stats").json["internal_errors"] == 0


def gone(pid: int) -> bool:
    """Whether a process has ended, also if nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_the_admin_process_ends_with_a_killed_daemon(start: Callable[..., daemon.Daemon], short_path: Path) -> None:
    """Even before it has begun to serve. A second daemon uses the same address."""
    settings = {"admin.enable": "true", "admin.bind": f"unix:{short_path}/s", "counter.socket": f"{short_path}/c"}
    for early in (True, False):
        counterd = start({**settings}, status=-signal.SIGKILL)
        admin = Admin(counterd)
        pid = admin.pid()
        if not early:
            assert admin.ask("/readyz").status == 200
            assert admin.ask("/connections/counter-0-0", "DELETE").status == 403
        counterd.send_signal(signal.SIGKILL)
        assert counterd.ended() == -signal.SIGKILL
        daemon.wait_until(lambda pid=pid: gone(pid), "the admin process is gone")


def test_readiness_reports_a_drain(start: Callable[..., daemon.Daemon], short_path: Path) -> None:
    path = short_path / "s"
    counterd = start({"admin.enable": "true", "admin.bind": f"unix:{path}", "drain.mode": "wait", "drain.timeout": 60})
    admin = Admin(counterd)
    with counterd.connect() as holder:
        assert peers.ask(holder, wire.acquire(1, b"jobs", 1, 1)).status == 0
        assert admin.ask("/readyz").status == 200
        counterd.send_signal(signal.SIGTERM)
        os.kill(admin.pid(), signal.SIGTERM)  # as systemd does
        daemon.wait_until(lambda: admin.ask("/readyz").status == 503, "it is not ready any more")
        assert admin.ask("/readyz").body == b"draining\n"
        assert admin.ask("/livez").status == 200
        (held,) = admin.ask("/holders?name=jobs").json["rows"]
        assert held["amount"] == 1
        pid = admin.pid()
        assert peers.ask(holder, wire.release(2, b"jobs", 1)).status == 0
        assert counterd.ended() == 0
    assert gone(pid)
    assert not path.exists()


def test_an_address_in_use_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = "{}:{}".format(*taken.getsockname())
        config = tmp_path / "counterd.conf"
        config.write_text(daemon.config_text({**SETTINGS, "admin.bind": place}))
        ended = daemon.run("-c", config)
    assert ended.returncode == 2
    assert ended.stderr == f"{config}:5: admin.bind: cannot listen on {place}: address already in use\n"
