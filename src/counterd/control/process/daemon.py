"""The life cycle of the daemon: open sockets, serve requests, reload the configuration, drain.

Floor 4 (ARCHITECTURE.md). The order matters: the daemon opens sockets, creates stores and loads modules before it
changes its user. The first connection is accepted when everything is ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from counterd.control.admin import Admin, close_listening, open_listening
from counterd.control.config import loading as configuration
from counterd.control.config.keys import settings_for
from counterd.control.config.loading import Config, ConfigError
from counterd.control.daemon_status import DaemonStatus
from counterd.control.inspector import Inspector
from counterd.control.log import Reports
from counterd.control.loop_lag import LoopLagMonitor
from counterd.control.process.drain import drain
from counterd.control.process.limits import identity, least_descriptors, raise_descriptors, share_descriptors
from counterd.control.process.privileges import drop_privileges
from counterd.control.process.systemd import Teller, notify, watchdog_seconds
from counterd.control.service import Service, connect, prepare_all
from counterd.control.threads import NoThread, run_in_thread
from counterd.net.sockets import UnixSocket
from counterd.version import __version__

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from counterd.contract import ProtocolSpec
    from counterd.control.log import LogWriter
    from counterd.control.parts import Ready
    from counterd.control.service import MakeHost
    from counterd.net.connection import Connection

log = structlog.get_logger()


class Reload(NamedTuple):
    """A configuration that was read again and checked, and can be applied.

    config: the configuration, with the old values of keys that need a restart. changes: the keys whose values change.
    postponed: lines about the keys that need a restart. ready: the result of prepare() for each service.
    """

    config: Config
    changes: list[str]
    postponed: list[str]
    ready: list[Ready]


class Daemon:
    """Serves the protocols that a configuration enables, until a signal ends the daemon.

    reread: reads the configuration again after SIGHUP. writer: writes the log. make_host: see Service.extend(). Raises
    ConfigError, with a line for each problem, if a socket cannot be opened, the user cannot be changed, or memory
    cannot be allocated.

    services: the enabled protocols. status: the fields that other parts may read. admin: the admin process, if it is
    enabled.
    """

    def __init__(
        self,
        config: Config,
        specs: Sequence[ProtocolSpec],
        writer: LogWriter,
        reread: Callable[[], Config],
        make_host: MakeHost,
    ) -> None:
        self.status = DaemonStatus(config, settings_for(specs), lambda: writer.dropped)
        self.admin: Admin | None = None
        self._admin_listening: socket.socket | UnixSocket | None = None
        self._writer = writer
        self._specs = specs
        self._reread = reread
        self._report = Reports()
        self._stopping = asyncio.Event()
        enabled = [spec for spec in specs if config.listener(spec.name).enable]
        limit = raise_descriptors()
        if limit < (least := least_descriptors(len(enabled))):
            few = f"the process may open {limit} files and needs at least {least}: raise the limit (ulimit -n)"
            raise ConfigError([f"{config.path}: {few}"])
        descriptors = share_descriptors(limit, len(enabled))
        self.services = [Service(spec, descriptors, self._report) for spec in enabled]
        self._reloading: asyncio.Task[None] | None = None
        self._reload_again = False
        self._teller: Teller
        try:
            self._open(make_host)
        except BaseException:
            self._close()
            raise

    async def run(self) -> None:
        """Serves requests until SIGTERM or SIGINT, then drains."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_internal_error)
        self._teller = Teller(loop)
        self.status.loop_lag = LoopLagMonitor(loop, functools.partial(notify, "WATCHDOG=1"), watchdog_seconds() / 2)
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_stop)
            await asyncio.gather(*(service.start() for service in self.services))
            connect(self.services)
            self._watch()
            # Before anybody can be answered: until now, these signals are ignored (__main__.py).
            loop.add_signal_handler(signal.SIGHUP, self.reload)
            loop.add_signal_handler(signal.SIGUSR1, self._on_usr1)
            await self._serve([service for service in self.services if service.journal is None])
            gc.collect()
            gc.freeze()  # the objects that exist now will stay, so garbage collections can skip them
            if self._admin_listening is not None:
                self.admin = Admin(self.status.config.admin, self._admin_listening, self._inspector(), self._report)
                self.admin.start()
                log.info(f"admin listens on {self.admin.address()}")
            self.status.loop_lag.start()
            await self._serve([service for service in self.services if service.journal is not None])
            if not self._stopping.is_set():
                log.info(f"ready: counterd {__version__}", pid=os.getpid())
                self._log_warnings()
                self.status.state = "ready"
                self._teller.tell("READY=1", self._status())
                await self._stopping.wait()
            self.status.state = "draining"
            await drain(self.services, self.status.config.process.drain, self._teller.tell)
        finally:
            if self._reloading is not None:
                self._reloading.cancel()
            self.status.loop_lag.stop()
            self._teller.stop()
            self._close()

    def reload(self) -> None:
        """Starts to read the configuration again, as _reload() describes.

        If a reload is already in progress, another reload follows it.
        """
        if self._stopping.is_set():
            log.warning("not reloaded: counterd is stopping")
        elif self._reloading is not None:
            self._reload_again = True
        else:
            self._reload_again = False
            self._reloading = asyncio.get_running_loop().create_task(self._reload())
            self._reloading.add_done_callback(self._on_reloaded)

    def log_stats(self) -> None:
        """Writes the figures of every protocol to the log."""
        for service in self.services:
            figures = {**self.status.figures(service), **service.snapshot()}
            log.info(f"stats of {service.spec.name}", **figures)

    # ---- inside ----

    async def _serve(self, services: Sequence[Service]) -> None:
        """Lets these protocols accept connections: those with a journal when it was restored. Raises ConfigError.

        Returns early if the daemon has to stop.
        """
        serving = asyncio.gather(*(service.serve() for service in services))
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if serving.done():
            serving.result()
        else:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    async def _reload(self) -> None:
        """Reads the configuration again, and applies the values that can change while the daemon runs.

        If there is a mistake, nothing changes.
        """
        is_ready = self.status.state == "ready"  # else run() will notify it
        if is_ready:
            self._teller.tell("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            prepared = await run_in_thread(self._prepare)  # slow if there are many rules, or on a network file system
            if self._stopping.is_set():
                log.warning("not reloaded: counterd is stopping")
            else:
                self._apply(prepared)
        except ConfigError as error:
            for problem in error.problems:
                log.error(f"not reloaded: {problem}")
        except NoThread as error:
            log.error(f"not reloaded: {error}")
        finally:
            if is_ready and not self._stopping.is_set():  # otherwise drain() has notified it already
                self._teller.tell("READY=1", self._status())

    def _on_reloaded(self, task: asyncio.Task[None]) -> None:
        self._reloading = None
        if not task.cancelled():
            task.result()  # an exception is a bug, and the loop reports it
            if self._reload_again:
                self.reload()

    def _prepare(self) -> Reload:
        """Does everything that can fail: reads, checks and merges the values, and reads files. Raises ConfigError."""
        asked = self._reread()
        changes, fixed = configuration.changed(self.status.config, asked, self.status.settings)
        new = configuration.merged(self.status.config, asked, fixed, self._specs)
        ready = prepare_all([service.spec for service in self.services], new)
        # Each line once: protocols that share a listener.* key have the same line.
        postponed = dict.fromkeys(f"{asked.place(key)} needs a restart to change" for key in fixed)
        return Reload(new, list(dict.fromkeys(map(asked.name, changes))), list(postponed), ready)

    def _apply(self, reload: Reload) -> None:
        """Applies a configuration that _prepare() has returned. Raises ConfigError if a store refuses its files."""
        new = reload.config
        for service, one in zip(self.services, reload.ready, strict=True):
            try:
                service.load(one)
            except (ValueError, MemoryError) as error:
                raise ConfigError([f"{new.path}: {service.spec.name}: {error}"]) from None
        self.status.config = new
        self._log_warnings()
        self._writer.configure(new.process.log.level, new.process.log.format)
        for service, one in zip(self.services, reload.ready, strict=True):
            service.apply(one)
        self._watch()
        if self.admin is not None:
            self.admin.reload(new.admin)
        for line in reload.postponed:
            log.warning(line)
        reread = [line for service in self.services for line in service.reread()]
        log.info(f"reloaded {new.path}: {', '.join(reload.changes + reread) or 'nothing changed'}")

    def _open(self, make_host: MakeHost) -> None:
        config = self.status.config
        problems: list[str] = []
        for service in self.services:
            wrong, missing = service.open(config, functools.partial(self.status.figures, service))
            problems += wrong
            for line in missing:
                log.warning(f"{line}; counterd continues without this address")
        if config.admin.enable:
            try:
                self._admin_listening = open_listening(config)
            except ConfigError as error:
                problems += error.problems
        if problems:
            raise ConfigError(problems)
        self._change_user()
        for service in self.services:  # last: extensions are other people's code, and may start threads
            service.extend(make_host)

    def _change_user(self) -> None:
        """Gives up the privileges that were needed to open the sockets."""
        user, group = self.status.config.process.user, self.status.config.process.group
        key = "user" if user else "group"
        try:
            uid, gid, name = identity(user, group)
            for service in self.services:
                for listeners in service.listeners:
                    listeners.hand_over(uid, gid)
            if isinstance(self._admin_listening, UnixSocket) and (uid, gid) != (os.geteuid(), os.getegid()):
                self._admin_listening.chown(uid, gid)
            drop_privileges(uid, gid, name)
        except (LookupError, OSError) as error:
            became = (
                (f"{key}: cannot change the user of the process to {user or group}")
                if user or group
                else "cannot give up capabilities"
            )
            raise ConfigError([f"{self.status.config.where(key)}: {became}: {error}"]) from None
        log.debug(f"running as uid {uid}, gid {gid}")
        for line in dict.fromkeys(line for service in self.services for line in service.unreadable()):
            log.warning(line)

    def _on_internal_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Called for an unhandled exception: a bug, or a lack of memory.

        The daemon closes the connection that caused the exception. All other connections continue to work.
        """
        error = context.get("exception")
        what = context.get("message", error)
        if isinstance(error, MemoryError):
            self.status.memory_errors += 1
            self._report("memory", f"out of memory: {what}", "error", error)
        else:
            self.status.internal_errors += 1
            self._report("internal", f"internal error: {what}", "error", error)

    def _inspector(self) -> Inspector:
        """Makes the Inspector, which answers the admin process. Raises ConfigError."""
        try:
            return Inspector(self.status, self.services)
        except OSError as error:  # it reads /proc, which a container may lack
            place = self.status.config.place("admin.enable")
            raise ConfigError([f"{place}: cannot read {error.filename}: {error.strerror}"]) from None

    def _watch(self) -> None:
        """Logs each connection, but only at the level debug, because a log line takes more time than a connection."""
        for service in self.services:
            watch = functools.partial(log_connection, service.spec.name) if self._writer.writes("debug") else None
            service.server.watch = watch

    def _status(self) -> str:
        return f"STATUS=serving {', '.join(service.spec.name for service in self.services)}"

    def _log_warnings(self) -> None:
        for warning in self.status.config.warnings:
            log.warning(warning)

    def _on_usr1(self) -> None:
        for service in self.services:
            service.on_usr1()
        self.log_stats()

    def _on_stop(self) -> None:
        if self._stopping.is_set():
            log.warning("second signal: exiting immediately")
            self._close()
            self._writer.close(0.1)
            os._exit(1)
        log.info("stopping: answering the requests that were already received")
        self._stopping.set()

    def _close(self) -> None:
        if self.admin is not None:
            self.admin.stop()
        elif self._admin_listening is not None:
            close_listening(self._admin_listening)
        for service in self.services:
            with contextlib.suppress(OSError):
                service.stop()


def log_connection(protocol: str, event: str, connection: Connection) -> None:
    """Logs that a connection was opened or closed."""
    fields = {"requests": connection.requests} if event == "closed" else {}
    log.debug(f"connection {event}", id=f"{protocol}-{connection.id}", peer=connection.origin(), **fields)
