"""The beanstalk protocol's journal on small, full disks, with daemons that are killed there.

Acknowledged jobs exist after the kill, and deleted ones do not; deleting jobs makes room for others."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.beanstalk import wire
from functional.test_beanstalk_journal import Peer, running
from kit.daemon import wait_until
from kit.jobs import writer_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BODY = b"x" * 10_000


@contextlib.contextmanager
def small_disk(at: Path, size: str) -> Iterator[Path]:
    """Mounts a disk of that size. Yields a path on it."""
    at.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", at], check=True)
    try:
        yield at / "jobs"
    finally:
        subprocess.run(["umount", "--lazy", at], check=True)


@pytest.fixture(params=["4m", "24m"])
def path(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", request.param) as path:
        yield path


def put_until_full(peer: Peer) -> list[int]:
    """Puts jobs until one is refused. Returns the ids of the others."""
    ids: list[int] = []
    while True:
        (reply,) = peer.ask(wire.put(BODY))
        if reply == b"INTERNAL_ERROR":
            return ids
        assert reply.startswith(b"INSERTED ")
        ids.append(int(reply.split()[1]))


def put_again(peer: Peer) -> int:
    """Puts a job as soon as there is room. Returns its id."""

    def put() -> int:
        (reply,) = peer.ask(wire.put(BODY))
        return 0 if reply == b"INTERNAL_ERROR" else int(reply.split()[1])

    return int(wait_until(put, "jobs can be put"))


@contextlib.contextmanager
def killed(path: Path, **settings: Any) -> Iterator[Peer]:
    """A daemon that is killed at the end of the block, with the process that writes its journal."""
    with running_at(path, status=-signal.SIGKILL, **settings) as (counterd, peer):
        yield peer
        os.kill(writer_of(counterd), signal.SIGKILL)
        counterd.send_signal(signal.SIGKILL)
        counterd.ended()


@contextlib.contextmanager
def running_at(path: Path, **settings: Any) -> Iterator[Any]:
    """As running(), with the rest of the daemon's files on another disk."""
    link = path.parent.parent / "jobs"
    if not link.is_symlink():
        link.symlink_to(path)
    with running(link, **settings) as found:
        yield found


@pytest.mark.needs("mounts")
def test_acknowledged_changes_on_a_full_disk_outlive_a_kill(path: Path) -> None:
    total = os.statvfs(path.parent).f_blocks * os.statvfs(path.parent).f_frsize
    with killed(path) as peer:
        ids = put_until_full(peer)
        assert len(ids) * len(BODY) > total * 0.6
        deleted, buried, kept = ids[: len(ids) // 2], ids[-1], ids[len(ids) // 2 : -1]
        assert set(peer.ask(*(wire.delete(id_) for id_ in deleted))) == {b"DELETED"}
        assert peer.ask(wire.reserve_job(buried), wire.bury(buried, 7))[1] == b"BURIED"
        new = put_again(peer)
    with killed(path) as peer:
        assert set(peer.ask(*(wire.peek(id_) for id_ in deleted))) == {b"NOT_FOUND"}
        assert peer.ask(*(wire.peek(id_) for id_ in kept)) == [b"FOUND %d %d" % (id_, len(BODY)) for id_ in kept]
        assert peer.ask(wire.peek_next("buried")) == [b"FOUND %d %d" % (buried, len(BODY))]
        again = [new, *put_until_full(peer)]
        assert len(again) * len(BODY) > total * 0.2
        everything = [*kept, buried, *again]
        assert set(peer.ask(*(wire.delete(id_) for id_ in everything))) == {b"DELETED"}
        last = put_again(peer)
    with running_at(path) as (counterd, peer):
        assert counterd.lines("restored 1 records")
        assert peer.ask(wire.delete(last)) == [b"DELETED"]


@pytest.mark.needs("mounts")
def test_a_disk_filled_by_other_files(path: Path) -> None:
    """Only the ballast is left, also at a start; in the end nothing at all, until there is room again."""
    with killed(path) as peer:
        peer.ask(*[wire.put(BODY)] * 50)
        other = path.with_name("other")
        with other.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        assert set(peer.ask(*(wire.delete(id_) for id_ in range(1, 11)))) == {b"DELETED"}
    with running_at(path, status=0) as (counterd, peer):
        assert counterd.lines("restored 40 records")
        assert peer.ask(wire.delete(11), wire.put(b"x" * 60_000 * 1))[0] == b"DELETED"
        other.unlink()
        put_again(peer)
        unlimited = resource.prlimit(counterd.pid, resource.RLIMIT_FSIZE)
        for pid in (counterd.pid, writer_of(counterd)):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, unlimited[1]))
        assert peer.ask(wire.delete(12)) == [b"INTERNAL_ERROR"]
        counterd.wait_for_log("the journal cannot be written")
        assert peer.ask(wire.delete(13), wire.reserve_job(13)) == [b"INTERNAL_ERROR", b"RESERVED 13 10000"]
        resource.prlimit(counterd.pid, resource.RLIMIT_FSIZE, unlimited)
        counterd.wait_for_log("can be written again")
        assert peer.ask(wire.delete(13), wire.peek(12)) == [b"DELETED", b"NOT_FOUND"]
