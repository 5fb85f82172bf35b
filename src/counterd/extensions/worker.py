"""The threads in which an extension runs. The threads execute jobs, one after the other. The event loop never waits for
a job.

Floor 5 (ARCHITECTURE.md). An extension is code of other people. The engine continues to work if this code blocks,
loops, raises an exception or returns anything: jobs wait in a bounded queue and have a time limit. When the time limit
of a job is over, the engine itself answers the request. If a thread is stuck in a job, a new thread replaces it, until
STUCK_MAX threads are stuck. After that, jobs are refused until a stuck thread returns. A stuck thread that computes is
not replaced: a second such thread would take twice as much of the interpreter's time from the clients. All these
threads are daemon threads: the process can end while they run.

If native code never releases the interpreter's lock, threads do not help; then systemd's watchdog restarts the daemon.
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

    # Called with a cause (repeated lines are limited for each cause), a sentence, and fields of the line.
    Report = Callable[..., None]
    Then = Callable[[Any, int], None]

WAITING_MAX = 4096  # jobs: more than a thread can do within any time limit
STUCK_MAX = 4  # threads; each costs its stack, and may use processor time
SLICE_NS = 250_000  # how long the loop's thread passes on outcomes in one turn
BURNING = 0.5  # the part of a core beyond which an extension is reported
TEXT_MAX = 1000  # characters of an error's message


class Failed(Exception):
    """The error of a job, as strings. The job's thread makes these strings, because that runs code of the extension.

    lines: the lines for people. trace: the end of the traceback.
    """

    def __init__(self, text: str, lines: list[str], trace: str) -> None:
        super().__init__(text)
        self.lines = lines
        self.trace = trace


def failed(error: BaseException) -> Failed:
    """Makes the Failed for an error, even if converting the error to a string raises another error."""
    try:
        trace = "".join(traceback.format_exception(error)).rstrip("\n")[-TRACEBACK_MAX:]
        return Failed(f"{type(error).__name__}: {error}"[:TEXT_MAX], lines_of(error), trace)
    except BaseException:  # noqa: BLE001 - other people's code may raise anything
        text = "an error whose message cannot be shown"
        return Failed(text, [text], text)


def lines_of(error: BaseException) -> list[str]:
    """Returns the lines that describe an error: the error's `problems`, if it has them."""
    if isinstance(error, ValueError) and hasattr(error, "problems"):
        return [f"{line}"[:TEXT_MAX] for line in problems_of(error)]
    return [described(error)]


def described(error: BaseException) -> str:
    """Describes an error of other people's code: its type, its message, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f", in {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}"[:TEXT_MAX] + place


class Job(NamedTuple):
    """A call of an extension.

    call: its name, for people. then: called with the outcome. due_ns: when the time limit of the job is over.
    """

    call: str
    run: Callable[[], Any]
    then: Then
    due_ns: int


def outcome_of(job: Job) -> Any:
    """Runs a job. Returns the job's result, or Failed."""
    try:
        return job.run()
    except BaseException as error:  # noqa: BLE001 - other people's code may raise anything, even call sys.exit()
        return failed(error)


class Thread:
    """A thread of an extension.

    job: the job that the thread runs; only the thread itself sets this field. clock: the clock of the thread's CPU
    time.
    """

    def __init__(self, work: Callable[[Thread], None], name: str) -> None:
        self.job: Job | None = None
        self.last = ""  # the call that it ran last
        self.given_up = False
        self.clock: int | None = None
        self._begun_s = self._seen_s = 0.0  # its CPU time when the job began, and at the last burnt()
        threading.Thread(target=work, args=(self,), name=name, daemon=True).start()

    def begin(self, job: Job) -> None:
        """Called by the thread itself when it begins a job."""
        self._begun_s = time.thread_time()
        self.last, self.job = job.call, job

    def burnt(self) -> float:
        """Returns the CPU time in seconds since the previous call."""
        before, self._seen_s = self._seen_s, self._cpu()
        return self._seen_s - before

    def burnt_in_job(self) -> float:
        """Returns the CPU time in seconds since the job began."""
        return self._cpu() - self._begun_s

    def _cpu(self) -> float:
        try:
            return time.clock_gettime(self.clock) if self.clock is not None else 0.0
        except OSError:  # the thread has ended
            return self._seen_s


class Worker:
    """The threads of one extension.

    name: the name of the extension, for people. limit: how many seconds a job may wait, and how many it may take.
    report: see Report. Only the event loop's thread may call the public methods.
    """

    def __init__(self, name: str, limit: float, report: Report) -> None:
        self.name = name
        self.limit = limit
        self.report = report
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._outcomes: deque[tuple[Job, Any]] = deque()
        # Guards _active, _stuck and _told. It is never held while a job runs.
        self._lock = threading.Lock()
        self._told = False
        self._active: Thread | None = None
        self._stuck: set[Thread] = set()
        self._late = 0  # how many jobs did not begin in time
        self._late_told = 0
        self._closed = False
        self._loop: asyncio.AbstractEventLoop
        self._wake: Callable[[], None]

    def start(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Starts the first thread. wake: called after outcomes were passed on."""
        self._loop, self._wake = loop, wake
        self._active = self._thread()

    def ask(self, call: str, job: Callable[[], Any], then: Then) -> None:
        """Gives a job to the threads; see contract.Plugin.ask. An error of the job is written to the log."""

        def done(outcome: Any, now_ns: int) -> None:
            if isinstance(outcome, Failed):
                self.report("failed", f"{self.name}: {call} failed: {outcome}", "error", exc=outcome.trace)
            then(outcome, now_ns)

        self.submit(call, job, done)

    def submit(self, call: str, job: Callable[[], Any], then: Then) -> None:
        """Does the same as ask(), but does not log an error of the job."""
        one = Job(call, job, then, time.monotonic_ns() + int(self.limit * 1e9))
        if self._active is None or self._jobs.qsize() >= WAITING_MAX:
            error = Busy(self._why_busy())
            self.report("busy", f"{self.name}: {call} was refused: {error}")
            self._told_of(one, error)
        else:
            self._jobs.put(one)

    def inspect(self, now_ns: int) -> None:
        """Gives up a stuck thread, and reports jobs that have waited too long. A timer calls this method."""
        thread = self._active
        job = thread.job if thread is not None else None
        if thread is not None and job is not None and job.due_ns <= now_ns:
            self._give_up(thread, job)
        if self._late != self._late_told:
            text = f"{self.name}: overloaded: {self._late - self._late_told} calls"
            self.report("late", f"{text} did not start within {self.limit * 1000:g} ms")
            self._late_told = self._late

    def burns(self, period: float) -> None:
        """Reports if the threads used the CPU for more than half of a period.

        period: seconds since the previous call.
        """
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
        """Stops the threads: no further job begins, and no further outcome is passed on."""
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
        return f"all threads of the extension are stuck in {', '.join(calls)}"

    def _give_up(self, thread: Thread, job: Job) -> None:
        with self._lock:
            if thread.job is not job:
                return  # the job has just ended
            thread.given_up = True
            self._stuck.add(thread)
            self._active = None
            if len(self._stuck) < STUCK_MAX and thread.burnt_in_job() <= BURNING * self.limit:
                with contextlib.suppress(RuntimeError):  # the system refuses another thread
                    self._active = self._thread()
        text = f"{self.name}: {job.call} takes longer than {self.limit * 1000:g} ms"
        more = "" if self._active is not None else "; the extension gets no further calls until one returns"
        self.report("stuck", f"{text}; stuck threads: {len(self._stuck)}{more}")

    def _told_of(self, job: Job, outcome: Any) -> None:
        """Makes the event loop's thread call job.then. Any thread may call this."""
        self._outcomes.append((job, outcome))
        self._schedule()

    def _schedule(self) -> None:
        with self._lock:
            told, self._told = self._told, True
        if not told and not self._closed:
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:  # the loop was closed meanwhile, so the process is about to end
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
        # The thread gets its own clock, because getting that of an ended thread is undefined. Reading it then is safe.
        thread.clock = time.pthread_getcpuclockid(threading.get_ident())
        while (job := self._jobs.get()) is not None and not self._closed:
            now_ns = time.monotonic_ns()
            if job.due_ns <= now_ns:
                self._late += 1
                continue
            thread.begin(job._replace(due_ns=now_ns + int(self.limit * 1e9)))
            outcome = outcome_of(job)
            goes_on = self._goes_on(thread)  # first, because job.then may check if it is stuck
            self._told_of(job, outcome)
            if not goes_on:
                return

    def _goes_on(self, thread: Thread) -> bool:
        """Returns whether the thread is still needed.

        A thread that was stuck is needed if no other thread has replaced it.
        """
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
