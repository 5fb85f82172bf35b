"""Reads numbers and times from a command line. Formats numbers, times and text of unknown origin for people.

Floor 0 (ARCHITECTURE.md), pure Python. Numbers are shown with three significant digits, which is the precision of the
histograms.
"""

from __future__ import annotations

import re

TIMES = (("ns", 1), ("µs", 1_000), ("ms", 1_000_000), ("s", 1_000_000_000))
COUNTS = (("", 1), ("k", 1_000), ("M", 1_000_000), ("G", 1_000_000_000))

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}
_THOUSANDS = {"": 1, "k": 1_000, "m": 1_000_000}


def seconds(text: str) -> float:
    """Reads a time such as 10ms, 1.5s or 2m. A number without a unit is in seconds."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(ns|us|µs|ms|s|m|)", text)
    if not match:
        raise ValueError(f"expected a time such as 10ms or 1.5s, not {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def number(text: str) -> float:
    """Reads a number such as 200, 1.5k or 2m (thousands and millions)."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([km]?)", text.lower())
    if not match:
        raise ValueError(f"expected a number such as 5000, 10k or 1.5m, not {text!r}")
    return float(match[1]) * _THOUSANDS[match[2]]


def whole_number(text: str) -> int:
    """Reads a number as number() does, but without a fraction."""
    value = number(text)
    if value != int(value):
        raise ValueError(f"expected a whole number, not {text!r}")
    return int(value)


def scaled(value: float, units: tuple[tuple[str, int], ...]) -> tuple[float, str]:
    """Converts a value to the largest unit in which it is at least 1 after rounding: 999.9 µs become 1 ms."""
    name, size = max(
        (unit for unit in units if float(f"{value:.3g}") >= unit[1]), key=lambda unit: unit[1], default=units[0]
    )
    return value / size, name


def digits(value: float) -> str:
    """Formats a number with three significant digits, or with all digits before the point if there are more.

    Zero becomes 0.
    """
    if not value:
        return "0"
    rounded = float(f"{value:.3g}")
    places = 2 if rounded < 10 else 1 if rounded < 100 else 0
    return f"{value:,.{places}f}"


def duration(ns: float) -> str:
    """Formats a time, such as 0 ns, 62 ns, 143 µs, 1.20 ms or 3,600 s."""
    value, unit = scaled(ns, TIMES)
    return f"{value:.0f} ns" if unit == "ns" and value == int(value) else f"{digits(value)} {unit}"


def duration_tick(ns: float) -> str:
    """Formats a time for an axis, without trailing zeros, such as 1.2 ms."""
    value, unit = scaled(ns, TIMES)
    return f"{plain_tick(value)} {unit}"


def count(value: int) -> str:
    """Formats an integer, such as 1,234,567."""
    return f"{value:,}"


def several(number: int, what: str) -> str:
    """Formats a number with its noun, such as "1 name" or "1,000 names"."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"


def plain_tick(value: float) -> str:
    """Formats a number for an axis without a suffix such as k: 3,000 seconds, not 3k."""
    return f"{float(f'{value:.6g}'):,.10g}"


def count_tick(value: float) -> str:
    """Formats a number for an axis, such as 0, 2.5, 120k or 1.5M."""
    number, unit = scaled(value, COUNTS)
    return f"{plain_tick(number)}{unit}"


def rate(per_second: float) -> str:
    """Formats a rate, such as 123,457/s. Only rates below 100 have decimals."""
    return f"{digits(per_second)}/s"


def printable(text: object) -> str:
    """Makes any text safe to show on one line. Replaces control characters, line ends and invalid characters."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in str(text))
