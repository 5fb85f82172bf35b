"""Histories in files, by processes that may be killed at any instruction.

A record is a line, written with one system call before the request leaves, or after its answer has come: what was
written is the kernel's, and survives the process. A kill may cut the last record of a file, never another; each has a
checksum, so that whatever else is wrong is found. A call is written as where its class is, and its fields as Python
literals; an answer as a literal.
"""

from __future__ import annotations

import ast
import importlib
import os
import time
import zlib
from enum import IntEnum
from functools import cache
from typing import TYPE_CHECKING, Any

from history.operations import Closed, Operation

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path
    from types import TracebackType

STARTED, ENDED, CLOSING, CLOSED = "started", "ended", "closing", "closed"


class Recorder:
    """Appends what one connection does to a file, which recorders of the same process may share.

    client: who that is, unlike all others in the history. Calls and answers are named tuples, numbers, bytes and text.
    Each record costs a few microseconds. One thread at a time.
    """

    def __init__(self, path: str | os.PathLike[str], client: int) -> None:
        self.client = client
        self._tokens = 0
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def start(self, call: Any) -> int:
        """Records a call. To be called before the request is sent. The token is for end()."""
        self._tokens += 1
        kind = type(call)
        self._write(STARTED, self._tokens, f"{kind.__module__}:{kind.__qualname__} {plain(call)!r}")
        return self._tokens

    def end(self, token: int, answer: Any) -> None:
        """Records an answer. To be called once it has arrived. Without it the call may have taken effect, or not."""
        self._write(ENDED, token, repr(plain(answer)))

    def closing(self) -> None:
        """Records that the end of the connection may begin. Whoever ends it calls this before; of several, the first
        counts.
        """
        self._write(CLOSING)

    def closed(self) -> None:
        """Records that the server was seen to have released everything that the connection held; the first counts."""
        self._write(CLOSED)

    def close(self) -> None:
        """Closes the file, and records nothing."""
        os.close(self._file)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, what: str, token: int = 0, rest: str = "") -> None:
        record = f"{what} {self.client} {token} {time.monotonic_ns()} {rest}".encode()
        record = b"%08x %b\n" % (zlib.crc32(record), record)
        if os.write(self._file, record) != len(record):
            raise OSError(f"a record was cut: {record!r}")


def load(paths: Iterable[Path]) -> list[Operation]:
    """All operations, by start. Raises ValueError for a damaged file; a last record that was cut does not count."""
    started: dict[tuple[int, int], tuple[Any, int]] = {}
    ended: dict[tuple[int, int], tuple[Any, int]] = {}
    ends: dict[str, dict[int, int]] = {CLOSING: {}, CLOSED: {}}
    value_of, call_of = cache(ast.literal_eval), cache(called)  # most are there again and again
    for path in paths:
        *records, _cut = path.read_bytes().split(b"\n")
        for number, record in enumerate(records, 1):
            try:
                if record[:9] != b"%08x " % zlib.crc32(record[9:]):
                    raise ValueError("its checksum is wrong")
                what, client, token, moment, rest = record[9:].decode().split(" ", 4)
                if what in ends:
                    moments = ends[what]
                    moments[int(client)] = min(moments.get(int(client), int(moment)), int(moment))
                    continue
                found, value = (started, call_of(rest)) if what == STARTED else (ended, value_of(rest))
                if (int(client), int(token)) in found:
                    raise ValueError("it is there twice")
                found[int(client), int(token)] = value, int(moment)
            except (ValueError, SyntaxError) as error:
                raise ValueError(f"{path}, record {number}, {error}: {record!r}") from error
    if strays := ended.keys() - started.keys() or ends[CLOSED].keys() - ends[CLOSING].keys():
        raise ValueError(f"ended, but never started: {sorted(strays)}")
    operations = [
        Operation(name[0], call, moment, *reversed(ended.get(name, (None, None))))
        for name, (call, moment) in started.items()
    ]
    operations += [
        Operation(client, Closed(), moment, ends[CLOSED].get(client)) for client, moment in ends[CLOSING].items()
    ]
    return sorted(operations, key=lambda operation: operation.started)


def called(text: str) -> Any:
    """The call that start() wrote, made of a record."""
    where, fields = text.split(" ", 1)
    module, name = where.split(":")
    return getattr(importlib.import_module(module), name)(*ast.literal_eval(fields))


def plain(value: Any) -> Any:
    """The value as a Python literal: without the classes of tuples and enumerations."""
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return int(value) if isinstance(value, IntEnum) else value
