"""The command `counterbench`, which measures a server under load.

Floor 5 (ARCHITECTURE.md). Exit status: 0 for success; 1 for errors, requests that could not be sent, violations that
--verify found, or a search that did not finish; 2 for a wrong command line or a server that cannot be reached.
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
    from counterd.bench.connection import LoadError
    from counterd.bench.dialect import NUMBER_SIZES
    from counterd.bench.dialects import DIALECTS, OPS_HELP, PROTOCOL_HELP, RULES, RULES_HELP
    from counterd.bench.options import BUFFER_SIZE, CONNECTIONS, Hold, Keys
    from counterd.bench.panel import panel
    from counterd.bench.plan import BUFFER_SIZE_MAX, WORKERS, Plan, connections_of, read_work
    from counterd.bench.report import AS_FAST_AS_IT_GOES
    from counterd.bench.result import Report, ResultError, Run, load, save
    from counterd.bench.run import Interruption, describe, run
    from counterd.bench.takes import Items, Take, read_numbers
    from counterd.cli.options import TLS_OPTIONS, Reads, at_least, with_options
except ModuleNotFoundError as error:
    package = (error.name or "").partition(".")[0]
    if package == "counterd":
        raise
    sys.exit(f"counterbench needs {package}: in the source tree, run `make setup` or pip install '.[bench]'")

from counterd import units
from counterd.errors import CounterdError
from counterd.settings import size
from counterd.units import rate
from counterd.version import __version__

if TYPE_CHECKING:
    from rich.console import RenderableType

EXIT_FAILED = 1
EXIT_USAGE = 2
COMMAND = "counterd.command"
SEARCH_S = 3.0  # of each run of a search, unless --duration says otherwise
DURATION_S = 10.0
TAKE_OPTIONS = ("wait", "items", "limit", "burst", "weights", "priorities")


NUMBER = Reads("number", at_least(1, units.whole_number))
RATE = Reads("rate", at_least(0.001, units.number))
SIZE = Reads("bytes", size(1, BUFFER_SIZE_MAX))
TIME = Reads("time", units.seconds)
MEASURED = Reads("time", at_least(0.001, units.seconds))


class Written(click.Path):
    """The type of an option that names a file to write after the run.

    A path that cannot be written is refused before the run begins.
    """

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if path.name == "-":
            self.fail("expected a file name; standard output always has the figures", param, ctx)
        if not path.parent.is_dir():
            self.fail(f"no directory {str(path.parent)!r}", param, ctx)
        if not path.exists() and not os.access(path.parent, os.W_OK):
            self.fail(f"directory {str(path.parent)!r} is not writable", param, ctx)
        return path


FILE = Written()


class Told(click.Group):
    """A group of commands that keeps its command line for the report."""

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
    help=f"The server's port.  [default: {', '.join(f'{each.port} for {name}' for name, each in DIALECTS.items())}]",
)
@click.option(
    "--control-port",
    type=click.IntRange(1, 65535),
    metavar="PORT",
    help="The server's port for control messages.  [default: --port plus 1]",
)
@click.option("-s", "--socket", metavar="PATH", help="The server's Unix socket, instead of host and port.")
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
    help=f"How many connections to open in total.  [default: {CONNECTIONS}; with -t fan {WORKERS} "
    "workers and the --producers]",
)
@click.option(
    "--producers",
    type=NUMBER,
    default=Plan.producers,
    show_default=True,
    help="With -t fan: how many of the connections put jobs.",
)
@click.option(
    "-n",
    "--requests",
    type=NUMBER,
    help="Stop after N requests in total, or after --duration if that is over first.",
)
@click.option(
    "--duration",
    type=MEASURED,
    help="How long to measure.  [default: 10s; 3s for each run of --find-max or --scan]",
)
@click.option("--warmup", type=TIME, default=0.0, help="How long to send load before measuring.  [default: 0s]")
@click.option(
    "-P",
    "--pipeline",
    type=NUMBER,
    default=1,
    show_default=True,
    help="How many requests are in flight on each connection.",
)
@click.option(
    "-k",
    "--keep-alive",
    type=click.BOOL,
    metavar="0|1",
    default=True,
    help="With 0, each request opens a new connection.  [default: 1]",
)
@click.option(
    "--threads",
    type=NUMBER,
    default=1,
    show_default=True,
    help=(
        "How many processes send requests. The processes share the connections. Use more processes if one process "
        "keeps a core busy in a closed loop."
    ),
)
@click.option(
    "-t",
    "--ops",
    type=Reads("ops", read_work),
    help=OPS_HELP,
)
@click.option(
    "-r",
    "--names",
    type=NUMBER,
    default=1,
    show_default=True,
    help="Number of names, flows, parameter values or identifiers.",
)
@click.option(
    "--keys",
    type=Reads("keys", Keys.read),
    default="uniform",
    show_default=True,
    help="How names are chosen: uniform, zipf:1.03 or seq.",
)
@click.option("--name-size", type=SIZE, default=16, show_default=True, help="The length of each name.")
@click.option(
    "--prefill",
    is_flag=True,
    help="Create all names before the load begins. query, update, and get of a buffer always do this.",
)
@click.option(
    "--value-size",
    type=Reads("bytes", size(0, BUFFER_SIZE_MAX)),
    help=(
        "The size of a job's body, or of a buffer for set and get. With redis and without this option, get reads "
        f"a number.  [default: {BUFFER_SIZE}]"
    ),
)
@click.option(
    "--number-type",
    type=click.Choice(list(NUMBER_SIZES)),
    default=Plan.number_type,
    show_default=True,
    help=(
        "The width of numbers, if the protocol has several widths. The width must be equal to the server's value_size."
    ),
)
@click.option("--delay", type=TIME, default=0.0, help="The delay of jobs, in whole seconds.  [default: 0s]")
@click.option("--ttl", type=MEASURED, default=Plan.ttl, help="The TTL of keys that insert creates.  [default: 100ms]")
@click.option(
    "--permits", "--resources", "resources", type=NUMBER, default=1, show_default=True,
    help="How many permits each acquire asks for.",
)  # fmt: skip
@click.option(
    "--maximum",
    type=NUMBER,
    default=1_000_000,
    show_default=True,
    help=(
        "How many permits of each name can be in use; the server refuses additional acquires. For flows, the "
        "maximum is the count in the server's rules."
    ),
)
@click.option(
    "--hold",
    type=Reads("hold", Hold.read),
    help="How long a permit is held before its release: fixed:10ms, or exp:50ms for random times with the mean 50ms.",
)
@click.option(
    "--wait",
    type=TIME,
    help="Acquires wait up to this time in the server's queue. They are Takes then, as with the next five options.",
)
@click.option(
    "--items",
    type=Reads("items", Items.read),
    help=(
        "What each acquire takes in one request. With permits=2,rates=2 it takes permits of two names and a unit of "
        "each of two rates.  [default: permits=1]"
    ),
)
@click.option("--limit", type=NUMBER, help="How many units of a rate can be taken a second.  [default: 1m]")
@click.option("--burst", type=NUMBER, help="How many can be taken at once after a pause.  [default: --limit]")
@click.option(
    "--weights",
    type=Reads("weights", read_numbers),
    help=(
        "The weight of each fairness key, such as 1,1,2. The connections get the keys one after the other.  "
        "[default: each connection has its own key]"
    ),
)
@click.option(
    "--priorities",
    type=Reads("priorities", read_numbers),
    help="The priority of each fairness key, such as 0,0,9. The highest is served first.",
)
@click.option(
    "--churn",
    type=RATE,
    default=0.0,
    help=(
        "Kill this many connections a second while they hold permits, and measure how long the server takes to "
        "take the permits back (give-back). New connections replace the killed connections."
    ),
)
@click.option(
    "--rate",
    type=RATE,
    help=(
        "Open loop: send this many requests a second in total, even if the server is slower. Latency counts from "
        "the intended start of each request."
    ),
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
    help=(
        "Find the highest rate that meets this objective, such as 'p99<1ms' or 'max<20ms'. The search takes at "
        "most 25 runs."
    ),
)
@click.option(
    "--scan",
    type=Reads("scan", search.read_scan),
    metavar="FROM:TO:STEP",
    help="Run an open loop at each rate from FROM to TO in steps of STEP, such as 10k:200k:10k.",
)
@click.option(
    "--repeat",
    type=NUMBER,
    default=1,
    metavar="N",
    help="Repeat the run N times, and report how much the runs differ.  [default: 1]",
)
@click.option(
    "--verify",
    is_flag=True,
    help=(
        "Check that the permits in use of a name never exceed its maximum, and that all permits are given back at "
        "the end. For tokens, also check that no id is granted twice. For jobs, check that no job is lost or "
        "delivered twice."
    ),
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="The seed of the random choices.")
@click.option("--json", type=FILE, help="Write all results to this file, for `counterbench compare` and other tools.")
@click.option("--csv", type=FILE, help="Write a row for each run to this file.")
@click.option(
    "--hdr",
    type=FILE,
    help=(
        "Write the latency distribution to this file, in microseconds, in the format of HdrHistogram (.hgrm). If "
        "there are several runs, each run has its own file, with -1, -2, ... before the suffix."
    ),
)
@click.option("--html", type=FILE, help="Write a page with charts to this file.")
@click.option("-q", "--quiet", is_flag=True, help="Print one line for each run, and no live panel.")
@click.version_option(__version__, prog_name="counterbench")
@click.pass_context
def main(context: click.Context, /, **options: Any) -> None:
    """Measures how fast a server is under load, and with --verify checks that its replies are right.

    Write numbers as 10k or 1.5m, sizes as 100 or 4K (4,096 bytes), and times as 500us, 10ms, 5s or 2m. Without -n or
    --duration a run takes 10 s. Ctrl-C ends a run early. The report then shows what was measured until then. Exit
    status: 0 for success; 1 for errors, requests that could not be sent, violations found by --verify, or a search
    (--find-max, --scan) that did not finish; 2 if the run could not begin.

    \b
      counterbench -r 100k                             50 connections acquire and release in turn
      counterbench -r 100k -P 64 --threads 2           64 requests are in flight on each connection
      counterbench --rate 20k --arrivals poisson       the latency that users see at this rate
      counterbench --find-max 'p99<1ms'                the highest rate with this latency
      counterbench --protocol redis -p 6379 -r 100k    the same load on a redis-server
      counterbench --hold exp:50ms --churn 10 --verify permits are held, and clients are killed
      counterbench --wait 10s --maximum 2 --hold fixed:5ms --weights 1,1,2    clients wait for their turns
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


@main.command(short_help="Compares two or more files that --json wrote.")
@click.argument("files", nargs=-1, required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--html", type=FILE, default="compare.html", show_default=True, help="The file to write the page to.")
def compare(files: tuple[Path, ...], html: Path) -> None:
    """Shows the results from files that --json wrote side by side, with ratios to the first file.

    The command also writes a page with charts.
    """
    try:
        reports = [(path.stem, load(path)) for path in files]
        page.write_page(reports, html)
    except (ResultError, OSError) as error:
        give_up(error)
    show(Console(), comparing.compare_table(reports))
    click.echo(f"charts: {html}")


@main.command(short_help="Prints the rules that a server needs for a load.", help=RULES_HELP)
@click.option("--protocol", type=click.Choice(list(RULES)), default=next(iter(RULES), None), show_default=True)
@click.option("-r", "--names", type=NUMBER, default=1, show_default=True, help="Number of flows.")
@click.option(
    "--maximum", type=NUMBER, default=1_000_000, show_default=True,
    help="The limit of each flow or identifier: concurrent calls, or requests a second.",
)  # fmt: skip
def rules(protocol: str, names: int, maximum: int) -> None:
    try:
        click.echo(RULES[protocol].write(names, maximum), nl=False)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def show(console: Console, what: RenderableType) -> None:
    """Prints a report.

    Wraps the lines of the report on a terminal only: in a file, long lines can be searched more easily.
    """
    console.print(what, soft_wrap=not console.is_terminal)


def failed(found: Report) -> bool:
    """Returns whether a run had errors.

    In a search, unsent requests are not errors, because a search tries rates that are too high.
    """
    if found.search is not None and found.search.get("ended"):
        return True
    searching = found.search is not None and not found.repeats()
    return any(each.errors or each.violations or (each.unsent and not searching) for each in found.runs)


def give_up(error: Exception) -> NoReturn:
    click.echo(f"counterbench: {error}", err=True)
    sys.exit(EXIT_USAGE)


def read_plan(options: dict[str, Any]) -> Plan:
    """Makes a plan from the options of the command. Raises ValueError if two options exclude each other."""
    searching = options["find_max"] or options["scan"]
    if options["find_max"] and options["scan"]:
        raise ValueError("use either --find-max or --scan")
    if searching and (options["rate"] or options["requests"]):
        raise ValueError(
            "--find-max and --scan cannot be used with --rate or -n: they choose the rates, and each run has a duration"
        )
    if searching and options["repeat"] > 1:
        raise ValueError("--find-max and --scan cannot be used with --repeat")
    duration = options["duration"]
    if duration is None and options["requests"] is None:
        duration = SEARCH_S if searching else DURATION_S
    work = options["ops"] or read_work(DIALECTS[options["protocol"]].work)
    take = read_take(options)
    if take and not take.items.permits and options["ops"] is None:
        work = read_work("acquire")
    files = {name: options[name] for name in ("cacert", "cert", "key")}
    plan = Plan(
        protocol=options["protocol"], host=options["host"], port=options["port"] or 0,
        control_port=options["control_port"] or 0, socket=options["socket"],
        tls=options["tls"] or any(files.values()), **files,
        connections=options["connections"] or connections_of(work, options["producers"]),
        producers=options["producers"], depth=options["pipeline"], keep_alive=options["keep_alive"],
        requests=options["requests"], duration=duration, warmup=options["warmup"], processes=options["threads"],
        rate=options["rate"], arrivals=options["arrivals"], work=work, keys=options["keys"],
        names=options["names"], name_size=options["name_size"], resources=options["resources"],
        maximum=options["maximum"], hold=options["hold"], take=take, churn=options["churn"], prefill=options["prefill"],
        verify=options["verify"], seed=options["seed"], value_size=options["value_size"],
        number_type=options["number_type"], ttl=options["ttl"], delay=read_delay(options["delay"]),
    )  # fmt: skip
    return replace(plan, prefill=True) if plan.needs_names() else plan


def read_take(options: dict[str, Any]) -> Take | None:
    """Returns how acquires ask if they are Takes, which is so if an option says anything about that."""
    given = {name: options[name] for name in TAKE_OPTIONS if options[name] is not None}
    return Take(**given) if given else None


def read_delay(seconds: float) -> int:
    if seconds != int(seconds):
        raise ValueError(f"a delay must be whole seconds, not {seconds:g}")
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
    """Does one run, or the runs of a search. If a search ends too early, the results of its complete runs are kept."""
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
        click.echo("counterbench: interrupted; the report shows what was measured until then", err=True)
    return Report(found.runs, machine(), versions(), answer)


def machine() -> dict[str, str]:
    """Describes the machine on which the load ran."""
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
    """Writes the files that the options name."""
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
