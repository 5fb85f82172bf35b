import asyncio
from collections.abc import Callable

from counterd.net._connection import Connection

READ_MAX: int
REST_S: float

class Poller:
    def __init__(self, loop: asyncio.AbstractEventLoop, reject: Callable[[str, str], None]) -> None: ...
    def listen(
        self, fd: int, make: Callable[[], Connection], wrap: Callable[[], Transport | None] | None = None
    ) -> None: ...
    def limit_reads(self, size: int) -> None: ...
    def unlisten(self) -> None: ...

class Transport: ...
