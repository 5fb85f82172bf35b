from counterd.protocols.throttr._store import ThrottrStore

def open_store(
    *,
    value_size: int,
    memory_limit: int,
    max_message: int,
    max_queued: int,
    expiry_grace_ns: int,
    hash_key: bytes,
    now_ns: int,
) -> ThrottrStore: ...
