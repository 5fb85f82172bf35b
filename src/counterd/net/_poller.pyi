import asyncio
from collections.abc import Callable

from counterd.net._connection import Connection

REST_S: float

class Poller:
    def __init__(self, loop: asyncio.AbstractEventLoop, reject: Callable[[str, str], None]) -> None: ...
    def listen(self, fd: int, make: Callable[[], Connection]) -> None: ...
    def unlisten(self) -> None: ...
