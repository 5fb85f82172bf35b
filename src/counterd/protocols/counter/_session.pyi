from typing import Any

from counterd.protocols.counter._store import CounterStore

def open_store(**sizes: Any) -> CounterStore: ...
