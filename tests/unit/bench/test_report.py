"""The report on a terminal, and files for spreadsheets and plotters: figures with units, and every error visible."""

from __future__ import annotations

import csv
import io
import re
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console, RenderableType

from counterd.bench.compare import compare_table
from counterd.bench.report import (
    CSV_COLUMNS,
    all_times,
    answer,
    brief,
    fairness,
    representative,
    run_name,
    spread,
    summary,
    write_csv,
    write_hgrm,
)
from counterd.bench.result import HIGHEST_NS, Grants, ServerUse, Shares
from unit.bench.samples import empty_run, full_run, report, run, scan, times

if TYPE_CHECKING:
    from pathlib import Path

    from counterd.bench.result import Report

RED, GREEN = "\x1b[1;31m", "\x1b[32m"
HOSTILE = "[red]<script>\x1b[2J\n\ud800"


def shown(renderable: RenderableType, *, width: int = 80, colours: bool = False) -> str:
    console = Console(
        width=width,
        file=io.StringIO(),
        force_terminal=colours,
        color_system="standard" if colours else None,
        legacy_windows=False,
    )
    console.print(renderable)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def row(text: str, name: str) -> str:
    """The rest of the line that begins with the name, with single blanks."""
    line = next(line for line in text.splitlines() if line.strip().startswith(name))
    return re.sub(r" +", " ", line.strip().removeprefix(name).strip())


# ---- one run --------------------------------------------------------------------------------------------------------


def test_the_summary_of_a_closed_loop_run() -> None:
    text = shown(summary(report(run(rate=123456.78, cpu_seconds=7.5))))
    assert text.splitlines()[0] == "acquire-release"
    assert row(text, "throughput") == "123,457 requests/s"
    assert row(text, "requests") == "1,234,567 answered in 10.00 s"
    assert row(text, "outcomes") == "granted 1,111,111, refused 123,456"
    assert row(text, "errors") == "none"
    assert row(text, "load CPU") == "6.08 µs a request, 0.75 cores"
    assert row(text, "p50") == "p90 p99 p99.9 p99.99 max"
    assert row(text, "latency ") == "143 µs 257 µs 283 µs 286 µs 286 µs 286 µs"
    assert "latency: from the sending to the answer" in text
    for word in ("late", "unsent", "verified", "violations", "response time", "give-back"):
        assert re.search(rf"^{word}\b", text, re.MULTILINE) is None


def test_the_summary_of_an_open_loop_run_names_both_times() -> None:
    text = shown(summary(report(full_run())))
    assert row(text, "throughput") == "1,000 requests/s of 1,200/s wanted"
    assert row(text, "late") == "3 sent over 1 ms after their intended start"
    assert row(text, "unsent") == "4 were due but never sent"
    assert row(text, "response time ").startswith("143 µs ")
    assert row(text, "service time ").endswith(" 3.00 ms")
    assert row(text, "give-back ").startswith("900 µs ")
    assert "response time: from the intended start to the answer" in text
    assert "service time: from the sending to the answer" in text
    assert "latency" not in text


def test_errors_and_violations_are_red_and_in_full() -> None:
    text = shown(summary(report(full_run())), colours=True)
    assert f"{RED}connection lost 6, timeout 5" in text
    assert f"{RED}connection lost: reset by peer" in text
    assert f"{RED}counter x: 11 granted of 10" in text
    assert f"{RED}4 were due but never sent" in text
    assert GREEN not in text


def test_a_verified_run_is_marked_green() -> None:
    text = shown(summary(report(run(violations=[]))), colours=True)
    assert re.search(rf"verified +{re.escape(GREEN)}nothing was granted twice", text)
    jobs = shown(summary(report(run(violations=[], options={"protocol": "beanstalk"}))), colours=True)
    assert re.search(rf"verified +{re.escape(GREEN)}no job was lost", jobs)


def test_the_summary_of_a_run_without_answers() -> None:
    text = shown(summary(report(empty_run())))
    assert row(text, "throughput") == "0 requests/s"
    assert row(text, "errors") == "refused 50"
    assert "does the server speak the redis protocol?" not in text
    wrong = run(requests=0, errors={"unanswered": 50}, latency=times(), options={"protocol": "redis"})
    assert "does the server speak the redis protocol?" in shown(summary(report(wrong)))
    idle = run(requests=0, latency=times(), options={"protocol": "redis"})
    assert "does the server speak" not in shown(summary(report(idle))), "it was interrupted"
    assert row(text, "latency ") == "- - - - - -"


def test_the_longest_and_the_shortest_time_fit() -> None:
    text = shown(summary(report(run(latency=times(0, HIGHEST_NS)))))
    assert row(text, "latency ").startswith("0 ns 3,60")
    assert all(len(line) <= 80 for line in text.splitlines())


# ---- several runs ---------------------------------------------------------------------------------------------------


def test_the_summary_of_a_scan() -> None:
    text = shown(summary(report(*scan().runs, search={"scan": "1k to 3k"})))
    lines = text.splitlines()
    assert lines[0] == "acquire-release"
    assert row(text, "wanted/s") == "reached/s p50 p99 p99.9 max late errors"
    assert row(text, "2,000 ") == "2,000 143 µs 283 µs 286 µs 286 µs 0 0"
    assert row(text, "3,000 ") == "2,100 143 µs 283 µs 286 µs 286 µs 0 7"
    assert "3,000/s: errors: timeout 7" in lines
    assert lines[-1] == "scan: 1k to 3k"
    assert re.search(rf"{re.escape(RED)} *3,000\x1b", shown(summary(scan()), colours=True))


def test_a_search_shows_for_each_run_whether_it_met_the_objective() -> None:
    text = shown(summary(scan()))
    assert row(text, "wanted/s") == "reached/s p50 p99 goal max late errors"
    assert row(text, "2,000 ") == "2,000 143 µs 283 µs met 286 µs 0 0"
    assert row(text, "3,000 ") == "2,100 143 µs 283 µs missed 286 µs 0 7"
    assert text.splitlines()[-1] == "p99<1ms holds up to 2,000/s"
    strict = report(*scan().runs, search={"objective": "p95<200us", "rate": None})
    assert row(shown(summary(strict)), "wanted/s") == "reached/s p50 p95 goal max late errors"
    assert "at 2,000/s: 2000.00 requests per second (200.00 granted), p50=0.143 ms, p95<200us: 272 µs missed" in (
        brief(strict).replace("1800.00", "200.00")
    )
    silent = report(empty_run(), empty_run(), search={"objective": "p95<200us", "rate": None})
    assert brief(silent).count("p95<200us: - missed") == 2


def test_a_search_that_other_runs_contradict_says_so() -> None:
    found = {"objective": "p99<1ms", "rate": 2000.0, "contrary": 3}
    assert answer(found) == ("p99<1ms holds up to 2,000/s; 3 runs at that rate or below missed it", True)
    assert answer({**found, "contrary": 0})[0] == "p99<1ms holds up to 2,000/s"


def test_granted_requests_are_shown_beside_the_throughput() -> None:
    """Most answers said that no permit was left."""
    busy = run(rate=60_000.0, outcomes={"granted": 2_000, "refused": 596_000, "released": 2_000})
    text = shown(summary(report(busy)))
    assert row(text, "throughput") == "60,000 requests/s"
    assert "200/s were granted, the others were refusals or releases" in text
    assert "60000.00 requests per second (200.00 granted), p50" in brief(report(busy))
    free = run(outcomes={"granted": 5_000, "released": 5_000})
    assert "/s granted" not in shown(summary(report(free)))
    assert "granted)" not in brief(report(free))


def test_the_first_run_of_a_search_is_named_without_a_rate() -> None:
    found = report(run(rate=9000.0), *scan().runs, search=scan().search)
    text = shown(summary(found))
    assert text.splitlines()[0] == "acquire-release"
    assert row(text, "no limit ").startswith("9,000 143 µs ")
    assert run_name(found, found.runs[0]) == "as fast as it goes"
    assert "f, as fast as it goes " in shown(compare_table([("f", found)]))


def test_a_wide_scan_fits_a_terminal() -> None:
    runs = [run(rate=123456.0, rate_wanted=1234567.0, middle=14_300_000, late=1_234_567, errors={"timeout": 123_456})]
    for search in (None, {"objective": "p99.9<12.5ms", "rate": None}):
        text = shown(summary(report(*runs, *runs, search=search)))
        assert all(len(line) <= 80 and "…" not in line for line in text.splitlines())


def test_different_runs_have_their_names() -> None:
    bad = run("stats", rate=10.0, errors={"lost": 1}, evidence=["reset"], violations=["late"])
    text = shown(summary(report(run("get"), bad)))
    assert row(text, "get ").startswith("- 1,000 ")
    assert text.splitlines()[-3:] == ["stats: errors: lost 1; violations of --verify", "  reset", "  late"]


def test_several_runs_count_as_verified_only_if_all_are() -> None:
    good, bad, unknown = run(violations=[]), run(violations=["x"]), run()
    assert "verified: " in shown(summary(report(good, good)))
    assert "verified: " not in shown(summary(report(good, bad)))
    assert "verified: " not in shown(summary(report(good, unknown)))


def test_a_report_without_runs() -> None:
    assert "wanted/s" in shown(summary(report()))
    assert brief(report()) == ""


@pytest.mark.parametrize(
    ("search", "text", "found"),
    [
        ({"objective": "p99<1ms", "rate": 120000.0}, "p99<1ms holds up to 120,000/s", True),
        ({"objective": "p99<1ms", "rate": None}, "p99<1ms holds at none of the tried rates", False),
        ({"scan": "10k..100k"}, "scan: 10k..100k", True),
        ({}, "scan: ", True),
        ({"scan": "10k..100k", "ended": "interrupted"}, "scan: 10k..100k; not finished: interrupted", False),
        (
            {"objective": "p99<1ms", "rate": 5000.0, "ended": "interrupted"},
            "p99<1ms holds up to 5,000/s; not finished: interrupted",
            False,
        ),
        (
            {"objective": "p99<1ms", "rate": None, "ended": "a\nb"},
            "p99<1ms: no such rate was found; not finished: a\ufffdb",
            False,
        ),
    ],
)
def test_the_answer_of_a_search(search: dict[str, Any], text: str, found: bool) -> None:
    assert answer(search) == (text, found)


def test_names_of_runs() -> None:
    found = scan()
    runs = found.runs
    assert run_name(found, runs[0]) == "1,000/s"
    assert run_name(report(runs[0]), runs[0]) == "acquire-release"
    other = run("get", rate_wanted=5.0)
    assert run_name(report(runs[0], other), other) == "get at 5.00/s"
    again = [run(), run("get"), run()]
    assert [run_name(report(*again), one) for one in again] == ["acquire-release #1", "get", "acquire-release #2"]


# ---- brief ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (
            report(run(rate=123456.78)),
            "acquire-release: 123456.70 requests per second (111111.10 granted), p50=0.143 ms",
        ),
        (report(empty_run()), "acquire-release: 0.00 requests per second, no answers, errors: refused 50"),
        (
            report(run(unsent=1200)),
            "acquire-release: 1000.00 requests per second (900.00 granted), p50=0.143 ms, 1,200 never sent",
        ),
        (
            report(run(violations=[])),
            "acquire-release: 1000.00 requests per second (900.00 granted), p50=0.143 ms, verified",
        ),
        (
            report(run(violations=["2 permits of 1"])),
            "acquire-release: 1000.00 requests per second (900.00 granted), p50=0.143 ms, violations of --verify",
        ),
        (
            report(run(rate=10.0, rate_wanted=10.0), search={"objective": "p99<1ms", "rate": 10.0}),
            "acquire-release: 10.00 requests per second (9.00 granted), p50=0.143 ms, p99<1ms: 283 µs met\n"
            "p99<1ms holds up to 10.0/s",
        ),
        (
            report(run(rate_wanted=10.0), run("get")),
            "acquire-release at 10.0/s: 1000.00 requests per second (900.00 granted), p50=0.143 ms\n"
            "get: 1000.00 requests per second (900.00 granted), p50=0.143 ms",
        ),
    ],
)
def test_the_brief_line_of_a_report(found: Report, text: str) -> None:
    assert brief(found) == text


@pytest.mark.parametrize("show", [summary, brief, lambda found: compare_table([(HOSTILE, found)])])
def test_foreign_text_cannot_control_the_terminal(show: Any) -> None:
    found = run(HOSTILE, outcomes={HOSTILE: 1}, errors={HOSTILE: 1}, violations=[HOSTILE], evidence=[HOSTILE])
    for one in (report(found, search={"objective": HOSTILE, "rate": None}), report(found, found)):
        text = shown(show(one), width=300) if show is not brief else brief(one)
        assert "[red]<script>\ufffd[2J\ufffd\ufffd" in text or show is brief
        assert "\x1b" not in text
        assert "\ud800" not in text


# ---- the same load again and again ----------------------------------------------------------------------------------


def test_runs_of_the_same_load() -> None:
    rates = [1000.0, 4000.0, 2000.0]
    again = report(*(run(rate=each, middle=int(each) * 100) for each in rates), search={"repeat": 3})
    text = shown(summary(again))
    assert text.count(" requests/s") == 0
    assert row(text, "- ").startswith("1,000 100 µs")
    assert "the same load 3 times" in text
    line = (
        "median of 3 runs: 2,000/s (1,000/s to 4,000/s), p50 200 µs (100 µs to 400 µs), p99 396 µs (198 µs to 792 µs)"
    )
    assert line in " ".join(text.split())
    assert brief(again).splitlines()[-1] == line
    assert representative(again) is again.runs[2]
    assert run_name(again, again.runs[1]) == "acquire-release #2"
    early = report(again.runs[0], search={"repeat": 3, "ended": "interrupted"})
    assert answer(early.search or {}) == ("the same load 3 times; not finished: interrupted", False)
    assert spread(report(empty_run(), search={"repeat": 1})) == "median of 1 runs: 0/s (0/s to 0/s)"


# ---- the server, and how the connections were served ----------------------------------------------------------------


def test_cpu_and_memory_of_the_server() -> None:
    known = run(server=ServerUse(cores=0.934, memory=47_290_000))
    assert row(shown(summary(report(known))), "server ") == "0.93 cores, 45.1 MiB of memory"
    away = run(server=ServerUse(unknown="the server is on another machine"))
    assert (
        row(shown(summary(report(away))), "server ") == "CPU and memory are not known: the server is on another machine"
    )


def test_the_fairness_between_connections() -> None:
    fair = run(grants=Grants(12, 200, 516))
    text = "a connection was granted 12 to 516, median 200: 43.0 times as many"
    assert row(shown(summary(report(fair))), "fairness ") == text
    assert fairness(run(grants=Grants(0, 1, 9))) == ["a connection was granted 0 to 9, median 1: some got none"]
    assert "fairness" not in shown(summary(report(run())))


def test_the_fairness_between_keys() -> None:
    weighed = run(shares=Shares("keys", [4000, *range(1, 12)], 0.98765))
    text = shown(summary(report(weighed)))
    assert row(text, "fairness ") == "Jain's index 0.9877 over the keys, each by its weight"
    assert "granted to each key: 4,000, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 2 more" in text
    assert fairness(run(shares=Shares("connections", [], 1.0))) == ["Jain's index 1.0000 over the connections"]


def test_time_in_the_queue_and_in_service() -> None:
    text = shown(summary(report(run(queue=times(5_000_000), service=times(40_000)))))
    assert row(text, "queue time ").endswith(" 5.00 ms")
    assert row(text, "service time ").endswith(" 40.0 µs")
    assert "queue time: from the sending of a Take that may wait to its grant or refusal" in text
    assert "service time: from the sending to the answer, of requests that do not wait" in text
    assert "intended start" not in text


# ---- files ----------------------------------------------------------------------------------------------------------


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_csv_file(tmp_path: Path) -> None:
    write_csv(report(full_run(), run("a,b\n\ud800")), tmp_path / "r.csv")
    full, other = rows(tmp_path / "r.csv")
    assert list(full) == list(CSV_COLUMNS)
    assert full["requests_per_second"] == "1000.000"
    assert full["rate_wanted_per_second"] == "1200.0"
    assert full["latency_p50_us"] == "143.103"
    assert full["service_max_us"] == "3000.319"
    assert full["give_back_p99_9_us"] == "900.095"
    assert (full["queue_p50_us"], full["jain"], other["jain"]) == ("5001.215", "0.987800", "")
    assert (full["errors"], full["errors_by_kind"]) == ("11", "timeout=5;connection lost=6")
    assert (full["violations"], other["violations"]) == ("1", "")
    assert (other["label"], other["service_max_us"]) == ("a,b\n\\ud800", "")


def test_the_columns_of_the_csv_are_stable() -> None:
    """Programs read them by name: columns may be added, but not removed."""
    names = {
        "label",
        "started",
        "rate_wanted_per_second",
        "requests_per_second",
        "requests",
        "seconds",
        "late",
        "unsent",
    }
    names |= {"errors", "errors_by_kind", "outcomes", "violations", "cpu_seconds"}
    names.add("jain")
    for kind in ("latency", "service", "give_back", "queue"):
        names |= {f"{kind}_{name}_us" for name in ("p50", "p90", "p99", "p99_9", "p99_99", "max")}
    assert names <= set(CSV_COLUMNS)


def test_the_hgrm_file(tmp_path: Path) -> None:
    write_hgrm(report(run(latency=times(*range(1000, 101_000, 1000)))), tmp_path / "r.hgrm")
    lines = (tmp_path / "r.hgrm").read_text("utf-8").splitlines()
    assert lines[0].split() == ["Value", "Percentile", "TotalCount", "1/(1-Percentile)"]
    table = [[float(word) for word in line.split()] for line in lines[2:-3]]
    assert table[0] == [1.0, 0.0, 1, 1.0]
    assert [10.007, 0.1, 10, 1.11] in table
    assert table[-1] == [100.031, 1.0, 100]
    assert [one[:3] for one in table] == sorted(one[:3] for one in table)
    numbers = [float(number) for line in lines[-3:] for number in re.findall(r"= +([\d.]+)", line)]
    assert numbers == pytest.approx([50.5, 28.866, 100.031, 100, 32, 2048], rel=1e-3)


def test_the_hgrm_file_of_no_and_of_several_runs(tmp_path: Path) -> None:
    write_hgrm(report(empty_run()), tmp_path / "empty.hgrm")
    assert "Total count    =            0" in (tmp_path / "empty.hgrm").read_text("utf-8")
    write_hgrm(scan(), tmp_path / "scan.v1.hgrm")
    assert sorted(path.name for path in tmp_path.glob("scan*")) == [f"scan.v1-{number}.hgrm" for number in (1, 2, 3)]


def test_the_measured_times_of_a_run() -> None:
    assert [times.name for times in all_times(run())] == ["latency"]
    assert [times.name for times in all_times(full_run())] == [
        "response time",
        "queue time",
        "service time",
        "give-back",
    ]
