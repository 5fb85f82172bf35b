"""Interrupts code that uses a client, once, at the k-th possible place, so that a test can try all places.

Interrupted is for a coroutine: its places are its awaits. Points is for a thread: places where a signal can interrupt
it.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

CANCELLED = "cancelled"  # while it waits; the awaited result comes later or never
ANSWERED = "answered"  # in the turn of the loop in which the awaited result has already come
THROWN_AWAY = "thrown away"  # closed, without being awaited any more
WAYS = (CANCELLED, ANSWERED, THROWN_AWAY)


class Interrupted:
    """Awaits a coroutine, and interrupts it when it waits for the at-th time. Then `fired` is true."""

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
            except BaseException as error:  # noqa: BLE001 - every exception of the task goes to the coroutine
                argument, step = error, self._coroutine.throw

    def _cancel(self, waited: asyncio.Future[Any] | None) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._way == ANSWERED and waited is not None:
            # The task adds its own callback after this one, so it is cancelled before it is woken.
            waited.add_done_callback(lambda _: task.cancel())
        else:
            asyncio.get_running_loop().call_soon(task.cancel)


class Points:
    """Places where a signal can interrupt a blocking client.

    They are before waiting for a lock, beginning a request, sending and polling, and before and after recv(). Signals
    come to the main thread.
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
        """Adds a place before a method of the owner."""
        function = getattr(owner, name)

        def enter(*arguments: Any) -> Any:
            self()
            return function(*arguments)

        setattr(owner, name, enter)


class Watched:
    """An object with places before and after some of its methods; a lock with a place before it is acquired."""

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
