"""Measures the server under load: processor time and memory of the processes that listen at its address.

Floor 5 (ARCHITECTURE.md). The processes are found in /proc, before the load begins, by their listening socket. If the
processes run on another machine or in another container, or if this user may not see them, they are not found, and the
report says why. If process 1 has the socket, it is not the server: like systemd, it has opened the socket for another
process.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from counterd.bench.result import ServerUse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from counterd.bench.connection import Place

PROC = Path("/proc")
LISTENS = "0A"  # the state of a listening socket, in /proc/net/tcp
UNIX_LISTENS = "00010000"  # the flags of a listening socket, in /proc/net/unix
LINKS_MAX = 100_000  # the most descriptors that are checked, which takes about a second
TIME_MIN_S = 0.1  # ten ticks; the kernel counts the time of a process in ticks


class Unknown(Exception):
    """The CPU and memory use of the server is not known. The text says why."""


class Watch:
    """Measures the server's processes during a run. The order of calls is: begin(), then end()."""

    def __init__(self, place: Place) -> None:
        self._why = ""
        self._pids: list[int] = []
        self._began = self._cpu = 0.0
        try:
            self._pids = processes(place)
        except Unknown as error:
            self._why = str(error)

    def begin(self) -> None:
        """Begins the measured time, unless it has begun already."""
        if not self._began:
            self._began, (self._cpu, _) = time.monotonic(), self._used()

    def end(self) -> ServerUse:
        """Returns the server's CPU and memory use since begin()."""
        if self._why:
            return ServerUse(unknown=self._why)
        took = time.monotonic() - self._began if self._began else 0.0
        if took < TIME_MIN_S:
            return ServerUse(unknown="the run was too short")
        cpu, memory = self._used()
        if not memory:
            return ServerUse(unknown="the server has ended")
        return ServerUse(cores=max(cpu - self._cpu, 0.0) / took, memory=memory)

    def _used(self) -> tuple[float, int]:
        """Returns the processor time so far, in seconds, and the memory in bytes, of all processes that have not
        ended."""
        cpu, memory = 0.0, 0
        for pid in self._pids:
            try:
                fields = (PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            except OSError:
                continue
            cpu += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            memory += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        return cpu, memory


def processes(place: Place) -> list[int]:
    """Returns the processes that have a listening socket at an address. Raises Unknown if no process can be found."""
    if place.family != socket.AF_UNIX and not _is_here(place):
        raise Unknown("the server is on another machine")
    found = _holders({f"socket:[{inode}]" for inode in _listening(place)})
    if not found:
        raise Unknown("no process that this user may see listens at this address")
    return found


def _is_here(place: Place) -> bool:
    """Returns whether an address belongs to this machine: packets to it then have the same source address."""
    with socket.socket(place.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(place.address)  # sends nothing, because it is a datagram socket
        except OSError:
            return False
        return bool(probe.getsockname()[0] == probe.getpeername()[0])


def _listening(place: Place) -> set[str]:
    """Returns the inodes of the sockets that listen at an address."""
    if place.family == socket.AF_UNIX:
        rows = (row for row in _rows("unix") if len(row) > 7 and row[3] == UNIX_LISTENS)
        return {row[6] for row in rows if row[7] == str(place.address)}
    port = f"{place.address[1]:04X}"
    address = _words_of(place)
    wanted = {f"{each}:{port}" for each in (address, "0" * 8, "0" * 32)}
    return {row[9] for table in ("tcp", "tcp6") for row in _rows(table) if row[3] == LISTENS and row[1] in wanted}


def _rows(table: str) -> Iterator[list[str]]:
    try:
        text = (PROC / "net" / table).read_text("utf-8", "replace")
    except OSError:  # a kernel without IPv6
        return
    for line in text.splitlines()[1:]:
        yield line.split(maxsplit=7 if table == "unix" else -1)


def _words_of(place: Place) -> str:
    """Formats an address as /proc does: words of four bytes, each in the byte order of this machine."""
    packed = socket.inet_pton(place.family, place.address[0].partition("%")[0])
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)


def _holders(links: set[str]) -> list[int]:
    """Returns the processes that have one of these sockets."""
    found = []
    left = LINKS_MAX
    for process in PROC.iterdir() if links else ():
        if not process.name.isdecimal() or process.name == "1":
            continue
        try:
            files = list((process / "fd").iterdir())
        except OSError:  # the process has ended, or this user may not see it
            continue
        left -= len(files)
        if left < 0:
            raise Unknown("too many files are open on this machine to find the server")
        if any(_link(file) in links for file in files):
            found.append(int(process.name))
    return found


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except OSError:
        return ""
