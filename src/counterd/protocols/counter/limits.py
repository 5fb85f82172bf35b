"""Reads the limits of the counter protocol: the maximum of counters, and the numbers of rates.

Floor 2 (ARCHITECTURE.md), pure Python. A name that ends with `*` stands for all names that begin with the rest. The
most specific rule applies to a name: the rule with the name itself, or else the longest beginning. So the order of the
rules in the file has no meaning. docs/protocols/counter.md, "Limits", describes the file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from counterd.json_documents import DocumentError, Problems, read_document
from counterd.protocols.counter.wire import LIMIT_MAX, PERIOD_MAX_US, U32_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

_T = TypeVar("_T")

RULES_MAX = 10_000  # of each kind; a search takes about 14 comparisons
NAME_MAX = 255  # bytes of a name in the file
US_PER_S = 1_000_000
_SHOWN = 60  # characters of a document's text that an error shows
_KINDS = ("permits", "rates")
_FIELDS = {"permits": ("name", "maximum"), "rates": ("name", "limit", "period", "burst")}


class Rule(NamedTuple):
    """A limit. name: the name without the `*`. is_prefix: whether it had a `*`, so that it applies to all names that
    begin with it.

    most: the maximum of the counter, or how many units of a rate are allowed in a period of period_us microseconds.
    burst: the burst of a rate.
    parent: the number, from 1, of the longest shorter beginning of the same kind that this name begins with; 0 if there
    is none.
    """

    name: bytes
    is_prefix: bool
    most: int
    period_us: int = 0
    burst: int = 0
    parent: int = 0

    def __str__(self) -> str:
        return self.name.decode() + ("*" if self.is_prefix else "")


@dataclass(frozen=True)
class Limits:
    """The rules of a document, by kind.

    The rules are sorted by name. If two have the same name, the one with the `*` comes first.
    """

    permits: tuple[Rule, ...] = ()
    rates: tuple[Rule, ...] = ()


def parse_limits(text: bytes | str) -> Limits:
    """Reads the limits in a JSON text. Raises DocumentError with all mistakes."""
    document = read_document(text)
    problems = Problems()
    found: dict[str, tuple[Rule, ...]] = {}
    if not isinstance(document, dict):
        raise DocumentError(('the document: must be an object, {"permits": [...], "rates": [...]}',))
    for name in getattr(document, "twice", ()):
        problems.add(_shown(name), "is given twice")
    for name, entries in document.items():
        if name not in _KINDS:
            problems.add(_shown(name), "unknown field; expected permits or rates")
        elif not isinstance(entries, list):
            problems.add(name, f"must be an array, not {_shown(entries)}")
        elif len(entries) > RULES_MAX:
            problems.add(name, f"{len(entries)} entries, but at most {RULES_MAX} are possible")
        else:
            found[name] = _read_rules(name, entries, problems)
    if problems.told:
        raise DocumentError(tuple(problems))
    return Limits(**found)


def _read_rules(kind: str, entries: Sequence[object], problems: Problems) -> tuple[Rule, ...]:
    rules: dict[tuple[bytes, bool], Rule] = {}
    for number, entry in enumerate(entries):
        place = f"{kind}[{number}]"
        if not isinstance(entry, dict):
            problems.add(place, f"must be an object, not {_shown(entry)}")
            continue
        if isinstance(entry.get("name"), str):
            place += f" ({_shown(entry['name'])})"
        rule = _Reader(place, entry, problems).rule(kind)
        if rule is None:
            continue
        key = (rule.name, not rule.is_prefix)
        if key in rules:
            problems.add(place, "has the name of an earlier entry")
        rules[key] = rule
    return _with_parents([rules[key] for key in sorted(rules)])


def _with_parents(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Sets the parent of each of the sorted rules."""
    made: list[Rule] = []
    above: list[int] = []  # the numbers of the beginnings that the last rule begins with
    for number, rule in enumerate(rules, 1):
        while above and not rule.name.startswith(made[above[-1] - 1].name):
            above.pop()
        made.append(rule._replace(parent=above[-1] if above else 0))
        if rule.is_prefix:
            above.append(number)
    return tuple(made)


class _Reader:
    """Reads the fields of an entry and collects mistakes."""

    def __init__(self, place: str, members: Mapping[str, object], problems: Problems) -> None:
        self._place = place
        self._members = members
        self._problems = problems
        self._is_wrong = False

    def rule(self, kind: str) -> Rule | None:
        """Returns the rule, or None if there is a mistake."""
        for field in self._members:
            if field not in _FIELDS[kind]:
                self._wrong(f"unknown field {_shown(field)}; expected {', '.join(_FIELDS[kind])}")
        for field in getattr(self._members, "twice", ()):
            self._wrong(f"{_shown(field)} is given twice")
        name = self._read("name", _name) or b""
        if kind == "permits":
            most, period_us, burst = self._read("maximum", _whole(0, U32_MAX)), 0, 0
        else:
            most = self._read("limit", _whole(1, LIMIT_MAX))
            period_us = self._read("period", _period_us) or 0
            burst = (self._read("burst", _whole(1, U32_MAX)) if "burst" in self._members else most) or 0
        if self._is_wrong or most is None:
            return None
        return Rule(name.removesuffix(b"*"), name.endswith(b"*"), most, period_us, burst)

    def _wrong(self, text: str) -> None:
        self._is_wrong = True
        self._problems.add(self._place, text)

    def _read(self, name: str, read: Callable[[object], _T]) -> _T | None:
        if name not in self._members:
            self._wrong(f"{name} is missing")
            return None
        try:
            return read(self._members[name])
        except ValueError as error:
            self._wrong(f"{name} {error}")
            return None


def _name(value: object) -> bytes:
    if not isinstance(value, str):
        raise ValueError(f"must be a string, not {_shown(value)}")
    try:
        name = value.encode()
    except UnicodeEncodeError:
        raise ValueError("is not valid Unicode") from None
    if not 1 <= len(name) <= NAME_MAX:
        raise ValueError(f"must have 1 to {NAME_MAX} bytes, not {len(name)}")
    if b"*" in name[:-1]:
        raise ValueError("has a * before its last character: a * stands for the rest of a name")
    return name


def _whole(least: int, most: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ValueError(f"must be a whole number from {least} to {most}, not {_shown(value)}")
        return value

    return read


def _period_us(value: object) -> int:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"must be a number of seconds above 0, not {_shown(value)}")
    period = Fraction(str(value)) * US_PER_S  # the decimal number as written, not the nearest binary one
    if period.denominator != 1:
        raise ValueError(f"must be whole microseconds, not {_shown(value)} seconds")
    if period > PERIOD_MAX_US:
        raise ValueError(f"must be at most {PERIOD_MAX_US // US_PER_S} seconds (ten years), not {_shown(value)}")
    return int(period)


def _shown(value: object) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    return repr(text) if isinstance(value, str) else text
