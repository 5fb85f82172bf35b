"""One enabled protocol: its sockets, its store, its server, and their settings.

Floor 4 (ARCHITECTURE.md).
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, cast

import structlog

from counterd.control.cluster import Cluster, read_login
from counterd.control.config.keys import account_number, ports_of
from counterd.control.config.loading import ConfigError
from counterd.control.files import read_files, unreadable
from counterd.control.journal import JournalWriter
from counterd.control.listeners import PortListeners
from counterd.control.parts import Ready
from counterd.control.process.limits import effective_connections
from counterd.control.redis_state import RedisState
from counterd.control.tls import TLSError, make_context
from counterd.control.windows import Windows
from counterd.net.access import Access
from counterd.net.admission import Limits
from counterd.net.server import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from counterd.contract import BorrowingStore, Figures, JournaledStore, ProtocolSpec, Store
    from counterd.control.config.loading import Config
    from counterd.control.parts import Part

    # Called with a cause (repeated lines are limited for each cause), a sentence, and fields of the line.
    Report = Callable[..., None]
    # Makes the plugin host of a protocol: see extensions.host.PluginHost.
    MakeHost = Callable[[ProtocolSpec, Config, Store, Callable[[], None], Report], Part]

log = structlog.get_logger()

TLS_FILES = ("tls.cert", "tls.key", "tls.client_ca")


def readers_of(spec: ProtocolSpec) -> Mapping[str, Callable[[bytes], Any]]:
    """Returns the readers of the protocol's own files."""
    return spec.files.readers if spec.files else {}


def prepare(spec: ProtocolSpec, config: Config) -> Ready:
    """Reads the files that a protocol's settings name, and looks up the users and groups in these settings.

    Raises ConfigError.
    """
    name = spec.name
    listener = config.listener(name)
    context = None
    files, problems = read_files(readers_of(spec), config.values, config.place)
    if listener.tls.cert:
        try:
            context = make_context(**asdict(listener.tls))
        except TLSError as error:
            problems.append(f"{config.place(f'{name}.tls.{error.name}')}: {error}")
    login = None
    if spec.leased_limits is not None and config.process.cluster.url:
        try:
            login = read_login(config.process.cluster, config.place)
        except ConfigError as error:
            problems += error.problems
    numbers: dict[str, set[int]] = {"user": set(), "group": set()}
    for word in listener.socket_allow:
        kind, _, account = word.partition(":")
        try:
            numbers[kind].add(account_number(kind, account))
        except LookupError as error:
            problems.append(f"{config.place(f'{name}.socket_allow')}: {error.args[0]}")
    if problems:
        raise ConfigError(problems)
    access = Access(
        tuple(map(ipaddress.ip_network, listener.allow)), frozenset(numbers["user"]), frozenset(numbers["group"])
    )
    window = config.values[spec.windows.key] if spec.windows else 0
    return Ready(config, listener, access, context, files, login, window)


def prepare_all(specs: Sequence[ProtocolSpec], config: Config) -> list[Ready]:
    """Calls prepare() for each protocol. Raises ConfigError with the mistakes of all."""
    ready: list[Ready] = []
    problems: list[str] = []
    for spec in specs:
        try:
            ready.append(prepare(spec, config))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return ready


class Service:
    """A protocol that runs in this process. The order of calls is: open(), extend(), start(), serve(), apply() for each
    reload, finish() and stop().

    ready: the configuration in force. listeners, journal: some of the parts. parts: in the order in which they start.
    borrowers: the names of the protocols that hold permits of this store, by the engine's number. descriptors: how many
    descriptors the protocol's connections may use.
    """

    def __init__(self, spec: ProtocolSpec, descriptors: int, report: Report) -> None:
        self.spec = spec
        self.ready: Ready
        self.store: Store
        self.server: Server
        self.listeners: list[PortListeners] = []
        self.journal: JournalWriter | None = None
        self.parts: list[Part] = []
        self.borrowers: dict[int, str] = {}
        self._descriptors = descriptors
        self._report = report

    def open(self, config: Config, figures: Figures) -> tuple[list[str], list[str]]:
        """Reads the protocol's files, opens all sockets, and makes the store.

        Returns a line for each error, and a line for each address that this machine does not have.
        """
        problems: list[str] = []
        missing: list[str] = []
        try:
            self.ready = prepare(self.spec, config)
        except ConfigError as error:
            problems += error.problems
        self.listeners = [PortListeners(port, config) for port in ports_of(self.spec)]
        self.parts += self.listeners
        for each in self.listeners:
            wrong, absent = each.open()
            problems += wrong
            missing += absent
        if not problems:
            try:
                self.store = self.spec.make_store(config.own(self.spec), figures, time.monotonic_ns())
                self.load(self.ready)
            except (ValueError, MemoryError) as error:
                problems.append(f"{config.path}: {self.spec.name}: {error}")
        return problems, missing

    def unreadable(self) -> list[str]:
        """Returns a line for each file that this process can no longer read.

        A file that cannot be read would make the next reload fail.
        """
        config = self.ready.config
        keys = [*(f"{self.spec.name}.{name}" for name in TLS_FILES), *readers_of(self.spec)]
        return unreadable({key: config.values[key] for key in keys}, config.place)

    def extend(self, make_host: MakeHost) -> None:
        """Creates the extensions of the protocol, if it has any. Raises ConfigError."""
        if self.spec.extensions is not None:
            report = functools.partial(self._report, protocol=self.spec.name)
            self.parts.append(make_host(self.spec, self.ready.config, self.store, self.wake, report))

    async def start(self) -> None:
        """Makes the server and starts all parts, but does not accept connections yet. Raises ConfigError."""
        self.server = Server(asyncio.get_running_loop(), self.store, self._limits(), self._told)
        self._apply(self.ready)
        tasks = [*self._tasks()]
        self.server.driver.tasks.extend(tasks)
        self.parts = [Windows(self.server, self.ready.window), *self.parts, *tasks]
        for part in self.parts:
            await part.start()

    def _tasks(self) -> Iterator[JournalWriter | RedisState | Cluster]:
        """Yields the parts that are background tasks of the driver. Raises ConfigError."""
        config, driver = self.ready.config, self.server.driver
        journal, shared = self.spec.journal, self.spec.shared
        if journal is not None and config.values[journal.path]:
            store = cast("JournaledStore", self.store)
            self.journal = JournalWriter(self.spec, config.values, store, driver, self._told)
            yield self.journal
        if shared is not None and config.values[shared.address]:
            yield RedisState(self.spec, config, self.store, driver, self._told)
        if self.ready.login is not None:
            assert self.spec.leased_limits is not None
            limits = self.spec.leased_limits(self.store, config.process.cluster.prefix.encode())
            yield Cluster(self.ready, limits, driver, self._told)

    async def serve(self) -> None:
        """Accepts connections, after the store was restored if it has a journal. Raises ConfigError."""
        if self.journal is not None:
            await self.journal.restore()
        for number, each in enumerate(self.listeners):
            for listening in each.listening:
                self.server.listen(listening, number)
        for name, addresses in self.addresses().items():
            log.info(f"{name} listens on {', '.join(addresses)}")

    def wake(self) -> None:
        """Called when the store may have something to do."""
        self.server.driver.wake()

    def lend_to(self, other: Service) -> None:
        """Lets the store of another protocol take permits of this protocol's store."""
        assert self.spec.lend is not None
        store = cast("BorrowingStore", other.store)

        def settled(ticket: int, granted: bool) -> None:
            store.settled(ticket, granted)
            other.wake()

        lender = self.spec.lend(self.store, settled, self.wake)
        self.borrowers[lender.number] = other.spec.name
        store.borrow(lender)

    @property
    def failing(self) -> bool:
        """Whether the journal of this protocol currently cannot be written."""
        return self.journal is not None and bool(self.journal.failing)

    def set_drain_mode(self, on: bool) -> None:
        """Makes the store refuse new work, or accept it again. The protocol must have a drain mode."""
        assert self.spec.drain_mode is not None
        self.spec.drain_mode(self.store, on)
        log.info(f"drain mode of {self.spec.name} is {'on: new work is refused' if on else 'off'}")

    def on_usr1(self) -> None:
        """Called at the signal SIGUSR1. Begins the drain mode if the protocol's setting says so."""
        if self.spec.usr1 and self.ready.config.values[self.spec.usr1] == "drain":
            self.set_drain_mode(True)

    async def finish(self, timeout: float) -> None:
        """Completes the work of all parts. timeout: see Part.finish()."""
        for part in self.parts:
            await part.finish(timeout)

    def snapshot(self) -> Mapping[str, float]:
        """Returns the current figures of the store and of the parts."""
        figures = dict(self.store.snapshot())
        for part in self.parts:
            figures |= part.figures()
        return figures

    def load(self, ready: Ready) -> None:
        """Loads the contents of the protocol's files into the store: all files or none.

        Raises ValueError or MemoryError.
        """
        if self.spec.files:
            self.spec.files.load(self.store, ready.config.own(self.spec), ready.files)

    def reread(self) -> list[str]:
        """Returns the names of the files that are in force, for people."""
        tls = [f"the TLS files of {self.spec.name}"] if self.ready.context else []
        settings = self.ready.config.process.cluster
        cluster = [
            f"cluster.{key}" for key in ("credentials", "ca_file") if self.ready.login and getattr(settings, key)
        ]
        return tls + [f"the file of {key}" for key in (*self.ready.files, *cluster)]

    def apply(self, ready: Ready) -> None:
        """Applies the result of prepare(): the settings that can change while the daemon runs.

        Call load() before apply(), because load() can still refuse the protocol's own files.
        """
        self._apply(ready)
        for part in self.parts:
            part.apply(ready)
        self.wake()  # load() may have made something due

    def _apply(self, ready: Ready) -> None:
        self.ready = ready
        self.server.limits = self._limits()
        self.server.context = ready.context
        self.spec.reload(self.store, ready.config.own(self.spec))

    def addresses(self) -> dict[str, list[str]]:
        """Returns the addresses of each port, for people. The first port has the name of the protocol."""
        return {each.port.name: each.addresses() for each in self.listeners}

    def unlisten(self) -> None:
        """Stops accepting connections, and makes the store grant nothing new and end all waits."""
        self.server.unlisten()
        self.store.begin_drain()
        self.wake()

    def stop(self) -> None:
        for part in reversed(self.parts):
            part.stop()

    def _told(self, cause: str, text: str) -> None:
        """Passes on a report of the server. Adds the limit that caused the report."""
        limit = self._limit(cause)
        self._report(cause, text, protocol=self.spec.name, **({"limit": limit} if limit else {}))

    def _limit(self, cause: str) -> str | None:
        """Returns the setting that caused a report, with its value, or None."""
        protocol, settings, config = self.spec.name, self.ready.listener, self.ready.config
        if cause == "rejected:max_connections" and settings.max_connections != self.server.limits.max_connections:
            return "open files of the process"
        limits = {
            "rejected:max_connections": (f"{protocol}.max_connections", settings.max_connections),
            "rejected:per_address": (f"{protocol}.max_connections_per_address", settings.max_connections_per_address),
            "slowed": (f"{protocol}.max_requests_per_second", settings.max_requests_per_second),
            "idle": (f"{protocol}.idle_timeout", settings.idle_timeout),
            "handshake:timeout": ("tls.handshake_timeout", config.process.tls.handshake_timeout),
        }
        if cause not in limits:
            return None
        key, value = limits[cause]
        return f"{config.name(key)} = {value}"

    def _limits(self) -> Limits:
        settings = self.ready.listener
        return Limits(
            max_connections=effective_connections(settings.max_connections, self._descriptors),
            user_timeout=settings.user_timeout,
            write_timeout=settings.write_timeout,
            max_per_address=settings.max_connections_per_address,
            requests_per_second=settings.max_requests_per_second,
            idle_timeout=settings.idle_timeout,
            handshake_timeout=self.ready.config.process.tls.handshake_timeout,
            access=self.ready.access,
        )


def connect(services: Sequence[Service]) -> None:
    """Connects each protocol that borrows permits to the protocol that lends them.

    Call connect() before any store is restored.
    """
    lender = next((service for service in services if service.spec.lend is not None), None)
    if lender is not None:
        for service in services:
            if service.spec.borrows:
                lender.lend_to(service)
