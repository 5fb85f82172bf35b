import asyncio
from collections.abc import Callable
from typing import Protocol

from counterd.contract import Store

class Outside(Protocol):
    def turn(self, now_ns: int) -> None: ...

class Driver:
    outside: Outside | None
    looks: bool
    @property
    def is_busy(self) -> bool: ...
    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store, clock: Callable[[], int]) -> None: ...
    def wake(self) -> None: ...
    def stir(self) -> None: ...
