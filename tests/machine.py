"""What the machine that runs the tests has, the time that something takes on it, and how long it may be looked."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import socket
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXAMPLES = float(os.environ.get("COUNTERD_EXAMPLES", "1"))


def examples(count: int) -> int:
    """How many hypothesis makes of what is about the engine: so many, or as many times more or less as wanted."""
    return max(1, round(count * EXAMPLES))


@contextlib.contextmanager
def own_time() -> Iterator[Callable[[], float]]:
    """Seconds of the processor that the block takes: what else goes on, and how much garbage there is, is left out."""
    gc.collect()
    gc.disable()
    start = time.thread_time()
    took = 0.0
    try:
        yield lambda: took
    finally:
        took = time.thread_time() - start
        gc.enable()


def has_ipv6() -> bool:
    """Whether ::1 can be bound."""
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def installed(program: str, package: str | None = None) -> str:
    """The path of a program that Debian has, in a package of the same name if none is given.

    Skips the test where it is not installed; fails it if the environment has CI set.
    """
    found = shutil.which(program) or shutil.which(program, path="/usr/sbin")
    if found is None:
        reason = f"no {program}; on Debian or Ubuntu: apt-get install {package or program}"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found
