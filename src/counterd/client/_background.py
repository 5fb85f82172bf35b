"""The background thread of a client. A client that has to act while no thread of the program calls it has a Background.

Floor: side (ARCHITECTURE.md). Invariants: at most one thread runs for a Background. Only this thread closes its Waker,
with the lock. The lock is reentrant, because a signal handler may interrupt a thread that has it. A thread that has the
lock takes no other lock, so start() and wake() may be called with any lock.
"""

from __future__ import annotations

import math
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol

from counterd.client._portable import Waker, is_mine

if TYPE_CHECKING:
    from collections.abc import Callable


JOIN_S = 2.0


class Watched(Protocol):
    """What the thread waits for."""

    def watch(self, wake: int, seconds: float) -> bool:
        """Waits until there is something to do, the descriptor `wake` is readable, or this many seconds have passed.

        May handle what has come, and may return earlier. Returns False if `wake` is certainly not readable.
        """


class Background:
    """Runs a daemon thread that calls work() whenever it is due.

    work: does what is due. Returns what the thread watches until then, and when work() is due again, in seconds of the
    monotonic clock. math.inf: when something has come, or when start() or wake() says so.
    idle_s: the thread ends if work() was not due for this many seconds. start() then starts another thread.
    """

    def __init__(self, name: str, work: Callable[[], tuple[Watched, float]], idle_s: float = math.inf) -> None:
        self._name = name
        self._work = work
        self._idle_s = idle_s
        self._lock: Any = threading.RLock()
        self._thread: threading.Thread | None = None  # the last one
        self._waker: Waker | None = None  # of the thread that runs
        self._due = math.inf  # when the thread calls work() again
        self._is_stopped = False

    def start(self, due: float = 0.0) -> None:
        """Makes the thread call work() at `due` at the latest. Starts the thread if it does not run.

        Raises RuntimeError or OSError if the thread cannot be started. Does nothing after stop().
        """
        with self._lock:
            if self._is_stopped:
                return
            if self._waker is None:
                self._start()
            elif due < self._due:
                self._waker.wake()

    def wake(self) -> None:
        """Makes the thread call work() now, if the thread runs."""
        with self._lock:
            if self._waker is not None:
                self._waker.wake()

    def stop(self) -> None:
        """Lets the thread end after its current work(). No other thread is started. work() itself may call stop()."""
        self._is_stopped = True
        self.wake()

    def join(self, *locks: Any, timeout: float = JOIN_S) -> None:
        """Waits until the thread has ended, for at most `timeout` seconds: a signal handler may have interrupted the
        owner of any lock that work() needs.

        Does not wait if the caller has one of these locks, which work() needs most.
        """
        thread = self._thread
        if thread is None or thread is threading.current_thread() or any(map(is_mine, (self._lock, *locks))):
            return
        thread.join(timeout)

    def after_fork(self) -> None:
        """Called in the child of a fork, where the thread does not run. The child has to make another Background."""
        if self._waker is not None:
            self._waker.close()

    def _start(self) -> None:
        waker = Waker()
        thread = threading.Thread(target=self._run, args=(waker,), name=self._name, daemon=True)
        try:
            self._waker, self._thread = waker, thread
            thread.start()
        except BaseException as error:
            self._waker = self._thread = None  # if the thread runs although this was interrupted, it ends by itself
            if isinstance(error, RuntimeError):  # there is no thread, which would close it
                waker.close()
            raise

    # ---- in the thread ----

    def _run(self, waker: Waker) -> None:
        try:
            while self._waker is waker and not self._is_stopped:
                self._turn(waker)
        finally:
            with self._lock:
                if self._waker is waker:
                    self._waker = None
                waker.close()

    def _turn(self, waker: Waker) -> None:
        self._due = math.inf  # start() wakes the thread for everything that becomes due meanwhile
        watched, due = self._work()
        if self._is_stopped:
            return
        self._due = due
        start = time.monotonic()
        seconds = self._idle_s if due == math.inf else max(due - start, 0.0)
        is_woken = watched.watch(waker.fileno(), seconds) and waker.take()
        if is_woken or due < math.inf or time.monotonic() < start + seconds:
            return
        with self._lock:  # so that start() does not run meanwhile
            if not waker.take():
                self._waker = None
