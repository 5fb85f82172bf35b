from counterd.engine.walk import RankedWalk
from counterd.protocols.throttr._store import ThrottrStore

class KeysWalk(RankedWalk):
    def __init__(self, store: ThrottrStore, match: bytes, limit: int, sort: str) -> None: ...
