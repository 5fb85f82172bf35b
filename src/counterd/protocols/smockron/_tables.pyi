from counterd.engine.walk import RankedWalk
from counterd.listing import Table
from counterd.protocols.smockron._store import SmockronStore

TABLES: tuple[Table, ...]

class ThrottledWalk(RankedWalk):
    def __init__(self, store: SmockronStore, match: bytes, limit: int) -> None: ...

class DomainsWalk(RankedWalk):
    def __init__(self, store: SmockronStore, match: bytes, limit: int, sort: str) -> None: ...
