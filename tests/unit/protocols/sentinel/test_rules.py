"""The rules of the sentinel protocol: rules of the Java server are accepted, and mistakes are reported with their
place."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterd.json_documents import PROBLEMS_MAX
from counterd.protocols.sentinel import rules
from counterd.protocols.sentinel.rules import FlowRule, ParamRule, Rules, RulesError, parse_rules, read_rules
from counterd.protocols.sentinel.wire import Tag, Typed, encode_value

Json = dict[str, Any]
I32 = 2**31 - 1
I64 = 2**63 - 1


def flow(cluster: Json | None = None, **fields: Any) -> Json:
    return {
        "resource": "pay",
        "count": 10,
        "clusterMode": True,
        "clusterConfig": {"flowId": 1} | (cluster or {}),
    } | fields


def param(cluster: Json | None = None, **fields: Any) -> Json:
    return flow(cluster) | {"paramIdx": 0} | fields


def item(object: Any, class_type: Any = "", count: Any = 5, **fields: Any) -> Json:
    return {"object": object, "count": count, "classType": class_type} | fields


def document(*flows: Any, params: Any = (), namespace: str = "shop") -> Json:
    return {namespace: {"flowRules": list(flows), "paramFlowRules": list(params)}}


def problems(given_document: object) -> list[str]:
    with pytest.raises(RulesError) as caught:
        read_rules(given_document)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def whole(low: int, high: int, value: int) -> str:
    return f"must be a whole number from {low} to {high}, not {value}"


FLOW = FlowRule(
    namespace="shop",
    flow_id=1,
    resource="pay",
    grade=1,
    count=10.0,
    threshold_type=0,
    sample_count=10,
    window_ms=1000,
    resource_timeout_ms=2000,
    client_offline_ms=2000,
    resource_timeout_strategy=0,
)
PARAM = ParamRule(
    namespace="shop", flow_id=1, resource="pay", count=10.0, threshold_type=0, sample_count=10, window_ms=1000, items={}
)

# As the real server's command cluster/server/flowRules and a dashboard print them.
JAVA = """
{
  "shop": {
    "flowRules": [
      {"clusterConfig": {"acquireRefuseStrategy": 0, "clientOfflineTime": 3000, "fallbackToLocalWhenFail": true,
        "flowId": 9223372036854775807, "resourceTimeout": 500, "resourceTimeoutStrategy": 2, "sampleCount": 5,
        "strategy": 0, "thresholdType": 1, "windowIntervalMs": 2000},
       "clusterMode": true, "controlBehavior": 0, "count": 2.5, "grade": 0, "id": 7, "limitApp": "default",
       "maxQueueingTimeMs": 500, "refResource": null, "regex": false, "resource": "caf\\u00e9", "strategy": 0,
       "warmUpPeriodSec": 10, "app": "web", "ip": "10.0.0.1", "port": 8719, "gmtCreate": "", "gmtModified": 1},
      {"resource": "local", "count": 1, "grade": 9, "clusterMode": false}
    ],
    "paramFlowRules": [
      {"burstCount": 0, "clusterConfig": {"fallbackToLocalWhenFail": false, "flowId": 1, "sampleCount": 10,
        "thresholdType": 1, "windowIntervalMs": 1000}, "clusterMode": true, "controlBehavior": 0, "count": 1e2,
       "durationInSec": 1, "grade": 1, "limitApp": "default", "maxQueueingTimeMs": 0, "regex": false,
       "paramFlowItemList": [{"classType": "int", "count": 0, "object": "5"}], "paramIdx": -1, "resource": "pay"}
    ]
  },
  "empty": {}
}
"""


# ---- what is taken


@pytest.mark.parametrize("text", [JAVA, JAVA.encode(), "\ufeff" + JAVA, b"\xef\xbb\xbf" + JAVA.encode()])
def test_rules_as_java_prints_them(text: str | bytes) -> None:
    found = parse_rules(text)
    assert found.flows == (FlowRule("shop", 2**63 - 1, "café", 0, 2.5, 1, 5, 2000, 500, 3000, 2),)
    assert found.params == (ParamRule("shop", 1, "pay", 100.0, 1, 10, 1000, {b"\0\0\0\0\5": 0}),)
    assert type(found.params[0].count) is float


def test_the_example_in_the_documentation() -> None:
    page = Path(__file__).parents[4] / "docs" / "protocols" / "sentinel.md"
    (example,) = re.findall(r"```json\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    found = parse_rules(example)
    assert [(rule.flow_id, rule.grade, rule.resource_timeout_strategy) for rule in found.flows] == [
        (101, 1, 0),
        (103, 0, 2),
    ]
    assert [rule.items for rule in found.params] == [{encode_value(Typed(Tag.LONG, 7)): 50}]


@pytest.mark.parametrize("nothing", [{}, {"a": {}}, {"a": {"flowRules": None, "paramFlowRules": []}}])
def test_empty_rules(nothing: Json) -> None:
    assert read_rules(nothing) == Rules()


def test_defaults_are_those_of_java() -> None:
    assert read_rules(document(flow(), params=[param()])) == Rules((FLOW,), (PARAM,))
    assert (rules.DEFAULT_TIMEOUT_MS, rules.QPS, rules.AVERAGE_LOCAL) == (2000, 1, 0)


def test_null_counts_as_missing() -> None:
    nulls = dict.fromkeys(rules._FLOW_CLUSTER)
    entry = dict.fromkeys(rules._FLOW) | flow() | {"clusterConfig": nulls | {"flowId": 1}}
    assert read_rules(document(entry)).flows == (FLOW,)
    entry = dict.fromkeys(rules._PARAM) | param()
    assert read_rules(document(params=[entry])).params == (PARAM,)


def test_rules_keep_the_order_of_the_document() -> None:
    entries = [flow({"flowId": number}) for number in (5, 3, 9)]
    found = read_rules(document(*entries[:2]) | document(entries[2], namespace="b"))
    assert [(rule.namespace, rule.flow_id) for rule in found.flows] == [("shop", 5), ("shop", 3), ("b", 9)]


def test_rules_without_cluster_mode_are_skipped() -> None:
    other = {"resource": " ", "count": -1, "clusterMode": False, "clusterConfig": 5, "grade": "x"}
    assert read_rules(document(other, {}, {"clusterMode": None}, params=[{"paramIdx": "x"}])) == Rules()
    assert problems(document(other | {"clustermode": True})) == [
        'namespace "shop": flowRules[0] (resource " "): clustermode: unknown field, did you mean clusterMode?'
    ]
    assert problems(document({"clusterMode": "true"})) == [
        'namespace "shop": flowRules[0]: clusterMode: must be true or false, not "true"'
    ]


def test_the_ends_of_all_ranges() -> None:
    least = {"flowId": 1, "sampleCount": 1, "windowIntervalMs": 1, "resourceTimeout": 1, "clientOfflineTime": 1}
    most = {
        "flowId": 2**63 - 1,
        "sampleCount": 128,
        "windowIntervalMs": 86_400_000,
        "resourceTimeout": 2**31 - 1,
        "clientOfflineTime": 2**31 - 1,
    }
    found = read_rules(document(flow(least, grade=0, count=-0.0), flow(most, grade=0, count=1.7e308), params=()))
    assert [(rule.sample_count, rule.window_ms, rule.client_offline_ms) for rule in found.flows] == [
        (1, 1, 1),
        (128, 86_400_000, 2**31 - 1),
    ]
    assert math.copysign(1, found.flows[0].count) == 1


def test_fields_that_a_rate_does_not_use_are_not_checked() -> None:
    odd = {"resourceTimeout": 0, "clientOfflineTime": -1, "resourceTimeoutStrategy": 9, "acquireRefuseStrategy": -9}
    assert read_rules(document(flow(odd))).flows == (FLOW,)
    found = read_rules(document(flow({"strategy": 9}, grade=0, strategy=1, controlBehavior=3, warmUpPeriodSec=0)))
    assert found.flows[0].grade == 0


def test_a_flow_rule_and_a_parameter_rule_with_the_same_id() -> None:
    assert read_rules(document(flow(), params=[param()])).flows[0].flow_id == 1


def test_the_longest_name() -> None:
    name = "\N{EURO SIGN}" * 337 + "ab"
    assert len(name.encode()) == 1013
    assert read_rules(document(flow(), namespace=name)).flows[0].namespace == name
    assert problems(document(namespace=name + "c")) == [
        f'namespace "{name[:60]}...": its name has 1014 bytes, but a PING can hold at most 1013'
    ]


# ---- items

ITEMS = [
    ("int", "+5", Typed(Tag.INTEGER, 5)),
    ("java.lang.Integer", "-2147483648", Typed(Tag.INTEGER, -(2**31))),
    ("long", "5", Typed(Tag.LONG, 5)),
    ("java.lang.Long", "007", Typed(Tag.LONG, 7)),
    ("double", "1", Typed(Tag.DOUBLE, 1.0)),
    ("double", " -.5e1d ", Typed(Tag.DOUBLE, -5.0)),
    ("double", "NaN", Typed(Tag.DOUBLE, math.nan)),
    ("java.lang.Double", "-Infinity", Typed(Tag.DOUBLE, -math.inf)),
    ("float", "1.1F", Typed(Tag.FLOAT, 1.1)),
    ("java.lang.Float", "7.", Typed(Tag.FLOAT, 7.0)),
    ("byte", "-128", Typed(Tag.BYTE, -128)),
    ("java.lang.Byte", "127", Typed(Tag.BYTE, 127)),
    ("short", "-32768", Typed(Tag.SHORT, -32768)),
    ("java.lang.Short", "1", Typed(Tag.SHORT, 1)),
    ("boolean", "TRUE", Typed(Tag.BOOLEAN, True)),
    ("java.lang.Boolean", "false", Typed(Tag.BOOLEAN, False)),
    ("String", "5", "5"),
    ("java.lang.String", "", ""),
    ("", "gr\u00fcn", "gr\u00fcn"),
    (" ", " x ", " x "),
    (None, "\U0001f600", "\U0001f600"),
]


def test_items_equal_the_values_that_clients_send() -> None:
    entry = param(paramFlowItemList=[item(text, kind, index) for index, (kind, text, _) in enumerate(ITEMS)])
    (rule,) = read_rules(document(params=[entry])).params
    assert rule.items == {encode_value(value): index for index, (_, _, value) in enumerate(ITEMS)}


@pytest.mark.parametrize(
    ("wrong", "where", "what"),
    [
        (item("x", "char"), "classType", "no client can send a char: it has no type on the wire"),
        (item("x", "java.lang.Character"), "classType", "no client can send a java.lang.Character: it has no type .*"),
        (item("1", "Integer"), "classType", 'unknown type "Integer", did you mean java.lang.Integer?'),
        (item("1", "INT"), "classType", 'unknown type "INT", did you mean int?'),
        (item("1", "java.util.Date"), "classType", 'unknown type "java.util.Date"'),
        (item("1", 5), "classType", "must be a string, not 5"),
        (
            item("1.0", "int"),
            "object",
            '"1.0" is not a value of type int that a client can send: it must be a whole number',
        ),
        (
            item(" 1", "int"),
            "object",
            '" 1" is not a value of type int that a client can send: it must be a whole number',
        ),
        (item("1_0", "int"), "object", '"1_0" is not a value of type int .*: it must be a whole number'),
        (item("\u0661", "int"), "object", '"\u0661" is not a value of type int .*: it must be a whole number'),
        (
            item("1" * 401, "long"),
            "object",
            f'"{"1" * 60}..." is not a value of type long that a client can send: it is too long',
        ),
        (
            item("2147483648", "int"),
            "object",
            '"2147483648" is not a value of type int that a client can send: it is out of range',
        ),
        (item("128", "byte"), "object", '"128" is not a value of type byte .*: it is out of range'),
        (item("1e400", "double"), "object", '"1e400" is not a value of type double .*: it is out of range'),
        (item("1e39", "float"), "object", '"1e39" is not a value of type float .*: it is out of range'),
        (item("0x1p3", "double"), "object", '"0x1p3" is not a value of type double .*: it must be a number'),
        (item("nan", "double"), "object", '"nan" is not a value of type double .*: it must be a number'),
        (item("", "double"), "object", '"" is not a value of type double .*: it must be a number'),
        (item("yes", "boolean"), "object", '"yes" is not a value of type boolean .*: it must be true or false'),
        (
            item("v" * 997),
            "object",
            '"v{60}..." is not a value of type String that a client can send: it does not fit into a request',
        ),
        (item(5), "object", "must be a string, not 5"),
        (item(None), "object", "is missing"),
        (item("\udfff"), "object", r'must be Unicode, not "\\udfff"'),
        (item("1", count=-1), "count", whole(0, I32, -1)),
        (item("1", count=None), "count", "is missing"),
        (item("1", count=2**31), "count", whole(0, I32, 2**31)),
        (item("1", klass=5), "klass", "unknown field"),
        (item("2"), "object", '"2" is given twice'),
    ],
)
def test_invalid_items_are_reported(wrong: Json, where: str, what: str) -> None:
    (problem,) = problems(document(params=[param(paramFlowItemList=[item("2"), wrong])]))
    place = f'namespace "shop": paramFlowRules[0] (resource "pay"): paramFlowItemList[1].{where}: '
    assert problem.startswith(place)
    assert problem.removeprefix(place) == what or re.fullmatch(what, problem.removeprefix(place))


# ---- what is wrong


def at(where: str, what: str) -> str:
    return f'namespace "shop": flowRules[0] (resource "pay"): {where}: {what}'


def within(where: str, what: str) -> str:
    return at(f"clusterConfig.{where}", what)


def positive(behavior: int, value: int) -> str:
    return f"must be positive with controlBehavior {behavior}, not {value}"


MULTIPLE = "1000 must be a multiple of sampleCount, 3"


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (flow(count=-0.5), at("count", "must be a finite number of at least 0, not -0.5")),
        (flow(count=math.nan), at("count", "must be a finite number of at least 0, not nan")),
        (flow(count=math.inf), at("count", "must be a finite number of at least 0, not inf")),
        (flow(count=10**400), at("count", "must be a finite number of at least 0, not a number of 1329 bits")),
        (flow(count="10"), at("count", 'must be a finite number of at least 0, not "10"')),
        (flow(count=True), at("count", "must be a finite number of at least 0, not true")),
        (flow(count=None), at("count", "is missing")),
        (flow(grade=2), at("grade", whole(0, 1, 2))),
        (flow(grade=1.0), at("grade", "must be a whole number from 0 to 1, not 1.0")),
        (flow(grade=True), at("grade", "must be a whole number from 0 to 1, not true")),
        (flow(regex=True), at("regex", "a cluster rule cannot use a regular expression for its resource")),
        (flow(limitApp=5), at("limitApp", "must be a string, not 5")),
        (flow(strategy=-1), at("strategy", whole(0, I32, -1))),
        (flow(strategy=1), at("refResource", "must not be blank with strategy 1")),
        (flow(strategy=2, refResource=" "), at("refResource", "must not be blank with strategy 2")),
        (flow(controlBehavior=1, warmUpPeriodSec=0), at("warmUpPeriodSec", positive(1, 0))),
        (flow(controlBehavior=2, maxQueueingTimeMs=-1), at("maxQueueingTimeMs", positive(2, -1))),
        (flow(controlBehavior=3, maxQueueingTimeMs=0), at("maxQueueingTimeMs", positive(3, 0))),
        (flow(clusterConfig=None), at("clusterConfig", "is missing")),
        (flow(clusterConfig=[]), at("clusterConfig", "must be an object, not an array")),
        (flow({"flowId": None}), within("flowId", "is missing")),
        (flow({"flowId": 0}), within("flowId", whole(1, I64, 0))),
        (flow({"flowId": 2**63}), within("flowId", whole(1, I64, 2**63))),
        (flow({"thresholdType": 2}), within("thresholdType", whole(0, 1, 2))),
        (flow({"strategy": 1}), within("strategy", whole(0, 0, 1))),
        (flow({"sampleCount": 0}), within("sampleCount", whole(1, 128, 0))),
        (flow({"sampleCount": 129}), within("sampleCount", whole(1, 128, 129))),
        (flow({"sampleCount": 3}), within("windowIntervalMs", MULTIPLE)),
        (flow({"windowIntervalMs": 86_400_001}), within("windowIntervalMs", whole(1, 86400000, 86400001))),
        (flow({"fallbackToLocalWhenFail": 1}), within("fallbackToLocalWhenFail", "must be true or false, not 1")),
        (flow({"resourceTimeout": 0}, grade=0), within("resourceTimeout", whole(1, I32, 0))),
        (flow({"clientOfflineTime": 2**31}, grade=0), within("clientOfflineTime", whole(1, I32, 2**31))),
        (flow({"resourceTimeoutStrategy": 3}, grade=0), within("resourceTimeoutStrategy", whole(0, 2, 3))),
        (flow({"acquireRefuseStrategy": -1}, grade=0), within("acquireRefuseStrategy", whole(0, I32, -1))),
        (flow({"flowID": 1}), within("flowID", "unknown field, did you mean flowId?")),
        (flow(qps=1), at("qps", "unknown field")),
        (flow(**{"a\nb": 1}), at('"a\\nb"', "unknown field")),
        (flow(resource=None), 'namespace "shop": flowRules[0]: resource: is missing'),
        (flow(resource=5), 'namespace "shop": flowRules[0]: resource: must be a string, not 5'),
        (flow(resource="\t "), 'namespace "shop": flowRules[0] (resource "\\t "): resource: must not be blank'),
        (
            flow(resource="\ud800"),
            'namespace "shop": flowRules[0] (resource "\\ud800"): resource: must be Unicode, not "\\ud800"',
        ),
        ("pay", 'namespace "shop": flowRules[0]: must be an object, not "pay"'),
        (None, 'namespace "shop": flowRules[0]: must be an object, not null'),
    ],
)  # fmt: skip
def test_a_mistake_is_reported_with_its_place(entry: Any, problem: str) -> None:
    assert problems(document(entry)) == [problem]


@pytest.mark.parametrize(
    ("entry", "where", "what"),
    [
        (param(paramIdx=None), "paramIdx", "is missing"),
        (param(paramIdx=2**31), "paramIdx", whole(-I32 - 1, I32, 2**31)),
        (param(grade=-1), "grade", whole(0, I32, -1)),
        (param(controlBehavior=-1), "controlBehavior", whole(0, I32, -1)),
        (param(maxQueueingTimeMs=-1), "maxQueueingTimeMs", whole(0, I32, -1)),
        (param(burstCount=-1), "burstCount", whole(0, I32, -1)),
        (param(durationInSec=0), "durationInSec", whole(1, I64, 0)),
        (param(strategy=0), "strategy", "unknown field"),
        (param(regex=True), "regex", "a cluster rule cannot use a regular expression for its resource"),
        (param({"resourceTimeout": 1}), "clusterConfig.resourceTimeout", "unknown field"),
        (param({"sampleCount": 3}), "clusterConfig.windowIntervalMs", MULTIPLE),
        (param(clusterConfig=None), "clusterConfig", "is missing"),
        (param(paramFlowItemList={}), "paramFlowItemList", "must be an array, not an object"),
        (param(paramFlowItemList=[0]), "paramFlowItemList[0]", "must be an object, not 0"),
    ],
)
def test_a_mistake_of_a_parameter_rule(entry: Json, where: str, what: str) -> None:
    assert problems(document(params=[entry])) == [
        f'namespace "shop": paramFlowRules[0] (resource "pay"): {where}: {what}'
    ]


@pytest.mark.parametrize(
    ("given_document", "problem"),
    [
        ([], "the document: must be an object with a member for each namespace, not an array"),
        (5.5, "the document: must be an object with a member for each namespace, not 5.5"),
        (object(), "the document: must be an object with a member for each namespace, not a object of Python"),
        ({"": {}}, 'namespace "": its name must not be blank'),
        ({" \t": {}}, 'namespace " \\t": its name must not be blank'),
        ({"\udc00": {}}, 'namespace "\\udc00": its name must be Unicode'),
        ({5: {}}, "namespace 5: its name must be Unicode"),
        ({"a": []}, 'namespace "a": must be an object with flowRules and paramFlowRules, not an array'),
        ({"a": {"flowRules": {}}}, 'namespace "a": flowRules: must be an array, not an object'),
        ({"a": {"flowrules": []}}, 'namespace "a": flowrules: unknown field, did you mean flowRules?'),
        ({"a": {5: []}}, 'namespace "a": 5: unknown field'),
    ],
)
def test_a_mistake_around_the_rules(given_document: object, problem: str) -> None:
    assert problems(given_document) == [problem]


def test_all_mistakes_are_reported_at_once() -> None:
    told = problems(document(flow(grade=7, count=None), 5, params=[param({"flowId": 0}, qps=1)]) | {" ": 5})
    assert [problem.rpartition(": ")[0].rpartition(" ")[2] for problem in told] == [
        "count", "grade", "flowRules[1]", "qps", "clusterConfig.flowId", '"', '"',
    ]  # fmt: skip


def test_a_duplicate_flow_id_is_reported() -> None:
    told = problems(document(flow(), flow()) | document(flow(resource="b"), params=[param(), param()], namespace="x"))
    first, kept = 'namespace "shop": flowRules[0] (resource "pay")', "clusterConfig.flowId: 1 is already used by"
    second = 'namespace "x": paramFlowRules[0] (resource "pay")'
    assert told == [
        f'namespace "shop": flowRules[1] (resource "pay"): {kept} {first}',
        f'namespace "x": flowRules[0] (resource "b"): {kept} {first}',
        f'namespace "x": paramFlowRules[1] (resource "pay"): {kept} {second}',
    ]


@pytest.mark.parametrize("kind", ["flowRules", "paramFlowRules"])
def test_the_largest_number_of_rules_is_read(kind: str) -> None:
    most = rules.FLOWS_MAX if kind == "flowRules" else rules.PARAMS_MAX
    many = [param({"flowId": 1 + number}) for number in range(most)]
    if kind == "flowRules":
        for entry in many:
            del entry["paramIdx"]
    found = read_rules({"a": {kind: many}})
    assert len(found.flows) + len(found.params) == most == 16384
    what = "flow rules" if kind == "flowRules" else "parameter flow rules"
    many.append(many[0] | {"clusterConfig": {"flowId": 20000}})
    assert problems({"a": {kind: many}}) == [f"the document: 16385 {what}, but at most 16384 are possible"]


def test_too_many_namespaces() -> None:
    names = {f"n{number}": {} for number in range(1024)}
    assert read_rules(names) == Rules()
    assert problems(names | {"one": {}}) == ["the document: 1025 namespaces, but at most 1024 are possible"]


def test_the_number_of_reported_mistakes_is_bounded() -> None:
    told = problems(document({f"x{number}": 1 for number in range(5000)}))
    assert len(told) == PROBLEMS_MAX + 1
    assert told[-1] == "the document: 4900 more mistakes"


# ---- the text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", r"line 1, column 1: Expecting value"),
        ('{"a": {},\n  "b" 5}', r"line 2, column 7: Expecting ':' delimiter"),
        ("{}\n{}", r"line 2, column 1: Extra data"),
        (b'{\n"\xff": 1}', r"line 2, byte 2: not UTF-8"),
        (JAVA.encode("utf-16"), r"line 1, byte 1: not UTF-8"),
        ('{"a": "\n"}', r"line 1, column 8: Invalid control character at"),
        ("[" * 100_000, r"the document: nested too deeply"),
        ('{"a":' * 100_000, r"the document: nested too deeply"),
        ('{"a": {}, "b": {}, "a": {}}', r'namespace "a": is given twice'),
        ('{"a": {"flowRules": [], "flowRules": []}}', r'namespace "a": flowRules: is given twice'),
        (
            '{"a": {"flowRules": [{"grade": 1, "id": 1, "grade": 1}]}}',
            r'namespace "a": flowRules\[0\]: grade: is given twice',
        ),
    ],
)
def test_invalid_documents_are_reported(text: str | bytes, problem: str) -> None:
    with pytest.raises(RulesError, match=rf"^{problem}") as caught:
        parse_rules(text)
    assert len(caught.value.problems) == 1


def test_duplicate_fields_are_reported() -> None:
    text = json.dumps(document(flow(), params=[param(paramFlowItemList=[item("1")])]))
    text = text.replace('"flowId": 1', '"flowId": 1, "flowId": 1').replace(
        '"object": "1"', '"object": "1", "object": "1"'
    )
    with pytest.raises(RulesError) as caught:
        parse_rules(text)
    assert [problem.rpartition(" (")[2] for problem in caught.value.problems] == [
        'resource "pay"): clusterConfig.flowId: is given twice',
        'resource "pay"): paramFlowItemList[0].object: is given twice',
        'resource "pay"): clusterConfig.flowId: is given twice',
    ]


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        ("9" * 5000, "a number of 3322 bits"),
        ("-" + "9" * 5000, "a number of 3319 bits"),
        ("1e999", "inf"),
        ("NaN", "nan"),
        ("-Infinity", "-inf"),
    ],
)
def test_invalid_numbers_are_reported(number: str, shown: str) -> None:
    text = json.dumps(document(flow(count=1, grade=1))).replace('"grade": 1', f'"grade": {number}')
    with pytest.raises(RulesError, match=rf"grade: must be a whole number from 0 to 1, not {shown}$"):
        parse_rules(text)
    text = json.dumps(document(flow(count=77))).replace("77", number.lstrip("-") if number[1:2] == "9" else number)
    with pytest.raises(RulesError, match="count: must be a finite number of at least 0, not "):
        parse_rules(text)


# ---- any document at all

PLACE = re.compile(r"(line [0-9]+, (column|byte) [0-9]+|the document|namespace .+?): .", re.DOTALL)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([2**63, "int"])
)
fields = st.sampled_from(sorted({*rules._FLOW, *rules._PARAM, *rules._FLOW_CLUSTER, *rules._ITEM, "x"}))
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(fields | st.text(max_size=3), inner, max_size=5),
)
nearly = st.builds(
    lambda entry, cluster, extra, items: entry(cluster, paramFlowItemList=items, **extra),
    st.sampled_from([flow, param]),
    st.dictionaries(fields, scalars, max_size=3),
    st.dictionaries(fields, anything, max_size=3).map(
        lambda extra: {name: value for name, value in extra.items() if name not in ("clusterMode", "paramFlowItemList")}
    ),
    st.lists(anything | st.builds(item, scalars, scalars, scalars), max_size=2),
)
namespaces = st.dictionaries(
    st.sampled_from(["flowRules", "paramFlowRules"]), anything | st.lists(nearly, max_size=3), max_size=2
)
documents = anything | st.dictionaries(st.text(max_size=3), anything | namespaces, max_size=3)


def outcome(text: str | bytes) -> Rules | tuple[str, ...]:
    try:
        return parse_rules(text)
    except RulesError as error:
        found = error.problems
    assert found
    assert [problem for problem in found if not PLACE.match(problem)] == []
    assert "\n".join(found).encode()  # can be logged
    return found


@settings(max_examples=100, deadline=None)
@given(documents)
def test_any_document_is_read_or_refused_with_a_place(any_document: object) -> None:
    first = outcome(json.dumps(any_document))
    assert first == outcome(json.dumps(any_document, ensure_ascii=False, indent=1))
    if isinstance(first, Rules):
        assert first == read_rules(any_document)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=30) | st.text(max_size=30) | st.text('{}[]":,0-e.\\u\ud800', max_size=30))
def test_any_text_is_read_or_refused_with_a_place(text: str | bytes) -> None:
    outcome(text)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, len(JAVA)), st.integers(0, 30), st.text('{}[]":,0a', max_size=4))
def test_a_mistake_in_a_file_has_its_line(start: int, length: int, instead: str) -> None:
    outcome(JAVA[:start] + instead + JAVA[start + length :])
