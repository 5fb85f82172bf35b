"""`counterctl`: the command line for everything a running counterd can be asked.

Floor 5. Exit status: 0 when all went well, 1 for what is not available or not found, 2 for a command line that makes no
sense, 3 for a server that cannot be reached, went away, or is something else.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys

try:
    import click

    if importlib.util.find_spec("rich") is None:  # it takes longer to import than all else, and only tables need it
        raise ModuleNotFoundError("No module named 'rich'", name="rich")
    from counterd.cli.ctl import common
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package == "counterd":
        raise
    sys.exit(f"counterctl needs {package}: pip install 'counterd[cli]'")

from counterd.version import __version__

PORT = 11215
MODULES: dict[str, str] = {}  # by command; its module here has a function of the command's name


class Main(common.Group):
    """Imports the module of a command when that is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        command: click.Command = getattr(importlib.import_module(f"{__name__}.{MODULES[cmd_name]}"), cmd_name)
        return command


@click.group(cls=Main, context_settings={"max_content_width": 110})
@common.address_options("counter", PORT, "COUNTERD_URL")
@click.version_option(__version__, prog_name="counterctl")
@click.pass_context
def main(context: click.Context, /, timeout: float, **_: object) -> None:
    """Asks a running counterd, and holds what it hands out."""
    context.obj = common.Target(common.chosen_address(context, PORT), timeout)
