"""What a hold or a Take says that was dropped without having been entered."""

from __future__ import annotations

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import AsyncClient, Client, Permit, Rate, sentinel
from counterd.errors import ConnectionLost

if TYPE_CHECKING:
    from collections.abc import Callable

NOWHERE = ("127.0.0.1", 1)  # nothing connects before a hold is entered
MAKING: dict[str, Callable[[], Any]] = {
    "hold": lambda: Client(*NOWHERE).hold("a", maximum=1),
    "take": lambda: Client(*NOWHERE).take(Rate("r", limit=1, per=60)),
    "hold of asyncio": lambda: AsyncClient(*NOWHERE).hold("a", maximum=1),
    "take of asyncio": lambda: AsyncClient(*NOWHERE).take(Permit("a", 1, maximum=1)),
    "hold of a flow": lambda: sentinel.Client(*NOWHERE).hold(1),
    "hold of a flow of asyncio": lambda: sentinel.AsyncClient(*NOWHERE).hold(1),
}


def dropped(made: object) -> None:
    """Drops what is passed, if nobody else has it."""
    del made
    gc.collect()


@pytest.mark.parametrize("make", MAKING.values(), ids=MAKING.keys())
def test_what_was_never_entered_says_so(make: Callable[[], Any]) -> None:
    with pytest.warns(RuntimeWarning, match=r"^<.*> was never entered, so nothing was taken: use it in a `with`$"):
        dropped(make())


@pytest.mark.parametrize("make", MAKING.values(), ids=MAKING.keys())
def test_a_decorator_says_nothing(make: Callable[[], Any], recwarn: pytest.WarningsRecorder) -> None:
    async def coroutine() -> None: ...

    made = make()
    made((lambda: None) if hasattr(made, "__enter__") else coroutine)
    dropped(made)
    del made
    gc.collect()
    assert not recwarn


def test_what_could_not_be_entered_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    async def enter() -> None:
        async with AsyncClient(*NOWHERE).hold("a", maximum=1, timeout=0):
            pass

    with pytest.raises(ConnectionLost):
        Client(*NOWHERE).hold("a", maximum=1, timeout=0).__enter__()
    with pytest.raises(ConnectionLost):
        asyncio.run(enter())
    gc.collect()
    assert not recwarn


def test_a_semaphore_says_nothing(recwarn: pytest.WarningsRecorder) -> None:
    dropped(Client(*NOWHERE).semaphore("a", 1))
    dropped(AsyncClient(*NOWHERE).semaphore("a", 1))
    assert not recwarn


def test_an_import_from_the_wrong_place_says_the_right_one() -> None:
    with pytest.raises(ImportError, match=r"^counterd has no Client: write `from counterd.client import Client`"):
        exec("from counterd import Client", {})
