"""Round after round on the same daemon: clients at work, faults, and then what has to be true when all is over."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from chaos import dialects, faults, sentinel_rules, verdict, world
from chaos.beanstalk_daemon import DIALECT, asking, look
from chaos.dialect import JOBS
from chaos.monitor import MONITORS
from chaos.processes import SLOTS, ClientProcesses, Slot
from counterd.client import Client, throttr
from counterd.errors import CounterdError
from counterd.protocols.beanstalk import wire as beanstalk_wire
from counterd.protocols.sentinel.wire import ResponseParser, Status, encode_value
from history import sentinel
from kit.machine import LONG_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from chaos.beanstalk_daemon import Listing

FAULTS_PER_S = 4
# More memory than after the first round is no leak up to this: Python's heap and malloc's have their pieces, and one
# round has more output waiting at once than another. What is seen is a tenth of it, and does not grow with the rounds.
MEMORY_MORE = 8 << 20
BROKEN = (AssertionError, OSError, EOFError, CounterdError)  # what a round ends with if the daemon does
BY_CLIENTS = faults.BY_CLIENT | faults.BY_FAR_CLIENT  # who count what they could play of them
LATE_S = 2.0  # by which a busy machine may be
STILL_S = 30.0  # longer than any patience of the daemon's: what has not changed for so long does not change


class Figures(NamedTuple):
    """The figures of a whole run. missing: what this machine lacks. kept: the folder of the files, if there was a
    violation.
    """

    seed: str
    seconds: float
    rounds: int
    operations: int
    faults: collections.Counter[str]
    names: int
    undecided: int
    violations: list[str]
    missing: list[str]
    kept: Path | None

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in self.faults.most_common())
        return (
            f"chaos: {self.seconds:,.0f} s, {self.rounds:,} rounds, "
            f"{self.operations:,} operations, {self.names:,} names checked, "
            f"{self.faults.total():,} faults ({kinds}), {len(self.violations)} violations"
            + (f", {self.undecided} undecided" if self.undecided else "")
            + (f" ({'; '.join(self.missing)})" if self.missing else "")
            + f", seed {self.seed}"
        )


class Left(NamedTuple):
    """The memory and descriptors that the daemon uses without clients."""

    memory: int
    descriptors: int


class Chaos:
    """A daemon and its client processes. say: called with the figures of each round."""

    def __init__(self, place: world.World, seed: str, round_s: float, say: Callable[[str], None]) -> None:
        self.world = place
        self.seed = seed
        self.round_s = round_s
        self.say = say
        self.faults: collections.Counter[str] = collections.Counter()
        self.operations = self.names = self.undecided = self.rounds = 0
        self.violations: list[str] = []
        slots = [slot for slot in map(Slot._make, SLOTS) if slot in place.addresses]
        self.processes = ClientProcesses(place, seed, slots)
        self.monitors = {
            dialect: kind(place.addresses[dialect, "unix"], functools.partial(self.processes.let_in, dialect))
            for dialect, kind in MONITORS.items()
        }
        self.jobs: dict[str, Listing] = {}  # by dialect, that there were at the end of the round, if it came to that
        self.passed_s = -sentinel_rules.WINDOW_MAX_S  # when rates were last asked for, other than by clients
        self.left = self._what_it_has()

    def end(self) -> None:
        self.processes.end()
        for monitor in self.monitors.values():
            monitor.stop()

    def round(self) -> None:
        """Runs one round. Adds its violations, and keeps its files if there are any."""
        number, slots = self.rounds, len(self.processes.slots)
        directory = self.world.directory / f"round {number}"
        directory.mkdir()
        plan = faults.schedule(self.seed, number, round(FAULTS_PER_S * self.round_s), slots, faults.kinds(self.world))
        self.say(f"round {number}: {', '.join(map(str, plan))}")
        time.sleep(max(0.0, self.passed_s + sentinel_rules.WINDOW_MAX_S - time.monotonic()))
        driver = faults.Driver(self.world, self.processes)
        self.processes.begin(number, directory)
        try:
            driver.play(plan, self.round_s)
        finally:
            driver.heal()
        self.processes.greet()
        moments = [time.monotonic()]
        self.processes.leave(dying=random.Random(f"{self.seed} {number} dying").randrange(slots))
        moments.append(time.monotonic())
        found = self._settle()
        moments.append(time.monotonic())
        workers = {worker.number: worker for worker in self.processes.all}
        filled = frozenset(self.processes.slots[fault.slot].dialect for fault in plan if fault.kind == "fill")
        ends = verdict.Ends(
            workers, driver.disturbed_ns, time.monotonic_ns(), filled, driver.loads, driver.limited,
            self.world.beanstalk.take_restarts(), self.jobs, self.world.smockron.take_restarts(),
            self.world.smockron.take_loads(),
        )  # fmt: skip
        samples = {dialect: monitor.take() for dialect, monitor in self.monitors.items()}
        judged = verdict.judge(sorted(directory.iterdir()), samples, ends)
        moments.append(time.monotonic())
        left, settled, checked = (after - before for before, after in itertools.pairwise(moments))
        self.say(
            f"round {number}: {judged.operations:,} operations; left in {left:.1f} s, settled in {settled:.1f} s, "
            f"checked in {checked:.1f} s; {(self.world.memory() - self.left.memory) >> 10:,} KiB more memory"
        )
        found += judged.violations
        self.violations += [f"seed {self.seed}, round {number}: {text}" for text in found]
        self.operations += judged.operations
        self.names += judged.names
        self.undecided += judged.undecided
        self.faults.update(fault.kind for fault in plan if fault.kind not in BY_CLIENTS)
        self.faults.update(line[2] for worker in workers.values() for line in worker.said if line[0] == "did")
        self.rounds += 1
        if not found:
            shutil.rmtree(directory)

    # ---- what has to be true ----

    def _settle(self) -> list[str]:
        """Waits until the daemons are as if no client had ever connected. Returns what is not, in the end."""
        found: list[str] = []
        self.jobs = {}
        for counterd in (
            self.world.counterd,
            self.world.beanstalk.counterd,
            self.world.smockron.counterd,
        ):
            if counterd.process.poll() is not None:
                raise EOFError(f"the daemon ended with {counterd.process.returncode}")
        for dialect, monitor in self.monitors.items():
            if monitor.error is not None:
                raise EOFError(f"{dialect}, a connection that only watches: {monitor.error!r}")
        checks = (
            self._has_jobs_without_permits,
            self._counter_is_empty, self._throttr_is_empty, self._sentinel_is_empty, self._beanstalk_is_empty,
            self._smockron_is_empty, self._has_no_errors, self._has_what_it_had,
        )  # fmt: skip
        for check in checks:
            try:
                check()
            except AssertionError as error:
                found.append(str(error))
        return found

    def _counter_is_empty(self) -> None:
        nothing = ("holdings", "holdings_leaving", "busy", "waiters", "charges", "rates")
        wanted = {"curr_connections": 2, **dict.fromkeys(nothing, 0)}  # the monitor's, and this
        with Client(path=self.world.addresses["counter", "unix"], timeout=LONG_S) as client:
            become(lambda: {name: int(client.stats()[name]) for name in wanted}, wanted, "counter")
            held = [entry for entry in client.dump() if entry.consumption]
            assert not held, f"counter: nobody is there, and of these something is held: {held}"

    def _throttr_is_empty(self) -> None:
        with throttr.Client(path=self.world.addresses["throttr", "unix"], timeout=LONG_S) as client:
            become(lambda: client.info().connections, 2, "throttr: connections")
            for entry in client.list():
                client.purge(entry.key)
            assert not client.list(), "throttr: keys that PURGE leaves"
            become(lambda: client.info().keys, 0, "throttr: keys")

    def _sentinel_is_empty(self) -> None:
        """Checks that all of every flow is free, a fixed time after the last client has ended."""
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as connected:
            connected.settimeout(LONG_S)
            connected.connect(self.world.addresses["sentinel", "unix"])
            become(lambda: self.world.figure("sentinel", "curr_connections"), 2, "sentinel: connections")
            free_s = time.monotonic() + sentinel_rules.OFFLINE_MAX_S + verdict.SWEPT_NS / 1e9
            for flow, (threshold, *_) in (sentinel_rules.HOT | sentinel_rules.COLD | sentinel_rules.FILL).items():
                call = sentinel.Acquire(flow, int(threshold))
                _, token = granted(connected, call, free_s)
                status, _ = exchange(connected, sentinel.Release(flow, token))
                assert status == Status.RELEASE_OK, f"sentinel: {call} was granted, its release answered {status}"
            assert self.world.figure("sentinel", "tokens") == 0, "sentinel: there are tokens of no flow"
            free_s = time.monotonic() + sentinel_rules.WINDOW_MAX_S + LATE_S
            for flow, (count, *_) in sentinel_rules.RATES.items():
                granted(connected, sentinel.Flow(flow, count), free_s)
            for flow, (count, *_) in sentinel_rules.VALUE_RATES.items():
                for value in map(encode_value, sentinel_rules.VALUES):
                    granted(connected, sentinel.Param(flow, count, (value,)), free_s)
            self.passed_s = time.monotonic()

    def _beanstalk_is_empty(self) -> None:
        """Checks that no job is left, including those of a killed daemon."""
        beanstalk = self.world.beanstalk
        self._has_no_jobs(DIALECT, beanstalk.begun_ns)
        assert beanstalk.figure("jobs") == 0, "beanstalk: there are jobs of no tube"

    def _has_jobs_without_permits(self) -> None:
        self._has_no_jobs(JOBS, 0)
        assert self.world.figure("beanstalk", "jobs") == 0, "jobs: there are jobs of no tube"

    def _has_no_jobs(self, dialect: str, begun_ns: int) -> None:
        """Checks that no job is reserved, and that each can be deleted once. begun_ns: since when the daemon has been
        running.
        """
        with asking(self.world.path_of(dialect)) as peer:
            become(lambda: peer.figure("current-connections"), 2, f"{dialect}: connections")
            become(lambda: peer.figure("current-jobs-reserved"), 0, f"{dialect}: reserved jobs")
            listing = self.jobs[dialect] = look(peer)
            for job in listing.ids:
                status = peer.ask(beanstalk_wire.delete(job)).status
                assert status == "DELETED", f"{dialect}: job {job} was listed, its delete is answered {status}"
            assert (tubes := peer.tubes()) == [b"default"], f"{dialect}: nobody is there, and no job, but tubes {tubes}"
        is_lost = self.monitors[dialect].lost_ns > begun_ns
        assert not is_lost, f"{dialect}: a connection has ended that only watches, and nobody has killed the daemon"

    def _smockron_is_empty(self) -> None:
        """Checks that all identifiers can be forgotten, and that none was evicted to make room for others."""
        smockron = self.world.smockron
        become(lambda: smockron.figure("curr_connections"), 0, "smockron: connections")
        assert (count := smockron.figure("subscriptions")) == 0, f"smockron: {count} subscriptions of nobody"
        smockron.forget(dialects.gate_identifiers(self.rounds))
        become(lambda: smockron.figure("identifiers"), 0, "smockron: identifiers")
        become(lambda: max(0, smockron.counterd.descriptors() - smockron.descriptors), 0, "smockron: descriptors more")
        assert smockron.figure("evicted") == 0, "smockron: more identifiers than are judged"

    def _has_no_errors(self) -> None:
        counterd, beanstalk, smockron = self.world.counterd, self.world.beanstalk, self.world.smockron
        lines = self.world.logged_stats()
        for killable in (beanstalk, smockron):
            lines |= killable.counterd.logged_stats([killable.dialect], LONG_S)
        for dialect, line in lines.items():
            (errors,) = re.findall(r"\binternal_errors=(\d+)", line)
            assert errors == "0", f"{dialect}: {errors} internal errors"
        bad = [line for line in counterd.lines(r" ERROR |Traceback") if "not reloaded:" not in line]
        bad += beanstalk.errors() + smockron.errors()
        assert not bad, f"the log says {bad}"

    def _has_what_it_had(self) -> None:
        if self.rounds == 0:
            self.left = self._what_it_has()
        before, counterd = self.left, self.world.counterd
        become(lambda: max(0, counterd.descriptors() - before.descriptors), 0, "descriptors more than after round 0")
        more = self.world.memory() - before.memory
        assert more <= MEMORY_MORE, f"{more:,} bytes of memory more than after round 0"

    def _what_it_has(self) -> Left:
        return Left(self.world.memory(), self.world.counterd.descriptors())


def exchange(connected: socket.socket, call: Any) -> tuple[int, ...]:
    """Sends a request to the sentinel protocol. Returns the reply."""
    parser = ResponseParser()
    connected.sendall(sentinel.request(call))
    while not (responses := parser.feed(connected.recv(1 << 10))):
        pass
    return sentinel.told(call, responses[0])


def granted(connected: socket.socket, call: Any, until_s: float) -> tuple[int, ...]:
    """Returns the reply that admits the request, which has to come by then."""
    while (answer := exchange(connected, call))[0] != Status.OK:
        assert time.monotonic() < until_s, f"sentinel: nobody is there, and {call} is answered {answer}"
        time.sleep(0.02)
    return answer


def become(figure: Callable[[], Any], wanted: Any, what: str) -> None:
    """Waits until the value is as wanted, as long as it keeps changing."""
    seen, since_s = None, time.monotonic()
    while (now := figure()) != wanted:
        if now != seen:
            seen, since_s = now, time.monotonic()
        assert time.monotonic() - since_s < STILL_S, f"{what}: {seen} in place of {wanted}, for {STILL_S:g} s"
        time.sleep(0.02)


def run(seed: str, seconds: float, round_s: float, say: Callable[[str], None]) -> Figures:
    """Runs rounds until the time is over, and at least two. Keeps the files of a round with violations."""
    directory = Path(tempfile.mkdtemp(prefix="chaos-"))
    begun = time.monotonic()
    chaos = None
    try:
        with world.made(directory) as place:
            chaos = Chaos(place, seed, round_s, say)
            try:
                while not chaos.violations and (chaos.rounds < 2 or time.monotonic() - begun < seconds):
                    chaos.round()
            except BROKEN as error:
                chaos.violations.append(f"seed {seed}, round {chaos.rounds}: {error!r}")
            finally:
                chaos.end()
                (directory / "log").write_text("\n".join(place.counterd.log))
                for killable in (place.beanstalk, place.smockron):
                    log = "\n".join([*killable.log, *killable.counterd.log])
                    (directory / f"{killable.dialect}.log").write_text(log)
    except (AssertionError, subprocess.TimeoutExpired):  # it did not end as it should, or not at all
        if chaos is None:
            raise
        counterd = chaos.world.counterd
        chaos.violations.append(
            f"seed {seed}: the daemon ended with {counterd.process.returncode}, and said at last: {counterd.log[-3:]}"
        )
    if not chaos.violations:
        shutil.rmtree(directory)
    return Figures(
        seed, time.monotonic() - begun, chaos.rounds, chaos.operations, chaos.faults,
        chaos.names, chaos.undecided, chaos.violations, place.missing, directory if chaos.violations else None,
    )  # fmt: skip
