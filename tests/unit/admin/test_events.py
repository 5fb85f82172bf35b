"""Streams of events: one question for all who listen, and no queue for who is slow."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from counterd.admin import events as module
from counterd.admin.events import Hub, event
from counterd.admin.frames import Refused
from unit.admin.serving import until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping


class Daemon:
    """Counts what it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refuses = False

    async def stats(self) -> Any:
        self.asked.append("stats")
        if self.refuses:
            raise Refused(503, "busy")
        return {"asked": len(self.asked)}

    async def table(self, name: str, parameters: Mapping[str, str]) -> Any:
        self.asked.append((name, dict(parameters)))
        return {"rows": ["line\nbreak"]}


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Hub, Daemon], Coroutine[Any, Any, None]]], None]:
    monkeypatch.setattr(module, "STATS_PERIOD_S", 0.002)
    monkeypatch.setattr(module, "TABLE_PERIOD_S", 0.004)

    def run(scene: Callable[[Hub, Daemon], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            daemon = Daemon()
            await asyncio.wait_for(scene(Hub(daemon.stats, daemon.table), daemon), 10)

        asyncio.run(main())

    return run


def parsed(data: bytes) -> list[tuple[str, Any]]:
    blocks = [block.split("\n") for block in data.decode().split("\n\n") if block]
    assert all(len(block) == 2 for block in blocks)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_an_event_is_one_line_of_data() -> None:
    assert event("table", {"a": "b\nc"}) == b'event: table\ndata: {"a": "b\\nc"}\n\n'


def test_all_who_listen_share_one_question(play) -> None:
    async def scene(hub: Hub, daemon: Daemon) -> None:
        with hub.listen(None, {}) as one, hub.listen(None, {}) as two:
            assert hub.listening == 2
            for _ in range(3):
                assert await one.next() == await two.next()
            assert 3 <= len(daemon.asked) <= 5
        assert hub.listening == 0

    play(scene)


def test_the_first_event_comes_at_once(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATS_PERIOD_S", 3600)

    async def scene(hub: Hub, daemon: Daemon) -> None:
        with hub.listen(None, {}) as one:
            assert parsed(await one.next()) == [("stats", {"asked": 1})]
            with hub.listen(None, {}) as two:
                assert parsed(await two.next()) == [("stats", {"asked": 1})]

    play(scene)


def test_a_table_beside_the_figures(play) -> None:
    async def scene(hub: Hub, daemon: Daemon) -> None:
        names = set()
        with hub.listen("counters", {"match": "x"}) as one:
            while names != {"stats", "table"}:
                names |= {name for name, _ in parsed(await one.next())}
        assert ("counters", {"match": "x"}) in daemon.asked

    play(scene)


def test_the_same_table_is_shared_and_another_is_not(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_PERIOD_S", 3600)

    async def scene(hub: Hub, daemon: Daemon) -> None:
        with hub.listen("t", {"a": "1", "b": "2"}), hub.listen("t", {"b": "2", "a": "1"}), hub.listen("t", {}):
            await asyncio.sleep(0.01)
        assert sorted((asked for asked in daemon.asked if asked != "stats"), key=str) == [
            ("t", {"a": "1", "b": "2"}),
            ("t", {}),
        ]

    play(scene)


def test_nobody_is_asked_while_nobody_listens(play) -> None:
    async def scene(hub: Hub, daemon: Daemon) -> None:
        with hub.listen("t", {}) as one:
            await one.next()
        asked = len(daemon.asked)
        await asyncio.sleep(0.01)
        assert len(daemon.asked) == asked
        assert not hub._tables  # what was asked for once is not kept
        with hub.listen("t", {}) as one:
            await one.next()
        assert len(daemon.asked) > asked

    play(scene)


def test_whoever_is_slow_gets_the_latest_once(play) -> None:
    async def scene(hub: Hub, daemon: Daemon) -> None:
        with hub.listen(None, {}) as slow:
            await until(lambda: len(daemon.asked) >= 5)
            ((_, data),) = parsed(await slow.next())
            assert data["asked"] >= 4

    play(scene)


def test_a_daemon_that_is_busy_is_asked_again(play) -> None:
    async def scene(hub: Hub, daemon: Daemon) -> None:
        daemon.refuses = True
        with hub.listen(None, {}) as one:
            await until(lambda: len(daemon.asked) >= 3)
            daemon.refuses = False
            assert parsed(await one.next())[0][0] == "stats"

    play(scene)
