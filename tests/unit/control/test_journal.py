"""The daemon's end of the journal's writer process, which is real; the store and its driver are stand-ins."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import structlog

from counterd.control import journal as module
from counterd.control.config.loading import ConfigError
from counterd.control.journal import JournalWriter
from counterd.protocols.beanstalk import _journal
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable


class Store:
    """Has pieces to write, and records its calls."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.told = 0
        self.reached = 0
        self.refused = self.hurried = 0
        self.is_failing = self.is_full = False
        self.restored: list[bytes] = []
        self.begun: dict[str, int] = {}

    def reach(self, position: int, _now_ns: int) -> None:
        self.reached = max(self.reached, position)
        self.is_failing = False

    def next_deadline(self) -> int:
        return 0 if self.told < len(self.pieces) else -1

    def snapshot(self) -> dict[str, int]:
        return {"journal_behind": len(self.pieces) - self.reached}

    # ---- what its protocol does with it ----

    def restore(self, piece: bytes, _now_ns: int) -> int:
        self.restored.append(piece)
        return len(_journal.rows(piece, 0)[2])

    def begin(self, **told: int) -> None:
        self.begun = told

    def take(self, _now_ns: int) -> tuple[int, bytes] | None:
        if self.told == len(self.pieces):
            return None
        self.told += 1
        return self.told, self.pieces[self.told - 1]

    def hurry(self) -> None:
        self.hurried += 1

    def refuse(self, _now_ns: int) -> None:
        self.refused += 1
        self.is_failing = True

    def fill(self, is_full: bool, _now_ns: int) -> None:
        self.is_full = is_full

    def renew(self, old: bytes, _now_ns: int) -> bytes | None:
        return old

    def end(self) -> dict[str, int]:
        return {"last_id": 70}


def piece(*ids: int) -> bytes:
    return _journal.packed([(id_, "t", 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, None, 0, None, 0, b"x") for id_ in ids])


# This module is a JournalSource.
restore, begin, take, hurry = Store.restore, Store.begin, Store.take, Store.hurry
refuse, fill, renew, end = Store.refuse, Store.fill, Store.renew, Store.end


class Kept:
    """The writer of a journal, its store, and its reports."""

    def __init__(self, path: Path, sync: str = "always") -> None:
        self.store = Store()
        self.reports: list[str] = []
        ability = SimpleNamespace(path="path", sync="sync", source=__name__)
        protocol: Any = SimpleNamespace(name="beanstalk", journal=ability)
        driver: Any = SimpleNamespace(wake=lambda: self.writer.turn(0))
        store: Any = self.store
        self.writer = JournalWriter(
            protocol, {"path": str(path), "sync": sync}, store, driver, lambda _cause, text: self.reports.append(text)
        )

    async def written(self, pieces: int) -> None:
        await until(lambda: self.store.reached == pieces)


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def ids(path: Path) -> list[int]:
    database = sqlite3.connect(path)
    found = [row[0] for row in database.execute("SELECT id FROM jobs ORDER BY id")]
    database.close()
    return found


def test_pieces_are_written_one_after_the_other(path: Path) -> None:
    async def history() -> None:
        kept = Kept(path)
        await kept.writer.restore()
        assert kept.store.begun == {"last_id": 0, "id_limit": _journal.CONSTANTS["ID_BLOCK"]}
        kept.store.pieces += [piece(1), piece(2, 3), piece(4)]
        kept.writer.turn(0)
        kept.writer.turn(0)
        assert kept.store.told == 1
        await kept.written(3)
        await kept.writer.finish(PATIENCE)
        kept.writer.stop()
        assert kept.reports == []

    asyncio.run(history())
    assert ids(path) == [1, 2, 3, 4]
    assert not path.with_name("journal-wal").exists()


def test_written_records_are_restored(path: Path) -> None:
    async def history() -> None:
        for restored, last_id in ((0, 0), (3, 70)):
            kept = Kept(path)
            await kept.writer.restore()
            assert (kept.writer.restored, len(kept.store.restored)) == (restored, int(restored > 0))
            assert kept.store.begun["last_id"] == last_id
            kept.store.pieces.append(piece(7, 8, 9))
            kept.writer.turn(0)
            await kept.writer.finish(PATIENCE)
            kept.writer.stop()

    asyncio.run(history())


def test_a_killed_writer_is_replaced_and_gets_its_piece_again(path: Path) -> None:
    async def history() -> None:
        kept = Kept(path)
        await kept.writer.restore()
        pids = children()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        kept.store.pieces += [piece(1), piece(2)]
        kept.writer.turn(0)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await kept.written(2)
        assert "the journal process exited with status -9" in kept.reports[0]
        assert (kept.store.refused, kept.writer.failing) == (0, "")
        kept.writer.stop()

    asyncio.run(history())
    assert ids(path) == [1, 2]


def children() -> list[int]:
    """The processes that write journals for this one."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [int(pid) for pid in found]


async def hung(path: Path) -> Kept:
    """A writer whose process does not write the piece that it was given."""
    kept = Kept(path)
    await kept.writer.restore()
    for pid in children():
        os.kill(pid, signal.SIGSTOP)
    kept.store.pieces.append(piece(1))
    kept.writer.turn(0)
    return kept


def test_a_hanging_writer_counts_as_failing_until_it_continues(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)

    async def history() -> None:
        kept = await hung(path)
        await until(lambda: kept.writer.failing)
        assert kept.store.refused == 1
        assert kept.writer.failing == f"{path}: no write finished for 0.05 s"
        await kept.writer.finish(0.05)  # gives up
        for pid in children():
            os.kill(pid, signal.SIGCONT)
        await kept.written(1)
        assert kept.writer.failing == ""
        kept.writer.stop()

    asyncio.run(history())


def test_the_timeout_grows_with_the_piece(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLOWEST", 1)

    async def history() -> None:
        kept = await hung(path)
        most = len(piece(1)) + module.PATIENCE_S
        for ago, why in ((most - 60, ""), (most, f"{path}: no write finished for {most:g} s")):
            kept.writer._sent = asyncio.get_running_loop().time() - ago
            kept.writer._look()
            assert kept.writer.failing == why
        kept.writer.stop()

    asyncio.run(history())


def test_a_piece_that_cannot_be_written_is_retried_by_a_new_process(path: Path) -> None:
    """The process that meets the error ends; one of those after it can write."""

    async def history() -> None:
        kept = Kept(path)
        await kept.writer.restore()
        database = sqlite3.connect(path)
        database.execute("ALTER TABLE jobs RENAME TO gone")
        kept.store.pieces.append(piece(1))
        kept.writer.turn(0)
        await until(lambda: kept.writer.failing)
        assert kept.writer.failing == f"{path}: no such table: jobs"
        assert kept.store.refused >= 1
        database.execute("ALTER TABLE gone RENAME TO jobs")
        database.close()
        await kept.written(1)
        assert kept.writer.failing == ""
        kept.writer.stop()

    asyncio.run(history())
    assert ids(path) == [1]


def test_on_a_full_disk_new_records_are_refused_and_removals_written(path: Path) -> None:
    async def history() -> None:
        kept = Kept(path)
        await kept.writer.restore()
        kept.store.pieces.append(piece(1))
        kept.writer.turn(0)
        await kept.written(1)
        kept.store.pieces.append(piece(2))
        kept.writer.turn(0)
        kept.writer.on_full("the disk is full")  # as if it had been said before the piece was written
        assert (kept.store.is_full, kept.writer.failing) == (True, "the disk is full")
        assert kept.reports == ["new jobs are refused: the disk is full"]
        await kept.written(2)
        assert (kept.writer.failing, json.loads(kept.writer.hello())["is_full"]) == ("the disk is full", True)
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        kept.store.pieces.append(piece(3))
        kept.writer.turn(0)
        await until(lambda: not kept.writer.failing)  # the next process has found room
        assert not kept.store.is_full
        await kept.written(3)
        kept.writer.stop()

    asyncio.run(history())


def test_a_failure_without_pieces_ends_when_a_process_runs(path: Path) -> None:
    """No piece would be written to tell the store so, and it would refuse changes for ever."""

    async def history() -> None:
        kept = Kept(path)
        await kept.writer.restore()
        database = sqlite3.connect(path, isolation_level=None)
        ((layout,),) = database.execute("PRAGMA user_version")
        database.execute("PRAGMA user_version = 99")
        for pid in children():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: kept.store.is_failing)
        assert "has layout 99" in kept.writer.failing
        database.execute(f"PRAGMA user_version = {layout}")
        database.close()
        await until(lambda: not kept.writer.failing)
        assert not kept.store.is_failing
        kept.writer.stop()

    asyncio.run(history())


@pytest.mark.parametrize("error", [ValueError("job 7 occurs twice"), MemoryError("there are more jobs than fit")])
def test_records_that_the_store_refuses_end_the_start(path: Path, error: Exception) -> None:
    async def history() -> None:
        kept = Kept(path)
        await kept.writer.restore()
        kept.store.pieces.append(piece(7))
        kept.writer.turn(0)
        await kept.writer.finish(PATIENCE)
        kept.writer.stop()
        again = Kept(path)

        def refuse(_piece: bytes, _now_ns: int) -> int:
            raise error

        again.store.restore = refuse  # type: ignore[method-assign]
        again.writer._source = SimpleNamespace(restore=lambda store, *told: store.restore(*told))  # type: ignore[assignment]
        with pytest.raises(ConfigError, match=f"^{path}: {error}$"):
            await again.writer.restore()
        again.writer.stop()

    asyncio.run(history())


def test_a_reader_process_that_ends_ends_the_start(path: Path) -> None:
    async def history() -> None:
        kept = Kept(path)
        restoring = asyncio.ensure_future(kept.writer.restore())
        while not restoring.done():
            for pid in children():
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.001)
        with pytest.raises(ConfigError, match="the process that reads the journal ended"):
            await restoring
        kept.writer.stop()

    asyncio.run(history())


def test_a_file_that_cannot_be_opened_ends_the_start(path: Path) -> None:
    async def history() -> None:
        kept = Kept(path / "none" / "x")
        with pytest.raises(ConfigError, match="No such file or directory"):
            await kept.writer.restore()
        kept.writer.stop()

    asyncio.run(history())


def test_the_writer_is_told_whether_to_wait_for_the_disk(path: Path) -> None:
    async def history() -> None:
        for sync, is_synced in (("always", True), ("50", True), ("never", False)):
            assert json.loads(Kept(path, sync).writer.hello())["is_synced"] is is_synced

    asyncio.run(history())


def test_restoring_logs_its_progress(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROGRESS_S", -1.0)

    async def history() -> None:
        for _ in range(2):
            kept = Kept(path)
            with structlog.testing.capture_logs() as lines:
                await kept.writer.restore()
            kept.store.pieces.append(piece(*range(1, 1000)))
            kept.writer.turn(0)
            await kept.writer.finish(PATIENCE)
            kept.writer.stop()
        assert [line["event"] for line in lines] == [
            f"reading the journal {path}", f"restoring from the journal {path}: 512 of 999 records",
            f"restoring from the journal {path}: 999 of 999 records", f"restored 999 records from the journal {path}",
        ]  # fmt: skip

    asyncio.run(history())
