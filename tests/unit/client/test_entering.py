"""The warning for a client, a hold or a Take that was never entered, and the error for one entered in the wrong way."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import AsyncClient, Client, Permit, Rate, beanstalk, sentinel, smockron, throttr

if TYPE_CHECKING:
    from collections.abc import Callable

NOWHERE = ("127.0.0.1", 1)  # nothing connects before a hold is entered
BLOCKING: dict[str, Callable[[], Any]] = {
    "hold": lambda: Client(*NOWHERE).hold("a", maximum=1, timeout=0),
    "take": lambda: Client(*NOWHERE).take(Rate("r", limit=1, per=60)),
    "hold of a flow": lambda: sentinel.Client(*NOWHERE).hold(1, timeout=0),
}
AWAITED: dict[str, Callable[[], Any]] = {
    "hold of asyncio": lambda: AsyncClient(*NOWHERE).hold("a", maximum=1, timeout=0),
    "take of asyncio": lambda: AsyncClient(*NOWHERE).take(Permit("a", 1, maximum=1)),
    "hold of a flow of asyncio": lambda: sentinel.AsyncClient(*NOWHERE).hold(1, timeout=0),
}
MAKING = BLOCKING | AWAITED
of_each = pytest.mark.parametrize("make", MAKING.values(), ids=MAKING.keys())
WITH: dict[str, Callable[[], Any]] = BLOCKING | {
    "client": lambda: Client(*NOWHERE),
    "semaphore": lambda: Client(*NOWHERE).semaphore("a", 1),
    "pipeline": lambda: Client(*NOWHERE).pipeline(),
    "client of throttr": lambda: throttr.Client(*NOWHERE),
    "client of beanstalk": lambda: beanstalk.Client(*NOWHERE),
    "gatekeeper": lambda: smockron.Gatekeeper(NOWHERE[0]),
    "admission": lambda: smockron.Gatekeeper(NOWHERE[0]).admit("a"),
}
ASYNC_WITH: dict[str, Callable[[], Any]] = AWAITED | {
    "client": lambda: AsyncClient(*NOWHERE),
    "semaphore": lambda: AsyncClient(*NOWHERE).semaphore("a", 1),
    "pipeline": lambda: AsyncClient(*NOWHERE).pipeline(),
    "client of throttr": lambda: throttr.AsyncClient(*NOWHERE),
    "client of beanstalk": lambda: beanstalk.AsyncClient(*NOWHERE),
    "gatekeeper": lambda: smockron.AsyncGatekeeper(NOWHERE[0]),
    "admission": lambda: smockron.AsyncGatekeeper(NOWHERE[0]).admit("a"),
}


@of_each
def test_an_object_that_was_never_entered_warns(make: Callable[..., Any]) -> None:
    async def coroutine() -> None:
        make()

    calls = (make, functools.partial(make, *()))
    for call in calls:
        with pytest.warns(RuntimeWarning, match=r"^<.*> was never entered, so nothing was taken: use it in a `with`"):
            call()
    with pytest.warns(RuntimeWarning, match="never entered"):
        call(*())
    with pytest.warns(RuntimeWarning, match="never entered") as caught:
        asyncio.run(coroutine())
    assert caught[0].filename == __file__


@of_each
def test_no_warning_after_an_interrupt(make: Callable[[], Any], recwarn: pytest.WarningsRecorder) -> None:
    def called() -> None:
        made = make()
        raise KeyboardInterrupt(made)

    async def awaited() -> None:
        made = make()
        await asyncio.sleep(60)
        made.never_called()

    async def cancelled() -> None:
        task = asyncio.create_task(awaited())
        await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with contextlib.suppress(KeyboardInterrupt):
        called()
    try:  # noqa: SIM105 - it drops the traceback at another place
        called()
    except KeyboardInterrupt:
        pass
    asyncio.run(cancelled())
    assert not recwarn


@of_each
def test_no_warning_from_a_garbage_collection(make: Callable[[], Any], recwarn: pytest.WarningsRecorder) -> None:
    """Although it runs where the result of a call is thrown away."""

    class Collects:
        __del__ = staticmethod(gc.collect)

    gc.collect()  # what other tests have left
    cycle = [make()]
    cycle.append(cycle)
    del cycle
    Collects()
    assert not recwarn


@of_each
def test_no_warning_for_objects_in_variables(make: Callable[[], Any], recwarn: pytest.WarningsRecorder) -> None:
    kept = [make()]
    kept = [make() for _ in kept]
    kept.clear()
    made = make()
    made = None
    assert made is None
    assert not recwarn


@pytest.mark.parametrize("make", BLOCKING.values(), ids=BLOCKING.keys())
def test_no_warning_if_entering_failed(make: Callable[[], Any], recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(Exception, match=r"cannot connect|not available|no server"):
        make().__enter__()
    assert not recwarn


@pytest.mark.parametrize("make", AWAITED.values(), ids=AWAITED.keys())
def test_no_warning_if_entering_failed_asyncio(make: Callable[[], Any], recwarn: pytest.WarningsRecorder) -> None:
    async def enter() -> None:
        await make().__aenter__()

    with pytest.raises(Exception, match=r"cannot connect|not available|no server"):
        asyncio.run(enter())
    assert not recwarn


@of_each
def test_no_warning_for_a_decorator(make: Callable[[], Any], recwarn: pytest.WarningsRecorder) -> None:
    """It is never entered, as each call has its own, and may end where the function is thrown away."""

    async def coroutine() -> None: ...

    def function() -> None: ...

    kept = [make()(coroutine if make in AWAITED.values() else function)]
    kept.pop()
    assert not recwarn.list


def test_no_warning_for_a_semaphore(recwarn: pytest.WarningsRecorder) -> None:
    Client(*NOWHERE).semaphore("a", 1)
    AsyncClient(*NOWHERE).semaphore("a", 1)
    assert not recwarn


@pytest.mark.parametrize("make", WITH.values(), ids=WITH.keys())
def test_async_with_of_a_blocking_object_says_what_to_use(make: Callable[[], Any]) -> None:
    async def enter(blocking: Any) -> None:
        async with blocking:
            pass

    blocking = make()
    with pytest.raises(TypeError, match=r"^\w+ is blocking: use `with`, or a client for asyncio, such as AsyncClient$"):
        asyncio.run(enter(blocking))
    assert not hasattr(blocking, "__aenter__")


@pytest.mark.parametrize("make", ASYNC_WITH.values(), ids=ASYNC_WITH.keys())
def test_with_of_an_asyncio_object_says_what_to_use(make: Callable[[], Any]) -> None:
    async def enter() -> None:
        awaited = make()
        assert not hasattr(awaited, "__enter__")
        with awaited:
            pass

    with pytest.raises(
        TypeError, match=r"^\w+ is for asyncio: use `async with`, or a blocking client, such as Client$"
    ):
        asyncio.run(enter())
