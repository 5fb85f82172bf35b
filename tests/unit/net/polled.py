"""Streams on a poller that belongs to the test: real sockets, a fake loop, and batches that run when a test says so."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

from counterd.net.poller import Acceptor, Poller
from counterd.net.stream import Handler, Stream
from unit.net.fakes import FakeLoop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


ENDLESS_NS = 1 << 62  # of a batch: it does not depend on the machine how many sockets it serves


class Probe(Handler):
    """A stream that records its calls. fails: the call in which it raises."""

    def __init__(self, fails: str = "") -> None:
        self.told: list[Any] = []
        self.fails = fails
        self.stream: Any = None
        self.where: tuple[bytes | None, int] = (None, 0)

    def _tell(self, what: Any) -> None:
        self.told.append(what)
        if self.fails and self.fails in str(what):
            raise ValueError(self.fails)

    def received(self, data: bytes) -> None:
        self._tell(data)

    def input_ended(self) -> None:
        self._tell("eof")

    def end_sent(self) -> None:
        self._tell("end sent")

    def output_stuck(self) -> None:
        self._tell("stuck")

    def output_moved(self) -> None:
        self._tell("moved")

    def stream_closed(self, error: BaseException | None) -> None:
        self._tell(("closed", error))

    def closed(self) -> list[Any]:
        return [what[1] for what in self.told if isinstance(what, tuple)]


class Polled(Acceptor):
    """A poller on a fake loop, with one listening socket, and the probes of its streams."""

    def __init__(self, listening: socket.socket) -> None:
        self.loop = FakeLoop()
        self.rejected: list[str] = []
        self.listening = listening
        self.probes: list[Probe] = []
        self.fails = ""
        self.poller = Poller(self.loop, lambda cause, _: self.rejected.append(cause))  # type: ignore[arg-type]
        self.poller.batch_ns = ENDLESS_NS
        self.poller.listen(listening.fileno(), self)
        (self.batch,) = self.loop.readers.values()
        self._stack = contextlib.ExitStack()

    def accepted(self, fd: int, address: bytes | None, port: int) -> None:
        probe = Probe(self.fails)
        probe.stream = Stream(self.poller, fd, None)
        probe.where = address, port
        self.probes.append(probe)
        probe.stream.begin(probe)

    def client(self) -> socket.socket:
        """Connects a socket, which is not accepted yet."""
        client = self._stack.enter_context(socket.socket(self.listening.family, socket.SOCK_STREAM))
        client.settimeout(5)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(self.listening.getsockname())
        return client

    def connect(self) -> tuple[socket.socket, Probe]:
        client = self.client()
        self.batch()
        assert self.probes[-1].told == []
        return client, self.probes[-1]

    def close(self) -> None:
        self._stack.close()
        for probe in self.probes:
            probe.stream.abort()
        self.loop.run()
        self.poller.unlisten()
        self.listening.close()


@contextlib.contextmanager
def polling(family: socket.AddressFamily, directory: Path) -> Iterator[Polled]:
    """Runs the poller during the block."""
    if family == socket.AF_INET:
        listening = socket.create_server(("127.0.0.1", 0))
    else:
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(os.path.relpath(directory / "s"))
        listening.listen(256)
    listening.setblocking(False)
    polled = Polled(listening)
    try:
        yield polled
    finally:
        polled.close()
