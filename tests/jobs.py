"""A connection to the beanstalk room of a real daemon, and the process that writes its journal."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from counterd.protocols.beanstalk import wire
from daemon import PATIENCE, wait_until

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Sequence

    from daemon import Daemon

RECEIVE_SIZE = 1 << 16


class Peer:
    """connected: its socket."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._parser = wire.Parser()

    def ask(self, request: bytes) -> wire.Reply:
        """As ask_all."""
        (reply,) = self.ask_all([request])
        return reply

    def ask_all(self, requests: Sequence[bytes]) -> list[wire.Reply]:
        """The replies to requests in one piece. Raises ConnectionError if the daemon has gone."""
        self.socket.sendall(b"".join(requests))
        replies: list[wire.Reply] = []
        while len(replies) < len(requests):
            data = self.socket.recv(RECEIVE_SIZE)
            if not data:
                raise ConnectionError("the daemon closed the connection")
            replies += self._parser.feed(data)
        return replies

    def tubes(self) -> list[bytes]:
        return wire.read_list(self.ask(wire.list_tubes()).body)

    def jobs(self) -> Iterator[dict[str, str]]:
        """All there are, as stats-job shows them."""
        for tube in self.tubes():
            first = 0
            while found := wire.read_jobs(self.ask(wire.list_jobs(tube, first=first, count=wire.BATCH_MAX)).body):
                yield from found
                first = int(found[-1]["id"]) + 1

    def figure(self, name: str) -> int:
        """Of the daemon's statistics."""
        return int(wire.read_dictionary(self.ask(wire.stats()).body)[name])

    def close(self) -> None:
        self.socket.close()


def writers(counterd: Daemon) -> Iterator[int]:
    """The pid of the process that writes its journal, if it is there."""
    for child in Path(f"/proc/{counterd.pid}/task/{counterd.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"counterd.journal" in Path(f"/proc/{child}/cmdline").read_bytes():
                yield int(child)


def writer_of(counterd: Daemon, seconds: float = PATIENCE) -> int:
    """The same, once it is there."""
    return wait_until(lambda: next(writers(counterd), 0), "the journal process is there", seconds)
