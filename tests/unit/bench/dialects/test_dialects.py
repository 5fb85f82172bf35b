"""Which dialects exist, their order, and consistent declarations."""

from __future__ import annotations

from pathlib import Path

from counterd import protocols
from counterd.bench.dialects import DIALECTS, OPS_HELP, RULES, RULES_HELP


def test_each_protocol_has_a_dialect_and_other_servers_come_last() -> None:
    ours = {path.parent.name for folder in protocols.__path__ for path in Path(folder).glob("*/wire.py")}
    names = list(DIALECTS)
    assert set(names[: len(ours)]) == ours
    assert names[len(ours) :] == ["redis", "redis-lua", "memcached"]
    assert len({each.order for each in DIALECTS.values()}) == len(names)


def test_the_declarations_of_dialects_are_consistent() -> None:
    for dialect in DIALECTS.values():
        assert dialect.work in dialect.ops or {"acquire", "release"} <= set(dialect.ops)
        assert bool(dialect.checks) == bool(dialect.broken)


def test_help_texts_name_the_dialects() -> None:
    for name, dialect in DIALECTS.items():
        if dialect.ops_help:
            assert f"With {name}: {dialect.ops_help}." in OPS_HELP
    assert all(f"With {name} {rules.help}" in RULES_HELP for name, rules in RULES.items())
