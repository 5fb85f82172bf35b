"""The parts of a service: what a protocol has besides its store and its server, such as listeners or a journal.

Floor 4 (ARCHITECTURE.md): declarations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from counterd.control.config.keys import Listener
    from counterd.control.config.loading import Config
    from counterd.control.link import Login
    from counterd.net.access import Access


class Ready(NamedTuple):
    """The configuration of a protocol, with the contents of the files that it names: checked, and ready to be applied.

    files: the parsed contents of the protocol's own files, by key. login: how the protocol connects to the cluster, or
    None if it shares nothing. window: the length of stats windows in seconds; 0 if the protocol has none.
    """

    config: Config
    listener: Listener
    access: Access
    context: ssl.SSLContext | None
    files: Mapping[str, Any]
    login: Login | None
    window: int


class Part:
    """A part of a service. A method does nothing unless the part has something to do then.

    The order of calls is: start(), apply() for each reload, finish() and stop(). stop() can be called at any time.
    Parts that are tasks of the driver (net/driver.pyx) also have turn(), which is called in each turn of the driver.
    """

    async def start(self) -> None:
        """Starts the work of the part, before connections are accepted. Raises ConfigError."""

    def apply(self, ready: Ready) -> None:
        """Applies the settings that can change while the daemon runs."""

    async def finish(self, timeout: float) -> None:
        """Completes the work of the part, after all connections have ended.

        timeout: after how many seconds without progress finish() gives up.
        """

    def stop(self) -> None:
        """Ends the work of the part immediately."""

    def figures(self) -> Mapping[str, float]:
        """Returns the figures of the part by name."""
        return {}
