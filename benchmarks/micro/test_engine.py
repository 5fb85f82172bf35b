"""Nanoseconds a frame of the engine, no sockets; `extra_info` has them: ns_per_frame. What is timed is a whole run.

test_operations: one kind of request at a time, 64 in a receive, of names that stay in the cache; the other protocols'
                 by how many are in one receive, too.
test_batches:    acquires and releases of such names, by how many are in one receive.
test_frames:     with ledger and without, with the prefetching pass and without. Frames for 50 sessions in turn, batches
                 of 64, random 16-byte names, at 1 thousand, 100 thousand and 900 thousand names: pairs (acquire and
                 release in turn) and later (64 acquired, and released when all 50 sessions have theirs).

Ratios: benchmarks/micro/ratios.py. Whether they are what they were: benchmarks/regress.py.
"""

from __future__ import annotations

import pytest

from native import engine, jobs, keys, throttles, tokens


def measure(benchmark, player: engine.Player, rounds: int) -> None:
    benchmark.pedantic(player, setup=player.prepare, rounds=rounds, warmup_rounds=1)
    player.check()
    if benchmark.stats:  # none with --benchmark-disable
        benchmark.extra_info["ns_per_frame"] = benchmark.stats["min"] / player.frames * 1e9


OPERATIONS = {
    **engine.OPERATIONS, **keys.OPERATIONS, **tokens.OPERATIONS, **jobs.OPERATIONS, **throttles.OPERATIONS,
}  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations(benchmark, operation):
    measure(benchmark, OPERATIONS[operation](), rounds=200)


@pytest.mark.parametrize("depth", engine.DEPTHS)
def test_batches(benchmark, depth):
    measure(benchmark, engine.pairs_player(depth), rounds=200)


@pytest.mark.parametrize("count", engine.NAME_COUNTS)
@pytest.mark.parametrize("pattern", engine.PATTERNS)
@pytest.mark.parametrize("variant", engine.VARIANTS)
def test_frames(benchmark, variant, pattern, count):
    measure(benchmark, engine.variant_player(variant, pattern, count), rounds=7)
