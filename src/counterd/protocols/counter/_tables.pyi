from counterd.engine.walk import HoldingsWalk, RankedWalk
from counterd.listing import Table
from counterd.protocols.counter._store import CounterStore

TABLES: tuple[Table, ...]

class CountersWalk(RankedWalk):
    def __init__(self, store: CounterStore, match: bytes, limit: int, sort: str) -> None: ...

class HoldersWalk:
    total: int
    def __init__(self, store: CounterStore, name: bytes, limit: int) -> None: ...
    def step(self) -> bool: ...
    def rows(self) -> list[tuple[int, int, int, str, int | None]]: ...

class HeldWalk(HoldingsWalk):
    def __init__(self, store: CounterStore, connection: int, limit: int) -> None: ...
