"""The simulation in short, with seeds that are fixed, and that it is worth its name: it replays, and it tells."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.sentinel.wire import Status
from kit import counters as counter
from kit.machine import examples
from kit.promises import Violation
from property import takes_model as takes
from simulation import lent, run, sentinel, throttr
from simulation.counter import CounterWorld

if TYPE_CHECKING:
    from simulation.counter import Books

PROTOCOLS = sorted(run.PROTOCOLS)
WORLDS = 8  # of each protocol: with 1 to 300 connections, that ask one thing or hundreds at once
STEPS = {
    "beanstalk": 4_000, "counter": 6_000, "lent": 1_500, "sentinel": 1_500, "smockron": 2_000, "takes": 1_500,
    "throttr": 6_000,
}  # fmt: skip
# Those of these protocols are lived through once, to see both that promises hold and which answers are given.
ANSWERING = {"lent": 10, "takes": 16}
# Of the first world: the same with every Python and build, until the protocols' replies or the simulation change.
DIGESTS = {
    "beanstalk": "742c6211",
    "counter": "25725028",
    "lent": "a52b3ee7",
    "sentinel": "d19d1fae",
    "smockron": "5a104faf",
    "takes": "a4b7190f",
    "throttr": "b812e208",
}
WAITS = {"DEADLINE_SOON", "TIMED_OUT"}
# Opcodes or commands, and how they may be answered.
ANSWERS: dict[str, set[tuple[Any, Any]]] = {
    "beanstalk": {
        (command, word)
        for command, words in {
            "put": {"INSERTED", "DRAINING", "EXPECTED_CRLF", "INTERNAL_ERROR", "JOB_TOO_BIG", "OUT_OF_MEMORY"},
            "put-unique": {"INSERTED", "EXISTS", "INTERNAL_ERROR", "OUT_OF_MEMORY"},
            "reserve": {"RESERVED", *WAITS},
            "reserve-with-timeout": {"RESERVED", *WAITS},
            "batch-reserve": {"JOBS", "BAD_FORMAT", *WAITS},
            "reserve-job": {"RESERVED", "NOT_FOUND"},
            "delete": {"DELETED", "NOT_FOUND"},
            "release": {"RELEASED", "NOT_FOUND"},
            "bury": {"BURIED", "NOT_FOUND"},
            "touch": {"TOUCHED", "NOT_FOUND"},
            "kick": {"KICKED"},
            "kick-job": {"KICKED", "NOT_FOUND"},
            **{f"peek{which}": {"FOUND", "NOT_FOUND"} for which in ("", "-ready", "-delayed", "-buried")},
            "use": {"USING", "OUT_OF_MEMORY"},
            "watch": {"WATCHING", "OUT_OF_MEMORY"},
            "ignore": {"WATCHING", "NOT_IGNORED"},
            "pause-tube": {"PAUSED", "NOT_FOUND"},
            "clear-tube": {"CLEARED", "NOT_FOUND"},
            "list-jobs": {"OK", "NOT_FOUND"},
            "limit-reserves": {"LIMITED", "OUT_OF_MEMORY"},
        }.items()
        for word in words
    },
    "counter": {
        *(
            (counter.ACQUIRE, status)
            for status in (counter.OK, counter.INVALID, counter.NOT_AVAILABLE, counter.NO_MEMORY)
        ),
        *((counter.RELEASE, status) for status in (counter.OK, counter.NOT_FOUND, counter.NOT_ACQUIRED)),
        *((counter.GET, status) for status in (counter.OK, counter.NOT_FOUND)),
        (counter.DUMP, counter.OK),
    },
    "lent": {
        *(("lent", how) for how in (True, False, "again")),
        *(("waits", how) for how in (True, False, "given up")),
        *(("settled", granted) for granted in (True, False)),
        *(("take", status) for status in (counter.OK, counter.NOT_AVAILABLE, takes.FULL)),
        *((b"put-limited", word) for word in (lent.Status.INSERTED, lent.Status.DRAINING, lent.Status.INTERNAL_ERROR)),
        *((b"reserve", word) for word in (lent.Status.RESERVED, lent.Status.DEADLINE_SOON, lent.Status.TIMED_OUT)),
        *((b"reserve-job", word) for word in (lent.Status.RESERVED, lent.Status.NOT_FOUND)),
        *((b"delete", lent.Status.DELETED), (b"release", lent.Status.RELEASED), (b"bury", lent.Status.BURIED)),
        ("daemon", "killed"),
    },
    "sentinel": {
        *((sentinel.PING, status) for status in (Status.BAD_REQUEST, Status.FAIL, Status.OK)),
        *((kind, status) for kind in (sentinel.FLOW, sentinel.PARAM) for status in (-4, -2, 0, 1, 3)),
        (sentinel.FLOW, Status.SHOULD_WAIT),
        (sentinel.PARAM, Status.NOT_AVAILABLE),
        *((sentinel.ACQUIRE, status) for status in (-4, 0, 1, 3, 5)),
        *((sentinel.RELEASE, status) for status in (-4, 3, 6, 7)),
        *((sentinel.KEEP, status) for status in (-4, 0, 3, 7)),
        (sentinel.UNKNOWN, Status.BAD_REQUEST),
    },
    "smockron": {
        *(("decision", verdict) for verdict in ("pass", "delay", "reject")),
        *(("taken", status) for status in ("ACCEPTED", "DELAYED", "REJECTED", "FORGET", "odd")),
        *(("told", word) for word in ("DELAY_UNTIL", "FORGET")),
        *(("figure", name) for name in ("evicted", "expired", "silent")),
        *(("passed", "known"), ("passed", "unheard"), ("rate", "looked at"), ("lost", "control"), ("master", "anew")),
        *(("keeper", "ready"), ("keeper", "dropped")),
    },
    "takes": {
        *((counter.ACQUIRE, status) for status in (counter.OK, counter.NOT_AVAILABLE, takes.FULL)),
        *((counter.RELEASE, status) for status in (counter.OK, counter.NOT_FOUND, counter.NOT_ACQUIRED)),
        *((takes.TAKE, status) for status in (counter.OK, counter.NOT_FOUND, counter.INVALID, counter.NOT_AVAILABLE)),
        *((takes.TAKE, status) for status in (takes.CANCELLED, takes.FULL)),
        *((takes.CANCEL, status) for status in (counter.OK, counter.NOT_FOUND, counter.INVALID)),
        *((takes.SETTLE, status) for status in (counter.OK, counter.NOT_FOUND, counter.INVALID, takes.FULL)),
        *((takes.RESUME, status) for status in (counter.OK, counter.NOT_FOUND, counter.INVALID, counter.NOT_AVAILABLE)),
        *((opcode, counter.OK) for opcode in (takes.GOODBYE, takes.WHO, takes.HELD)),
        *((opcode, counter.INVALID) for opcode in (takes.GOODBYE, takes.WHO, takes.HELD)),
        *(("late", status) for status in (counter.OK, counter.NOT_FOUND, takes.CANCELLED, takes.FULL)),
        *(("late", (counter.NOT_AVAILABLE, text)) for text in (takes.TEXTS[counter.NOT_AVAILABLE], takes.DRAINING)),
        ("late", (counter.NOT_AVAILABLE, takes.OVER)),
        *(("resumed", how) for how in ("kept", "open", "at first", "again", "cancelled")),
        *(("charge", end) for end in ("refunded", "expired", "dropped")),
        *(("grace", "over"), ("dropped", "posted"), ("daemon", "killed")),
        *(("share", of) for of in ("waits", "stays")),
    },
    "throttr": {
        *((opcode, status) for opcode in range(throttr.INSERT, throttr.GET + 1) for status in (0, 1)),
        *((opcode, status) for opcode in range(throttr.SUBSCRIBE, throttr.PUBLISH + 1) for status in (0, 1)),
        *((opcode, 1) for opcode in (throttr.LIST, throttr.STATS)),
    },
}


@pytest.mark.parametrize("seed", range(1, examples(WORLDS // 2) + 1))
@pytest.mark.parametrize("protocol", [protocol for protocol in PROTOCOLS if protocol not in ANSWERING])
def test_promises_hold(protocol: str, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.simulate(protocol, STEPS[protocol], seed, 1, lambda: 0.0), capsys.readouterr().out


@pytest.mark.parametrize(("protocol", "answers"), ANSWERS.items())
def test_every_answer_is_given_in_some_world(protocol: str, answers: set[tuple[Any, Any]]) -> None:
    """So that what judges it has something to judge."""
    seen: set[tuple[Any, Any]] = set()
    for seed in range(1, ANSWERING.get(protocol, WORLDS) + 1):
        world = run.PROTOCOLS[protocol](seed)
        try:
            world.run(STEPS[protocol])
        except Violation as error:
            run.tell(world, error, STEPS[protocol])
            raise
        seen |= world.seen.keys()
    assert answers - seen == set()


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_a_seed_is_a_history(protocol: str, hash_seed: str) -> None:
    command = [sys.executable, str(Path(run.__file__).parent), "--protocol", protocol, "--steps", "3000"]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout
    assert f", digest {DIGESTS[protocol]}, " in ended.stdout


def test_a_violation_is_told_and_comes_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forget(world: CounterWorld, books: Books, name: bytes, resources: int) -> None:
        """A client that believes to hold what it has given back."""
        forgotten(world, books, name, resources)
        world.known[name] += resources

    forgotten = CounterWorld.forget
    monkeypatch.setattr(CounterWorld, "forget", forget)
    assert not run.simulate("counter", STEPS["counter"], 1, 0, lambda: 0.0)
    told = capsys.readouterr().out
    first, *trail, again, figures = told.splitlines()
    assert first.startswith("seed 1, step ")
    assert "limit: clients know of " in first
    assert len(trail) == 20
    assert again == f"again: python tests/simulation --protocol counter --seed 1 --worlds 1 --steps {STEPS['counter']}"
    assert figures.endswith(", 1 violation, seed 1")
    assert not run.simulate("counter", STEPS["counter"], 1, 1, lambda: 0.0)
    assert capsys.readouterr().out == told
