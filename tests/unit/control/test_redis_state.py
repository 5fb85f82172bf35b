"""State in a Redis: one call at a time, and without an answer the store decides alone.

The Redis is a stand-in: tests/functional/test_smockron_state.py has the real one."""

from __future__ import annotations

import asyncio
import hashlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from counterd.control import link
from counterd.control import redis_state as module
from counterd.control.config.loading import ConfigError
from counterd.control.redis_state import RedisState
from counterd.protocols.smockron import PROTOCOL, shared
from kit.redises import END, SILENCE, Redis, Refusal, serving

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

NO_SCRIPT = Refusal("NOSCRIPT No matching script.")
DIGEST = hashlib.sha1(b"return 1").hexdigest().encode()
ALONE = "Redis is unavailable, so this master decides by itself: "


class Store:
    """Has batches to be decided, and records its calls."""

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.told: list[Any] = []
        self.taken = False


class Source:
    """Stands for the protocol's module."""

    SCRIPT = "return 1"
    ANSWER_MAX = shared.ANSWER_MAX

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
    def settle(store: Store, answer: Any, _now_ns: int) -> None:
        if answer == b"a bug":
            raise RuntimeError(answer)
        if not isinstance(answer, bytes):
            raise ValueError("an answer that is not text")
        store.told.append([int(each) for each in answer.split()])
        store.taken = False


class Scene:
    """A master, its store, its driver, and its Redis, which answers calls in turn.

    calls: their keys. answers: to calls. firsts: to the first words of other commands, in turn and then as Redis does.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, url: str = "redis://127.0.0.1:{}") -> None:
        self.calls: list[list[bytes]] = []
        self.asked: list[list[bytes]] = []
        self.answers: list[Any] = []
        self.firsts: dict[bytes, list[Any]] = {}
        self.store = Store()
        self.woken = 0
        self.bugs: list[str] = []
        self.reports: list[str] = []
        self.url = url
        monkeypatch.setattr("importlib.import_module", lambda _name: Source)
        monkeypatch.setattr(module, "RETRY_S", 0.001)

    def answer(self, words: list[bytes]) -> Any:
        if words[0] == b"EVALSHA":
            assert (words[1], words[-1]) == (DIGEST, b"1")
            self.calls.append(words[3 : 3 + int(words[2])])
            return self.answers.pop(0)
        self.asked.append(words)
        mine = self.firsts.get(words[0])
        if mine:
            return mine.pop(0)
        return {b"SCRIPT": DIGEST}.get(words[0], bytearray(b"+OK\r\n"))

    def state(self, redis: Redis) -> RedisState:
        config = SimpleNamespace(values={"smockron.state": self.url.format(redis.place.port)}, place=str)
        driver = SimpleNamespace(wake=self.wake)
        return RedisState(PROTOCOL, config, self.store, driver, self.report)  # type: ignore[arg-type]

    def wake(self) -> None:
        self.woken += 1

    def report(self, cause: str, text: str) -> None:
        assert cause == "shared"
        self.reports.append(text)


def played(
    scene: Scene, *batches: bytes, told: int, then: Callable[[RedisState, Redis], None] = lambda *_: None
) -> list[Any]:
    """What the store is told when these are to be decided."""

    async def play() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: scene.bugs.append(what["message"]))
        async with serving(scene.answer) as redis:
            state = scene.state(redis)
            await state.start()
            scene.store.batches = [[each] for each in batches]
            while len(scene.store.told) < told:
                state.turn(0)
                await asyncio.sleep(0.001)
            then(state, redis)
            state.stop()

    asyncio.run(play())
    return scene.store.told


def test_calls_are_made_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.answers = [b"7", b"8 9"]
    assert played(scene, b"a", b"b", told=4) == ["alone", "begin", [7], [8, 9]]
    assert scene.calls == [[b"a"], [b"b"]]
    assert scene.asked == [[b"SCRIPT", b"LOAD", b"return 1"]]
    assert scene.woken == 2
    assert scene.reports == []


def test_a_lost_script_is_loaded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.answers = [NO_SCRIPT, b"7", NO_SCRIPT, b"8"]
    assert played(scene, b"a", b"b", told=4) == ["alone", "begin", [7], [8]]
    assert scene.calls == [[b"a"], [b"a"], [b"b"], [b"b"]]
    assert len(scene.asked) == 3


def test_a_redis_that_keeps_losing_the_script_counts_as_failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else requests would wait for ever."""
    scene = Scene(monkeypatch)
    scene.answers = [NO_SCRIPT] * 2
    assert played(scene, b"a", told=3) == ["alone", "begin", "alone"]
    assert "NOSCRIPT" in scene.reports[0]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (END, "closed the connection"),
        (7, "an answer that is not text: 7"),
        ([7], "an answer that is not text: [7]"),
        ([7, 8], "sent an invalid reply: more than 1 element"),
        (None, "an answer that is not text: None"),
        (b"x", "invalid literal for int() with base 10: b'x': b'x'"),
        (bytearray(b"+OK\r\n+OK\r\n"), "invalid literal"),
        (bytearray(b">2\r\n$10\r\ninvalidate\r\n*0\r\n"), "sent an invalid reply: the unknown type '>'"),
        (bytearray(b"*2147483647\r\n"), "sent an invalid reply: more than 1 element"),
        (bytearray(b"$16385\r\n"), "sent an invalid reply: more than 16384 bytes"),
        (bytearray(b":7\r\n:8\r\n"), "an answer that is not text: 7"),
        (Refusal("READONLY You can't write against a read only replica."), "READONLY You"),
        (Refusal("OOM command not allowed"), "OOM command"),
    ],
)
def test_a_failed_call_is_decided_alone_and_redis_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, answer: Any, says: str
) -> None:
    """The log names the server and the error. It is no bug of the daemon."""
    scene = Scene(monkeypatch)
    scene.answers = [b"7", answer, b"8"]
    failing = []
    told = played(
        scene, b"a", b"b", b"c", told=6, then=lambda state, redis: failing.extend((state.failing, redis.place))
    )
    assert told == ["alone", "begin", [7], "alone", "begin", [8]]
    why, place = failing
    assert why == ""
    (report,) = scene.reports
    assert report.startswith(f"{ALONE}127.0.0.1:{place.port}: {says}")
    assert scene.bugs == []


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (bytearray(b"+OK\r\n"), "invalid reply to SCRIPT LOAD: b'OK'"),
        (Refusal("LOADING Redis is loading the dataset in memory"), "LOADING"),
        (Refusal("NOAUTH Authentication required."), "NOAUTH"),
        (END, "closed the connection"),
    ],
)
def test_a_redis_that_refuses_the_script_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, answer: Any, says: str
) -> None:
    """An outage is reported once."""
    scene = Scene(monkeypatch)
    scene.firsts[b"SCRIPT"] = [answer] * 2
    assert played(scene, told=4) == ["alone", "alone", "alone", "begin"]
    (report,) = scene.reports
    assert f": {says}" in report
    assert scene.bugs == []


def test_an_exception_in_the_store_does_not_end_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    scene.answers = [b"7", b"a bug", b"8"]
    assert played(scene, b"a", b"b", b"c", told=6) == ["alone", "begin", [7], "alone", "begin", [8]]
    assert len(scene.bugs) == 1
    assert len(scene.reports) == 1


def test_an_exception_while_connecting_does_not_end_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    async def broken(*_: Any) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(module, "RETRY_S", 0.001)
        raise EOFError

    monkeypatch.setattr(module, "connect", broken)
    assert played(scene, told=3) == ["alone", "alone", "begin"]
    assert scene.bugs == ["failed to call Redis"]


def test_a_redis_that_does_not_answer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)
    monkeypatch.setattr(link, "PATIENCE_S", 0.2)
    scene.answers = [SILENCE]
    assert played(scene, b"a", told=4) == ["alone", "begin", "alone", "begin"]
    assert scene.reports[0].endswith(": no answer for 0.2 s")


def test_a_connection_logs_in_and_selects_a_database(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, "redis://me:secret@127.0.0.1:{}/3")
    played(scene, told=2)
    assert scene.asked[:2] == [[b"AUTH", b"me", b"secret"], [b"SELECT", b"3"]]


def test_the_file_of_tls_authorities_has_to_exist(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    scene = Scene(monkeypatch, f"rediss://127.0.0.1:{{}}?ssl_ca_certs={tmp_path}/none")
    with pytest.raises(ConfigError, match=r"smockron.state: .*none"):
        played(scene, told=1)
