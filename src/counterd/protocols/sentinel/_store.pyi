from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from counterd._core import Session, Store

LIMITS: dict[str, int]

class Call(NamedTuple):
    ticket: int
    kind: str
    flow_id: int
    count: int  # type: ignore[assignment]
    prioritized: bool
    token_id: int
    client: int
    address: str

class Lease(NamedTuple):
    token_id: int
    flow_id: int
    count: int  # type: ignore[assignment]
    held_ms: int
    online: bool

class SentinelStore(Store):
    def __init__(
        self,
        *,
        hash_key: bytes,
        token_key: bytes,
        make_session: Callable[[SentinelStore], Session],
        namespaces: int,
        holdings: int,
        holdings_per_connection: int,
        name_memory: int,
        tokens: int,
        param_values: int,
        rules: int = ...,
        items: int = ...,
        reply_max: int,
        posted_max: int = 0,
        now_ns: int = 0,
    ) -> None: ...
    def load_rules(self, rules: Any) -> None: ...
    def set_limits(
        self, *, max_allowed_qps: float, sweep_interval_ns: int, sweep_max_tokens: int, sweep_max_duration_ns: int
    ) -> None: ...
    def delegate(self, submit: Callable[[list[Call]], object] | None, timeout_ns: int = 0) -> None: ...
    def delegate_expiry(self, submit: Callable[[int, list[Lease]], object] | None, timeout_ns: int = 0) -> None: ...
    def answer(self, ticket: int, status: int, value: int, now_ns: int) -> None: ...
    def expire(self, ticket: int, token_ids: Iterable[int], now_ns: int) -> None: ...
    def request_token(self, flow: int, count: int, _prioritized: bool, client: int, now_ns: int) -> tuple[int, int]: ...
    def release_token(self, token_id: int, now_ns: int) -> int: ...
    def keep_token(self, token_id: int, client: int, now_ns: int) -> tuple[int, int]: ...
    def flow(self, id: int) -> dict[str, int] | None: ...
