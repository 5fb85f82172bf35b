"""The command group: its commands, and that completion imports no client."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from counterd.cli.ctl import MODULES, main
from counterd.version import __version__


@pytest.mark.parametrize("command", MODULES)
def test_every_command_exists(command: str) -> None:
    with click.Context(main) as context:
        found = main.get_command(context, command)
    assert found is not None
    assert found.name == command
    assert found.get_short_help_str(200).endswith(".")


def test_the_help_has_the_commands_and_the_exit_statuses() -> None:
    text = CliRunner().invoke(main, ["--help"]).output
    assert all(f"\n  {command} " in text for command in MODULES)
    assert "Exit status" in text


def test_an_unknown_command_is_refused() -> None:
    done = CliRunner().invoke(main, ["gte"])
    assert done.exit_code == 2
    assert "No such command 'gte'" in done.stderr


def test_the_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"counterctl, version {__version__}\n"


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_completion_imports_little() -> None:
    """All commands are imported for their names and help texts; sockets and tables only when a command runs."""
    code = f"""import sys
from counterd.cli.ctl import MODULES, main
for command in {list(MODULES)}: main.get_command(None, command)
print(*sorted({{"asyncio", "counterd.client", "rich.console", "socket"}} & sys.modules.keys()))"""
    assert run(code).stdout == "\n"


@pytest.mark.parametrize("package", ["click", "rich"])
def test_a_missing_package_is_reported(package: str) -> None:
    code = f"import sys; sys.modules['{package}'] = None; import counterd.cli.ctl"
    done = run(code)
    assert done.returncode == 1
    expected = f"counterctl needs {package}: in the source tree, run `make setup` or pip install '.[cli]'\n"
    assert done.stderr == expected
