"""The beanstalk protocol for scripted servers: a small, correct queue of jobs with one priority.

Only a kick makes delayed jobs ready.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from kit import scripted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.scripted import Peer

PAUSE_S = 0.002


class Asked(NamedTuple):
    """A command as received."""

    connection: int
    words: list[bytes]
    body: bytes
    seconds: float  # of the monotonic clock


class Queue(scripted.Server):
    """The server. jobs: {tube: {id: body}} of ready and delayed jobs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.jobs: dict[bytes, dict[int, bytes]] = {}
        self.delayed: set[int] = set()
        self.tubes: dict[int, bytes] = {}  # of connections
        self.reserved: dict[int, dict[int, bytes]] = {}  # by connections
        self.ids = itertools.count(1)

    def hold_back(self, asked: Asked) -> None:
        """Returns when the answer, which is already known, may be sent. A test may override it."""

    def reply(self, asked: Asked) -> bytes:
        while not (reply := super().reply(asked)) and asked.words == [b"reserve"] and self.peer_of(asked).is_there():
            time.sleep(PAUSE_S)
        self.hold_back(asked)
        return reply

    def send(self, peer: Peer, replies: Iterator[bytes]) -> None:
        for reply in replies:
            peer.socket.sendall(reply)

    def give_back(self, peer: Peer) -> None:
        with self.lock:
            tube = self.tubes.get(peer.number, b"default")
            self.jobs.setdefault(tube, {}).update(self.reserved.pop(peer.number, {}))

    def right_answer(self, asked: Asked) -> bytes:
        """Executes a command. Returns the answer; b"" if a reserve has to wait."""
        tube = self.tubes.get(asked.connection, b"default")
        jobs = self.jobs.setdefault(tube, {})
        held = self.reserved.setdefault(asked.connection, {})
        if asked.words[0] == b"put":
            job = next(self.ids)
            jobs[job] = asked.body
            if asked.words[2] != b"0":
                self.delayed.add(job)
            return b"INSERTED %d\r\n" % job
        if asked.words[0].startswith(b"reserve"):
            job = min(jobs.keys() - self.delayed, default=0)
            if not job:
                return b"" if asked.words[0] == b"reserve" else b"TIMED_OUT\r\n"
            held[job] = jobs.pop(job)
            return b"RESERVED %d %d\r\n%b\r\n" % (job, len(held[job]), held[job])
        if asked.words[0] == b"delete":
            return b"NOT_FOUND\r\n" if held.pop(int(asked.words[1]), None) is None else b"DELETED\r\n"
        if asked.words[0] == b"kick":
            self.delayed -= jobs.keys()
            return b"KICKED 0\r\n"
        if asked.words[0] == b"use":
            self.tubes[asked.connection] = asked.words[1]
        return b"USING %b\r\n" % tube if asked.words[0] in {b"use", b"list-tube-used"} else b"WATCHING 1\r\n"

    def of(self, *words: bytes) -> list[Asked]:
        return [each for each in self.seen if each.words[0] in words]

    def left(self) -> list[bytes]:
        """Returns the bodies of all ready and delayed jobs."""
        return [body for jobs in self.jobs.values() for body in jobs.values()]

    def cut(self, peer: Peer, data: bytes) -> tuple[list[Asked], bytes]:
        found = []
        while (end := data.find(b"\r\n")) >= 0:
            words, at, body = data[:end].split(b" "), end + 2, b""
            if words[0] == b"put":
                size = int(words[4])
                body, at = data[at : at + size], at + size + 2
                if len(data) < at:
                    break
            found.append(Asked(peer.number, words, body, time.monotonic()))
            data = data[at:]
        return found, data
