"""`python -m counterd.journal LINK DAEMON`: the process that writes a journal, which only the daemon starts.

A side. LINK is the number of a socket to the daemon. It ends when that is closed, once it has written what came before:
the daemon may have been killed, and with `sync` other than always nobody else has what it sent last.

The frames are those of frames.py:
    daemon to child   JSON first: {"room": name, "path": ..., "is_synced": ..., "is_new": ...}; then a piece each,
                      the next when the last was written. is_new: the daemon's store is to be told what there is.
                      Nothing: no more is written. Then JSON, what release() is to be told, and the file is closed
    child to daemon   a letter, then   A: what was sent last is written. L: nothing; it lives. P: a piece, to restore.
                      C: JSON, how many records come. B: JSON, what begin() is to be told: it is ready.
                      E: what is wrong; it ends
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING

from counterd.frames import PIECE_MAX, Frames, frame
from counterd.journal.database import JournalError, explained, find_ledger, lock, open_database, transaction

if TYPE_CHECKING:
    from collections.abc import Iterator

LIVES_PERIOD_S = 2
LIVES_STEPS = 1_000_000  # of SQLite's machine, some 0.1 s
READ_SIZE = 1 << 20


class Link:
    """The socket to the daemon."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._said = time.monotonic()
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", LIVES_PERIOD_S, 0))

    def say(self, letter: bytes, body: bytes = b"") -> None:
        """Raises OSError if the daemon has gone."""
        self._said = time.monotonic()
        self._socket.sendall(frame(letter + body, PIECE_MAX))

    def live(self) -> None:
        """Called while SQLite is at work: what takes long is no hang."""
        if time.monotonic() - self._said > LIVES_PERIOD_S:
            with contextlib.suppress(OSError):  # which whoever says something next is told
                self.say(b"L")

    def frames(self) -> Iterator[bytes]:
        """What the daemon sends, until it has gone; meanwhile it is told that this process lives."""
        frames = Frames(PIECE_MAX)
        data = memoryview(bytearray(READ_SIZE))
        while True:
            try:
                size = self._socket.recv_into(data)
            except BlockingIOError:  # nothing for LIVES_PERIOD_S
                with contextlib.suppress(BrokenPipeError):  # there may still be something to read
                    self.say(b"L")
                continue
            if size == 0:
                return
            yield from frames.feed(data[:size])


def write_journal(link: Link) -> None:
    """Writes what comes. Raises JournalError, or OSError if the daemon has gone."""
    frames = link.frames()
    told = json.loads(next(frames))
    ledger = find_ledger(told["room"])
    path = told["path"]
    with explained(path):
        lock(path)
        database = open_database(path, told["room"], is_synced=told["is_synced"])
        database.set_progress_handler(link.live, LIVES_STEPS)
        begin = {}
        if told["is_new"]:
            link.say(b"C", json.dumps(ledger.count(database)).encode())
            for piece in ledger.read(database):
                link.say(b"P", piece)
            with transaction(database):
                begin = dict(ledger.reserve(database))
        link.say(b"B", json.dumps(begin).encode())
        for piece in frames:
            if not piece:
                if (left := next(frames, None)) is not None:  # else the daemon has gone
                    with transaction(database):
                        ledger.release(database, **json.loads(left))
                break
            with transaction(database):
                ledger.write(database, piece)
            with contextlib.suppress(BrokenPipeError):  # it has gone, and left something to write
                link.say(b"A")
        database.close()


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # meant for the daemon, which still needs this process for a while
    os.umask(0o077)
    link = Link(socket.socket(fileno=int(sys.argv[1])))
    try:
        write_journal(link)
    except JournalError as error:
        with contextlib.suppress(OSError):
            link.say(b"E", str(error).encode())
        sys.exit(1)
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)


if __name__ == "__main__":
    main()
