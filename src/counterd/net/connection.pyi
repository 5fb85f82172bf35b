import asyncio
from collections.abc import Callable

from counterd.contract import Store
from counterd.net.batches import Batches
from counterd.net.driver import Driver

class Events:
    def __init__(
        self,
        *,
        entered: Callable[[Connection], object],
        renumbered: Callable[[Connection], object],
        left: Callable[[Connection], object],
        lost: Callable[[Connection, BaseException | None], object],
        rejected: Callable[[str, str], object],
        tls_failed: Callable[[Connection, str, str], object],
        slowed: Callable[[Connection], object],
        stuck: Callable[[Connection], object],
        moved: Callable[[Connection], object],
        dropped: Callable[[Connection], object],
    ) -> None: ...

class Common:
    batches: Batches
    parting: bool
    request_ns: int
    handshake_s: float
    handshakes: int
    slowed: int
    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store, driver: Driver, events: Events) -> None: ...

class Connection:
    patience: str
    number: int
    since_ns: int
    entered_ns: int
    active_ns: int
    @property
    def id(self) -> str: ...
    @property
    def fd(self) -> int: ...
    @property
    def requests(self) -> int: ...
    @property
    def queued(self) -> int: ...
    @property
    def owed(self) -> bool: ...
    def pull(self) -> None: ...
    def part(self) -> None: ...
    def abort(self) -> None: ...
    def evict(self) -> None: ...
    def session_number(self) -> int: ...
    def close(self) -> None: ...
    def peer(self) -> tuple[str, int]: ...
    def origin(self) -> str: ...
    def whom(self) -> tuple[bytes, bool]: ...
    def tls(self) -> tuple[str, str, str] | None: ...
