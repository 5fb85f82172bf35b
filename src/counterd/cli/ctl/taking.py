"""`counterctl take`: takes permits and units of rates in one request, and holds the permits.

Floor 5 (ARCHITECTURE.md).
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

import click

from counterd.cli.ctl.common import (
    DURATION,
    EXIT_NOT_AVAILABLE,
    Target,
    duration,
    interrupted,
    pass_target,
    say,
    shown,
    terminations_interrupt,
)
from counterd.cli.ctl.data import NAME_COLUMN, holding_options, wait
from counterd.cli.ctl.output import Column, Kind, Output, output_option, span
from counterd.cli.reading import Reads
from counterd.errors import NotAvailable

# What is after the last = of an item: AMOUNT/MAX of permits; UNITS@LIMIT/PERIOD, and maybe /BURST, of a rate.
PERMITS = re.compile(r"(.+)=([0-9]+)/([0-9]+)", re.DOTALL)
UNITS = re.compile(r"(.+)=([0-9]+)@([0-9]+)/([0-9.]+[a-z]*)(?:/([0-9]+))?", re.DOTALL)


class Permits(NamedTuple):
    """How many permits of a counter to take, and the maximum of the counter."""

    name: bytes
    amount: int = 1
    maximum: int = 1


class Units(NamedTuple):
    """How many units of a rate to take, and the limit of the rate. per: the period in seconds."""

    name: bytes
    amount: int
    limit: int
    per: float
    maximum: int  # at once


def read_permits(text: str) -> Permits:
    """Reads NAME=AMOUNT/MAX, or NAME alone, which means the only permit of a counter."""
    found = PERMITS.fullmatch(text)
    if found is None:
        return Permits(os.fsencode(text))
    name, amount, maximum = found.groups()
    if not 1 <= int(amount) <= int(maximum):
        raise ValueError(f"AMOUNT must be 1 to MAX, not {amount}")
    return Permits(os.fsencode(name), int(amount), int(maximum))


def read_units(text: str) -> Units:
    """Reads NAME=UNITS@LIMIT/PERIOD[/BURST]."""
    found = UNITS.fullmatch(text)
    if found is None:
        raise ValueError(f"expected NAME=UNITS@LIMIT/PERIOD[/BURST], not {text!r}")
    name, units, limit, period, burst = found.groups()
    most = int(burst or limit)
    if not 1 <= int(units) <= most:
        raise ValueError(f"UNITS must be 1 to {'BURST' if burst else 'LIMIT'}, not {units}")
    return Units(os.fsencode(name), int(units), int(limit), duration(period), most)


@click.command()
@click.argument("permits", metavar="[NAME[=AMOUNT/MAX]]...", nargs=-1, type=Reads("permits", read_permits))
@click.option(
    "--rate",
    "rates",
    metavar="NAME=UNITS@LIMIT/PERIOD[/BURST]",
    multiple=True,
    type=Reads("rate", read_units),
    help=(
        "Take units of a rate that allows LIMIT units in a PERIOD, and BURST units at once after a pause. Without "
        "BURST, BURST is LIMIT. The command does not give the units back."
    ),
)
@click.option(
    "-w",
    "--wait",
    "patience",
    type=DURATION,
    default=0.0,
    help="How long to wait until everything is available.  [default: do not wait]",
)
@holding_options
@output_option
@pass_target
@click.pass_context
def take(
    context: click.Context,
    target: Target,
    /,
    permits: tuple[Permits, ...],
    rates: tuple[Units, ...],
    patience: float,
    duration: float | None,
    stdin: bool,
    output: Output,
    **place: Any,
) -> None:
    """Takes permits of counters and units of rates in one request: all of them or none.

    AMOUNT is how many permits of the counter to take. MAX is how many may be in use, by all connections together.
    Without AMOUNT and MAX, the counter has one permit, and the command takes it. The permits are held until Ctrl-C or
    SIGTERM; --for and --until-stdin-closes end the hold earlier. If the command takes only units of rates, it ends
    immediately. With --wait the command waits in the server's fair queue. The exit status is 1 if something is not
    available. `take` needs a counterd: other servers of the counter protocol do not know the request.

    \b
      counterctl take model:calls=1/8 tenant:calls=1/2 --rate tenant:tokens=500@90000/1m --wait 5s --for 10s
    """
    from counterd.client import Permit, Rate  # completion does without

    if not (permits or rates):
        raise click.UsageError("name at least one counter or --rate")
    if stdin and duration is not None:
        raise click.UsageError("use either --for or --until-stdin-closes")
    asked: list[Permits | Units] = [*permits, *rates]
    items: list[Permit | Rate] = [Permit(*each) for each in permits]
    items += [Rate(each.name, each.amount, each.limit, each.per, each.maximum, "final") for each in rates]
    status = 0
    with terminations_interrupt(), target.connect() as client:
        try:
            with client.take(*items, timeout=patience, **place) as taken:
                add = output.stream(
                    [
                        NAME_COLUMN,
                        Column("amount", Kind.NUMBER),
                        Column("maximum", Kind.NUMBER),
                        Column("grant", Kind.NUMBER),
                    ],
                    lambda row: f"took {row[1]} of {shown(row[0])} (maximum {row[2]}, grant {row[3]})",
                )
                try:
                    for each in asked:
                        add((each.name, each.amount, each.maximum, taken.number))
                    if permits:
                        wait(client, taken, duration, stdin=stdin)
                except KeyboardInterrupt as error:
                    status = interrupted(error)
        except NotAvailable as error:
            used = f"{error.consumption} of {error.maximum} are in use"
            within = f" within {span(patience)}" if patience else ""
            later = "" if error.retry_after is None else f"; enough units may be available in {span(error.retry_after)}"
            say(f"{error.resources} of {shown(error.name)} not available{within}: {used}{later}")
            context.exit(EXIT_NOT_AVAILABLE)
        if permits:
            say(f"released {', '.join(f'{each.amount} of {shown(each.name)}' for each in permits)}")
    context.exit(status)
