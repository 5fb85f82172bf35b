"""Frames on the sockets between the daemon and its child processes. A frame is a length of 4 bytes, big-endian, and a
body.

Floor 0 (ARCHITECTURE.md), without I/O. This file also has the error that can take the place of an answer. The modules
at the two ends define the bodies: control/admin.py and admin/link.py, control/journal.py and journal/__main__.py.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

FRAME_MAX = 16 << 20  # bytes of a body
SETTINGS = 0  # the number of an answer that nobody has asked for: the settings of the admin process
PIECE_MAX = 288 << 20  # bytes of a body to or from the journal process: a piece that ends with the longest record
_LENGTH = struct.Struct(">I")


class Refused(Exception):
    """An error that takes the place of an answer. status: an HTTP status. text: a text for the person who asked."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def frame(body: bytes, limit: int = FRAME_MAX) -> bytes:
    """Makes a frame of a body. Raises ValueError if the body is longer than the limit."""
    if len(body) > limit:
        raise ValueError(f"a body of {len(body)} bytes does not fit into a frame of at most {limit}")
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splits a stream of bytes into the bodies of frames. limit: how many bytes the longest body may have."""

    def __init__(self, limit: int = FRAME_MAX) -> None:
        self._limit = limit
        self._rest = bytearray()

    def feed(self, data: bytes | memoryview) -> Iterator[bytes]:
        """Yields the bodies that are complete. Raises ValueError if the stream announces a body that is too long."""
        self._rest += data
        while len(self._rest) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._rest)
            if length > self._limit:
                raise ValueError(f"a frame of {length} bytes, but at most {self._limit} bytes are allowed")
            end = _LENGTH.size + length
            if len(self._rest) < end:
                return
            body = bytes(self._rest[_LENGTH.size : end])
            del self._rest[:end]
            yield body
