"""Any bytes are rules of the sentinel protocol, or a RulesError that says where each mistake is: no other exception.

Rules that are read can be loaded, unless the store gives a reason, and written and read again they are the same.

Input: the bytes of a file."""

from __future__ import annotations

import json
import struct
from typing import Any

from counterd.json_documents import PROBLEMS_MAX
from counterd.protocols.sentinel.rules import FlowRule, ParamRule, Rules, RulesError, parse_rules
from counterd.protocols.sentinel.wire import Tag
from fuzz.sentinel import make_store

FIELDS = (
    *("resource", "count", "grade", "clusterMode", "clusterConfig", "flowId", "thresholdType", "sampleCount"),
    *(
        "windowIntervalMs",
        "resourceTimeout",
        "clientOfflineTime",
        "resourceTimeoutStrategy",
        "paramIdx",
        "paramFlowItemList",
    ),
    *("object", "classType", "flowRules", "paramFlowRules", "controlBehavior", "limitApp", "strategy", "refResource"),
    *("warmUpPeriodSec", "maxQueueingTimeMs", "fallbackToLocalWhenFail", "acquireRefuseStrategy", "durationInSec"),
)
TOKENS = [
    *(f'"{name}": '.encode() for name in FIELDS),
    *(
        b"true",
        b"false",
        b"null",
        b"1e400",
        b"NaN",
        b"-1",
        b"2147483648",
        b"9223372036854775808",
        b'"int"',
        b'"String"',
    ),
    *(b'{"a": {"flowRules": [', b"]}}", b"\\ud800", b"\xff", b"\xef\xbb\xbf", b"[[[[[[[["),
    b'{"resource": "r", "count": 1, "clusterMode": true, "clusterConfig": {"flowId": 1}}',
    b'{"resource": "r", "count": 1, "paramIdx": 0, "clusterMode": true, "clusterConfig": {"flowId": 1}}',
]
NAMES = {Tag.INTEGER: ("int", ">i"), Tag.LONG: ("long", ">q"), Tag.BYTE: ("byte", ">b"), Tag.SHORT: ("short", ">h")}
NAMES |= {Tag.DOUBLE: ("double", ">d"), Tag.FLOAT: ("float", ">f"), Tag.BOOLEAN: ("boolean", ">?")}


def item(value: bytes, count: int) -> dict[str, Any]:
    """An entry of paramFlowItemList, from its value on the wire."""
    tag = Tag(value[0])
    if tag == Tag.STRING:
        return {"object": value[5:].decode(), "classType": "String", "count": count}
    name, layout = NAMES[tag]
    text = str(struct.unpack(layout, value[1:])[0])
    return {"object": text.lower() if tag == Tag.BOOLEAN else text.replace("inf", "Infinity").replace("nan", "NaN"),
            "classType": name, "count": count}  # fmt: skip


def written(rule: FlowRule | ParamRule) -> dict[str, Any]:
    config = {
        "flowId": rule.flow_id,
        "thresholdType": rule.threshold_type,
        "sampleCount": rule.sample_count,
        "windowIntervalMs": rule.window_ms,
    }
    told = {"resource": rule.resource, "count": rule.count, "clusterMode": True, "clusterConfig": config}
    if isinstance(rule, ParamRule):
        return {**told, "paramIdx": 0, "paramFlowItemList": [item(value, count) for value, count in rule.items.items()]}
    if rule.grade == 0:
        config["resourceTimeout"] = rule.resource_timeout_ms
        config["clientOfflineTime"] = rule.client_offline_ms
        config["resourceTimeoutStrategy"] = rule.resource_timeout_strategy
    return {**told, "grade": rule.grade}


def document(rules: Rules) -> dict[str, dict[str, list[Any]]]:
    found: dict[str, dict[str, list[Any]]] = {}
    for name, some in (("flowRules", rules.flows), ("paramFlowRules", rules.params)):
        for rule in some:
            found.setdefault(rule.namespace, {}).setdefault(name, []).append(written(rule))
    return found


def by_id(rules: Rules) -> tuple[dict[int, FlowRule], dict[int, ParamRule]]:
    return {rule.flow_id: rule for rule in rules.flows}, {rule.flow_id: rule for rule in rules.params}


def check_problems(problems: tuple[str, ...]) -> None:
    assert 0 < len(problems) <= PROBLEMS_MAX + 1
    for problem in problems:
        assert problem.isprintable()
        assert problem.startswith(("line ", "the document", "namespace "))


def one_input(data: bytes) -> None:
    try:
        rules = parse_rules(data)
    except RulesError as error:
        check_problems(error.problems)
        return
    again = parse_rules(json.dumps(document(rules)))
    assert repr(by_id(again)) == repr(by_id(rules))  # as text: what has no rule for calls has no leases to compare
    store = make_store(tokens=8)
    try:
        store.load_rules(rules)
    except ValueError:
        return
    store.audit()
    assert store.snapshot()["rules_flow"] == len(rules.flows)
