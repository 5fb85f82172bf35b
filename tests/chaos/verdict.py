"""Puts together what clients recorded, what the driver knows and what Dump showed, and has it checked.

When a connection may first have begun to go, and when the server was seen to have let go of it, nobody of these knows
alone: a killed client cannot say, and one behind a link that was cut does not know.
"""

from __future__ import annotations

import collections
import time
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from chaos import dialects, sentinel_rules, smockron_daemon
from chaos.beanstalk_daemon import DIALECT as BEANSTALK
from chaos.counter_dialect import HOT
from chaos.dialect import JOBS
from chaos.processes import worker_of
from history import (
    Closed,
    Operation,
    Undecided,
    beanstalk,
    check,
    counter,
    load,
    loans,
    sentinel,
    smockron,
    takes,
    throttr,
)  # fmt: skip
from history.resumptions import Goodbye, Lines, Resume, may_resume
from history.waiting import mistakes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from chaos.beanstalk_daemon import Listing
    from chaos.monitor import Sample
    from chaos.processes import Worker

MONITOR = 0  # the number of the client that runs Dump
CONFIGURATIONS_MAX = 100_000
SLACK_NS = 20_000_000  # by which the wall clock, which a restart goes by, may differ from the monotonic one
SEEN = 4  # answers to Dump: by then all has been read that was there before the first of them was asked for
NOT_FOUND = (1, None)
NOTHING_LISTED: Mapping[str, Listing] = MappingProxyType({})
SWEPT_NS = 2_000_000_000  # by then a lease that is over does not count any more, on a machine with other things to do


class Verdict(NamedTuple):
    """violations: texts. names: the number of objects whose histories were checked; undecided: those of them that were
    too hard.
    """

    operations: int
    violations: list[str]
    names: int
    undecided: int


class Ends(NamedTuple):
    """What else is known of connections' ends.

    workers: by number. disturbed_ns: when the link was, at first. settled_ns: when all had gone. short: dialects that
    had no memory left, for a while. loads: what became of the rules of sentinel. limited: its requests were.
    restarts: of the daemon that has the jobs without permits. jobs: by dialect, those there were in the end. falls,
    limits: of the master of the gatekeepers, its restarts and what became of its rules.
    """

    workers: dict[int, Worker]
    disturbed_ns: int | None
    settled_ns: int
    short: frozenset[str] = frozenset()
    loads: Sequence[Operation] = ()
    limited: bool = False
    restarts: Sequence[Operation] = ()
    jobs: Mapping[str, Listing] = NOTHING_LISTED
    falls: Sequence[Operation] = ()
    limits: Sequence[Operation] = ()

    def is_far(self, client: int) -> bool:
        return self.workers[worker_of(client)].slot.place == "far"

    def may_be_lost(self, client: int) -> bool:
        """Whether a connection may end although neither side wants that: by a machine in between, a stopped process, or
        a killed daemon.
        """
        worker = self.workers[worker_of(client)]
        kills = {BEANSTALK: self.restarts, **dict.fromkeys(smockron_daemon.DIALECTS, self.falls)}
        return bool(kills.get(worker.slot.dialect)) or self.may_be_slow(client)

    def may_be_slow(self, client: int) -> bool:
        """Whether a connection may have read less than it was sent, for a while."""
        return self.workers[worker_of(client)].was_stopped or (self.disturbed_ns is not None and self.is_far(client))


def judge(paths: Iterable[Path], samples: Mapping[str, Sequence[Sample]], ends: Ends) -> Verdict:
    """Checks all records of a round. samples: by protocol."""
    recorded = load(paths)
    violations = [f"client {line[1]}: {line[0]}: {line[2]}" for line in complaints(ends)]
    names = undecided = 0
    workers: list[Operation] = []  # of jobs with permits
    models: dict[str, Any] = {
        JOBS: beanstalk.JobModel(late_ns=SWEPT_NS),
        "counter": None,  # made of the history
        "throttr": throttr.ThrottrModel(memory="throttr" in ends.short),
        "sentinel": sentinel.SentinelModel(
            sentinel_rules.rules(), sweep_ns=SWEPT_NS, memory="sentinel" in ends.short, limited=ends.limited
        ),
        BEANSTALK: beanstalk.JobModel(late_ns=SWEPT_NS, slack_ns=SLACK_NS, journal=True),
    }
    for dialect, model in models.items():
        by_client: dict[int, list[Operation]] = collections.defaultdict(list)
        for operation in recorded:
            if ends.workers[worker_of(operation.client)].slot.dialect == dialect:
                by_client[operation.client].append(operation)
        history: list[Operation] = []
        for client, operations in by_client.items():
            if all(isinstance(operation.call, Closed) for operation in operations):
                continue  # it was never let in
            closed = closing(client, operations, samples[dialect], ends)
            history.append(closed)
            calls = [operation for operation in operations if not isinstance(operation.call, Closed)]
            history += [operation for operation in calls if operation.started <= (closed.ended or 0)]
            violations += [
                f"client {client} was answered after the server had let go of it: {operation}"
                for operation in calls
                if operation.started > (closed.ended or 0) and operation.ended is not None
            ]
        if dialect == "counter":
            wrong, history = of_counters(history, workers, samples[dialect], ends)
            violations += [f"counter: {text}" for text in wrong]
            models[dialect] = loans.LentModel(history, loans.gates(workers), late_ns=SWEPT_NS)
        if dialect == "sentinel":
            violations += granted_twice(history)
            called = {model.key(operation.call) for operation in history if not isinstance(operation.call, Closed)}
            history += [operation for operation in ends.loads if operation.call.key in called]
        if dialect in (BEANSTALK, JOBS):
            workers = [] if dialect == BEANSTALK else list(history)
            history += ends.restarts if dialect == BEANSTALK else []
            if dialect in ends.jobs:
                history += left(history, ends.jobs[dialect])
            violations += [f"{dialect}: {text}" for text in beanstalk.disorder(history)]
            history = beanstalk.jobs(history)
        found, count, given_up = checked(history, models[dialect])
        violations += [f"{dialect}: {text}" for text in found]
        names += count
        undecided += given_up
    found, count = gates(recorded, ends)
    return Verdict(
        sum(operation.ended is not None for operation in recorded), violations + found, names + count, undecided
    )


def of_counters(
    history: Sequence[Operation], workers: Sequence[Operation], samples: Sequence[Sample], ends: Ends
) -> tuple[list[str], list[Operation]]:
    """Returns violations in the waits of counters' clients, and the operations to check, with the permits of jobs."""
    slow = {one.client for one in history if ends.may_be_slow(one.client)}
    lines = Lines(history)
    wrong = list(kept_too_long(lines, samples, ends))
    seen_ns = {client: closed.ended or ends.settled_ns for client, closed in lines.closed.items()}
    history = [with_resumed_end(operation, lines, samples, ends) for operation in history]
    lent = loans.lent(workers)
    wrong += mistakes([*history, *loans.as_acquires(lent, SWEPT_NS)], late_ns=SWEPT_NS, slow=slow)
    history = [*history, *seen(history, samples), *lent]
    history = takes.prepared(history, late_ns=SWEPT_NS, slow=slow, seen_ns=seen_ns)
    return wrong, list(loans.excused(history, loans.gates(workers)))


def gates(recorded: Iterable[Operation], ends: Ends) -> tuple[list[str], int]:
    """Returns violations in the control messages to gatekeepers, and the number of identifiers in them."""
    by_client: dict[int, list[Operation]] = collections.defaultdict(list)
    for operation in recorded:
        if ends.workers[worker_of(operation.client)].slot.dialect in smockron_daemon.DIALECTS:
            by_client[operation.client].append(operation)
    history = [*ends.falls, *ends.limits]
    for client, operations in by_client.items():
        calls = [operation for operation in operations if not isinstance(operation.call, Closed)]
        if calls:
            history += [*calls, closing(client, operations, (), ends)]
    deaf = [client for client in by_client if ends.may_be_slow(client)]
    wall_ns = time.time_ns() - time.monotonic_ns()
    history.sort(key=lambda operation: operation.started)
    violations = smockron.unexplained(history, wall_ns, slack_ns=SLACK_NS, deaf=deaf)
    told = {operation.call[:2] for operation in history if isinstance(operation.call, smockron.Account)}
    return [f"{smockron_daemon.DIALECT}: {text}" for text in violations], len(told)


def complaints(ends: Ends) -> Iterable[list[Any]]:
    """Yields the clients' reports of what should not have happened."""
    for worker in ends.workers.values():
        for line in worker.said:
            if line[0] == "wrong" or (line[0] in ("lost", "owed") and not ends.may_be_lost(line[1])):
                yield line


def closing(client: int, operations: Sequence[Operation], samples: Sequence[Sample], ends: Ends) -> Operation:
    """The end of a connection.

    It may have begun when the client, or the process that killed it, says; where the link was disturbed, or the client
    does not know why it ended, even before; but never before the last answered request was sent.
    """
    answered = [operation for operation in operations if operation.answer is not None]
    last_ns = max((operation.started for operation in answered), default=operations[0].started)
    said = [operation.started for operation in operations if isinstance(operation.call, Closed)]
    worker = ends.workers[worker_of(client)]
    if worker.killed_ns is not None:
        said.append(worker.killed_ns)
    if ends.is_far(client) and ends.disturbed_ns is not None:
        said.append(ends.disturbed_ns)
    if any(line[0] == "lost" and line[1] == client for line in worker.said):
        said.append(last_ns)
    assert said, f"nobody says when client {client} ended"
    started = max(min(said), last_ns)
    name = dialects.sign_of_life(client)
    # The first thing that a client of the counter protocol records is that it takes it; others had it before.
    given = max((o.started for o in operations if isinstance(o.call, Goodbye)), default=0)
    granted = [
        o.ended for o in answered
        if isinstance(o.call, counter.Acquire) and o.call.name == name and o.started > given and o.answer[0] == 0
    ]  # fmt: skip
    if granted or worker.slot.dialect != "counter":
        for sample in samples:
            if sample.asked_ns > max([started, *granted]) and sample.settled_ns and sample.lacks(name):
                return Operation(client, Closed(), started, sample.settled_ns)
    return Operation(client, Closed(), started, ends.settled_ns)


def with_resumed_end(operation: Operation, lines: Lines, samples: Sequence[Sample], ends: Ends) -> Operation:
    """The end of a connection that another one has resumed: its sign of life says nothing any more.

    On this host it was closed before its successor was answered, or soon after that. Once the server has answered
    others again and again, it has read all that was sent before.
    """
    successor = lines.successors.get(operation.client)
    if successor is None or not isinstance(operation.call, Closed):
        return operation
    closed_ns = max(successor.ended or 0, operation.started)
    later = [sample.ended_ns for sample in samples if sample.asked_ns > closed_ns]
    is_seen = len(later) >= SEEN and not ends.is_far(operation.client)
    return operation._replace(ended=later[SEEN - 1] if is_seen else ends.settled_ns)


def kept_too_long(lines: Lines, samples: Sequence[Sample], ends: Ends) -> Iterable[str]:
    """Permits that killed local clients still had in Dumps that were requested long after their grace time.

    Only a Dump counts: a client that never took its sign of life, or gave it back, is not visible. And several Dumps
    have to show it: the first may be answered by a daemon that did not run in all that time.
    """
    for client, closed in lines.closed.items():
        worker = ends.workers[worker_of(client)]
        may_be_resumed = client in lines.successors or any(may_resume(one) for one in lines.presented.get(client, ()))
        if worker.killed_ns is None or ends.is_far(client) or may_be_resumed:
            continue
        over = max(worker.killed_ns, closed.started) + lines.graces[client].most + 2 * SWEPT_NS
        name = dialects.sign_of_life(client)
        shown = [sample.asked_ns - over for sample in samples if sample.asked_ns > over and not sample.lacks(name)]
        if len(shown) >= SEEN:
            yield f"{closed} was held {shown[SEEN - 1]} ns too long, {lines.graces[client]}"


def granted_twice(history: Iterable[Operation]) -> Iterable[str]:
    """Tokens that were granted twice, of whatever flows."""
    granted = collections.Counter(
        operation.answer[1]
        for operation in history
        if isinstance(operation.call, sentinel.Acquire) and operation.answer is not None and not operation.answer[0]
    )
    return [f"sentinel: token {token} was granted {count} times" for token, count in granted.items() if count > 1]


def seen(history: Iterable[Operation], samples: Iterable[Sample]) -> Iterable[Operation]:
    """A Dump of a name as the Get that may have been executed during it, with 0 for a missing name."""
    history = list(history)
    asked = (operation.call for operation in history if isinstance(operation.call, counter.Acquire | takes.Take))
    names = {name for call in asked for kind, name in takes.parts_of(call) if kind == takes.PERMITS}
    wanted = names & (HOT.keys() | {name for name in names if name.startswith((b"cold", b"team"))})
    wanted |= {dialects.sign_of_life(one.client) for one in history if isinstance(one.call, Resume)} & names
    for sample in samples:
        for name in wanted:
            consumption = sample.consumptions.get(name)
            answer = NOT_FOUND if consumption is None else (0, consumption)
            yield Operation(MONITOR, counter.Get(name), sample.asked_ns, sample.ended_ns, answer)


def left(history: Iterable[Operation], listing: Listing) -> list[Operation]:
    """A listing of a job as the Peek that may have been executed during it."""
    return [
        Operation(
            MONITOR, beanstalk.Peek(job), listing.asked_ns, listing.ended_ns,
            ("FOUND" if job in listing.ids else "NOT_FOUND", None, b""),
        )
        for job in set(beanstalk.known_ids(history).values())
    ]  # fmt: skip


def checked(history: Iterable[Operation], model: Any) -> tuple[list[str], int, int]:
    """Returns violations, and the numbers of objects and of undecided ones. Each object is checked separately, so that
    one that is too hard does not prevent the others.
    """
    closings = {operation.client: operation for operation in history if isinstance(operation.call, Closed)}
    by_name: dict[Any, list[Operation]] = collections.defaultdict(list)
    for operation in history:
        if not isinstance(operation.call, Closed):
            by_name[model.key(operation.call)].append(operation)
    violations, undecided = [], 0
    for operations in by_name.values():
        clients = {operation.client for operation in operations} & closings.keys()
        try:
            violation = check(
                [*operations, *(closings[client] for client in clients)], model, configurations_max=CONFIGURATIONS_MAX
            )
        except Undecided:
            undecided += 1
            continue
        if violation is not None:
            violations.append(str(violation))
    return violations, len(by_name), undecided
