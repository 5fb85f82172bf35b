"""The panel that shows the progress of a run."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from counterd.bench.panel import draw, panel
from counterd.bench.result import Moment
from counterd.bench.run import Progress

MOMENT = Moment(end=2.0, seconds=0.5, requests=1000, errors=0, percentiles={"50": 1_500_000, "max": 2_000_000})


def drawn(progress: Progress, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw("a run", progress))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_the_panel_shows_the_progress() -> None:
    text = drawn(Progress("measuring", 0.5, 50, 12345, {}, MOMENT))
    assert "a run: measuring" in text
    assert "50 connections, 12,345 requests answered" in text
    assert "last second: 2,000/s   p50 1.500 ms   max 2.000 ms" in text
    assert "errors" not in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_progress_bar_has_a_line_of_its_own(width: int) -> None:
    lines = drawn(Progress("measuring", 0.5, 50, 12345, {}, None), width).splitlines()
    assert lines[0] == "a run: measuring"
    assert set(lines[1].rstrip()) <= set("━╸ ")
    assert " ".join(lines[2:]) == "50 connections, 12,345 requests answered"
    assert all(len(line) <= width for line in lines)


def test_errors_are_named() -> None:
    assert "errors: connection reset 3, unanswered 1,200" in drawn(
        Progress("measuring", None, 0, 0, {"connection reset": 3, "unanswered": 1200}, None)
    )


@pytest.mark.parametrize("fraction", [None, 0.0, 1.0])
def test_any_fraction_can_be_drawn(fraction: float | None) -> None:
    assert "connecting" in drawn(Progress("connecting", fraction, 0, 0, {}, None))


def test_without_a_console_there_is_no_panel() -> None:
    with panel(None) as begin:
        assert begin("a run") is None


def test_with_a_console_the_panel_is_drawn() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with panel(console) as begin:
        watch = begin("a run")
        assert watch is not None
        watch(Progress("filling", 0.1, 1, 0, {}, None))
    assert "filling" in console.file.getvalue()  # type: ignore[attr-defined]
