"""How long others wait while very many Takes stop waiting at once: their time is over, or their connections end.

    python benchmarks/micro/waiters.py [--waiters 1000000]

No sockets: connections with a thousand Takes each wait for one permit. Between two slices of the work requests are
served, so the longest slice is what others wait. Times are the processor's, and of three rounds that with the shortest
counts, as a busy machine interrupts whatever it likes. Exit status: 0 if what is promised below holds, 1 if not; of
fewer waiters nothing is promised.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from counterd.protocols.counter import wire
from native import engine

PROMISED = 1_000_000  # waiters
EACH = 1_000  # of a connection
ROUNDS = 3
SLICE_MAX_MS = 5.0
WAIT_MS = 10_000
NS_PER_MS = 1_000_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiters", type=int, default=PROMISED)
    count = parser.parse_args().waiters
    gc.disable()
    is_right = True
    for what in ("time out", "disconnect"):
        rounds = [play_round(count, disconnects=what == "disconnect") for _ in range(ROUNDS)]
        longest, slices = min((max(slices) / NS_PER_MS, slices) for slices in rounds)
        each_ns = sum(slices) / count
        print(f"{count:,} Takes {what}: {len(slices):,} slices, the longest {longest:.3f} ms, {each_ns:.0f} ns each")
        is_right = is_right and longest <= SLICE_MAX_MS
    print(f"promised for {PROMISED:,}: at most {SLICE_MAX_MS:g} ms")
    sys.exit(count >= PROMISED and not is_right)


def play_round(count: int, *, disconnects: bool) -> list[int]:
    """Nanoseconds of the processor for each slice."""
    now = next(engine.CLOCK)
    store = engine.open_store(
        buckets=1_000, holdings=1_000, waiters=count, name_memory=0, figures=dict, hash_key=engine.HASH_KEY,
        posted_max=1 << 20, now_ns=now,
    )  # fmt: skip
    holder = store.session(now)
    holder.receive(wire.acquire(0, b"p", 1, 1), now)
    asked = b"".join(wire.take(opaque, [wire.Permit(b"p", 1, 1)], WAIT_MS) for opaque in range(EACH))
    sessions = [store.session(now) for _ in range(count // EACH)]
    for session in sessions:
        session.receive(asked, now)
        while session.more:
            session.take_output(now)
        now += NS_PER_MS // 1_000
    slices = []
    if disconnects:
        for session in sessions:
            session.closed(now)
    else:
        now += WAIT_MS * NS_PER_MS
    while store.snapshot()["waiters"]:
        now = max(now, store.next_deadline())
        start = time.thread_time_ns()
        store.tick(now)
        slices.append(time.thread_time_ns() - start)
        for session in store.take_dirty():
            session.take_output(now)
        now += slices[-1]
    return slices


if __name__ == "__main__":
    main()
