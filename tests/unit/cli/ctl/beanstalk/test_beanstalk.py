"""Values of columns and invalid arguments of the beanstalk commands.

The commands run against the real server in tests/functional/test_counterctl_beanstalk.py."""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import pytest
from click import UsageError
from click.testing import CliRunner

from counterd.cli.ctl import beanstalk as module
from counterd.cli.ctl import main
from counterd.cli.ctl.beanstalk import KEY, TEXT, TUBE, read_body, valued, whole_seconds
from counterd.protocols.beanstalk import wire

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("cmd-put", "12", 12),
        ("time-in-queue", "0.250000", 0.25),
        ("draining", "false", None),
        ("name", "77", "77"),
        ("id", "77", "77"),
        ("version", "1.13", "1.13"),
        ("retire-to", "", None),
        ("age-of-oldest-ready", None, None),
        ("cmd-put", "-1", None),
        ("cmd-put", "1.", None),
        ("cmd-put", "", None),
    ],
)
def test_values_of_statistics(name: str, text: str | None, value: object) -> None:
    assert repr(valued(name, text)) == repr(value)


def test_texts_have_the_bounds_of_the_protocol() -> None:
    for kind, most in ((TUBE, wire.NAME_MAX), (KEY, wire.NAME_MAX), (TEXT, wire.NEEDLE_MAX)):
        assert kind.convert("x" * most, None, None) == b"x" * most
        with pytest.raises(UsageError, match=f"to {most:,} bytes, not {most + 1:,}"):
            kind.convert("x" * (most + 1), None, None)


def test_times_are_whole_seconds() -> None:
    assert [whole_seconds(text) for text in ("0s", "90s", "2m", "3000ms")] == [0, 90, 120, 3]
    with pytest.raises(ValueError, match="expected whole seconds, not '500ms'"):
        whole_seconds("500ms")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-p", "1", "beanstalk", "tubes"], "write the address of the jobs after `beanstalk`"),
        (["beanstalk", "-p", "1", "drain"], "the address before `drain` is for the jobs"),
        (["beanstalk", "-u", "counter://a", "tubes"], "expected beanstalk://HOST:PORT"),
        (["beanstalk", "stats", "--tube", "t", "--job", "1"], "use either --tube or --job"),
        (["beanstalk", "peek", "--tube", "t", "--job", "1"], "use either --tube or --job"),
        (["beanstalk", "kick", "5", "--tube", "t", "--job", "1"], "use either --tube or --job"),
        (["beanstalk", "kick"], "use either BOUND or --job"),
        (["beanstalk", "kick", "5", "--job", "1"], "use either BOUND or --job"),
        (["beanstalk", "kick", "4294967296"], "4294967296 is not in the range"),
        (["beanstalk", "put", "x", "--file", "-"], "use either BODY or --file"),
        (["beanstalk", "put", "x", "--unique-for", "1m"], "--unique-for needs --key"),
        (["beanstalk", "put", "x", "--counter", "n"], "--counter and --maximum must be used together"),
        (["beanstalk", "put", "x", "--maximum", "1"], "--counter and --maximum must be used together"),
        (["beanstalk", "put", "x", "--ttr", "1.5s"], "expected whole seconds, not '1.5s'"),
        (["beanstalk", "put", "x", "--tube", "t" * 201], "a tube's name has 1 to 200 bytes, not 201"),
        (["beanstalk", "list", "t", "--search", "x" * 1025], "a text has 0 to 1,024 bytes, not 1,025"),
        (["beanstalk", "clear", "t"], "Missing argument"),
        (["beanstalk", "clear", "t", "reserved"], "'reserved' is not one of"),
        (["beanstalk", "tial", "t"], "Did you mean 'tail'?"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], why: str) -> None:
    done = CliRunner().invoke(main, arguments, env={"COUNTERD_URL": None, "BEANSTALK_URL": None})
    assert done.exit_code == 2
    assert why in done.stderr


@pytest.mark.parametrize(
    ("arguments", "environment", "where"),
    [
        (["beanstalk", "-p", "1", "tubes"], None, "127.0.0.1:1"),
        (["beanstalk", "tubes"], "beanstalk://127.0.0.1:1", "127.0.0.1:1"),
        (["beanstalk", "tubes"], "beanstalk+unix:///none", "/none"),
    ],
)
def test_the_address_of_the_server(arguments: list[str], environment: str | None, where: str) -> None:
    done = CliRunner().invoke(main, arguments, env={"COUNTERD_URL": "counter://other", "BEANSTALK_URL": environment})
    assert done.exit_code == 3
    assert done.stderr.startswith(f"counterctl: cannot connect to {where}: ")


def test_a_body_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BODY_MAX", 1000)
    file = tmp_path / "body"
    file.write_bytes(bytes(1001))
    done = CliRunner().invoke(main, ["beanstalk", "-p", "1", "put", "--file", str(file)])
    assert (done.exit_code, done.stderr) == (2, "counterctl: a body has at most 1,000 bytes\n")


def test_a_body_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\r\n")))
    assert read_body(None) == b"\xff\r\n"
    assert read_body(io.BytesIO(b"")) == b""
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="standard input is closed"):
        read_body(None)
