"""One child process: how it is started, the messages in both directions, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

from counterd.control.process import child as module
from counterd.control.process.child import Child, Kind
from kit.machine import PATIENCE
from unit.control.process.processes import Process, spawn_into

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    import pytest

KIND = Kind("toy", "toy", 100_000)


class Talk:
    """A conversation with a child. heard: what the child said; steps: the other events."""

    def __init__(self) -> None:
        self.child: Child
        self.heard = b""
        self.steps: list[str] = []
        self.changed = asyncio.Event()

    def opened(self, child: Child) -> None:
        self.child = child
        self._note("opened")

    def received(self, data: bytes) -> None:
        self.heard += data
        self.changed.set()

    def paused(self) -> None:
        self._note("paused")

    def resumed(self) -> None:
        self._note("resumed")

    def closed(self) -> None:
        self._note("closed")

    def _note(self, step: str) -> None:
        self.steps.append(step)
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), PATIENCE)


def play(monkeypatch: pytest.MonkeyPatch, scene: Callable[[Talk, Child, Process], Coroutine[Any, Any, None]]) -> None:
    """Runs a scene with a child whose side the test plays."""
    started: list[Process] = []
    monkeypatch.setattr(module, "spawn", spawn_into(started))

    async def perform() -> None:
        talk = Talk()
        child = Child(KIND, [], talk)
        await child.open()
        assert talk.steps == ["opened"]
        assert talk.child is child
        try:
            await asyncio.wait_for(scene(talk, child, started[0]), 3 * PATIENCE)
        finally:
            started[0].socket.close()

    asyncio.run(perform())


async def read(process: Process, size: int) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(process.socket, size), PATIENCE)


def test_messages_go_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(talk: Talk, child: Child, process: Process) -> None:
        process.socket.send(b"hello")
        await talk.until(lambda: talk.heard == b"hello")
        child.write(b"welcome")
        assert await read(process, 100) == b"welcome"
        child.end()

    play(monkeypatch, scene)


def test_listen_false_stops_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(talk: Talk, child: Child, process: Process) -> None:
        child.listen(False)
        process.socket.send(b"hello")
        child.write(b"x")
        assert await read(process, 1) == b"x"
        assert talk.heard == b""
        child.listen(True)
        await talk.until(lambda: talk.heard == b"hello")
        child.end()

    play(monkeypatch, scene)


def test_a_child_that_does_not_read_pauses_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(talk: Talk, child: Child, process: Process) -> None:
        written = 0
        while "paused" not in talk.steps:
            child.write(b"x" * 10_000)
            written += 10_000
            await asyncio.sleep(0)
        while written:
            written -= len(await read(process, 1 << 20))
        await talk.until(lambda: talk.steps == ["opened", "paused", "resumed"])
        child.end()

    play(monkeypatch, scene)


def test_the_reason_of_an_ended_child_has_its_last_output(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(talk: Talk, child: Child, process: Process) -> None:
        process.socket.shutdown(socket.SHUT_RDWR)
        assert await child.ended() == "exited with status -9: ImportError: no module"
        assert process.killed
        assert talk.steps == ["opened", "closed"]
        child.write(b"nobody hears it")
        child.listen(False)

    play(monkeypatch, scene)


def test_the_reason_of_a_cut_child_is_the_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(talk: Talk, child: Child, process: Process) -> None:
        child.cut("asked too much")
        assert await child.ended() == "asked too much: ImportError: no module"
        assert process.killed

    play(monkeypatch, scene)


def test_a_silent_child_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTEN_PERIOD_S", 0.001)

    async def scene(talk: Talk, child: Child, process: Process) -> None:
        assert (await child.ended()).startswith("was silent for 0.024 s"), "it may take long to start"

    play(monkeypatch, scene)


def test_a_child_that_sends_in_each_period_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs the periodic check itself, and the child sends in between."""
    monkeypatch.setattr(module, "LISTEN_PERIOD_S", 3600)

    async def scene(talk: Talk, child: Child, process: Process) -> None:
        for number in range(1, 3 * module.SILENT_MAX):
            process.socket.send(b".")
            await talk.until(lambda wanted=number: len(talk.heard) == wanted)
            child._check()
        for _ in range(module.SILENT_MAX):
            assert "closed" not in talk.steps
            child._check()
        await talk.until(lambda: "closed" in talk.steps)
        await child.ended()

    play(monkeypatch, scene)


def test_slack_lets_a_child_be_silent_for_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LISTEN_PERIOD_S", 3600)

    async def scene(talk: Talk, child: Child, process: Process) -> None:
        process.socket.send(b".")
        await talk.until(lambda: len(talk.heard) == 1)
        child._check()
        child.slack = 3600
        for _ in range(module.SILENT_MAX + 1):
            assert "closed" not in talk.steps
            child._check()
        await talk.until(lambda: "closed" in talk.steps)
        await child.ended()

    play(monkeypatch, scene)


def test_a_child_inherits_only_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing of what a service manager passed to the daemon."""
    told = """
import json, os, sys
standard = [os.getcwd(), os.readlink("/proc/self/fd/0"), os.get_blocking(1), os.get_blocking(2)]
print(json.dumps([os.listdir("/proc/self/fd"), standard, sys.argv[1:], *os.environ]))
"""
    run = subprocess.Popen
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/x")
    monkeypatch.setattr(
        module.subprocess, "Popen", lambda command, **rest: run([sys.executable, "-c", told, *command[3:]], **rest)
    )
    ours, theirs = socket.socketpair()
    with socket.socket() as listening, ours, theirs:
        process, words = module.spawn("toy", (listening, theirs))
        assert process.wait(PATIENCE) == 0
        descriptors, standard, arguments, *names = json.loads(os.read(words, 65_536))
        os.close(words)
        passed = {listening.fileno(), theirs.fileno()}
        others = {int(text) for text in descriptors} - passed - {0, 1, 2}
        assert len([number for number in others if not is_inheritable(number)]) == 1  # that of the listing itself
        assert {int(text) for text in descriptors} >= passed
        assert arguments == [str(listening.fileno()), str(theirs.fileno()), str(os.getpid())]
        assert "PATH" in names
        assert "NOTIFY_SOCKET" not in names
        assert standard == ["/", "/dev/null", False, False]
        assert not listening.get_inheritable()
        assert not theirs.get_inheritable()


def is_inheritable(descriptor: int) -> bool:
    """Whether a descriptor is inheritable. Those that the tests inherited do not count; the daemon has none."""
    try:
        return os.get_inheritable(descriptor)
    except OSError:
        return False
