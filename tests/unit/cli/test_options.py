"""Parameter types made of functions: a ValueError becomes an error of the command line with the same text."""

from __future__ import annotations

import click.testing
import pytest

from counterd.cli.options import Reads, at_least
from counterd.units import seconds


@click.command()
@click.option("--time", type=Reads("time", at_least(0.5, seconds)), default=7.0)
def command(time: float) -> None:
    click.echo(repr(time))


@pytest.mark.parametrize(("arguments", "shown"), [(["--time", "500ms"], "0.5\n"), ([], "7.0\n")])
def test_valid_values_are_read(arguments: list[str], shown: str) -> None:
    """A default that is no text stays as it is."""
    assert click.testing.CliRunner().invoke(command, arguments).output == shown


@pytest.mark.parametrize(("text", "why"), [("soon", "expected a time"), ("400ms", "expected 0.5 or more, not '400ms'")])
def test_invalid_values_are_errors_of_the_command_line(text: str, why: str) -> None:
    done = click.testing.CliRunner().invoke(command, ["--time", text])
    assert done.exit_code == 2
    assert f"Invalid value for '--time': {why}" in done.stderr


def test_the_help_shows_the_name_of_the_type() -> None:
    assert "--time TIME" in click.testing.CliRunner().invoke(command, ["--help"]).output
