"""Addresses of servers: hosts, paths and URLs, valid and invalid."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from counterd.client._addresses import Address, Tls, read_address, read_addresses, read_default


@pytest.mark.parametrize(
    ("text", "address", "shown"),
    [
        ("localhost", Address("localhost", 7), "localhost:7"),
        ("::1", Address("::1", 7), "[::1]:7"),
        ("counter://host", Address("host", 7), "host:7"),
        ("counter://host/", Address("host", 7), "host:7"),
        ("counter://host:0", Address("host", 0), "host:0"),
        ("counter://host:65535", Address("host", 65535), "host:65535"),
        ("COUNTER://[::1]:8", Address("::1", 8), "[::1]:8"),
        ("counter://[fe80::1%25lo]", Address("fe80::1%25lo", 7), "[fe80::1%25lo]:7"),
        ("counters://host", Address("host", 7, tls=Tls()), "host:7"),
        ("counters://[::1]:8/?cacert=a", Address("::1", 8, tls=Tls("a")), "[::1]:8"),
        ("counters://h?key=/k&cert=/a%20b%FF", Address("h", 7, tls=Tls(cert="/a b\udcff", key="/k")), "h:7"),
        ("counter+unix:///run/counterd", Address(path="/run/counterd"), "/run/counterd"),
        ("counter+unix:///a%20b%25/%C3%A9", Address(path="/a b%/é"), "/a b%/é"),
        ("counter+unix:///%FF", Address(path="/\udcff"), "/\udcff"),
        ("counter+unix:///100%", Address(path="/100%"), "/100%"),
    ],
)
def test_valid_addresses(text: str, address: Address, shown: str) -> None:
    assert read_address(text, 7) == address
    assert str(address) == shown


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://host", "expected counter://HOST:PORT, counters://HOST:PORT or counter"),
        ("counters://", "expected counter://HOST"),
        ("counters+unix:///p", "expected counter://HOST"),
        ("counters://host?a=1", "expected counters://HOST:PORT\\?cacert=FILE"),
        ("counters://host?cacert=", "expected counters://HOST:PORT\\?cacert=FILE"),
        ("counters://host?cert=a&cert=b", "expected counters://HOST:PORT\\?cacert=FILE"),
        ("counters://host?key=a", "key needs cert"),
        ("://host", "expected counter://HOST"),
        ("counter://", "expected counter://HOST"),
        ("counter://:1", "expected counter://HOST"),
        ("counter://host/path", "expected counter://HOST"),
        ("counter://host?cacert=a", "nothing may follow HOST:PORT in a counter:// URL"),
        ("counter://host#a", "expected counter://HOST"),
        ("counter://me@host", "expected counter://HOST"),
        ("counter://me:secret@host", "expected counter://HOST"),
        ("counter://host:65536", "[Pp]ort"),
        ("counter://host:-1", "[Pp]ort"),
        ("counter://host:x", "[Pp]ort"),
        ("counter://[::1", "IPv6"),
        ("host:11215", "expected a host without a port, or counter://host:11215"),
        ("host:", "expected a host"),
        ("[::1]", r"counter://\[::1\]"),
        ("[::1]:11215", r"counter://\[::1\]:11215"),
        ("counter+unix://", "expected counter\\+unix:///PATH"),
        ("counter+unix:///", "expected counter\\+unix:///PATH"),
        ("counter+unix://host/path", "expected counter\\+unix:///PATH"),
        ("counter+unix:///path?a=1", "expected counter\\+unix:///PATH"),
    ],
)
def test_invalid_addresses_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as caught:
        read_address(text, 7)
    assert repr(text) in str(caught.value)


def test_schemes_of_another_protocol() -> None:
    assert read_address("other://host", 7, "other") == Address("host", 7)
    with pytest.raises(ValueError, match="expected other://HOST"):
        read_address("counter://host", 7, "other")


def test_several_addresses_of_one_server() -> None:
    both = [Address("a", 7), Address("b", 8)]
    assert read_addresses(["a", "counter://b:8"], 7, None) == both
    assert read_addresses(("a", "counter://b:8"), 7, None) == both
    assert read_addresses("a", 7, None) == both[:1]


@pytest.mark.parametrize("path", ["/p%20 q", Path("/p%20 q")])
def test_a_path_is_not_decoded(path: Any) -> None:
    assert read_addresses("unused", 7, path) == [Address(path="/p%20 q")]


@pytest.mark.parametrize(("hosts", "path"), [([], None), ("unused", "")])
def test_an_empty_list_of_addresses_is_refused(hosts: Any, path: str | None) -> None:
    with pytest.raises(ValueError, match="no address"):
        read_addresses(hosts, 7, path)


@pytest.mark.parametrize("port", [-1, 65536, 65536 + 11215])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"port must be 0 to 65535, not {port}"):
        read_addresses("localhost", port, None)


# ---- TLS ----


def test_the_argument_tls_counts_for_all_addresses() -> None:
    hosts = ["a", "counter://b", "counters://c?cacert=/x"]
    assert [each.tls for each in read_addresses(hosts, 7, None)] == [None, None, Tls("/x")]
    assert [each.tls for each in read_addresses(hosts, 7, None, tls=True)] == [Tls(), Tls(), Tls("/x")]


def test_a_given_context_is_used() -> None:
    context = ssl.create_default_context()
    read = read_addresses(["a", "counters://b"], 7, None, tls=context)
    assert [each.make_context() for each in read] == [context, context]
    assert Address("a", 7).make_context() is None
    with pytest.raises(ValueError, match="c:7: the URL names files for TLS, so tls cannot be a context"):
        read_addresses("counters://c?cacert=/x", 7, None, tls=context)


def test_tls_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"tls must be True, False or an ssl\.SSLContext, not '/ca\.pem'"):
        read_addresses("a", 7, None, tls="/ca.pem")  # type: ignore[arg-type]


@pytest.mark.parametrize(("host", "path"), [("unused", "/p"), ("counter+unix:///p", None)])
def test_tls_with_a_unix_socket(host: str, path: str | None) -> None:
    with pytest.raises(ValueError, match=r"^/p: a Unix socket cannot use TLS"):
        read_addresses(host, 7, path, tls=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((None, None, None), Address("db1", 5)),
        (("db2", None, None), Address("db2", 11215)),
        ((None, 7, None), Address("127.0.0.1", 7)),
        ((None, None, "/socket"), Address(path="/socket")),
    ],
)
def test_the_environment_variable_is_the_default(monkeypatch, given: tuple, expected: Address) -> None:
    """It counts only if no address is given."""
    monkeypatch.setenv("COUNTERD_URL", "counter://db1:5")
    assert read_default(*given, default_port=11215) == [expected]


@pytest.mark.parametrize("value", [None, ""])
def test_the_default_without_the_environment_variable(monkeypatch, value: str | None) -> None:
    monkeypatch.delenv("COUNTERD_URL", raising=False)
    if value is not None:
        monkeypatch.setenv("COUNTERD_URL", value)
    assert read_default(None, None, None, default_port=11215) == [Address("127.0.0.1", 11215)]


def test_an_error_in_the_environment_variable_names_it(monkeypatch) -> None:
    monkeypatch.setenv("COUNTERD_URL", "http://db1")
    with pytest.raises(ValueError, match=r"^COUNTERD_URL: 'http://db1': expected counter://HOST:PORT"):
        read_default(None, None, None, default_port=11215)
