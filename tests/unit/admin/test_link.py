"""The child's end of the socket to the daemon."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from counterd.admin import link as module
from counterd.admin.link import Link, keep_alive
from counterd.ipc import SETTINGS, Frames, Refused, frame
from unit.admin.serving import until

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Daemon:
    """The daemon's end of the link, and the settings that the link was told."""

    def __init__(self) -> None:
        self.socket, self.theirs = socket.socketpair()
        self.socket.settimeout(10)
        self.socket.setblocking(False)
        self.settings: list[Any] = []
        self._frames = Frames()
        self._received: list[Any] = []

    async def receive(self) -> Any:
        while not self._received:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.socket, 65_536), 10)
            self._received += map(json.loads, self._frames.feed(data))
        return self._received.pop(0)

    def say(self, number: int, answer: bytes, status: int = 200) -> None:
        self.socket.sendall(frame(b"%d %d %b" % (number, status, answer)))


def run(scene: Callable[[Link, Daemon], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        daemon = Daemon()
        with daemon.socket:
            link = await Link.open(daemon.theirs, daemon.settings.append)
            await scene(link, daemon)
        await asyncio.wait_for(link.ended.wait(), 10)

    asyncio.run(main())


def test_answers_reach_their_questions_in_any_order() -> None:
    async def scene(link: Link, daemon: Daemon) -> None:
        first = asyncio.create_task(link.ask("table", 10, table="x", parameters={}))
        second = asyncio.create_task(link.ask("ping", 10))
        one, two = await daemon.receive(), await daemon.receive()
        assert (one["ask"], one["table"], one["parameters"], two["ask"]) == ("table", "x", {}, "ping")
        daemon.say(two["id"], b'{"a": 2}')
        daemon.say(one["id"], b"[1, 2]")
        assert await asyncio.gather(first, second) == [b"[1, 2]", b'{"a": 2}']

    run(scene)


def test_a_refusal_is_an_error() -> None:
    async def scene(link: Link, daemon: Daemon) -> None:
        asked = asyncio.create_task(link.ask("close", 10, connection="x"))
        daemon.say((await daemon.receive())["id"], b"is gone", 404)
        with pytest.raises(Refused, match=r"^is gone$") as info:
            await asked
        assert info.value.status == 404

    run(scene)


def test_a_daemon_that_does_not_answer_times_out() -> None:
    async def scene(link: Link, daemon: Daemon) -> None:
        with pytest.raises(Refused, match=r"not answered within 0\.01 s") as info:
            await link.ask("ping", 0.01)
        assert info.value.status == 503
        daemon.say((await daemon.receive())["id"], b"late")  # is thrown away
        daemon.say(12345, b"to nobody")
        asked = asyncio.create_task(link.ask("ping", 10))
        daemon.say((await daemon.receive())["id"], b"in time")
        assert await asked == b"in time"
        assert not link._asked  # nothing is kept of what was asked

    run(scene)


def test_the_number_of_waiting_questions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ASKED_MAX", 2)

    async def scene(link: Link, daemon: Daemon) -> None:
        waiting = [asyncio.create_task(link.ask("ping", 10)) for _ in range(2)]
        await daemon.receive()
        with pytest.raises(Refused, match="too many questions"):
            await link.ask("ping", 10)
        for task in waiting:
            task.cancel()

    run(scene)


def test_settings_come_first_and_again() -> None:
    async def scene(link: Link, daemon: Daemon) -> None:
        daemon.say(SETTINGS, b'{"token": "a"}')
        daemon.say(SETTINGS, b'{"token": "b"}')
        await until(lambda: len(daemon.settings) == 2)
        assert daemon.settings == [{"token": "a"}, {"token": "b"}]

    run(scene)


def test_notes_and_heartbeats_are_sent() -> None:
    async def scene(link: Link, daemon: Daemon) -> None:
        link.note("oh")
        assert await daemon.receive() == {"note": "oh"}
        alive = asyncio.create_task(keep_alive(link, 0.001))
        for _ in range(3):  # whether or not there is an answer
            assert (await daemon.receive())["ask"] == "ping"
        alive.cancel()

    run(scene)


def test_questions_after_the_end_are_refused() -> None:
    async def scene(link: Link, daemon: Daemon) -> None:
        daemon.socket.shutdown(socket.SHUT_RDWR)
        await asyncio.wait_for(link.ended.wait(), 10)
        with pytest.raises(Refused):
            await link.ask("ping", 1)
        link.note("to nobody")

    run(scene)
