"""Which requests are allowed: what another page can make a browser send, and what only its user can."""

from __future__ import annotations

import pytest

from counterd.admin.guard import Guard, host_name
from counterd.ipc import Refused

OPEN = Guard.of({"token": "", "allow": [], "hosts": ["figures.example"]})
CLOSED = Guard.of({"token": "s3cret", "allow": ["10.0.0.0/8", "fd00::/8"], "hosts": []})


def refused(guard: Guard, method: str = "GET", host: str | list[str] = "localhost", **headers: str) -> int | None:
    """The status of the refusal, or None. In a keyword, `_` stands for the hyphen of a name."""
    hosts = [host] if isinstance(host, str) else host
    try:
        guard.check(method, hosts, {name.replace("_", "-"): value for name, value in headers.items()})
    except Refused as refusal:
        return refusal.status
    return None


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:11216", "localhost.", "127.0.0.1", "127.0.0.1:80", "[::1]:11216", "[::1]", "10.1.2.3",
     "figures.example", "Figures.Example:443"],
)  # fmt: skip
def test_known_hosts_are_allowed(host: str) -> None:
    assert refused(OPEN, host=host) is None


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", ":80", "localhost:x", "localhost:80@evil",
     "evil@localhost", "[::1", "localhost evil", "0x7f000001", "localhost/", "\udce4", "figures.example.evil"],
)  # fmt: skip
def test_unknown_hosts_are_refused(host: str) -> None:
    assert refused(OPEN, host=host) == 403


@pytest.mark.parametrize("hosts", [[], ["localhost", "localhost"], ["localhost", "evil.example"]])
def test_a_request_needs_exactly_one_host(hosts: list[str]) -> None:
    assert refused(OPEN, host=hosts) == 400


@pytest.mark.parametrize("origin", ["http://localhost:11216", "https://localhost:11216", "HTTP://LOCALHOST:11216"])
def test_requests_of_our_own_page_are_allowed(origin: str) -> None:
    assert refused(OPEN, host="localhost:11216", Origin=origin) is None


@pytest.mark.parametrize(
    "origin",
    ["null", "", "http://evil.example", "http://localhost", "http://localhost:80", "http://127.0.0.1:11216",
     "file://", "http://localhost:11216.evil.example", "http://localhost:11216/"],
)  # fmt: skip
def test_requests_of_another_page_are_refused(origin: str) -> None:
    assert refused(OPEN, host="localhost:11216", Origin=origin) == 403


@pytest.mark.parametrize(
    ("site", "mode", "status"),
    [
        ("same-origin", "cors", None),
        ("none", "navigate", None),
        ("cross-site", "navigate", None),  # a link that somebody followed
        ("cross-site", "no-cors", 403),  # an image or a script of another page
        ("same-site", "cors", 403),  # another port
        ("cross-site", "websocket", 403),
    ],
)
def test_resources_embedded_by_another_page_are_refused(site: str, mode: str, status: int | None) -> None:
    assert refused(OPEN, Sec_Fetch_Site=site, Sec_Fetch_Mode=mode) == status


def test_without_a_token_only_reading_is_allowed() -> None:
    assert refused(OPEN) is None
    assert refused(OPEN, "DELETE") == refused(OPEN, "PUT") == 403
    assert refused(OPEN, "DELETE", Authorization="Bearer ") == 403
    assert refused(OPEN, Authorization="Basic whatever-a-proxy-wants") is None


@pytest.mark.parametrize("given", ["Bearer s3cret", "bearer s3cret", "Bearer  s3cret "])
def test_the_right_token_allows_changes(given: str) -> None:
    assert refused(CLOSED, "DELETE", Authorization=given) is None


@pytest.mark.parametrize(
    "given",
    ["Bearer", "Bearer ", "s3cret", "Bearer s3cre", "Bearer s3cret2", "Basic s3cret", "Bearer S3CRET", "Bearer \udce4"],
)
def test_a_wrong_token_is_refused(given: str) -> None:
    assert refused(CLOSED, "DELETE", Authorization=given) == 401
    assert refused(CLOSED, "GET", Authorization=given) == 401


def test_reading_needs_no_token_and_changing_does() -> None:
    assert refused(CLOSED) is None
    assert refused(CLOSED, "DELETE") == refused(CLOSED, "PUT") == 401


def test_which_addresses_may_connect() -> None:
    assert OPEN.allows_peer("192.0.2.1")
    assert CLOSED.allows_peer("10.255.0.1")
    assert CLOSED.allows_peer("::ffff:10.255.0.1")
    assert CLOSED.allows_peer("fd00::1%eth0")
    assert not CLOSED.allows_peer("192.0.2.1")
    assert not CLOSED.allows_peer("127.0.0.1")


def test_host_names_are_read() -> None:
    assert host_name("[FE80::1]:80") == "fe80::1"
    assert host_name("A.b.:1") == "a.b"
    assert host_name("a:1:2") == ""
