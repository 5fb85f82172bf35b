"""What a store shares is asked for one call at a time; whoever does not answer is done without. Redis is a stand-in:
tests/functional/test_smockron_state.py has the real one."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace
from typing import Any

import hiredis
import pytest
from redis.exceptions import NoScriptError

from counterd.control import authority as module
from counterd.control.authority import Authority
from counterd.protocols.smockron import ROOM


class Store:
    """Has batches to be decided, and notes what it is told."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.told: list[Any] = []
        self.taken = False


class Source:
    """In the place of the protocol's module."""

    SCRIPT = "return 1"

    @staticmethod
    def begin(store: Store, _now_ns: int) -> None:
        store.told.append("begin")

    @staticmethod
    def alone(store: Store, _now_ns: int) -> None:
        store.told.append("alone")
        store.taken = False

    @staticmethod
    def take(store: Store, _now_ns: int) -> tuple[list[bytes], list[bytes | int]] | None:
        if store.taken or not store.batches:
            return None
        store.taken = True
        return store.batches.pop(0), [1]

    @staticmethod
    def settle(store: Store, answer: bytes, _now_ns: int) -> None:
        store.told.append([int(each) for each in answer.split()])
        store.taken = False


class Redis:
    """Answers as it is told. calls: keys of each."""

    def __init__(self) -> None:
        self.calls: list[list[bytes]] = []
        self.answers: list[bytes | Exception] = []
        self.closed = asyncio.Event()
        self.loaded = 0

    async def ping(self) -> None:
        if self.answers and isinstance(self.answers[0], ConnectionError):
            raise self.answers.pop(0)  # type: ignore[misc]

    @property
    def connection(self) -> Redis:
        return self

    async def send_packed_command(self, packed: bytes) -> None:
        reader = hiredis.Reader()
        reader.feed(packed)
        command, digest, count, *rest = reader.gets()
        assert (command, digest) == (b"EVALSHA", hashlib.sha1(Source.SCRIPT.encode()).hexdigest().encode())
        keys, arguments = rest[: int(count)], rest[int(count) :]
        assert arguments == [b"1"]
        self.calls.append(keys)

    async def read_response(self) -> bytes:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def script_load(self, script: str) -> None:
        assert script == Source.SCRIPT
        self.loaded += 1

    async def aclose(self) -> None:
        self.closed.set()


class Scene:
    """An authority, its store, its driver, and its Redis."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.redis = Redis()
        self.store = Store()
        self.woken = 0
        self.bugs: list[str] = []
        self.reports: list[str] = []
        monkeypatch.setattr("redis.asyncio.from_url", lambda *_, **__: self.redis)
        monkeypatch.setattr("importlib.import_module", lambda _name: Source)
        monkeypatch.setattr(module, "RETRY_S", 0.001)
        driver = SimpleNamespace(wake=self.wake)
        values = {"smockron.state": "redis://nowhere"}
        self.authority = Authority(ROOM, values, self.store, driver, self.report)  # type: ignore[arg-type]

    def wake(self) -> None:
        self.woken += 1

    def report(self, cause: str, text: str) -> None:
        assert cause == "shared"
        self.reports.append(text)


def played(scene: Scene, *batches: bytes, told: int) -> list[Any]:
    """What the store is told while these are to be decided."""

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: scene.bugs.append(what["message"]))
        scene.authority.start()
        scene.store.batches = [[each] for each in batches]
        while len(scene.store.told) < told:
            scene.authority.turn(0)
            await asyncio.sleep(0.001)
        scene.authority.stop()
        await scene.redis.closed.wait()

    asyncio.run(play())
    return scene.store.told


def test_one_call_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.redis.answers = [b"7", b"8 9"]
    assert played(scene, b"a", b"b", told=4) == ["alone", "begin", [7], [8, 9]]
    assert scene.redis.calls == [[b"a"], [b"b"]]
    assert scene.woken == 2
    assert scene.reports == []


def test_a_script_that_redis_does_not_know_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.redis.answers = [NoScriptError(), b"7", b"8"]
    assert played(scene, b"a", b"b", told=4) == ["alone", "begin", [7], [8]]
    assert scene.redis.calls == [[b"a"], [b"a"], [b"b"]]
    assert scene.redis.loaded == 1


@pytest.mark.parametrize("error", [RuntimeError("a bug"), OverflowError("a bug"), AttributeError("a bug"), EOFError()])
def test_whatever_else_goes_wrong_is_a_bug_and_does_not_end_it(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    scene = Scene(monkeypatch)
    scene.redis.answers = [b"7", error, b"8"]
    assert played(scene, b"a", b"b", b"c", told=6) == ["alone", "begin", [7], "alone", "begin", [8]]
    assert scene.bugs == ["failed to call Redis"]
    assert len(scene.reports) == 1


@pytest.mark.parametrize("error", [ConnectionError("gone"), OSError("gone"), ValueError("gone"), b"x"])
def test_what_fails_is_decided_alone_and_tried_again(monkeypatch: pytest.MonkeyPatch, error: bytes | Exception) -> None:
    scene = Scene(monkeypatch)
    scene.redis.answers = [b"7", error, b"8"]
    assert played(scene, b"a", b"b", b"c", told=6) == ["alone", "begin", [7], "alone", "begin", [8]]
    (report,) = scene.reports
    assert report.startswith("Redis is unavailable, so this master decides by itself: ")
    assert scene.authority.failing == ""


def test_an_outage_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.redis.answers = [ConnectionError("refused"), ConnectionError("refused again")]
    assert played(scene, told=4) == ["alone", "alone", "alone", "begin"]
    assert scene.reports == ["Redis is unavailable, so this master decides by itself: refused"]


def test_one_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.redis.answers = [asyncio.TimeoutError()]
    assert played(scene, b"a", told=4) == ["alone", "begin", "alone", "begin"]
    assert scene.reports == ["Redis is unavailable, so this master decides by itself: no answer for 1 s"]
