"""The daemon's end of the socket to the admin process; the test plays a misbehaving admin process."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import uvloop

from counterd.control import admin as module
from counterd.control.admin import Admin, close_listening, open_listening
from counterd.control.config.keys import Endpoint
from counterd.control.config.loading import ConfigError
from counterd.control.process import child, supervisor
from counterd.ipc import Frames, Refused, frame
from counterd.net.sockets import UnixSocket
from kit.machine import PATIENCE
from unit.control.process.processes import Process, spawn_into

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator
    from pathlib import Path

WORK_S = 0.002
NEVER_S = 1e9  # seconds that no test takes


class Inspector:
    """Answers questions. steps: how many an answer to "table" takes, once `awaited` questions have been asked. asked:
    all of them. moments: when it began to work for WORK_S.
    """

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.steps = 3
        self.awaited = 0
        self.restarts = 0
        self.working = 0
        self.moments: list[float] = []

    def answer(self, question: dict[str, Any]) -> Any:
        self.asked.append(question)
        what = question["ask"]
        if what == "ping":
            return b'{"state": "ready"}'
        if what == "refuse":
            raise Refused(404, "no")
        if what == "exhausted":
            raise OSError(24, "Too many open files")
        if what == "long":
            return b'"' + b"x" * 100_000 + b'"'
        if what == "attribute":
            raise AttributeError
        if what == "work":
            return self.work()
        if what == "busy":
            return self.work_at_once()
        if what in ("table", "bug", "late"):
            return self.take_steps(what)
        raise ValueError(f"unknown question {what!r}")

    def work_at_once(self) -> bytes:
        self.moments.append(time.monotonic())
        time.sleep(WORK_S)
        return b"1"

    def work(self) -> Generator[None, None, bytes]:
        for _ in range(self.steps):
            self.work_at_once()
            yield
        return b"2"

    def take_steps(self, what: str) -> Generator[None, None, bytes]:
        self.working += 1
        assert self.working == 1, "one at a time"
        while len(self.asked) < self.awaited:
            yield
        for _ in range(self.steps):
            yield
        self.working -= 1
        if what == "late":
            raise Refused(400, "too late")
        if what == "bug":
            raise ZeroDivisionError
        return b'"' + b"x" * 300_000 + b'"'


class Answer(NamedTuple):
    id: int
    status: int
    text: str

    @classmethod
    def of(cls, body: bytes) -> Answer:
        number, status, text = body.decode().split(" ", 2)
        return cls(int(number), int(status), text)


class World:
    """An Admin whose processes the test plays. reports: its reports. complaints: those of the loop."""

    def __init__(self, admin: Admin, inspector: Inspector, started: list[Process], reports: list[str]) -> None:
        self.admin = admin
        self.inspector = inspector
        self.started = started
        self.reports = reports
        self.complaints: list[dict[str, Any]] = []
        self._frames = Frames()
        self._received: list[Answer] = []

    @property
    def process(self) -> Process:
        return self.started[-1]

    def pass_periods(self, count: int) -> None:
        """Acts as if that many periods of LISTEN_PERIOD_S were over."""
        for _ in range(count):
            self.admin._answers._child._check()

    async def ask(self, what: str, number: int = 1) -> None:
        await self.send(frame(json.dumps({"id": number, "ask": what}).encode()))

    async def send(self, data: bytes) -> None:
        await asyncio.wait_for(asyncio.get_running_loop().sock_sendall(self.process.socket, data), PATIENCE)

    async def receive(self) -> Answer:
        while not self._received:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.process.socket, 1 << 20), PATIENCE)
            assert data, "it was cut off"
            self._received += map(Answer.of, self._frames.feed(data))
        return self._received.pop(0)

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.reports
            await asyncio.sleep(0.001)


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[World], Coroutine[Any, Any, None]]], None]:
    """Runs a scene with a World in it."""
    started: list[Process] = []
    reports: list[str] = []

    monkeypatch.setattr(child, "spawn", spawn_into(started))
    monkeypatch.setattr(supervisor, "RESTART_MIN_S", 0.001)

    async def perform(scene: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        inspector: Any = Inspector()
        admin = Admin(
            Endpoint(token="t", allow=("10.0.0.0/8",)),
            socket.socket(),
            inspector,
            lambda cause, text: reports.append(text),
        )
        world = World(admin, inspector, started, reports)
        asyncio.get_running_loop().set_exception_handler(lambda _, context: world.complaints.append(context))
        admin.start()
        try:
            await world.until(lambda: started)
            assert await world.receive() == (0, 200, '{"token": "t", "allow": ["10.0.0.0/8"], "hosts": []}')
            await scene(world)
        finally:
            admin.stop()
            for process in started:
                process.socket.close()
            await asyncio.sleep(0)

    def run(scene: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        loop = uvloop.new_event_loop()
        try:
            loop.run_until_complete(perform(scene))
        finally:
            loop.close()

    return run


def test_questions_are_answered(play) -> None:
    async def scene(world: World) -> None:
        await world.ask("ping", 5)
        assert await world.receive() == (5, 200, '{"state": "ready"}')
        await world.ask("refuse", 6)
        assert await world.receive() == (6, 404, "no")
        await world.ask("late", 7)
        assert await world.receive() == (7, 400, "too late")
        await world.ask("table", 8)
        assert len((await world.receive()).text) == 300_002
        assert world.inspector.restarts == 0

    play(scene)


def test_a_reload_hands_down_the_settings(play) -> None:
    async def scene(world: World) -> None:
        world.admin.reload(Endpoint(token="new", hosts=("a", "b"), bind="elsewhere"))
        assert await world.receive() == (0, 200, '{"token": "new", "allow": [], "hosts": ["a", "b"]}')

    play(scene)


def test_an_exception_fails_one_question(play) -> None:
    async def scene(world: World) -> None:
        await world.ask("bug", 1)
        assert (await world.receive()).status == 500
        assert [type(context["exception"]) for context in world.complaints] == [ZeroDivisionError]
        await world.ask("ping", 2)
        assert (await world.receive()).id == 2

    play(scene)


def test_stepwise_answers_are_made_one_at_a_time_and_their_queue_is_bounded(play) -> None:
    async def scene(world: World) -> None:
        world.inspector.steps, world.inspector.awaited = 10, 13
        asked = b"".join(frame(json.dumps({"id": number, "ask": "table"}).encode()) for number in range(12))
        await world.send(asked + frame(b'{"id": 99, "ask": "ping"}'))
        answers = [await world.receive() for _ in range(13)]
        assert [answer.id for answer in answers if answer.status == 503] == [8, 9, 10, 11]
        assert [answer.id for answer in answers if answer.status == 200] == [99, *range(8)]

    play(scene)


@pytest.mark.parametrize(
    "sent",
    [b"\xff\xff\xff\xff", frame(b"x" * 100), frame(b"[]"), frame(b"1"), frame(b'{"ask": "ping"}'),
     frame(b'{"id": 1}'), frame(b'{"id": 1, "ask": "nonsense"}'), frame(b'{"id": {}, "ask": "ping"}'),
     frame(b'{"id": 1e400, "ask": "ping"}'), frame(b'{"id": 1, "ask": "attribute"}'), frame(b"[" * 60_000),
     b"\x00\x04\x00\x01"],
    ids=["length", "text", "list", "number", "without id", "without question", "unknown", "id", "infinite", "attribute",
         "deep", "long"],
)  # fmt: skip
def test_an_invalid_question_ends_the_process(sent: bytes, play) -> None:
    async def scene(world: World) -> None:
        await world.send(sent)
        await world.until(lambda: len(world.started) == 2)
        assert world.started[0].killed
        assert "sent an invalid request" in world.reports[0]
        assert world.inspector.restarts == 1
        assert world.complaints == []

    play(scene)


def test_a_system_error_fails_one_question(play) -> None:
    async def scene(world: World) -> None:
        await world.ask("exhausted", 1)
        assert await world.receive() == (1, 503, "the daemon cannot answer now: Too many open files")
        await world.ask("ping", 2)
        assert (await world.receive()).id == 2
        assert world.complaints == []

    play(scene)


def test_questions_wait_while_answers_are_unread(play) -> None:
    async def scene(world: World) -> None:
        await world.send(b"".join(frame(b'{"id": %d, "ask": "long"}' % number) for number in range(100)))
        await world.until(lambda: world.admin._answers._is_stuck)
        await asyncio.sleep(0.05)
        assert len(world.inspector.asked) < 20
        assert [(await world.receive()).id for _ in range(100)] == list(range(100))

    play(scene)


def test_an_admin_process_that_does_not_read_is_bounded_and_replaced(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "LISTEN_PERIOD_S", NEVER_S)

    async def scene(world: World) -> None:
        question = frame(b'{"id": 1, "ask": "table"}')
        answers = world.admin._answers
        process = answers._child
        blocked = False
        while not (blocked and answers._is_stuck):
            try:
                world.process.socket.send(question)
            except BlockingIOError:
                blocked = True
                await asyncio.sleep(0.001)
            else:
                await asyncio.sleep(0)
        most = process._transport.get_write_buffer_size()
        assert module.OUTPUT_MAX < most < module.OUTPUT_MAX + 400_000  # one answer more than the bound
        world.pass_periods(child.SILENT_MAX + 1)
        await world.until(lambda: len(world.started) == 2)
        assert "was silent for" in world.reports[0]

    play(scene)


def test_a_flood_leaves_the_loop_most_of_its_time(play) -> None:
    """And no question is lost, or answered out of turn."""

    async def scene(world: World) -> None:
        count = 3_000
        asked = [frame(json.dumps({"id": number, "ask": "ping"}).encode()) for number in range(count)]
        await world.send(b"".join(asked[:1_500]))
        turns = rested = 0
        for number in range(count):
            assert (await world.receive()).id == number
            if number == 0:
                await world.send(b"".join(asked[1_500:]))  # while it rests from the first
            turns += 1
            rested += world.admin._answers._is_resting
        assert rested > turns / 2

    play(scene)


def test_no_question_is_read_during_a_rest(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REST", 1e9)  # for as long as the test takes

    async def scene(world: World) -> None:
        await world.ask("ping", 1)
        assert (await world.receive()).id == 1
        await world.ask("ping", 2)
        await asyncio.sleep(0.02)
        assert [asked["id"] for asked in world.inspector.asked] == [1]

    play(scene)


@pytest.mark.parametrize("what", ["work", "busy"])
def test_a_rest_is_four_times_as_long_as_the_work(what: str, play) -> None:
    async def scene(world: World) -> None:
        await world.send(frame(json.dumps({"id": 1, "ask": what}).encode()) * 3)
        for _ in range(3):
            await world.receive()
        moments = world.inspector.moments
        assert min(later - sooner for sooner, later in pairwise(moments)) > (1 + module.REST) * WORK_S - 0.001

    play(scene)


def test_stepwise_answers_continue_once_earlier_answers_are_read(play) -> None:
    async def scene(world: World) -> None:
        await world.send(b"".join(frame(b'{"id": %d, "ask": "table"}' % number) for number in range(4)))
        await world.until(lambda: world.admin._answers._is_stuck)
        assert [(await world.receive()).id for _ in range(4)] == [0, 1, 2, 3]

    play(scene)


def test_notes_of_the_admin_process_are_logged(play) -> None:
    async def scene(world: World) -> None:
        await world.send(frame(json.dumps({"note": "x" * 1000}).encode()))
        await world.until(lambda: world.reports)
        assert world.reports == [f"the admin process says: {'x' * 200}"]

    play(scene)


# ---- sockets and processes ------------------------------------------------------------------------------------------


def config(bind: str) -> Any:
    return SimpleNamespace(admin=Endpoint(bind=bind), sockets={}, place=lambda key: f"file:7: {key}")


def test_listening_on_an_address() -> None:
    listening = open_listening(config("127.0.0.1:0"))
    assert isinstance(listening, socket.socket)
    host, port = listening.getsockname()
    try:
        with pytest.raises(
            ConfigError, match=f"^file:7: admin.bind: cannot listen on 127.0.0.1:{port}: address already in use$"
        ):
            open_listening(config(f"{host}:{port}"))
    finally:
        close_listening(listening)


def test_listening_on_a_unix_socket(short_path: Path) -> None:
    listening = open_listening(config(f"unix:{short_path}/s"))
    assert isinstance(listening, UnixSocket)
    assert (short_path / "s").stat().st_mode & 0o777 == 0o660
    close_listening(listening)
    assert not (short_path / "s").exists()
    with pytest.raises(ConfigError, match="cannot listen on unix:/nowhere/s: No such file"):
        open_listening(config("unix:/nowhere/s"))


def test_a_passed_admin_socket_is_used() -> None:
    with socket.socket() as passed:
        given = config("127.0.0.1:1")
        given.sockets["admin"] = (passed,)
        assert open_listening(given) is passed
