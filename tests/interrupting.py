"""Interrupts whoever uses a client, once, at the k-th place where that can happen, so that a test can try them all.

Interrupted is for a coroutine: each of its awaits. Points are for a thread: where a signal can interrupt it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

CANCELLED = "cancelled"  # while it waits; what it waits for comes later, or never
ANSWERED = "answered"  # in the turn of the loop in which what it waits for has come already
THROWN_AWAY = "thrown away"  # closed: nobody awaits it any more
WAYS = (CANCELLED, ANSWERED, THROWN_AWAY)


class Interrupted:
    """Awaits the coroutine; interrupts it when it waits for the at-th time, and then `fired` is true."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, way: str) -> None:
        self.fired = False
        self._coroutine = coroutine
        self._at = at
        self._way = way

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Any = self._coroutine.send
        argument: Any = None
        count = 0
        while True:
            try:
                waited = step(argument)
            except StopIteration as end:
                return end.value
            count += 1
            if count == self._at:
                self.fired = True
                if self._way == THROWN_AWAY:
                    self._coroutine.close()
                    return None
                self._cancel(waited)
            try:
                argument = yield waited
                step = self._coroutine.send
            except BaseException as error:  # noqa: BLE001 - whatever the task gets is the coroutine's
                argument, step = error, self._coroutine.throw

    def _cancel(self, waited: asyncio.Future[Any] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._way == ANSWERED and waited is not None:
            # The task adds what wakes it after this, so it is cancelled first and woken then.
            waited.add_done_callback(lambda _: task.cancel())
        else:
            asyncio.get_running_loop().call_soon(task.cancel)


class Points:
    """Places where a signal can interrupt a blocking client.

    Before it waits for a lock, begins a request, sends or polls, and around recv(). Signals come to the main thread.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.passed = 0

    def __call__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self.passed += 1
        if self.passed == self.at:
            raise KeyboardInterrupt

    def watch(self, link: Any, turns: Any) -> None:
        link._lock = Watched(link._lock, self)
        link._poller = Watched(link._poller, self, "poll")
        link._socket = Watched(link._socket, self, "send", "recv", after=("recv",))
        turns._lock = Watched(turns._lock, self)

    def enter(self, owner: Any, name: str) -> None:
        """Before this method of it."""
        function = getattr(owner, name)

        def enter(*arguments: Any) -> Any:
            self()
            return function(*arguments)

        setattr(owner, name, enter)


class Watched:
    """Something with points before and after some of its methods; a lock with one where it is taken."""

    def __init__(self, real: Any, points: Points, *before: str, after: tuple[str, ...] = ()) -> None:
        self._real, self._points, self._before, self._after = real, points, before, after

    def __enter__(self) -> None:
        self._points()
        self._real.acquire()

    def __exit__(self, *_: object) -> None:
        self._real.release()

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if name in self._before:
                self._points()
            result = getattr(self._real, name)(*arguments)
            if name in self._after:
                self._points()
            return result

        return call
