"""`counterctl top`: shows live what a server does, on the whole terminal.

Floor 5 (ARCHITECTURE.md). This file has only the command. monitor.py has the loop, top_state.py the choices of the
user, and screen.py the drawing.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from counterd.cli.ctl.admin import Endpoint, admin_options, endpoint_of, other_tables
from counterd.cli.ctl.common import EXIT_USAGE, Target, duration, pass_target, say
from counterd.cli.options import Reads, at_least
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

    The upper part of the screen shows the rates of requests and refusals, the connections, and how full the tables are.
    The lower part shows the counters with the most permits in use; a bar shows the share of the last maximum that is in
    use. Enter shows the holders of the selected counter, and `w` shows which connections wait for it. Tab shows the
    connections, the rates and the waiters, then the keys, flows, tokens and tubes of other protocols. The holders, the
    connections and these tables come from the admin endpoint. The key `k` closes the selected connection, `h` shows all
    keys, and `q` quits. If the server does not serve the counter protocol, the screen begins with the tables of the
    other protocols.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        say("top needs a terminal; without one, use `counterctl stats` and `counterctl dump`")
        raise SystemExit(EXIT_USAGE)
    endpoint: Endpoint | str
    try:
        endpoint = endpoint_of(context, **where)
    except click.UsageError as error:  # the counters can be shown without the endpoint
        endpoint = error.message
    from counterd.cli.ctl.top_state import TopState

    state = TopState(interval)
    try:
        client = target.connect()  # an error is reported before the screen is cleared
    except ConnectionLost as error:
        try:
            state.tables = other_tables(endpoint) if isinstance(endpoint, Endpoint) else ()
        except CounterdError as other:
            raise ConnectionLost(f"{error}; {other}") from None
        others = [table for table in state.tables if table.protocol != "counter"]
        if not others:
            raise
        state.turn_to_table(others[0])
        client = target.make()
    from counterd.cli.ctl.monitor import Monitor

    Monitor(target, client, endpoint, state).run()
