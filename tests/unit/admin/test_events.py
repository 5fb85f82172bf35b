"""Streams of events: one question serves all listeners, and a slow listener has no queue."""

from __future__ import annotations

import asyncio
import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from counterd.admin import events as module
from counterd.admin.events import Hub, Listener, event
from counterd.ipc import Refused
from unit.admin.serving import until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping


class Daemon:
    """A daemon that counts the questions it is asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refuses = False

    async def stats(self) -> bytes:
        self.asked.append("stats")
        if self.refuses:
            raise Refused(503, "busy")
        return b'{"asked": %d}' % len(self.asked)

    async def table(self, name: str, parameters: Mapping[str, str]) -> bytes:
        self.asked.append((name, dict(parameters)))
        return b'{"rows": ["line\\nbreak"]}'


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


def listen(hub: Hub, table: str | None = None, *, address: str = "", cut: Any = lambda: None, **parameters: str) -> Any:
    return hub.listen(table, parameters, address, cut)


def parsed(data: bytes) -> list[tuple[str, Any]]:
    blocks = [block.split("\n") for block in data.decode().split("\n\n") if block]
    assert all(len(block) == 2 for block in blocks)
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in blocks]


def test_an_event_is_one_line_of_data() -> None:
    assert event("table", b'{"a": "b\\nc"}') == b'event: table\ndata: {"a": "b\\nc"}\n\n'


def test_all_listeners_share_one_question(play) -> None:
    async def scene(hub: Hub, daemon: Daemon) -> None:
        with listen(hub) as one, listen(hub) as two:
            assert len(hub.listeners) == 2
            for _ in range(3):
                assert await one.next() == await two.next()
            assert 3 <= len(daemon.asked) <= 5
        assert not hub.listeners

    play(scene)


def test_the_first_event_comes_at_once(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATS_PERIOD_S", 3600)

    async def scene(hub: Hub, daemon: Daemon) -> None:
        with listen(hub) as one:
            assert parsed(await one.next()) == [("stats", {"asked": 1})]
            with listen(hub) as two:
                assert parsed(await two.next()) == [("stats", {"asked": 1})]

    play(scene)


def test_a_table_beside_the_figures(play) -> None:
    async def scene(hub: Hub, daemon: Daemon) -> None:
        names = set()
        with listen(hub, "counters", match="x") as one:
            while names != {"stats", "table"}:
                names |= {name for name, _ in parsed(await one.next())}
        assert ("counters", {"match": "x"}) in daemon.asked

    play(scene)


def test_the_same_table_is_shared_and_another_is_not(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TABLE_PERIOD_S", 3600)

    async def scene(hub: Hub, daemon: Daemon) -> None:
        with listen(hub, "t", a="1", b="2"), listen(hub, "t", b="2", a="1"), listen(hub, "t"):
            await asyncio.sleep(0.01)
        assert sorted((asked for asked in daemon.asked if asked != "stats"), key=str) == [
            ("t", {"a": "1", "b": "2"}),
            ("t", {}),
        ]

    play(scene)


def test_without_listeners_the_daemon_is_not_asked(play) -> None:
    async def scene(hub: Hub, daemon: Daemon) -> None:
        with listen(hub, "t") as one:
            await one.next()
        asked = len(daemon.asked)
        await asyncio.sleep(0.01)
        assert len(daemon.asked) == asked
        assert not hub._tables  # what was asked for once is not kept
        with listen(hub, "t") as one:
            await one.next()
        assert len(daemon.asked) > asked

    play(scene)


def test_a_slow_listener_gets_only_the_latest_event(play) -> None:
    async def scene(hub: Hub, daemon: Daemon) -> None:
        with listen(hub) as slow:
            await until(lambda: len(daemon.asked) >= 5)
            ((_, data),) = parsed(await slow.next())
            assert data["asked"] >= 4

    play(scene)


def test_a_busy_daemon_is_asked_again(play) -> None:
    async def scene(hub: Hub, daemon: Daemon) -> None:
        daemon.refuses = True
        with listen(hub) as one:
            await until(lambda: len(daemon.asked) >= 3)
            daemon.refuses = False
            assert parsed(await one.next())[0][0] == "stats"

    play(scene)


def test_one_stream_too_many_ends_the_oldest_of_the_address_that_has_most(
    play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the surplus stream comes from that address or another."""
    monkeypatch.setattr(module, "LISTENERS_MAX", 4)

    async def scene(hub: Hub, daemon: Daemon) -> None:
        cut: list[str] = []
        with ExitStack() as stack:

            def add(name: str) -> Listener:
                stream = listen(hub, address=name[0], cut=lambda: cut.append(name))
                added: Listener = stack.enter_context(stream)
                return added

            only = add("a1")
            first, *_ = [add(f"b{number}") for number in range(1, 4)]
            add("c1")
            assert cut == ["b1"]
            with pytest.raises(ConnectionResetError):
                await first.next()
            for number in range(4, 20):
                add(f"b{number}")
            assert cut == [f"b{number}" for number in range(1, 18)]
            assert len(hub.listeners) == 4
            assert parsed(await only.next())[0][0] == "stats"
            add("d1")
            assert cut[17:] == ["b18"]
            add("e1")  # all have one: the oldest
            assert cut[18:] == ["a1"]
        assert not hub.listeners
        assert len(cut) == 19

    play(scene)
