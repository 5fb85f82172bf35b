from counterd import contract
from counterd.protocols.counter._store import CounterStore

class Escrow:
    @staticmethod
    def of(store: CounterStore, prefix: bytes) -> contract.Escrow: ...
