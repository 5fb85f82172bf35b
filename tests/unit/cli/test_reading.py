"""What a function cannot read is a mistake of the command line, with the function's own words."""

from __future__ import annotations

import click.testing
import pytest

from counterd.cli.reading import Reads, at_least
from counterd.units import seconds


@click.command()
@click.option("--time", type=Reads("time", at_least(0.5, seconds)), default=7.0)
def command(time: float) -> None:
    click.echo(repr(time))


@pytest.mark.parametrize(("arguments", "shown"), [(["--time", "500ms"], "0.5\n"), ([], "7.0\n")])
def test_what_can_be_read(arguments: list[str], shown: str) -> None:
    """A default is no text, and stays as it is."""
    assert click.testing.CliRunner().invoke(command, arguments).output == shown


@pytest.mark.parametrize(("text", "why"), [("soon", "expected a time"), ("400ms", "expected 0.5 or more, not '400ms'")])
def test_what_cannot_be_read(text: str, why: str) -> None:
    done = click.testing.CliRunner().invoke(command, ["--time", text])
    assert done.exit_code == 2
    assert f"Invalid value for '--time': {why}" in done.stderr


def test_it_is_called_in_the_help() -> None:
    assert "--time TIME" in click.testing.CliRunner().invoke(command, ["--help"]).output
