from counterd.protocols.sentinel._store import SentinelStore

def open_store(
    *,
    max_tokens: int,
    max_param_values: int,
    max_allowed_qps: float,
    sweep_interval_ns: int,
    sweep_max_tokens: int,
    sweep_max_duration_ns: int,
    hash_key: bytes,
    token_key: bytes,
    now_ns: int,
) -> SentinelStore: ...
