"""`counterctl take`: takes permits and units of rates in one request, and holds the permits.

Floor 5 (ARCHITECTURE.md).
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from counterd.cli.ctl.common import (
    NAME_MAX,
    Target,
    duration,
    pass_target,
    say,
    shown,
)
from counterd.cli.ctl.data import NAME_COLUMN
from counterd.cli.ctl.holding import Permits, held, holding_options, wait
from counterd.cli.ctl.output import Column, Kind, Output, Row, output_option
from counterd.cli.options import Reads

if TYPE_CHECKING:
    from counterd.client import Client, Taken

# What is after the last = of an item: AMOUNT/MAX of permits; UNITS, and maybe @LIMIT/PERIOD and /BURST, of a rate.
PERMITS = re.compile(r"(.+)=([0-9]+)/([0-9]+)", re.DOTALL)
UNITS = re.compile(r"(.+)=([0-9]+)(?:@([0-9]+)/([0-9.]+[a-z]*)(?:/([0-9]+))?)?", re.DOTALL)
USED = re.compile(rb"(.+)=([0-9]+)\r?", re.DOTALL)
RATE_FORM = "NAME=UNITS[@LIMIT/PERIOD[/BURST]]"
LINE_MAX = 2 * NAME_MAX  # bytes of a line that settles: a longer one has no valid name
SHOWN = 100  # bytes of a line in a message


class Units(NamedTuple):
    """How many units of a rate to take, and the limit of the rate; None if the server has the numbers of the rate.

    per: the period in seconds. maximum: how many units can be taken at once.
    """

    name: bytes
    amount: int
    limit: int | None = None
    per: float | None = None
    maximum: int | None = None

    def __str__(self) -> str:
        return f"{self.amount} of {shown(self.name)}"


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
    """Reads NAME=UNITS[@LIMIT/PERIOD[/BURST]]."""
    found = UNITS.fullmatch(text)
    if found is None:
        raise ValueError(f"expected {RATE_FORM}, not {text!r}")
    name, units, limit, period, burst = found.groups()
    if limit is None:
        if int(units) < 1:
            raise ValueError(f"UNITS must be at least 1, not {units}")
        return Units(os.fsencode(name), int(units))
    most = int(burst or limit)
    if not 1 <= int(units) <= most:
        raise ValueError(f"UNITS must be 1 to {'BURST' if burst else 'LIMIT'}, not {units}")
    return Units(os.fsencode(name), int(units), int(limit), duration(period), most)


COLUMNS = [NAME_COLUMN, *(Column(name, Kind.NUMBER) for name in ("amount", "maximum", "grant"))]


def took(row: Row) -> str:
    """Formats an item that was taken as a sentence."""
    name, amount, maximum, grant = row
    of = "" if maximum is None else f"maximum {maximum}, "
    return f"took {amount} of {shown(name)} ({of}grant {grant})"


class Settling:
    """Reads lines NAME=USED, and settles the rates of a Take."""

    def __init__(self, taken: Taken) -> None:
        self._taken = taken
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """data: b"" at the end. Raises ValueError for a line of another form, or what Taken.settle() raises."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if not data or len(self._rest) > LINE_MAX:
            lines.append(self._rest)
        for line in lines:
            if line.strip():
                self._settle(line)

    def _settle(self, line: bytes) -> None:
        found = USED.fullmatch(line)
        if found is None:
            raise ValueError(f"expected a line NAME=USED, not {shown(line[:SHOWN])}")
        name, used = found.groups()
        self._taken.settle(name, int(used))
        say(f"settled {shown(name)}: {int(used)} used")


@click.command()
@click.argument("permits", metavar="[NAME[=AMOUNT/MAX]]...", nargs=-1, type=Reads("permits", read_permits))
@click.option(
    "--rate",
    "rates",
    metavar=RATE_FORM,
    multiple=True,
    type=Reads("rate", read_units),
    help=(
        "Take units of a rate that allows LIMIT units in a PERIOD, and BURST units at once after a pause. Without "
        "BURST, BURST is LIMIT. NAME=UNITS is enough if the server has the numbers of the rate. The command does not "
        "give the units back."
    ),
)
@click.option(
    "--settle",
    is_flag=True,
    help=(
        "Read lines NAME=USED from standard input until it ends. Each line replaces UNITS of the rate NAME by the USED "
        "units that were really used. Each rate of a take can be corrected only once."
    ),
)
@holding_options
@output_option
@pass_target
def take(
    target: Target,
    /,
    permits: tuple[Permits, ...],
    rates: tuple[Units, ...],
    settle: bool,
    patience: float,
    duration: float | None,
    stdin: bool,
    output: Output,
    **place: Any,
) -> None:
    """Takes permits of counters and units of rates in one request: all of them or none.

    AMOUNT is how many permits of the counter to take. MAX is how many may be in use, by all connections together.
    Without AMOUNT and MAX, the counter has one permit, and the command takes it. The permits are held until Ctrl-C or
    SIGTERM; --for, --until-stdin-closes and --settle end the hold earlier. If the command takes only units of rates, it
    ends immediately, except with --settle. With --wait the command waits in the server's fair queue. The exit status is
    1 if something is not available. `take` needs a counterd: other servers of the counter protocol do not know the
    request.

    \b
      counterctl take model:calls=1/8 tenant:calls=1/2 --rate tenant:tokens=500@90000/1m --wait 5s --for 10s
      counterctl take --rate tenant:tokens=500 --settle      then write tenant:tokens=320 to its standard input
    """
    from counterd.client import Permit, Rate  # completion does without

    if not (permits or rates):
        raise click.UsageError("name at least one counter or --rate")
    if settle and not rates:
        raise click.UsageError("--settle needs a --rate")
    if (stdin or settle) and duration is not None:
        raise click.UsageError(f"use either --for or {'--settle' if settle else '--until-stdin-closes'}")
    asked: list[Permits | Units] = [*permits, *rates]
    items: list[Permit | Rate] = [Permit(*each) for each in permits]
    items += [Rate(*each, "charge" if settle else "final") for each in rates]

    def enter(client: Client) -> Taken:
        return client.take(*items, timeout=patience, **place)

    with held(target, enter, permits, patience, rates) as (client, taken):
        add = output.stream(COLUMNS, took)
        for each in asked:
            add((each.name, each.amount, each.maximum, taken.number))
        if settle:
            wait(client, taken, None, stdin=True, told=Settling(taken).feed)
        elif permits:
            wait(client, taken, duration, stdin=stdin)
