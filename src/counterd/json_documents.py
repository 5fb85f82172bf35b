"""Reads JSON documents that people write, and collects all mistakes in them.

Floor 0 (ARCHITECTURE.md), pure Python, without file access. The caller checks what a document contains.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

PROBLEMS_MAX = 100  # problems that are listed; more are only counted


class DocumentError(ValueError):
    """A document has mistakes. Each problem begins with its place in the document."""

    def __init__(self, problems: tuple[str, ...]) -> None:
        super().__init__(problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Members(dict[str, object]):
    """A JSON object that remembers which of its names occur twice."""

    twice: tuple[str, ...] = ()

    def __init__(self, pairs: list[tuple[str, object]]) -> None:
        super().__init__(pairs)
        if len(self) != len(pairs):
            seen: set[str] = set()
            twice: set[str] = set()
            for name, _ in pairs:
                (twice if name in seen else seen).add(name)
            self.twice = tuple(sorted(twice))


class Problems:
    """The mistakes in a document, in the order of the document."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self._more = 0

    def add(self, place: str, text: str) -> None:
        if self.full:
            self._more += 1
        else:
            self.told.append(f"{place}: {text}")

    @property
    def full(self) -> bool:
        return len(self.told) >= PROBLEMS_MAX

    def __iter__(self) -> Iterator[str]:
        yield from self.told
        if self._more:
            yield f"the document: {self._more} more mistakes"


def read_document(text: bytes | str) -> object:
    """Parses a JSON text in UTF-8. The objects in the text become Members. Raises DocumentError."""
    try:
        decoded = text if isinstance(text, str) else text.decode()
        return json.loads(decoded.removeprefix("\ufeff"), object_pairs_hook=Members, parse_int=_whole)
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        column = error.start - error.object.rfind(b"\n", 0, error.start)
        problem = f"line {line}, byte {column}: not UTF-8"
    except json.JSONDecodeError as error:
        problem = f"line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        problem = "the document: nested too deeply"
    raise DocumentError((problem,)) from None


def _whole(text: str) -> int:
    """Reads an integer of at most 1,000 digits, because Python refuses to read much longer integers.

    1,000 digits exceed every valid range.
    """
    return int(text[:1000])
