"""The results of a comparison as a page of tables with a chart, and whether the promises hold in them.

promises.json says what counterd promises: a figure of a scenario against that of a peer in the same round, against its
own in another scenario, against another figure of its own, or by itself.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.bench.chart import Axis, Point, Series, bar_chart

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS, BASE = "counterd", "raw loop"
PROMISES = Path(__file__).parent / "promises.json"
CHARTED = ("1 in flight", "16 in flight", "64 in flight")

INTRODUCTION = """\
# counterd beside its peers

`make bench-peers` makes this page. All servers ran in one run on one machine, on core {cores[server]}, and one at a
time was loaded from core {cores[load]}; every round loads all of them, and a ratio is the median of the rounds'
ratios, or between scenarios, which were played one after the other, that of their medians. Times by themselves say
more about the machine than about a server: compare within a table.

{machine}. {versions}. {started}, commit {commit}.

*raw loop* is an epoll loop in C around counterd's own session: what is left of a server when only the system calls
remain. redis does INCR and DECR, memcached incr and decr, which know neither limits nor holders; yrmcdsd has two
workers. Unless it says otherwise: 50 connections, 100 thousand names of 16 bytes, acquire and release in turn.

What begins with *Take* is of that extension of the counter protocol. The peer is a redis-server with the usual Lua
script for a rate (GCRA), or with one script that checks two counters and two rates, and takes of all of them or of
none; its counters have no holders (`src/counterd/bench/dialects/redis_lua.py`). No request is refused. Where
connections wait for a permit, the peer has a list, BLPOP and RPUSH; p50 and p99 are from a release until the next one
has the permit, while another client sends half of the peak rate, or, for *quiet*, nothing. *grant CPU* is what a Take
that waits and its grant cost the server, and *acquire CPU* the cost of an acquire, or an INCR, that does not wait; both
at that pace, and while nothing else goes on. *load* is how much of its rate the other client sent: below 95 %, the
times say little.

What begins with *throttr* is of that protocol, beside redis with its counterparts of the same requests: quotas go one
up and one down (INCRBY, DECRBY), buffers have 100 bytes, and what is inserted has a new name each time and expires
after 100 ms.

What begins with *sentinel* is of that protocol: a thousand flows, beside redis-server with the usual Lua scripts for
the same (`src/counterd/bench/dialects/redis_lua.py`): a leased semaphore, whose permits are given back with ZREM, and a
sliding window that keeps each request; *estimated* is the cheaper form, from the numbers of this window and the last,
which is not always right. No request is refused, and a release gives back the token that an earlier reply told.

What begins with *beanstalk* is of that protocol, beside beanstalkd: jobs of 100 bytes are put, or put, reserved and
deleted in turn. A put that is *durable* is on disk when it is answered (`beanstalk.sync = always`, and beanstalkd's
`-b -f0`; with `-b` alone it is within 50 ms). In the fan one connection puts and 500 wait, and latency is from the put
to the arrival of the job.

What begins with *smockron* is of that protocol: ten gatekeepers send accounting messages, beside a SUB socket of libzmq
in Python that receives the same and does nothing with it (no master in Python can do less). With the *state in redis*,
a redis-server decides, which has the load's core.

What begins with *Python* is a program's view: counterd's client beside redis-py with hiredis, each with its own server.

"""
CHART = "![requests a second by requests in flight]({})\n\n"


class Verdict(NamedTuple):
    """A promise, and what became of it."""

    promise: dict[str, Any]
    ratio: float | None  # None = nothing was measured that tells

    def holds(self) -> bool:
        return self.ratio is not None and self._within("at least", "at most")

    def _within(self, low: str, high: str) -> bool:
        assert self.ratio is not None
        return self.promise.get(low, 0.0) <= self.ratio <= self.promise.get(high, float("inf"))

    def word(self) -> str:
        if self.ratio is None:
            return "not measured"
        if not self.holds():
            return "**missed**"
        return "holds, aim missed" if self.ratio < self.promise.get("aim", 0.0) else "holds"


def verdicts(document: dict[str, Any]) -> list[Verdict]:
    rounds = {scenario["name"]: scenario["rounds"] for scenario in document["scenarios"]}
    return [Verdict(promise, _ratio(promise, rounds)) for promise in json.loads(PROMISES.read_text())]


def promises_hold(document: dict[str, Any]) -> bool:
    """Returns True if no measured promise is broken."""
    return all(each.holds() for each in verdicts(document) if each.ratio is not None)


def _ratio(promise: dict[str, Any], rounds: dict[str, dict[str, list[dict[str, float]]]]) -> float | None:
    figure, against = promise["figure"], promise.get("against")
    ours = rounds.get(promise["scenario"], {}).get(OURS, [])
    if against is None:
        return statistics.median(each[figure] for each in ours) if ours else None
    theirs, their_figure = rounds.get(promise["scenario"], {}).get(against), figure
    if against in rounds:
        if not ours or not (theirs := rounds[against].get(OURS)):
            return None
        # Another scenario's rounds were at other times: nothing makes pairs of them.
        return statistics.median(each[figure] for each in ours) / statistics.median(each[figure] for each in theirs)
    if ours and against in ours[0]:
        theirs, their_figure = ours, against
    if not ours or not theirs:
        return None
    pairs = [(our[figure], their[their_figure]) for our, their in zip(ours, theirs, strict=True)]
    return statistics.median(our / their if their else float("inf") for our, their in pairs)


def write(document: dict[str, Any], page: Path) -> None:
    """Writes the page, and its chart if there is something to draw."""
    text = INTRODUCTION.format(
        cores=document["cores"],
        machine=", ".join(f"{name} {value}" for name, value in document["machine"].items()),
        versions=", ".join(f"{name} {value}" for name, value in document["versions"].items()),
        started=document["started"][:10],
        commit=document["commit"],
    )
    if chart := _chart(document):
        page.with_suffix(".svg").write_text(chart, "utf-8")
        text += CHART.format(page.with_suffix(".svg").name)
    page.write_text(text + "\n".join(_tables(document)).rstrip() + "\n", "utf-8")


def _tables(document: dict[str, Any]) -> Iterator[str]:
    yield from ("## Promises", "", "| work | figure | against | promised | aim | measured | |", "|---" * 7 + "|")
    for verdict in verdicts(document):
        promise = verdict.promise
        bound = f">= {promise['at least']:g}" if "at least" in promise else f"<= {promise['at most']:g}"
        measured = "" if verdict.ratio is None else f"{verdict.ratio:.2f}"
        cells = [promise["scenario"], promise["figure"], promise.get("against", ""), bound, f"{promise.get('aim', '')}"]
        yield f"| {' | '.join([*cells, measured, verdict.word()])} |"
    for scenario in document["scenarios"]:
        yield from _table(scenario)


def _table(scenario: dict[str, Any]) -> Iterator[str]:
    """One scenario: a row a server; a ratio is counterd's against that server's."""
    rounds = scenario["rounds"]
    yield from ("", f"## {scenario['name'][0].upper()}{scenario['name'][1:]}", "")
    for name, text in scenario["failures"].items():
        yield from (f"**{name} failed**: {' '.join(text.split())}", "")
    if not rounds:
        return
    first = next(iter(rounds.values()))
    figures = list(first[0])
    main = figures[0]
    yield from ("1 round." if len(first) == 1 else f"{len(first)} rounds, medians.", "")
    yield f"| server | {' | '.join(_heading(figure) for figure in figures)} | counterd against it: {_heading(main)} |"
    yield "|---" * (len(figures) + 2) + "|"
    for name, values in scenario["medians"].items():
        against = {"scenario": "it", "figure": main, "against": name}
        ratio = _ratio(against, {"it": rounds}) if name != OURS else None
        cells = [_shown(values[figure]) for figure in figures]
        yield f"| {' | '.join([name, *cells, '' if ratio is None else f'{ratio:.2f}'])} |"


def _heading(figure: str) -> str:
    return figure.replace(" us", ", µs").replace(" ms", ", ms").replace(" MB", ", MB")


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"


def _chart(document: dict[str, Any]) -> str:
    """Requests a second, as times those of the raw loop: servers by requests in flight. Empty without any."""
    charted = [each for each in document["scenarios"] if each["name"] in CHARTED and BASE in each["medians"]]
    if not charted:
        return ""
    names = dict.fromkeys(name for each in charted for name in each["medians"])
    series = [
        Series(
            name,
            [Point(group, each["medians"][name]["requests/s"] / each["medians"][BASE]["requests/s"])
             for group, each in enumerate(charted) if name in each["medians"]],
        )
        for name in names
    ]  # fmt: skip
    return bar_chart(
        [scenario["name"] for scenario in charted],
        series,
        Axis("times the raw loop's"),
        title="Requests a second, the raw epoll loop = 1",
        description="Grouped bars: each server's throughput as a share of a raw epoll loop's, by requests in flight.",
    )
