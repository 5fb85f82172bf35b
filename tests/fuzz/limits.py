"""Any bytes are limits of the counter protocol, or a DocumentError that says where each mistake is.

Limits that are read can be loaded; the rule that the engine then finds for a name is the document's; and written
and read again they are the same.

Input: the bytes of a file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from counterd.json_documents import PROBLEMS_MAX, DocumentError
from counterd.protocols.counter._tables import TABLES
from counterd.protocols.counter.limits import Limits, Rule, parse_limits
from kit.counters import make_store

if TYPE_CHECKING:
    from collections.abc import Sequence

TOKENS = [
    *(b'"permits": [', b'"rates": [', b'"name": ', b'"maximum": ', b'"limit": ', b'"period": ', b'"burst": '),
    *(b"true", b"null", b"1e400", b"NaN", b"-1", b"0.000001", b"4294967296", b'"*"', b"\\ud800", b"\xff", b"[[[[[["),
    b'{"permits": [{"name": "a*", "maximum": 1}], "rates": []}',
    b'{"name": "a", "limit": 1, "period": 1, "burst": 1}, ',
]


def written(limits: Limits) -> dict[str, list[dict[str, Any]]]:
    return {
        "permits": [{"name": str(rule), "maximum": rule.most} for rule in limits.permits],
        "rates": [
            {"name": str(rule), "limit": rule.most, "period": rule.period_us / 1_000_000, "burst": rule.burst}
            for rule in limits.rates
        ],
    }


def best(rules: Sequence[Rule], name: bytes) -> Rule | None:
    """The rule of the name itself, else that of the longest prefix: an independent implementation."""
    fitting = [
        rule for rule in rules if (name.startswith(rule.name) if rule.is_prefix else rule.name == name)
    ]  # fmt: skip
    return max(fitting, key=lambda rule: (not rule.is_prefix, len(rule.name)), default=None)


def check_problems(problems: tuple[str, ...]) -> None:
    assert 0 < len(problems) <= PROBLEMS_MAX + 1
    for problem in problems:
        assert problem.isprintable()
        assert problem.startswith(("line ", "the document", "permits", "rates", "'", '"'))


def one_input(data: bytes) -> None:
    try:
        limits = parse_limits(data)
    except DocumentError as error:
        check_problems(error.problems)
        return
    exact = all(round(rule.period_us / 1_000_000 * 1_000_000) == rule.period_us for rule in limits.rates)
    assert not exact or parse_limits(json.dumps(written(limits))) == limits
    store = make_store(buckets=2)
    store.load_limits(limits)
    table = next(table for table in TABLES if table.name == "limit")
    rules = {rule.name for rule in (*limits.permits, *limits.rates)}
    for name in [*rules, *(name + b"x" for name in rules), *(name[:-1] for name in rules)]:
        walk = table.open(store, {"name": name.decode("latin-1")})
        assert walk.step()
        expected = [best(limits.permits, name), best(limits.rates, name)]
        assert [(row[1], row[2]) for row in walk.rows()] == [
            (str(rule).encode(), rule.most) for rule in expected if rule is not None
        ]
    store.audit()
