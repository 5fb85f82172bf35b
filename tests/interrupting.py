"""Interrupts a coroutine where it waits for the k-th time: how the tests of asyncio's client cancel at every await."""

from __future__ import annotations

import asyncio
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
