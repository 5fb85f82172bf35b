"""Times on the machine that runs the tests, how long tests wait, and how many examples they try."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Seconds that a test waits for an event. A quiet machine takes a hundredth of it; a busy machine may need almost all of
# it without a failure.
PATIENCE = 60.0
LONG_S = 120.0  # longer than anything takes, even on a busy machine
EXAMPLES = float(os.environ.get("COUNTERD_EXAMPLES", "1"))


def examples(count: int) -> int:
    """Returns how many examples hypothesis makes for a test of the engine: count * COUNTERD_EXAMPLES."""
    return max(1, round(count * EXAMPLES))


def own_address() -> str:
    """Returns a loopback address that only this process uses, so that a free port stays free between two uses."""
    pid = os.getpid()
    return f"127.{64 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}"


@contextlib.contextmanager
def own_time() -> Iterator[Callable[[], float]]:
    """Measures the CPU seconds of the block in this thread, without garbage collection."""
    gc.collect()
    gc.disable()
    start = time.thread_time()
    took = 0.0
    try:
        yield lambda: took
    finally:
        took = time.thread_time() - start
        gc.enable()


def is_open(descriptor: int) -> bool:
    """Returns whether this process has that descriptor."""
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True
