"""Journal files that are moved, deleted or truncated while they are open, and which changes do no harm."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from counterd.journal.database import BUSY_MS, JournalError
from counterd.journal.watch import Watch, see
from counterd.journal.writer import Writer
from counterd.protocols.beanstalk import _journal

if TYPE_CHECKING:
    from collections.abc import Iterator

BACK = "move the journal back"
TRUNCATED = (
    "the file was truncated; its jobs are in memory until counterd ends: "
    "docs/operations.md, section CounterdJournalFails"
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    made = Writer(str(path), "beanstalk", is_synced=True)
    write(made, 1)
    assert made.look() == ""
    yield made
    made.close()


def write(writer: Writer, *ids: int) -> None:
    jobs = [(id_, "t", 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, None, 0, None, 0, b"x" * 5000) for id_ in ids]
    assert writer.write(_journal.packed(jobs))


def end(writer: Writer) -> None:
    """Closes the database and unlocks the file, as the end of the process does."""
    writer.close()
    fcntl.flock(writer.watch._locked, fcntl.LOCK_UN)


def ids(path: Path) -> list[int]:
    """The jobs in a copy of the database alone, as if the machine had stopped now."""
    copy = path.with_name("copy")
    shutil.copy(path, copy)
    for suffix in ("-wal", "-shm"):
        if (beside := Path(f"{path}{suffix}")).exists():
            shutil.copy(beside, f"{copy}{suffix}")
    with contextlib.closing(sqlite3.connect(copy)) as database:
        return [row[0] for row in database.execute("SELECT id FROM jobs ORDER BY id")]


def test_a_moved_file_is_reported_until_it_is_back(writer: Writer, path: Path) -> None:
    path.rename(path.with_name("away"))
    assert writer.look() == f"{path}: the file is gone; {BACK}"
    path.with_name("away").rename(path)
    assert writer.look() == ""
    write(writer, 2)
    assert ids(path) == [1, 2]


def test_a_moved_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    writer = Writer(str(tmp_path / "folder" / "jobs"), "beanstalk", is_synced=True)
    (tmp_path / "folder").rename(tmp_path / "away")
    assert writer.look() == f"{tmp_path}/folder/jobs: the file is gone; {BACK}"
    (tmp_path / "folder").touch()
    assert writer.look() == f"{tmp_path}/folder/jobs: the file is gone; {BACK}"
    writer.close()


def test_another_file_in_its_place_is_reported(writer: Writer, path: Path) -> None:
    path.rename(path.with_name("away"))
    shutil.copy(path.with_name("away"), path)
    assert writer.look() == f"{path}: another file is in the place of the journal: move that one away; {BACK}"


@pytest.mark.parametrize("all_of_it", [False, True], ids=["alone", "with the files beside it"])
def test_a_deleted_file_can_be_saved_as_the_message_says(writer: Writer, path: Path, all_of_it: bool) -> None:
    for suffix in ("", "-wal", "-shm") if all_of_it else ("",):
        Path(f"{path}{suffix}").unlink()
    said = writer.look()
    assert said.startswith(f"{path}: the file is gone; it was deleted, but it is still open: `cp /proc/")
    _, source, target = said.split("`")[1].split()
    shutil.copy(source, target)
    assert ids(path) == [1]
    assert writer.look().startswith(f"{path}: another file is in the place of the journal: move that one away; it was")


@pytest.mark.parametrize("size", [0, 50, 4096])
def test_a_truncated_file_is_reported(writer: Writer, path: Path, size: int) -> None:
    write(writer, *range(2, 50))
    writer.database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert writer.look() == ""
    os.truncate(path, size)
    assert writer.look() == f"{path}: {TRUNCATED}"
    os.truncate(path, 1 << 20)  # zeros are not what it had
    assert writer.look() == f"{path}: {TRUNCATED}"


def test_a_vacuum_truncates_without_loss(writer: Writer, path: Path) -> None:
    write(writer, *range(2, 200))
    writer.write(_journal.packed([]))
    writer.database.execute("DELETE FROM jobs WHERE id > 2")
    writer.database.execute("DELETE FROM bodies WHERE id > 2")
    writer.database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert writer.look() == ""
    before = writer.watch.seen
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("VACUUM")
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert path.stat().st_size < before.size
    end(writer)
    again = Writer(str(path), "beanstalk", is_synced=True, before=before)  # the last process saw it before that
    assert again.look() == ""
    again.close()


def test_the_watched_size_grows_with_the_file(writer: Writer) -> None:
    before = writer.watch.seen
    write(writer, *range(2, 200))
    writer.database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    assert writer.look() == ""
    assert writer.watch.seen.size > before.size


@pytest.mark.parametrize("suffixes", [("-wal",), ("-shm",), ("-wal", "-shm")])
def test_deleted_wal_files_are_created_again(writer: Writer, path: Path, suffixes: tuple[str, ...]) -> None:
    for suffix in suffixes:
        Path(f"{path}{suffix}").unlink()
    write(writer, 2)
    assert writer.look() == ""
    assert ids(path) == [1, 2]
    write(writer, 3)
    assert ids(path) == [1, 2, 3]


def test_a_wal_deleted_while_another_program_reads_is_reported(writer: Writer, path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN")
        assert other.execute("SELECT count(*) FROM jobs").fetchall() == [(1,)]
        write(writer, 2)
        Path(f"{path}-wal").unlink()
        said = f"{path}: the files beside it were deleted, and another program reads it: end that program"
        assert writer.look() == said
        (patience,) = writer.database.execute("PRAGMA busy_timeout").fetchone()
        assert patience == BUSY_MS, "as before"
    assert writer.look() == ""
    assert ids(path) == [1, 2]


# ---- the next process ----


def test_the_next_writer_creates_no_other_file(writer: Writer, path: Path) -> None:
    before = writer.watch.seen
    path.rename(path.with_name("away"))
    with pytest.raises(JournalError, match=f"^{path}: the file is gone; move it back$"):
        Writer(str(path), "beanstalk", is_synced=True, before=before)
    assert not path.exists()


@pytest.mark.parametrize("what", ["another", "truncated"])
def test_the_next_writer_uses_no_other_file(writer: Writer, path: Path, what: str) -> None:
    end(writer)
    before = writer.watch.seen
    if what == "another":
        path.rename(path.with_name("away"))
        shutil.copy(path.with_name("away"), path)
    else:
        os.truncate(path, 0)
    size = path.stat().st_size
    another = "another file is in the place of the journal: .*, or restart counterd to use this file"
    with pytest.raises(JournalError, match=another if what == "another" else TRUNCATED):
        Writer(str(path), "beanstalk", is_synced=True, before=before)
    assert path.stat().st_size == size


def test_the_wal_is_found_if_the_path_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "jobs")
    writer = Writer(str(tmp_path / "link"), "beanstalk", is_synced=True)
    assert not writer.watch.has_lost_log()
    (tmp_path / "folder" / "jobs-wal").unlink()
    assert writer.watch.has_lost_log()
    (tmp_path / "link").unlink()
    assert writer.look() == f"{tmp_path}/link: the file is gone; {BACK}"
    writer.close()


def test_the_watch_keeps_device_inode_and_size(path: Path) -> None:
    path.write_bytes(b"12345")
    with path.open("rb") as file:
        status = path.stat()
        watch = Watch(str(path), file.fileno(), None)
        assert watch.seen == see(status) == (status.st_dev, status.st_ino, 5)
