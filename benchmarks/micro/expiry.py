"""What a lease costs that nobody gives back: memory of a token, and how long others wait while very many end at once.

    python benchmarks/micro/expiry.py [--tokens 1000000]

No sockets: a client acquires the tokens and goes, and once clientOfflineTime is over all of them are due. Between two
slices of that work requests are served, so the longest slice is what others wait; what they wait over a socket is in
benchmarks/peers. Of three rounds that with the shortest counts: a machine that is busy pauses whatever it likes. Exit
status: 0 if what is promised below holds, 1 if not; of fewer tokens nothing is promised.
"""

from __future__ import annotations

import argparse
import gc
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from native import engine, tokens

PROMISED = 1_000_000  # tokens
ROUNDS = 3
SLICE_MAX_MS = 1.0
BYTES_MAX = 96
OFFLINE_MS = 2000


def resident() -> int:
    """Bytes of physical memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=PROMISED)
    options = parser.parse_args()
    gc.disable()
    rounds = [play_round(options.tokens) for _ in range(ROUNDS)]
    size = max(size for size, _ in rounds)
    longest, slices = min((max(slices) / 1e6, slices) for _, slices in rounds)
    print(f"{options.tokens:,} tokens ended in {len(slices):,} slices, {sum(slices) / options.tokens:.0f} ns each")
    print(f"longest slice {longest:.3f} ms, at most {SLICE_MAX_MS:g}")
    print(f"memory {size:.1f} bytes a token, at most {BYTES_MAX}")
    sys.exit(options.tokens >= PROMISED and (longest > SLICE_MAX_MS or size > BYTES_MAX))


def play_round(count: int) -> tuple[float, list[int]]:
    """(bytes of memory a token, nanoseconds of each slice)"""
    store = tokens.make_store(count, resourceTimeout=tokens.LASTING_MS, clientOfflineTime=OFFLINE_MS)
    session = store.session(0)
    before = resident()
    for _ in tokens.acquired(session, count):
        pass
    size = (resident() - before) / count
    now = next(engine.CLOCK)
    session.closed(now)
    slices = []
    while (due := store.next_deadline()) >= 0:
        now = max(now, due)
        start = time.perf_counter_ns()
        store.tick(now)
        slices.append(time.perf_counter_ns() - start)
        now += slices[-1]
    if store.snapshot()["tokens"]:
        raise RuntimeError("there are tokens that have not ended")
    return size, slices


if __name__ == "__main__":
    main()
