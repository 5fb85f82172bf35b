"""Workers for the beanstalk protocol, for threads and for asyncio. A worker calls a function for each job.

Floor: side (ARCHITECTURE.md). Each thread or task has its own client, because the later requests of a client wait until
its reserve is answered. The module _working has the decisions.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

from counterd.client._steps import drive, drive_async
from counterd.client.beanstalk._working import ACTS, RESERVE_S, Policy, Reserving, Tended, ending, touching
from counterd.errors import CounterdError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from counterd.client.beanstalk import AsyncClient, AsyncJob, Client, Job

BACKOFF_S = (1.0, 600.0)
ATTEMPTS = 10


class _Slot:
    """The client of a thread, and the job that its function works on."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.job: Job | None = None
        self.tended: Tended | None = None
        self.is_closed = False


class Worker:
    """Calls a function for each job, in threads: `Worker(send, lambda: Client(watch="mail"), threads=4).run()`.

    While the function runs, the worker touches the job. When the function returns, the worker deletes the job. If the
    function raises an exception, the job is tried again after a delay, and buried after the last attempt. The function
    may raise Bury to bury the job at once, or Retry to choose the delay.

    function: called with a Job, in one of the threads.
    connect: makes a Client for a thread.
    threads: how many jobs are worked on at the same time.
    attempts: how many times a job is tried before it is buried. Attempts by other workers count too.
    backoff: the seconds before the second attempt, and the longest delay. The delay doubles with each attempt, is
    shortened at random by up to half, and rounded up to whole seconds.

    If a connection is lost while a function runs, the server gives the job to another worker, and the logger
    counterd.client.beanstalk logs a warning. If a function must never run twice at the same time, it can hold a permit
    of a counter.
    """

    def __init__(
        self,
        function: Callable[[Job], object],
        connect: Callable[[], Client],
        *,
        threads: int = 1,
        attempts: int = ATTEMPTS,
        backoff: tuple[float, float] = BACKOFF_S,
    ) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self._function = function
        self._connect = connect
        self._count = threads
        self._policy = Policy(attempts, backoff)
        self._slots: list[_Slot] = []
        self._running = 0  # threads
        self._stopping = False
        self._stopped = threading.Event()
        # Reentrant, because a signal handler may have interrupted a thread that has it.
        self._changed = threading.Condition(threading.RLock())

    def run(self, *, grace: float | None = None) -> bool:
        """Runs the worker until stop() is called. In the main thread, SIGTERM and SIGINT call stop().

        After stop(), no job is reserved any more, and running functions may finish.

        grace: how many seconds the running functions have. None means as long as they need. After the grace time, the
        jobs of running functions are given back, although the functions still run.

        Returns whether all functions finished in time. A second signal has its usual effect.
        """
        with self._signals():
            threads = [
                threading.Thread(target=self._serve, name="counterd-worker", daemon=True) for _ in range(self._count)
            ]
            self._running = len(threads)
            for thread in threads:
                thread.start()
            ends_at: float | None = None
            while self._running:
                if self._stopping and ends_at is None and grace is not None:
                    ends_at = time.monotonic() + grace
                if ends_at is not None and time.monotonic() >= ends_at:
                    break
                self._tend(ends_at)
            for slot in self._slots:
                slot.client.close()
        return not self._running

    def stop(self) -> None:
        """Makes run() end. Any thread, a signal handler and the function may call this."""
        with self._changed:
            self._stopping = True
            self._stopped.set()
            for slot in self._slots:
                if slot.job is None:
                    slot.is_closed = True
                    slot.client.close()
            self._changed.notify_all()

    # ---- in the threads ----

    def _serve(self) -> None:
        try:
            with self._connect() as client:
                self._serve_through(_Slot(client))
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

    def _serve_through(self, slot: _Slot) -> None:
        with self._changed:
            self._slots.append(slot)
        reserving = Reserving()
        while not self._stopping:
            try:
                job = slot.client.reserve(RESERVE_S)
            except CounterdError as error:
                self._stopped.wait(reserving.failed(error, logs=not self._stopping))
                continue
            reserving.succeeded()
            if job is not None and self._begins(slot, job):
                self._work(slot, job)

    def _begins(self, slot: _Slot, job: Job) -> bool:
        """Returns False if the connection was closed meanwhile; the job then belongs to another worker."""
        with self._changed:
            if slot.is_closed:
                return False
            slot.job, slot.tended = job, Tended(time.monotonic())
            self._changed.notify_all()
            return True

    def _work(self, slot: _Slot, job: Job) -> None:
        failure: BaseException | None = None
        try:
            self._function(job)
        except BaseException as error:  # noqa: BLE001 - the policy decides what it means
            failure = error
        with self._changed:
            slot.tended = None
        try:
            drive(ending(job, failure, self._policy), ACTS)
        finally:
            with self._changed:
                slot.job = None
        if failure is not None and not isinstance(failure, Exception):
            raise failure

    # ---- in the thread of run() ----

    def _tend(self, ends_at: float | None) -> None:
        """Waits until jobs have to be touched, or until something else has happened. Then touches these jobs."""
        now = time.monotonic()
        with self._changed:
            due = min((each.due for each in self._tended()), default=None)
            times = [moment - now for moment in (due, ends_at) if moment is not None]
            if self._running and (not times or min(times) > 0):
                self._changed.wait(min(*times, threading.TIMEOUT_MAX) if times else None)
            now = time.monotonic()
            late = [slot for slot in self._slots if slot.tended is not None and slot.tended.due <= now]
        for slot in late:
            self._touch(slot)

    def _tended(self) -> Iterator[Tended]:
        for slot in self._slots:
            if slot.tended is not None:
                yield slot.tended

    def _touch(self, slot: _Slot) -> None:
        job, tended = slot.job, slot.tended
        if job is not None and tended is not None:
            drive(touching(job, tended, time.monotonic), ACTS)

    def _signals(self) -> _Signals:
        return _Signals(self.stop)


class _Signals:
    """While a block runs in the main thread, the first SIGTERM or SIGINT calls a function."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._caught)

    def __exit__(self, *_: object) -> None:
        self._restore()

    def _caught(self, number: int, frame: object) -> None:
        self._restore()
        self._stop()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()


class AsyncWorker:
    """The Worker for asyncio: `await AsyncWorker(send, lambda: AsyncClient(watch="mail"), tasks=4).run()`.

    function: a coroutine function that takes an AsyncJob.
    tasks: how many jobs are worked on at the same time.
    """

    def __init__(
        self,
        function: Callable[[AsyncJob], Coroutine[Any, Any, object]],
        connect: Callable[[], AsyncClient],
        *,
        tasks: int = 1,
        attempts: int = ATTEMPTS,
        backoff: tuple[float, float] = BACKOFF_S,
    ) -> None:
        if tasks < 1:
            raise ValueError(f"tasks must be at least 1, not {tasks}")
        self._function = function
        self._connect = connect
        self._count = tasks
        self._policy = Policy(attempts, backoff)
        self._stopping: asyncio.Event | None = None
        self._idle: set[asyncio.Task[None]] = set()  # tasks that wait for a job

    async def run(self, *, grace: float | None = None) -> bool:
        """Runs the worker until stop() is called, or until this coroutine is cancelled.

        Cancelling the coroutine cancels the running functions immediately. grace: how many seconds running functions
        may continue after stop() before they are cancelled. None means as long as they need.

        The job of a cancelled function is released. Returns whether all functions finished in time.
        """
        self._stopping = asyncio.Event()
        tasks = [asyncio.create_task(self._serve(self._stopping)) for _ in range(self._count)]
        stopping = asyncio.create_task(self._stopping.wait())
        can_wait = True
        try:
            await asyncio.wait([stopping, *tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._idle:
                task.cancel()
            _, late = await asyncio.wait(tasks, timeout=grace)
        except GeneratorExit:  # a coroutine that is destroyed cannot wait
            can_wait = False
            raise
        finally:
            stopping.cancel()
            for task in tasks:
                task.cancel()
            if can_wait:
                await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()  # raises what the task raised, which is a bug
        return not late

    def stop(self) -> None:
        """Makes run() end.

        Call it in the event loop, for example: `loop.add_signal_handler(signal.SIGTERM, worker.stop)`.
        """
        if self._stopping is not None:
            self._stopping.set()

    # ---- in the tasks ----

    async def _serve(self, stopping: asyncio.Event) -> None:
        task = asyncio.current_task()
        assert task is not None
        reserving = Reserving()
        async with self._connect() as client:
            while not stopping.is_set():
                self._idle.add(task)
                try:
                    job = await client.reserve(RESERVE_S)
                except CounterdError as error:
                    await asyncio.sleep(reserving.failed(error))
                    continue
                finally:
                    self._idle.discard(task)
                reserving.succeeded()
                if job is not None:
                    await self._work(job)

    async def _work(self, job: AsyncJob) -> None:
        loop = asyncio.get_running_loop()
        tended = Tended(loop.time())
        tending = asyncio.create_task(self._tend(job, tended))
        failure: BaseException | None = None
        try:
            await self._function(job)
        except BaseException as error:  # noqa: BLE001 - the policy decides what it means
            failure = error
        tending.cancel()
        await drive_async(ending(job, failure, self._policy), ACTS)
        if failure is not None and not isinstance(failure, Exception):
            raise failure

    async def _tend(self, job: AsyncJob, tended: Tended) -> None:
        loop = asyncio.get_running_loop()
        while not tended.lost:
            await asyncio.sleep(tended.due - loop.time())
            await drive_async(touching(job, tended, loop.time), ACTS)
