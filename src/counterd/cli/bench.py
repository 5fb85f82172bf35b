"""`counterbench`: the load tester's command.

Floor 5. Exit status: 0 when all went well, 1 when there were errors, requests that could not be sent, violations of
what --verify looks at, or a search that was not finished, 2 for a command line that makes no sense or a server that is
not there.
"""

from __future__ import annotations

import itertools
import os
import platform
import re
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

try:
    import click
    from rich.console import Console

    from counterd.bench import compare as comparing
    from counterd.bench import page, report, search
    from counterd.bench import plan as planning
    from counterd.bench.asking import LoadError
    from counterd.bench.dialect import NUMBER_SIZES
    from counterd.bench.dialects import DIALECTS, OPS_HELP, PROTOCOL_HELP, RULES, RULES_HELP
    from counterd.bench.panel import panel
    from counterd.bench.plan import Hold, Keys, Plan, Work
    from counterd.bench.report import AS_FAST_AS_IT_GOES
    from counterd.bench.result import Report, ResultError, Run, load, save
    from counterd.bench.run import Interruption, describe, run
    from counterd.cli.reading import TLS_OPTIONS, Reads, at_least, with_options
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package == "counterd":
        raise
    sys.exit(f"counterbench needs {package}: in the source tree, `make setup` or pip install '.[bench]'")

from counterd import units
from counterd.errors import CounterdError
from counterd.units import rate
from counterd.version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

EXIT_FAILED = 1
EXIT_USAGE = 2
COMMAND = "counterd.command"
SEARCH_S = 3.0  # of each run of a search, unless --duration says otherwise
DURATION_S = 10.0


NUMBER = Reads("number", at_least(1, units.whole_number))
RATE = Reads("rate", at_least(0.001, units.number))
TIME = Reads("time", units.seconds)
MEASURED = Reads("time", at_least(0.001, units.seconds))


class Written(click.Path):
    """A file to write once a run is over: where that cannot work, it is known before the run."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.name == "-":
            self.fail("the figures go to standard output anyway: name a file", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"there is no directory {str(path.parent)!r}", param, ctx)
        if not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"directory {str(path.parent)!r} is not writable", param, ctx)
        return path


FILE = Written()


class Told(click.Group):
    """Remembers the words of its command line, for the report."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[COMMAND] = shlex.join(["counterbench", *args])
        return super().parse_args(ctx, args)


@click.group(cls=Told, invoke_without_command=True, context_settings={"max_content_width": 110})
@click.option("-h", "--host", default="127.0.0.1", show_default=True, help="The server's host.")
@click.option(
    "-p",
    "--port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help=f"Its port.  [default: {', '.join(f'{each.port} for {name}' for name, each in DIALECTS.items())}]",
)
@click.option(
    "--control-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="Where control messages come from.  [default: the port behind --port]",
)
@click.option("-s", "--socket", metavar="PATH", help="Its Unix socket, instead of host and port.")
@with_options(*TLS_OPTIONS)
@click.option(
    "--protocol",
    type=click.Choice(list(DIALECTS)),
    default=Plan.protocol,
    show_default=True,
    help=PROTOCOL_HELP,
)
@click.option(
    "-c",
    "--connections",
    type=NUMBER,
    help=f"Connections, all together.  [default: {planning.CONNECTIONS}; in a fan {planning.WORKERS} that wait]",
)
@click.option(
    "--producers", type=NUMBER, default=Plan.producers, show_default=True, help="How many of them put, in a fan."
)
@click.option(
    "-n",
    "--requests",
    type=NUMBER,
    help="Stop after so many requests, all together; with --duration too, at whichever comes first.",
)
@click.option("--duration", type=MEASURED, help="Measure for so long.  [default: 10s; 3s for each run of a search]")
@click.option("--warmup", type=TIME, default=0.0, help="Load for so long before measuring.  [default: 0s]")
@click.option("-P", "--pipeline", type=NUMBER, default=1, show_default=True, help="Requests in flight on a connection.")
@click.option(
    "-k",
    "--keep-alive",
    type=click.BOOL,
    metavar="0|1",
    default=True,
    help="0: a new connection for each request.  [default: 1]",
)
@click.option(
    "--threads",
    type=NUMBER,
    default=1,
    show_default=True,
    help="Load processes, which share the connections: more where one takes a core in a closed loop.",
)
@click.option(
    "-t",
    "--ops",
    type=Reads("ops", Work.read),
    help=OPS_HELP,
)
@click.option(
    "-r",
    "--names",
    type=NUMBER,
    default=1,
    show_default=True,
    help="Number of names, of flows, of values with param, or of identifiers.",
)
@click.option(
    "--keys",
    type=Reads("keys", Keys.read),
    default="uniform",
    show_default=True,
    help="How names are chosen: uniform, zipf:1.03 or seq.",
)
@click.option("--name-size", type=NUMBER, default=16, show_default=True, help="Bytes of a name.")
@click.option(
    "--prefill",
    is_flag=True,
    help="Make all names exist before the load begins, as is done anyway for query, update, and get of a buffer.",
)
@click.option(
    "--value-size",
    type=click.IntRange(0, planning.BUFFER_SIZE_MAX),
    metavar="BYTES",
    help=f"Bytes of a job's body, or of a buffer for set and get; with redis a get without it reads a number.  "
    f"[default: {planning.BUFFER_SIZE}]",
)
@click.option(
    "--number-type",
    type=click.Choice(list(NUMBER_SIZES)),
    default=Plan.number_type,
    show_default=True,
    help="Numbers of the protocol that has them in several sizes: what the server's value_size says.",
)
@click.option("--delay", type=TIME, default=0.0, help="Of jobs, in whole seconds.  [default: 0s]")
@click.option("--ttl", type=MEASURED, default=Plan.ttl, help="Of what insert makes.  [default: 100ms]")
@click.option(
    "--permits", "--resources", "resources", type=NUMBER, default=1, show_default=True,
    help="How many each acquire asks for.",
)  # fmt: skip
@click.option(
    "--maximum",
    type=NUMBER,
    default=1_000_000,
    show_default=True,
    help="Permits that a name has; over it an acquire is refused. Of flows it is what the rules say.",
)
@click.option(
    "--hold",
    type=Reads("hold", Hold.read),
    help="How long a permit is held before its release: fixed:10ms or exp:50ms (mean).",
)
@click.option(
    "--churn",
    type=RATE,
    default=0.0,
    help="Kill so many connections a second while they hold permits, and measure how long until the server "
    "has those back (give-back); others take their place.",
)
@click.option(
    "--rate",
    type=RATE,
    help="Open loop: so many requests a second all together, whatever the server does; "
    "latency counts from when each was meant to start.",
)
@click.option(
    "--arrivals",
    type=click.Choice(["constant", "poisson"]),
    default="constant",
    show_default=True,
    help="How the requests of --rate are spread over time.",
)
@click.option(
    "--find-max",
    type=Reads("objective", search.Objective.read),
    metavar="OBJECTIVE",
    help="Find the highest rate that meets it: 'p99<1ms', 'max<20ms'; in 25 runs at most, the first a closed loop.",
)
@click.option(
    "--scan",
    type=Reads("scan", search.read_scan),
    metavar="FROM:TO:STEP",
    help="An open loop at each of these rates: 10k:200k:10k.",
)
@click.option(
    "--repeat",
    type=NUMBER,
    default=1,
    metavar="N",
    help="Do the same run so often, and say how much the runs differ.  [default: 1]",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Check that no name was ever above its maximum, and that nothing is in use at the end that nobody holds; "
    "where there are tokens also that none is told twice; of jobs, that none is lost and none is delivered twice.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of the random choices.")
@click.option("--json", type=FILE, help="Write everything there, for `counterbench compare` and other tools.")
@click.option("--csv", type=FILE, help="Write a row for each run there.")
@click.option(
    "--hdr",
    type=FILE,
    help="Write the latency distribution there, in microseconds, as HdrHistogram's plotters read it (.hgrm). "
    "Of a search each run has its file, with -1, -2, ... before the suffix.",
)
@click.option("--html", type=FILE, help="Write a page with charts there.")
@click.option("-q", "--quiet", is_flag=True, help="One line for each run, and no panel while it goes on.")
@click.version_option(__version__, prog_name="counterbench")
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Loads a server, and says how fast it is and whether it keeps its promises.

    Numbers may be written 10k or 1.5m, times 500us, 10ms, 5s or 2m. Without -n or --duration a run takes 10 s;
    Ctrl-C ends it with what was measured until then. Exit status: 0 if all went well, 1 if there were errors, requests
    that could not be sent, violations or a search that was not finished, 2 if it could not begin.

    \b
      counterbench -r 100k                             50 connections, acquire and release in turn
      counterbench -r 100k -P 64 --threads 2           64 requests in flight on each
      counterbench --rate 20k --arrivals poisson       what users see at that rate
      counterbench --find-max 'p99<1ms'                how much it can take
      counterbench --protocol redis -p 6379 -r 100k    the same load on a redis-server
      counterbench --hold exp:50ms --churn 10 --verify permits that are held, clients that die
      counterbench compare before.json after.json      two runs side by side
    """
    if context.invoked_subcommand is not None:
        return
    console = Console()
    try:
        plan = read_plan(options)
        found = measure(plan, options["find_max"], options["scan"], options["repeat"], console, quiet=options["quiet"])
        found.command = context.meta[COMMAND]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except (LoadError, CounterdError, OSError) as error:
        give_up(error)
    if options["quiet"]:
        click.echo(report.brief(found))
    else:
        show(console, report.summary(found))
    try:
        write(found, options)
    except OSError as error:
        give_up(error)
    if failed(found):
        sys.exit(EXIT_FAILED)


@main.command(short_help="Two or more runs side by side, from what --json has kept.")
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--html", type=FILE, default="compare.html", show_default=True, help="Where to write the page.")
def compare(files: tuple[Path, ...], html: Path) -> None:
    """Shows runs that --json has kept side by side, with ratios against the first, and writes a page of them."""
    try:
        reports = [(path.stem, load(path)) for path in files]
        page.write_page(reports, html)
    except (ResultError, OSError) as error:
        give_up(error)
    show(Console(), comparing.compare_table(reports))
    click.echo(f"charts: {html}")


@main.command(short_help="Rules that a server needs for a load.", help=RULES_HELP)
@click.option("--protocol", type=click.Choice(list(RULES)), default=next(iter(RULES), None), show_default=True)
@click.option("-r", "--names", type=NUMBER, default=1, show_default=True, help="Number of flows.")
@click.option(
    "--maximum", type=NUMBER, default=1_000_000, show_default=True,
    help="At once, or a second, of each flow or identifier.",
)  # fmt: skip
def rules(protocol: str, names: int, maximum: int) -> None:
    try:
        click.echo(RULES[protocol].write(names, maximum), nl=False)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def show(console: Console, what: RenderableType) -> None:
    """Lines break between words on a terminal, and nowhere in a file, where they are searched."""
    console.print(what, soft_wrap=not console.is_terminal)


def failed(found: Report) -> bool:
    """Whether anything went wrong. In a search requests that were not sent do not count: it goes to where that is."""
    if found.search is not None and found.search.get("ended"):
        return True
    searching = found.search is not None and not found.repeats()
    return any(each.errors or each.violations or (each.unsent and not searching) for each in found.runs)


def give_up(error: Exception) -> NoReturn:
    click.echo(f"counterbench: {error}", err=True)
    sys.exit(EXIT_USAGE)


def read_plan(options: dict[str, Any]) -> Plan:
    """Raises ValueError for what cannot be done together."""
    searching = options["find_max"] or options["scan"]
    if options["find_max"] and options["scan"]:
        raise ValueError("--find-max and --scan are two searches")
    if searching and (options["rate"] or options["requests"]):
        raise ValueError("a search chooses the rates itself, for a time: no --rate and no -n")
    if searching and options["repeat"] > 1:
        raise ValueError("--repeat is for one load, not for a search")
    duration = options["duration"]
    if duration is None and options["requests"] is None:
        duration = SEARCH_S if searching else DURATION_S
    work = options["ops"] or Work.read(DIALECTS[options["protocol"]].work)
    files = {name: options[name] for name in ("cacert", "cert", "key")}
    plan = Plan(
        protocol=options["protocol"], host=options["host"], port=options["port"] or 0,
        control_port=options["control_port"] or 0, socket=options["socket"],
        tls=options["tls"] or any(files.values()), **files,
        connections=options["connections"] or planning.connections_of(work, options["producers"]),
        producers=options["producers"], depth=options["pipeline"], keep_alive=options["keep_alive"],
        requests=options["requests"], duration=duration, warmup=options["warmup"], processes=options["threads"],
        rate=options["rate"], arrivals=options["arrivals"], work=work, keys=options["keys"],
        names=options["names"], name_size=options["name_size"], resources=options["resources"],
        maximum=options["maximum"], hold=options["hold"], churn=options["churn"], prefill=options["prefill"],
        verify=options["verify"], seed=options["seed"], value_size=options["value_size"],
        number_type=options["number_type"], ttl=options["ttl"], delay=read_delay(options["delay"]),
    )  # fmt: skip
    return replace(plan, prefill=True) if plan.needs_names() else plan


def read_delay(seconds: float) -> int:
    if seconds != int(seconds):
        raise ValueError(f"a delay is of whole seconds, not {seconds:g}")
    return int(seconds)


def measure(
    plan: Plan,
    objective: search.Objective | None,
    rates: list[float] | None,
    repeat: int,
    console: Console,
    *,
    quiet: bool,
) -> Report:
    """Does the run, or those of the search: what ends that too early costs only what was still to come."""
    interruption = Interruption()
    with panel(console if console.is_terminal and not quiet else None) as begin:
        label = describe(plan)
        numbers = itertools.count(1)

        def trial(each: Plan) -> Run:
            at = AS_FAST_AS_IT_GOES if each.rate is None else rate(each.rate)
            most = f"{search.TRIALS_MAX + 1} at most" if objective is not None else f"{len(rates or range(repeat))}"
            try:
                done = run(each, label, begin(f"run {next(numbers)} of {most}, {at}"), interruption)
            except (LoadError, CounterdError, OSError) as error:
                raise search.Ended(str(error)) from error
            except KeyboardInterrupt:
                raise search.Ended("interrupted") from None
            if interruption.happened:
                raise search.Ended("interrupted", done)
            return done

        if objective is not None:
            found = search.find_max(plan, objective, trial)
            answer: dict[str, Any] | None = {
                "objective": objective.text, "rate": found.best, "contrary": found.contrary(objective),
            }  # fmt: skip
        elif rates is not None:
            found = search.scan(plan, rates, trial)
            answer = {"scan": f"{rate(rates[0])} to {rate(rates[-1])}"}
        elif repeat > 1:
            found, answer = search.repeat(plan, repeat, trial), {"repeat": repeat}
        else:
            found, answer = search.Found([run(plan, label, begin(label), interruption)]), None
    if found.ended is not None and answer is not None:
        answer["ended"] = found.ended
    if not found.runs:
        raise LoadError(found.ended)
    if interruption.happened and answer is None:
        click.echo("counterbench: interrupted: these are the figures until then", err=True)
    return Report(found.runs, machine(), versions(), answer)


def machine() -> dict[str, str]:
    """What the load ran on."""
    models = re.findall(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text("utf-8"), re.MULTILINE)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory / 2**30:.1f} GiB",
        "kernel": platform.release(),
    }


def versions() -> dict[str, str]:
    return {"counterd": __version__, "python": platform.python_version()}


def write(found: Report, options: dict[str, Any]) -> None:
    """The files that were asked for."""
    if options["json"]:
        save(found, options["json"])
    if options["csv"]:
        report.write_csv(found, options["csv"])
    if options["hdr"]:
        report.write_hgrm(found, options["hdr"])
    if options["html"]:
        page.write_page([(options["html"].stem, found)], options["html"])


if __name__ == "__main__":
    main()
