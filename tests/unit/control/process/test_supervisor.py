"""The supervisor that restarts a child process, with fake processes."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import TYPE_CHECKING

import pytest
import uvloop

from counterd.control.process import child, supervisor
from counterd.control.process.child import Child, Kind
from counterd.control.process.supervisor import Supervisor
from kit.machine import PATIENCE
from unit.control.process.processes import Process, spawn_into

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


class Silence:
    """A conversation without messages."""

    def opened(self, child: Child) -> None: ...

    def received(self, data: bytes) -> None: ...

    def paused(self) -> None: ...

    def resumed(self) -> None: ...

    def closed(self) -> None: ...


class World:
    """A supervisor whose processes the test plays. reports: its reports."""

    def __init__(self) -> None:
        self.started: list[Process] = []
        self.reports: list[str] = []
        self.supervisor = Supervisor(Kind("toy", "toy", 1), [], Silence, self.report)

    @property
    def process(self) -> Process:
        return self.started[-1]

    def report(self, cause: str, text: str) -> None:
        assert cause == "toy"
        self.reports.append(text)

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.reports
            await asyncio.sleep(0.001)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[World], Coroutine[None, None, None]]], None]:
    """Runs a scene with a World in it."""
    monkeypatch.setattr(supervisor, "RESTART_MIN_S", 0.001)

    async def perform(scene: Callable[[World], Coroutine[None, None, None]]) -> None:
        world = World()
        monkeypatch.setattr(child, "spawn", spawn_into(world.started))
        world.supervisor.start()
        try:
            await world.until(lambda: world.started)
            await scene(world)
        finally:
            world.supervisor.stop()
            for process in world.started:
                process.socket.close()
            await asyncio.sleep(0)

    def run(scene: Callable[[World], Coroutine[None, None, None]]) -> None:
        loop = uvloop.new_event_loop()
        try:
            loop.run_until_complete(perform(scene))
        finally:
            loop.close()

    return run


def test_an_ended_process_is_replaced_and_its_last_output_reported(play) -> None:
    async def scene(world: World) -> None:
        world.process.socket.shutdown(socket.SHUT_RDWR)
        await world.until(lambda: len(world.started) == 2)
        assert world.reports == [
            "the toy process exited with status -9: ImportError: no module; restarting it in 0.001 s"
        ]

    play(scene)


def test_the_pause_before_a_restart_grows(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "RESTART_MAX_S", 0.003)

    async def scene(world: World) -> None:
        for number in range(1, 5):
            world.process.socket.shutdown(socket.SHUT_RDWR)
            await world.until(lambda wanted=number + 1: len(world.started) == wanted)
        assert [report.rsplit(" in ", 1)[1] for report in world.reports] == ["0.001 s", "0.002 s", "0.003 s", "0.003 s"]

    play(scene)


def test_the_pause_before_a_restart_is_reset_after_a_long_life(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STEADY_S", 0.0)

    async def scene(world: World) -> None:
        for number in range(1, 4):
            world.process.socket.shutdown(socket.SHUT_RDWR)
            await world.until(lambda wanted=number + 1: len(world.started) == wanted)
        assert [report.rsplit(" in ", 1)[1] for report in world.reports] == ["0.001 s"] * 3

    play(scene)


def test_a_process_without_a_channel_is_killed(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        async def fail(_: object) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(supervisor.Child, "open", fail)
            world.process.socket.shutdown(socket.SHUT_RDWR)
            await world.until(lambda: len(world.started) == 2)
        await world.until(lambda: len(world.started) == 3)
        assert world.started[1].killed

    play(scene)


def test_a_process_that_cannot_be_started_is_tried_again(play, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(world: World) -> None:
        spawn = child.spawn

        def fail(*_: object) -> None:
            child.spawn = spawn
            raise OSError(11, "Resource temporarily unavailable")

        monkeypatch.setattr(child, "spawn", fail)
        world.process.socket.shutdown(socket.SHUT_RDWR)
        await world.until(lambda: len(world.started) == 2)
        assert world.reports[1].startswith("the toy process cannot be started: Resource temporarily unavailable")

    play(scene)


def test_no_process_is_started_after_the_end(play) -> None:
    async def scene(world: World) -> None:
        world.supervisor.stop()
        for _ in range(10):
            await asyncio.sleep(0.001)
        assert len(world.started) == 1
        assert world.started[0].killed

    play(scene)
