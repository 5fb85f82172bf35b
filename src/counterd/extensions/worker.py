"""The threads that an extension works in: jobs, one after the other, for which nobody ever waits.

Floor 4. An extension is somebody else's code. It may block, loop, raise or return anything, and the engine goes on:
jobs wait in a bounded queue, each has a time limit, and whoever asked is answered by the engine if that is over. A
thread that is stuck in a job is given up and gets a successor, up to STUCK_MAX; after that jobs are refused
until one comes back, and at once if it computes: a second one that does would take twice as much of the interpreter
from those who are served. Threads are daemons: none keeps the process.

What no thread can help against is native code that keeps the interpreter's lock; systemd's watchdog does.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.contract import Busy
from counterd.control.files import problems_of
from counterd.control.log import TRACEBACK_MAX

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    # Told a cause that repeats, a sentence, and fields of the line.
    Report = Callable[..., None]
    Then = Callable[[Any, int], None]

WAITING_MAX = 4096  # jobs: more than a thread does within any time limit
STUCK_MAX = 4  # threads; each costs its stack, and the time it may burn
SLICE_NS = 250_000  # of outcomes, on the loop's thread, in one go
BURNING = 0.5  # of a core
TEXT_MAX = 1000  # characters of what an error says


class Failed(Exception):
    """What a job raised, in words, made in its thread: an error's words are its author's code, as the job is.

    lines: for people. trace: the end of its traceback.
    """

    def __init__(self, text: str, lines: list[str], trace: str) -> None:
        super().__init__(text)
        self.lines = lines
        self.trace = trace


def failed(error: BaseException) -> Failed:
    """That error, whatever becomes of asking it."""
    try:
        trace = "".join(traceback.format_exception(error)).rstrip("\n")[-TRACEBACK_MAX:]
        return Failed(f"{type(error).__name__}: {error}"[:TEXT_MAX], lines_of(error), trace)
    except BaseException:  # noqa: BLE001 - as with the job
        text = "an error whose text cannot be shown"
        return Failed(text, [text], text)


def lines_of(error: BaseException) -> list[str]:
    """What is said of an error: its problems, if it has some."""
    if isinstance(error, ValueError) and hasattr(error, "problems"):
        return [f"{line}"[:TEXT_MAX] for line in problems_of(error)]
    return [described(error)]


def described(error: BaseException) -> str:
    """An error of somebody else's code: its type, what it says, and where it happened."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f", in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}"[:TEXT_MAX] + place


class Job(NamedTuple):
    """What is to be done. call: its name, for people. then: told the outcome. due_ns: when nobody waits any more."""

    call: str
    run: Callable[[], Any]
    then: Then
    due_ns: int


def outcome_of(job: Job) -> Any:
    """What it returns; or Failed."""
    try:
        return job.run()
    except BaseException as error:  # noqa: BLE001 - whatever it is, sys.exit() too, it is somebody else's
        return failed(error)


class Thread:
    """One of the threads. `job` is what it is at, which only it sets; `clock` that of the CPU time it has had."""

    def __init__(self, work: Callable[[Thread], None], name: str) -> None:
        self.job: Job | None = None
        self.last = ""  # the call it was at last
        self.given_up = False
        self.clock: int | None = None
        self._begun_s = self._seen_s = 0.0  # of CPU, when the job began, and when last looked
        threading.Thread(target=work, args=(self,), name=name, daemon=True).start()

    def begin(self, job: Job) -> None:
        """For the thread itself."""
        self._begun_s = time.thread_time()
        self.last, self.job = job.call, job

    def burnt(self) -> float:
        """Seconds of CPU since this was last asked."""
        before, self._seen_s = self._seen_s, self._cpu()
        return self._seen_s - before

    def burnt_in_job(self) -> float:
        """Seconds of CPU since the job began."""
        return self._cpu() - self._begun_s

    def _cpu(self) -> float:
        try:
            return time.clock_gettime(self.clock) if self.clock is not None else 0.0
        except OSError:  # it has ended
            return self._seen_s


class Worker:
    """The threads of one extension.

    name: of the extension, for people. limit: seconds that a job may wait, and may take. report: see Daemon.report.
    All methods are for the loop's thread.
    """

    def __init__(self, name: str, limit: float, report: Report) -> None:
        self.name = name
        self.limit = limit
        self.report = report
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._outcomes: deque[tuple[Job, Any]] = deque()
        # Guards who works, who is given up, and whether the loop knows of outcomes; never held while a job runs.
        self._lock = threading.Lock()
        self._told = False
        self._active: Thread | None = None
        self._stuck: set[Thread] = set()
        self._late = 0  # jobs that were not begun in time
        self._late_told = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop
        self._wake: Callable[[], None]

    def start(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Begins to work. wake: called after outcomes were told."""
        self._loop, self._wake = loop, wake
        self._active = self._thread()

    def ask(self, call: str, job: Callable[[], Any], then: Then) -> None:
        """See contract.Plugin.ask; what the job raises is logged."""

        def done(outcome: Any, now_ns: int) -> None:
            if isinstance(outcome, Failed):
                self.report("failed", f"{self.name}: {call} failed: {outcome}", "error", exc=outcome.trace)
            then(outcome, now_ns)

        self.submit(call, job, done)

    def submit(self, call: str, job: Callable[[], Any], then: Then) -> None:
        """The same, and nothing is logged of what it raises."""
        one = Job(call, job, then, time.monotonic_ns() + int(self.limit * 1e9))
        if self._active is None or self._jobs.qsize() >= WAITING_MAX:
            error = Busy(self._why_busy())
            self.report("busy", f"{self.name}: {call} was refused: {error}")
            self._told_of(one, error)
        else:
            self._jobs.put(one)

    def inspect(self, now_ns: int) -> None:
        """Gives up a thread that is stuck, and tells of jobs that took or waited too long; for a timer."""
        thread = self._active
        job = thread.job if thread is not None else None
        if thread is not None and job is not None and job.due_ns <= now_ns:
            self._give_up(thread, job)
        if self._late != self._late_told:
            text = f"{self.name}: overloaded: {self._late - self._late_told} calls"
            self.report("late", f"{text} did not start within {self.limit * 1000:g} ms")
            self._late_told = self._late

    def burns(self, period: float) -> None:
        """Tells if more than half of a period, in seconds, went into its threads; to be called once in each."""
        threads = [thread for thread in (self._active, *self._stuck) if thread is not None]
        spent = {thread: thread.burnt() for thread in threads}
        if sum(spent.values()) <= BURNING * period:
            return
        busiest = max(spent, key=lambda thread: spent[thread])
        job = busiest.job
        call = job.call if job is not None else busiest.last
        figures = f"{sum(spent.values()):.2f} s in the last {period:.1f} s"
        self.report("cpu", f"{self.name} uses much CPU in {call}: {figures}")

    def stop(self) -> None:
        """Begins nothing any more, and tells nobody what comes of the rest."""
        self._closed = True
        self._active = None
        for _ in range(STUCK_MAX + 1):
            self._jobs.put(None)

    # ---- inside ----

    def _thread(self) -> Thread:
        return Thread(self._work, self.name)

    def _why_busy(self) -> str:
        if self._active is not None:
            return f"{WAITING_MAX} calls are waiting already"
        calls = sorted({thread.job.call for thread in self._stuck if thread.job is not None})
        return f"all of its threads are stuck in {', '.join(calls)}"

    def _give_up(self, thread: Thread, job: Job) -> None:
        with self._lock:
            if thread.job is not job:
                return  # it has just come back
            thread.given_up = True
            self._stuck.add(thread)
            self._active = None
            if len(self._stuck) < STUCK_MAX and thread.burnt_in_job() <= BURNING * self.limit:
                with contextlib.suppress(RuntimeError):  # the system has no thread left
                    self._active = self._thread()
        text = f"{self.name}: {job.call} takes longer than {self.limit * 1000:g} ms"
        more = "" if self._active is not None else "; it gets no further calls until one returns"
        self.report("stuck", f"{text}; stuck threads: {len(self._stuck)}{more}")

    def _told_of(self, job: Job, outcome: Any) -> None:
        """Has job.then called on the loop's thread; from any."""
        self._outcomes.append((job, outcome))
        self._schedule()

    def _schedule(self) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told and not self._closed:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop was closed meanwhile, and so will be the process
                self._closed = True

    def _deliver(self) -> None:
        with self._lock:
            self._told = False
        begun = now = time.monotonic_ns()
        try:
            while self._outcomes and not self._closed and now - begun < SLICE_NS:
                job, outcome = self._outcomes.popleft()
                job.then(outcome, now)
                now = time.monotonic_ns()
        finally:
            if self._outcomes:
                self._schedule()
            self._wake()

    # ---- in the threads ----

    def _work(self, thread: Thread) -> None:
        # By itself: of a thread that has ended there is no asking, a number of its clock is harmless.
        thread.clock = time.pthread_getcpuclockid(threading.get_ident())
        while (job := self._jobs.get()) is not None and not self._closed:
            now_ns = time.monotonic_ns()
            if job.due_ns <= now_ns:
                self._late += 1
                continue
            thread.begin(job._replace(due_ns=now_ns + int(self.limit * 1e9)))
            outcome = outcome_of(job)
            goes_on = self._goes_on(thread)  # first: whoever is told may ask whether the thread is stuck
            self._told_of(job, outcome)
            if not goes_on:
                return

    def _goes_on(self, thread: Thread) -> bool:
        """Whether the thread is needed: one that was stuck is, if it has no successor."""
        with self._lock:
            thread.job = None
            if not thread.given_up:
                return True
            self._stuck.discard(thread)
            if self._active is not None or self._closed:
                return False
            thread.given_up = False
            self._active = thread
            return True
