"""The daemon of the beanstalk protocol, which chaos kills, and which starts again with the jobs it had."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from typing import TYPE_CHECKING, NamedTuple

from chaos.killable import KillableDaemon
from counterd.protocols.beanstalk import wire
from history.beanstalk import Restarted
from kit import daemon
from kit.jobs import Peer, writer_of, writers
from kit.machine import LONG_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

DIALECT = "beanstalk"
FAILS = r"the journal cannot be written|the journal process exited"  # logged because of faults
FILLED = b"fill"  # the tube of the client that uses all memory
JOBS_MEMORY = "2M"  # so little that one client can use all of it


class Listing(NamedTuple):
    """The ids of all existing jobs, listed when no other client was connected."""

    asked_ns: int
    ended_ns: int
    ids: frozenset[int]


@contextlib.contextmanager
def asking(path: str) -> Iterator[Peer]:
    """A connection to the beanstalk protocol at a Unix socket."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connected:
        connected.settimeout(LONG_S)
        connected.connect(path)
        yield Peer(connected)


def clear(path: str) -> None:
    """Deletes the jobs of the client that used all memory."""
    with asking(path) as peer:
        peer.ask(wire.clear_tube(FILLED))


def look(peer: Peer) -> Listing:
    asked_ns = time.monotonic_ns()
    ids = frozenset(int(job["id"]) for job in peer.jobs())
    return Listing(asked_ns, time.monotonic_ns(), ids)


class BeanstalkDaemon(KillableDaemon):
    dialect = DIALECT
    ports = {"beanstalk.port": DIALECT}  # noqa: RUF012 - nobody changes it
    restarted = (Restarted(), ("OK", None, b""))

    def __init__(self, directory: Path, settings: Mapping[str, object], program: Sequence[str]) -> None:
        journal = {"beanstalk.journal": directory / "journal", "beanstalk.memory_limit": JOBS_MEMORY}
        super().__init__(directory, {**settings, **journal}, program)

    def __enter__(self) -> BeanstalkDaemon:
        self._begin()
        return self

    # ---- faults ----

    def crash(self, with_writer: bool) -> None:
        """Kills it, perhaps with the process that writes its journal, and starts it again.

        Not while the journal cannot be written: then acknowledged changes get to the disk later.
        """
        daemon.wait_until(lambda: not self.figure("journal_failing"), "the journal can be written", LONG_S)
        started_ns = time.monotonic_ns()
        if with_writer:
            self.kill_writer()
        self._die(started_ns)

    def kill_writer(self) -> None:
        signal_to(self.writer(), signal.SIGKILL)

    def stop_writer(self) -> int:
        """Stops the journal's process. Returns its pid, for go_on()."""
        writer = self.writer()
        signal_to(writer, signal.SIGSTOP)
        return writer

    def go_on(self, writer: int) -> None:
        signal_to(writer, signal.SIGCONT)

    def fill_disk(self) -> None:
        """Limits the size of files to that of the journal's now."""
        sizes = [path.stat().st_size for path in self.directory.glob("journal*") if not path.name.endswith("-ballast")]
        self._limit_files(max(sizes))

    def empty_disk(self) -> None:
        self._limit_files(resource.RLIM_INFINITY)

    def writer(self) -> int:
        """The pid of the process that writes the journal."""
        return writer_of(self.counterd, LONG_S)

    def _limit_files(self, size: int) -> None:
        """Sets the limit for the daemon too, as a new writer inherits it."""
        for pid in (self.counterd.pid, *writers(self.counterd)):
            with contextlib.suppress(ProcessLookupError):
                _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, most))

    # ---- checks ----

    def errors(self) -> list[str]:
        return self.complaints(FAILS)


def signal_to(writer: int, number: signal.Signals) -> None:
    """Sends the signal, unless the process has ended: the daemon replaces one that cannot write."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(writer, number)
