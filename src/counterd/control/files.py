"""Files that the configuration names: read whole, at the start and again at each reload, before anything changes.

Floor 4. The loop waits while a file is read, so it is one that ends, and has a bound: never a pipe or a device.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from counterd.control.config import Config
    from counterd.protocols import Room

# Bytes of a file that a room asks for: what a room can take in has a bound of its own, and far fewer.
FILE_MAX = 1 << 25
PROBLEMS_MAX = 100  # lines about one file


class FileError(Exception):
    """A file that cannot be read, and why, in a sentence that begins with its path."""


def read_file(path: str, size_max: int) -> bytes:
    """What is in a regular file. Raises FileError.

    It is opened without waiting for anybody, since a pipe could keep a daemon that reloads waiting for ever.
    """
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK | os.O_NOCTTY)) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileError(f"{path} is no regular file")
            content: bytes | None = file.read(size_max + 1)
    except (OSError, ValueError) as error:  # ValueError: a path that has no encoding
        raise FileError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if content is None:  # there are some below /proc that wait all the same
        raise FileError(f"{path} cannot be read: it has nothing yet")
    if len(content) > size_max:
        raise FileError(f"{path} has more than {size_max} bytes")
    return content


def read_files(room: Room, config: Config) -> tuple[dict[str, Any], list[str]]:
    """What a room's readers make of its files, by key, and what is wrong with them, a line each."""
    found: dict[str, Any] = {}
    problems: list[str] = []
    for key, read in room.files.items():
        path = config.values[key]
        if not path:
            continue
        where = f"{config.where(key)}: {key}"
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


def unreadable(paths: Mapping[str, str], config: Config) -> list[str]:
    """Of files by key, those that this process cannot read again: a reload would find out too late."""
    return [
        f"{config.where(key)}: {key}: uid {os.geteuid()} cannot read {path}: a reload will be refused"
        for key, path in paths.items()
        if path and not os.access(path, os.R_OK)
    ]
