from collections.abc import Callable

from counterd._core import Session, Store

COMMAND_NAMES: dict[int, str]
CONSTANTS: dict[str, int]
KEY_BYTES: int

class ThrottrStore(Store):
    def __init__(
        self,
        *,
        value_size: int,
        memory_limit: int,
        max_message: int,
        expiry_grace_ns: int,
        keys: int,
        channels: int,
        subscriptions: int,
        make_session: Callable[[ThrottrStore], Session],
        hash_key: bytes,
        reply_max: int,
        posted_max: int,
        now_ns: int = 0,
    ) -> None: ...
