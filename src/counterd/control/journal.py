"""The daemon's side of the journal process. The daemon sends a piece of the journal, and the next piece when the
process has written the last one.

Floor 4 (ARCHITECTURE.md). supervisor.py starts and replaces the process. A new process gets the unwritten piece again.
While the journal cannot be written, the store refuses requests whose reply would promise that a change is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from counterd.control.config.loading import ConfigError
from counterd.control.parts import Part
from counterd.control.process.child import SLOWEST, Kind
from counterd.control.process.supervisor import Supervisor
from counterd.ipc import PIECE_MAX, Frames, frame

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from counterd.contract import JournaledStore, JournalSource, ProtocolSpec
    from counterd.control.process.child import Child
    from counterd.net.driver import Driver

log = structlog.get_logger()

KIND = Kind("journal", "counterd.journal", 1 << 20)
PATIENCE_S = 5.0  # time limit for writing a piece, besides its size / SLOWEST; then the journal counts as failing
CHECK_S = 0.01
OTHERS = stat.S_IRGRP | stat.S_IWGRP | stat.S_IROTH | stat.S_IWOTH
PROGRESS_S = 1.0  # between two lines of the log


class JournalWriter(Part):
    """Writes the journal of one store. The order of calls is: restore(), then turn() in each turn of the driver, then
    finish() and stop().

    values: the values of the settings, by key. report: called with a cause and a sentence, as in net.server.
    failing: why the journal cannot be written now, or has no room, or "". restored: how many records were restored.
    """

    def __init__(
        self,
        spec: ProtocolSpec,
        values: Mapping[str, Any],
        store: JournaledStore,
        driver: Driver,
        report: Callable[[str, str], None],
    ) -> None:
        assert spec.journal is not None
        self.failing = ""
        self.restored = 0
        self._full = ""  # why there is no room for new records, or ""
        self._lost = ""  # what has happened to the file, or ""
        self._seen: Any = None  # what the last process saw last of the file
        self._is_refused = False  # the piece could not be written: it has to be renewed before it is sent again
        self._protocol = spec.name
        self._source: JournalSource = importlib.import_module(spec.journal.source)
        self._path = values[spec.journal.path]
        self._is_synced = values[spec.journal.sync] != "never"
        self._store = store
        self._driver = driver
        self._report = report
        self._loop = asyncio.get_running_loop()
        self._supervisor = Supervisor(KIND, [], lambda: JournalConnection(self), report)
        self._connection: JournalConnection | None = None
        self._piece: tuple[int, bytes] | None = None  # the piece that is not written yet
        self._sent = 0.0  # when the piece was sent
        self._patience: asyncio.TimerHandle | None = None  # checks the current piece, or a later one
        self._begun: asyncio.Future[None] = self._loop.create_future()
        self._closed = asyncio.Event()
        self._count = 0
        self._said = 0.0

    async def restore(self) -> None:
        """Starts the journal process, and restores the store from the journal. Raises ConfigError."""
        self._said = self._loop.time()
        log.info(f"reading the journal {self._path}")
        self._warn_of_mode()
        self._supervisor.start()
        await asyncio.shield(self._begun)
        if self._count:
            log.info(f"restored {self.restored} records from the journal {self._path}")

    def turn(self, now_ns: int) -> None:
        """Sends the next changes to the journal process, if it has written the last piece.

        The driver of the store calls this in each turn.
        """
        if self._piece is not None and self._is_refused:
            renewed = self._source.renew(self._store, self._piece[1], now_ns)
            if renewed is not None:
                self._send((self._piece[0], renewed))
        elif self._piece is None and self._begun.done():
            piece = self._source.take(self._store, now_ns)
            if piece is not None:
                self._send(piece)

    async def finish(self, timeout: float) -> None:
        """Waits until all changes are on disk and the journal process has closed its file.

        timeout: after how many seconds without a write finish() gives up.
        """
        if not self._begun.done():
            return
        self._source.hurry(self._store)
        least = self._behind()
        self._said = self._loop.time()
        until = self._said + timeout
        while (behind := self._behind()) or self._store.next_deadline() == 0:
            now = self._loop.time()
            if behind < least:
                least, until = behind, now + timeout
            elif now > until:
                text = f"stopping, although {behind} changes are not in the journal {self._path}"
                log.warning(text, failing=self.failing)
                return
            if now - self._said > PROGRESS_S:
                self._said = now
                log.info(f"writing the journal {self._path}: {behind} changes remain")
            self._driver.wake()
            await asyncio.sleep(CHECK_S)
        until = self._loop.time() + timeout
        self._supervisor.release()
        if self._connection is not None:
            self._connection.send(b"")
            self._connection.send(json.dumps(self._source.end(self._store)).encode())
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._closed.wait(), until - self._loop.time())

    def stop(self) -> None:
        """Ends the journal process."""
        if self._patience is not None:
            self._patience.cancel()
        self._supervisor.stop()

    # ---- called by the connection ----

    def hello(self) -> bytes:
        """Returns the first frame for a new journal process."""
        told = {
            "protocol": self._protocol,
            "path": self._path,
            "is_synced": self._is_synced,
            "is_new": not self._begun.done(),
            "is_full": bool(self._full),
            "seen": self._seen,
        }
        return json.dumps(told).encode()

    def on_count(self, count: int) -> None:
        """Called with the number of records that the journal process will send."""
        self._count = count

    def on_piece(self, piece: bytes) -> None:
        """Restores the records in a piece of the journal. Raises ConfigError."""
        try:
            self.restored += self._source.restore(self._store, piece, time.monotonic_ns())
        except (ValueError, MemoryError) as error:
            raise ConfigError([f"{self._path}: {error}"]) from None
        if self._loop.time() - self._said > PROGRESS_S:
            self._said = self._loop.time()
            log.info(f"restoring from the journal {self._path}: {self.restored} of {self._count} records")

    def on_begin(self, connection: JournalConnection, told: dict[str, Any]) -> None:
        """Called when the journal process is ready for pieces."""
        self._connection = connection
        self._lost = ""
        self._closed.clear()
        if not self._begun.done():
            self._source.begin(self._store, **told)
            self._begun.set_result(None)
            self._driver.wake()
        elif self._piece is not None:
            self._renew()
        elif self.failing:
            self.on_written()

    def on_written(self) -> None:
        """Called when the last piece is on disk.

        Also called, without a piece, when the journal can be written again.
        """
        if self.failing != self._full:
            log.info(f"the journal {self._path} can be written again")
            self.failing = self._full
        position, self._piece = self._piece[0] if self._piece is not None else 0, None
        self._store.reach(position, time.monotonic_ns())
        self.turn(time.monotonic_ns())  # now, because the driver sends the replies first
        self._driver.wake()

    def on_full(self, text: str) -> None:
        """Called when there is no room for the last piece. The next one is written in any case."""
        self._report("journal", f"new jobs are refused: {text}")
        self.failing = self._full = text
        self._source.fill(self._store, True, time.monotonic_ns())
        self._renew()

    def on_room(self) -> None:
        """Called when there is room again."""
        log.info(f"the journal {self._path} has room again")
        if self.failing == self._full:
            self.failing = ""
        self._full = ""
        self._source.fill(self._store, False, time.monotonic_ns())

    def on_seen(self, seen: Any) -> None:
        """Called with what the journal process has seen of the file, for the next process."""
        self._seen = seen

    def on_lost(self, text: str) -> None:
        """Called when the file was deleted, moved, replaced or truncated, and without a text when it is there again."""
        self._lost = text
        if text:
            self._fail(text)
        elif self._piece is None:
            self.on_written()

    def on_error(self, text: str) -> None:
        """Called when the journal process reports an error.

        An error ends a restore, because a new process would send all records again.
        """
        if self._begun.done():
            self._fail(text)
        else:
            self._supervisor.release()
            self._begun.set_exception(ConfigError([text]))

    def on_closed(self) -> None:
        """Called when the journal process has ended."""
        self._connection = None
        self._closed.set()
        if not self._begun.done():
            self.on_error(f"{self._path}: the process that reads the journal ended")

    # ---- inside ----

    def _send(self, piece: tuple[int, bytes]) -> None:
        self._piece = piece
        self._is_refused = False
        self._sent = self._loop.time()
        if self._patience is None:
            self._patience = self._loop.call_later(PATIENCE_S, self._look)
        if self._connection is not None:
            self._connection.send(piece[1])

    def _renew(self) -> None:
        """Sends the piece again, without what need not be written any more: now, or in one of the next turns."""
        self._is_refused = True
        self.turn(time.monotonic_ns())
        self._driver.wake()

    def _warn_of_mode(self) -> None:
        """Warns if other users can open the file. The files that SQLite makes beside it get the same mode."""
        with contextlib.suppress(OSError):  # the journal process reports it
            mode = stat.S_IMODE(Path(self._path).stat().st_mode)
            if mode & OTHERS:
                where = f"{self._path}: other users can open the journal"
                log.warning(f"{where}: its mode is {mode:04o}; run chmod 600 {self._path}*")

    def _behind(self) -> int:
        """Returns the number of changes that are not on disk."""
        return int(self._store.snapshot()["journal_behind"])

    def _look(self) -> None:
        """Called after PATIENCE_S. Reports an error if the current piece takes too long."""
        self._patience = None
        if self._piece is None:
            return
        patience = PATIENCE_S + len(self._piece[1]) // SLOWEST
        left = self._sent + patience - self._loop.time()
        if left > 0:
            self._patience = self._loop.call_later(left, self._look)
        elif not self._lost:
            self._fail(f"{self._path}: no write finished for {patience:g} s")

    def _fail(self, why: str) -> None:
        self._report("journal", f"the journal cannot be written: {why}")
        self.failing = why
        if self._begun.done():
            self._source.refuse(self._store, time.monotonic_ns())
            self._driver.wake()


class JournalConnection:
    """The connection to one journal process."""

    def __init__(self, writer: JournalWriter) -> None:
        self._writer = writer
        self._child: Child | None = None
        self._frames = Frames(PIECE_MAX)

    def send(self, body: bytes) -> None:
        """Sends a frame to the journal process, if the process is connected."""
        if self._child is not None:
            self._child.slack = len(body) // SLOWEST
            self._child.write(frame(body, PIECE_MAX))

    # ---- called by the child ----

    def opened(self, child: Child) -> None:
        self._child = child
        self.send(self._writer.hello())

    def received(self, data: bytes) -> None:
        assert self._child is not None
        try:
            for body in self._frames.feed(data):
                self._take(body[:1], body[1:])
        except ConfigError as error:
            self._writer.on_error(str(error))
            self._child.cut("sent records that cannot be restored")
        except (ValueError, LookupError, TypeError) as error:
            self._child.cut(f"sent an invalid message: {type(error).__name__}: {error}")

    def paused(self) -> None:
        pass  # only one piece is sent at a time

    def resumed(self) -> None:
        pass

    def closed(self) -> None:
        self._child = None
        self._writer.on_closed()

    # ---- inside ----

    def _take(self, letter: bytes, body: bytes) -> None:
        if letter == b"A":
            self._writer.on_written()
        elif letter == b"P":
            self._writer.on_piece(body)
        elif letter == b"C":
            self._writer.on_count(json.loads(body))
        elif letter == b"B":
            self._writer.on_begin(self, json.loads(body))
        elif letter == b"F":
            self._writer.on_full(body.decode())
        elif letter == b"R":
            self._writer.on_room()
        elif letter == b"S":
            self._writer.on_seen(json.loads(body))
        elif letter == b"X":
            self._writer.on_lost(body.decode())
        elif letter == b"E":
            self._writer.on_error(body.decode())
        elif letter != b"L":
            raise ValueError(f"unknown message {letter!r}")
