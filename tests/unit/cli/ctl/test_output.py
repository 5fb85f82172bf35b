"""The same rows for people and for programs: short and aligned, or exact and complete."""

from __future__ import annotations

import base64
import csv
import io
import json
import sys
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import click
import pytest
from click.testing import CliRunner

from counterd.cli.ctl.output import (
    AT_ONCE,
    FOLDED_MAX,
    PADDED_MAX,
    RICH_ROWS_MAX,
    Column,
    Kind,
    Output,
    cell,
    number,
    output_option,
    size,
    span,
    when,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SECOND = 1_000_000_000
COLUMNS = [
    Column("name", Kind.BYTES),
    Column("held", Kind.NUMBER, nothing="not found"),
    Column("since", Kind.WHEN, detail=True),
]
ROWS = [(b"db:main", 1_234_567, 5), (b"a\xff,\n", None, None), ("日本".encode(), 7, 6)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (-5, "-5"),
        (999_999, "999,999"),
        (1_234_567, "1.23M"),
        (4_294_967_295, "4.29G"),
        (2**64 - 1, "18.4E"),
    ],
)
def test_numbers_for_people(value: int, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (812, "812 B"), (1024, "1.00 KiB"), (468 << 20, "468 MiB"), (1 << 50, "1,024 TiB")]
)
def test_sizes_for_people(value: int, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (0.000143, "143 µs"), (3.2, "3.20 s"), (59, "59 s"), (60, "1 min"), (11_000, "3 h"), (90_000, "1 d")],
)
def test_time_spans_for_people(seconds: float, text: str) -> None:
    assert span(seconds) == text


@pytest.mark.parametrize(
    ("moment", "text"),
    [(100, "0 s ago"), (97, "3 s ago"), (100 - 7200, "2 h ago"), (110, "in 10 s"), (700, "in 10 min")],
)
def test_times_relative_to_now(moment: int, text: str) -> None:
    assert when(moment * SECOND, 100 * SECOND) == text


def test_foreign_text_cannot_move_the_cursor() -> None:
    assert cell(Column("version"), "1\x1b[2J", 0) == r"1\x1b[2J"


def test_a_time_of_day_is_shown_in_local_time() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, 678_900, tzinfo=timezone.utc)
    assert cell(Column("time", Kind.CLOCK), moment, 0) == f"{moment.astimezone():%H:%M:%S}.678"


# ---- forms ----


def written(capsys: pytest.CaptureFixture[str], form: str, rows: list[Any] | None = None) -> str:
    Output(form).rows(COLUMNS, ROWS if rows is None else rows)
    return capsys.readouterr().out


def test_a_table_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of the last name's letters is two columns wide."""
    assert written(capsys, "table") == (
        "name             held\n"
        "db:main         1.23M\n"
        "a\\xff,\\x0a  not found\n"
        "日本                7\n"
    )  # fmt: skip


def test_json_has_all_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = written(capsys, "json")
    first, second, third = json.loads(text)
    assert first == {"name": "db:main", "held": 1_234_567, "since": 5}
    assert second == {"name": r"a\xff,\x0a", "name_base64": second["name_base64"], "held": None, "since": None}
    assert base64.b64decode(second["name_base64"]) == b"a\xff,\n"
    assert third["name"] == "日本"
    assert '"日本"' in text
    assert text.count("\n") == len(ROWS) + 2  # a line each


def test_valid_utf8_names_are_unescaped_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(written(capsys, "json", [(b"a\\\n\x00", 1, 1)])) == [{"name": "a\\\n\0", "held": 1, "since": 1}]


CONTROLS = (*range(0x20), *range(0x7F, 0xA1), 0xAD)
DIRECTIONS = (0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
OTHERS = (0x200B, 0x2028, 0x2029, 0xFEFF, 0xE000, 0xE0041, 0x10FFFF)
UNPRINTABLE = "".join(map(chr, (*CONTROLS, *DIRECTIONS, *OTHERS)))


def test_json_has_no_terminal_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    name = f'日本 "\\{UNPRINTABLE}x'
    for text in (written(capsys, "json", [(name.encode(), 1, 1)]), streamed(capsys, name)):
        assert text.replace("\n", "").isprintable()
        assert name in json.loads(text.strip("[\n]"))["name"]
        assert "日本" in text
        assert "\\u009b" in text
        assert "\\u202e" in text


def streamed(capsys: pytest.CaptureFixture[str], text: str) -> str:
    Output("json").stream([Column("name")])([text])
    return capsys.readouterr().out


def test_a_record_in_json_escapes_unprintable_characters(capsys: pytest.CaptureFixture[str]) -> None:
    subject = f"CN={UNPRINTABLE}\udcff"
    Output("json").record([Column("subject")], [subject])
    text = capsys.readouterr().out
    assert json.loads(text) == {"subject": subject}
    assert text.count("\n") == 3
    assert text.replace("\n", "").isprintable()


def test_csv_escapes_texts_as_tables_do(capsys: pytest.CaptureFixture[str]) -> None:
    Output("csv").rows([Column("subject")], [["CN=a\u009b31m\u202e"]])
    assert capsys.readouterr().out == "subject\nCN=a\\xc2\\x9b31m\\xe2\\x80\\xae\n"


def test_csv_has_all_columns_with_one_line_per_row(capsys: pytest.CaptureFixture[str]) -> None:
    text = written(capsys, "csv")
    assert text.splitlines()[0] == "name,held,since"
    assert list(csv.reader(io.StringIO(text)))[1:] == [
        ["db:main", "1234567", "5"],
        [r"a\xff,\x0a", "", ""],
        ["日本", "7", "6"],
    ]


@pytest.mark.parametrize(
    ("form", "text"), [("json", "[\n]\n"), ("csv", "name,held,since\n"), ("table", "name  held\n")]
)
def test_output_without_rows(capsys: pytest.CaptureFixture[str], form: str, text: str) -> None:
    assert written(capsys, form, []) == text


def test_output_of_many_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """More than are written at once."""
    rows = [(b"%d" % index, index, index) for index in range(10_000)]
    assert [each["held"] for each in json.loads(written(capsys, "json", rows))] == list(range(10_000))
    assert written(capsys, "table", rows).splitlines()[-1] == "9999  9,999"


def test_a_long_name_makes_its_own_row_longer_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [(b"a", 1, None), (b"\x00" * 65_535, 22, None), (b"x" * PADDED_MAX, 3, None), (b"bb", 4, None)]
    head, first, long, padded, last = written(capsys, "table", rows).splitlines()
    assert [len(head), len(first), len(padded), len(last)] == [PADDED_MAX + 2 + 4] * 4
    assert long == r"\x00" * 65_535 + "    22"


def test_rows_are_written_before_the_last_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """A server sends them page by page; a later page is aligned by itself."""
    seen = []

    def rows() -> Iterator[Any]:
        for index in range(2 * AT_ONCE):
            if index == AT_ONCE:
                seen.append(capsys.readouterr().out)
            yield b"%d" % (10**20 * index), index, None

    Output("table").rows(COLUMNS, rows())
    assert seen[0].startswith("name")
    assert seen[0].count("\n") == AT_ONCE
    assert len({len(line) for line in capsys.readouterr().out.splitlines()[1:]}) == 1


def test_a_record_in_each_format(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [Column("objects", Kind.NUMBER), Column("region", Kind.SIZE), Column("at", detail=True)]
    Output("table").record(columns, (12_345_678, 2048, "x"))
    assert capsys.readouterr().out == "field       value\nobjects     12.3M\nregion   2.00 KiB\n"
    Output("json").record(columns, (12_345_678, 2048, "x"))
    assert json.loads(capsys.readouterr().out) == {"objects": 12_345_678, "region": 2048, "at": "x"}
    Output("csv").record(columns, (12_345_678, 2048, "x"))
    assert capsys.readouterr().out == "objects,region,at\n12345678,2048,x\n"


def test_raw_bytes_are_written_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    for form in ("table", "json"):
        Output(form).raw(b"\xff\r\n")
    assert sys.stdout.buffer.getvalue() == b"\xff\r\n" * 2  # type: ignore[attr-defined]


def test_a_stream_in_each_format(capsys: pytest.CaptureFixture[str]) -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=2)))
    columns, row = [Column("time", Kind.CLOCK), Column("name", Kind.BYTES)], (moment, b"a")
    Output("json").stream(columns)(row)
    assert capsys.readouterr().out == '{"time": "2026-01-02T01:04:05+00:00", "name": "a"}\n'
    add = Output("csv").stream(columns)
    assert capsys.readouterr().out == "time,name\n"  # at once, whenever the first row comes
    add(row)
    assert capsys.readouterr().out == "2026-01-02T01:04:05+00:00,a\n"
    Output("table").stream(columns, lambda row: f"<{row[1].decode()}>")(row)
    assert capsys.readouterr().out == "<a>\n"
    Output("table").stream(columns)(row)
    assert capsys.readouterr().out.endswith(".000  a\n")


# ---- on a terminal ----


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch, rows: list[Any]) -> str:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "30")
    Output("table").rows(COLUMNS, rows)
    return terminal.getvalue()


def test_a_table_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cell is interpreted as markup, and a long name is folded, not cut off."""
    text = on_terminal(monkeypatch, [(b"[red]x", 1, None), (b"y" * 40, 2, None)])
    assert "\x1b[1mname" in text
    assert "\N{BOX DRAWINGS LIGHT HORIZONTAL}" in text
    assert "[red]x" in text
    assert text.count("y") == 40


def test_a_very_long_table_on_a_terminal_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(b"x", 1, None)] * (RICH_ROWS_MAX + 1)
    assert on_terminal(monkeypatch, rows) == "name  held\n" + "x        1\n" * (RICH_ROWS_MAX + 1)


def test_a_terminal_shows_the_beginning_of_a_very_long_name(monkeypatch: pytest.MonkeyPatch) -> None:
    few = on_terminal(monkeypatch, [(b"y" * 65_535, 1, None)])
    many = on_terminal(monkeypatch, [(b"y" * 65_535, 1, None)] * (RICH_ROWS_MAX + 1))
    assert few.count("y") == FOLDED_MAX
    assert few.count("\N{HORIZONTAL ELLIPSIS}") == 1
    assert many.splitlines()[1] == "y" * FOLDED_MAX + "\N{HORIZONTAL ELLIPSIS}     1"


# ---- the option ----


@click.group()
@output_option
def main(output: Output) -> None:
    pass


@main.command()
@output_option
def show(output: Output) -> None:
    click.echo(output.form)


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        (["show"], "table"),
        (["--output", "json", "show"], "json"),
        (["show", "--output", "csv"], "csv"),
        (["--output", "json", "show", "--output", "csv"], "csv"),
    ],
)
def test_the_last_output_option_counts(arguments: list[str], form: str) -> None:
    assert CliRunner().invoke(main, arguments).output == f"{form}\n"
