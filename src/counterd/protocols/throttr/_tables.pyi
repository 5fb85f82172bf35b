from counterd.engine.walk import HoldingsWalk, RankedWalk
from counterd.listing import Table
from counterd.protocols.throttr._store import ThrottrStore

TABLES: tuple[Table, ...]

class KeysWalk(RankedWalk):
    def __init__(self, store: ThrottrStore, match: bytes, limit: int, sort: str) -> None: ...

class SubscriptionsWalk(HoldingsWalk):
    def __init__(self, store: ThrottrStore, connection: int, limit: int) -> None: ...
