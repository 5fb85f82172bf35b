"""holders, holdings, waiters, connections and kill against a small server that imitates the admin endpoint."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from click.testing import CliRunner

from counterd.cli.ctl import main
from counterd.cli.ctl.admin import read_url
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from click.testing import Result

TOKEN = "a-token"
HOLDERS = [
    {"connection": "counter-12-3401", "peer": "127.0.0.1:5432", "amount": 2, "age_seconds": 3.2},
    {"connection": "", "peer": "", "amount": 1, "age_seconds": 90},
]
HELD = {
    "/holdings": [
        {"name": "db%FF%25", "amount": 2, "age_seconds": 3.2},
        {"name": "%1B%5B31m", "amount": 1_234_567, "age_seconds": 90},
    ],
    "/waits": [{"name": "db", "amount": 2, "left": 1.5}],
    "/subscriptions": [{"channel": "news", "times": 2, "age_seconds": 3.2}],
    "/tokens": [
        {"token": "-7", "flow": "103", "count": 3, "connection": "sentinel-1-1", "peer": "", "held": 1, "left": -1,
         "kept": 0}
    ],
}  # fmt: skip


def table(name: str, protocol: str, columns: str, *parameters: str) -> dict[str, Any]:
    """A table as /stats describes it."""
    made = described(columns)
    return {"name": name, "protocol": protocol, "columns": made, "sorts": [], "parameters": list(parameters)}


def described(columns: str) -> list[dict[str, Any]]:
    """Columns as an answer describes them. columns: name:kind, separated by blanks; an asterisk after it marks a
    detail.
    """
    pairs = (each.split(":") for each in columns.split())
    return [{"name": name, "kind": kind.strip("*"), "detail": kind.endswith("*")} for name, kind in pairs]


TABLES = [
    table("holders", "counter", "connection:connection peer:text amount:integer age_seconds:seconds", "name"),
    table("holdings", "counter", "name:name amount:integer age_seconds:seconds", "connection"),
    table("waits", "counter", "name:name amount:integer left:seconds", "connection"),
    table("waiters", "counter", "number:integer name:name connection:connection peer:text"),
    table("queue", "counter", "connection:connection peer:text position:integer amount:integer key:name", "name"),
    table("subscriptions", "throttr", "channel:name times:integer age_seconds:seconds", "connection"),
    table(
        "tokens",
        "sentinel",
        "token:text flow:text count:integer connection:connection peer:text held:seconds left:seconds kept:integer",
        *("flow", "connection"),
    ),
    table("throttled", "smockron", "domain:name", "domain"),
]
CONNECTION = described("id:text peer:text requests:integer age_seconds:seconds tls:text tls_cipher:text*")
CIPHER = "TLS_AES_256_GCM_SHA384"
QUEUE = {"connection": "counter-4-12", "peer": "127.0.0.1:5432", "position": 1, "amount": 2, "key": ""}
WAITER = {"number": 7, "name": "db", "connection": "", "peer": ""}


def connection(number: int, tls: str | None = None, cipher: str | None = None) -> dict[str, Any]:
    return {
        "id": f"counter-{number}-{number}", "peer": f"127.0.0.1:{number}", "requests": 1_234_567, "age_seconds": 12.5,
        "tls": tls, "tls_cipher": cipher,
    }  # fmt: skip


class Admin(HTTPServer):
    """An admin endpoint. asked: (method, path, parameters, headers). answers: replace its usual ones."""

    def __init__(self, address: Any) -> None:
        if isinstance(address, str):
            self.address_family = socket.AF_UNIX
        self.asked: list[tuple[str, str, dict[str, str], dict[str, str]]] = []
        self.answer: tuple[int, bytes] | None = None
        self.connections = [connection(number) for number in range(2500)]
        super().__init__(address, Handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.005,))
        self._thread.start()

    def server_bind(self) -> None:
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def reply(self, method: str, path: str, parameters: dict[str, str], token: str | None) -> tuple[int, bytes]:
        if self.answer is not None:
            return self.answer
        status, body = 200, {}
        if path == "/stats":
            body = {"tables": TABLES}
        elif path == "/holders":
            rows = HOLDERS if parameters["name"] == "db\xff%" else []
            body = {"columns": [], "rows": rows[: int(parameters["limit"])], "total": len(rows)}
        elif path in ("/queue", "/waiters"):
            rows = [QUEUE] if parameters.get("name") == "db\xff%" else [WAITER] if "sort" in parameters else []
            body = {"columns": [], "rows": rows, "total": len(rows)}
        elif path in HELD:
            gone = parameters["connection"].endswith("-gone")
            rows = [] if parameters["connection"].endswith("-idle") else HELD[path]
            status = 404 if gone else 200
            body = {"error": "no such connection"} if gone else {"rows": rows[: int(parameters["limit"])], "total": 9}
        elif method == "GET" and path == "/connections":
            begin = int(parameters.get("after", "counter--1").split("-", 1)[1].partition("-")[0] or -1) + 1
            end = begin + int(parameters["limit"])
            rows = self.connections[begin:end] if parameters.get("protocol") != "throttr" else []
            more = rows and end < len(self.connections)
            body = {"rows": rows, "columns": CONNECTION, "next": rows[-1]["id"] if more else None}
        elif token is None:
            status, body = 401, {"error": "this request needs the token: Authorization: Bearer TOKEN"}
        elif path != "/connections/counter-1-1":
            status, body = 404, {"error": "no such connection"}
        return status, json.dumps(body).encode()

    def close(self) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Admin

    def answer(self) -> None:
        url = urlsplit(self.path)
        parameters = dict(parse_qsl(url.query, encoding="latin-1"))
        self.server.asked.append((self.command, url.path, parameters, dict(self.headers)))
        status, body = self.server.reply(self.command, url.path, parameters, self.headers["Authorization"])
        if status:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
        self.wfile.write(body)

    do_GET = do_DELETE = answer

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Admin]:
    admin = Admin(("127.0.0.1", 0))
    yield admin
    admin.close()


@pytest.fixture
def admin(server: Admin) -> Iterator[Admin]:
    server.asked.clear()
    yield server
    server.answer = None


def ctl(admin: Admin | str, *arguments: str | bytes, token: str | None = None) -> Result:
    url = admin if isinstance(admin, str) else f"http://127.0.0.1:{admin.server_address[1]}"
    env = {"COUNTERD_ADMIN": url, "COUNTERD_ADMIN_TOKEN": token, "COUNTERD_URL": None}
    return CliRunner().invoke(main, arguments, env=env)  # type: ignore[arg-type]


# ---- holders ----


def test_holders_as_a_table(admin: Admin) -> None:
    done = ctl(admin, "holders", b"db\xff%".decode("utf-8", "surrogateescape"))
    assert done.stdout.splitlines() == [
        "connection       peer            amount     age",
        "counter-12-3401  127.0.0.1:5432       2  3.20 s",
        "gone             -                    1   1 min",
    ]
    assert (done.exit_code, done.stderr) == (0, "")
    assert [asked[1] for asked in admin.asked] == ["/stats", "/holders"]
    assert admin.asked[1][:3] == ("GET", "/holders", {"name": "db\xff%", "limit": "1000"})
    assert not any("Authorization" in asked[3] for asked in admin.asked)


def test_holders_as_json(admin: Admin) -> None:
    done = ctl(admin, "holders", "--output", "json", b"db\xff%".decode("utf-8", "surrogateescape"))
    assert json.loads(done.stdout) == [HOLDERS[0], {**HOLDERS[1], "connection": None, "peer": None}]


def test_more_rows_than_are_shown(admin: Admin) -> None:
    done = ctl(admin, "holders", "--limit", "1", b"db\xff%".decode("utf-8", "surrogateescape"))
    assert len(done.stdout.splitlines()) == 2
    assert done.stderr == "counterctl: showing 1 of 2 rows\n"


def test_a_counter_without_holders(admin: Admin) -> None:
    done = ctl(admin, "holders", "free")
    assert (done.exit_code, done.stderr) == (1, "counterctl: nobody holds free\n")


# ---- holdings ----


@pytest.mark.parametrize(
    ("connection", "path", "lines"),
    [
        ("counter-4-12", "/holdings", ["name amount age", "db\\xff% 2 3.20 s", "\\x1b[31m 1.23M 1 min"]),
        ("throttr-4-12", "/subscriptions", ["channel times age", "news 2 3.20 s"]),
        ("sentinel-4-12", "/tokens", ["token flow count held left kept", "-7 103 3 1 s -1 s 0"]),
    ],
)
def test_holdings_as_a_table(admin: Admin, connection: str, path: str, lines: list[str]) -> None:
    done = ctl(admin, "holdings", connection)
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == lines
    assert (done.exit_code, done.stderr) == (0, f"counterctl: showing {len(lines) - 1} of 9 rows\n")
    assert admin.asked[-1][:3] == ("GET", path, {"connection": connection, "limit": "1000"})
    assert not any("Authorization" in asked[3] for asked in admin.asked)


def test_holdings_as_json(admin: Admin) -> None:
    (row,) = json.loads(ctl(admin, "holdings", "counter-4-12", "--limit", "1", "--output", "json").stdout)
    assert row == {"name": "db\\xff%", "name_base64": "ZGL/JQ==", "amount": 2, "age_seconds": 3.2}


def test_a_connection_without_holdings_and_an_unknown_one(admin: Admin) -> None:
    done = ctl(admin, "holdings", "counter-4-idle")
    assert (done.exit_code, done.stderr) == (1, "counterctl: counter-4-idle holds nothing\n")
    done = ctl(admin, "holdings", "counter-4-gone")
    assert (done.exit_code, done.stdout, done.stderr) == (1, "", "counterctl: no such connection\n")
    done = ctl(admin, "holdings", "smockron-4-12")
    assert (done.exit_code, done.stderr) == (1, "counterctl: smockron-4-12 holds nothing\n")
    for words in ("db:main", "counters-4-12", ""):
        done = ctl(admin, "holdings", words)
        assert (done.exit_code, done.stdout) == (2, "")
        assert f"{words!r} is not a connection id" in done.stderr


# ---- who waits ----


def test_waiters_of_a_name(admin: Admin) -> None:
    done = ctl(admin, "waiters", "db\udcff%", "--limit", "5")
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["connection", "peer", "position", "amount", "key"], ["counter-4-12", "127.0.0.1:5432", "1", "2"],
    ]  # fmt: skip
    assert (done.exit_code, done.stderr) == (0, "")
    assert admin.asked[-1][:3] == ("GET", "/queue", {"name": "db\xff%", "limit": "5"})
    done = ctl(admin, "waiters", "free")
    assert (done.exit_code, done.stderr) == (1, "counterctl: nobody waits for free\n")


def test_waiters_of_all_names(admin: Admin) -> None:
    done = ctl(admin, "waiters", "--sort", "amount")
    assert done.stdout.splitlines()[1].split() == ["7", "db", "gone", "-"]
    assert admin.asked[-1][:3] == ("GET", "/waiters", {"sort": "amount", "limit": "1000"})
    assert (done.exit_code, done.stderr) == (0, "")
    done = ctl(admin, "waiters", "--limit", "1")
    assert (done.exit_code, done.stderr) == (1, "counterctl: nobody waits\n")
    done = ctl(admin, "waiters", "db", "--sort", "age")
    assert done.exit_code == 2
    assert "give either NAME or --sort" in done.stderr


def test_waits_of_a_connection(admin: Admin) -> None:
    done = ctl(admin, "waits", "counter-4-12")
    assert done.stdout.splitlines()[1].split() == ["db", "2", "1.50", "s"]
    assert admin.asked[-1][:3] == ("GET", "/waits", {"connection": "counter-4-12", "limit": "1000"})
    for connection in ("counter-4-idle", "throttr-4-12", "smockron-4-12"):
        done = ctl(admin, "waits", connection)
        assert (done.exit_code, done.stderr) == (1, f"counterctl: {connection} waits for nothing\n")


# ---- connections ----


def test_connections_as_a_table(admin: Admin) -> None:
    admin.connections[1] = connection(1, "TLSv1.3", CIPHER)
    done = ctl(admin, "connections", "--limit", "2", "--protocol", "counter")
    assert [" ".join(line.split()) for line in done.stdout.splitlines()] == [
        "id peer requests age tls",
        "counter-0-0 127.0.0.1:0 1.23M 12.5 s -",
        "counter-1-1 127.0.0.1:1 1.23M 12.5 s TLSv1.3",
    ]
    assert admin.asked[0][2] == {"limit": "2", "protocol": "counter"}
    (row,) = json.loads(ctl(admin, "connections", "--limit", "2", "--output", "json").stdout)[1:]
    assert row == connection(1, "TLSv1.3", CIPHER)


def test_all_connections_page_by_page(admin: Admin) -> None:
    done = ctl(admin, "connections", "--output", "csv")
    assert [line.partition(",")[0] for line in done.stdout.splitlines()[1:]] == [row["id"] for row in admin.connections]
    assert [asked[2].get("after") for asked in admin.asked] == [None, "counter-999-999", "counter-1999-1999"]
    assert len(ctl(admin, "connections", "--limit", "1001", "--output", "csv").stdout.splitlines()) == 1002
    assert admin.asked[-1][2] == {"limit": "1", "after": "counter-999-999"}
    assert ctl(admin, "connections", "--limit", "0", "--output", "csv").stdout.count("\n") == 1


def test_reading_commands_send_no_token(admin: Admin) -> None:
    """A server refuses a wrong token, also where it needs none."""
    assert ctl(admin, "connections", "--limit", "1", token="of another server").exit_code == 0
    assert ctl(admin, "holders", "x", token="of another server").exit_code == 1
    assert all("Authorization" not in asked[3] for asked in admin.asked)


def test_no_connections(admin: Admin) -> None:
    done = ctl(admin, "connections", "--protocol", "throttr")
    assert (done.exit_code, done.stderr) == (0, "counterctl: no connections\n")
    assert ctl(admin, "connections", "--limit", "0").stderr == ""


# ---- kill ----


def test_kill_sends_the_token(admin: Admin, tmp_path: Path) -> None:
    done = ctl(admin, "kill", "counter-1-1", token=TOKEN)
    assert (done.exit_code, done.output) == (0, "")
    assert admin.asked[0][:2] == ("DELETE", "/connections/counter-1-1")
    assert admin.asked[0][3]["Authorization"] == f"Bearer {TOKEN}"
    file = tmp_path / "token"
    file.write_text("another\n")
    assert ctl(admin, "kill", "--token-file", str(file), "counter-1-1", token=TOKEN).exit_code == 0
    assert admin.asked[1][3]["Authorization"] == "Bearer another"


def test_kill_goes_on_after_an_unknown_connection(admin: Admin) -> None:
    done = ctl(admin, "kill", "a/b", "counter-1-1", "c?d", token=TOKEN)
    assert (done.exit_code, done.stderr) == (1, "counterctl: not found: a/b, c?d\n")
    assert [asked[1] for asked in admin.asked] == [
        "/connections/a%2Fb",
        "/connections/counter-1-1",
        "/connections/c%3Fd",
    ]


# ---- what may go wrong ----


@pytest.mark.parametrize(
    ("status", "text", "exit_code", "said"),
    [
        (400, "limit: expected 1 to 1000", 2, "limit: expected 1 to 1000"),
        (401, "wrong token", 1, "wrong token; set the token in COUNTERD_ADMIN_TOKEN, or"),
        (
            403,
            "read-only: admin.token is not set",
            1,
            "read-only: admin.token is not set; this request needs a token",
        ),
        (403, "unknown host name; add it to admin.hosts", 1, "counterctl: unknown host name; add it to admin.hosts\n"),
        (404, "no table 'holders'", 1, "counterctl: no table 'holders'\n"),
        (503, "too many ask", 1, "counterctl: too many ask\n"),
        (503, "too\n\x1b[31m\ud800", 1, "counterctl: too\\x0a\\x1b[31m"),
        (500, "internal error", 3, "the server failed: internal error (status 500)"),
    ],
)
def test_refusals_of_the_server(admin: Admin, status: int, text: str, exit_code: int, said: str) -> None:
    admin.answer = status, json.dumps({"error": text}).encode()
    done = ctl(admin, "holders", "x")
    assert (done.exit_code, done.stdout) == (exit_code, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    "answer",
    [
        (200, b"<html>"), (404, b"[]"), (404, b"{}"), (0, b"\x91\0\0\x01"), (0, b""), (200, b"[]"), (200, b"3"),
        (200, b'{"rows": 3, "tables": 3}'), (200, b'{"rows": NaN}'), (200, b"[" * 100_000),
        (200, b'{"columns": [], "rows": [1], "next": null, "tables": [{}]}'),
    ],
)  # fmt: skip
def test_a_server_that_is_no_admin_endpoint(admin: Admin, answer: tuple[int, bytes]) -> None:
    admin.answer = answer
    for words in (["connections"], ["holders", "x"]):
        done = ctl(admin, *words)
        assert done.exit_code == 3
        assert re.search("admin endpoint of counterd\n|lost the connection to", done.stderr)


def test_a_reply_that_is_too_long(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterd.cli.ctl.admin.REPLY_MAX", 99)
    admin.answer = 200, b" " * 100 + b'{"rows": [], "columns": [], "next": null}'
    done = ctl(admin, "connections")
    assert (done.exit_code, "is not an admin endpoint of counterd" in done.stderr) == (3, True)


def test_the_timeout_counts_for_the_whole_reply() -> None:
    """Each byte of it comes soon, and the last one never."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            peer, _ = listener.accept()
            with peer, contextlib.suppress(OSError):
                while True:
                    peer.send(b"H")
                    time.sleep(0.01)

        thread = threading.Thread(target=drip)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        done = ctl(url, "--timeout", "200ms", "connections")
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert (done.exit_code, done.stderr) == (3, f"counterctl: {url} did not answer within 0.2 s\n")


def test_a_server_that_does_not_answer_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        done = ctl(url, "--timeout", "20ms", "connections")
    assert (done.exit_code, done.stderr) == (3, f"counterctl: {url} did not answer within 0.02 s\n")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "unix:/no/such"])
def test_connecting_fails_without_a_server(url: str) -> None:
    done = ctl(url, "holders", "x")
    assert done.exit_code == 3
    assert f"cannot connect to the admin endpoint at {url}: " in done.stderr
    assert "`admin.enable = true` in the server's configuration enables it, and --admin sets its address" in done.stderr


@pytest.mark.parametrize("token", ["två", "a\nb", "a\x1bb"])
def test_an_invalid_token_is_not_shown(admin: Admin, token: str) -> None:
    done = ctl(admin, "kill", "x", token=token)
    assert done.exit_code == 2
    assert "the token must be one line of printable ASCII" in done.stderr
    assert token not in done.stderr


NOBODY = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["-h", "elsewhere", "kill", "x"], {}, "the address before `kill` is for the counters"),
        (["-s", "/run/x", "holders", "x"], {}, "the address before `holders` is for the counters"),
        (["holders", "x"], {"COUNTERD_URL": "counter://elsewhere"}, "COUNTERD_URL is for the counters"),
        (["kill", "x"], {"COUNTERD_URL": "counter+unix:///run/x"}, "COUNTERD_URL is for the counters"),
        (["connections"], {"COUNTERD_URL": "counter://127.0.0.1:31000"}, "COUNTERD_URL is for the counters"),
    ],
)
def test_another_server_needs_its_admin_address(words: list[str], env: dict[str, str], said: str) -> None:
    """Else `counterctl -h elsewhere kill` would kill here."""
    done = CliRunner().invoke(main, words, env={"COUNTERD_ADMIN": None, "COUNTERD_URL": None, **env})
    assert done.exit_code == 2
    assert said in done.stderr
    assert "name the admin endpoint with --admin URL or COUNTERD_ADMIN" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["-h", "elsewhere", "connections"], {"COUNTERD_ADMIN": NOBODY}),
        (["-h", "elsewhere", "connections", "--admin", NOBODY], {"COUNTERD_ADMIN": None}),
        (["connections", "--admin", NOBODY], {"COUNTERD_ADMIN": None, "COUNTERD_URL": "counter://elsewhere"}),
    ],
)
def test_a_given_admin_endpoint_is_used(words: list[str], env: dict[str, str]) -> None:
    done = CliRunner().invoke(main, words, env={"COUNTERD_URL": None, **env})
    assert done.exit_code == 3
    assert f"cannot connect to the admin endpoint at {NOBODY}" in done.stderr


def test_over_a_unix_socket(short_path: Path) -> None:
    path = str(short_path / "admin")
    admin = Admin(path)
    try:
        for url in (f"unix:{path}", f"unix://{path}"):
            assert ctl(url, "holders", b"db\xff%".decode("utf-8", "surrogateescape")).exit_code == 0
        assert admin.asked[0][3]["Host"] == "localhost:11216"
    finally:
        admin.close()


@pytest.mark.parametrize(
    ("url", "read"),
    [
        ("http://host", ("host", 11216, "")),
        ("http://[::1]:7/", ("::1", 7, "")),
        ("127.0.0.1:31216", ("127.0.0.1", 31216, "")),
        ("[::1]:31216", ("::1", 31216, "")),
        ("localhost", ("localhost", 11216, "")),
        ("unix:/run/a", ("localhost", 11216, "/run/a")),
        ("unix:///run/a", ("localhost", 11216, "/run/a")),
    ],
)
def test_urls_are_read(url: str, read: tuple[str, int, str]) -> None:
    assert read_url(url) == read


@pytest.mark.parametrize(
    "url",
    ["host:x", "https://host", "http://", "http://h/path", "http://me@h", "http://h?a", "http://h:x", "unix:"],
)
def test_invalid_urls_are_refused(url: str) -> None:
    assert ctl(url, "connections").exit_code == 2
