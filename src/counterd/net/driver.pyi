import asyncio
from collections.abc import Callable
from typing import Protocol

from counterd.contract import Store

SLICE_NS: int

class Pulled(Protocol):
    def pull(self) -> None: ...

class Driver:
    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store, clock: Callable[[], int]) -> None: ...
    def enqueue(self, connection: Pulled) -> None: ...
    def wake(self) -> None: ...
