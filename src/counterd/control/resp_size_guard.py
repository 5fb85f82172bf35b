"""Bounds the answers of a Redis server before they are parsed.

Floor 4 (ARCHITECTURE.md). hiredis makes room for all elements of an array as soon as it has read their number: ten
bytes can demand 16 GiB, and Python's collector then walks through all of it while nothing else goes on. It keeps a
string of any length, looks for the end of a line from its beginning each time, and nests arrays without end. So lines,
lengths and numbers are read here first. The protocol has five types (RESP2); servers speak no other one until a client
asks for it.
"""

from __future__ import annotations

from typing import NamedTuple

from counterd.units import several

# Bytes of a line with its end. The longest are errors: those of Redis repeat at most 128 bytes of a command, but a
# script's error has a trace, and a proxy's its own words.
LINE_MAX = 4096
DEPTH_MAX = 8  # arrays in each other. CLUSTER SLOTS has 4: ranges, a range, a server, what else is known of it
LINE, STRING, ARRAY = frozenset(b"+-:"), ord("$"), ord("*")


class Bounds(NamedTuple):
    """The size of an answer. size: bytes. elements: of all arrays in it together."""

    size: int
    elements: int


# The largest answer is that to CLUSTER SLOTS. If each of 16,384 slots is a range of its own, with a master and two
# replicas whose names have the 253 bytes that DNS allows, a range has less than 1 KiB, and 30 elements: itself, two
# numbers, and for each server an array of four, of which one is an array of four.
LARGEST = Bounds(16_384 * 1024, 16_384 * 30)


class InvalidReply(Exception):
    """Bytes that no server may send. str() says why, for people."""


class RespSizeGuard:
    """Reads along with the parser. most: the size of an answer, which can be set at any time."""

    def __init__(self, most: Bounds = LARGEST) -> None:
        self.most = most
        self._rest = b""  # the beginning of a line
        self._skip = 0  # so many bytes of a string are still to come
        self._start = 0  # where the answer began, before the next bytes
        self._left = 1  # so many elements are still to come of the innermost array; or the answer itself
        self._outer: list[int] = []  # the same, of the answer and the arrays around
        self._elements = 0  # of the answer so far

    def read(self, data: bytes) -> None:
        """Reads the next bytes of the connection. Raises InvalidReply."""
        data = self._rest + data
        at, start, left, outer = self._skip, self._start, self._left, self._outer
        try:
            while (end := data.find(b"\r\n", at, at + LINE_MAX)) >= 0:
                kind = data[at]
                if kind in LINE:
                    at = end + 2
                elif kind == STRING:
                    length = int(data[at + 1 : end])
                    at = end + 4 + length if length >= 0 else end + 2
                    self._check_size(at - start)
                elif kind == ARRAY:
                    count = int(data[at + 1 : end])
                    at = end + 2
                    if count > 0:
                        self._enter(count)
                        outer.append(left)
                        left = count
                        continue
                else:
                    raise InvalidReply(f"the unknown type {chr(kind)!r}")
                left -= 1
                while not left and outer:  # an array ends with this element
                    left = outer.pop() - 1
                if not left:
                    self._check_size(at - start)
                    start, left, self._elements = at, 1, 0
        except ValueError:
            raise InvalidReply("a length that is not a number") from None
        if len(data) - at >= LINE_MAX:
            raise InvalidReply(f"a line of more than {LINE_MAX} bytes")
        self._check_size(len(data) - start)
        self._rest = data[at:]
        consumed = len(data) - len(self._rest)
        self._skip, self._start, self._left = at - consumed, start - consumed, left

    def _check_size(self, size: int) -> None:
        if size > self.most.size:
            raise InvalidReply(f"more than {self.most.size} bytes")

    def _enter(self, count: int) -> None:
        self._elements += count
        if self._elements > self.most.elements:
            raise InvalidReply(f"more than {several(self.most.elements, 'element')}")
        if len(self._outer) >= DEPTH_MAX:
            raise InvalidReply(f"more than {DEPTH_MAX} arrays in each other")
