"""Bounds what the answers of a Redis server announce, before they are parsed.

Floor 4 (ARCHITECTURE.md). hiredis makes room for all elements of an array as soon as it has read their number: ten
bytes can demand 16 GiB, and Python's collector then walks through all of it while nothing else goes on. So the number
is read here first. The protocol has five types (RESP2); servers speak no other one until a client asks for it.
"""

from __future__ import annotations

# Elements of an answer and of all arrays in it. The largest answer is that to CLUSTER SLOTS: if each of 16,384 slots is
# a range of its own, with a master and two replicas, a range has 30: itself, two numbers, and for each server an array
# of four, of which one is an array of four.
ELEMENTS_MAX = 16_384 * 30
LINE, STRING, ARRAY = frozenset(b"+-:"), ord("$"), ord("*")


class NoAnswer(Exception):
    """Bytes that no server may send. str() says why, for people."""


class Announced:
    """Reads along with the parser."""

    def __init__(self) -> None:
        self._rest = b""  # the beginning of a line
        self._skip = 0  # so many bytes of a string are still to come
        self._lacking = 0  # so many elements of the answer are
        self._elements = 0  # of the answer so far

    def read(self, data: bytes) -> None:
        """Reads the next bytes of the connection. Raises NoAnswer."""
        data = self._rest + data
        at, lacking = self._skip, self._lacking
        try:
            while (end := data.find(b"\r\n", at)) >= 0:
                kind = data[at]
                if not lacking:
                    lacking, self._elements = 1, 0
                lacking -= 1
                if kind in LINE:
                    at = end + 2
                elif kind == STRING:
                    length = int(data[at + 1 : end])
                    at = end + 4 + length if length >= 0 else end + 2
                elif kind == ARRAY:
                    lacking += self._announce(int(data[at + 1 : end]))
                    at = end + 2
                else:
                    raise NoAnswer(f"something of the type {chr(kind)!r}")
        except ValueError:
            raise NoAnswer("a length that is no number") from None
        self._rest = data[at:]
        self._skip, self._lacking = max(at - len(data), 0), lacking

    def _announce(self, count: int) -> int:
        count = max(count, 0)
        self._elements += count
        if self._elements > ELEMENTS_MAX:
            raise NoAnswer(f"an answer of more than {ELEMENTS_MAX} elements")
        return count
