"""The plugin host: how a name is resolved, the errors if it cannot be, and results that are fetched repeatedly."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from counterd.contract import Extensions
from counterd.control.config.loading import Config, ConfigError, load
from counterd.extensions import host as extensions
from counterd.extensions.host import PluginHost, described, find, find_extensions
from counterd.protocols.counter import PROTOCOL as COUNTER
from counterd.settings import absolute_path, extension_name, integer, setting

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator
    from pathlib import Path

    from counterd import contract
    from counterd.contract import ProtocolSpec

LIMIT = 100.0  # seconds; no test waits so long

KEEPERS = """
import threading

class Keeper:
    def __init__(self, context):
        self.context = context
    def open(self): ...
    def shut(self): ...

class Half:
    open = 5
    def __init__(self, context): ...

class Broken(Keeper):
    def __init__(self, context):
        raise OSError("no such gate")

class Nested:
    Keeper = Keeper

def leaves(context):
    raise SystemExit(3)

nothing = None
"""


@dataclass(frozen=True)
class Keys:
    keeper: str = setting(extension_name, "")
    limit: int = setting(integer(1, 1000), int(LIMIT))
    interval: int = setting(integer(0, 1000), 0, reload=True)
    file: str = setting(absolute_path, "")


class Gate:
    """A store that an extension serves; extend() is given to the protocol."""

    def __init__(self) -> None:
        self.plugin: contract.Plugin | None = None
        self.taken: list[object] = []
        self.face: contract.PluginHost
        self.fetch: Callable[[], object] | None = None

    def extend(self, store: object, settings: Keys, face: contract.PluginHost) -> None:
        assert store is self
        self.face = face
        self.plugin = face.make("gate.keeper", "default", settings.limit)
        if self.fetch is not None and self.plugin is not None:
            self.plugin.refresh("open", self.fetch, self.taken.append, "gate.interval")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def spec(gate: Gate) -> ProtocolSpec:
    return replace(
        COUNTER,
        name="gate",
        settings=Keys,
        aliases={},
        extensions=Extensions({"gate.keeper": ("open", "shut")}, gate.extend),
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose modules can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "keepers.py").write_text(KEEPERS)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def configured(spec: ProtocolSpec, folder: Path) -> Callable[..., Config]:
    """A configuration with these settings of the gate, each on the line after `enable`."""

    def configured(**settings: object) -> Config:
        file = folder / "F"
        lines = ["gate.enable = true", *(f"gate.{name} = {value}" for name, value in settings.items())]
        file.write_text("\n".join(lines))
        return load(file, [], [spec])

    return configured


def ready(config: Config) -> Any:
    """The application of a configuration."""
    return SimpleNamespace(config=config)


@contextlib.contextmanager
def opened(spec: ProtocolSpec, gate: Gate, config: Config) -> Iterator[tuple[PluginHost, list[str]]]:
    """A host whose extensions are made, and its reports."""
    lines: list[str] = []
    store: Any = gate
    host = PluginHost(spec, config, store, lambda: None, lambda _cause, text, *_, **_fields: lines.append(text))
    try:
        yield host, lines
    finally:
        host.stop()


async def until(condition: Callable[[], object]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came")


# ---- names -----------------------------------------------------------------------------------------------------------


def add_entry_point(folder: Path, name: str, value: str) -> None:
    info = folder / "keepers-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: keepers\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[counterd.gate]\n{name} = {value}\n")


def test_a_name_is_an_attribute_of_a_module(folder: Path) -> None:
    assert find("counterd.gate", "keepers:Keeper").__name__ == "Keeper"  # type: ignore[attr-defined]


def test_a_name_is_an_entry_point(folder: Path) -> None:
    add_entry_point(folder, "my-keeper", "keepers:Nested.Keeper")
    assert find("counterd.gate", "my-keeper").__name__ == "Keeper"  # type: ignore[attr-defined]
    with pytest.raises(LookupError) as caught:
        find("counterd.gate", "your-keeper")
    known = "the group counterd.gate has no entry point with this name; it has my-keeper"
    assert caught.value.args == (known,)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere:Keeper", "no module nowhere"),
        ("nowhere.deep:Keeper", "no module nowhere"),
        ("keepers.deep:Keeper", "no module keepers.deep"),
        ("keepers:keeper", "the module keepers has no keeper"),
        ("keepers:nothing", "nothing of the module keepers is neither a class nor a function"),
        ("needy:Keeper", "the import of needy failed: ModuleNotFoundError: No module named 'nowhere', in needy.py:1"),
        ("wrong:Keeper", "the import of wrong failed: SyntaxError: "),
        ("raising:Keeper", "the import of raising failed: ZeroDivisionError: division by zero, in raising.py:2"),
        ("leaving:Keeper", "the import of leaving failed: SystemExit: 3, in leaving.py:1"),
        ("keeper", "the group counterd.gate has no entry point with this name; it has none"),
    ],
)
def test_a_name_that_cannot_be_resolved_is_an_error(
    configured: Callable[..., Config], spec: ProtocolSpec, folder: Path, name: str, why: str
) -> None:
    (folder / "needy.py").write_text("import nowhere\n")
    (folder / "wrong.py").write_text("import\n")
    (folder / "raising.py").write_text("\n1 / 0\n")
    (folder / "leaving.py").write_text("raise SystemExit(3)\n")
    found, (problem,) = find_extensions(spec, configured(keeper=name))
    assert found == {}
    assert problem.startswith(f"{folder}/F:2: gate.keeper: {name}: {why}")


def test_an_exception_without_a_traceback_is_described_without_a_place() -> None:
    assert described(ValueError("x")) == "ValueError: x"


# ---- making ----------------------------------------------------------------------------------------------------------


def test_an_extension_is_given_a_context(configured: Callable[..., Config], spec: ProtocolSpec, gate: Gate) -> None:
    with opened(spec, gate, configured(keeper="keepers:Keeper")):
        assert gate.plugin is not None
        context = gate.plugin.extension.context
        assert (context.default, context.timeout) == ("default", LIMIT)


def test_without_a_name_no_extension_is_made(configured: Callable[..., Config], spec: ProtocolSpec, gate: Gate) -> None:
    threads = threading.active_count()

    async def run(host: PluginHost) -> None:
        await host.start()
        host.apply(ready(configured()))
        assert threading.active_count() == threads

    with opened(spec, gate, configured()) as (host, _):
        assert not hasattr(gate, "face")
        asyncio.run(run(host))


def test_it_may_ask_for_an_extension_without_a_name(
    configured: Callable[..., Config], spec: ProtocolSpec, gate: Gate
) -> None:
    with opened(spec, gate, configured(keeper="keepers:Keeper")):
        assert gate.face.make("gate.other", None, 1.0) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("keepers:Half", "the returned object (Half) has no open, shut"),
        ("keepers:Broken", "the extension could not be created: OSError: no such gate, in keepers.py:16"),
        ("keepers:leaves", "the extension could not be created: SystemExit: 3, in keepers.py:22"),
        ("keepers:none", "the module keepers has no none"),
    ],
)
def test_an_extension_that_cannot_be_made_is_a_mistake_in_the_configuration(
    configured: Callable[..., Config], spec: ProtocolSpec, gate: Gate, name: str, why: str
) -> None:
    config = configured(keeper=name)
    with pytest.raises(ConfigError) as caught, opened(spec, gate, config):
        pass
    assert caught.value.problems == (f"{config.path}:2: gate.keeper: {name}: {why}",)


# ---- at work ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(configured: Callable[..., Config], spec: ProtocolSpec, gate: Gate) -> Callable[..., list[str]]:
    """Runs a test's coroutine while the keeper works; returns what was reported."""

    def run(main: Callable[[PluginHost], Coroutine[Any, Any, None]], **settings: object) -> list[str]:
        async def begin(host: PluginHost) -> None:
            await host.start()
            await main(host)
            host.stop()

        with opened(spec, gate, configured(keeper="keepers:Keeper", **settings)) as (host, lines):
            asyncio.run(begin(host))
        return lines

    return run


def test_an_exception_in_a_call_is_reported_with_the_name(run: Callable[..., list[str]], gate: Gate) -> None:
    told: list[object] = []

    async def main(_: PluginHost) -> None:
        assert gate.plugin is not None
        gate.plugin.ask("open", lambda: 1 / 0, lambda outcome, _: told.append(str(outcome)))
        await until(lambda: told)

    lines = run(main)
    assert told == ["ZeroDivisionError: division by zero"]
    assert lines == ["gate: keeper keepers:Keeper: open failed: ZeroDivisionError: division by zero"]


def test_the_engine_is_reached_from_a_call(run: Callable[..., list[str]], gate: Gate) -> None:
    told: list[object] = []

    async def main(_: PluginHost) -> None:
        assert gate.plugin is not None
        here, loop = threading.get_ident(), asyncio.get_running_loop()

        def wrong(_now_ns: int) -> None:
            raise LookupError("nothing there")

        def call() -> list[object]:
            found: list[object] = [gate.face.on_loop(lambda _: threading.get_ident() == here, LIMIT)]
            with pytest.raises(LookupError, match="nothing there"):
                gate.face.on_loop(wrong, LIMIT)
            busy = threading.Event()
            loop.call_soon_threadsafe(busy.wait)
            with pytest.raises(TimeoutError, match="the engine did not answer within 0 ms"):
                gate.face.on_loop(lambda _: told.append("too late"), 0.0)
            busy.set()
            return found

        gate.plugin.ask("open", call, lambda outcome, _: told.append(outcome))
        await until(lambda: told)
        with pytest.raises(RuntimeError, match="within a call of the extension"):
            gate.face.on_loop(lambda _: None, LIMIT)

    assert run(main) == []
    assert told == [[True]]
    with pytest.raises(RuntimeError, match="while the daemon serves"):
        gate.face.on_loop(lambda _: None, LIMIT)


def test_files_are_read(configured: Callable[..., Config], spec: ProtocolSpec, gate: Gate, folder: Path) -> None:
    with opened(spec, gate, configured(keeper="keepers:Keeper")):
        assert gate.face.read("gate.file") == b""
    with opened(spec, gate, configured(keeper="keepers:Keeper", file=folder / "file")):
        with pytest.raises(ValueError, match="cannot be read: No such file"):
            gate.face.read("gate.file")
        (folder / "file").write_bytes(b"there")
        assert gate.face.read("gate.file") == b"there"


def test_threads_are_inspected_periodically(
    run: Callable[..., list[str]], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extensions, "INSPECT_S", 0.001)
    monkeypatch.setattr(extensions, "INSPECT_MIN_S", 0.001)
    monkeypatch.setattr(extensions, "BURN_PERIOD_S", 0.02)
    looked: list[int] = []
    monkeypatch.setattr(extensions.Plugin, "inspect", lambda _, now_ns: looked.append(now_ns))
    ended = threading.Event()

    def burn() -> None:
        while not ended.is_set():
            pass

    async def main(host: PluginHost) -> None:
        reported: list[str] = []
        monkeypatch.setattr(host, "report", lambda cause, *_: reported.append(cause))
        host.plugins[0].ask("open", burn, lambda *_: None)
        try:
            await until(lambda: "keeper:cpu" in reported)
        finally:
            ended.set()

    run(main)
    assert len(looked) > 2


# ---- what is fetched again and again ---------------------------------------------------------------------------------


class Mistakes(ValueError):
    problems = ("first", "second")


def test_results_are_fetched_before_serving(run: Callable[..., list[str]], gate: Gate) -> None:
    gate.fetch = lambda: "fetched"

    async def main(_: PluginHost) -> None:
        assert gate.taken == ["fetched"]

    assert run(main) == []


@pytest.mark.parametrize(
    ("error", "problems"),
    [
        (Mistakes(), ["open: first", "open: second"]),
        (OSError("gone"), ["open: OSError: gone, in test_host.py:..."]),
        (TypeError(), ["open: TypeError: , in test_host.py:..."]),
    ],
)
def test_a_failed_fetch_at_the_start_is_a_mistake(
    run: Callable[..., list[str]], gate: Gate, folder: Path, error: Exception, problems: list[str]
) -> None:
    def fail() -> None:
        raise error

    async def main(_: PluginHost) -> None:
        raise AssertionError("it was served")

    gate.fetch = fail
    with pytest.raises(ConfigError) as caught:
        run(main)
    told = [problem.partition(".py:")[0] for problem in caught.value.problems]
    where = f"{folder}/F:2: gate.keeper: keepers:Keeper: "
    assert told == [where + problem.partition(".py:")[0] for problem in problems]


def test_a_fetch_at_the_start_times_out(
    run: Callable[..., list[str]], gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    gate.fetch = ended.wait

    async def main(_: PluginHost) -> None:
        raise AssertionError("it was served")

    async def at_once(awaitable: asyncio.Future[Any], _seconds: float) -> None:
        awaitable.cancel()
        raise asyncio.TimeoutError

    monkeypatch.setattr(asyncio, "wait_for", at_once)
    with pytest.raises(ConfigError, match=r"keepers:Keeper: open takes longer than 100000 ms$"):
        run(main)
    ended.set()


def test_a_reload_fetches_again_and_a_failure_changes_nothing(
    run: Callable[..., list[str]], gate: Gate, configured: Callable[..., Config]
) -> None:
    outcomes: list[object] = [1, 2, Mistakes(), OSError("gone"), 3]

    def fetch() -> object:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    gate.fetch = fetch

    async def main(host: PluginHost) -> None:
        with capture_logs() as logs:
            for _ in range(4):
                host.apply(ready(configured(keeper="keepers:Keeper")))
            await until(lambda: len(gate.taken) == 3)
            outcomes.extend([OSError("gone for long"), 4])
            host.refreshes[0]._next(asyncio.get_running_loop(), configured(keeper="keepers:Keeper"))
            host.refreshes[0]._next(asyncio.get_running_loop(), configured(keeper="keepers:Keeper"))
            await until(lambda: len(gate.taken) == 4)
        assert [entry["event"] for entry in logs if entry["log_level"] == "info"] == [
            "gate: keeper keepers:Keeper: using the new result of open"
        ] * 2
        lines = [entry["event"] for entry in logs if entry["log_level"] == "error"]
        name = "gate: keeper keepers:Keeper: nothing changed: open: "
        assert [line.partition(", in ")[0] for line in lines] == [
            f"{name}first",
            f"{name}second",
            f"{name}OSError: gone",
        ]

    (line,) = run(main)
    assert line.startswith("gate: keeper keepers:Keeper: nothing changed: open: OSError: gone for long")
    assert gate.taken == [1, 2, 3, 4]


def test_results_are_fetched_in_the_configured_interval(
    run: Callable[..., list[str]], gate: Gate, configured: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.fetch = lambda: len(gate.taken)

    async def main(host: PluginHost) -> None:
        loop = asyncio.get_running_loop()
        timers: list[tuple[float, Callable[..., object]]] = []
        real = loop.call_later

        def call_later(seconds: float, function: Any, *arguments: Any) -> asyncio.TimerHandle:
            if seconds >= 1:
                timers.append((seconds, lambda: function(*arguments)))
            return real(seconds, function, *arguments)

        monkeypatch.setattr(loop, "call_later", call_later)
        host.apply(ready(configured(keeper="keepers:Keeper", interval=7)))
        await until(lambda: len(gate.taken) == 2)
        for count in (3, 4):
            seconds, function = timers[-1]
            assert seconds == 7
            function()
            await until(lambda wanted=count: len(gate.taken) == wanted)
        host.apply(ready(configured(keeper="keepers:Keeper")))
        await until(lambda: len(gate.taken) == 5)
        assert len(timers) == 3

    run(main)


def test_a_late_result_does_not_replace_a_newer_one(run: Callable[..., list[str]], gate: Gate) -> None:
    ended = threading.Event()
    begun: list[int] = []

    def fetch() -> int:
        number = len(begun)
        begun.append(number)
        if number == 1:
            ended.wait()
        return number

    gate.fetch = fetch

    async def main(host: PluginHost) -> None:
        (plugin,) = host.plugins
        for fetching in host.refreshes:
            fetching.again()
        await until(lambda: len(begun) == 2)
        plugin.inspect(1 << 62)
        host.refreshes[0].again()
        await until(lambda: gate.taken == [0, 2])
        ended.set()
        host.refreshes[0].again()
        await until(lambda: gate.taken == [0, 2, 3])

    run(main)
