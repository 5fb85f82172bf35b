"""What the tests have left behind on the machine when they end: processes, mounts, files.

A process that a test has started, directly or not, is found by its variable TMPDIR: the tests' folder is in it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from kit.surroundings import FOLDER

PLACES = ("/run/netns", "/var/run/netns")  # `ip netns add` leaves mounts there
OURS = ("home", "t", "counts")  # what conftest.py makes in the tests' folder
FILES = (".trace", ".found")
GRACE_S = 5.0  # for processes that are about to end


def mounts(folder: Path) -> set[str]:
    """Returns the places of mounts in the tests' folder and in PLACES."""
    with Path("/proc/self/mountinfo").open() as table:
        found = {line.split()[4] for line in table}
    return {place for place in found if place.startswith((str(folder), *PLACES))}


def processes(folder: Path) -> dict[int, str]:
    """Returns {process that the tests have started: its command}."""
    found = {}
    mark = f"TMPDIR={folder}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            variables = (path / "environ").read_bytes().split(b"\0")
            if int(path.name) != os.getpid() and any(variable.startswith(mark) for variable in variables):
                found[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def remains(folder: Path, mounted: set[str]) -> list[str]:
    """Returns a line for each thing that is left, and ends the processes. mounted: mounts() before the tests."""
    deadline = time.monotonic() + GRACE_S
    while (running := processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    said = [f"process {pid}: {command}" for pid, command in running.items()]
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    said += [f"mount {place}" for place in sorted(mounts(folder) - mounted)]
    files = [path for path in sorted(folder.iterdir()) if path.name not in OURS and path.suffix not in FILES]
    return said + [f"file {path}" for path in files if not FOLDER.fullmatch(path.name)]  # of a run in a test
