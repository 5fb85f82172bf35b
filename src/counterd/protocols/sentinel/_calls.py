"""What the store asks of extensions. Floor 2."""

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    """A request that a token service is to answer. client: for request_token() and keep_token() of the store."""

    ticket: int
    kind: str
    flow_id: int
    count: int  # type: ignore[assignment]
    prioritized: bool
    token_id: int
    client: int
    address: str


class Lease(NamedTuple):
    """A token whose lease is over. held_ms: since when it is out. online: whether its owner is connected."""

    token_id: int
    flow_id: int
    count: int  # type: ignore[assignment]
    held_ms: int
    online: bool
