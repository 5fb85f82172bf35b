"""The rules of the sentinel protocol in chaos: narrow flows, changes of them, and invalid files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from counterd.protocols.sentinel.rules import GLOBAL, IGNORE, KEEP, RELEASE, Rules, read_rules
from history.sentinel import objects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from history.sentinel import Key, Rule

NAMESPACE = b"shop"
VALUES = ("vip", "somebody", 7)
# By flow: its threshold, strategy, how long a lease is and how long it outlives its owner, in ms.
HOT = {1: (1, IGNORE, 300, 300), 2: (3, RELEASE, 400, 300), 3: (5, KEEP, 250, 500), 4: (8, IGNORE, 5000, 200)}
COLD = dict.fromkeys(range(11, 16), (50, IGNORE, 2000, 400))
FILL = {90: (1e9, IGNORE, 60_000, 300)}  # of the client that takes all tokens
# By flow: how many a second, samples, ms of them all.
RATES = {201: (40, 4, 400), 202: (6, 2, 1000)}
AVERAGE = {203: (3, 2, 1000)}  # for each client
VALUE_RATES = {301: (10, 2, 500)}
FILL_VALUES = {390: (1e9, 10, 1000)}
ITEMS = [{"object": "vip", "count": 40, "classType": "String"}]
OFFLINE_MAX_S = 0.5  # of all of these
WINDOW_MAX_S = 1.0

# Changes of the rules, by flow; None: the flow has no rule. The terms of leases do not change.
CHANGES: tuple[dict[int, dict[str, Any] | None], ...] = (
    {1: {"count": 2}, 4: {"count": 3}, 301: {"count": 20}},
    {2: None, 201: None},
    {3: {"count": 1}, 202: {"sampleCount": 4}},
    {4: None, 301: None},
    {201: {"count": 5}, 301: {"windowIntervalMs": 1000}, 1: {"count": 0}},
)
# Each would remove all rules, if any part of it were loaded.
MISTAKES = (
    "",
    "{}}",
    '{"shop": {"flowRules": [}}',
    '{"shop": {"flowRule": []}}',
    '{"shop": {"flowRules": [{"resource": "pay", "clusterMode": true, "clusterConfig": {"flowId": 0}}]}}',
    '{"shop": {"flowRules": [{"resource": "pay", "clusterMode": true, "count": -1, "clusterConfig": {"flowId": 1}}]}}',
)


def text(changes: Mapping[int, dict[str, Any] | None] | None = None) -> str:
    """The content of the file, with these changes."""
    return json.dumps(document(changes or {}))


def rules(changes: Mapping[int, dict[str, Any] | None] | None = None) -> dict[Key, Rule]:
    """The same rules for the checker of histories, without those that it does not model."""
    found = read_rules(document(changes or {}))
    return objects(Rules(tuple(rule for rule in found.flows if rule.threshold_type == GLOBAL), found.params))


def document(changes: Mapping[int, dict[str, Any] | None]) -> dict[str, Any]:
    entries = {flow: calls(flow, *terms) for flow, terms in (HOT | COLD | FILL).items()}
    entries |= {flow: rate(flow, *terms) for flow, terms in RATES.items()}
    entries |= {flow: rate(flow, *terms, type=0) for flow, terms in AVERAGE.items()}
    values = {flow: rate(flow, *terms) for flow, terms in (VALUE_RATES | FILL_VALUES).items()}
    for entry in values.values():
        del entry["grade"]
        entry |= {"paramIdx": 0, "paramFlowItemList": ITEMS}
    for flow, change in changes.items():
        of = entries if flow in entries else values
        if change is None:
            del of[flow]
            continue
        for field, value in change.items():
            (of[flow] if field in of[flow] else of[flow]["clusterConfig"])[field] = value
    return {NAMESPACE.decode(): {"flowRules": list(entries.values()), "paramFlowRules": list(values.values())}}


def calls(flow: int, count: float, strategy: int, resource: int, offline: int) -> dict[str, Any]:
    """An entry for tokens."""
    cluster = {"resourceTimeoutStrategy": strategy, "resourceTimeout": resource, "clientOfflineTime": offline}
    return entry(flow, count, 0, cluster | {"thresholdType": GLOBAL})


def rate(flow: int, count: float, samples: int, window_ms: int, type: int = GLOBAL) -> dict[str, Any]:
    return entry(flow, count, 1, {"sampleCount": samples, "windowIntervalMs": window_ms, "thresholdType": type})


def entry(flow: int, count: float, grade: int, cluster: dict[str, Any]) -> dict[str, Any]:
    return {
        "resource": f"resource {flow}",
        "count": count,
        "grade": grade,
        "clusterMode": True,
        "clusterConfig": {"flowId": flow} | cluster,
    }
