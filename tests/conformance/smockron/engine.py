"""A smockron store in memory with the tests' settings; kit/pump.py drives it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from conformance.smockron.dialect import port_of
from counterd.protocols.smockron._session import open_store
from counterd.protocols.smockron.rules import parse_rules
from kit import pump

HERE = Path(__file__).parent
RULES = {
    name: parse_rules((HERE / f"{file}.json").read_text())
    for name, file in (("first", "rules"), ("changed", "changed"))
}
HASH_KEY = bytes(range(16))


def make_store(rules: Any = None, **settings: Any) -> Any:
    """A store with a known key. rules: in place of those of the vectors."""
    defaults = {
        "identifiers": 1024, "message_max": 1 << 16, "posted_max": 1 << 20, "hash_key": HASH_KEY,
        "now_ns": pump.START_NS,
    }  # fmt: skip
    store = open_store(**(defaults | settings))
    store.load_rules(RULES["first"] if rules is None else rules)
    return store


class Pump(pump.Pump):
    """A pump whose connections come to the port that their names say."""

    def connect_by_name(self, name: str) -> pump.Peer:
        """Opens a connection, which is greeted at once."""
        peer = self.connect(port_of(name))
        self.settle()
        return peer

    def happen(self, name: str) -> None:
        self.store.load_rules(RULES[name])
