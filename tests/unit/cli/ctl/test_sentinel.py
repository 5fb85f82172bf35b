"""Values of parameters and the server's address in the sentinel commands.

The commands run against the real server in tests/functional/test_counterctl_sentinel.py."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from counterd.cli.ctl import main
from counterd.cli.ctl.output import span
from counterd.cli.ctl.sentinel import ParamValue
from counterd.client.sentinel import Tag, Typed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("int:-5", Typed(Tag.INTEGER, -5)),
        ("long:5", Typed(Tag.LONG, 5)),
        ("double:0.5", Typed(Tag.DOUBLE, 0.5)),
        ("bool:true", Typed(Tag.BOOLEAN, True)),
        ("bool:false", Typed(Tag.BOOLEAN, False)),
        ("text:int:5", Typed(Tag.STRING, b"int:5")),
        ("\udcff:5", Typed(Tag.STRING, b"\xff:5")),
        ("", Typed(Tag.STRING, b"")),
    ],
)
def test_values_of_parameters_are_read(text: str, expected: Typed) -> None:
    found = ParamValue().convert(text, None, None)
    assert found == expected
    assert ParamValue().convert(found, None, None) is found


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["-p", "1", "sentinel", "ping"], "write the address of the flows after `sentinel`"),
        (["sentinel", "-p", "1", "tokens"], "the address before `tokens` is for the flows"),
        (["sentinel", "-u", "counter://a", "ping"], "expected sentinel://HOST:PORT"),
        (["sentinel", "flow", "0"], "0 is not in the range"),
        (["sentinel", "param", "1", "bool:yes"], "bool:yes is not a valid bool"),
        (["sentinel", "param", "1", "int:\udcff"], r"int:\xff is not a valid int"),
        (["sentinel", "release", "x"], "'x' is not a valid integer"),
        (["sentinel", "acqire", "1"], "Did you mean 'acquire'?"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], why: str) -> None:
    done = CliRunner().invoke(main, arguments, env={"COUNTERD_URL": None, "SENTINEL_URL": None})
    assert done.exit_code == 2
    assert why in done.stderr


def test_the_address_of_the_flows_does_not_give_the_admin_endpoint() -> None:
    env = {"COUNTERD_ADMIN": None, "COUNTERD_URL": "counter://elsewhere"}
    done = CliRunner().invoke(main, ["sentinel", "flows"], env={**env, "SENTINEL_URL": "sentinel://elsewhere"})
    assert done.exit_code == 2
    assert "SENTINEL_URL is for the flows" in done.stderr
    done = CliRunner().invoke(main, ["sentinel", "flows"], env={**env, "COUNTERD_ADMIN": "http://127.0.0.1:1"})
    assert done.exit_code == 3
    assert "cannot connect to the admin endpoint at http://127.0.0.1:1" in done.stderr


def test_a_token_may_look_like_an_option() -> None:
    done = CliRunner().invoke(main, ["sentinel", "-p", "1", "release", "-5"], env={"COUNTERD_URL": "counter://other"})
    assert (done.exit_code, done.stderr) == (3, "counterctl: cannot connect to 127.0.0.1:1: Connection refused\n")


def test_the_negative_time_of_an_ended_lease() -> None:
    assert [span(seconds) for seconds in (-0.05, -90.0, 0)] == ["-50.0 ms", "-1 min", "0 s"]
