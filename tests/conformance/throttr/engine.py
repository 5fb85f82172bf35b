"""A throttr store in memory with the tests' settings; kit/pump.py drives it."""

from __future__ import annotations

from typing import Any

from conformance.throttr.dialect import MAX_MESSAGE
from counterd.protocols.throttr._session import open_store

KEY = bytes(range(16))


def make_store(
    value_size: int = 2,
    memory_limit: int = 1 << 22,
    max_message: int = MAX_MESSAGE,
    max_queued: int = 1 << 20,
    expiry_grace_ns: int = 0,
) -> Any:
    """A store with a known key."""
    return open_store(
        value_size=value_size,
        memory_limit=memory_limit,
        max_message=max_message,
        max_queued=max_queued,
        expiry_grace_ns=expiry_grace_ns,
        hash_key=KEY,
        now_ns=0,
    )
