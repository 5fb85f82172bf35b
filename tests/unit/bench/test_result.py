"""The file of results: every value survives, and any other file is refused with a reason."""

from __future__ import annotations

import base64
import copy
import dataclasses
import json
import struct
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from counterd.bench.result import (
    HIGHEST_NS,
    HISTOGRAM_BYTES_MAX,
    Report,
    ResultError,
    Run,
    histogram,
    load,
    percentiles,
    save,
)
from unit.bench.samples import empty_run, full_run, report, run, scan, times

if TYPE_CHECKING:
    from pathlib import Path

HISTOGRAMS = ("latency", "service", "queue", "give_back")


def plain(found: Report) -> list[dict[str, Any]]:
    """The runs as values that can be compared, as a histogram has no ==."""
    fields = [{field.name: getattr(each, field.name) for field in dataclasses.fields(Run)} for each in found.runs]
    for one in fields:
        one.update({name: one[name] and (list(one[name].counts), percentiles(one[name])) for name in HISTOGRAMS})
    return fields


@pytest.fixture
def document(tmp_path: Path) -> dict[str, Any]:
    """The document that save() writes of a run with a value in every field."""
    save(report(full_run()), tmp_path / "good")
    found: dict[str, Any] = json.loads((tmp_path / "good").read_text("utf-8"))
    return found


def refusal(path: Path, content: bytes | str) -> str:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ResultError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    return str(caught.value).removeprefix(f"{path}: ")


# ---- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "found",
    [report(full_run()), report(empty_run()), report(), scan(), report(run(), search={"scan": "10,20"})],
    ids=["full", "empty run", "no runs", "scan", "no answer"],
)
def test_a_saved_report_is_loaded_unchanged(tmp_path: Path, found: Report) -> None:
    save(found, tmp_path / "r.json")
    back = load(tmp_path / "r.json")
    assert plain(back) == plain(found)
    assert (back.machine, back.versions, back.search) == (found.machine, found.versions, found.search)
    assert back.command == found.command


def test_a_loaded_report_can_be_saved_again(tmp_path: Path) -> None:
    save(report(full_run()), tmp_path / "first")
    save(load(tmp_path / "first"), tmp_path / "second")
    assert (tmp_path / "first").read_bytes() == (tmp_path / "second").read_bytes()


def test_other_tools_find_the_rate_and_the_percentiles(document: dict[str, Any]) -> None:
    assert document["runs"][0]["rate"] == 1000.0
    assert document["runs"][0]["percentiles"].keys() == {"50", "90", "99", "99.9", "99.99", "max"}


@given(st.lists(st.integers(0, HIGHEST_NS), max_size=50))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
def test_a_histogram_keeps_its_counts(tmp_path: Path, values: list[int]) -> None:
    found = report(run(latency=times(*values)))
    save(found, tmp_path / "r.json")
    assert list(load(tmp_path / "r.json").runs[0].latency.counts) == list(found.runs[0].latency.counts)


def test_whole_numbers_of_other_tools_are_read_as_floats(tmp_path: Path, document: dict[str, Any]) -> None:
    document["runs"][0]["seconds"] = 10
    (tmp_path / "r.json").write_text(json.dumps(document), "utf-8")
    assert isinstance(load(tmp_path / "r.json").runs[0].seconds, float)


# ---- what a run says of itself --------------------------------------------------------------------------------------


def test_percentiles_of_a_histogram() -> None:
    assert percentiles(histogram()) == {}
    expected = {"50": 500, "90": 900, "99": 990, "99.9": 999, "99.99": 1000, "max": 1000}
    assert percentiles(times(*range(1, 1001))) == expected


def test_the_rate_of_no_time_is_none() -> None:
    assert empty_run().rate == 0.0
    assert run(rate=250.0).rate == 250.0


@pytest.mark.parametrize(
    ("fields", "failed"),
    [
        *[({}, False), ({"late": 3}, False), ({"violations": []}, False)],
        *[({"errors": {"timeout": 1}}, True), ({"unsent": 1}, True), ({"violations": ["x"]}, True)],
    ],
)
def test_which_runs_count_as_failed(fields: dict[str, Any], failed: bool) -> None:
    assert run(**fields).failed() is failed


# ---- files that are none --------------------------------------------------------------------------------------------


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ResultError) as caught:
        load(tmp_path / "r.json")
    assert str(caught.value) == f"{tmp_path}/r.json: No such file or directory"
    with pytest.raises(ResultError, match="Is a directory"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe{", "not JSON"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 10_000, "not JSON"),
        (b"[]", "not a result of counterbench"),
        (b"null", "not a result of counterbench"),
        (b"{}", "not a result of counterbench"),
        (b'{"format": "counterbench 0"}', "its format is 'counterbench 0'"),
        (b'{"format": ["counterbench 3"]}', "not a result of counterbench"),
        (b'{"format": "counterbench 3"}', "runs is missing"),
    ],
)
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, content: bytes, wrong: str) -> None:
    assert wrong in refusal(tmp_path / "r.json", content)


@pytest.mark.parametrize("where", ["", "runs.0", "runs.0.series.0"])
@pytest.mark.parametrize("value", [None, -1, "x", [], {}, [None], {"x": None}, 1e400, True, -0.5, 10**400, 1e-300])
def test_wrong_values_are_refused_or_have_figures(
    tmp_path: Path, document: dict[str, Any], where: str, value: Any
) -> None:
    """Each field in turn. Only a ResultError is raised, and figures can be computed from what is accepted."""
    names = list(part(document, where))
    refused = 0
    for name in names:
        changed = copy.deepcopy(document)
        part(changed, where)[name] = value
        (tmp_path / "r.json").write_text(json.dumps(changed), "utf-8")
        try:
            found = load(tmp_path / "r.json")
        except ResultError as error:
            refused += 1
            assert str(error).startswith(f"{tmp_path}/r.json: ")  # noqa: PT017 - not raised by all
            continue
        for each in found.runs:
            assert 0 <= each.rate < float("inf")
            assert all(item >= 0 for item in percentiles(each.latency).values())
    assert refused


def part(document: Any, where: str) -> Any:
    for name in where.split(".") if where else []:
        document = document[int(name) if name.isdigit() else name]
    return document


@pytest.mark.parametrize("where", ["", "runs.0", "runs.0.series.0"])
def test_a_missing_or_an_unknown_field_is_named(tmp_path: Path, document: dict[str, Any], where: str) -> None:
    for name in set(part(document, where)) - {"format", "rate", "percentiles"} | {"percentiles"} & {where}:
        changed = copy.deepcopy(document)
        del part(changed, where)[name]
        assert f"{name} is missing" in refusal(tmp_path / "r.json", json.dumps(changed))
    part(document, where)["new"] = 1
    assert "new is unknown" in refusal(tmp_path / "r.json", json.dumps(document))


def test_the_place_of_a_wrong_value_is_named(tmp_path: Path, document: dict[str, Any]) -> None:
    document["runs"][0]["series"][3]["percentiles"]["99"] = "fast"
    wrong = "not a complete result: runs[0].series[3].percentiles.99 is not of type int"
    assert refusal(tmp_path / "r.json", json.dumps(document)) == wrong


# ---- histograms that are none ---------------------------------------------------------------------------------------

GOOD = times(1, 2_000, 3_000_000).encode()
PLAIN = zlib.decompress(base64.b64decode(GOOD)[8:])
HEADER, COUNTS = PLAIN[:40], PLAIN[40:]


def packed(plain: bytes) -> str:
    """The compressed data as the HdrHistogram library writes it: a cookie and a length before it."""
    inner = zlib.compress(plain, 9)
    return base64.b64encode(struct.pack(">II", 0x1C849314, len(inner)) + inner).decode()


def with_length(counts: bytes, header: bytes = HEADER) -> str:
    return packed(header[:4] + struct.pack(">I", len(counts)) + header[8:] + counts)


def test_the_packing_of_histograms() -> None:
    assert list(HdrHistogram.decode(with_length(COUNTS)).counts) == list(times(1, 2_000, 3_000_000).counts)


@pytest.mark.parametrize(
    "text",
    [
        *("", "!", "é", 3, [], {}, True),
        *(GOOD[: len(GOOD) // 2].decode(), GOOD[:-4].decode(), GOOD.decode() + "AAAA", "x" + GOOD.decode()),
        pytest.param(packed(b""), id="nothing"),
        pytest.param(packed(HEADER[:20]), id="half a header"),
        pytest.param(packed(HEADER + COUNTS[:-1]), id="fewer counts than its header says"),
        pytest.param(with_length(b"\xff" * 5), id="half a count"),
        pytest.param(with_length(b"\xff" * 20), id="a count too long"),
        pytest.param(with_length(b"\x02" * 100_000), id="too many counts"),
        pytest.param(with_length((b"\xfe" + b"\xff" * 8) * 3), id="counts that overflow"),
        pytest.param(with_length(COUNTS, HEADER[:12] + bytes([0, 0, 0, 5]) + HEADER[16:]), id="other digits"),
        pytest.param(with_length(COUNTS, HEADER[:16] + bytes(8) + HEADER[24:]), id="lowest 0"),
        pytest.param(with_length(COUNTS, HEADER[:24] + b"\xff" * 8 + HEADER[32:]), id="highest 2**64"),
    ],
)
def test_a_broken_histogram_is_refused(tmp_path: Path, document: dict[str, Any], text: Any) -> None:
    document["runs"][0]["service"] = text
    assert "runs[0].service is not a valid histogram: " in refusal(tmp_path / "r.json", json.dumps(document))


def test_a_decompression_bomb_is_not_unpacked(tmp_path: Path, document: dict[str, Any]) -> None:
    """Its first half megabyte is as long as it says, so it looks complete to code that stops there."""
    size = HISTOGRAM_BYTES_MAX - len(HEADER)
    bomb = packed(HEADER[:4] + struct.pack(">I", size) + HEADER[8:] + bytes(1 << 24))
    document["runs"][0]["service"] = bomb
    wrong = "not a complete result: runs[0].service is not a valid histogram: counterbench has not written it"
    assert refusal(tmp_path / "r.json", json.dumps(document)) == wrong


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
def test_a_file_with_changed_bytes_is_refused_or_loaded(tmp_path: Path, data: st.DataObject) -> None:
    """No other exception is raised."""
    path = tmp_path / "r.json"
    if not path.exists():
        save(report(full_run()), path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    other = tmp_path / "other.json"
    other.write_bytes(content[: data.draw(st.integers(len(content) - 5, len(content)))])
    try:
        found = load(other)
    except ResultError:
        return
    assert isinstance(found, Report)
