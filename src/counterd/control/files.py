"""Files that the configuration names: read whole, at the start and again at each reload, before anything changes.

Floor 4. The loop waits while a file is read, so it is one that ends, and has a bound: never a device, and a pipe only
with a time limit.
"""

from __future__ import annotations

import os
import select
import stat
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

# Bytes of a file that a room asks for: what a room can take in has a bound of its own, and far fewer.
FILE_MAX = 1 << 25
PIECE = 1 << 16  # bytes that a pipe holds
PROBLEMS_MAX = 100  # lines about one file


class FileError(Exception):
    """A file that cannot be read. why: the rest of a sentence that begins with its path; as text: all of it."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}")
        self.why = why


def read_file(path: str, size_max: int, pipe_timeout: float = 0.0) -> bytes:
    """What is in a regular file. Raises FileError.

    pipe_timeout: it may be a pipe too, and then somebody has so many seconds to write all of it; 0 is not at all.

    It is opened without waiting for anybody, since a pipe could keep a daemon that reloads waiting for ever.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISFIFO(mode) and pipe_timeout:
                content = _read_pipe(file.fileno(), size_max, time.monotonic() + pipe_timeout)
                if content is None:
                    raise FileError(path, f"is a pipe, and nobody has written all of it within {pipe_timeout:g} s")
            elif stat.S_ISREG(mode):
                content = file.read(size_max + 1)
            else:
                raise FileError(path, "is not a regular file")
    except (OSError, ValueError) as error:  # ValueError: a path that has no encoding
        raise FileError(path, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if content is None:  # there are some below /proc that wait all the same
        raise FileError(path, "cannot be read: it has nothing yet")
    if len(content) > size_max:
        raise FileError(path, f"has more than {size_max} bytes")
    return content


def _read_pipe(descriptor: int, size_max: int, deadline: float) -> bytes | None:
    """What is in a pipe until its end, or until it is too much; None if there is no end by the deadline.

    Of a pipe that nobody has opened yet there is no end either: poll() waits for somebody to come.
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
    """What readers make of their files, by key, and what is wrong with them, a line each. place: where a key is set."""
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
    """The lines of an error that may have several, in `problems`; no more than anybody would read."""
    lines = list(getattr(error, "problems", ())) or [str(error)]
    left = len(lines) - PROBLEMS_MAX
    return [*lines[:PROBLEMS_MAX], f"{left} more mistakes"] if left > 1 else lines


def unreadable(paths: Mapping[str, str], place: Callable[[str], str]) -> list[str]:
    """Of files by key, those that this process cannot read again: a reload would find out too late."""
    return [
        f"{place(key)}: uid {os.geteuid()} cannot read {path}: a reload will be refused"
        for key, path in paths.items()
        if path and not os.access(path, os.R_OK)
    ]
