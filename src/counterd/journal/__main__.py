"""`python -m counterd.journal LINK DAEMON`: the process that writes a journal. Only the daemon starts it.

Floor: side (ARCHITECTURE.md). LINK is the descriptor of a socket to the daemon. When the daemon closes the socket, the
process writes the pieces that it has received, and ends. If the daemon was killed, and `sync` is not always, only this
process has these pieces.

The frames on this socket are those of ipc.py:
    daemon to child   JSON: {"protocol": name, "path": ..., "is_synced": ..., "is_new": ..., "is_full": ..., "seen":
                      ...}; is_new: the store has to be restored; is_full: the last process has said F, and not R; seen:
                      the last S, or null. Then one piece per frame; the next piece is sent when the last one is
                      written. An empty frame: no more pieces follow. Then the frame is JSON: the arguments of
                      release(), after which the child closes the file
    child to daemon   a letter, then its data.   A: no data; the last piece is written. L: no data; the child is alive.
                      F: a message; there is no room for the last piece. The next one has to be written, whatever is in
                      it. R: no data; there is room again. S: JSON, a Seen (watch.py), when that has changed.
                      X: a message; the file was deleted, moved, replaced or truncated, and the last piece will be
                      written when it is there again: then X follows with an empty message.
                      P: a piece to restore. C: JSON, the number of records that follow. B: JSON, the arguments of
                      begin(); the child is ready. E: an error message; the child ends
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

from counterd.ipc import PIECE_MAX, Frames, frame
from counterd.journal.database import JournalError, explained
from counterd.journal.watch import Seen
from counterd.journal.writer import Writer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LIVES_PERIOD_S = 1  # and between two looks at the files
READ_SIZE = 1 << 20


class Link:
    """The socket to the daemon."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._said = time.monotonic()
        self._seen: Seen | None = None
        self.loss = ""  # what the daemon was told of the files
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", LIVES_PERIOD_S, 0))

    def say(self, letter: bytes, body: bytes = b"") -> None:
        """Sends a frame to the daemon. Raises OSError if the daemon has ended."""
        self._said = time.monotonic()
        self._socket.sendall(frame(letter + body, PIECE_MAX))

    def live(self) -> None:
        """Called while SQLite works, so that the daemon does not take long work for a hang."""
        if time.monotonic() - self._said > LIVES_PERIOD_S:
            with contextlib.suppress(OSError):  # the next say() raises it again
                self.say(b"L")

    def tell(self, writer: Writer) -> bool:
        """Looks at the files, and tells the daemon what is new of them. Returns whether something may be written."""
        loss = writer.look()
        with contextlib.suppress(BrokenPipeError):  # the daemon has ended, but some pieces may not be written
            if writer.watch.seen != self._seen:
                self.say(b"S", json.dumps(writer.watch.seen).encode())
            if loss != self.loss:
                self.say(b"X", loss.encode())
        self._seen, self.loss = writer.watch.seen, loss
        return not loss

    def frames(self) -> Iterator[bytes | None]:
        """Yields the daemon's frames until the daemon has ended. While there are none, sends L and yields None."""
        frames = Frames(PIECE_MAX)
        data = memoryview(bytearray(READ_SIZE))
        while True:
            try:
                size = self._socket.recv_into(data)
            except BlockingIOError:  # no data for LIVES_PERIOD_S
                with contextlib.suppress(BrokenPipeError):  # there may still be something to read
                    self.say(b"L")
                yield None
                continue
            except ConnectionResetError:  # the daemon has ended, and has not read everything
                return
            if size == 0:
                return
            yield from frames.feed(data[:size])


def write_journal(link: Link) -> None:
    """Writes the pieces that the daemon sends. Raises JournalError, or OSError if the daemon has ended."""
    frames = link.frames()
    told = json.loads(next(filter(None, frames)))
    with explained(told["path"]):
        before = told["seen"] and Seen(*told["seen"])
        writer = Writer(told["path"], told["protocol"], is_synced=told["is_synced"], before=before, live=link.live)
        ledger = writer.ledger
        begin: Mapping[str, int] = {}
        if told["is_new"]:
            link.say(b"C", json.dumps(ledger.count(writer.database)).encode())
            for kept in ledger.read(writer.database):
                link.say(b"P", kept)
            begin = writer.update(ledger.reserve)
        link.say(b"B", json.dumps(begin).encode())
        write_pieces(link, writer, frames, told["is_full"])
        writer.close()


def write_pieces(link: Link, writer: Writer, frames: Iterator[bytes | None], is_full: bool) -> None:
    """Writes the pieces that the daemon sends, until it says that no more follow, or has ended."""
    piece = refused = b""  # refused: the last piece, if there was no room for it
    for received in frames:
        if received == b"":
            if left := next(filter(None, frames), None):  # otherwise the daemon has ended
                writer.update(writer.ledger.release, **json.loads(left))
            return
        piece = received or piece
        if not link.tell(writer):
            continue
        if piece:
            is_written = writer.write(piece, is_needed=bool(refused))
            if not link.tell(writer):  # writing it again is the same as writing it once
                continue
            is_full, refused = is_full or not is_written, b"" if is_written else piece
            piece = b""
            with contextlib.suppress(BrokenPipeError):  # the daemon has ended, but some pieces may not be written
                link.say(*(b"A",) if is_written else (b"F", f"{writer.path}: the disk is full".encode()))
        if is_full and not refused and writer.has_room():
            is_full = False
            with contextlib.suppress(BrokenPipeError):
                link.say(b"R")
    if left := piece or refused:  # the daemon has ended, and takes nothing back: some of it may be acknowledged
        writer.write(left, is_needed=True)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # such a signal is meant for the daemon, which still needs this process
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
