import asyncio

from counterd._core import Store
from counterd.net.driver import Driver
from counterd.net.server import Limits, Server

class Roster:
    loop: asyncio.AbstractEventLoop
    store: Store
    driver: Driver
    connections: set[Connection]
    limits: Limits
    parting: bool

class Connection(asyncio.Protocol):
    server: Server
    patience: str
    fd: int
    def __init__(self, server: Server, patience: str) -> None: ...
    def pull(self) -> None: ...
    def part(self) -> None: ...
    def abort(self) -> None: ...
    def queue_size(self) -> int: ...
