"""The beanstalk protocol's journal in a real counterd: killed processes, full disks, damaged files, and copies of a
journal in use."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pwd
import resource
import shutil
import signal
import sqlite3
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.beanstalk import wire
from kit import daemon, needs, nobody
from kit.daemon import PATIENCE, wait_until
from kit.jobs import writer_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.daemon import Daemon

ALONE = {
    "counter.enable": "false",
    "counter.port": "",
    "counter.bind": "",
    "beanstalk.enable": "true",
    "beanstalk.port": "0",
    "beanstalk.bind": "127.0.0.1",
}


class Peer:
    """A connection that sends one command at a time."""

    def __init__(self, counterd: Daemon) -> None:
        self.socket = counterd.connect()
        self.stream = self.socket.makefile("rb")

    def ask(self, *commands: bytes) -> list[bytes]:
        """Returns the first line of each reply."""
        self.socket.sendall(b"".join(commands))
        return [self.reply() for _ in commands]

    def reply(self) -> bytes:
        line = self.stream.readline()
        words = line.split()
        if words and words[0] in (b"RESERVED", b"FOUND", b"OK"):
            self.stream.read(int(words[-1]) + 2)
        return line.rstrip(b"\r\n")

    def close(self) -> None:
        self.stream.close()
        self.socket.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.journal"


@contextlib.contextmanager
def running(path: Path, status: int = 0, **settings: Any) -> Iterator[tuple[Daemon, Peer]]:
    """Runs a daemon with that journal, and opens a connection."""
    keys = {f"beanstalk.{name}": str(value) for name, value in settings.items()}
    with daemon.running(path.parent / "d", {**ALONE, "beanstalk.journal": path, **keys}, status=status) as counterd:
        peer = Peer(counterd)
        try:
            yield counterd, peer
        finally:
            peer.close()


def refused(path: Path, directory: Path) -> str:
    """Returns the error message of a daemon that does not start with that journal."""
    config = directory / "refused.conf"
    config.write_text(daemon.config_text({**ALONE, "beanstalk.journal": path}))
    ended = daemon.run("-c", config)
    assert ended.returncode == 2
    return ended.stderr.strip().splitlines()[-1]


def asked(address: tuple[str, int], what: str) -> tuple[int, str]:
    """Returns an answer of the admin endpoint."""
    with contextlib.closing(http.client.HTTPConnection(*address, timeout=PATIENCE)) as connection:
        connection.request("GET", what)
        response = connection.getresponse()
        return response.status, response.read().decode()


def tool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return daemon.run("journal", *arguments)


# ---- ends ----


def test_acknowledged_changes_outlive_a_kill(path: Path):
    with running(path, status=-signal.SIGKILL) as (counterd, peer):
        assert peer.ask(wire.put(b"1"), wire.put(b"2"), wire.put(b"3", delay=1000), wire.put(b"4")) == [
            b"INSERTED %d" % number for number in (1, 2, 3, 4)
        ]
        assert peer.ask(wire.delete(1), wire.reserve_job(4), wire.bury(4)) == [b"DELETED", b"RESERVED 4 1", b"BURIED"]
        counterd.send_signal(signal.SIGKILL)
        counterd.ended()
    with running(path) as (counterd, peer):
        assert counterd.lines("restored 3 records")
        commands = [wire.peek(1), wire.peek_next("ready"), wire.peek_next("delayed"), wire.peek_next("buried")]
        assert peer.ask(*commands) == [b"NOT_FOUND", b"FOUND 2 1", b"FOUND 3 1", b"FOUND 4 1"]
        (reply,) = peer.ask(wire.put(b"5"))
        assert int(reply.split()[1]) > 4


@pytest.mark.parametrize("sync", ["always", "never", "10000"])
def test_a_clean_end_leaves_the_ballast_and_every_job_ready(path: Path, sync: str):
    with running(path, sync=sync) as (_, peer):
        for _ in range(4):
            peer.ask(*[wire.put(b"x" * 100)] * 5000)
        peer.ask(wire.reserve())
    left = sorted(one.name for one in path.parent.iterdir() if one.name.startswith("jobs"))
    assert left == ["jobs.journal", "jobs.journal-ballast"]
    with running(path) as (counterd, peer):
        assert counterd.lines("restored 20000 records")
        assert peer.ask(wire.reserve()) == [b"RESERVED 1 100"]
        assert peer.ask(wire.put(b"x")) == [b"INSERTED 20001"]
    assert oct(path.stat().st_mode & 0o777) == "0o600"


@pytest.mark.parametrize("sync", ["always", "never", "50"])
def test_the_writer_is_killed_and_replaced(path: Path, sync: str):
    with running(path, sync=sync) as (counterd, peer):
        before = 0
        for number in range(3):
            peer.ask(wire.put(b"%d" % number))
            writer = writer_of(counterd)
            assert writer != before
            before = writer
            os.kill(writer, signal.SIGKILL)
            assert peer.ask(wire.put(b"%d again" % number)) == [b"INSERTED %d" % (2 * number + 2)]
            counterd.wait_for_log("the journal process exited", number + 1)
    with running(path) as (counterd, peer):
        assert counterd.lines("restored 6 records")


def test_a_writer_that_hangs_makes_puts_fail_until_it_goes_on(path: Path):
    with running(path) as (counterd, peer):
        os.kill(writer_of(counterd), signal.SIGSTOP)
        assert peer.ask(wire.put(b"1")) == [b"INTERNAL_ERROR"]
        counterd.wait_for_log("no write finished for 5 s")
        assert peer.ask(wire.put(b"2")) == [b"INTERNAL_ERROR"]
        os.kill(writer_of(counterd), signal.SIGCONT)
        counterd.wait_for_log("can be written again")
        assert peer.ask(wire.put(b"3")) == [b"INSERTED 2"]


def test_a_full_disk_refuses_puts_until_there_is_room(path: Path):
    """Acknowledged jobs stay, and workers go on. Here the process has no room, as with a quota; test_full_disk.py has
    disks."""
    with running(path) as (counterd, peer):
        assert set(peer.ask(*[wire.put(b"x" * 1000)] * 20)) == {b"INSERTED %d" % number for number in range(1, 21)}
        unlimited = resource.prlimit(counterd.pid, resource.RLIMIT_FSIZE)
        room = path.with_name(path.name + "-wal").stat().st_size
        for pid in (counterd.pid, writer_of(counterd)):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, unlimited[1]))
        assert peer.ask(wire.put(b"y" * 60000)) == [b"INTERNAL_ERROR"]
        counterd.wait_for_log("new jobs are refused: .*: the disk is full")
        assert peer.ask(wire.reserve(), wire.delete(1)) == [b"RESERVED 1 1000", b"DELETED"]
        resource.prlimit(counterd.pid, resource.RLIMIT_FSIZE, unlimited)
        counterd.wait_for_log("has room again")
        (reply,) = peer.ask(wire.put(b"again"))
        assert reply.startswith(b"INSERTED")
    with running(path) as (counterd, peer):
        assert counterd.lines("restored 20 records")
        assert peer.ask(wire.peek(1), wire.peek(2)) == [b"NOT_FOUND", b"FOUND 2 1000"]


def test_readiness_and_figures_report_a_full_disk(path: Path):
    settings = {**ALONE, "beanstalk.journal": path, "admin.enable": "true", "admin.bind": "127.0.0.1:0"}
    with daemon.running(path.parent / "d", settings) as counterd:
        (address,) = counterd.served("admin listens on")
        counterd.addresses = counterd.served("beanstalk listens on")
        peer = Peer(counterd)
        peer.ask(wire.put(b"x"))

        def get(what: str) -> tuple[int, str]:
            return asked(address, what)

        wait_until(lambda: get("/readyz") == (200, "ready\n"), "it is ready")
        unlimited = resource.prlimit(counterd.pid, resource.RLIMIT_FSIZE)
        for pid in (counterd.pid, writer_of(counterd)):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
        assert peer.ask(wire.put(b"y" * 60000)) == [b"INTERNAL_ERROR"]
        wait_until(lambda: get("/readyz") == (503, "failing\n"), "it is not ready")
        wait_until(lambda: "counterd_beanstalk_journal_failing 1" in get("/metrics")[1], "the metric tells")
        resource.prlimit(counterd.pid, resource.RLIMIT_FSIZE, unlimited)
        wait_until(lambda: get("/readyz") == (200, "ready\n"), "it is ready again")
        peer.close()


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o602, True)])
def test_a_journal_that_others_can_open_warns(path: Path, mode: int, warned: bool):
    with running(path):
        pass
    path.chmod(mode)
    with running(path) as (counterd, _):
        said = f"WARN.* {path}: other users can open the journal: its mode is {mode:04o}; run chmod 600 {path}\\*"
        assert bool(counterd.lines(said)) is warned, counterd.log


# ---- files that go while it runs ----


def test_a_moved_journal_refuses_puts_until_it_is_back(path: Path):
    away = path.with_name("away")
    settings = {**ALONE, "beanstalk.journal": path, "admin.enable": "true", "admin.bind": "127.0.0.1:0"}
    with daemon.running(path.parent / "d", settings) as counterd:
        (address,) = counterd.served("admin listens on")
        counterd.addresses = counterd.served("beanstalk listens on")
        peer = Peer(counterd)
        assert peer.ask(wire.put(b"1")) == [b"INSERTED 1"]
        path.rename(away)
        counterd.wait_for_log(f"the journal cannot be written: {path}: the file is gone; move the journal back ")
        assert peer.ask(wire.put(b"2"), wire.reserve(), wire.delete(1)) == [
            b"INTERNAL_ERROR", b"RESERVED 1 1", b"INTERNAL_ERROR",
        ]  # fmt: skip
        wait_until(lambda: asked(address, "/readyz") == (503, "failing\n"), "it is not ready")
        away.rename(path)
        counterd.wait_for_log("can be written again")
        assert peer.ask(wire.delete(1), wire.put(b"3")) == [b"DELETED", b"INSERTED 2"]
        wait_until(lambda: asked(address, "/readyz") == (200, "ready\n"), "it is ready")
        assert not counterd.lines("the journal process|no write finished")
        peer.close()
    with running(path) as (counterd, _):
        assert counterd.lines("restored 1 records")


def test_no_put_is_acknowledged_while_the_file_is_moved(path: Path):
    """Not even the put that notices it."""
    with running(path) as (counterd, peer):
        for number in range(1, 4):
            path.rename(path.with_name("away"))
            assert peer.ask(wire.put(b"x")) == [b"INTERNAL_ERROR"]
            path.with_name("away").rename(path)
            counterd.wait_for_log("can be written again", number)


def test_a_deleted_file_is_saved_as_the_log_says(path: Path):
    with running(path) as (counterd, peer):
        assert peer.ask(*[wire.put(b"%d" % number) for number in range(100)])[-1] == b"INSERTED 100"
        for suffix in ("", "-wal", "-shm"):
            Path(f"{path}{suffix}").unlink()
        said = counterd.wait_for_log("the file is gone; it was deleted, but it is still open")
        _, source, target = said.split("`")[1].split()
        shutil.copyfile(source, target)
    with running(path) as (counterd, peer):
        assert counterd.lines("restored 100 records")
        assert peer.ask(wire.peek(100)) == [b"FOUND 100 2"]


def test_a_deleted_wal_loses_nothing(path: Path):
    with running(path, status=-signal.SIGKILL) as (counterd, peer):
        for suffix in ("-wal", "-shm", "-wal"):
            assert set(peer.ask(*[wire.put(b"x")] * 50)) < {b"INSERTED %d" % number for number in range(1, 151)}
            Path(f"{path}{suffix}").unlink()
        assert len(peer.ask(*[wire.put(b"x")] * 100)) == 100
        os.kill(writer_of(counterd), signal.SIGSTOP)  # so that it cannot write more when the daemon is gone
        stopped = writer_of(counterd)
        counterd.send_signal(signal.SIGKILL)
        counterd.process.wait(PATIENCE)
        os.kill(stopped, signal.SIGKILL)
        counterd.ended()
    with running(path) as (counterd, _):
        assert counterd.lines("restored 250 records")


@pytest.mark.parametrize("how", ["moved away", "truncated"])
def test_a_replaced_writer_writes_to_no_other_file(path: Path, how: str):
    away = path.with_name("away")
    with running(path) as (counterd, peer):
        peer.ask(*[wire.put(b"x" * 100)] * 1000)
        writer = writer_of(counterd)
        os.kill(writer, signal.SIGSTOP)
        if how == "moved away":
            path.rename(away)
        else:
            away.write_bytes(path.read_bytes())
            os.truncate(path, 0)
        os.kill(writer, signal.SIGKILL)
        counterd.wait_for_log(f"{path}: the file is gone; move it back" if how == "moved away" else "was truncated")
        assert peer.ask(wire.put(b"y")) == [b"INTERNAL_ERROR"]
        if how == "moved away":
            assert not path.exists()
            away.rename(path)
            counterd.wait_for_log("can be written again")
            assert peer.ask(wire.put(b"z"))[0].startswith(b"INSERTED")
        else:
            assert path.stat().st_size == 0


# ---- files ----


def test_a_journal_is_used_by_one_daemon_at_a_time(path: Path, tmp_path: Path):
    with running(path):
        assert refused(path, tmp_path) == f"{path}: another process is writing this journal"
        assert tool("repair", path).stderr.strip() == f"{path}: another process is writing this journal"


def test_files_that_are_no_journal_are_refused(path: Path, tmp_path: Path):
    path.write_bytes(b"no database" * 1000)
    assert refused(path, tmp_path) == f"{path}: file is not a database"
    path.unlink()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE other (a)")
    assert refused(path, tmp_path) == f"{path}: is a database, but not a journal of counterd"
    path.unlink()
    path.mkdir()
    assert refused(path, tmp_path) == f"{path}: Is a directory"
    assert refused(path / "none" / "x", tmp_path) == f"{path}/none/x: No such file or directory"


def test_another_layout_is_refused(path: Path, tmp_path: Path):
    with running(path):
        pass
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 3")
    assert refused(path, tmp_path) == f"{path}: has layout 3, but this version of counterd reads and writes layout 2"


def test_a_journal_beyond_the_memory_limit_is_refused(path: Path):
    with running(path) as (_, peer):
        peer.ask(*[wire.put(b"x" * 60000)] * 30)
    with (
        pytest.raises(AssertionError, match=r"more jobs than beanstalk\.memory_limit allows"),
        running(path, memory_limit="1M"),
    ):
        pass


def test_a_damaged_journal_is_refused_and_repaired(path: Path, tmp_path: Path):
    with running(path) as (_, peer):
        peer.ask(*[wire.put(b"%d" % number * 100) for number in range(1000)])
    assert tool("check", path).stdout == f"{path}: ok, 1,000 records\n"
    with path.open("r+b") as file:
        file.seek(20 * 4096)
        file.write(os.urandom(4096))
    checked = tool("check", path)
    assert checked.returncode == 1
    assert f"{path}: " in checked.stderr
    assert f"`counterd journal repair {path}` keeps the records that can be read" in refused(path, tmp_path)
    path.chmod(0o640)
    repaired = tool("repair", path)
    assert (repaired.returncode, repaired.stderr) == (1, "")
    assert path.stat().st_mode & 0o777 == 0o640
    kept = int(repaired.stdout.split(":")[1].split()[0])
    assert 900 < kept < 1000
    assert Path(f"{path}.damaged").exists()
    assert tool("check", path).stdout == f"{path}: ok, {kept} records\n"
    with running(path) as (counterd, peer):
        assert counterd.lines(f"restored {kept} records")
        (reply,) = peer.ask(wire.put(b"new"))
        assert int(reply.split()[1]) > 1000


def test_a_journal_with_invalid_rows_is_repaired(path: Path, tmp_path: Path):
    with running(path) as (_, peer):
        peer.ask(wire.put_unique(b"1", b"ended", 1000), wire.delete(1), wire.limit_reserves(b"a", 2, b"b"))
        peer.ask(*[wire.put(b"x")] * 4)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE jobs SET key = 'k' WHERE id < 4")
        database.execute("UPDATE jobs SET id = -7, key = NULL WHERE id = 5")
        database.execute("INSERT INTO limits VALUES ('t', 0, '')")
        database.execute("UPDATE numbers SET value = -1")
        database.commit()
    checked = tool("check", path)
    assert checked.returncode == 1
    assert [line.removeprefix(f"{path}: ") for line in checked.stderr.splitlines()] == [
        "the last id cannot be -1: can't convert negative value to uint64_t",
        "the limit of tube t: its names or its number are impossible",
        "job -7: can't convert negative value to uint64_t",
        "job 3: another job has the same key k",
    ]
    assert f"`counterd journal repair {path}` keeps the records that can be read" in refused(path, tmp_path)
    assert tool("repair", path).stdout == (
        f"{path}: 3 records kept, 4 parts of the file could not be read; the old file is now {path}.damaged\n"
    )
    assert tool("check", path).stdout == f"{path}: ok, 3 records\n"
    with running(path) as (_, peer):
        assert peer.ask(wire.put_unique(b"x", b"ended"), wire.put_unique(b"x", b"k")) == [b"EXISTS 1", b"EXISTS 2"]
        assert peer.ask(wire.peek(2), wire.peek(3), wire.peek(4)) == [b"FOUND %d 1" % number for number in (2, 3, 4)]


def test_a_truncated_journal_is_repaired(path: Path, tmp_path: Path):
    with running(path) as (_, peer):
        peer.ask(*[wire.put(b"x" * 500)] * 500)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2 + 100)
    assert f"`counterd journal repair {path}` keeps the records that can be read" in refused(path, tmp_path)
    repaired = tool("repair", path)
    assert (repaired.returncode, repaired.stderr) == (1, "")
    kept = int(repaired.stdout.split(":")[1].split()[0])
    assert 0 < kept < 500
    assert tool("check", path).stdout == f"{path}: ok, {kept} records\n"


def test_a_journal_with_a_damaged_root_page_keeps_its_other_tables(path: Path, tmp_path: Path):
    """All pages of the jobs' table are found through that page: the repair ends, and keeps the rest."""
    with running(path) as (_, peer):
        peer.ask(wire.limit_reserves(b"a", 2, b"b"), *[wire.put(b"x" * 500)] * 100)
    with contextlib.closing(sqlite3.connect(path)) as database:
        ((page,),) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'jobs'")
    with path.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    assert f"`counterd journal repair {path}` keeps the records that can be read" in refused(path, tmp_path)
    assert tool("repair", path).stdout == (
        f"{path}: 0 records kept, 1 part of the file could not be read; the old file is now {path}.damaged\n"
    )
    with running(path) as (_, peer):
        assert peer.ask(wire.peek(1), wire.put(b"x")) == [b"NOT_FOUND", b"INSERTED 101"]


def test_a_journal_with_changed_tables_is_refused(path: Path, tmp_path: Path):
    with running(path):
        pass
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("ALTER TABLE jobs DROP COLUMN keep")
    wrong = f"{path}: differs from what counterd creates: jobs is missing or different"
    assert refused(path, tmp_path) == wrong
    for command in ("check", "dump", "repair"):
        done = tool(command, path)
        assert (done.returncode, done.stderr) == (1, f"{wrong}\n")


def test_a_journal_with_invalid_names_is_repaired(path: Path, tmp_path: Path):
    with running(path) as (_, peer):
        peer.ask(*[wire.put(b"x")] * 3)
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("UPDATE jobs SET tube = CAST(x'61ff' AS TEXT) WHERE id = 1")
        database.execute("UPDATE jobs SET key = x'62ff' WHERE id = 2")
        database.commit()
    dumped = [json.loads(line) for line in tool("dump", path).stdout.splitlines()]
    assert [(job["id"], job["tube"]) for job in dumped] == [(1, "a\udcff"), (2, "default"), (3, "default")]
    assert [(job.get("key"), job.get("key_base64")) for job in dumped] == [(None, None), (None, "Yv8="), (None, None)]
    assert f"`counterd journal repair {path}` keeps the records that can be read" in refused(path, tmp_path)
    checked = tool("check", path)
    assert checked.returncode == 1
    assert [line.split(": ")[1] for line in checked.stderr.splitlines()] == ["job 1", "job 2"]
    assert "1 record kept, 2 parts" in tool("repair", path).stdout


@pytest.mark.needs("sqlite3")
def test_a_copy_made_while_the_daemon_runs_is_complete(path: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    with running(path) as (_, peer):
        peer.ask(*[wire.put(b"x")] * 100)
        subprocess.run([needs.path("sqlite3"), path, f".backup {copy}"], check=True, timeout=PATIENCE)
        assert tool("check", path).returncode == 0
        peer.ask(wire.delete(1))
        dumped = [json.loads(line) for line in tool("dump", path).stdout.splitlines()]
        assert [job["id"] for job in dumped] == list(range(2, 101))
        assert (dumped[0]["tube"], dumped[0]["state"], dumped[0]["body"]) == ("default", "ready", "x")
    with running(copy) as (counterd, _):
        assert counterd.lines("restored 100 records")


@pytest.mark.needs("mounts")
def test_a_journal_belongs_to_the_daemons_user(tmp_path: Path):
    """The daemon is started by root, and the journal process writes as the user that the daemon has become."""
    uid = pwd.getpwnam("nobody").pw_uid
    settings = {**ALONE, "user": "nobody", "beanstalk.journal": f"{nobody.PLACE}/own/jobs"}
    with daemon.running(tmp_path / "d", settings, program=nobody.PROGRAM) as counterd:
        peer = Peer(counterd)
        assert peer.ask(wire.put(b"x")) == [b"INSERTED 1"]
        writer = writer_of(counterd)
        assert Path(f"/proc/{writer}/status").read_text().split("Uid:\t")[1].split()[:4] == [str(uid)] * 4
        for suffix in ("", "-wal", "-shm", "-ballast"):
            status = Path(f"/proc/{writer}/root{nobody.PLACE}/own/jobs{suffix}").stat()
            assert (status.st_uid, status.st_mode & 0o777) == (uid, 0o600)
        peer.close()


@pytest.mark.needs("mounts")
def test_a_folder_that_the_user_cannot_write_is_an_error(tmp_path: Path):
    config = tmp_path / "counterd.conf"
    path = f"{nobody.PLACE}/roots/jobs"
    config.write_text(daemon.config_text({**ALONE, "user": "nobody", "beanstalk.journal": path}))
    ended = daemon.run("-c", config, program=nobody.PROGRAM)
    uid = pwd.getpwnam("nobody").pw_uid
    said = f"{path}: Permission denied: uid {uid} must be able to write to the file and to its folder"
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, said)


def test_the_journal_tool_without_a_journal(path: Path):
    for command in ("check", "dump", "repair"):
        ended = tool(command, path)
        assert (ended.returncode, ended.stderr) == (1, f"{path}: this file does not exist\n")
    assert tool().returncode == 2
