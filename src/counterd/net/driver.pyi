import asyncio

from counterd._core import Store
from counterd.net._connection import Connection

SLICE_NS: int

class Driver:
    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store) -> None: ...
    def enqueue(self, connection: Connection) -> None: ...
    def wake(self) -> None: ...
