"""The daemon's side of the admin process: its listening socket, and the answers to its questions.

Floor 4 (ARCHITECTURE.md). The daemon spends at most a fifth of its time on the admin process: it answers questions for
a short time, then rests four times as long. A long answer is made in steps, with a rest between two steps. Only one
answer is made at a time. While the admin process has answers that it has not read, the daemon answers no more
questions. supervisor.py starts the admin process and replaces it when it ends.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from counterd.control.config.keys import ADMIN, shown, split_bind
from counterd.control.config.loading import ConfigError
from counterd.control.inspector import SLICE_NS, Steps, encoded
from counterd.control.process.child import Kind
from counterd.control.process.supervisor import Supervisor
from counterd.ipc import SETTINGS, Frames, Refused, frame
from counterd.net.sockets import Keepalive, UnixSocket, open_tcp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from counterd.control.config.keys import Endpoint
    from counterd.control.config.loading import Config
    from counterd.control.inspector import Inspector
    from counterd.control.process.child import Child

SOCKET_MODE = 0o660
KEEPALIVE = Keepalive(idle=10, interval=2, count=7, user_timeout=25)

REST = 4  # a rest is this many times as long as the work before it, which so takes a fifth of the loop's time
WALKS_MAX = 8
QUESTION_MAX = 256 << 10  # bytes: enough for a name of 64 KiB, each of whose bytes becomes two
OUTPUT_MAX = 256 << 10  # bytes; while more are unread, no question is answered
KIND = Kind("admin", "counterd.admin", OUTPUT_MAX)


def open_listening(config: Config) -> socket.socket | UnixSocket:
    """Returns the socket that was passed to the daemon, or opens one on admin.bind. Raises ConfigError."""
    if ADMIN in config.sockets:
        return config.sockets[ADMIN][0]
    bind = config.admin.bind
    host, port = split_bind(bind)
    try:
        return open_tcp(host, port, KEEPALIVE) if port >= 0 else UnixSocket(host, SOCKET_MODE)
    except OSError as error:
        why = "address already in use" if error.errno == errno.EADDRINUSE and port >= 0 else error.strerror or error
        raise ConfigError([f"{config.place('admin.bind')}: cannot listen on {bind}: {why}"]) from None


def close_listening(listening: socket.socket | UnixSocket) -> None:
    """Closes the socket that open_listening() returned."""
    if isinstance(listening, UnixSocket):
        listening.unlink()
        listening = listening.socket
    listening.close()


class Admin:
    """Keeps an admin process running that serves on a socket, from start() to stop().

    inspector: answers the questions of the admin process. report: called with a cause and a sentence, as in net.server.
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
        self._answers: Answers | None = None
        self._supervisor = Supervisor(KIND, [self._socket()], self._converse, report)

    def start(self) -> None:
        """Starts the admin process. The process is ready some tenths of a second later."""
        self._supervisor.start()

    def reload(self, settings: Endpoint) -> None:
        """Applies the settings of the admin endpoint that can change while the daemon runs."""
        self._settings = settings
        if self._answers is not None:
            self._answers.send_settings(self._told())

    def stop(self) -> None:
        """Ends the admin process and closes the listening socket."""
        self._supervisor.stop()
        close_listening(self._listening)

    def address(self) -> str:
        """Returns the address of the listening socket, for people."""
        listening = self._socket()
        if listening.family == socket.AF_UNIX:
            return f"unix:{listening.getsockname()}"
        return shown(*listening.getsockname()[:2])

    # ---- inside ----

    def _converse(self) -> Answers:
        self._inspector.restarts = self._supervisor.restarts
        self._answers = Answers(self._told(), self._inspector, self._report)
        return self._answers

    def _socket(self) -> socket.socket:
        return self._listening.socket if isinstance(self._listening, UnixSocket) else self._listening

    def _told(self) -> dict[str, Any]:
        """Returns the settings that the admin process needs."""
        return {"token": self._settings.token, "allow": self._settings.allow, "hosts": self._settings.hosts}


class Answers:
    """The conversation with one admin process: a first message from the daemon, then questions and answers."""

    def __init__(self, settings: dict[str, Any], inspector: Inspector, report: Callable[[str, str], None]) -> None:
        self._settings = settings
        self._inspector = inspector
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._child: Child | None = None  # while it is connected
        self._frames = Frames(QUESTION_MAX)
        self._questions: Iterator[bytes] = iter(())
        self._walks: deque[tuple[int, Steps]] = deque()
        self._has_questions = self._is_resting = self._is_walking = self._is_stuck = False

    def send_settings(self, settings: dict[str, Any]) -> None:
        """Sends the settings to the admin process: immediately, or as soon as the process is connected."""
        self._settings = settings
        self._answer(SETTINGS, encoded(settings))

    # ---- called by the child ----

    def opened(self, child: Child) -> None:
        self._child = child
        self.send_settings(self._settings)

    def received(self, data: bytes) -> None:
        self._questions = self._frames.feed(data)
        self._take_questions()

    def paused(self) -> None:
        self._is_stuck = True
        self._read_or_not()

    def resumed(self) -> None:
        self._is_stuck = False
        self._go_on()
        self._walk_on(0)

    def closed(self) -> None:
        self._child = None
        self._walks.clear()

    # ---- questions ----

    def _take_questions(self) -> None:
        """Answers questions for a limited time, then rests. During a rest the daemon reads no questions."""
        if self._child is None:
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
            self._child.cut(f"sent an invalid request: {type(error).__name__}: {error}")
            return
        self._is_resting = True
        self._read_or_not()
        self._loop.call_later(REST * (time.monotonic_ns() - begun) / 1e9, self._rested)

    def _rested(self) -> None:
        self._is_resting = False
        self._go_on()

    def _go_on(self) -> None:
        """Answers the questions that were already read. If no questions were read already, reads more."""
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
                raise Refused(503, f"{WALKS_MAX} other tables are being read")
        except Refused as refused:
            self._refuse(number, refused)
        except OSError as error:  # such as a lack of descriptors
            self._refuse(number, Refused(503, f"the daemon cannot answer now: {error.strerror}"))

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
        except Exception as error:  # noqa: BLE001 - a bug may cost one answer, but must not end the chain of callbacks
            self._walks.popleft()
            self._loop.call_exception_handler({"message": "failed to answer the admin process", "exception": error})
            self._refuse(number, Refused(500, "internal error"))
        self._walk_on(time.monotonic_ns() - begun)

    # ---- inside ----

    def _answer(self, number: int, answer: bytes, status: int = 200) -> None:
        if self._child is not None:
            self._child.write(frame(b"%d %d %b" % (number, status, answer)))

    def _refuse(self, number: int, refused: Refused) -> None:
        self._answer(number, str(refused).encode(errors="backslashreplace"), refused.status)

    def _read_or_not(self) -> None:
        if self._child is not None:
            self._child.listen(not (self._is_resting or self._is_stuck))
