"""Starts, watches and ends a child process of the daemon. A socket connects the two processes.

Floor 4 (ARCHITECTURE.md). The class Conversation defines the messages on this socket. The daemon starts a child with
this command:
    python -m MODULE DESCRIPTOR... LINK DAEMON
Its arguments are the descriptors of the sockets that it is given, the descriptor of its end of the socket, and the
daemon's pid. A child must end when the daemon ends, by PR_SET_PDEATHSIG and at the end of the socket. A child must send
something every LISTEN_PERIOD_S. If a child sends nothing, because it is stopped, stuck, or does not read, the daemon
kills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from collections.abc import Sequence

LISTEN_PERIOD_S = 5.0
# Periods; counted rather than timed, so that a daemon that was itself stopped does not blame the child. The first word
# may take longer: with a low priority on a busy machine, a child needs many seconds to import its modules.
SILENT_MAX = 4
FIRST_SILENT_MAX = 24
LAST_WORDS = 64 << 10  # bytes that a pipe holds
SLOWEST = 4 << 20  # bytes a second that a child has to handle at least
END_S = 1.0  # how long the kernel may take to end a killed process

# Variables that the service manager sets for the daemon only.
NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass(frozen=True)
class Kind:
    """A kind of child process.

    name: the name for people, before the word "process". module: the Python module to run. output_max: how many unread
    bytes stop the daemon from writing.
    """

    name: str
    module: str
    output_max: int


class Conversation(Protocol):
    """The daemon's side of the conversation with one child. These methods must not raise exceptions."""

    def opened(self, child: Child) -> None:
        """From now on, the daemon can write to the child."""

    def received(self, data: bytes) -> None:
        """The child has sent data."""

    def paused(self) -> None:
        """The child does not read: write nothing more until resumed() is called."""

    def resumed(self) -> None:
        """The child reads again."""

    def closed(self) -> None:
        """The conversation has ended."""


class Child(asyncio.Protocol):
    """A child process, from open() to ended() or end().

    slack: for how many seconds it may be silent in addition, because it handles something large.
    """

    def __init__(self, kind: Kind, given: Sequence[socket.socket], conversation: Conversation) -> None:
        """Starts the process. given: the sockets that the process inherits. Raises OSError."""
        self._kind = kind
        self._conversation = conversation
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        try:
            self._process, self._words = spawn(kind.module, (*given, theirs))
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._transport: asyncio.Transport | None = None
        self._gone = asyncio.Event()
        self._why = ""
        self._has_spoken = False
        self._silent = 0
        self._silent_max = FIRST_SILENT_MAX
        self.slack = 0

    async def open(self) -> None:
        """Connects the daemon's end of the socket to the event loop. Raises OSError."""
        self._socket.setblocking(False)
        await self._loop.create_unix_connection(lambda: self, sock=self._socket)
        self._loop.call_later(LISTEN_PERIOD_S, self._check)

    def write(self, data: bytes) -> None:
        """Sends data to the child, if the child is connected."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def listen(self, does: bool) -> None:
        """Starts or stops reading from the child."""
        if self._transport is None:
            return
        if does:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def cut(self, why: str) -> None:
        """Ends the conversation and the process. why: the rest of a sentence that begins with the process."""
        self._why = why
        if self._transport is not None:
            self._transport.abort()

    async def ended(self) -> str:
        """Waits until the process has ended.

        Returns the reason, as the rest of a sentence that begins with the process.
        """
        await self._gone.wait()
        self._process.kill()  # without its socket it is useless even if it is alive
        while self._process.poll() is None:  # noqa: ASYNC110 - there is no event for it, and it is short
            await asyncio.sleep(0.01)
        return self._epitaph()

    def end(self) -> None:
        """Ends the process immediately."""
        if self._transport is not None:
            self._transport.abort()
        else:
            self._socket.close()
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self._epitaph()

    # ---- called by the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=self._kind.output_max)
        self._conversation.opened(self)

    def data_received(self, data: bytes) -> None:
        self._has_spoken = True
        self._silent_max = SILENT_MAX
        self._conversation.received(data)

    def pause_writing(self) -> None:
        self._conversation.paused()

    def resume_writing(self) -> None:
        self._conversation.resumed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._conversation.closed()
        self._gone.set()

    # ---- inside ----

    def _check(self) -> None:
        """Called every LISTEN_PERIOD_S. Ends a child that has been silent for too long."""
        if self._transport is None:
            return
        self._silent = 0 if self._has_spoken else self._silent + 1
        self._has_spoken = False
        if self._silent >= self._silent_max + self.slack / LISTEN_PERIOD_S:
            self.cut(f"was silent for {self._silent * LISTEN_PERIOD_S:g} s")
        self._loop.call_later(LISTEN_PERIOD_S, self._check)

    def _epitaph(self) -> str:
        """Returns how the process ended, as the rest of a sentence, and the last lines that it printed.

        Call this only once.
        """
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(self._words, LAST_WORDS)
        os.close(self._words)
        lines = said.decode(errors="replace").strip().splitlines()
        how = self._why or f"exited with status {self._process.returncode}"
        return f"{how}: {lines[-1]}" if lines else how


def spawn(module: str, given: Sequence[socket.socket]) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a process that inherits the sockets. Returns the process, and the end of a pipe with the output of the
    process.

    The pipe never blocks the process, and the daemon reads it only after the end of the process. Raises OSError.
    """
    words, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        for sock in given:
            sock.set_inheritable(True)
        # close_fds=False: all other descriptors are close-on-exec. Closing them one by one would block the loop, longer
        # with more connections. cwd="/": modules must not be imported from a folder that others can write to.
        process = subprocess.Popen(
            [sys.executable, "-m", module, *(str(sock.fileno()) for sock in given), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            close_fds=False,
            cwd="/",
            env={key: value for key, value in os.environ.items() if key not in NOT_INHERITED},
        )
    except OSError:
        os.close(words)
        raise
    finally:
        os.close(theirs)
        for sock in given:
            sock.set_inheritable(False)
    return process, words
