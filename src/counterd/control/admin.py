"""The daemon's end of the admin process: starts it, answers it, replaces it.

Floor 4. Whatever that process does, the daemon only spends a share of its time on it: questions are taken a slice at a
time and then it rests four times as long; what an answer is made from in steps is made one at a time, a step between
rests likewise; while an answer has not been read, nothing else is asked. A process that says nothing, because it is
stopped, stuck, or does not read, is killed and replaced; one that ends is replaced, later each time.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from counterd.control.config import ConfigError
from counterd.control.inspector import SLICE_NS, Steps, encoded
from counterd.control.keys import ADMIN, shown, split_bind
from counterd.frames import Frames, Refused, frame
from counterd.net.sockets import Keepalive, UnixSocket, open_tcp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd.control.config import Config
    from counterd.control.inspector import Inspector
    from counterd.control.keys import Endpoint

MODULE = "counterd.admin"
SOCKET_MODE = 0o660
KEEPALIVE = Keepalive(idle=10, interval=2, count=7, user_timeout=25)

RESTART_MIN_S = 0.1
RESTART_MAX_S = 10.0
STEADY_S = 10.0  # one that lived for so long has had another reason to end than the one before
LISTEN_PERIOD_S = 5.0  # the process says something as often
SILENT_MAX = 4  # periods; counted, so that a daemon that was stopped itself does not blame the process
REST = 4  # times as long as what was done: a fifth of the loop's time
WALKS_MAX = 8
QUESTION_MAX = 256 << 10  # bytes: a name of 64 KiB, a byte of which takes two, and the rest
OUTPUT_MAX = 256 << 10  # bytes unread, beyond which no more is answered
LAST_WORDS = 64 << 10  # what a pipe holds

# What a service manager tells this process, and nobody else.
NOT_INHERITED = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


def open_listening(config: Config) -> socket.socket | UnixSocket:
    """The socket that the process was started with, else the one that admin.bind asks for. Raises ConfigError."""
    if ADMIN in config.sockets:
        return config.sockets[ADMIN][0]
    bind = config.admin.bind
    host, port = split_bind(bind)
    try:
        return open_tcp(host, port, KEEPALIVE) if port >= 0 else UnixSocket(host, SOCKET_MODE)
    except OSError as error:
        why = "it is in use" if error.errno == errno.EADDRINUSE and port >= 0 else error.strerror or error
        raise ConfigError([f"{config.place('admin.bind')}: cannot listen on {bind}: {why}"]) from None


def close_listening(listening: socket.socket | UnixSocket) -> None:
    """Closes what open_listening() opened."""
    if isinstance(listening, UnixSocket):
        listening.unlink()
        listening = listening.socket
    listening.close()


class Admin:
    """Keeps an admin process that serves on a socket, from start() to stop().

    inspector: has its answers. report: is told a cause and a sentence, as net.server's.
    """

    def __init__(
        self,
        settings: Endpoint,
        listening: socket.socket | UnixSocket,
        inspector: Inspector,
        report: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._listening = listening
        self._inspector = inspector
        self._report = report
        self._child: Child | None = None
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Starts the process; it serves some tenths of a second later."""
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    def reload(self, settings: Endpoint) -> None:
        """Hands down the settings that may change while running."""
        self._settings = settings
        if self._child is not None:
            self._child.hello(self._told())

    def stop(self) -> None:
        """Ends the process, and serves no more."""
        if self._keeping is not None:
            self._keeping.cancel()
        if self._child is not None:
            self._child.end()
            self._child = None
        close_listening(self._listening)

    def address(self) -> str:
        """Where it listens, for people."""
        listening = self._socket()
        if listening.family == socket.AF_UNIX:
            return f"unix:{listening.getsockname()}"
        return shown(*listening.getsockname()[:2])

    # ---- inside ----

    async def _keep(self) -> None:
        delay = RESTART_MIN_S
        while True:
            begun = time.monotonic()
            try:
                self._child = Child(self._socket(), self._inspector, self._report)
                await self._child.open()
                self._child.hello(self._told())
                why = await self._child.ended()
                self._child = None
            except OSError as error:
                why = f"cannot be started: {error.strerror or error}"
                if self._child is not None:
                    self._child.end()
                    self._child = None
            self._inspector.restarts += 1
            if time.monotonic() - begun > STEADY_S:
                delay = RESTART_MIN_S
            self._report("admin", f"the admin process {why}; another one starts in {delay:g} s")
            await asyncio.sleep(delay)
            delay = min(2 * delay, RESTART_MAX_S)

    def _socket(self) -> socket.socket:
        return self._listening.socket if isinstance(self._listening, UnixSocket) else self._listening

    def _told(self) -> dict[str, Any]:
        """The settings that are its business."""
        return {"token": self._settings.token, "allow": self._settings.allow, "hosts": self._settings.hosts}


class Child(asyncio.Protocol):
    """One admin process, from open() to ended()."""

    def __init__(self, listening: socket.socket, inspector: Inspector, report: Callable[[str, str], None]) -> None:
        """Starts it. Raises OSError."""
        self._inspector = inspector
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._socket, theirs = socket.socketpair()
        try:
            self._process, self._words = spawn(listening, theirs)
        except OSError:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._transport: asyncio.Transport | None = None
        self._gone = asyncio.Event()
        self._why = ""
        self._frames = Frames(QUESTION_MAX)
        self._questions: Iterator[bytes] = iter(())
        self._walks: deque[tuple[int, Steps]] = deque()
        self._has_questions = self._is_resting = self._is_walking = self._is_stuck = False
        self._heard = True
        self._silent = 0

    async def open(self) -> None:
        """Connects its socket to this loop."""
        self._socket.setblocking(False)
        await self._loop.create_unix_connection(lambda: self, sock=self._socket)
        self._loop.call_later(LISTEN_PERIOD_S, self._check)

    def hello(self, settings: dict[str, Any]) -> None:
        """Tells it the settings."""
        self._send(b'{"hello": ' + encoded(settings) + b"}")

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
            self._process.wait(1)
        self._epitaph()

    # ---- called by the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=OUTPUT_MAX)

    def data_received(self, data: bytes) -> None:
        self._heard = True
        self._questions = self._frames.feed(data)
        self._take_questions()

    def pause_writing(self) -> None:
        self._is_stuck = True
        self._read_or_not()

    def resume_writing(self) -> None:
        self._is_stuck = False
        self._go_on()
        self._walk_on(0)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._walks.clear()
        self._gone.set()

    # ---- questions ----

    def _take_questions(self) -> None:
        """Answers for a slice, then rests; the next questions are not even read meanwhile."""
        if self._transport is None:
            return
        begun = time.monotonic_ns()
        self._has_questions = True
        try:
            while self._has_questions and not self._is_stuck and time.monotonic_ns() - begun < SLICE_NS:
                body = next(self._questions, None)
                self._has_questions = body is not None
                if body is not None:
                    self._take(json.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            self._cut(f"asked what it should not: {type(error).__name__}: {error}")
            return
        self._is_resting = True
        self._read_or_not()
        self._loop.call_later(REST * (time.monotonic_ns() - begun) / 1e9, self._rested)

    def _rested(self) -> None:
        self._is_resting = False
        self._go_on()

    def _go_on(self) -> None:
        """What has been read comes first."""
        if self._has_questions and not self._is_resting and not self._is_stuck:
            self._take_questions()
        else:
            self._read_or_not()

    def _take(self, message: dict[str, Any]) -> None:
        if "note" in message:
            self._report("admin_note", f"the admin process says: {str(message['note'])[:200]}")
            return
        number = int(message["id"])
        try:
            answer = self._inspector.answer(message)
            if isinstance(answer, bytes):
                self._answer(number, answer)
            elif len(self._walks) < WALKS_MAX:
                self._walks.append((number, answer))
                self._walk_on(0)
            else:
                raise Refused(503, f"{WALKS_MAX} others are being answered")
        except Refused as refused:
            self._refuse(number, refused)
        except OSError as error:  # no descriptors, for one
            self._refuse(number, Refused(503, f"it cannot be found out now: {error.strerror}"))

    # ---- answers that take steps ----

    def _walk_on(self, spent_ns: int) -> None:
        if self._walks and not self._is_walking:
            self._is_walking = True
            self._loop.call_later(REST * spent_ns / 1e9, self._step)

    def _step(self) -> None:
        self._is_walking = False
        if not self._walks or self._is_stuck:
            return
        number, steps = self._walks[0]
        begun = time.monotonic_ns()
        try:
            next(steps)
        except StopIteration as done:
            self._walks.popleft()
            self._answer(number, done.value)
        except Refused as refused:
            self._walks.popleft()
            self._refuse(number, refused)
        except Exception as error:  # noqa: BLE001 - a bug of ours costs one answer, not the loop's callback
            self._walks.popleft()
            self._loop.call_exception_handler({"message": "answering the admin process failed", "exception": error})
            self._refuse(number, Refused(500, "an internal error"))
        self._walk_on(time.monotonic_ns() - begun)

    # ---- inside ----

    def _answer(self, number: int, answer: bytes) -> None:
        self._send(b'{"id": %d, "answer": %b}' % (number, answer))

    def _refuse(self, number: int, refused: Refused) -> None:
        self._send(encoded({"id": number, "error": {"status": refused.status, "text": str(refused)}}))

    def _send(self, body: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame(body))

    def _read_or_not(self) -> None:
        if self._transport is None:
            return
        if self._is_resting or self._is_stuck:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _check(self) -> None:
        """Whether it has said anything of late."""
        if self._transport is None:
            return
        self._silent = 0 if self._heard else self._silent + 1
        self._heard = False
        if self._silent >= SILENT_MAX:
            self._cut(f"has said nothing for {SILENT_MAX * LISTEN_PERIOD_S:g} s")
        self._loop.call_later(LISTEN_PERIOD_S, self._check)

    def _cut(self, why: str) -> None:
        self._why = why
        if self._transport is not None:
            self._transport.abort()

    def _epitaph(self) -> str:
        """How it ended, as the rest of a sentence, with what it said last; only once."""
        said = b""
        with contextlib.suppress(BlockingIOError):
            said = os.read(self._words, LAST_WORDS)
        os.close(self._words)
        lines = said.decode(errors="replace").strip().splitlines()
        how = self._why or f"ended with status {self._process.returncode}"
        return f"{how}: {lines[-1]}" if lines else how


def spawn(listening: socket.socket, connected: socket.socket) -> tuple[subprocess.Popen[bytes], int]:
    """Starts the process with these two, and returns it and the end of a pipe that has its last words.

    The pipe never blocks it, and nobody reads it before the end. Raises OSError.
    """
    words, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    given = (listening, connected)
    try:
        for sock in given:
            sock.set_inheritable(True)
        # Every other descriptor closes itself on exec; having all of them closed before would take longer the more
        # connections there are, and the loop waits for it. "/": a folder that anybody may write to is no place to
        # import from.
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, *(str(sock.fileno()) for sock in given), str(os.getpid())],
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
