import asyncio
from collections.abc import Callable

from counterd._core import Store
from counterd.net.connection import Connection

SLICE_NS: int

class Driver:
    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store, clock: Callable[[], int]) -> None: ...
    def enqueue(self, connection: Connection) -> None: ...
    def wake(self) -> None: ...
