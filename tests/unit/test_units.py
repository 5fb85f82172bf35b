"""Numbers for people: reading units, writing three digits, and making foreign text printable."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterd.units import (
    count,
    count_tick,
    digits,
    duration,
    duration_tick,
    number,
    plain_tick,
    printable,
    rate,
    seconds,
    several,
    whole_number,
)

if TYPE_CHECKING:
    from collections.abc import Callable

SECOND = 1_000_000_000
SIZES = {"ns": 1, "µs": 1_000, "ms": 1_000_000, "s": SECOND}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("1", 1.0), ("10ms", 0.01), ("1.5s", 1.5), ("2m", 120.0), ("7us", 7e-6), ("7µs", 7e-6), ("3ns", 3e-9), ("0", 0.0)],
)
def test_times_are_read(text: str, expected: float) -> None:
    assert seconds(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "expected"), [("200", 200), ("1.5k", 1500), ("2m", 2_000_000), ("10K", 10_000), ("0.5", 0.5), ("1M", 1e6)]
)
def test_numbers_are_read(text: str, expected: float) -> None:
    assert number(text) == expected


def test_whole_numbers_are_read() -> None:
    assert whole_number("1.5k") == 1500
    assert isinstance(whole_number("10"), int)


WRONG: list[tuple[Callable[[str], object], str]] = [
    *((seconds, text) for text in ("", "ms", "-1s", "1.", ".5s", "1h", "1 s", "1e3", "nan", "inf", "1s ", "1s\n")),
    *((number, text) for text in ("", "k", "-1", "1.", "1g", "1e5", "1 k", "0x10", "1_000", "1k\n")),
    *((whole_number, text) for text in ("1.5", "0.0001k", "", "x")),
]  # fmt: skip


@pytest.mark.parametrize(("read", "text"), WRONG)
def test_invalid_values_are_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"^expected "):
        read(text)


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (0, "0 ns"),
        (0.25, "0.25 ns"),
        (1, "1 ns"),
        (62, "62 ns"),
        (812.4, "812 ns"),
        (999, "999 ns"),
        (999.6, "1.00 µs"),
        (1_000, "1.00 µs"),
        (14_250, "14.2 µs"),
        (143_000, "143 µs"),
        (999_499, "999 µs"),
        (999_500, "1.00 ms"),
        (1_234_567, "1.23 ms"),
        (SECOND, "1.00 s"),
        (59.96 * SECOND, "60.0 s"),
        (3600 * SECOND, "3,600 s"),
    ],
)
def test_durations_are_written(ns: float, text: str) -> None:
    assert duration(ns) == text


@given(st.floats(1, 3600 * SECOND))
def test_a_duration_is_right_to_three_digits(ns: float) -> None:
    number, unit = duration(ns).split(" ")
    assert float(number.replace(",", "")) * SIZES[unit] == pytest.approx(ns, rel=0.0051)
    assert len(re.sub(r"\D", "", number)) <= (4 if unit == "s" else 3)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.5, "0.50"), (9.996, "10.0"), (99.96, "100"), (123456.78, "123,457")]
)
def test_digits_counts_and_rates_are_written(value: float, text: str) -> None:
    assert digits(value) == text
    assert rate(value) == f"{text}/s"


def test_amounts_are_written_with_the_right_plural() -> None:
    assert [several(number, "name") for number in (0, 1, 1000)] == ["0 names", "1 name", "1,000 names"]


def test_counts_are_written() -> None:
    assert (count(0), count(1_234_567)) == ("0", "1,234,567")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.05, "0.05"), (250, "250"), (120_000, "120k"), (1.5e6, "1.5M"), (2e12, "2,000G")]
)
def test_counts_on_an_axis(value: float, text: str) -> None:
    assert count_tick(value) == text


def test_other_numbers_on_an_axis() -> None:
    assert [duration_tick(ns) for ns in (0, 500, 1_500_000, 3600 * SECOND)] == ["0 ns", "500 ns", "1.5 ms", "3,600 s"]
    assert [plain_tick(value) for value in (0, 0.25, 3500, 0.1 + 0.2)] == ["0", "0.25", "3,500", "0.3"]


def test_unprintable_characters_are_replaced() -> None:
    assert printable("acquire, 日本語, µ") == "acquire, 日本語, µ"
    assert printable("\x1b[31mred\n\t\x00\ud800\u202e\ufffe") == "\ufffd[31mred" + "\ufffd" * 6
    assert printable(None) == "None"


@given(st.text())
def test_printable_text_is_one_line_of_valid_unicode(text: str) -> None:
    assert "".join(printable(text).splitlines()) == printable(text)
    assert printable(text).encode().decode() == printable(text)
