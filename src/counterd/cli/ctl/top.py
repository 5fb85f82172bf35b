"""`counterctl top`: what a server does, live, on the whole terminal.

Floor 5. The command alone; monitor.py is the loop, screen.py what is seen.
"""

from __future__ import annotations

import os
import sys

import click

from counterd.cli.ctl.common import EXIT_USAGE, Target, duration, pass_target, say
from counterd.cli.reading import Reads, at_least

INTERVAL_MIN_S = 0.1


@click.command()
@click.option(
    "-i",
    "--interval",
    type=Reads("duration", at_least(INTERVAL_MIN_S, duration)),
    default=1.0,
    help="Ask so often.  [default: 1s]",
)
@pass_target
def top(target: Target, interval: float) -> None:
    """Shows live what the server does, and its busiest counters.

    Rates of requests and refusals, connections and how full the tables are; below, the counters of which most is in
    use, with a bar of that against the last maximum that was asked for. `h` shows the keys, `q` quits.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        say("top needs a terminal: `counterctl stats` and `counterctl dump` print what there is once")
        raise SystemExit(EXIT_USAGE)
    client = target.connect()  # what is wrong with that is said where it can be read
    from counterd.cli.ctl.monitor import Monitor
    from counterd.cli.ctl.screen import View

    Monitor(target, client, View(interval)).run()
