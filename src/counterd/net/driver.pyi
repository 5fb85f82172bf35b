import asyncio
from collections.abc import Callable
from typing import Protocol

from counterd.contract import Store

class Task(Protocol):
    def turn(self, now_ns: int) -> None: ...

class Driver:
    tasks: list[Task]
    @property
    def is_busy(self) -> bool: ...
    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store, clock: Callable[[], int]) -> None: ...
    def wake(self) -> None: ...
