"""Nanoseconds a frame of the engine, no sockets: with ledger and without, with the prefetching pass and without.

Frames for 50 sessions in turn, batches of 64, random 16-byte names, at 1 thousand, 100 thousand and 900 thousand names:
pairs (acquire and release in turn) and later (64 acquired, and released when all 50 sessions have theirs). Divide the
time shown by 64 x the number of batches, `extra_info` has it done: ns_per_frame. Ratios: benchmarks/micro/ratios.py.
"""

from __future__ import annotations

import pytest

from native import engine


@pytest.mark.parametrize("count", engine.NAME_COUNTS)
@pytest.mark.parametrize("pattern", engine.PATTERNS)
@pytest.mark.parametrize("variant", engine.VARIANTS)
def test_frames(benchmark, variant, pattern, count):
    player = engine.Player(variant, pattern, count)
    benchmark.pedantic(player, rounds=7, warmup_rounds=1)
    player.check()
    benchmark.extra_info["ns_per_frame"] = benchmark.stats["min"] / player.frames * 1e9
