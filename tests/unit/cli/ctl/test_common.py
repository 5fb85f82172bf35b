"""The address of a server, names of any bytes, and errors as one line and a status."""

from __future__ import annotations

import os
import re
import signal
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from counterd.cli.ctl import common, main
from counterd.cli.ctl.common import (
    DURATION,
    EXIT_NO_CONNECTION,
    EXIT_NOT_AVAILABLE,
    EXIT_USAGE,
    NAME,
    Group,
    Server,
    Target,
    Terminated,
    explain,
    glob,
    shown,
    terminations_interrupt,
)
from counterd.client._addresses import Address, Tls
from counterd.errors import (
    ConnectionLost,
    InvalidArguments,
    NotAvailable,
    NotFound,
    OutOfMemory,
    ProtocolError,
    Timeout,
)

if TYPE_CHECKING:
    from pathlib import Path

HERE = Target(Address("127.0.0.1", 1), 5.0)


@click.command()
@common.address_options("counter", 11215, "COUNTERD_URL")
@click.pass_context
def where(context: click.Context, /, timeout: float, **_: object) -> None:
    server = Server(common.chosen_address(context, "counter", 11215), timeout)
    click.echo(f"{server.address} {server.arguments}")


@pytest.mark.parametrize(
    ("arguments", "address", "given"),
    [
        ([], "127.0.0.1:11215", {"host": "127.0.0.1", "port": 11215, "timeout": 5.0}),
        (["-h", "::1"], "[::1]:11215", {"host": "::1", "port": 11215, "timeout": 5.0}),
        (["-p", "7", "--timeout", "500ms"], "127.0.0.1:7", {"host": "127.0.0.1", "port": 7, "timeout": 0.5}),
        (["-s", "/run/x"], "/run/x", {"path": "/run/x", "timeout": 5.0}),
        (["-u", "counter://a:7"], "a:7", {"host": "a", "port": 7, "timeout": 5.0}),
        (["-u", "counter+unix:///run/x"], "/run/x", {"path": "/run/x", "timeout": 5.0}),
    ],
)
def test_the_address_of_a_server(arguments: list[str], address: str, given: dict[str, Any]) -> None:
    shown, _, rest = CliRunner().invoke(where, arguments, env={"COUNTERD_URL": None}).output.partition(" ")
    assert (shown, rest.strip()) == (address, str({"timeout": given.pop("timeout"), **given}))


@pytest.mark.parametrize(
    ("arguments", "address"),
    [([], "b:8"), (["-p", "7"], "127.0.0.1:7"), (["-s", "/run/x"], "/run/x"), (["-u", "counter://c"], "c:11215")],
)
def test_the_command_line_overrides_the_environment(arguments: list[str], address: str) -> None:
    done = CliRunner().invoke(where, arguments, env={"COUNTERD_URL": "counter://b:8"})
    assert done.output.split(" ")[0] == address


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (
            ["-u", "counter://a", "-p", "7"],
            "name the server with only one of these: --url, --host and --port, or --socket",
        ),
        (["-s", "/x", "-h", "a"], "name the server with only one of these: --url"),
        (["-s", "/x", "-u", "counter://a"], "name the server with only one of these: --url"),
        (["-s", ""], "--socket is empty"),
        (["-u", "redis://a"], "expected counter://HOST:PORT"),
        (["-p", "0"], "0 is not in the range"),
        (["--timeout", "0s"], "expected 0.001 or more"),
    ],
)
def test_invalid_addresses_are_refused(arguments: list[str], why: str) -> None:
    done = CliRunner().invoke(where, arguments)
    assert done.exit_code == EXIT_USAGE
    assert why in done.stderr


@pytest.mark.parametrize(
    ("arguments", "url", "address"),
    [
        (["--tls"], None, Address("127.0.0.1", 11215, tls=Tls())),
        (["-h", "a", "--cacert", "CA"], None, Address("a", 11215, tls=Tls("CA"))),
        (["-u", "counters://a", "--cert", "C", "--key", "K"], None, Address("a", 11215, tls=Tls("", "C", "K"))),
        ([], "counters://a?cacert=x&cert=y&key=z", Address("a", 11215, tls=Tls("x", "y", "z"))),
        (["--cert", "C"], "counters://a?cacert=x&cert=y&key=z", Address("a", 11215, tls=Tls("x", "C"))),
        (["--tls"], "counter://a", Address("a", 11215, tls=Tls())),
        (["-p", "7"], "counters://a", Address("127.0.0.1", 7)),
    ],
)
def test_options_for_tls(arguments: list[str], url: str | None, address: Address, tmp_path: Path) -> None:
    """Options override the URL, file by file."""
    files = {name: tmp_path / name for name in ("CA", "C", "K")}
    for file in files.values():
        file.touch()
    found: list[Address] = []

    @click.command()
    @common.address_options("counter", 11215, "COUNTERD_URL")
    @click.pass_context
    def find(context: click.Context, /, **_: object) -> None:
        found.append(common.chosen_address(context, "counter", 11215))

    words = [str(files.get(word, word)) for word in arguments]
    done = CliRunner().invoke(find, words, env={"COUNTERD_URL": url}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert address.tls is None or isinstance(address.tls, Tls)
    tls = address.tls and Tls(*(str(files.get(name, name)) for name in address.tls))
    assert found == [address._replace(tls=tls)]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-s", "/x", "--tls"], "/x: a Unix socket cannot use TLS"),
        (["--key", __file__], "--key needs --cert"),
        (["--cacert", "/none"], "'/none' does not exist"),
    ],
)
def test_invalid_options_for_tls_are_refused(arguments: list[str], why: str) -> None:
    done = CliRunner().invoke(where, arguments, env={"COUNTERD_URL": None})
    assert (done.exit_code, why in done.stderr) == (EXIT_USAGE, True)


def test_a_client_is_made_with_a_context() -> None:
    assert Server(Address("a", 7, tls=Tls()), 5.0).arguments["tls"].check_hostname


# ---- commands ----


def test_a_misspelled_command_gets_a_suggestion() -> None:
    done = CliRunner().invoke(main, ["holder", "a"])
    assert done.exit_code == EXIT_USAGE
    assert "Did you mean 'holders'?" in done.stderr
    assert "No such command 'xyz'." in CliRunner().invoke(main, ["xyz"]).stderr


# ---- values ----


def test_durations_are_read() -> None:
    assert DURATION.convert("500ms", None, None) == 0.5
    assert DURATION.convert("2m", None, None) == 120.0
    with pytest.raises(click.BadParameter, match="at most 1000000m"):
        DURATION.convert("1000001m", None, None)
    with pytest.raises(click.BadParameter, match="expected a time"):
        DURATION.convert("soon", None, None)


def test_a_name_is_the_bytes_of_the_command_line() -> None:
    assert NAME.convert("é", None, None) == "é".encode()
    assert NAME.convert(os.fsdecode(b"a\xff"), None, None) == b"a\xff"


@pytest.mark.parametrize("length", [0, 65_536])
def test_names_of_invalid_length_are_refused(length: int) -> None:
    with pytest.raises(click.BadParameter, match="a name has 1 to 65,535 bytes"):
        NAME.convert("x" * length, None, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"db:main", "db:main"),
        ("größe 日本".encode(), "größe 日本"),
        (b"a\xffb", r"a\xffb"),
        (b"a\\xff", r"a\\xff"),
        (b"\x1b[31m\n", r"\x1b[31m\x0a"),
        ("\u202e\x85".encode(), r"\xe2\x80\xae\xc2\x85"),
    ],
)
def test_names_are_printed_escaped(name: bytes, text: str) -> None:
    assert shown(name) == text


def unescaped(text: str) -> bytes:
    """The text that bash makes of $'...'."""
    pieces = re.split(r"(\\\\|\\x[0-9a-f]{2})", text)
    return b"".join(
        (b"\\" if piece == r"\\" else bytes.fromhex(piece[2:])) if index % 2 else piece.encode()
        for index, piece in enumerate(pieces)
    )


@given(st.one_of(st.binary(), st.text().map(lambda text: text.encode("utf-8", "replace"))))
def test_printed_names_are_unambiguous(name: bytes) -> None:
    text = shown(name)
    assert text.isprintable()
    assert unescaped(text) == name


@pytest.mark.parametrize(
    ("pattern", "name", "is_like"),
    [
        (None, b"any", True),
        ("db:*", b"db:main", True),
        ("db:*", b"x-db:main", False),
        ("d?", "dé".encode(), True),
        ("d??", b"d\xff\xfe", True),
        ("d", b"D", False),
        (os.fsdecode(b"\xff*"), b"\xff1", True),
        ("a*", b"a\nb", True),
    ],
)
def test_patterns_match_names(pattern: str | None, name: bytes, is_like: bool) -> None:
    assert bool(glob(pattern)(name)) == is_like


# ---- how a command ends ----


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (NotFound(1, "Not found"), "Not found (status 0x01)", EXIT_NOT_AVAILABLE),
        (NotAvailable(0x21, "Not available"), "Not available (status 0x21)", EXIT_NOT_AVAILABLE),
        (OutOfMemory(0x82, "No room"), "No room (status 0x82)", EXIT_NOT_AVAILABLE),
        (InvalidArguments(4, "Invalid"), "Invalid (status 0x04)", EXIT_USAGE),
        (ValueError("a name is too long"), "a name is too long", EXIT_USAGE),
        (ConnectionLost("gone"), "gone", EXIT_NO_CONNECTION),
        (Timeout("late"), "late", EXIT_NO_CONNECTION),
        (ProtocolError("bad\x1b\n bytes"), "127.0.0.1:1 does not speak the counter protocol: bad\ufffd bytes", 3),
        (ConnectionLost("cannot connect to x: [Errno -2] Name unknown"), "cannot connect to x: Name unknown", 3),
        (OSError(28, "No space left on device"), "No space left on device", EXIT_USAGE),
    ],
)
def test_errors_are_one_line(error: Exception, line: str, status: int) -> None:
    assert explain(error, HERE) == (line, status)


def group(error: BaseException) -> Group:
    """A group with one command, which raises this error."""

    @click.group(cls=Group)
    @click.pass_context
    def main(context: click.Context, /) -> None:
        context.obj = HERE

    @main.command()
    def fail() -> None:
        click.echo("so far")
        raise error

    assert isinstance(main, Group)
    return main


@pytest.mark.parametrize(
    ("error", "status", "stderr"),
    [
        (ConnectionLost("gone"), 3, "counterctl: gone\n"),
        (KeyboardInterrupt(), 130, ""),
        (Terminated(), 143, ""),
    ],
)
def test_an_interrupted_command_ends_without_a_traceback(error: BaseException, status: int, stderr: str) -> None:
    done = CliRunner().invoke(group(error), ["fail"])
    assert (done.exit_code, done.stdout, done.stderr) == (status, "so far\n", stderr)


def test_an_unexpected_exception_is_not_hidden() -> None:
    with pytest.raises(KeyError):
        CliRunner().invoke(group(KeyError("x")), ["fail"], catch_exceptions=False)


def test_a_termination_signal_raises_only_within_the_block() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminations_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
