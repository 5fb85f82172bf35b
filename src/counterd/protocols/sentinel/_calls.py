"""The calls that the store makes to extensions. Floor 2 (ARCHITECTURE.md)."""

from __future__ import annotations

from typing import NamedTuple


class Call(NamedTuple):
    """A request for a token service. client: the argument for the store's request_token() and keep_token()."""

    ticket: int
    kind: str
    flow_id: int
    count: int  # type: ignore[assignment]
    prioritized: bool
    token_id: int
    client: int
    address: str


class Lease(NamedTuple):
    """A token whose lease is over.

    held_ms: for how long the token has been held. online: whether its owner is connected.
    """

    token_id: int
    flow_id: int
    count: int  # type: ignore[assignment]
    held_ms: int
    online: bool
