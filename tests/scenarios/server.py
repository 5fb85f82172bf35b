"""A counterd with all protocols that have scenarios, which may be killed and started again where it was."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterd import protocols
from kit import daemon
from kit.machine import own_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.daemon import Address
    from scenarios.resource import Resource

MODULES = [
    importlib.import_module(f"scenarios.{found.name}")
    for found in pkgutil.iter_modules([str(Path(__file__).parent)])
    if found.name in protocols.names()
]
RESOURCES: list[type[Resource]] = [resource for module in MODULES for resource in module.RESOURCES]


class Server:
    """The daemon, which ends with the block that is entered for it.

    host: the address that it listens on. more: settings for each protocol. program: the command that runs it.
    """

    def __init__(
        self,
        directory: Path,
        host: str = "",
        more: dict[str, Any] | None = None,
        program: Sequence[str] = daemon.MODULE,
    ) -> None:
        self._directory = directory
        self._program = program
        self._running = contextlib.ExitStack()
        self._status = 0
        self.host = host or own_address()  # where a free port stays free
        self.settings: dict[str, Any] = {"counter.enable": "false", "counter.port": "", "counter.bind": ""}
        for module in MODULES:
            name = module.__name__.rpartition(".")[2]
            of_all = {"enable": "true", "bind": self.host, "port": 0, **(more or {})}
            self.settings |= {f"{name}.{key}": value for key, value in of_all.items()} | module.settings(directory)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def start(self) -> None:
        """Starts it, with the ports that it had before."""
        self.daemon = self._running.enter_context(daemon.running(self._directory, self.settings, program=self._program))
        for key in [key for key in self.settings if key.endswith("port")]:
            protocol, _, name = key.partition(".")
            self.settings[key] = self.where(f"{protocol}-control" if name == "control_port" else protocol).port

    def kill(self) -> None:
        self.daemon.exit_status = -signal.SIGKILL
        self.daemon.kill()
        self._running.close()

    def where(self, name: str) -> Address:
        """Returns the address of a protocol, or of its control port."""
        return self.daemon.served(f" {name} listens on")[0]

    def figure(self, protocol: str, name: str) -> int:
        """Returns a figure of a protocol, which the daemon logs."""
        line = self.daemon.logged_stats([protocol])[protocol]
        return int(re.findall(rf"\b{name}=(\d+)", line)[0])

    def connections(self, protocol: str) -> int:
        """Returns how many connections clients of a protocol have."""
        return self.figure(protocol, "curr_connections")
