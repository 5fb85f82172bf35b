"""Supervises one run: starts the load processes, lets them begin together, watches them, and collects their results.

Floor 5 (ARCHITECTURE.md). The load processes are forked before this process starts a thread. The load processes
share a Board with this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import statistics
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from counterd.bench import server
from counterd.bench._board import Board
from counterd.bench._load import Load
from counterd.bench.connection import LoadError, resolve
from counterd.bench.plan import VERIFIED_MAX
from counterd.bench.result import Grants, Moment, Run, ServerUse, Shares, histogram, percentiles
from counterd.errors import CounterdError
from counterd.units import duration, rate, several

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hdrh.histogram import HdrHistogram

    from counterd.bench.dialect import Checks
    from counterd.bench.plan import Plan

LOOK_S = 0.05
LEAVE_S = 10.0  # how long processes may take to close their connections
FOREVER_NS = 1 << 62
PR_SET_PDEATHSIG = 1


@dataclass
class Progress:
    """The state of a run that is in progress."""

    stage: str  # connecting, filling, warming up, measuring, finishing
    fraction: float | None  # of the measured time or requests
    connected: int
    requests: int
    errors: dict[str, int]
    moment: Moment | None  # the last whole second


@dataclass
class Interruption:
    """Remembers whether a signal has ended a run early."""

    happened: bool = False


def run(
    plan: Plan,
    label: str = "",
    watch: Callable[[Progress], None] | None = None,
    interruption: Interruption | None = None,
) -> Run:
    """Puts the load of a plan on the server. SIGINT ends the run early; then the result until this time is returned.

    Raises LoadError if no connection can be opened.
    """
    interruption = interruption or Interruption()
    allow_descriptors(plan.connections // plan.processes + 1 + RESERVE)
    place = resolve(plan)
    dialect = plan.dialect
    if dialect.prepare is not None:
        dialect.prepare(place)
    checks = _checks(plan)
    board = Board(plan.processes, plan.connections, counted(plan), plan.verify and plan.has_unique_tokens())
    use = server.Watch(place)
    loads = [Load(plan, board, index, place.sockaddr(), place.context) for index in range(plan.processes)]
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with _interruptible(board, interruption), _processes(loads) as pids:
        watching = _Watching(plan, board, pids, use, watch)
        try:
            watching.until_ready()
            watching.until_over()
            violations = _looked(lambda: checks.while_held(board), interruption) if checks else None
        finally:
            board.stop()
            board.leave()
    if checks and violations is not None:
        violations += _looked(lambda: checks.when_gone(board), interruption)
    elif dialect.tidy is not None:
        dialect.tidy(plan)
    return watching.result(label or describe(plan), started, violations)


def counted(plan: Plan) -> int:
    """Returns how many names, or jobs, --verify counts one by one."""
    if not plan.verify:
        return 0
    return VERIFIED_MAX if plan.dialect.kind == "jobs" else plan.names


def _checks(plan: Plan) -> Checks | None:
    """Returns the checks of --verify, or None without --verify. Raises LoadError if the load cannot be verified."""
    if not plan.verify or plan.dialect.checks is None:
        return None
    try:
        return plan.dialect.checks(plan)
    except CounterdError as error:
        raise LoadError(f"--verify: {error}") from None


def _looked(look: Callable[[], list[str]], interruption: Interruption) -> list[str]:
    """Returns the violations that a check finds.

    If the check fails, that counts as a violation too, and raises no exception.
    """
    try:
        return look()
    except KeyboardInterrupt:
        interruption.happened = True
        return ["it is not known whether everything was given back, because the run was interrupted"]
    except (CounterdError, LoadError, OSError) as error:
        return [f"it is not known how much is in use: {error}"]


def describe(plan: Plan) -> str:
    """Returns a short description of a plan."""
    words = [
        f"{plan.protocol} {plan.work.text}",
        several(plan.connections, "connection"),
        rate(plan.rate) if plan.rate else f"{plan.depth:,} in flight",
    ]
    if plan.listens():
        words.append("new identifiers")
    elif plan.dialect.kind != "jobs":
        words.append(several(plan.names, "name"))
    elif plan.work.text != "noop":
        words.append(f"bodies of {plan.buffer_size:,} B")
    if plan.fans():
        words.append(several(plan.producers, "producer"))
    if plan.delay:
        words.append(f"delayed {duration(plan.delay * 1e9)}")
    if plan.hold:
        words.append(f"held {plan.hold.kind}:{duration(plan.hold.mean * 1e9)}")
    if plan.take:
        words += plan.take.describe()
    if plan.churn:
        words.append(f"{rate(plan.churn)} killed")
    if plan.tls or plan.socket is not None:
        words.append("TLS" if plan.tls else "Unix socket")
    if not plan.keep_alive:
        words.append("a connection for each request")
    return ", ".join(words)


# ---- before ----

RESERVE = 64  # descriptors that are not connections


def allow_descriptors(wanted: int) -> None:
    """Raises this process's limit of open files if necessary. Raises LoadError if the hard limit is too low."""
    import resource  # noqa: PLC0415  not everywhere

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and wanted > hard:
        how = f"raise it (ulimit -Hn {wanted}), or use --threads"
        raise LoadError(f"{wanted} files would be open, and the limit is {hard}: {how}")
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# ---- during ----


@contextlib.contextmanager
def _interruptible(board: Board, interruption: Interruption) -> Iterator[None]:
    """Makes SIGINT and SIGTERM end the load, but not the program, which still has to report the result."""

    def end(*_: object) -> None:
        interruption.happened = True
        board.stop()

    previous = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _processes(loads: list[Load]) -> Iterator[list[int]]:
    pids = [_start(load) for load in loads]
    try:
        yield pids
    finally:
        end = time.monotonic() + LEAVE_S
        for pid in pids:
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > end:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.001)


def _start(load: Load) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            load.run()
            status = 0
    except BaseException:  # noqa: BLE001  no exception may leave the forked process
        import traceback  # noqa: PLC0415

        traceback.print_exc()
    finally:
        os._exit(status)


class _Watching:
    """The parent's part in a run: decides when the load begins, reads the figures of each second, and detects
    errors."""

    def __init__(
        self,
        plan: Plan,
        board: Board,
        pids: list[int],
        use: server.Watch,
        watch: Callable[[Progress], None] | None,
    ) -> None:
        self._plan = plan
        self._board = board
        self._pids = pids
        self._use = use
        self._used = ServerUse()
        self._watch = watch or (lambda _: None)
        self._latency = histogram()
        self._series: list[Moment] = []
        self._start = self._measure = self._end = self._finish = 0  # ns

    def until_ready(self) -> None:
        """Waits until the processes have connected and created their names, then sets the time when the load begins."""
        while any(stage in ("connecting", "filling") for stage in self._stages()):
            self._show("filling" if "filling" in self._board.stages() else "connecting")
            time.sleep(LOOK_S)
        if not self._board.totals()["connected"]:
            why = "; ".join([_listed(self._board.errors()), *self._board.evidence()])
            raise LoadError(f"no connection is left before the load has begun: {why}")
        self._start = time.monotonic_ns() + 10_000_000
        self._measure = self._start + int(self._plan.warmup * 1e9)
        lasting = self._plan.duration
        self._end = FOREVER_NS if lasting is None else self._measure + int(lasting * 1e9)
        self._board.begin(self._start, self._measure, self._end)

    def until_over(self) -> None:
        """Reads the figures of each second until the last reply."""
        begun, count, errors = self._measure, 0, 0
        while not all(stage in ("over", "gone") for stage in self._stages()):
            time.sleep(LOOK_S)
            now = time.monotonic_ns()
            if now >= self._measure:
                self._use.begin()
            if now - begun >= 1_000_000_000:
                begun, count, errors = self._moment(begun, now, count, errors)
            self._show("warming up" if now < self._measure else "measuring" if now < self._end else "finishing")
        self._used = self._use.end()
        self._finish = self._board.stopped_ns() or time.monotonic_ns()
        if self._board.totals()["requests"] > count or not self._series:
            self._moment(begun, max(self._board.last_ns(), begun + 1), count, errors)

    def result(self, label: str, started: str, violations: list[str] | None) -> Run:
        totals = self._board.totals()
        exceeded, evidence = self._board.violations()
        if violations is not None and exceeded:
            violations[:0] = [f"{self._plan.dialect.broken} {exceeded} times; the first time: {evidence[0]}"]
        plan = self._plan
        # If a time was given, all of it counts, even if few replies came. If a number of requests: the time they took.
        end = self._board.last_ns()
        if plan.requests is None or totals["requests"] < plan.requests:
            end = max(end, min(self._finish, self._end))
        return Run(
            label=label,
            options=plan.as_options(),
            started=started,
            seconds=max(end - self._measure - (plan.delay * 10**9 if plan.fans() else 0), 0) / 1e9,
            requests=totals["requests"],
            outcomes=self._board.outcomes(),
            errors=self._board.errors(),
            evidence=self._board.evidence(),
            latency=self._latency,
            service=self._gathered("service") if plan.waits() or (plan.rate and not plan.fans()) else None,
            queue=self._gathered("queue") if plan.waits() else None,
            give_back=self._gathered("give_back") if plan.churn else None,
            rate_wanted=plan.rate,
            late=totals["late"],
            unsent=totals["unsent"],
            cpu_seconds=totals["cpu_ns"] / 1e9,
            series=self._series,
            violations=violations,
            server=self._used,
            grants=spread(served(plan, self._board.granted())),
            shares=shares(plan, self._board.granted()),
        )

    def _stages(self) -> list[str]:
        """Returns the stages of the processes. Raises LoadError if one of the processes has died."""
        stages = self._board.stages()
        for pid, stage in zip(self._pids, stages, strict=True):
            if stage != "gone" and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                raise LoadError(f"a load process ({pid}) died")
        return stages

    def _moment(self, begun: int, now: int, count: int, errors: int) -> tuple[int, int, int]:
        totals = self._board.totals()
        values = histogram()
        for value, times in self._board.take("latency"):
            values.record_value(value, times)
        self._latency.add(values)
        shown = percentiles(values)
        self._series.append(
            Moment(
                end=(now - self._measure) / 1e9,
                seconds=(now - begun) / 1e9,
                requests=totals["requests"] - count,
                errors=totals["errors"] - errors,
                percentiles={name: shown[name] for name in ("50", "99", "max") if name in shown},
            )
        )
        return now, totals["requests"], totals["errors"]

    def _show(self, stage: str) -> None:
        totals = self._board.totals()
        fraction = None
        if self._plan.requests:
            fraction = totals["requests"] / self._plan.requests
        if self._start and self._plan.duration:
            fraction = max(fraction or 0.0, (time.monotonic_ns() - self._measure) / (self._plan.duration * 1e9))
        if stage == "filling":
            fraction = totals["filled"] / self._plan.names
        self._watch(
            Progress(
                stage=stage,
                fraction=None if fraction is None else min(max(fraction, 0.0), 1.0),
                connected=totals["connected"],
                requests=totals["requests"],
                errors=self._board.errors(),
                moment=self._series[-1] if self._series else None,
            )
        )

    def _gathered(self, kind: str) -> HdrHistogram:
        values = histogram()
        for value, times in self._board.take(kind):
            values.record_value(value, times)
        return values


def served(plan: Plan, granted: list[int]) -> list[int]:
    """Returns the grants without those of a fan's producers, which are the first connections of each process."""
    if not plan.fans():
        return granted
    found: list[int] = []
    for index in range(plan.processes):
        own, putting = _share(plan.connections, plan.processes, index), _share(plan.producers, plan.processes, index)
        found, granted = found + granted[putting:own], granted[own:]
    return found


def _share(total: int, processes: int, index: int) -> int:
    """Returns the share of one process. The first processes get the remainder."""
    return total // processes + (index < total % processes)


def spread(granted: list[int]) -> Grants | None:
    """Returns how differently the connections were granted permits."""
    if len(granted) < 2 or not any(granted):
        return None
    return Grants(min(granted), int(statistics.median(granted)), max(granted))


def shares(plan: Plan, granted: list[int]) -> Shares | None:
    """Returns how fairly the grants were distributed over the fairness keys or, without keys, over the connections."""
    if plan.fans() or len(granted) < 2 or not any(granted):
        return None
    take, keys = plan.take, plan.take.keys if plan.take else 0
    if take is None or keys == 0:
        return Shares("connections", [], jain(granted))
    totals = [sum(granted[key::keys]) for key in range(keys)]
    weighted = [total / take.weight(key) for key, total in enumerate(totals)]
    return Shares("keys", totals, jain(weighted))


def jain(amounts: Sequence[float]) -> float:
    """Returns Jain's index of fairness of amounts that are not all 0: 1 if all amounts are equal, 1/n if one has
    everything."""
    return sum(amounts) ** 2 / (len(amounts) * sum(amount**2 for amount in amounts))


def _listed(errors: dict[str, int]) -> str:
    return ", ".join(f"{kind} ({count})" for kind, count in errors.items()) or "no answer"
