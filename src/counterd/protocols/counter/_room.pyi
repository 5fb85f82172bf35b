from counterd._core import Session, Store
from counterd.contract import Figures

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
        now_ns: int = 0,
    ) -> None: ...
    def limit_holdings(self, holdings_per_connection: int) -> None: ...
    def begin_window(self, number: int) -> None: ...
    def holders(self, name: bytes) -> list[tuple[int, int, int]]: ...

class CounterSession(Session): ...
