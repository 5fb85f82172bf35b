"""`counterctl beanstalk`: tubes and their jobs, and the drain mode.

Floor 5 (ARCHITECTURE.md). `drain` asks the admin endpoint, because the protocol has no request for the drain mode. All
other commands send requests of the protocol. If the server refuses a request, the command prints one line and exits
with status 1.
"""

from __future__ import annotations

import sys
import time
from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import click

from counterd.cli.ctl.admin import admin_options, endpoint_of, understood
from counterd.cli.ctl.beanstalk.jobs import Tail, id_of, jobs_of, tubes_of
from counterd.cli.ctl.common import (
    TIME_LIMIT,
    Bytes,
    Group,
    Server,
    address_options,
    chosen_address,
    duration,
    glob,
    refused,
    shown,
    timeout_below,
    until_interrupted,
)
from counterd.cli.ctl.output import Column, Kind, Output, Row, number, output_option
from counterd.cli.options import Reads
from counterd.protocols.beanstalk.wire import BODY_MAX, ID_MAX, NAME_MAX, NEEDLE_MAX, NUMBER_MAX, PORT, STATES
from counterd.units import several

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.cli.ctl.beanstalk.jobs import Figures
    from counterd.client.beanstalk import Client

SCHEME = "beanstalk"
DEFAULT = b"default"  # the tube
WITHOUT_WORKER = tuple(state for state in STATES if state != "reserved")
UINT32 = click.IntRange(0, NUMBER_MAX)
JOB = click.IntRange(0, ID_MAX)
TUBE = Bytes("tube's name", 1, NAME_MAX)
KEY = Bytes("key", 1, NAME_MAX)
COUNTER = Bytes("counter's name", 1, NAME_MAX)
BODY = Bytes("body", 0, BODY_MAX)
TEXT = Bytes("text", 0, NEEDLE_MAX)


def whole_seconds(text: str) -> int:
    """Converts a duration to seconds. The protocol allows only whole seconds."""
    seconds = duration(text)
    if seconds != int(seconds):
        raise ValueError(f"expected whole seconds, not {text!r}")
    return int(seconds)


SECONDS = Reads("duration", whole_seconds)

# The server's figures that are not plain numbers, by their names in the protocol.
KINDS = {
    **dict.fromkeys(("id", "tube", "state", "key", "name", "retire-to", "pid", "hostname", "version"), Kind.TEXT),
    **dict.fromkeys(("counter", "blocked"), Kind.TEXT),
    **dict.fromkeys(("max-job-size", "binlog-max-size"), Kind.SIZE),
    **dict.fromkeys(("age", "delay", "ttr", "time-left", "uptime", "rusage-utime", "rusage-stime"), Kind.SPAN),
    **dict.fromkeys(("pause", "pause-time-left", "age-of-oldest-ready", "time-in-queue"), Kind.SPAN),
}
ID_COLUMN = Column("id")
BODY_COLUMN = Column("body", Kind.BYTES, nothing="gone")
STATE_COLUMN = Column("state")
# The columns of a list of jobs, with the server's names. A server may not have all of these fields.
JOB_COLUMNS = [
    ID_COLUMN,
    STATE_COLUMN,
    Column("pri", Kind.NUMBER),
    Column("age", Kind.SPAN),
    Column("delay", Kind.SPAN, detail=True),
    Column("ttr", Kind.SPAN),
    Column("time-left", Kind.SPAN, title="left"),
    *(Column(name, Kind.NUMBER) for name in ("reserves", "timeouts", "releases", "buries", "kicks")),
    Column("key"),
    Column("counter"),
    Column("maximum", Kind.NUMBER, detail=True),
    Column("blocked"),
]
# The columns of a list of tubes, by their names in the reply to inspect-tube.
TUBE_COLUMNS = {
    "name": Column("tube"),
    **{f"current-jobs-{state}": Column(state, Kind.NUMBER) for state in STATES},
    "current-waiting": Column("waiting", Kind.NUMBER),
    "total-jobs": Column("total", Kind.NUMBER),
    "age-of-oldest-ready": Column("oldest", Kind.SPAN),
    "pause-time-left": Column("paused", Kind.SPAN),
    "current-jobs-blocked": Column("blocked", Kind.NUMBER),
}


class BeanstalkTarget(Server):
    """The server of the beanstalk protocol."""

    what = "jobs"
    protocol = "the beanstalk protocol"

    def connect(self, tube: bytes = DEFAULT) -> Client:
        """Returns a client that uses this tube. The client connects when it sends its first command."""
        from counterd.client.beanstalk import Client

        return Client(**self.arguments, use=tube)


pass_target = click.make_pass_decorator(BeanstalkTarget)
tube_argument = click.argument("tube", type=TUBE)
tube_option = click.option("--tube", type=TUBE, help="The tube.  [default: default]")
job_option = click.option("--job", type=JOB, metavar="ID", help="The job with this ID.")


@click.group(cls=Group)
@address_options(SCHEME, PORT, "BEANSTALK_URL")
@output_option
@click.pass_context
def beanstalk(context: click.Context, /, timeout: float, **_: object) -> None:
    """Shows and changes tubes and their jobs."""
    timeout = timeout_below(context, timeout, "jobs")
    context.obj = BeanstalkTarget(chosen_address(context, SCHEME, PORT), timeout)


# ---- what there is ----


def valued(name: str, text: str | None) -> Any:
    """Converts a field of a reply to the value of a column. Returns None for a number that cannot be read."""
    if text is None or KINDS.get(name) is Kind.TEXT:
        return text or None
    whole, point, places = text.partition(".")
    if not whole.isdecimal() or (point and not places.isdecimal()):
        return None
    return float(text) if point else int(text)


def record(figures: Figures, output: Output) -> None:
    """Shows all statistics of the server, of a tube or of a job."""
    columns, row = [], []
    for name, text in figures.items():
        value, kind = valued(name, text), KINDS.get(name, Kind.NUMBER)
        if value is None:
            value, kind = text or None, Kind.TEXT
        columns.append(Column(name, kind))
        row.append(value)
    output.record(columns, row)


ORDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "name": lambda tube: tube["name"] or "",
    **{
        state: lambda tube, name=f"current-jobs-{state}": (-(tube[name] or 0), tube["name"] or "")  # type: ignore[misc]
        for state in STATES
    },
}


@beanstalk.command()
@click.option("--match", metavar="GLOB", help="Show only tubes that match this pattern, such as 'mail:*'.")
@click.option(
    "--sort",
    type=click.Choice(list(ORDERS)),
    default="name",
    help="Sort by this column; numbers are in descending order.  [default: name]",
)
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Show at most N rows.")
@output_option
@pass_target
def tubes(target: BeanstalkTarget, match: str | None, sort: str, limit: int | None, output: Output) -> None:
    """Shows the tubes, and how many jobs each tube has.

    waiting: the number of connections that wait for a job. oldest: how long the oldest ready job has been ready.
    paused: how long the tube will still be paused. blocked: the number of ready jobs that wait for a permit.
    """
    like = glob(match)
    with target.connect() as client:
        told = list(tubes_of(client, [name for name in client.list_tubes() if like(name)]))
    # Tubes that were deleted meanwhile are None.
    found = [{name: valued(name, each.get(name)) for name in TUBE_COLUMNS} for each in told if each]
    rows = sorted(found, key=ORDERS[sort])[:limit]
    output.rows([*TUBE_COLUMNS.values()], (tuple(tube.values()) for tube in rows))


@beanstalk.command()
@tube_option
@job_option
@output_option
@pass_target
def stats(target: BeanstalkTarget, tube: bytes | None, job: int | None, output: Output) -> None:
    """Shows the statistics of the server, of a tube, or of a job."""
    only_one(tube, job)
    found: Figures | None
    with target.connect() as client:
        if tube is not None:
            (found,) = tubes_of(client, [tube])
        else:
            found = client.stats() if job is None else client.stats_job(job)
    if found is None:
        refused(f"no job {job}" if tube is None else f"no tube {shown(tube)}")
    record(found, output)


def only_one(tube: bytes | None, job: int | None) -> None:
    if tube is not None and job is not None:
        raise click.UsageError("use either --tube or --job")


def no_tube(tube: bytes) -> NoReturn:
    refused(f"no tube {shown(tube)}")


@beanstalk.command()
@tube_option
@job_option
@click.option(
    "--state",
    type=click.Choice(WITHOUT_WORKER),
    default="ready",
    help="Show the next job of the tube in this state.  [default: ready]",
)
@click.option("--raw", is_flag=True, help="Write only the body, unchanged.")
@output_option
@pass_target
def peek(target: BeanstalkTarget, tube: bytes | None, job: int | None, state: str, raw: bool, output: Output) -> None:
    """Shows a job and its body: the next job of a tube, or the job with this ID. The command does not change the job.

    The exit status is 1 if the job does not exist.
    """
    only_one(tube, job)
    tube = tube or DEFAULT
    with target.connect(tube) as client:
        found = getattr(client, f"peek_{state}")() if job is None else client.peek(job)
    if found is None:
        refused(f"no {state} job in {shown(tube)}" if job is None else f"no job {job}")
    if raw:
        output.raw(found.body)
    else:
        output.stream([ID_COLUMN, BODY_COLUMN])((str(found.id), found.body))


@beanstalk.command("list")
@tube_argument
@click.option("--state", type=click.Choice(STATES), help="Show only jobs in this state.")
@click.option("--search", type=TEXT, metavar="TEXT", default="", help="Show only jobs whose body contains this text.")
@click.option("--limit", type=click.IntRange(0), metavar="N", help="Show at most N rows.")
@output_option
@pass_target
def list_(
    target: BeanstalkTarget, tube: bytes, state: str | None, search: bytes, limit: int | None, output: Output
) -> None:
    """Shows the jobs of a tube, beginning with the oldest. The jobs stay in the tube.

    left: the remaining delay or the remaining time to run of the job. For each thousand jobs that are shown, the server
    reads all its jobs once.
    """
    with target.connect() as client:
        if list(tubes_of(client, [tube])) == [None]:
            no_tube(tube)
        jobs = jobs_of(client, tube, state or "all", needle=search)
        names = [column.name for column in JOB_COLUMNS]
        rows = ([valued(name, job.get(name)) for name in names] for job in islice(jobs, limit))
        output.rows(JOB_COLUMNS, rows)


@beanstalk.command()
@tube_argument
@click.option("--interval", type=TIME_LIMIT, default=1.0, help="The time between two checks.  [default: 1s]")
@output_option
@pass_target
def tail(target: BeanstalkTarget, tube: bytes, interval: float, output: Output) -> None:
    """Until Ctrl-C, shows each job that is put into a tube after the command has begun. The command leaves the jobs in
    the tube.

    A job that is put and deleted between two checks is not shown. For each check, the server reads all its jobs.
    """
    add = output.stream([Column("time", Kind.CLOCK), ID_COLUMN, STATE_COLUMN, BODY_COLUMN])
    with until_interrupted(), target.connect() as client:
        following = Tail(client, tube)
        while True:
            for job in following.look():
                found = client.peek(id_of(job))
                add((datetime.now(timezone.utc), job["id"], job.get("state"), found and found.body))
            time.sleep(interval)


# ---- what changes ----


@beanstalk.command()
@click.argument("body", type=BODY, required=False)
@click.option("--file", type=click.File("rb"), metavar="FILE", help="The file with the body; - is standard input.")
@click.option("--tube", type=TUBE, default="default", help="The tube to put the job into.  [default: default]")
@click.option(
    "--pri",
    type=UINT32,
    default=65536,
    metavar="N",
    help="The priority: jobs with lower numbers are reserved first.  [default: 65536]",
)
@click.option(
    "--delay", type=SECONDS, default=0, help=("The delay: how long to wait until the job is ready.  [default: 0]")
)
@click.option(
    "--ttr",
    type=SECONDS,
    default=60,
    help=("The time to run: how long a worker may take to finish the job.  [default: 60s]"),
)
@click.option("--key", type=KEY, help="Put the job only if no other job has this key.")
@click.option("--unique-for", type=SECONDS, help="Reserve the key for this time after the job has ended.  [default: 0]")
@click.option("--counter", type=COUNTER, help="Give the job to a worker only while this counter has a free permit.")
@click.option(
    "--maximum",
    type=click.IntRange(1, NUMBER_MAX),
    metavar="N",
    help=("How many permits the counter of --counter has."),
)
@output_option
@pass_target
def put(
    target: BeanstalkTarget,
    body: bytes | None,
    file: BinaryIO | None,
    tube: bytes,
    pri: int,
    delay: int,
    ttr: int,
    key: bytes | None,
    unique_for: int | None,
    counter: bytes | None,
    maximum: int | None,
    output: Output,
) -> None:
    """Puts a job into a tube, and shows its ID. The body is BODY, or the content of --file. Without both, it is
    standard input.

    If another job has the same --key, nothing is put, and the command shows the ID of that job. While a job with
    --counter is reserved, it holds a permit of this counter, which has --maximum permits.
    """
    if body is not None and file is not None:
        raise click.UsageError("use either BODY or --file")
    if unique_for is not None and key is None:
        raise click.UsageError("--unique-for needs --key")
    if (counter is None) != (maximum is None):
        raise click.UsageError("--counter and --maximum must be used together")
    if body is None:
        body = read_body(file)
    is_new = True
    more: dict[str, Any] = {"priority": pri, "delay": delay, "ttr": ttr}
    if counter is not None:
        more["concurrency"] = (counter, maximum)
    with target.connect(tube) as client:
        if key is None:
            job = client.put(body, **more)
        else:
            job, is_new = client.put_unique(body, key, unique_for or 0, **more)
    add = output.stream(
        [ID_COLUMN, Column("status")],
        lambda row: f"put job {row[0]}" if is_new else f"nothing was put: job {row[0]} has this key",
    )
    add((str(job), "inserted" if is_new else "exists"))


def read_body(file: BinaryIO | None) -> bytes:
    """Reads a file, or standard input, to its end. Raises ValueError if the body is longer than any server accepts."""
    if file is None and sys.stdin is None:
        raise click.UsageError("give BODY or --file: standard input is closed")
    body = (file or sys.stdin.buffer).read(BODY_MAX + 1)
    if len(body) > BODY_MAX:
        raise ValueError(f"a body has at most {BODY_MAX:,} bytes")
    return body


@beanstalk.command()
@click.argument("bound", type=UINT32, required=False)
@tube_option
@job_option
@output_option
@pass_target
def kick(target: BeanstalkTarget, bound: int | None, tube: bytes | None, job: int | None, output: Output) -> None:
    """Kicks up to BOUND buried jobs of a tube, so that they are ready. If no job is buried, kicks delayed jobs.

    With --job, makes the job with this ID ready. The exit status is 1 if this job is neither buried nor delayed.
    """
    only_one(tube, job)
    if (bound is None) == (job is None):
        raise click.UsageError("use either BOUND or --job")
    tube = tube or DEFAULT
    with target.connect(tube) as client:
        if job is None:
            assert bound is not None
            counted("kicked", client.kick(bound), tube, output)
        elif not client.kick_job(job):
            refused(f"job {job} does not exist, or is neither buried nor delayed")


def counted(what: str, jobs: int, tube: bytes, output: Output) -> None:
    """Shows how many jobs were kicked or deleted."""
    add = output.stream([Column(what, Kind.NUMBER)], lambda row: f"{what} {several(row[0], 'job')} of {shown(tube)}")
    add((jobs,))


@beanstalk.command()
@tube_argument
@click.argument("state", type=click.Choice([*WITHOUT_WORKER, "all"]))
@output_option
@pass_target
def clear(target: BeanstalkTarget, tube: bytes, state: str, output: Output) -> None:
    """Deletes the jobs of a tube that are in one state, or in any state except reserved.

    The command does not delete jobs that are put after it has begun.
    """
    with target.connect() as client:
        jobs = client.clear_tube(tube, state)
    if jobs is None:
        no_tube(tube)
    counted("cleared", jobs, tube, output)


@beanstalk.command()
@click.option("--off", is_flag=True, help="End the drain mode: the server accepts jobs again.")
@click.option("--show", is_flag=True, help="Only show whether drain mode is on.")
@admin_options
@output_option
@click.pass_context
def drain(context: click.Context, /, off: bool, show: bool, output: Output, **where: Any) -> None:
    """Begins the drain mode: the server then refuses put with DRAINING, and serves all other requests.

    The command also shows how many jobs are in each state.

    --off or a stop of the server ends the drain mode. `drain` asks the admin endpoint. `drain` needs the server's
    admin.token, unless --show is given.
    """
    if off and show:
        raise click.UsageError("use either --off or --show")
    endpoint = endpoint_of(context, **where)
    if not show:
        endpoint.ask("DELETE" if off else "PUT", "/drain/beanstalk")
    with understood():
        protocol = endpoint.ask("GET", "/stats")["protocols"].get("beanstalk")
        figures = protocol["figures"] if protocol is not None else {}
    if protocol is None:
        refused("the server does not serve the beanstalk protocol")
    # The figures may be older than the request above.
    is_on = bool(figures["refuses_puts"]) if show else not off
    columns = [Column("drain_mode"), *(Column(state, Kind.NUMBER) for state in STATES)]

    def sentence(row: Row) -> str:
        jobs = ", ".join(f"{number(count)} {state}" for count, state in zip(row[1:], STATES, strict=True))
        return f"drain mode is {row[0]}: {jobs}"

    counts = (figures[f"jobs:{state}"] for state in STATES)
    output.stream(columns, sentence)(("on" if is_on else "off", *counts))
