"""The commands that show, hold and watch counters, and the commands `bench` and `completion`.

Floor 5 (ARCHITECTURE.md).
"""

from __future__ import annotations

import copy
import time
from datetime import datetime, timezone
from signal import SIGINT
from typing import TYPE_CHECKING, Any

import click

from counterd.cli.ctl.common import (
    DURATION,
    EXIT_NOT_AVAILABLE,
    EXIT_SIGNAL,
    HOST,
    NAME,
    PORT,
    TIME_LIMIT,
    Target,
    explain,
    glob,
    pass_target,
    say,
    shown,
    until_interrupted,
)
from counterd.cli.ctl.holding import Permits, held, holding_options, wait
from counterd.cli.ctl.output import Column, Kind, Output, Row, cell, output_option, span
from counterd.errors import ConnectionLost, NotFound, ProtocolError, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.client import Client, DumpEntry, Hold
    from counterd.client._addresses import Address

RESOURCES = click.IntRange(1, 2**32 - 1)
KEY_MAX, WEIGHT_MAX = 255, 1000  # bytes; section "Take" of the protocol
NAME_COLUMN = Column("name", Kind.BYTES)
STDIN = 0
POLL_MAX = 2**31 - 1  # ms
CONSUMPTION = Column("consumption", Kind.NUMBER, nothing="not found")

# The figures of stats that are not plain numbers.
STATS_KINDS = {
    "used_memory": Kind.SIZE,
    "bytes_in": Kind.SIZE,
    "bytes_out": Kind.SIZE,
    "name_memory": Kind.SIZE,
    "name_memory_max": Kind.SIZE,
    "region": Kind.SIZE,
    "uptime": Kind.SPAN,
    "pid": Kind.TEXT,
}


# ---- ping ----


@click.command()
@click.option("-c", "--count", type=click.IntRange(1), default=1, help="How many requests to send.  [default: 1]")
@click.option("--interval", type=DURATION, default=1.0, help="The time between two requests.  [default: 1s]")
@output_option
@pass_target
@click.pass_context
def ping(context: click.Context, /, target: Target, count: int, interval: float, output: Output) -> None:
    """Checks whether the server answers, and how fast."""
    times: list[float] = []
    add = output.stream(
        [Column("seq", Kind.NUMBER), Column("seconds", Kind.SPAN)],
        lambda row: f"{target.address} answered in {span(row[1])}" + (f" ({row[0]} of {count})" if count > 1 else ""),
    )
    with until_interrupted(), target.connect() as client:
        client.noop()  # the first request of a connection is slower than the round trip
        for seq in range(1, count + 1):
            if times:
                time.sleep(interval)
            begun = time.perf_counter()
            client.noop()
            times.append(time.perf_counter() - begun)
            add((seq, times[-1]))
    if not times:
        context.exit(EXIT_SIGNAL + SIGINT)
    if count > 1:
        mean = sum(times) / len(times)
        say(f"{len(times)} replies: minimum {span(min(times))}, average {span(mean)}, maximum {span(max(times))}")


# ---- get, dump, stats ----


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, type=NAME)
@output_option
@pass_target
@click.pass_context
def get(context: click.Context, /, target: Target, names: tuple[bytes, ...], output: Output) -> None:
    """Shows how many permits of each counter are in use. The exit status is 1 if a counter does not exist."""
    with target.connect() as client:
        rows = [(name, consumption(client, name)) for name in names]
    output.rows([NAME_COLUMN, CONSUMPTION], rows)
    if any(value is None for _, value in rows):
        context.exit(EXIT_NOT_AVAILABLE)


def consumption(client: Client, name: bytes) -> int | None:
    """Returns how many permits of a counter are in use, or None if the counter does not exist."""
    try:
        return client.get(name)
    except NotFound:
        return None


@click.command()
@output_option
@pass_target
def stats(target: Target, output: Output) -> None:
    """Shows the server's statistics."""
    with target.connect() as client:
        figures = client.stats()
    columns, row = [], []
    for name, text in figures.items():
        is_number = text.isdecimal()
        columns.append(Column(name, STATS_KINDS.get(name, Kind.NUMBER) if is_number else Kind.TEXT))
        row.append(int(text) if is_number else text)
    output.record(columns, row)


ORDERS: dict[str, Callable[[DumpEntry], Any]] = {
    "name": lambda entry: entry.name,
    "consumption": lambda entry: (-entry.consumption, entry.name),
    "peak": lambda entry: (-entry.peak, entry.name),
}


@click.command()
@click.option("--match", metavar="GLOB", help="Show only names that match this pattern, such as 'db:*'.")
@click.option(
    "--sort",
    type=click.Choice(list(ORDERS)),
    default="name",
    help="Sort by this column; numbers are in descending order.  [default: name]",
)
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Show at most N rows.")
@click.option("--held", is_flag=True, help="Show only counters that have permits in use.")
@output_option
@pass_target
def dump(target: Target, match: str | None, sort: str, limit: int | None, held: bool, output: Output) -> None:
    """Shows all counters, including those without permits in use.

    consumption: the permits in use now. peak: the most permits in use in this statistics window. limit: the MAX of the
    last acquire.
    """
    with target.connect() as client:
        entries = client.dump()
    columns = [NAME_COLUMN, CONSUMPTION, Column("peak", Kind.NUMBER), Column("limit", Kind.NUMBER)]
    like = glob(match)
    chosen = sorted((each for each in entries if like(each.name) and (each.consumption or not held)), key=ORDERS[sort])
    output.rows(columns, ((each.name, each.consumption, each.peak, each.limit) for each in chosen[:limit]))


# ---- acquire ----


@click.command()
@click.argument("name", type=NAME)
@click.argument("resources", metavar="N", type=RESOURCES)
@click.argument("maximum", metavar="MAX", type=RESOURCES)
@holding_options
@output_option
@pass_target
def acquire(
    target: Target,
    /,
    name: bytes,
    resources: int,
    maximum: int,
    patience: float,
    duration: float | None,
    stdin: bool,
    output: Output,
    **place: Any,
) -> None:
    """Takes N permits of a counter, holds them until Ctrl-C or SIGTERM, and gives them back.

    MAX is how many permits of the counter may be in use, by all connections together. The options --for and
    --until-stdin-closes end the hold earlier. The exit status is 1 if N permits are not available. `hold` is another
    name of this command.

    With --wait the command waits in the server's fair queue. The highest priority comes first; among equal priorities,
    the keys take turns in proportion to their weights.
    """
    if resources > maximum:
        raise click.UsageError(f"N must be at most MAX: {resources} is more than {maximum}")
    if stdin and duration is not None:
        raise click.UsageError("use either --for or --until-stdin-closes")
    end = "standard input is closed" if stdin else "Ctrl-C"
    until = f" until {end}" if duration is None else f" for {span(duration)}"
    asked = Permits(name, resources, maximum)

    def enter(client: Client) -> Hold:
        return client.hold(name, resources, maximum=maximum, timeout=patience, **place)

    with held(target, enter, [asked], patience) as (client, permits):
        output.stream(
            [NAME_COLUMN, Column("permits", Kind.NUMBER), Column("maximum", Kind.NUMBER)],
            lambda row: f"acquired {asked} (maximum {maximum}){until}",
        )(asked)
        wait(client, permits, duration, stdin=stdin)


hold = copy.copy(acquire)
hold.name = "hold"


# ---- watch ----


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True, type=NAME)
@click.option("--interval", type=TIME_LIMIT, default=1.0, help="The time between two checks.  [default: 1s]")
@output_option
@pass_target
def watch(target: Target, names: tuple[bytes, ...], interval: float, output: Output) -> None:
    """Shows the value of each counter at the start and whenever it changes, until Ctrl-C.

    If the connection is lost, the command reconnects.
    """
    columns = [Column("time", Kind.CLOCK), NAME_COLUMN, CONSUMPTION]
    width = max(len(shown(name)) for name in names)

    def sentence(row: Row) -> str:
        clock, name, value = (cell(column, each, 0) for column, each in zip(columns, row, strict=True))
        return f"{clock}  {name:<{width}}  {value}"

    add = output.stream(columns, sentence)
    known: dict[bytes, int | None] = {}
    is_lost = False
    with until_interrupted(), target.connect() as client:
        while True:
            try:
                if is_lost:
                    client.noop()
                    say(f"reconnected to {target.address}")
                    is_lost = False
                for name in names:
                    value = consumption(client, name)
                    if known.get(name, ...) != value:
                        known[name] = value
                        add((datetime.now(timezone.utc), name, value))
            except (ConnectionLost, Timeout, ProtocolError) as error:
                if not known:
                    raise  # it has never worked
                if not is_lost:
                    say(f"{explain(error, target)[0]}; trying again")
                is_lost = True
            time.sleep(interval)


# ---- others ----


@click.command(
    add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", metavar="[ARGUMENTS]...", nargs=-1, type=click.UNPROCESSED)
@pass_target
def bench(target: Target, arguments: tuple[str, ...]) -> None:
    """Measures the server under load: runs counterbench on this server, and accepts all options of counterbench."""
    from counterd.cli.bench import main  # reports missing packages

    main.main([*place(target.address), *arguments], prog_name="counterctl bench")


def place(address: Address) -> list[str]:
    """Converts the server's address to options of counterbench.

    Omits the default address, because counterbench has its own default for each --protocol.
    """
    if address.path:
        return ["--socket", address.path]
    is_default = (address.host, address.port) == (HOST, PORT)
    words = [] if is_default else ["--host", address.host, "--port", str(address.port)]
    if isinstance(address.tls, tuple):
        words.append("--tls")
        words += [word for name, file in address.tls._asdict().items() if file for word in (f"--{name}", file)]
    return words


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, /, shell: str) -> None:
    """Prints the shell code that completes counterctl's commands and options.

    \b
      bash   eval "$(counterctl completion bash)"           in ~/.bashrc
      zsh    eval "$(counterctl completion zsh)"            in ~/.zshrc
      fish   counterctl completion fish | source            in ~/.config/fish/config.fish
    """
    from click.shell_completion import get_completion_class

    script = get_completion_class(shell)
    assert script is not None  # click has all three
    click.echo(script(context.find_root().command, {}, "counterctl", "_COUNTERCTL_COMPLETE").source())
