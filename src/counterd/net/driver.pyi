import asyncio
from collections.abc import Callable

from counterd.contract import Store

class Driver:
    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store, clock: Callable[[], int]) -> None: ...
    def wake(self) -> None: ...
