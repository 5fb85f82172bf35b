from counterd.engine.walk import RankedWalk
from counterd.listing import Table
from counterd.protocols.sentinel._store import SentinelStore

TABLES: tuple[Table, ...]

class TokensWalk(RankedWalk):
    def __init__(
        self, store: SentinelStore, match: bytes, limit: int, sort: str, flow: int, connection: int = 0
    ) -> None: ...

class FlowsWalk(RankedWalk):
    def __init__(self, store: SentinelStore, match: bytes, limit: int, sort: str) -> None: ...
