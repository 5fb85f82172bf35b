"""Fake processes that replace those which control.child starts."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

LAST_WORDS = b"Traceback\nImportError: no module\n"


class Process:
    """Stands for a child process, which lives until it is killed. socket: its end of the pair."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.killed = False
        self.returncode = -9

    def kill(self) -> None:
        self.killed = True

    def poll(self) -> int | None:
        return -9 if self.killed else None

    def wait(self, timeout: float) -> int:
        return -9


def spawn_into(started: list[Process]) -> Callable[[str, Sequence[socket.socket]], tuple[Any, int]]:
    """Stands for control.child.spawn."""

    def spawn(_module: str, given: Sequence[socket.socket]) -> tuple[Any, int]:
        theirs = given[-1].dup()
        theirs.setblocking(False)
        started.append(Process(theirs))
        words, end = os.pipe2(os.O_NONBLOCK)
        os.write(end, LAST_WORDS)
        os.close(end)
        return started[-1], words

    return spawn
