"""The time that something takes on the machine that runs the tests, and how long it may be looked."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Seconds that a test waits for what is to happen. A quiet machine takes a hundredth of it; one that is busy with other
# things may take all of it, and nothing has failed then.
PATIENCE = 60.0
LONG_S = 120.0  # longer than anything takes, also where there are many other things to do
EXAMPLES = float(os.environ.get("COUNTERD_EXAMPLES", "1"))


def examples(count: int) -> int:
    """How many hypothesis makes of what is about the engine: so many, or as many times more or less as wanted."""
    return max(1, round(count * EXAMPLES))


def own_address() -> str:
    """A loopback address of this process: a port of it that is free stays free, for whoever ends and comes again."""
    pid = os.getpid()
    return f"127.{64 + (pid >> 16)}.{pid >> 8 & 255}.{pid & 255}"


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
