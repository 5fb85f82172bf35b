"""The beanstalk protocol: docs/protocols/beanstalk.md as a model, a job at a time, and what there is of order.

Answers are (status, number, body), as wire.Reply has them: number of a Put or a Reserve is the job's id. Each body is
put once in a history, so a job is known by it whose put was never answered. A client uses and watches one tube.

    operations = load(paths)
    assert check(jobs(operations), JobModel(journal=True)) is None
    assert disorder(operations) == []

What is checked exactly, but for the moments of calls, which are known within each call:

- a job is with one worker at a time, and comes to the next only after a release, a kick, the end of its time to run, or
  the end of its worker; delays and times to run do not end early. By when they have ended at the latest is `late_ns`;
- who has not got a job can neither release, bury nor touch it, and what was deleted stays so: whatever was put is there
  when a Peek asks for it, so a history that ends with a Peek of every job has lost none;
- with a journal whose replies wait for the disk: after each `Restarted` a job is as it was last acknowledged, or as
  something later has made it that was not. What had a worker then is anybody's until its time to run ends.

Between jobs, `disorder` finds ids that were given twice, and reserves that took another job, or none, while there was
a better one that was certainly ready all the while. What a Reserve did that was never answered is not known: it may
have taken any job of its tube. Not modelled: kick, pauses, keys, limits of reserves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.beanstalk import wire
from counterd.protocols.beanstalk.wire import Status
from history.leases import NEVER, Span, clock_of
from history.model import Model
from history.operations import Closed, Operation

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from history.leases import Clock

__all__ = [
    "Bury", "Closed", "Delete", "JobModel", "KickJob", "Peek", "Put", "Release", "Reserve", "Restarted", "Touch",
    "disorder", "jobs", "request", "told",
]  # fmt: skip

READY, DELAYED, RESERVED, BURIED = "ready", "delayed", "reserved", "buried"
NS_PER_S = 1_000_000_000
ALWAYS = (0, NEVER)  # a span of which nothing is known
UNKNOWN = 0  # the id of a job whose put was not answered; no job has it
ANYBODY = -1  # the holder of a job whose worker was lost with the daemon
NOT_FOUND, REFUSED = "NOT_FOUND", "INTERNAL_ERROR"
ACKNOWLEDGED = {"INSERTED", "DELETED", "RELEASED", "BURIED", "TOUCHED", "KICKED"}

Answer = tuple[str, "int | None", bytes]


class Put(NamedTuple):
    """A put. job: the job's id, which jobs() fills in, as the client does not know it beforehand. counter, maximum: of
    a job that takes a permit (loans.py).
    """

    tube: bytes
    priority: int
    delay: int
    ttr: int
    body: bytes
    job: int = UNKNOWN
    counter: bytes = b""
    maximum: int = 0


class Reserve(NamedTuple):
    """A reserve-with-timeout. job: the reserved job's id, which jobs() fills in."""

    tube: bytes
    timeout: int
    job: int = UNKNOWN


class Delete(NamedTuple):
    job: int


class Release(NamedTuple):
    job: int
    priority: int
    delay: int


class Bury(NamedTuple):
    job: int
    priority: int


class Touch(NamedTuple):
    job: int


class KickJob(NamedTuple):
    job: int


class Peek(NamedTuple):
    job: int


class Restarted(NamedTuple):
    """A kill of the daemon and its restart with the same journal, as an operation on a job."""

    job: int = UNKNOWN


class Job(NamedTuple):
    """A job that exists. holder: the client that has reserved it. ends: the span in which its delay or its time to run
    ends.

    since: the earliest time at which it can have come into this state.
    """

    state: str
    ttr_ns: int
    body: bytes
    since: int
    holder: int = 0
    ends: Span = ALWAYS

    def ready(self, since: int) -> Job:
        return self._replace(state=READY, since=since, holder=0, ends=ALWAYS)


class State(NamedTuple):
    """The state of one id. job: None before the put and after the deletion. written: the states that the journal may
    still have in place of this one.
    """

    job: Job | None = None
    written: tuple[Job | None, ...] = ()


class JobModel(Model):
    """Model of a job, for the operations that jobs() returns.

    late_ns: how late a delay or a time to run may end. slack_ns: how far outside of the call the server's time of it
    may lie. journal: whether the history may contain Restarted, which acknowledged changes survive.
    """

    def __init__(self, *, late_ns: int, slack_ns: int = 0, journal: bool = False) -> None:
        self.late_ns = late_ns
        self.slack_ns = slack_ns
        self.journal = journal

    def key(self, call: Any) -> Hashable:
        return call.job

    def initial(self) -> State:
        return State()

    def step(self, state: State, operation: Operation) -> Iterable[State]:
        call, clock = operation.call, clock_of(operation, self.slack_ns, self.late_ns)
        if isinstance(call, Restarted):
            return {State(restored(job)) for job in (state.job, *state.written)}
        if isinstance(call, Closed):
            job = state.job
            if job is None or job.state != RESERVED or job.holder != operation.client:
                return (state,)
            return (self._changed(state, job, job.ready(max(clock.first, job.since)), acknowledged=False),)
        found = set()
        for before in self._at(state.job, clock):
            for status, after in outcomes(before, operation, clock):
                if operation.answer is None or operation.answer[0] == status:
                    is_sure = operation.answer is not None and not isinstance(call, Reserve) and status in ACKNOWLEDGED
                    found.add(self._changed(state, before, after, acknowledged=is_sure))
        return found

    def observes(self, operation: Operation) -> bool:
        """A Peek. Not a NOT_FOUND to another command: the job's time to run may have ended in that very call."""
        return operation.answer is not None and isinstance(operation.call, Peek)

    def describe(self, state: State) -> str:
        text = "no such job" if state.job is None else str(state.job)
        return text + (f", or after a crash one of {state.written}" if state.written else "")

    # ---- inside ----

    def _at(self, job: Job | None, clock: Clock) -> Iterator[Job | None]:
        """The states that the job may be in during an operation: as before, or with its delay or time to run over."""
        if job is None:
            yield None
            return
        if job.since > clock.last:
            return
        if job.state in (READY, BURIED):
            yield job
            return
        if not clock.has_been_swept(job.ends):
            yield job
        if clock.may_be_over(job.ends):
            yield job.ready(max(job.since, job.ends[0], clock.first))

    def _changed(self, state: State, before: Job | None, after: Job | None, *, acknowledged: bool) -> State:
        if not self.journal or acknowledged:
            return State(after)
        earlier = dict.fromkeys((*state.written, restored(state.job), restored(before)))
        return State(after, tuple(earlier))


DONE = {Delete: "DELETED", Release: "RELEASED", Bury: "BURIED", Touch: "TOUCHED", KickJob: "KICKED"}


def restored(job: Job | None) -> Job | None:
    """The job as the daemon reads it back from its journal. When it came into its state is not known then."""
    return None if job is None else job._replace(holder=ANYBODY if job.state == RESERVED else 0, since=0)


def outcomes(job: Job | None, operation: Operation, clock: Clock) -> Iterator[tuple[str, Job | None]]:
    """The statuses with which a call can be answered, each with the job that it leaves."""
    call, answer = operation.call, operation.answer
    since = clock.first if job is None else max(job.since, clock.first)
    if isinstance(call, Put):
        if job is None:
            new = Job(READY, max(call.ttr, 1) * NS_PER_S, call.body, since)
            yield REFUSED if answered(operation, REFUSED) else "INSERTED", waiting(new, call.delay, since, clock)
    elif isinstance(call, Reserve):
        if job is not None and job.state == READY and (answer is None or answer[2] == job.body):
            ends = since + job.ttr_ns, clock.last + job.ttr_ns
            yield "RESERVED", job._replace(state=RESERVED, since=since, holder=operation.client, ends=ends)
    elif isinstance(call, Peek):
        yield (NOT_FOUND if job is None else "FOUND"), job
    elif answered(operation, REFUSED):  # nothing was done; or it was, and a crash may undo it
        yield REFUSED, job
        if job is not None and may_do(job, operation):
            yield REFUSED, done(job, operation, since, clock)
    elif job is None or not may_do(job, operation):
        yield NOT_FOUND, job
    else:
        yield DONE[type(call)], done(job, operation, since, clock)


def may_do(job: Job, operation: Operation) -> bool:
    """Whether this client may apply the operation's command to the job."""
    if isinstance(operation.call, KickJob):
        return job.state in (BURIED, DELAYED)
    if isinstance(operation.call, Delete) and job.state != RESERVED:
        return True
    return job.state == RESERVED and job.holder in (operation.client, ANYBODY)


def done(job: Job, operation: Operation, since: int, clock: Clock) -> Job | None:
    """The job after the command was applied."""
    call = operation.call
    if isinstance(call, Delete):
        return None
    if isinstance(call, Bury):
        return job.ready(since)._replace(state=BURIED)
    if isinstance(call, Touch):
        return job._replace(holder=operation.client, since=since, ends=(since + job.ttr_ns, clock.last + job.ttr_ns))
    return waiting(job.ready(since), call.delay if isinstance(call, Release) else 0, since, clock)


def waiting(job: Job, delay: int, since: int, clock: Clock) -> Job:
    """The job with a delay of so many seconds; ready at once without one."""
    ends = since + delay * NS_PER_S, clock.last + delay * NS_PER_S
    return job._replace(state=DELAYED, ends=ends) if delay else job


# ---- what each job has seen -----------------------------------------------------------------------------------------


def jobs(operations: Iterable[Operation]) -> list[Operation]:
    """The history with the job's id in each call. An operation that may concern several jobs appears once for each.

    Calls that were refused, and jobs of which there is no trace, are left out. Raises ValueError if a body was put
    twice.
    """
    operations = list(operations)
    ids = known_ids(operations)
    found: list[Operation] = []
    taken = []  # reserves that may have taken anything
    for operation in operations:
        call, answer = operation.call, operation.answer
        if isinstance(call, Put):
            if call.body in ids:
                found.append(operation._replace(call=call._replace(job=ids[call.body])))
        elif isinstance(call, Reserve):
            if answer is None:
                taken.append(operation)
            elif answer[0] == "RESERVED":
                found.append(operation._replace(call=call._replace(job=answer[1])))
        elif not isinstance(call, Restarted):
            found.append(operation)
    restarts = [operation for operation in operations if isinstance(operation.call, Restarted)]
    closed = {one.client: one.ended for one in operations if isinstance(one.call, Closed) and one.ended is not None}
    for job, (tube, first, last) in lives(found).items():
        # What is not answered may be why nothing is known of a job any more.
        may_be = [one for one in restarts if one.started <= last] + [one for one in taken if one.call.tube == tube]
        for operation in may_be:
            ends = closed.get(operation.client, NEVER) if operation.ended is None else operation.ended
            if ends >= first:
                found.append(operation._replace(call=operation.call._replace(job=job)))
    return found


def known_ids(operations: Iterable[Operation]) -> dict[bytes, int]:
    """The ids of jobs by their bodies, as told in the answers to Put or Reserve."""
    ids: dict[bytes, int] = {}
    bodies: Counter[bytes] = Counter()
    for operation in sorted(operations, key=lambda operation: isinstance(operation.call, Reserve)):
        call, answer = operation.call, operation.answer
        if isinstance(call, Put):
            bodies[call.body] += 1
            if bodies[call.body] > 1:
                raise ValueError(f"each body may be put once: {operation}")
            if answer is not None and answer[0] == "INSERTED":
                ids[call.body] = answer[1]
        elif isinstance(call, Reserve) and answer is not None and answer[0] == "RESERVED":
            ids.setdefault(answer[2], answer[1])
    return ids


def lives(operations: Iterable[Operation]) -> dict[int, tuple[bytes, int, int]]:
    """The tube of each job, and the first and last time at which an operation on it was under way."""
    found: dict[int, tuple[bytes, int, int]] = {}
    for operation in operations:
        if isinstance(operation.call, Closed):
            continue
        tube, first, last = found.get(operation.call.job, (b"", NEVER, 0))
        tube = getattr(operation.call, "tube", tube)
        last = max(last, operation.started if operation.ended is None else operation.ended)
        found[operation.call.job] = tube, min(first, operation.started), last
    return found


# ---- order ----------------------------------------------------------------------------------------------------------


class Certain(NamedTuple):
    """A span of time in which a job was certainly ready. rank: the job with the lowest is reserved first."""

    tube: bytes
    rank: tuple[int, int]
    first: int
    last: int


def disorder(operations: Sequence[Operation]) -> list[str]:
    """Complaints about ids that were given twice, and about reserves that passed over a more urgent job."""
    puts = Counter(one.answer[1] for one in operations if isinstance(one.call, Put) and answered(one, "INSERTED"))
    found = [f"id {job} was given to {count} jobs" for job, count in puts.items() if count > 1]
    by_job: dict[int, list[Operation]] = defaultdict(list)
    for operation in jobs(operations):
        if not isinstance(operation.call, Closed | Peek):
            by_job[operation.call.job].append(operation)
    certain: dict[bytes, list[Certain]] = defaultdict(list)
    for job, history in by_job.items():
        for one in certainly_ready(job, history):
            certain[one.tube].append(one)
    for operation in operations:
        call = operation.call
        if isinstance(call, Reserve) and operation.answer is not None:
            rank = rank_of(operation, by_job)
            for better in certain[call.tube]:
                if better.first < operation.started and operation.ended < better.last and better.rank < rank:
                    found.append(f"job {better.rank[1]} of priority {better.rank[0]} was passed over: {operation}")
                    break
    return found


def answered(operation: Operation, status: str) -> bool:
    return operation.answer is not None and operation.answer[0] == status


def certainly_ready(job: int, history: Sequence[Operation]) -> Iterator[Certain]:
    """The spans in which a job was ready: from the end of the call that made it ready to the start of the next call
    that may have changed it.
    """
    put = next((one.call for one in history if isinstance(one.call, Put)), None)
    if put is None or put.counter:  # then it may be blocked
        return
    for made in history:
        call = made.call
        if not (isinstance(call, Put) and answered(made, "INSERTED")) and not (
            isinstance(call, Release) and answered(made, "RELEASED")
        ):
            continue
        others = [one for one in history if one is not made and (one.ended is None or one.ended > made.started)]
        last = min((one.started for one in others), default=NEVER)
        if not call.delay and made.ended is not None and last > made.ended:
            yield Certain(put.tube, (call.priority, job), made.ended, last)


def rank_of(operation: Operation, by_job: dict[int, list[Operation]]) -> tuple[int, int]:
    """The lowest rank that the reserved job may have had; behind all others if none was reserved."""
    assert operation.answer is not None
    status, job, _ = operation.answer
    if status != "RESERVED":
        return (1 << 32, 0)
    ranked = [one for one in by_job[job] if isinstance(one.call, Put | Release | Bury)]
    before = [one.started for one in ranked if one.ended is not None and one.ended < operation.started
              and one.answer[0] in ACKNOWLEDGED]  # fmt: skip
    latest = max(before, default=0)
    possible = [one.call.priority for one in ranked if one.ended is None or one.ended >= latest]
    return (min(possible, default=0), job)


# ---- on the wire ----------------------------------------------------------------------------------------------------


def request(call: Any) -> bytes:
    """The bytes of the command. The client uses and watches the tube of the call."""
    if isinstance(call, Put) and call.counter:
        return wire.put_limited(
            call.body, call.counter, call.maximum, priority=call.priority, delay=call.delay, ttr=call.ttr
        )
    if isinstance(call, Put):
        return wire.put(call.body, call.priority, call.delay, call.ttr)
    if isinstance(call, Reserve):
        return wire.reserve(call.timeout)
    if isinstance(call, KickJob):
        return wire.kick_job(call.job)
    return getattr(wire, type(call).__name__.lower())(*call)


def told(reply: wire.Reply) -> Answer:
    """The answer, as histories have it, that a reply stands for. Only that of a Reserve has a body."""
    return reply.status.value, reply.number, reply.body if reply.status is Status.RESERVED else b""
