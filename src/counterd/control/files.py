"""Reads the files that the configuration names, at the start and at each reload, before the daemon applies any change.

Floor 4 (ARCHITECTURE.md). The event loop waits while a file is read. So the daemon reads only files with an end and a
limited size: no devices, and pipes only with a time limit.
"""

from __future__ import annotations

import os
import select
import stat
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Bytes of a protocol's file. Each protocol also limits the contents, far below this.
FILE_MAX = 1 << 25
PIECE = 1 << 16  # bytes that a pipe holds
PROBLEMS_MAX = 100  # lines of errors in one file


class FileError(Exception):
    """A file cannot be read.

    why: the rest of a sentence that begins with the path. str() returns the whole sentence.
    """

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}")
        self.why = why


def read_file(path: str, size_max: int, pipe_timeout: float = 0.0) -> bytes:
    """Reads a regular file. Raises FileError.

    pipe_timeout: how many seconds the writer of a pipe may take until it closes the pipe; 0 refuses pipes.

    Opening the file does not wait, because a pipe without a writer could otherwise block a reload for ever.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISFIFO(mode) and pipe_timeout:
                content = _read_pipe(file.fileno(), size_max, time.monotonic() + pipe_timeout)
                if content is None:
                    raise FileError(path, f"is a pipe that was not written to its end within {pipe_timeout:g} s")
            elif stat.S_ISREG(mode):
                content = file.read(size_max + 1)
            else:
                raise FileError(path, "is not a regular file")
    except (OSError, ValueError) as error:  # ValueError: a path that cannot be encoded
        raise FileError(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if content is None:  # some files in /proc would block, although they are regular
        raise FileError(path, "cannot be read: it has no data yet")
    if len(content) > size_max:
        raise FileError(path, f"has more than {size_max} bytes")
    return content


def _read_pipe(descriptor: int, size_max: int, deadline: float) -> bytes | None:
    """Reads a pipe to its end, or until it has more than size_max bytes. Returns None if the pipe has no end by the
    deadline.

    A pipe that no process has opened for writing has no end either, so poll() waits for a writer.
    """
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    content = bytearray()
    while len(content) <= size_max:
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        if not (piece := os.read(descriptor, PIECE)):
            break
        content += piece
    return bytes(content)


def read_files(
    readers: Mapping[str, Callable[[bytes], Any]], paths: Mapping[str, str], place: Callable[[str], str]
) -> tuple[dict[str, Any], list[str]]:
    """Reads and parses the files that settings name.

    Returns the results by key, and a line for each error. place: returns where a key is set.
    """
    found: dict[str, Any] = {}
    problems: list[str] = []
    for key, read in readers.items():
        path, where = paths[key], place(key)
        if not path:
            continue
        try:
            found[key] = read(read_file(path, FILE_MAX))
        except FileError as error:
            problems.append(f"{where}: {error}")
        except ValueError as error:
            problems += (f"{where}: {path}: {line}" for line in problems_of(error))
    return found, problems


def problems_of(error: ValueError) -> list[str]:
    """Returns the lines of an error: its `problems`, if it has them.

    Returns at most PROBLEMS_MAX lines, and then a summary.
    """
    lines = list(getattr(error, "problems", ())) or [str(error)]
    left = len(lines) - PROBLEMS_MAX
    return [*lines[:PROBLEMS_MAX], f"and {left} more mistakes"] if left > 1 else lines


def unreadable(paths: Mapping[str, str], place: Callable[[str], str]) -> list[str]:
    """Returns a line for each file that this process can no longer read.

    A file that cannot be read would make the next reload fail.
    """
    return [
        f"{place(key)}: uid {os.geteuid()} cannot read {path}, so the next reload will be refused"
        for key, path in paths.items()
        if path and not os.access(path, os.R_OK)
    ]
