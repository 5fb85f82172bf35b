from counterd._core import Session
from counterd.protocols.smockron._store import SmockronStore

class SmockronSession(Session): ...

def open_store(
    *, identifiers: int, message_max: int, posted_max: int, hash_key: bytes, now_ns: int = 0
) -> SmockronStore: ...
