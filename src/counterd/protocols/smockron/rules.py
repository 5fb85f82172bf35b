"""Reads the rules of the smockron protocol, one for each domain, in all forms that the original master accepts.

Floor 2 (ARCHITECTURE.md), pure Python. A rule has an interval and a burst. The interval is the time that one request
uses up. The burst limits how far requests may be ahead of the rate. The original master rounds the interval to whole
milliseconds. This module keeps both exact: a span is a number of nanoseconds and fractional parts. Masters that share
state have to calculate in the same way, so a rule also has the rounded values. docs/protocols/smockron.md, "Rules",
describes the document.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from counterd.json_documents import DocumentError, Problems, read_document

if TYPE_CHECKING:
    from collections.abc import Mapping

DOMAINS_MAX = 4096
NAME_MAX = 255  # bytes of a domain's name
SPAN_MAX_NS = 3660 * 86_400 * 1_000_000_000  # ten years, as in engine/gcra.pxd
PARTS_MAX = (1 << 31) - 1  # parts of a nanosecond, as in engine/gcra.pxd
NS_PER_MS = 1_000_000
_SHOWN = 60  # characters of a document's text that an error shows

_UNITS_MS = {
    **dict.fromkeys(("", "ms", "msec"), 1),
    **dict.fromkeys(("s", "sec", "second", "seconds"), 1000),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60_000),
    **dict.fromkeys(("h", "hr", "hour", "hours"), 3_600_000),
    **dict.fromkeys(("d", "day", "days"), 86_400_000),
}
_DURATION = re.compile(r"\s*([0-9]{1,15})?\s*([a-z]*)\s*")
_RATE = re.compile(r"\s*([0-9]{1,15})\s*(?:per|/)\s*(.*)", re.DOTALL)
_COUNT = re.compile(r"[0-9]{1,15}")
_KEYS = ("rate", "interval", "burst")


class Span(NamedTuple):
    """A duration: nanoseconds plus fractional parts. Rule.parts is the number of parts in a nanosecond."""

    ns: int
    part: int


class Rule(NamedTuple):
    """The rule of a domain.

    parts: the parts of a nanosecond. rounded_ms: the interval and the burst as the original master rounds them.
    """

    interval: Span
    burst: Span
    parts: int
    rounded_ms: tuple[int, int]


Rules = dict[bytes, Rule]


def parse_rules(text: bytes | str) -> Rules:
    """Reads the rules in a JSON text, by domain. Raises DocumentError with all mistakes."""
    document = read_document(text)
    problems = Problems()
    rules: Rules = {}
    if not isinstance(document, dict):
        raise DocumentError(('the document: must be an object, {"DOMAIN": {"rate": "100/sec", "burst": 10}, ...}',))
    for name in getattr(document, "twice", ()):
        problems.add(_shown(name), "is given twice")
    for name, members in document.items():
        if wrong := _wrong_name(name):
            problems.add(_shown(name), wrong)
        elif not isinstance(members, dict):
            problems.add(_shown(name), "must be an object with a rate or an interval, and a burst")
        elif (rule := _read_rule(_shown(name), members, problems)) is not None:
            rules[name.encode()] = rule
    if len(document) > DOMAINS_MAX:
        problems.add("the document", f"{len(document)} domains, but at most {DOMAINS_MAX} are possible")
    if problems.told:
        raise DocumentError(tuple(problems))
    return rules


def _wrong_name(name: str) -> str:
    """Returns what is wrong with the name of a domain, or ""."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is not a name: it is not valid Unicode"
    if size > NAME_MAX:
        return f"is too long: a name can have at most {NAME_MAX} bytes"
    return "is not a name: it ends with a NUL" if name.endswith("\0") else ""


def _read_rule(place: str, members: Mapping[str, object], problems: Problems) -> Rule | None:
    """Reads a rule. Returns None if the rule has mistakes."""
    before = len(problems.told)
    for name in members:
        if name not in _KEYS:
            problems.add(place, f"unknown field {_shown(name)}; expected rate, interval or burst")
    for name in getattr(members, "twice", ()):
        problems.add(place, f"{name} is given twice")
    every = _read(place, "rate" if members.get("rate") else "interval", members, problems)
    ahead = _read(place, "burst", members, problems)
    if every is None or ahead is None or len(problems.told) > before:
        return None
    interval, burst = every[0], ahead[0] * every[0] if ahead[1] else ahead[0]
    if not _fits(place, interval, burst, problems):
        return None
    parts = interval.denominator
    interval_ms = _rounded(interval)
    burst_ms = math.floor(ahead[0] * interval_ms) if ahead[1] else _rounded(burst)
    return Rule(_span(interval, parts), _span(burst, parts), parts, (interval_ms, burst_ms))


def _fits(place: str, interval: Fraction, burst: Fraction, problems: Problems) -> bool:
    mistakes = [
        (interval == 0, "the interval is 0: every request would pass"),
        (interval > SPAN_MAX_NS, "the interval is longer than ten years"),
        (burst > SPAN_MAX_NS, "the burst lasts longer than ten years"),
        (interval.denominator > PARTS_MAX, f"the rate is too precise: a nanosecond has at most {PARTS_MAX} parts"),
    ]
    found = [text for is_wrong, text in mistakes if is_wrong]
    for text in found:
        problems.add(place, text)
    return not found


def _rounded(span: Fraction) -> int:
    """Rounds to milliseconds as JavaScript does."""
    return math.floor(span / NS_PER_MS + Fraction(1, 2))


def _span(exact: Fraction, parts: int) -> Span:
    """Converts a duration to whole parts. A burst may lose a fraction of a part."""
    return Span(*divmod(math.floor(exact * parts), parts))


def _read(place: str, name: str, members: Mapping[str, object], problems: Problems) -> tuple[Fraction, bool] | None:
    """Reads a field. Returns (nanoseconds, False), or (number of intervals, True), or None if the field is wrong."""
    value = members.get(name)
    try:
        if value is None:
            raise ValueError("is missing" if name == "burst" else "or rate is missing")
        if name == "rate":
            return _rate(value), False
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return _number(value) * (1 if name == "burst" else NS_PER_MS), name == "burst"
        if not isinstance(value, str):
            raise ValueError(f"must be a string or a number, not {_shown(value)}")
        if name == "burst" and _COUNT.fullmatch(value):
            return Fraction(int(value)), True
        return _duration(value), False
    except ValueError as error:
        problems.add(place, f"{name} {error}")
        return None


def _number(value: float) -> Fraction:
    if not 0 <= value < math.inf:
        raise ValueError(f"must be a finite number of at least 0, not {_shown(value)}")
    return Fraction(str(value))  # the decimal number as written, not the nearest binary one


def _rate(value: object) -> Fraction:
    match = _RATE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f'must have a form such as "100/sec" or "10 per 2 min", not {_shown(value)}')
    if int(match[1]) == 0:
        raise ValueError("is 0: no request would pass")
    return _duration(match[2]) / int(match[1])


def _duration(text: str) -> Fraction:
    match = _DURATION.fullmatch(text)
    if match is None or match[2] not in _UNITS_MS:
        raise ValueError(f'has no duration such as "20 msec", "5s", "min" or "2 hours" in {_shown(text)}')
    return Fraction(int(match[1] or 1) * _UNITS_MS[match[2]] * NS_PER_MS)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return repr(text) if isinstance(value, str) else text
