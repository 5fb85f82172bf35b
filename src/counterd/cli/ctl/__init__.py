"""`counterctl`: the command line for a running counterd.

Floor 5 (ARCHITECTURE.md). Exit status: 0 for success, 1 if something is not available or not found, 2 for a wrong
command line, 3 if the server cannot be reached, disconnects, or speaks another protocol.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys

try:
    import click

    if importlib.util.find_spec("rich") is None:  # not imported here: that takes long, and only tables need it
        raise ModuleNotFoundError("No module named 'rich'", name="rich")
    from counterd.cli.ctl import common
    from counterd.cli.ctl.output import output_option
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package == "counterd":
        raise
    sys.exit(f"counterctl needs {package}: in the source tree, run `make setup` or pip install '.[cli]'")

from counterd import protocols
from counterd.version import __version__

# The commands for one protocol. The module here has the name of the protocol.
OF_PROTOCOLS = sorted({each.name for each in pkgutil.iter_modules(__path__)} & {*protocols.names()})

# The module of each command. The function in it has the name of the command.
MODULES = {
    "ping": "data",
    "get": "data",
    "acquire": "data",
    "hold": "data",
    "take": "taking",
    "stats": "data",
    "dump": "data",
    "watch": "data",
    "run": "run",
    "holders": "admin",
    "waiters": "admin",
    "holdings": "admin",
    "waits": "admin",
    "limit": "admin",
    "connections": "admin",
    "kill": "admin",
    "cluster": "cluster",
    "top": "top",
    **{name: name for name in OF_PROTOCOLS},
    "bench": "data",
    "completion": "data",
}


class Main(common.Group):
    """A group of commands that imports the module of a command only when the command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        command: click.Command = getattr(importlib.import_module(f"{__name__}.{MODULES[cmd_name]}"), cmd_name)
        return command


@click.group(cls=Main, context_settings={"max_content_width": 110})
@common.address_options("counter", common.PORT, "COUNTERD_URL")
@output_option
@click.option("--name", default="", metavar="NAME", help="What this command calls itself in the tables of the server.")
@click.version_option(__version__, prog_name="counterctl")
@click.pass_context
def main(context: click.Context, /, timeout: float, name: str, **_: object) -> None:
    """Shows which permits of a running counterd are in use, and acquires and releases permits.

    Every command has its own option --help. counterctl writes data to standard output, in the format of --output, and
    messages to standard error. Names are bytes; a byte that is not printable UTF-8 is shown as \\xNN.

    Exit status: 0 for success; 1 if something is not available or not found; 2 for a wrong command line or output that
    cannot be written; 3 if the server cannot be reached, disconnects, or speaks another protocol; 128 plus N if signal
    N ended the command.

    \b
      counterctl ping
      counterctl acquire db:main 2 10 --for 10s     2 of at most 10 permits, for ten seconds
      counterctl take calls=1/8 --rate tokens=500@90000/1m --wait 5s
      counterctl get db:main
      counterctl dump --held --sort consumption     the counters in use now, the largest first
      counterctl -u counter+unix:///run/counterd.sock stats
      counterctl holders db:main                    which connections hold it (asks the admin endpoint)
      counterctl waiters db:main                    which connections wait for it, and in which order
      counterctl --name nightly run backups --max 2 -- rsync -a /srv backup:/srv
    """
    context.obj = common.Target(common.chosen_address(context, "counter", common.PORT), timeout, name)
