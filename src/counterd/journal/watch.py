"""Notices what becomes of the files of a journal while they are open: deleted, moved, replaced or truncated.

Floor: side (ARCHITECTURE.md). SQLite does not notice: it goes on with the files that it has open, and what it writes
would be lost with the end of the process. A lost log (`-wal`) can be made again from what is open; a lost database
cannot, because another file may be in its place on purpose.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

HEADER_SIZE = 100  # of an SQLite database
PAGE_SIZE, PAGES = slice(16, 18), slice(28, 32)  # in the header, big-endian
BESIDE = ("-wal", "-shm")
GONE = "the file is gone"


class Seen(NamedTuple):
    """What was seen of a file: enough to tell it from any other, and whether it has become shorter."""

    device: int
    inode: int
    size: int


class Watch:
    """Looks at the files of a journal.

    path: the journal. locked: its descriptor. before: what another process saw last of the same journal, if one did.
    seen: what the last look saw.
    """

    def __init__(self, path: str, locked: int, before: Seen | None) -> None:
        self.seen = before or see(os.fstat(locked))
        self.is_truncated = False
        self._path = Path(path)
        self._locked = locked
        files = self._path.resolve()  # SQLite puts the others beside that one
        self._paths = [Path(f"{files}{suffix}") for suffix in BESIDE]
        self._beside: list[tuple[int, int] | None] = []

    def loss(self) -> str:
        """Returns what has happened to the database, and what to do, for people; or ""."""
        try:
            found = see(self._path.stat())
        except (FileNotFoundError, NotADirectoryError):
            return f"{self._path}: {GONE}; {self._remedy()}"
        if found[:2] != self.seen[:2]:
            return f"{self._path}: another file is in the place of the journal: move that one away; {self._remedy()}"
        if found.size < self.seen.size and self._lacks_pages(found.size):
            self.is_truncated = True  # for good: whatever fills the file now is not what it had
        if self.is_truncated:
            return (
                f"{self._path}: the file was truncated; its jobs are in memory until counterd ends: "
                "docs/operations.md, section CounterdJournalFails"
            )
        self.seen = found
        return ""

    def begin(self) -> None:
        """Called when the database is open: remembers the files beside it."""
        self._beside = self._look_beside()

    def has_lost_log(self) -> bool:
        """Returns whether a file beside the database is not the one that is open."""
        return self._beside != self._look_beside()

    def _look_beside(self) -> list[tuple[int, int] | None]:
        found: list[tuple[int, int] | None] = []
        for path in self._paths:
            try:
                status = path.stat()
            except FileNotFoundError:
                found.append(None)
            else:
                found.append((status.st_dev, status.st_ino))  # not the size: SQLite truncates them itself
        return found

    def _remedy(self) -> str:
        locked = os.fstat(self._locked)
        if see(locked)[:2] != self.seen[:2]:  # this process began when the journal was lost already
            return "move the journal back, or restart counterd to use this file, without jobs that are only in memory"
        if locked.st_nlink:
            return "move the journal back"
        saved = f"`cp /proc/{os.getpid()}/fd/{self._locked} {self._path}` saves it; then restart counterd"
        return f"it was deleted, but it is still open: {saved}"

    def _lacks_pages(self, size: int) -> bool:
        """Returns whether the file is shorter than its header says, which knows of a VACUUM."""
        header = os.pread(self._locked, HEADER_SIZE, 0)
        page_size, pages = (int.from_bytes(header[place], "big") for place in (PAGE_SIZE, PAGES))
        return len(header) < HEADER_SIZE or size < page_size * pages


def see(status: os.stat_result) -> Seen:
    return Seen(status.st_dev, status.st_ino, status.st_size)
