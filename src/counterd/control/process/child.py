"""A child process of the daemon and the socket between the two: started, watched, ended.

Floor 4. What the child does, and what is said, is up to the Conversation. It is started as
    python -m MODULE DESCRIPTOR... LINK DAEMON
with the numbers of the sockets that it is given, that of its end of the socket, and the daemon's pid. It has to end
with the daemon, by PR_SET_PDEATHSIG and by the end of the socket, and to say something every LISTEN_PERIOD_S. A child
that says nothing, because it is stopped, stuck, or does not read, is killed.
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
SILENT_MAX = 4  # periods; counted, so that a daemon that was stopped itself does not blame the child
LAST_WORDS = 64 << 10  # what a pipe holds
END_S = 1.0  # for the kernel to end what was killed

# What a service manager tells this process, and nobody else.
NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass(frozen=True)
class Kind:
    """What the children of one kind have in common.

    name: for people, before "process". module: is run. output_max: bytes that may be unread before a pause.
    """

    name: str
    module: str
    output_max: int


class Conversation(Protocol):
    """The daemon's side of what is said; of one child, from its beginning to its end. None of these may raise."""

    def opened(self, child: Child) -> None:
        """It can be written to from now on."""

    def received(self, data: bytes) -> None:
        """Some of what it says."""

    def paused(self) -> None:
        """It leaves unread what it is told: nothing more is to be written until resumed()."""

    def resumed(self) -> None:
        """It reads."""

    def closed(self) -> None:
        """Nothing is said any more."""


class Child(asyncio.Protocol):
    """One process, from open() to ended() or end()."""

    def __init__(self, kind: Kind, given: Sequence[socket.socket], conversation: Conversation) -> None:
        """Starts it, with these sockets. Raises OSError."""
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
        self._has_spoken = True
        self._silent = 0

    async def open(self) -> None:
        """Connects its socket to this loop. Raises OSError."""
        self._socket.setblocking(False)
        await self._loop.create_unix_connection(lambda: self, sock=self._socket)
        self._loop.call_later(LISTEN_PERIOD_S, self._check)

    def write(self, data: bytes) -> None:
        """Tells it something, if it is there."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def listen(self, does: bool) -> None:
        """Whether what it says is read."""
        if self._transport is None:
            return
        if does:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def cut(self, why: str) -> None:
        """Ends the conversation, and so the process; why is the rest of a sentence."""
        self._why = why
        if self._transport is not None:
            self._transport.abort()

    async def ended(self) -> str:
        """Waits until it is gone, and says why, as the rest of a sentence."""
        await self._gone.wait()
        self._process.kill()  # it has closed its socket, so it is of no use even if it lives
        while self._process.poll() is None:  # noqa: ASYNC110 - nothing tells, and it takes a moment
            await asyncio.sleep(0.01)
        return self._epitaph()

    def end(self) -> None:
        """Ends it now."""
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
        """Whether it has said anything of late."""
        if self._transport is None:
            return
        self._silent = 0 if self._has_spoken else self._silent + 1
        self._has_spoken = False
        if self._silent >= SILENT_MAX:
            self.cut(f"has said nothing for {SILENT_MAX * LISTEN_PERIOD_S:g} s")
        self._loop.call_later(LISTEN_PERIOD_S, self._check)

    def _epitaph(self) -> str:
        """How it ended, as the rest of a sentence, with what it said last; only once."""
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(self._words, LAST_WORDS)
        os.close(self._words)
        lines = said.decode(errors="replace").strip().splitlines()
        how = self._why or f"ended with status {self._process.returncode}"
        return f"{how}: {lines[-1]}" if lines else how


def spawn(module: str, given: Sequence[socket.socket]) -> tuple[subprocess.Popen[bytes], int]:
    """Starts a process with these sockets, and returns it and the end of a pipe that has its last words.

    The pipe never blocks it, and nobody reads it before the end. Raises OSError.
    """
    words, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        for sock in given:
            sock.set_inheritable(True)
        # Every other descriptor closes itself on exec; having all of them closed before would take longer the more
        # connections there are, and the loop waits for it. "/": a folder that anybody may write to is no place to
        # import from.
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
