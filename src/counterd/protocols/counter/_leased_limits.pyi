from counterd import contract
from counterd.protocols.counter._store import CounterStore

class LeasedLimits:
    @staticmethod
    def of(store: CounterStore, prefix: bytes) -> contract.LeasedLimits: ...
