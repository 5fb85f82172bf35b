import ssl
from collections.abc import Callable

from counterd.net.admission import Limits
from counterd.net.connection import Common, Connection
from counterd.net.poller import Acceptor, Poller

class Table:
    connections: dict[int, Connection]
    arriving: set[Connection]
    addresses: dict[bytes, int]
    limits: Limits
    context: ssl.SSLContext | None
    watch: Callable[[str, Connection], None] | None
    def __init__(self, limits: Limits) -> None: ...
    def __len__(self) -> int: ...
    def enter(self, connection: Connection) -> None: ...
    def remove(self, connection: Connection) -> None: ...
    def find(self, connection_id: str) -> Connection | None: ...
    def idle_among(self, first: int, count: int, before_ns: int) -> tuple[list[Connection], bool]: ...

class Entrance(Acceptor):
    def __init__(
        self, table: Table, common: Common, poller: Poller, secure: bool, patience: str, number: int = 0
    ) -> None: ...
