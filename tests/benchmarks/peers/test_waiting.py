"""Benchmarks that pass a permit from connection to connection end if the server does not pass it on. No test
measures time."""

from __future__ import annotations

import multiprocessing
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from counterd.bench.plan import Plan
from kit import daemon
from peers import servers, waiting

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FIGURES = {"p50 us", "p99 us", "max us", "quiet p99 us", "grant CPU us", "acquire CPU us", "load %"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[servers.Server]:
    with daemon.running(tmp_path) as started:
        yield servers.Server("it", "counter", started.pid, started.address.port)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIET_S", "BEGIN_S", "BUSY_S", "END_S"):
        monkeypatch.setattr(waiting, name, 0.05)
    monkeypatch.setattr(waiting, "run", lambda _: SimpleNamespace(rate=2.0, errors={}))
    monkeypatch.setattr(waiting, "_pour", lambda *_: None)


def test_each_connection_has_its_turn(server: servers.Server) -> None:
    assert waiting.hand_on(server, 3).keys() == FIGURES


@pytest.mark.needs("redis-server")
def test_a_redis_list_is_passed_on() -> None:
    with servers.redis() as server:
        assert waiting.hand_on(server, 3).keys() == FIGURES


def test_a_permit_that_is_not_passed_on_is_an_error(server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "ANSWER_S", 0.05)
    with waiting.connected(server) as holder:
        holder.sendall(waiting.speech_of(server).take)
        waiting.receive(holder, waiting.speech_of(server).taken)
        with pytest.raises(RuntimeError, match="it has not handed the permit on"):
            waiting.hand_on(server, 3)


def test_a_missing_load_is_an_error(server: servers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_pour", lambda *_: os._exit(3))
    with pytest.raises(RuntimeError, match="there was no load"):
        waiting.hand_on(server, 3)


def test_the_share_of_the_load_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("os.nice", lambda _: 0)
    reached = multiprocessing.Value("d")
    monkeypatch.setattr(waiting, "run", lambda _: SimpleNamespace(rate=90.0, errors={}))
    waiting._pour(Plan(rate=100.0), reached)
    assert reached.value == 90.0
    monkeypatch.setattr(waiting, "run", lambda _: SimpleNamespace(rate=90.0, errors={"unanswered": 1}, evidence="x"))
    with pytest.raises(RuntimeError, match="unanswered"):
        waiting._pour(Plan(rate=100.0), reached)
