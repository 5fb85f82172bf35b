"""Jobs with permits: what beanstalk workers and counter clients see of the same counters, as one history.

    operations = load(paths)                                      # of both protocols, on one clock
    assert check(jobs(operations), JobModel(...)) is None         # beanstalk.py: each job by itself
    history = prepared([*counter_calls, *lent(operations)])
    assert check(excused(history), LentModel(history, gates(operations), late_ns=...)) is None

`lent` says what the calls of workers mean for the counters: a reserved job has a permit (`Lend`), a delete, release or
bury gives it back (`Return`), a touch keeps it (`Renew`). The end of the worker's connection and the end of the time to
run give it back too; the latter is no call, so the model tries, for each call within which it may be, whether it was.

What is exact: a job is reserved only if the counter has room for its maximum; its permit counts as long as it is
reserved and no longer, and is given back once, as far as the moments of the calls are known. Whether a job's reserve
or a client had to be refused is not said: jobs wait in the counter's queue, which nobody sees, so a refusal of what is
there is believed of counters that jobs use (`excused`). Which job it was that a worker was given and never told of is
not known either: it may be any of its tube.

A permit that the queue gives to jobs for which no worker waits any more is given back in the next turn. So while there
are reserves that were given nothing, one permit more than is known may be held for each tube (`gates`).

After a restart of the daemon (Restarted) nobody has anything but jobs: those that were reserved, or may have been as
far as the journal is concerned, have their permits until their time to run is over at the latest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations, product
from typing import TYPE_CHECKING, NamedTuple

from history import beanstalk
from history.counter import NOT_AVAILABLE, OK, Acquire, Get, changed, held
from history.leases import clock_of
from history.operations import Closed, Operation
from history.resumptions import Goodbye
from history.takes import LOANS, PERMITS, Take, TakeModel, value_of, with_value

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

    from history.leases import Clock, Span
    from history.takes import Group, Part

LENDER, GATE = -1, -2  # that holds all permits of jobs, and those for which no worker is there
ANYBODY = beanstalk.ANYBODY
UNKNOWN = beanstalk.UNKNOWN
DONE = (OK, None)
NS_PER_S = 1_000_000_000


class Lend(NamedTuple):
    """A job is reserved. job: UNKNOWN if the worker got no answer. ttr_ns: the span in which its time to run lies."""

    name: bytes
    maximum: int
    job: int
    ttr_ns: Span


class Return(NamedTuple):
    """A job is deleted, released or buried."""

    name: bytes
    job: int


class Renew(NamedTuple):
    """A job is touched."""

    name: bytes
    job: int
    ttr_ns: Span


class Restart(NamedTuple):
    """The daemon is killed, and another one begins."""

    name: bytes


LOAN_CALLS = (Lend, Return, Renew, Restart)


class Loan(NamedTuple):
    """A permit that a reserved job has. client: its worker, or ANYBODY. ends: when its time to run ends.

    is_over: the permit was given back, but after a restart the journal may say that it was not.
    """

    job: int
    client: int
    ends: Span
    is_over: bool = False


# ---- before the search ----------------------------------------------------------------------------------------------


def lent(operations: Iterable[Operation]) -> list[Operation]:
    """The workers' calls, translated to operations on the counters of their jobs; and the ends of their connections."""
    operations = list(operations)
    ids = beanstalk.known_ids(operations)
    puts = {ids[one.call.body]: one.call for one in operations if is_limited(one) and one.call.body in ids}
    tubes: dict[tuple[bytes, bytes], list[beanstalk.Put]] = defaultdict(list)
    for one in filter(is_limited, operations):
        tubes[one.call.tube, one.call.counter].append(one.call)
    names = sorted({put.counter for put in puts.values()})
    found = []
    for one in operations:
        call, answer = one.call, one.answer
        if isinstance(call, Closed):
            found.append(one)
        elif isinstance(call, beanstalk.Restarted):
            found += [one._replace(call=Restart(name), answer=DONE) for name in names]
        elif isinstance(call, beanstalk.Reserve) and answer is None:
            for (tube, name), jobs in tubes.items():
                if tube == call.tube:
                    ttrs = [ttr_ns(job)[0] for job in jobs]
                    most = max(job.maximum for job in jobs)
                    found.append(one._replace(call=Lend(name, most, UNKNOWN, (min(ttrs), max(ttrs)))))
        elif (put := puts.get(answer[1] if isinstance(call, beanstalk.Reserve) else getattr(call, "job", 0))) is None:
            continue
        elif isinstance(call, beanstalk.Reserve):
            found.append(one._replace(call=Lend(put.counter, put.maximum, answer[1], ttr_ns(put)), answer=DONE))
        elif answer is None or answer[0] in beanstalk.ACKNOWLEDGED:
            told = None if answer is None else DONE
            if isinstance(call, beanstalk.Touch):
                found.append(one._replace(call=Renew(put.counter, call.job, ttr_ns(put)), answer=told))
            elif isinstance(call, beanstalk.Delete | beanstalk.Release | beanstalk.Bury):
                found.append(one._replace(call=Return(put.counter, call.job), answer=told))
    return found


def is_limited(one: Operation) -> bool:
    return isinstance(one.call, beanstalk.Put) and bool(one.call.counter)


def gates(operations: Iterable[Operation]) -> dict[bytes, int]:
    """By counter, the number of tubes whose jobs may have waited for a permit while no worker waited for them."""
    operations = list(operations)
    asked = {
        one.call.tube for one in operations
        if isinstance(one.call, beanstalk.Reserve) and (one.answer is None or one.answer[0] != "RESERVED")
    }  # fmt: skip
    found = {(one.call.counter, one.call.tube) for one in filter(is_limited, operations) if one.call.tube in asked}
    return Counter(counter for counter, _ in found)


def ttr_ns(put: beanstalk.Put) -> Span:
    return (max(put.ttr, 1) * NS_PER_S,) * 2


def excused(history: Iterable[Operation], gates: Iterable[bytes] = ()) -> Iterator[Operation]:
    """The history without the refusals that a waiting job may have caused: see above. gates: counters for which a job
    may have waited.
    """
    history = list(history)
    names = {one.call.name for one in history if isinstance(one.call, Lend)}.union(gates)
    for one in history:
        call = one.call
        is_refused = one.answer is not None and one.answer[0] == NOT_AVAILABLE
        if is_refused and isinstance(call, Acquire) and call.name in names:
            continue
        if is_refused and isinstance(call, Take) and call.items[one.answer[1][0]][0] in names:
            one = one._replace(call=call._replace(awaited=True))  # noqa: PLW2901 - the same call
        yield one


def as_acquires(history: Sequence[Operation], late_ns: int) -> Iterator[Operation]:
    """The jobs' permits as Acquires of clients that die, for waiting.mistakes(): each permit is held as long as it can
    have been.
    """
    closed = {one.client: one for one in history if isinstance(one.call, Closed)}
    number = -2
    for one in history:
        if not isinstance(one.call, Lend):
            continue
        last = NS_PER_S << 32 if one.ended is None else one.ended + one.call.ttr_ns[1] + late_ns
        for other in history:
            call, ended = other.call, other.ended
            if isinstance(call, Renew) and call.job == one.call.job and other.started >= one.started:
                last = max(last, (NS_PER_S << 32 if ended is None else ended) + call.ttr_ns[1] + late_ns)
        ends = [
            other.ended for other in history
            if isinstance(other.call, Return) and other.call.job == one.call.job and other.answer is not None
            and other.started >= one.started and other.ended is not None
        ]  # fmt: skip
        if one.client in closed and closed[one.client].ended is not None:
            ends.append(closed[one.client].ended)
        yield Operation(number, Acquire(one.call.name, 1, one.call.maximum), one.started)
        yield Operation(number, Closed(), one.started, max(one.started, min([last, *ends])))
        number -= 1


# ---- the model ------------------------------------------------------------------------------------------------------


class LentModel(TakeModel):
    """Model of counters whose permits jobs take.

    gates: as gates() returns them. late_ns: how late a time to run may end. slack_ns: how far outside of the call the
    server's time of it may lie. journal: as in JobModel.
    """

    def __init__(
        self,
        history: Iterable[Operation],
        gates: Mapping[bytes, int],
        *,
        late_ns: int,
        slack_ns: int = 0,
        journal: bool = False,
    ) -> None:
        history = list(history)
        super().__init__(history)
        self.gates = gates
        self.names = {one.call.name for one in history if isinstance(one.call, LOAN_CALLS)} | gates.keys()
        self.late_ns, self.slack_ns, self.journal = late_ns, slack_ns, journal

    def leaves(self, operation: Operation) -> frozenset[Part]:
        is_loan = isinstance(operation.call, Lend | Renew)
        return self.parts(operation) if is_loan else super().leaves(operation)

    def observes(self, operation: Operation) -> bool:
        return not isinstance(operation.call, LOAN_CALLS) and super().observes(operation)

    def alike(self, operation: Operation) -> Hashable | None:
        return None if isinstance(operation.call, LOAN_CALLS) else super().alike(operation)

    def step(self, state: Group, operation: Operation) -> Iterable[Group]:
        clock = clock_of(operation, self.slack_ns, self.late_ns)
        call = operation.call
        parts = [call.part] if isinstance(call, Closed | Goodbye) else self.parts(operation)
        names = [name for kind, name in parts if kind == PERMITS and name in self.names]
        if not names:
            return super().step(state, operation)
        tells = [name for name in names if isinstance(call, Acquire | Get | Take) and self.gates.get(name)]
        found: set[Group] = set()
        fewest = 0
        for gone, before in timed(state, names, clock, may_end=isinstance(call, Acquire | Get | Take | Lend)):
            if found and gone > fewest:
                break
            fewest = gone
            for counts in product(*(range(self.gates[name] + 1) for name in tells)):
                more = dict(zip(tells, counts, strict=True))
                after = self._step(with_gates(before, more), operation, clock)
                found.update(with_gates(each, more, -1) for each in after)
        if found and not isinstance(call, Closed) and self.observes(operation):
            return (state,)
        return found

    # ---- inside ----

    def _step(self, state: Group, operation: Operation, clock: Clock) -> Iterable[Group]:
        call = operation.call
        if isinstance(call, Closed) and call.part[0] == PERMITS:
            for loan in loans_of(state, call.part[1]):
                if loan.client == operation.client:
                    state = self._ended(state, call.part[1], loan)
        if isinstance(call, Restart):
            return (restarted(state, call.name, clock),)
        if isinstance(call, Lend | Renew):
            return self._lent(state, operation, clock)
        return self._returned(state, operation) if isinstance(call, Return) else super().step(state, operation)

    def _lent(self, state: Group, operation: Operation, clock: Clock) -> Iterable[Group]:
        """The state after a job was reserved or touched."""
        call, client = operation.call, operation.client
        mine = find(state, call)
        loan = Loan(call.job, client, (clock.first + call.ttr_ns[0], clock.last + call.ttr_ns[1]))
        if isinstance(call, Renew):
            is_held = mine is not None and mine.client in (client, ANYBODY)
            return (replaced(state, call.name, mine, loan),) if is_held and mine is not None else ()
        is_room = value_of(state, (PERMITS, call.name))[0] < call.maximum
        return (given(state, call.name, loan),) if is_room and (mine is None or call.job == UNKNOWN) else ()

    def _returned(self, state: Group, operation: Operation) -> Iterable[Group]:
        """The state after a job was deleted, released or buried by its worker, or by the worker's successor."""
        call = operation.call
        mine = find(state, call)
        if mine is not None and mine.client not in (operation.client, ANYBODY):
            return ()
        if operation.answer is None:
            return (state if mine is None else self._ended(state, call.name, mine),)
        for loan in loans_of(state, call.name):
            if loan.job == call.job:
                state = replaced(state, call.name, loan, None)
        return (state,)

    def _ended(self, state: Group, name: bytes, loan: Loan) -> Group:
        """The state after a permit was given back without an acknowledgement."""
        return replaced(state, name, loan, loan._replace(is_over=True) if self.journal else None)


def loans_of(state: Group, name: bytes) -> tuple[Loan, ...]:
    found: tuple[Loan, ...] = value_of(state, (LOANS, name))
    return found


def find(state: Group, call: Lend | Renew | Return) -> Loan | None:
    """The permit that a job has."""
    return next((loan for loan in loans_of(state, call.name) if loan.job == call.job and not loan.is_over), None)


def timed(state: Group, names: Sequence[bytes], clock: Clock, *, may_end: bool) -> Iterator[tuple[int, Group]]:
    """The states that are possible within a call: how many loans end by their time to run, and the state then; the
    fewest first.

    A loan whose time may be over can also end later, within any call. So it need not end within a call for which that
    makes no difference (may_end), nor if fewer ends explain the answer.
    """
    choices = []
    for name in names:
        for loan in loans_of(state, name):
            if clock.has_been_swept(loan.ends):
                state = replaced(state, name, loan, None)
            elif clock.may_be_over(loan.ends) and not loan.is_over:
                choices.append((name, loan))
    for count in range(len(choices) + 1 if may_end else 1):
        for gone in combinations(choices, count):
            after = state
            for name, loan in gone:
                after = replaced(after, name, loan, None)
            yield count, after


def with_gates(state: Group, more: Mapping[bytes, int], by: int = 1) -> Group:
    """The state with so many more permits, or fewer, that are taken for a tube without a waiting worker."""
    for name, count in more.items():
        part = PERMITS, name
        state = with_value(state, part, changed(value_of(state, part), GATE, by * count))
    return state


def given(state: Group, name: bytes, loan: Loan) -> Group:
    """The state with one more loan, which replaces what the journal may have of its job."""
    for old in loans_of(state, name):
        if old.job == loan.job and old.is_over:
            state = replaced(state, name, old, None)
    return with_loans(state, name, (*loans_of(state, name), loan))


def replaced(state: Group, name: bytes, loan: Loan, by: Loan | None) -> Group:
    loans = list(loans_of(state, name))
    loans.remove(loan)
    return with_loans(state, name, (*loans, *([] if by is None else [by])))


def with_loans(state: Group, name: bytes, loans: Sequence[Loan]) -> Group:
    part = PERMITS, name
    counter = value_of(state, part)
    count = sum(not loan.is_over for loan in loans)
    state = with_value(state, part, changed(counter, LENDER, count - held(counter[1], LENDER)))
    return with_value(state, (LOANS, name), tuple(sorted(loans)))


def restarted(state: Group, name: bytes, clock: Clock) -> Group:
    """The state after a restart: clients hold nothing, and a job's permit may be lent until its time to run is over."""
    state = with_value(state, (PERMITS, name), (0, ()))
    loans = loans_of(state, name)
    state = with_value(state, (LOANS, name), ())
    return with_loans(state, name, [Loan(loan.job, ANYBODY, (clock.first, loan.ends[1])) for loan in loans])
