"""The life of the process: open, serve, reload, drain.

Floor 4. Order matters: sockets are opened, and stores made with the code they need, before the user changes; the first
connection is accepted when everything stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any

from counterd.control import config as configuration
from counterd.control.config import Config, ConfigError
from counterd.control.keys import settings_for
from counterd.control.limits import become, raise_descriptors, share_descriptors
from counterd.control.log import Bounded
from counterd.control.service import Service
from counterd.control.systemd import notify
from counterd.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterd.control.log import LogWriter
    from counterd.net._connection import Connection
    from counterd.protocols import Room

log = logging.getLogger("counterd")

# Lines of one cause that are logged in a period: enough to see it, too few to drown the rest.
REPEATED_LINES = 5
REPEATED_PERIOD_S = 10.0


class Daemon:
    """Serves what a configuration enables until a signal ends it.

    reread: reads the configuration again, for SIGHUP. writer: where logs go. Raises ConfigError, with a line for each
    problem, if the sockets cannot be opened, the user not changed, or the memory not had.
    """

    def __init__(self, config: Config, rooms: Sequence[Room], writer: LogWriter, reread: Callable[[], Config]) -> None:
        self._config = config
        self._rooms = rooms
        self._settings = settings_for(rooms)
        self._writer = writer
        self._reread = reread
        self._started_ns = time.monotonic_ns()
        self._repeated = Bounded(REPEATED_LINES, REPEATED_PERIOD_S)
        self._internal_errors = 0
        self._stopping = asyncio.Event()
        enabled = [room for room in rooms if config.values[f"{room.name}.enable"]]
        descriptors = share_descriptors(raise_descriptors(), len(enabled))
        self._services = [Service(room, config, descriptors) for room in enabled]
        try:
            self._open()
        except BaseException:
            self._close()
            raise

    async def run(self) -> None:
        """Serves until SIGTERM or SIGINT, then drains."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_internal_error)
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._on_stop)
            for service in self._services:
                service.listen(loop, self._log_bounded)
            loop.add_signal_handler(signal.SIGHUP, self.reload)
            loop.add_signal_handler(signal.SIGUSR1, self.log_stats)
            gc.collect()
            gc.freeze()  # what is alive now stays: no collection need ever walk it again
            for service in self._services:
                log.info("%s listens on %s", service.room.name, service.addresses())
            log.info("ready: counterd %s", __version__, extra={"fields": {"pid": os.getpid()}})
            self._log_warnings()
            notify("READY=1")
            await self._stopping.wait()
            notify("STOPPING=1")
            await self._drain()
        finally:
            self._close()

    def reload(self) -> None:
        """Rereads the configuration and applies what may change while running; a mistake leaves all as it was."""
        if self._stopping.is_set():
            log.warning("not reloaded: stopping")
            return
        try:
            new = self._reread()
            changeable, fixed = configuration.changed(self._config, new, self._settings)
            self._config = configuration.merged(self._config, new, fixed, self._rooms)
        except ConfigError as error:
            for problem in error.problems:
                log.error("not reloaded: %s", problem)
            return
        values = self._config.values
        self._log_warnings()
        self._writer.configure(values["log.level"], values["log.format"])
        for service in self._services:
            service.apply(self._config)
        for key in fixed:
            log.warning("%s: %s needs a restart to change", new.where(key), key)
        log.info("reloaded %s: %s", new.path, ", ".join(changeable) or "nothing changed")

    def log_stats(self) -> None:
        """Logs the figures of every room."""
        for service in self._services:
            figures = {**self._figures(service), **service.store.snapshot()}
            log.info("stats of %s", service.room.name, extra={"fields": figures})

    # ---- inside ----

    def _open(self) -> None:
        problems: list[str] = []
        for service in self._services:
            wrong, missing = service.open()
            problems += wrong
            for line in missing:
                log.warning("%s; going on without it", line)
        if problems:
            raise ConfigError(problems)
        for service in self._services:
            try:
                service.make_store(functools.partial(self._figures, service))
            except (ValueError, MemoryError) as error:
                raise ConfigError([f"{self._config.path}: {service.room.name}: {error}"]) from None
        self._change_user()

    def _change_user(self) -> None:
        user, group = self._config.values["user"], self._config.values["group"]
        key = "user" if user else "group"
        try:
            uid, gid = become(user, group, [service.unix for service in self._services if service.unix])
        except (LookupError, OSError) as error:
            raise ConfigError([f"{self._config.where(key)}: {key}: cannot become {user or group}: {error}"]) from None
        log.debug("running as uid %d, gid %d", uid, gid)

    def _figures(self, service: Service) -> dict[str, object]:
        """What is counted above the engine."""
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime": (time.monotonic_ns() - self._started_ns) // 1_000_000_000,
            **service.server.figures(),
            "log_lines_lost": self._writer.dropped,
            "internal_errors": self._internal_errors,
        }

    def _on_internal_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nothing was to raise: a bug. Its connection is closed by the loop, the others go on."""
        self._internal_errors += 1
        error = context.get("exception")
        self._log_bounded("internal", f"internal error: {context.get('message', error)}", logging.ERROR, error)

    def _log_bounded(
        self, cause: str, text: str, level: int = logging.WARNING, error: BaseException | None = None
    ) -> None:
        """Logs what peers can cause without end: a few lines of each cause in a period, and how many were left out."""
        suppressed = self._repeated.allow(cause, time.monotonic())
        if suppressed is not None:
            fields = {"cause": cause, **({"suppressed": suppressed} if suppressed else {})}
            log.log(level, "%s", text, exc_info=error, extra={"fields": fields})

    def _log_warnings(self) -> None:
        for warning in self._config.warnings:
            log.warning("%s", warning)

    def _on_stop(self) -> None:
        if self._stopping.is_set():
            log.warning("a second signal: exiting at once")
            self._close()
            self._writer.close(0.1)
            os._exit(1)
        log.info("stopping: answering what was received")
        self._stopping.set()

    async def _drain(self) -> None:
        """Accepts no more, answers what was received, closes."""
        for service in self._services:
            service.part()
        gone = asyncio.gather(*(service.server.emptied() for service in self._services))
        try:
            await asyncio.wait_for(gone, self._config.values["drain.timeout"])
        except asyncio.TimeoutError:
            if left := self._connections():
                log.warning("drain.timeout is over: %d connections were cut off", len(left))
            for connection in left:
                connection.abort()
        log.info("stopped")

    def _connections(self) -> list[Connection]:
        return [connection for service in self._services for connection in service.server.connections.values()]

    def _close(self) -> None:
        for service in self._services:
            with contextlib.suppress(OSError):
                service.close()
