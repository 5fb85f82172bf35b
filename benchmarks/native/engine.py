"""The engine's workloads, for the pytest suite and for the table of ratios."""

from __future__ import annotations

import functools
import os

from counterd.protocols.counter._room import CounterStore
from native import frames, load_native

BUCKETS = 1_000_000
SESSIONS = 50
DEPTH = 64
NAME_COUNTS = (1_000, 100_000, 900_000)
PATTERNS = ("pairs", "later")
VARIANTS = ("ledger", "no ledger", "ledger, no prefetch")
PAIR_BATCHES = 4_000
LATER_ROUNDS = 40


@functools.cache
def workload(pattern: str, count: int) -> tuple[list[bytes], list[tuple[int, bytes]]]:
    """(names, [(session, batch)])"""
    names = frames.make_names(count)
    if pattern == "pairs":
        batches = frames.pair_batches(names, PAIR_BATCHES, DEPTH, seed=1)
        return names, [(i % SESSIONS, batch) for i, batch in enumerate(batches)]
    return names, frames.later_rounds(names, SESSIONS, LATER_ROUNDS, DEPTH, seed=1)


class Player:
    """Plays a workload to a store of its own, which knows every name already."""

    def __init__(self, variant: str, pattern: str, count: int) -> None:
        native = load_native()
        make = {"ledger": CounterStore, "no ledger": native.NoLedgerStore}.get(variant, native.NoPrefetchStore)
        store = make(buckets=BUCKETS, holdings=2 * BUCKETS, name_memory=0, hash_key=os.urandom(16), figures=dict)
        store.begin_window(1)
        names, self._sequence = workload(pattern, count)
        self._sessions = [store.session() for _ in range(SESSIONS)]
        self._store = store
        self.frames = DEPTH * len(self._sequence)
        for name in names:
            self._sessions[0].receive(frames.acquire(name) + frames.release(name), 0)

    def __call__(self) -> None:
        sessions = self._sessions
        for session, batch in self._sequence:
            sessions[session].receive(batch, 0)

    def check(self) -> None:
        """Raises if any request was refused: the figures would be of something else."""
        refused = {k: v for k, v in self._store.snapshot().items() if k.startswith("refused:") and v}
        if refused:
            raise ValueError(f"the workload was refused: {refused}")
