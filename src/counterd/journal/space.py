"""The space that a journal needs when the disk is full: a ballast, which is given up then, and taken again.

Floor: side (ARCHITECTURE.md). The ballast is a file beside the journal whose space is allocated, but not used. It stays
when the daemon stops, so that the daemon can start again on a full disk.

Its size: to write on a full disk, the journal needs space for

- the checkpoint of what the write-ahead log has. This log gets as large as CHECKPOINT_PART of the disk, at most
  CHECKPOINT_MAX, and one piece (256 KiB of rows, with their waste twice that). Only pages that are new make the
  database grow, so it grows by no more than that, and then the log is cut to nothing;
- after that, a transaction of rows_max() rows: each can change a leaf of the table of jobs and its two neighbours, two
  leaves of other tables, a page above them and a page of the list of free pages. These pages exist in the database, so
  the checkpoint after the transaction needs no space.

So half of the ballast is for each. On a disk of 128 MiB or more these are 8 MiB each.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

PAGE_SIZE = 4096
BALLAST_MAX, BALLAST_PART = 16 << 20, 8
CHECKPOINT_MAX, CHECKPOINT_PART = 8 << 20, 64
ROW_SIZE = 8 * PAGE_SIZE  # of the log, for a row that is changed or deleted
MODE = 0o600


class Ballast:
    """The ballast of the journal in the file `path`. held: bytes that it has now."""

    def __init__(self, path: str) -> None:
        journal = Path(path).resolve()  # the other files of SQLite are beside that, too
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._file = os.open(f"{journal}-ballast", flags, MODE)
        self._directory = journal.parent
        found = os.statvfs(self._directory)
        disk = found.f_blocks * found.f_frsize
        self.size = whole_pages(min(BALLAST_MAX, disk // BALLAST_PART))
        self.checkpoint_pages = max(1, min(CHECKPOINT_MAX, disk // CHECKPOINT_PART) // PAGE_SIZE)
        self.held = 0

    def free(self) -> int:
        """Returns how many bytes of the disk are free, without the ballast."""
        found = os.statvfs(self._directory)
        return found.f_bavail * found.f_frsize

    def take(self) -> None:
        """Takes the space, or as much of it as there is."""
        size = self.size
        while self.held < size:
            with contextlib.suppress(OSError):
                os.posix_fallocate(self._file, 0, size)
                self.held = size
                return
            os.ftruncate(self._file, self.held)  # some file systems keep what was allocated before the error
            size = self.held + whole_pages((size - self.held) * 7 // 8)

    def give_up(self) -> None:
        """Leaves the space to the journal."""
        os.ftruncate(self._file, 0)
        self.held = 0

    def rows_max(self) -> int:
        """Returns how many rows can be changed in one transaction with the space of the ballast."""
        return max(1, self.size // 2 // ROW_SIZE)


def whole_pages(size: int) -> int:
    return size // PAGE_SIZE * PAGE_SIZE
