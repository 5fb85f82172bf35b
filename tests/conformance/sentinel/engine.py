"""A sentinel store in memory with the tests' settings; kit/pump.py drives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conformance.sentinel.dialect import MAX_ALLOWED_QPS
from counterd.protocols.sentinel._session import open_store
from counterd.protocols.sentinel.rules import parse_rules
from kit import pump

HERE = Path(__file__).parent
RULES = {
    "first": parse_rules((HERE / "rules.json").read_text()),
    "changed": parse_rules((HERE / "changed.json").read_text()),
}
HASH_KEY, TOKEN_KEY = bytes(range(16)), bytes(range(16, 32))
MS = 1_000_000
SECOND = 1000 * MS
SWEEP_NS = 100 * MS


def make_store(rules: Any = None, **settings: Any) -> Any:
    """A store with known keys. rules: in place of those of the vectors."""
    defaults = {
        "max_tokens": 1024,
        "max_param_values": 1024,
        "max_allowed_qps": MAX_ALLOWED_QPS,
        "sweep_interval_ns": SWEEP_NS,
        "sweep_max_tokens": 0,
        "sweep_max_duration_ns": 50 * MS,
        "hash_key": HASH_KEY,
        "token_key": TOKEN_KEY,
        "now_ns": 0,
    }
    store = open_store(**(defaults | settings))
    store.load_rules(RULES["first"] if rules is None else rules)
    return store


def happen(store: Any, name: str) -> None:
    """Applies an event that vectors name to a store."""
    if name == "drain":
        store.begin_drain()
    else:
        store.load_rules(RULES[name])


class Pump(pump.Pump):
    """A pump to whose store vectors can apply events."""

    def happen(self, name: str) -> None:
        happen(self.store, name)
        self.settle()
