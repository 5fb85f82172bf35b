from collections.abc import Mapping
from typing import Any

from counterd._core import Session, Store

OPERATION_NAMES: tuple[str, ...]
OUTCOME_NAMES: tuple[str, ...]
BROKEN_NAMES: tuple[str, ...]
LIMIT_PARTS: int
LIMIT_SPAN_NS: int
LIMIT_DOMAINS: int

class SmockronStore(Store):
    def __init__(
        self,
        *,
        hash_key: bytes,
        make_session: Any,
        identifiers: int,
        message_max: int,
        posted_max: int,
        now_ns: int = 0,
    ) -> None: ...
    def load_rules(self, rules: Mapping[bytes, Any]) -> None: ...
    def audit(self) -> None: ...
    def share(self, is_shared: bool, now_ns: int) -> None: ...
    def take_questions(self, now_ns: int) -> tuple[bytes, tuple[int, int], list[tuple[bytes, int]]] | None: ...
    def settle_questions(self, found: list[int], now_ns: int) -> None: ...
    def session(self, now_ns: int = 0, port: int = 0) -> Session: ...
