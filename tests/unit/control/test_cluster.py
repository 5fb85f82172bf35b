"""When calls about leases are made and to which server; and how the servers are found.

The policy and the servers are stand-ins: tests/functional/test_cluster.py has real ones."""

from __future__ import annotations

import asyncio
import os
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from counterd.cluster.lease_protocol import PARTITIONS
from counterd.control import cluster as module
from counterd.control.cluster import Cluster, daemon_of, lease_names, read_login
from counterd.control.config.keys import Cluster as Settings
from counterd.control.config.loading import ConfigError, load
from counterd.control.link import Login
from counterd.protocols.counter import PROTOCOL as COUNTER
from kit.redises import END, INFO, RUN, SILENCE, Refusal, Server, fleet, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path


HOUR_NS = 3_600_000_000_000
NO_CLUSTER = Refusal("ERR This instance has cluster support disabled")


class Limits:
    """Records its calls."""

    def __init__(self) -> None:
        self.urgent: set[int] = set()
        self.told: list[Any] = []

    def set_policy(self, unreachable: str, drops: bool) -> None:
        self.told.append((unreachable, drops))

    def figures(self) -> dict[str, float]:
        return {"dropped": 7}

    def has_urgent(self) -> tuple[int, int]:
        urgent = sum(1 << partition for partition in self.urgent)
        return urgent, urgent


class Policy:
    """A policy that has something to say when `words` has something for a partition. Records its calls."""

    def __init__(self, _limits: Limits, name: Callable[[], str], lease_ms: int) -> None:
        self.name = name()
        self.lease_ms = lease_ms
        self.words: dict[int, list[str]] = {}
        self.runs: list[tuple[int, str]] = []
        self.answers: list[tuple[int, Any]] = []
        self.failures: list[int] = []
        self.nonsense = False

    def call(self, partition: int, run: str, _now_ns: int) -> tuple[list[str], list[str]] | None:
        if not self.words.get(partition):
            return None
        self.runs.append((partition, run))
        return [f"key-{partition}"], [self.words[partition].pop(0)]

    def answered(self, partition: int, found: Any, _now_ns: int) -> None:
        if self.nonsense:
            raise ValueError("nonsense")
        self.answers.append((partition, found))

    def failed(self, partition: int, _now_ns: int) -> None:
        self.failures.append(partition)

    def next_call_ns(self, _partition: int) -> int:
        return time.monotonic_ns() + HOUR_NS

    def release_all(self, partition: int) -> tuple[list[str], list[str]]:
        return [f"key-{partition}"], ["release"]

    def figures(self, _now_ns: int) -> dict[str, float]:
        return {"leases": 1}


def ready(settings: Settings) -> Any:
    """The application of these settings."""
    process = SimpleNamespace(cluster=settings)
    return SimpleNamespace(config=SimpleNamespace(process=process), login=Login("", "", None))


class Scene:
    """A cluster with a policy, and a server."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "LeasePolicy", Policy)
        monkeypatch.setattr("counterd.control.servers.RETRY_S", 0.01)
        self.server = Server("run0")
        self.limits = Limits()
        self.reports: list[str] = []
        self.woken = 0
        self.bugs: list[Any] = []
        self.cluster: Cluster
        self.driver: Any
        self.policy: Any

    def play(self, act: Callable[[], Awaitable[None]]) -> None:
        asyncio.run(self._play(act))
        assert self.bugs == []

    async def _play(self, act: Callable[[], Awaitable[None]]) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: self.bugs.append(what))
        async with fleet(self.server):
            settings = Settings(url=f"redis://127.0.0.1:{self.server.redis.place.port}")
            driver: Any = SimpleNamespace(wake=self._wake, is_busy=False)
            self.driver = driver
            limits: Any = self.limits
            self.cluster = Cluster(ready(settings), limits, driver, self._report)
            self.policy = self.cluster.policy
            await self.cluster.start()
            try:
                await act()
            finally:
                self.cluster.stop()

    def say(self, partition: int, word: str) -> None:
        """Lets the policy have something urgent to say."""
        self.policy.words.setdefault(partition, []).append(word)
        self.limits.urgent.add(partition)
        self.cluster.turn(time.monotonic_ns())
        self.limits.urgent.clear()

    async def reached(self) -> None:
        await until(lambda: self.cluster.figures()["cluster_unreachable"] == 0)

    def _wake(self) -> None:
        """Runs a turn soon, as the driver does."""
        self.woken += 1
        asyncio.get_running_loop().call_soon(lambda: self.cluster.turn(time.monotonic_ns()))

    def _report(self, cause: str, text: str) -> None:
        assert cause == ("cluster_call" if re.match(r"\S+ has ", text) else "cluster")
        self.reports.append(text)


def test_each_partition_has_one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    async def act() -> None:
        await scene.reached()
        for partition, word in ((3, "a"), (3, "b"), (4, "c")):
            scene.say(partition, word)
        assert scene.policy.runs == [(3, "run0"), (4, "run0")], "the second call of 3 waits"
        await until(lambda: len(scene.policy.answers) == 3)

    scene.play(act)
    assert sorted(scene.policy.answers) == [(3, b"a"), (3, b"b"), (4, b"c")]
    assert scene.server.calls == [[b"key-3", b"a"], [b"key-4", b"c"], [b"key-3", b"b"]]
    assert scene.woken == 4, "after the search and each answer"
    assert scene.limits.told == [("closed", True)]


@pytest.mark.parametrize("patience_ns", [0, HOUR_NS])
def test_requests_are_decided_before_the_next_call(monkeypatch: pytest.MonkeyPatch, patience_ns: int) -> None:
    """Otherwise the rights that they were given would count as idle. But a busy driver does not stop all calls."""
    monkeypatch.setattr(module, "SERVE_NS", patience_ns)
    scene = Scene(monkeypatch)

    async def act() -> None:
        await scene.reached()
        scene.driver.is_busy = True
        scene.say(3, "a")
        await until(lambda: scene.policy.answers)
        scene.say(3, "b")
        assert len(scene.policy.runs) == (2 if patience_ns == 0 else 1)
        scene.driver.is_busy = False
        scene.cluster.turn(time.monotonic_ns())
        await until(lambda: len(scene.policy.answers) == 2)

    scene.play(act)


def test_the_policy_is_asked_again_at_the_time_it_gave(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    async def act() -> None:
        await scene.reached()
        scene.policy.next_call_ns = lambda _: time.monotonic_ns() + 1_000_000
        scene.say(3, "a")  # from now on it says when it is to be asked again
        await until(lambda: scene.policy.answers)
        scene.policy.words[3].append("b")
        await until(lambda: len(scene.policy.answers) == 2)

    scene.play(act)


def test_the_policy_hears_of_a_failed_call(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    async def act() -> None:
        await scene.reached()
        scene.server.answers |= {b"FCALL": Refusal("READONLY"), b"INFO": Refusal("LOADING Redis is loading")}
        scene.say(3, "a")
        await until(lambda: scene.reports)
        del scene.server.answers[b"FCALL"]
        scene.server.answers[b"INFO"] = INFO
        await scene.reached()
        assert sorted(scene.policy.failures) == list(range(PARTITIONS)), "each once"
        scene.say(3, "b")
        await until(lambda: scene.policy.answers)

    with capture_logs() as logs:
        scene.play(act)
    assert scene.policy.answers == [(3, b"b")]
    assert scene.policy.runs == [(3, "run0"), (3, RUN)]
    (report,) = scene.reports
    port = scene.server.redis.place.port
    assert report == (
        f"cannot reach the cluster, for 16 of 16 partitions of the names: 127.0.0.1:{port}: LOADING Redis is loading;"
        " requests beyond the rights that this daemon still has are refused (cluster.unreachable = closed)"
    )
    reachable = [line["event"] for line in logs if "is reachable" in line["event"]]
    assert reachable == ["the cluster is reachable: limits are shared through 1 server"] * 2


def test_an_error_of_one_call_keeps_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other partitions go on with the same connection, and so does this one with its next call."""
    scene = Scene(monkeypatch)

    async def act() -> None:
        await scene.reached()
        scene.server.answers[b"FCALL"] = Refusal("TRYAGAIN Multiple keys request during rehashing of slot")
        scene.say(3, "a")
        await until(lambda: scene.policy.failures)
        del scene.server.answers[b"FCALL"]
        for partition in (3, 4):
            scene.say(partition, "b")
        await until(lambda: len(scene.policy.answers) == 2)

    scene.play(act)
    assert scene.policy.failures == [3]
    assert scene.server.redis.connections == 1
    port = scene.server.redis.place.port
    assert scene.reports == [
        f"127.0.0.1:{port} has refused a call: TRYAGAIN Multiple keys request during rehashing of slot"
    ]


def test_an_invalid_answer_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    async def act() -> None:
        await scene.reached()
        scene.policy.nonsense = True
        scene.say(3, "a")
        await until(lambda: scene.server.redis.connections == 2)
        await scene.reached()

    scene.play(act)
    place = scene.server.redis.place
    assert scene.reports == [f"{place.host}:{place.port} has sent an answer without sense: nonsense"]


def test_release_all_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    async def act() -> None:
        await scene.reached()
        await scene.cluster.finish(0)

    with capture_logs() as logs:
        scene.play(act)
    assert scene.server.calls == [[b"key-%d" % number, b"release"] for number in range(PARTITIONS)]
    assert not [line for line in logs if "give back" in line["event"]]


@pytest.mark.parametrize("error", ["", "READONLY You can't write against a read only replica."])
def test_release_all_while_calls_are_under_way(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    """The policy accepts no answer after it, and none of these answers ends the connection."""
    scene = Scene(monkeypatch)

    def answer(words: list[bytes]) -> Any:
        return Refusal(error) if error and words[-1] == b"a" else Server.answer(scene.server, words)

    async def act() -> None:
        await scene.reached()
        scene.server.redis.answer = answer
        for partition in range(PARTITIONS):
            scene.say(partition, "a")
        scene.policy.nonsense = True
        await scene.cluster.finish(0)

    with capture_logs() as logs:
        scene.play(act)
    assert [words[-1] for words in scene.server.calls][-PARTITIONS:] == [b"release"] * PARTITIONS
    assert scene.policy.answers == scene.policy.failures == []
    assert not [line for line in logs if "give back" in line["event"]]


@pytest.mark.parametrize("answer", [SILENCE, END])
def test_release_all_times_out(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(module, "RELEASE_S", 0.01)
    scene = Scene(monkeypatch)

    async def act() -> None:
        await scene.reached()
        scene.server.answers[b"FCALL"] = answer
        await scene.cluster.finish(0)

    with capture_logs() as logs:
        scene.play(act)
    assert [line["event"] for line in logs if "could not give back all rights" in line["event"]]


def test_settings_that_change_while_the_daemon_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch)

    async def act() -> None:
        scene.cluster.apply(ready(Settings(unreachable="open", on_loss="keep")))

    scene.play(act)
    assert scene.limits.told == [("closed", True), ("open", False)]


def test_names_of_leases_differ_and_have_no_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "a b.c")
    one, other = lease_names(), lease_names()
    names = [next(one), next(one), next(other)]
    assert len(set(names)) == 3
    assert all(re.fullmatch(rf"a_b_c-{os.getpid()}-[0-9a-f]{{8}}\.[12]", name) for name in names)
    first, second, another = map(daemon_of, names)
    assert first == second != another


# ---- the files ----


@pytest.fixture
def login(tmp_path: Path) -> Callable[..., Login]:
    """Reads the login for a URL, with these credentials and authorities in files."""

    def login(url: str, **files: str) -> Login:
        (tmp_path / "F").write_text(f"counter.enable = true\ncluster.url = {url}\n")
        overrides = []
        for name, content in files.items():
            if content:
                (tmp_path / name).write_text(content)
            overrides.append(f"cluster.{name}={tmp_path / name}")
        config = load(tmp_path / "F", overrides, [COUNTER])
        return read_login(config.process.cluster, config.place)

    return login


def test_login_without_a_password(login: Callable[..., Login]) -> None:
    assert login("redis://a") == Login("", "", None)


def test_a_password_in_the_url(login: Callable[..., Login]) -> None:
    assert login("redis://me:p%40ss@a:1,b") == Login("me", "p@ss", None)


@pytest.mark.parametrize(
    ("content", "user", "password"), [("me:a:b\n", "me", "a:b"), (":secret", "", "secret"), ("me: x\n", "me", " x")]
)
def test_a_password_in_a_file(login: Callable[..., Login], content: str, user: str, password: str) -> None:
    assert login("redis://a", credentials=content) == Login(user, password, None)


@pytest.mark.parametrize("content", ["secret\n", "me:\n", "me:a\nsecret\n"])
def test_a_file_without_a_password(login: Callable[..., Login], content: str) -> None:
    with pytest.raises(ConfigError, match=r"cluster\.credentials: .*expected one line, USER:PASSWORD") as caught:
        login("redis://a", credentials=content)
    assert "secret" not in str(caught.value)


def test_unreadable_cluster_files_are_named(login: Callable[..., Login]) -> None:
    with pytest.raises(ConfigError) as caught:
        login("rediss://a", credentials="", ca_file="")
    credentials, ca_file = caught.value.problems
    assert "cluster.credentials: " in credentials
    assert "cluster.ca_file: " in ca_file
    assert all(each.endswith("cannot be read: No such file or directory") for each in caught.value.problems)


def test_authorities_in_a_file(login: Callable[..., Login], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no certificate in PEM"):
        login("rediss://a", ca_file="none")
    assert login("rediss://a").tls is not None, "those of the system"
