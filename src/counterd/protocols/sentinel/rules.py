"""Reads the rules of the sentinel protocol from Sentinel's own JSON, and collects all mistakes in it.

Floor 2 (ARCHITECTURE.md), pure Python, without files: the caller passes the document. Fields, defaults and checks are
those of Sentinel 1.8 (FlowRule, ClusterFlowConfig, ParamFlowRule, ParamFlowItem). Sentinel's server skips invalid rules
and logs them. This module refuses the whole document, because a resource without its rule would not be limited at all.
docs/protocols/sentinel.md, "Rules", describes the document.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterd.json_documents import DocumentError, Problems, read_document
from counterd.protocols.sentinel.wire import NAMESPACE_MAX, Tag, Typed, encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

FLOWS_MAX = 16384
PARAMS_MAX = 16384
NAMESPACES_MAX = 1024
SAMPLES_MAX = 128
WINDOW_MAX_MS = 86_400_000
I32_MAX = (1 << 31) - 1
I64_MAX = (1 << 63) - 1
_SHOWN = 60  # characters of a document's text that an error shows

AVERAGE_LOCAL, GLOBAL = 0, 1  # thresholdType
CONCURRENCY, QPS = 0, 1  # grade
IGNORE, RELEASE, KEEP = 0, 1, 2  # resourceTimeoutStrategy


@dataclass(frozen=True)
class FlowRule:
    """A rule for calls: by rate (grade 1: FLOW) or by concurrency (grade 0: ACQUIRE).

    count: the threshold for all clients of the namespace together or, if threshold_type is 0, for each client.
    sample_count, window_ms: the number of samples and the length of the sliding window. These fields are for grade 1.
    resource_timeout_ms, client_offline_ms, resource_timeout_strategy: how long tokens last. These fields are for grade
    0; other rules have their defaults.
    """

    namespace: str
    flow_id: int
    resource: str
    grade: int
    count: float
    threshold_type: int
    sample_count: int
    window_ms: int
    resource_timeout_ms: int
    client_offline_ms: int
    resource_timeout_strategy: int


@dataclass(frozen=True)
class ParamRule:
    """A rule for calls with the same value, by rate (PARAM).

    items: the thresholds of single values, by the value in the form of the wire (tag and bytes).
    """

    namespace: str
    flow_id: int
    resource: str
    count: float
    threshold_type: int
    sample_count: int
    window_ms: int
    items: Mapping[bytes, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Rules:
    """The rules of a document, in the order of the document."""

    flows: tuple[FlowRule, ...] = ()
    params: tuple[ParamRule, ...] = ()


RulesError = DocumentError


def parse_rules(text: bytes | str) -> Rules:
    """Reads the rules in a JSON text, in UTF-8. Raises RulesError with all mistakes."""
    return read_rules(read_document(text))


def read_rules(document: object) -> Rules:
    """Reads the rules of a parsed document: dicts, lists, strings, numbers. Raises RulesError with all mistakes."""
    problems = Problems()
    rules = _read(document, problems)
    if problems.told:
        raise RulesError(tuple(problems))
    return rules


# ---- places and problems ----


class _Object:
    """An object of the document. The object reads its fields, records mistakes, and returns a valid value in place of a
    wrong one.

    null means that the field is missing, as in Java.
    """

    def __init__(self, members: Mapping[Any, object], place: str, prefix: str, problems: Problems) -> None:
        self.members = members
        self.place = place
        self.faulty: set[str] = set()
        self._prefix = prefix
        self._problems = problems

    def wrong(self, name: str, text: str) -> None:
        self.faulty.add(name)
        self._problems.add(f"{self.place}: {self._prefix}{name}", text)

    def check_names(self, known: tuple[str, ...]) -> None:
        """Records unknown and duplicate names."""
        for name in self.members:
            if name not in known:
                self.wrong(_plain(name), f"unknown field{self._hint(name, known)}")
        for name in getattr(self.members, "twice", ()):
            self.wrong(_plain(name), "is given twice")

    def _hint(self, name: object, known: tuple[str, ...]) -> str:
        if self._problems.full or not isinstance(name, str):  # matching is slow, and wrong names may be many
            return ""
        near = difflib.get_close_matches(name[:_SHOWN], known, n=1)
        return f", did you mean {near[0]}?" if near else ""

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Reads a whole number. A field without a default is required."""
        value = self.members.get(name)
        if value is None and default is not None:
            return default
        if value is None:
            self.wrong(name, "is missing")
        elif not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            self.wrong(name, f"must be a whole number from {low} to {high}, not {_shown(value)}")
        else:
            return value
        return low if default is None else default

    def number(self, name: str) -> float:
        """Reads a threshold."""
        value = self.members.get(name)
        if value is None:
            self.wrong(name, "is missing")
            return 0.0
        try:
            if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= float(value) < math.inf:
                return abs(float(value))  # abs: -0.0 becomes 0.0
        except OverflowError:
            pass
        self.wrong(name, f"must be a finite number of at least 0, not {_shown(value)}")
        return 0.0

    def boolean(self, name: str, default: bool) -> bool:
        value = self.members.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(name, f"must be true or false, not {_shown(value)}")
            return default
        return value

    def text(self, name: str, *, needed: bool = False, blank: bool = True) -> str:
        """Reads a string that UTF-8 can encode. needed: whether it is required. blank: whether it may be blank."""
        value = self.members.get(name)
        if value is None and not needed:
            return ""
        if value is None:
            self.wrong(name, "is missing")
        elif not isinstance(value, str):
            self.wrong(name, f"must be a string, not {_shown(value)}")
        elif _is_broken(value):
            self.wrong(name, f"must be Unicode, not {_shown(value)}")
        elif not blank and not value.strip():
            self.wrong(name, "must not be blank")
        else:
            return value
        return ""

    def child(self, name: str) -> _Object | None:
        """Reads an object, which is required."""
        value = self.members.get(name)
        if value is None:
            self.wrong(name, "is missing")
        elif not isinstance(value, dict):
            self.wrong(name, f"must be an object, not {_shown(value)}")
        else:
            return _Object(value, self.place, f"{self._prefix}{name}.", self._problems)
        return None

    def children(self, name: str) -> Iterator[_Object]:
        """Yields the objects of an array, which may be missing."""
        value = self.members.get(name)
        if value is not None and not isinstance(value, (list, tuple)):
            self.wrong(name, f"must be an array, not {_shown(value)}")
            return
        for index, each in enumerate(value or ()):
            if isinstance(each, dict):
                yield _Object(each, self.place, f"{self._prefix}{name}[{index}].", self._problems)
            else:
                self.wrong(f"{name}[{index}]", f"must be an object, not {_shown(each)}")

    def rules(self, name: str) -> Iterator[_Object]:
        """Yields the objects of an array of rules. The places of these objects in messages include the resource."""
        for rule in self.children(name):
            resource = rule.members.get("resource")
            shown = f" (resource {_shown(resource)})" if isinstance(resource, str) else ""
            place = f"{rule.place}: {rule._prefix.removesuffix('.')}{shown}"
            yield _Object(rule.members, place, "", self._problems)


def _is_broken(text: str) -> bool:
    """Returns whether a string contains half a surrogate pair, which JSON allows."""
    return re.search("[\ud800-\udfff]", text) is not None


def _plain(name: object) -> str:
    """Returns a name from the document unchanged if it is harmless. Otherwise returns it as _shown() formats it."""
    return name if isinstance(name, str) and re.fullmatch(r"[\w.$-]{1,60}", name) else _shown(name)


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, str):
        cut = value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."
        return json.dumps(cut, ensure_ascii=not cut.isprintable())
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else f"a number of {value.bit_length()} bits"
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, (dict, list, tuple)):
        return "an object" if isinstance(value, dict) else "an array"
    return f"a {type(value).__name__} of Python"


# ---- rules ----

# Fields that Sentinel's dashboard adds; they are ignored.
_IGNORED = ("id", "app", "ip", "port", "gmtCreate", "gmtModified")
_RULE = (
    *("resource", "limitApp", "regex", "grade", "count", "controlBehavior", "maxQueueingTimeMs"),
    *("clusterMode", "clusterConfig"),
    *_IGNORED,
)
_FLOW = (*_RULE, "strategy", "refResource", "warmUpPeriodSec")
_PARAM = (*_RULE, "paramIdx", "burstCount", "durationInSec", "paramFlowItemList")
_CLUSTER = ("flowId", "thresholdType", "fallbackToLocalWhenFail", "sampleCount", "windowIntervalMs")
_FLOW_CLUSTER = (
    *_CLUSTER,
    *("strategy", "resourceTimeout", "resourceTimeoutStrategy", "acquireRefuseStrategy", "clientOfflineTime"),
)
_ITEM = ("object", "count", "classType")

DEFAULT_TIMEOUT_MS = 2000  # resourceTimeout and clientOfflineTime


def _read(document: object, problems: Problems) -> Rules:
    if not isinstance(document, dict):
        problems.add("the document", f"must be an object with a member for each namespace, not {_shown(document)}")
        return Rules()
    for name in getattr(document, "twice", ()):
        problems.add(f"namespace {_shown(name)}", "is given twice")
    if len(document) > NAMESPACES_MAX:
        problems.add("the document", f"{len(document)} namespaces, but at most {NAMESPACES_MAX} are possible")
    flows, params = _Ids("flow rules", FLOWS_MAX), _Ids("parameter flow rules", PARAMS_MAX)
    flow_rules: list[FlowRule] = []
    param_rules: list[ParamRule] = []
    for name, members in document.items():
        place = f"namespace {_shown(name)}"
        if not _check_namespace(name, members, place, problems):
            continue
        namespace = _Object(members, place, "", problems)
        namespace.check_names(("flowRules", "paramFlowRules"))
        for entry in namespace.rules("flowRules"):
            if flow := _flow(entry, name, flows):
                flow_rules.append(flow)
        for entry in namespace.rules("paramFlowRules"):
            if param := _param(entry, name, params):
                param_rules.append(param)
    for ids in (flows, params):
        ids.check(problems)
    return Rules(tuple(flow_rules), tuple(param_rules))


def _check_namespace(name: object, members: object, place: str, problems: Problems) -> bool:
    """Checks the name of a namespace. Returns whether the members of the namespace can be read."""
    if not isinstance(name, str) or _is_broken(name):
        problems.add(place, "its name must be Unicode")
    elif not name.strip():
        problems.add(place, "its name must not be blank")
    elif len(name.encode()) > NAMESPACE_MAX:
        problems.add(place, f"its name has {len(name.encode())} bytes, but a PING can hold at most {NAMESPACE_MAX}")
    if not isinstance(members, dict):
        problems.add(place, f"must be an object with flowRules and paramFlowRules, not {_shown(members)}")
        return False
    return True


class _Ids:
    """The flowIds of the rules of one kind, in all namespaces."""

    def __init__(self, what: str, most: int) -> None:
        self._what = what
        self._most = most
        self._count = 0
        self._places: dict[int, str] = {}

    def take(self, cluster: _Object) -> int:
        """Reads the flowId of the next rule."""
        self._count += 1
        flow_id = cluster.whole("flowId", 1, I64_MAX)
        if "flowId" not in cluster.faulty:
            owner = self._places.setdefault(flow_id, cluster.place)
            if owner is not cluster.place:
                cluster.wrong("flowId", f"{flow_id} is already used by {owner}")
        return flow_id

    def check(self, problems: Problems) -> None:
        if self._count > self._most:
            problems.add("the document", f"{self._count} {self._what}, but at most {self._most} are possible")


def _flow(entry: _Object, namespace: str, ids: _Ids) -> FlowRule | None:
    """Reads a flow rule. Returns None if the rule is not for a cluster."""
    entry.check_names(_FLOW)
    if not entry.boolean("clusterMode", False):
        return None
    resource, count = _common(entry)
    grade = entry.whole("grade", CONCURRENCY, QPS, QPS)
    strategy, behavior = entry.whole("strategy", 0, I32_MAX, 0), entry.whole("controlBehavior", 0, I32_MAX, 0)
    reference = entry.text("refResource")
    warm_up = entry.whole("warmUpPeriodSec", -I32_MAX - 1, I32_MAX, 10)
    queueing = entry.whole("maxQueueingTimeMs", -I32_MAX - 1, I32_MAX, 500)
    if grade == QPS:  # as in Java, these checks include fields that only clients use
        if strategy in (1, 2) and not reference.strip():
            entry.wrong("refResource", f"must not be blank with strategy {strategy}")
        if behavior in (1, 3) and warm_up <= 0:
            entry.wrong("warmUpPeriodSec", f"must be positive with controlBehavior {behavior}, not {warm_up}")
        if behavior in (2, 3) and queueing <= 0:
            entry.wrong("maxQueueingTimeMs", f"must be positive with controlBehavior {behavior}, not {queueing}")
    cluster = entry.child("clusterConfig")
    if cluster is None:
        return None
    cluster.check_names(_FLOW_CLUSTER)
    flow_id, threshold_type, sample_count, window_ms = _cluster(cluster, ids)
    timeout = offline = DEFAULT_TIMEOUT_MS
    timeout_strategy = IGNORE
    if grade == CONCURRENCY:
        timeout = cluster.whole("resourceTimeout", 1, I32_MAX, DEFAULT_TIMEOUT_MS)
        offline = cluster.whole("clientOfflineTime", 1, I32_MAX, DEFAULT_TIMEOUT_MS)
        timeout_strategy = cluster.whole("resourceTimeoutStrategy", IGNORE, KEEP, IGNORE)
        cluster.whole("acquireRefuseStrategy", 0, I32_MAX, 0)
    else:
        cluster.whole("strategy", 0, 0, 0)
    return FlowRule(
        namespace=namespace,
        flow_id=flow_id,
        resource=resource,
        grade=grade,
        count=count,
        threshold_type=threshold_type,
        sample_count=sample_count,
        window_ms=window_ms,
        resource_timeout_ms=timeout,
        client_offline_ms=offline,
        resource_timeout_strategy=timeout_strategy,
    )


def _param(entry: _Object, namespace: str, ids: _Ids) -> ParamRule | None:
    """Reads a parameter flow rule. Returns None if the rule is not for a cluster."""
    entry.check_names(_PARAM)
    if not entry.boolean("clusterMode", False):
        return None
    resource, count = _common(entry)
    for name, low, high, default in (
        ("grade", 0, I32_MAX, 1),
        ("controlBehavior", 0, I32_MAX, 0),
        ("maxQueueingTimeMs", 0, I32_MAX, 0),
        ("burstCount", 0, I32_MAX, 0),
        ("durationInSec", 1, I64_MAX, 1),
        ("paramIdx", -I32_MAX - 1, I32_MAX, None),
    ):
        entry.whole(name, low, high, default)
    items = _items(entry)
    cluster = entry.child("clusterConfig")
    if cluster is None:
        return None
    cluster.check_names(_CLUSTER)
    flow_id, threshold_type, sample_count, window_ms = _cluster(cluster, ids)
    return ParamRule(
        namespace=namespace,
        flow_id=flow_id,
        resource=resource,
        count=count,
        threshold_type=threshold_type,
        sample_count=sample_count,
        window_ms=window_ms,
        items=items,
    )


def _common(entry: _Object) -> tuple[str, float]:
    """Reads the resource and the count of a rule of either kind."""
    resource = entry.text("resource", needed=True, blank=False)
    count = entry.number("count")
    entry.text("limitApp")
    if entry.boolean("regex", False):
        entry.wrong("regex", "a cluster rule cannot use a regular expression for its resource")
    return resource, count


def _cluster(cluster: _Object, ids: _Ids) -> tuple[int, int, int, int]:
    """Reads flowId, thresholdType, sampleCount and windowIntervalMs of a rule of either kind."""
    flow_id = ids.take(cluster)
    threshold_type = cluster.whole("thresholdType", AVERAGE_LOCAL, GLOBAL, AVERAGE_LOCAL)
    cluster.boolean("fallbackToLocalWhenFail", False)
    sample_count = cluster.whole("sampleCount", 1, SAMPLES_MAX, 10)
    window_ms = cluster.whole("windowIntervalMs", 1, WINDOW_MAX_MS, 1000)
    if window_ms % sample_count and not cluster.faulty & {"sampleCount", "windowIntervalMs"}:
        cluster.wrong("windowIntervalMs", f"{window_ms} must be a multiple of sampleCount, {sample_count}")
    return flow_id, threshold_type, sample_count, window_ms


# ---- values with their own thresholds ----

_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_DECIMAL = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)[dDfF]?")
_NOT_FINITE = ("NaN", "Infinity", "+Infinity", "-Infinity")
_NUMBER_LENGTH = 400  # characters


def _read_whole(text: str) -> int:
    if not _WHOLE_NUMBER.fullmatch(text):
        raise ValueError("it must be a whole number")
    return int(text)


def _read_decimal(text: str) -> float:
    trimmed = text.strip()
    if trimmed in _NOT_FINITE:
        return float(trimmed)
    match = _DECIMAL.fullmatch(trimmed)
    if not match:
        raise ValueError("it must be a number")
    number = float(match[1])
    if math.isinf(number):
        raise ValueError("it is out of range")
    return number


def _read_boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError("it must be true or false")
    return text.lower() == "true"


# By classType, a Java type. Sentinel takes unknown types for String.
_KINDS: dict[str, tuple[Tag, Callable[[str], int | float]]] = {
    "int": (Tag.INTEGER, _read_whole),
    "java.lang.Integer": (Tag.INTEGER, _read_whole),
    "long": (Tag.LONG, _read_whole),
    "java.lang.Long": (Tag.LONG, _read_whole),
    "double": (Tag.DOUBLE, _read_decimal),
    "java.lang.Double": (Tag.DOUBLE, _read_decimal),
    "float": (Tag.FLOAT, _read_decimal),
    "java.lang.Float": (Tag.FLOAT, _read_decimal),
    "byte": (Tag.BYTE, _read_whole),
    "java.lang.Byte": (Tag.BYTE, _read_whole),
    "short": (Tag.SHORT, _read_whole),
    "java.lang.Short": (Tag.SHORT, _read_whole),
    "boolean": (Tag.BOOLEAN, _read_boolean),
    "java.lang.Boolean": (Tag.BOOLEAN, _read_boolean),
}
_TEXTS = ("", "String", "java.lang.String")
_CHARACTERS = ("char", "java.lang.Character")


def _items(entry: _Object) -> dict[bytes, int]:
    """Reads the thresholds of single values, by the bytes of the value on the wire."""
    found: dict[bytes, int] = {}
    for item in entry.children("paramFlowItemList"):
        item.check_names(_ITEM)
        count = item.whole("count", 0, I32_MAX)
        text, class_type = item.text("object", needed=True), item.text("classType")
        if item.faulty & {"object", "classType"}:
            continue
        try:
            value = _item_value(item, text, class_type.strip() and class_type)
        except ValueError as error:
            kind = class_type or "String"
            item.wrong("object", f"{_shown(text)} is not a value of type {kind} that a client can send: {error}")
            continue
        if value in found:
            item.wrong("object", f"{_shown(text)} is given twice")
        elif value:
            found[value] = count
    return found


def _item_value(item: _Object, text: str, class_type: str) -> bytes:
    """Encodes a value for the wire.

    Returns b"" if its type is wrong. Raises ValueError, which says what the value must be.
    """
    if class_type in _TEXTS:
        try:
            return encode_value(text)
        except ValueError:
            raise ValueError("it does not fit into a request") from None
    if class_type in _CHARACTERS:
        item.wrong("classType", f"no client can send a {class_type}: it has no type on the wire")
        return b""
    if class_type not in _KINDS:
        near = class_type.lower() if class_type.lower() in _KINDS else f"java.lang.{class_type}"
        hint = f", did you mean {near}?" if near in _KINDS else ""
        item.wrong("classType", f"unknown type {_shown(class_type)}{hint}")
        return b""
    tag, read = _KINDS[class_type]
    if len(text) > _NUMBER_LENGTH:
        raise ValueError("it is too long")
    number = read(text)
    try:
        return encode_value(Typed(tag, number))
    except ValueError:
        raise ValueError("it is out of range") from None
