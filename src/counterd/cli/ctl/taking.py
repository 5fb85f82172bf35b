"""`counterctl take`: takes permits and units of rates together, and holds the permits.

Floor 5.
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
    """Permits of a counter."""

    name: bytes
    amount: int = 1
    maximum: int = 1


class Units(NamedTuple):
    """Units of a rate. per: seconds."""

    name: bytes
    amount: int
    limit: int
    per: float
    maximum: int  # at once


def read_permits(text: str) -> Permits:
    """Reads NAME=AMOUNT/MAX, or NAME alone for the only permit of a counter."""
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
    help="Take units of a rate that allows LIMIT units in a PERIOD, and BURST at once after a pause. BURST is LIMIT if "
    "it is not given. The units are not given back.",
)
@click.option(
    "-w",
    "--wait",
    "patience",
    type=DURATION,
    default=0.0,
    help="How long to wait until all of it is available.  [default: do not wait]",
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
    """Takes permits of counters and units of rates, all or nothing.

    AMOUNT is how many permits of the counter to take, MAX how many may be in use in total; without them it is the only
    permit. The permits are held until Ctrl-C or SIGTERM, or as --for and --until-stdin-closes say. If only rates are
    taken, the command ends at once. With --wait it waits in the fair queue of the server. Exit status 1 if something is
    not available. This needs a counterd: other servers of the counter protocol have no such request.

    \b
      counterctl take model:calls=1/8 tenant:calls=1/2 --rate tenant:tokens=500@90000/1m --wait 5s --for 10s
    """
    from counterd.client import Permit, Rate  # completion does without

    if not (permits or rates):
        raise click.UsageError("name at least one counter or --rate")
    if stdin and duration is not None:
        raise click.UsageError("give either --for or --until-stdin-closes")
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
            later = "" if error.retry_after is None else f"; there may be enough in {span(error.retry_after)}"
            say(f"{error.resources} of {shown(error.name)} not available{within}: {used}{later}")
            context.exit(EXIT_NOT_AVAILABLE)
        if permits:
            say(f"gave {', '.join(f'{each.amount} of {shown(each.name)}' for each in permits)} back")
    context.exit(status)
