"""The ballast of a journal: disk space that is reserved, freed, and reserved again, as far as there is any."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from counterd.journal.space import BALLAST_MAX, PAGE_SIZE, Ballast

if TYPE_CHECKING:
    from pathlib import Path


def disk_of(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(f_blocks=size // PAGE_SIZE, f_frsize=PAGE_SIZE, f_bavail=3)
    monkeypatch.setattr(os, "statvfs", lambda _path: found)


def test_the_ballast_really_uses_and_frees_space(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "journal")  # the ballast is beside the file, as SQLite's are
    ballast = Ballast(str(tmp_path / "link"))
    file = tmp_path / "journal-ballast"
    for _ in range(2):
        ballast.take()
        assert ballast.held == ballast.size == file.stat().st_size <= file.stat().st_blocks * 512
        assert file.stat().st_mode & 0o777 == 0o600
        ballast.give_up()
        assert (ballast.held, file.stat().st_size) == (0, 0)


@pytest.mark.parametrize(
    ("disk", "sizes"),
    [
        (4 << 20, (512 << 10, 16, 8)),
        (60 << 20, (7680 << 10, 240, 120)),
        (1 << 40, (BALLAST_MAX, 2048, 256)),
        (0, (0, 1, 1)),
    ],
)
def test_the_size_of_the_ballast_follows_that_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: int, sizes: tuple[int, int, int]
) -> None:
    disk_of(disk, monkeypatch)
    ballast = Ballast(str(tmp_path / "journal"))
    assert (ballast.size, ballast.checkpoint_pages, ballast.rows_max()) == sizes
    assert ballast.free() == 3 * PAGE_SIZE


def test_the_ballast_uses_the_available_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_of(4 << 20, monkeypatch)

    def allocate(file: int, start: int, size: int) -> None:
        if size > 100 << 10:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.ftruncate(file, start + size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    ballast = Ballast(str(tmp_path / "journal"))
    ballast.take()
    assert 80 << 10 < ballast.held <= 100 << 10
