"""Interrupts code that uses a client, once, at the k-th possible place, so that a test can try all places.

Interrupted is for a coroutine: its places are its awaits. Points is for a thread: its places are those at which CPython
runs the handler of a signal.
"""

from __future__ import annotations

import asyncio
import inspect
import linecache
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import counterd

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from types import CodeType, FrameType

CANCELLED = "cancelled"  # while it waits; the awaited result comes later or never
ANSWERED = "answered"  # in the turn of the loop in which the awaited result has already come
THROWN_AWAY = "thrown away"  # closed, without being awaited any more
WAYS = (CANCELLED, ANSWERED, THROWN_AWAY)

WAITING = {"acquire", "connect", "getaddrinfo", "poll", "recv", "send", "sleep"}  # functions in C
PACKAGE = str(Path(counterd.__file__).parent)


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


def interrupt() -> None:
    """Does what Python does when SIGINT arrives."""
    raise KeyboardInterrupt


class Points:
    """Raises KeyboardInterrupt at the at-th point of the block, in this thread, or calls `act`. Then `fired` is true.

    Points are the places in counterd's own code where CPython runs the handler of a signal: after each call of a
    function in C; within such a call, before it has done anything, if it may wait; at a `with`, which may wait for a
    lock; and where a function begins that counterd itself calls. It is no point where the test calls counterd, or a
    `with` calls __exit__(): whatever a client does, Python itself does not begin what it was about to do. Nor is it one
    where a generator goes on, because an exception of a tracing function would not reach the generator's handlers. Nor
    is it one in a __del__(), whose exceptions Python only reports.
    """

    def __init__(self, at: int, act: Callable[[], object] = interrupt) -> None:
        self.fired = False
        self._at = at
        self._act = act
        self._passed = 0
        self._before = sys.gettrace()
        self._blocks: set[tuple[FrameType, int]] = set()  # that have begun: their line comes up again at their end

    def __enter__(self) -> Points:
        sys.settrace(self._trace)
        sys.setprofile(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(self._before)

    def _pass(self) -> None:
        self._passed += 1
        if self._passed == self._at:
            self.fired = True
            self._act()

    def _called(self, frame: FrameType, event: str, function: Any) -> None:
        if not _is_ours(frame):
            return
        if (
            event == "c_return"
            or (event == "c_call" and function.__name__ in WAITING)
            or (event == "call" and _is_ours(frame.f_back) and not _is_exempt(frame.f_code))
        ):
            self._pass()

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not _is_ours(frame):
            return None
        if event == "line" and _is_with(frame.f_code.co_filename, frame.f_lineno):
            block = (frame, frame.f_lineno)
            if block in self._blocks:
                self._blocks.remove(block)
            else:
                self._blocks.add(block)
                self._pass()
        return self._trace


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name != "__del__"


def _is_exempt(code: CodeType) -> bool:
    return code.co_name == "__exit__" or bool(code.co_flags & inspect.CO_GENERATOR)


def _is_with(file: str, number: int) -> bool:
    return linecache.getline(file, number).lstrip().startswith("with ")
