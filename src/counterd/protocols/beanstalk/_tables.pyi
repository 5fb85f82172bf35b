from typing import Any

from counterd.engine.walk import RankedWalk
from counterd.listing import Table
from counterd.protocols.beanstalk._store import BeanstalkStore

TABLES: tuple[Table, ...]

class TubesWalk(RankedWalk):
    def __init__(self, store: BeanstalkStore, match: bytes, limit: int, sort: str) -> None: ...

class ReservedWalk:
    total: int
    def __init__(self, store: BeanstalkStore, connection: int, limit: int) -> None: ...
    def step(self) -> bool: ...
    def rows(self) -> list[tuple[Any, ...]]: ...
