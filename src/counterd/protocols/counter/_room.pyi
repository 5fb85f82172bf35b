from counterd._core import Session, Store
from counterd.protocols import Figures

class CounterStore(Store):
    def __init__(
        self,
        *,
        buckets: int,
        holdings: int,
        holdings_per_connection: int = 0,
        name_memory: int,
        hash_key: bytes,
        figures: Figures,
    ) -> None: ...

class CounterSession(Session): ...
