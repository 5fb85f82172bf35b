"""`counterctl top`: what a server does, live, on the whole terminal.

Floor 5. The command alone; monitor.py is the loop, view.py what the user has chosen, screen.py what is seen.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from counterd.cli.ctl.admin import Endpoint, admin_options, endpoint_of, other_tables
from counterd.cli.ctl.common import EXIT_USAGE, Target, duration, pass_target, say
from counterd.cli.reading import Reads, at_least
from counterd.errors import ConnectionLost, CounterdError

INTERVAL_MIN_S = 0.1


@click.command()
@click.option(
    "-i",
    "--interval",
    type=Reads("duration", at_least(INTERVAL_MIN_S, duration)),
    default=1.0,
    help="The time between two updates.  [default: 1s]",
)
@admin_options
@pass_target
@click.pass_context
def top(context: click.Context, target: Target, /, interval: float, **where: Any) -> None:
    """Shows live what the server does, and its busiest counters.

    The upper part shows the rates of requests and refusals, the connections, and how full the tables are. Below are the
    counters with the most permits in use; a bar shows the share of the last maximum. Enter shows the holders of a
    counter. Tab shows the connections, then the keys, flows, tokens and tubes of other protocols; these come from the
    admin endpoint. `k` closes a connection, `h` shows all keys, `q` quits. If the server does not serve the counter
    protocol, the display begins with the other protocols.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        say("top needs a terminal; `counterctl stats` and `counterctl dump` print the same once")
        raise SystemExit(EXIT_USAGE)
    endpoint: Endpoint | str
    try:
        endpoint = endpoint_of(context, **where)
    except click.UsageError as error:  # what needs none works without
        endpoint = error.message
    from counterd.cli.ctl.view import View

    view = View(interval)
    try:
        client = target.connect()  # what is wrong with that is said where it can be read
    except ConnectionLost as error:
        try:
            view.tables = other_tables(endpoint) if isinstance(endpoint, Endpoint) else ()
        except CounterdError as other:
            raise ConnectionLost(f"{error}; {other}") from None
        if not view.tables:
            raise
        view.turn_to_table(view.tables[0])
        client = target.make()
    from counterd.cli.ctl.monitor import Monitor

    Monitor(target, client, endpoint, view).run()
