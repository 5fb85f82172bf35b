"""A connection to the beanstalk protocol of a real daemon, and the process that writes its journal."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from counterd.protocols.beanstalk import wire
from kit.daemon import PATIENCE, wait_until

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from kit.daemon import Daemon

RECEIVE_SIZE = 1 << 16


class Peer:
    """A connection. connected: its socket."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._parser = wire.Parser()

    def ask(self, request: bytes) -> wire.Reply:
        """As ask_all(), with one request."""
        (reply,) = self.ask_all([request])
        return reply

    def ask_all(self, requests: Sequence[bytes]) -> list[wire.Reply]:
        """Sends requests in one piece. Returns the replies. Raises ConnectionError if the daemon is gone."""
        self.socket.sendall(b"".join(requests))
        return self.receive(len(requests))

    def receive(self, count: int) -> list[wire.Reply]:
        """Returns the next replies."""
        replies: list[wire.Reply] = []
        while len(replies) < count:
            data = self.socket.recv(RECEIVE_SIZE)
            if not data:
                raise ConnectionError("the daemon closed the connection")
            replies += self._parser.feed(data)
        return replies

    def tubes(self) -> list[bytes]:
        return wire.read_list(self.ask(wire.list_tubes()).body)

    def jobs(self) -> Iterator[dict[str, str]]:
        """Yields all jobs, as stats-job shows them."""
        for tube in self.tubes():
            first = 0
            while found := wire.read_jobs(self.ask(wire.list_jobs(tube, first=first, count=wire.BATCH_MAX)).body):
                yield from found
                first = int(found[-1]["id"]) + 1

    def figure(self, name: str) -> int:
        """Returns a figure of the daemon's statistics."""
        return int(wire.read_dictionary(self.ask(wire.stats()).body)[name])

    def close(self) -> None:
        self.socket.close()


def writers(counterd: Daemon) -> Iterator[int]:
    """Yields the pid of the journal process, if there is one."""
    for child in Path(f"/proc/{counterd.pid}/task/{counterd.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"counterd.journal" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield int(child)


def writer_of(counterd: Daemon, seconds: float = PATIENCE) -> int:
    """Waits for the journal process. Returns its pid."""
    return wait_until(lambda: next(writers(counterd), 0), "the journal process is there", seconds)
