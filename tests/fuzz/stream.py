"""Reads an input of a fuzzer: bytes from the front, zeros behind its end, so that any input has a meaning."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

T = TypeVar("T")

PIECES_MAX = 256
# Where a bytes object's own bytes begin, in CPython.
BYTES_AT = bytes.__basicsize__ - 1


class Source:
    """An input, and the position up to which it has been read."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def __bool__(self) -> bool:
        return self.position < len(self.data)

    def byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1] if self.position <= len(self.data) else 0

    def take(self, size: int) -> bytes:
        """So many bytes, or as many as there are."""
        taken = self.data[self.position : self.position + size]
        self.position += size
        return taken

    def choice(self, options: Sequence[T]) -> T:
        return options[self.byte() % len(options)]

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """The data, cut as the next byte says: not at all, or into pieces of so many bytes, up to some number."""
        size = max(self.byte() or len(data), len(data) // PIECES_MAX, 1)
        for start in range(0, len(data), size):
            yield data[start : start + size]


def _poisoner() -> ctypes._CFuncPtr | None:
    try:
        poison = ctypes.CDLL(None).__asan_poison_memory_region
    except AttributeError:
        return None
    poison.argtypes, poison.restype = (ctypes.c_void_p, ctypes.c_size_t), None
    return poison


_poison = _poisoner()


def fenced(data: bytes) -> bytes:
    """The same bytes in an object of their own.

    Under AddressSanitizer, reading behind them is an error. CPython puts a NUL there, which would hide a read of one
    byte too many. Freeing the object lifts the fence.
    """
    fresh = bytes(bytearray(data))
    if _poison is not None and len(fresh) > 1:  # shorter ones are shared by all
        _poison(id(fresh) + BYTES_AT + len(fresh), 1)
    return fresh
