"""The plugin host of one protocol: imports extensions by name, creates them, runs threads for them, and gives jobs to
the threads.

Floor 5 (ARCHITECTURE.md), above control/, to which the command `counterd` gives the host. An extension is imported
after the process has given up its privileges, and before the daemon serves the first client. An extension is imported
only once, so a new name or a new version of its code needs a restart.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import importlib.metadata
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from counterd.contract import Context
from counterd.control.config.loading import ConfigError
from counterd.control.files import FILE_MAX, FileError, read_file
from counterd.control.parts import Part
from counterd.extensions.worker import Failed, Worker, described, lines_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from counterd.contract import ProtocolSpec, Store
    from counterd.control.config.loading import Config
    from counterd.control.parts import Ready
    from counterd.extensions.worker import Report

log = structlog.get_logger()

T = TypeVar("T")

INSPECT_S = 0.25  # a stuck thread is noticed at most so much later; sooner if the time limit is short
INSPECT_MIN_S = 0.01
BURN_PERIOD_S = 1.0


# ---- by name ---------------------------------------------------------------------------------------------------------


def methods_of(spec: ProtocolSpec) -> Mapping[str, tuple[str, ...]]:
    """Returns the methods that each extension of a protocol must have, by key."""
    return spec.extensions.methods if spec.extensions else {}


def find_extensions(spec: ProtocolSpec, config: Config) -> tuple[dict[str, Callable[[Context], object]], list[str]]:
    """Imports the extensions that a protocol's settings name.

    Returns the factories of the extensions by key, and a line for each error.
    """
    found: dict[str, Callable[[Context], object]] = {}
    problems: list[str] = []
    for key in methods_of(spec):
        if name := config.values[key]:
            try:
                found[key] = find(f"counterd.{spec.name}", name)
            except LookupError as error:
                problems.append(f"{config.place(key)}: {name}: {error.args[0]}")
    return found, problems


def find(group: str, name: str) -> Callable[[Context], object]:
    """Returns the class or function that a name denotes. Raises LookupError, with a sentence for people."""
    module, colon, attributes = name.partition(":")
    if not colon:
        entries = importlib.metadata.entry_points(group=group)
        if name not in entries.names:
            known = ", ".join(sorted(entries.names)) or "none"
            raise LookupError(f"the group {group} has no entry point with this name; it has {known}")
        module, _, attributes = entries[name].value.partition(":")
    found: Any
    try:
        found = importlib.import_module(module.strip())
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            raise LookupError(f"no module {error.name}") from None
        raise LookupError(f"the import of {module} failed: {described(error)}") from error
    except (Exception, SystemExit) as error:
        raise LookupError(f"the import of {module} failed: {described(error)}") from error
    for attribute in attributes.split("[")[0].strip().split("."):
        if not hasattr(found, attribute):
            raise LookupError(f"the module {module} has no {attributes}")
        found = getattr(found, attribute)
    if not callable(found):
        raise LookupError(f"{attributes} of the module {module} is neither a class nor a function")
    made: Callable[[Context], object] = found
    return made


# ---- at work ---------------------------------------------------------------------------------------------------------


class Plugin(Worker):
    """An extension and its threads: see contract.Plugin."""

    def __init__(self, key: str, value: str, extension: object, limit: float, host: PluginHost) -> None:
        protocol, _, name = key.partition(".")

        def report(cause: str, *words: object, **fields: object) -> None:
            host.report(f"{name}:{cause}", *words, **fields)

        super().__init__(f"{protocol}: {name} {value}", limit, report)
        self.key = key
        self.value = value
        self.extension = extension
        self._host = host

    def refresh(self, call: str, job: Callable[[], T], take: Callable[[T], None], interval: str) -> None:
        self._host.refreshes.append(Fetching(self, call, job, take, interval))


class Fetching:
    """A result that is fetched again and again: see contract.Plugin.refresh."""

    def __init__(
        self, plugin: Plugin, call: str, job: Callable[[], Any], take: Callable[[Any], None], interval: str
    ) -> None:
        self._plugin = plugin
        self._call = call
        self._job = job
        self._take = take
        self._interval = interval
        self._begun = 0
        self._taken = 0  # number of the job whose outcome was taken last; outcomes of earlier jobs are ignored
        self._timer: asyncio.TimerHandle | None = None

    async def first(self, config: Config) -> None:
        """Fetches the result for the first time, and waits for it. Raises ConfigError."""
        plugin = self._plugin
        done: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._begin(lambda problems: None if done.done() else done.set_result(problems))
        try:
            problems = await asyncio.wait_for(done, plugin.limit)
        except asyncio.TimeoutError:
            problems = [f"{self._call} takes longer than {plugin.limit * 1000:g} ms"]
        if problems:
            where = f"{config.place(plugin.key)}: {plugin.value}"
            raise ConfigError(f"{where}: {problem}" for problem in problems)

    def again(self) -> None:
        """Fetches the result again, at a reload. Logs the new result or each error."""
        self._begin(self._log)

    def repeat(self, loop: asyncio.AbstractEventLoop, config: Config) -> None:
        """From now on, fetches the result at the interval that the configuration sets."""
        self.stop()
        if seconds := config.values[self._interval]:
            self._timer = loop.call_later(seconds, self._next, loop, config)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _next(self, loop: asyncio.AbstractEventLoop, config: Config) -> None:
        self._begin(self._note)
        self.repeat(loop, config)

    def _begin(self, told: Callable[[list[str]], None]) -> None:
        self._begun += 1
        number = self._begun

        def done(outcome: Any, _now_ns: int) -> None:
            if number <= self._taken:
                return
            try:
                if isinstance(outcome, Exception):
                    raise outcome
                self._take(outcome)
            except Exception as error:  # noqa: BLE001 - raised by other people's code, or because of its result
                lines = error.lines if isinstance(error, Failed) else lines_of(error)
                told([f"{self._call}: {line}" for line in lines])
            else:
                self._taken = number
                told([])

        self._plugin.submit(self._call, self._job, done)

    def _log(self, problems: list[str]) -> None:
        name = self._plugin.name
        for problem in problems:
            log.error(f"{name}: nothing changed: {problem}")
        if not problems:
            log.info(f"{name}: using the new result of {self._call}")

    def _note(self, problems: list[str]) -> None:
        """Logs the errors of a periodic call, but only a few of them, because the call may fail for days."""
        for problem in problems:
            self._plugin.report("refresh", f"{self._plugin.name}: nothing changed: {problem}", "error")


class PluginHost(Part):
    """The extensions of one protocol: see contract.PluginHost.

    Imports the extensions that the settings name, and lets the protocol create and connect them. Raises ConfigError.

    wake: makes the driver check the store after a change. plugins: all plugins. refreshes: the results that are fetched
    again and again.
    """

    def __init__(
        self, spec: ProtocolSpec, config: Config, store: Store, wake: Callable[[], None], report: Report
    ) -> None:
        self.plugins: list[Plugin] = []
        self.refreshes: list[Fetching] = []
        self.report = report
        self._spec = spec
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0  # the identifier of the loop's thread
        self._wake = wake
        self._timer: asyncio.TimerHandle | None = None
        self._burned_ns = 0
        self._found, problems = find_extensions(spec, config)
        if problems:
            raise ConfigError(problems)
        if self._found and spec.extensions:
            spec.extensions.extend(store, config.own(spec), self)

    async def start(self) -> None:
        """Starts the threads, and waits for the first result of each periodic call. Raises ConfigError."""
        if not self.plugins:
            return
        loop = self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        for plugin in self.plugins:
            plugin.start(loop, self._wake)
        self._burned_ns = time.monotonic_ns()
        self._inspect()
        await asyncio.gather(*(fetching.first(self._config) for fetching in self.refreshes))
        for fetching in self.refreshes:
            fetching.repeat(loop, self._config)

    def apply(self, ready: Ready) -> None:
        """Fetches all results again, and then at the intervals of a new configuration."""
        self._config = ready.config
        for fetching in self.refreshes:
            fetching.again()
            if self._loop is not None:
                fetching.repeat(self._loop, ready.config)

    def stop(self) -> None:
        """Ends all work of the extensions. Threads that are stuck end when the process ends."""
        if self._loop is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        for fetching in self.refreshes:
            fetching.stop()
        for plugin in self.plugins:
            plugin.stop()
        self._loop = None

    # ---- for the protocol ----

    def make(self, key: str, default: object, timeout: float) -> Plugin | None:
        if key not in self._found:
            return None
        value = self._config.values[key]
        where = f"{self._config.place(key)}: {value}"
        try:
            extension = self._found[key](Context(default, timeout))
        except (Exception, SystemExit) as error:
            raise ConfigError([f"{where}: the extension could not be created: {described(error)}"]) from error
        missing = [name for name in methods_of(self._spec)[key] if not callable(getattr(extension, name, None))]
        if missing:
            kind = type(extension).__name__
            raise ConfigError([f"{where}: the returned object ({kind}) has no {', '.join(missing)}"])
        plugin = Plugin(key, value, extension, timeout, self)
        self.plugins.append(plugin)
        return plugin

    def on_loop(self, function: Callable[[int], T], timeout: float) -> T:
        loop = self._loop
        if loop is None or threading.get_ident() == self._thread:
            raise RuntimeError("this method works only within a call of the extension, while the daemon serves")
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(time.monotonic_ns()))
                except Exception as error:  # noqa: BLE001 - the caller's thread raises it
                    future.set_exception(error)
                self._wake()

        loop.call_soon_threadsafe(run)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            if future.cancel():
                raise TimeoutError(f"the engine did not answer within {timeout * 1000:g} ms") from None
            return future.result()  # the function was running already

    def read(self, key: str) -> bytes:
        path = self._config.values[key]
        try:
            return read_file(path, FILE_MAX) if path else b""
        except FileError as error:
            raise ValueError(str(error)) from None

    # ---- inside ----

    def _inspect(self) -> None:
        """Checks the threads; called by a timer."""
        now_ns = time.monotonic_ns()
        burned = (now_ns - self._burned_ns) / 1e9
        for plugin in self.plugins:
            plugin.inspect(now_ns)
            if burned >= BURN_PERIOD_S:
                plugin.burns(burned)
        if burned >= BURN_PERIOD_S:
            self._burned_ns = now_ns
        period = max(INSPECT_MIN_S, min(INSPECT_S, *(plugin.limit / 4 for plugin in self.plugins)))
        if self._loop is not None:
            self._timer = self._loop.call_later(period, self._inspect)
