"""One enabled protocol: its sockets, its store, its server, and their settings.

Floor 4 (ARCHITECTURE.md).
"""

from __future__ import annotations

import functools
import ipaddress
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import structlog

from counterd.control.cluster import Cluster, read_login
from counterd.control.config.keys import account_number, ports_of
from counterd.control.config.loading import ConfigError
from counterd.control.files import read_files, unreadable
from counterd.control.journal import JournalFailed, JournalWriter
from counterd.control.listeners import PortListeners, keepalive_of
from counterd.control.process.limits import effective_connections
from counterd.control.redis_state import RedisState
from counterd.control.tls import TLSError, make_context
from counterd.control.windows import Windows
from counterd.extensions.host import PluginHost, find_extensions
from counterd.net.access import Access
from counterd.net.admission import Limits
from counterd.net.server import Server

if TYPE_CHECKING:
    import asyncio
    import ssl
    from collections.abc import Callable, Mapping, Sequence

    from counterd.contract import BorrowingStore, Figures, JournaledStore, Room, Store
    from counterd.control.config.loading import Config
    from counterd.control.link import Login

    # Called with a cause (repeated lines are limited for each cause), a sentence, and fields of the line.
    Report = Callable[..., None]

log = structlog.get_logger()

TLS_FILES = ("tls.cert", "tls.key", "tls.client_ca")


class Ready(NamedTuple):
    """The checked contents of a protocol's files, which can be applied.

    files: the parsed contents of the protocol's own files, by key. login: how the protocol connects to the cluster, or
    None if it shares nothing.
    """

    access: Access
    context: ssl.SSLContext | None
    files: Mapping[str, Any]
    login: Login | None


def readers_of(room: Room) -> Mapping[str, Callable[[bytes], Any]]:
    """Returns the readers of the protocol's own files."""
    return room.files.readers if room.files else {}


def prepare(room: Room, config: Config) -> Ready:
    """Reads the files that a protocol's settings name, and looks up the users and groups in these settings.

    Raises ConfigError.
    """
    name = room.name
    listener = config.listener(name)
    context = None
    files, problems = read_files(readers_of(room), config.values, config.place)
    if listener.tls.cert:
        try:
            context = make_context(**asdict(listener.tls))
        except TLSError as error:
            problems.append(f"{config.place(f'{name}.tls.{error.name}')}: {error}")
    login = None
    if room.escrow is not None and config.process.cluster.url:
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
    networks = tuple(map(ipaddress.ip_network, listener.allow))
    return Ready(Access(networks, frozenset(numbers["user"]), frozenset(numbers["group"])), context, files, login)


def check(room: Room, config: Config) -> None:
    """Checks the files and names that open() and extend() will use. Raises ConfigError."""
    problems = find_extensions(room, config)[1]
    try:
        prepare(room, config)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)


class Service:
    """A protocol that runs in this process. The order of calls is: open(), make_store(), extend(), start(), restore()
    if the protocol has a journal, listen(), apply() for each reload, finish() and close().

    descriptors: how many descriptors the protocol's connections may use.
    ready: the contents of the protocol's files that are in force.
    plugin_host: runs the extensions.
    borrowers: the names of the protocols that hold permits of this store, by the engine's number.
    """

    def __init__(self, room: Room, config: Config, descriptors: int, report: Report) -> None:
        self.room = room
        self.plugin_host = PluginHost(room, config, functools.partial(report, protocol=room.name))
        self.listeners = [PortListeners(port, config) for port in ports_of(room)]
        self.ready: Ready
        self.store: Store
        self.server: Server
        self.windows: Windows
        self.journal: JournalWriter | None = None  # writes its journal
        self.redis_state: RedisState | None = None  # calls the Redis that has its state
        self.cluster: Cluster | None = None  # shares its limits with other daemons
        self.borrowers: dict[int, str] = {}
        self._config = config
        self._settings = config.listener(room.name)
        self._descriptors = descriptors
        self._report = report

    def open(self) -> tuple[list[str], list[str]]:
        """Opens all sockets of the protocol.

        Returns a line for each error, and a line for each address that this machine does not have.
        """
        problems: list[str] = []
        missing: list[str] = []
        try:
            self.ready = prepare(self.room, self._config)
        except ConfigError as error:
            problems += error.problems
        for each in self.listeners:
            wrong, absent = each.open()
            problems += wrong
            missing += absent
        return problems, missing

    def hand_over(self, uid: int, gid: int) -> None:
        """Gives the files of the Unix sockets to the user that the daemon will run as. Raises OSError."""
        for each in self.listeners:
            each.hand_over(uid, gid)

    def unreadable(self) -> list[str]:
        """Returns a line for each file that this process can no longer read.

        A file that cannot be read would make the next reload fail.
        """
        keys = [*(f"{self.room.name}.{name}" for name in TLS_FILES), *readers_of(self.room)]
        return unreadable({key: self._config.values[key] for key in keys}, self._config.place)

    def make_store(self, figures: Figures) -> None:
        """Makes the store and loads the contents of the protocol's files into it. Raises ValueError or MemoryError."""
        self.store = self.room.make_store(self._config.own(self.room), figures, time.monotonic_ns())
        self.load(self._config, self.ready)

    def extend(self) -> None:
        """Creates the extensions of the protocol. Raises ConfigError."""
        self.plugin_host.open(self.store)

    async def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Makes the server and starts everything, but does not accept connections yet. Raises ConfigError."""
        self.server = Server(loop, self.store, self._limits(), self._told)
        self.windows = Windows(self.server, self._window())
        self._apply(self._config, self.ready)
        self.windows.turn()
        await self.plugin_host.start(loop, self.server.driver.wake)
        journal = self.room.journal
        if journal is not None and self._config.values[journal.path]:
            store = cast("JournaledStore", self.store)
            self.journal = JournalWriter(self.room, self._config.values, store, self.server.driver, self._told)
            self.server.driver.tasks.append(self.journal)
        shared = self.room.shared
        if shared is not None and self._config.values[shared.address]:
            self.redis_state = RedisState(self.room, self._config, self.store, self.server.driver, self._told)
            self.server.driver.tasks.append(self.redis_state)
            self.redis_state.start()
        if self.ready.login is not None:
            settings = self._config.process.cluster
            assert self.room.escrow is not None
            escrow = self.room.escrow(self.store, settings.prefix.encode())
            self.cluster = Cluster(settings, self.ready.login, escrow, self.server.driver, self._told)
            self.server.driver.tasks.append(self.cluster)
            self.cluster.start()

    def lend_to(self, other: Service) -> None:
        """Lets the store of another protocol take permits of this protocol's store."""
        assert self.room.lend is not None
        store = cast("BorrowingStore", other.store)

        def settled(ticket: int, granted: bool) -> None:
            store.settled(ticket, granted)
            other.server.driver.wake()

        lender = self.room.lend(self.store, settled, self.server.driver.wake)
        self.borrowers[lender.number] = other.room.name
        store.borrow(lender)

    async def restore(self) -> None:
        """Restores the store from its journal. Raises ConfigError."""
        assert self.journal is not None
        try:
            await self.journal.restore()
        except JournalFailed as error:
            raise ConfigError([str(error)]) from None

    @property
    def failing(self) -> bool:
        """Whether the journal of this protocol currently cannot be written."""
        return self.journal is not None and bool(self.journal.failing)

    def set_drain_mode(self, on: bool) -> None:
        """Makes the store refuse new work, or accept it again. The protocol must have a drain mode."""
        assert self.room.drain_mode is not None
        self.room.drain_mode(self.store, on)
        log.info(f"drain mode of {self.room.name} is {'on: new work is refused' if on else 'off'}")

    def on_usr1(self) -> None:
        """Called at the signal SIGUSR1. Begins the drain mode if the protocol's setting says so."""
        if self.room.usr1 and self._config.values[self.room.usr1] == "drain":
            self.set_drain_mode(True)

    async def finish(self, timeout: float) -> None:
        """Waits until all changes are in the journal. Gives shared rights back.

        timeout: as for JournalWriter.finish().
        """
        if self.journal is not None:
            await self.journal.finish(timeout)
        if self.cluster is not None:
            await self.cluster.farewell()

    def snapshot(self) -> Mapping[str, float]:
        """Returns the current figures of the store, and of its part in the cluster."""
        return {**self.store.snapshot(), **(self.cluster.figures() if self.cluster is not None else {})}

    def listen(self) -> None:
        """Starts to accept connections."""
        for number, each in enumerate(self.listeners):
            for listening in each.listening:
                self.server.listen(listening, number)

    def load(self, config: Config, ready: Ready) -> None:
        """Loads the contents of the protocol's files into the store: all files or none.

        Raises ValueError or MemoryError.
        """
        if self.room.files:
            self.room.files.load(self.store, config.own(self.room), ready.files)

    def reread(self) -> list[str]:
        """Returns the names of the files that are in force, for people."""
        tls = [f"the TLS files of {self.room.name}"] if self.ready.context else []
        settings = self._config.process.cluster
        cluster = [
            f"cluster.{key}" for key in ("credentials", "ca_file") if self.ready.login and getattr(settings, key)
        ]
        return tls + [f"the file of {key}" for key in (*self.ready.files, *cluster)]

    def apply(self, config: Config, ready: Ready) -> None:
        """Applies the result of prepare(), and the settings that can change while the daemon runs.

        Call load() before apply(), because load() can still refuse the protocol's own files. Reload extensions after
        apply(), because that takes time.
        """
        self._apply(config, ready)
        self.server.driver.wake()  # load() may have made something due
        self.plugin_host.apply(config)

    def _apply(self, config: Config, ready: Ready) -> None:
        self._config = config
        self._settings = config.listener(self.room.name)
        self.ready = ready
        self.server.limits = self._limits()
        self.server.context = ready.context
        for each in self.listeners:
            each.keep_alive(keepalive_of(self._settings))
        self.room.reload(self.store, config.own(self.room))
        if self.cluster is not None and ready.login is not None:
            self.cluster.apply(config.process.cluster, ready.login)
        self.windows.set_interval(self._window())

    def addresses(self) -> dict[str, list[str]]:
        """Returns the addresses of each port, for people. The first port has the name of the protocol."""
        return {each.port.name: each.addresses() for each in self.listeners}

    def unlisten(self) -> None:
        """Stops accepting connections, and makes the store grant nothing new and end all waits."""
        self.server.unlisten()
        self.store.begin_drain()
        self.server.driver.wake()

    def part(self) -> None:
        """Begins to end all connections, as Server.part describes."""
        self.server.part()
        self.windows.stop()

    def close(self) -> None:
        self.plugin_host.close()
        if self.journal is not None:
            self.journal.stop()
        if self.redis_state is not None:
            self.redis_state.stop()
        if self.cluster is not None:
            self.cluster.close()
        for each in self.listeners:
            each.close()

    def _told(self, cause: str, text: str) -> None:
        """Passes on a report of the server. Adds the limit that caused the report."""
        limit = self._limit(cause)
        self._report(cause, text, protocol=self.room.name, **({"limit": limit} if limit else {}))

    def _limit(self, cause: str) -> str | None:
        """Returns the setting that caused a report, with its value, or None."""
        room, settings = self.room.name, self._settings
        if cause == "rejected:max_connections" and settings.max_connections != self.server.limits.max_connections:
            return "open files of the process"
        limits = {
            "rejected:max_connections": (f"{room}.max_connections", settings.max_connections),
            "rejected:per_address": (f"{room}.max_connections_per_address", settings.max_connections_per_address),
            "slowed": (f"{room}.max_requests_per_second", settings.max_requests_per_second),
            "idle": (f"{room}.idle_timeout", settings.idle_timeout),
            "handshake:timeout": ("tls.handshake_timeout", self._config.process.tls.handshake_timeout),
        }
        if cause not in limits:
            return None
        key, value = limits[cause]
        return f"{self._config.name(key)} = {value}"

    def _window(self) -> int:
        return self._config.values[self.room.windows.key] if self.room.windows else 0

    def _limits(self) -> Limits:
        settings = self._settings
        return Limits(
            max_connections=effective_connections(settings.max_connections, self._descriptors),
            user_timeout=settings.user_timeout,
            write_timeout=settings.write_timeout,
            max_per_address=settings.max_connections_per_address,
            requests_per_second=settings.max_requests_per_second,
            idle_timeout=settings.idle_timeout,
            handshake_timeout=self._config.process.tls.handshake_timeout,
            access=self.ready.access,
        )


def connect(services: Sequence[Service]) -> None:
    """Connects each protocol that borrows permits to the protocol that lends them.

    Call connect() before any store is restored.
    """
    lender = next((service for service in services if service.room.lend is not None), None)
    if lender is not None:
        for service in services:
            if service.room.borrows:
                lender.lend_to(service)
