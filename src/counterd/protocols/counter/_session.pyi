from collections.abc import Callable
from typing import Any

from counterd._core import Session
from counterd.protocols.counter._store import CounterStore

class CounterSession(Session): ...

def open_store(*, make_session: Callable[[Any], Session] = ..., **sizes: Any) -> CounterStore: ...
