"""Measures what benchmarks/regress.py compares, and prints it as JSON. Run by it, each time in a process of its own.

    python benchmarks/micro/figures.py TEXT ratios                   time of an operation / of the reference kernel
    python benchmarks/micro/figures.py TEXT instructions EXTENSION   below callgrind: the operations' names and frames

Of operations whose names contain that text.

A ratio is the median of the ratios of many short rounds. Within one, an operation and the kernel are next to each
other, and of each the best of a few goes counts: the first fills the caches, and one that is interrupted is no measure.
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[1]))

from native import engine, jobs, keys, load, load_native, load_reference, throttles, tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

ROUNDS = 60
GOES = 3
KERNEL_BATCHES = engine.REQUESTS // 64
LARGE_REQUESTS = 1 << 20  # for the large kernel: a name has left the caches before its next request

# Workloads that stay in the caches: their instructions are counted and their time is measured. The large tables
# (LARGE) are only timed, because cache misses are no instructions. "acquire, release" has batches of engine.DEPTH.
SMALL = {
    **engine.OPERATIONS,
    **{
        f"acquire, release, batches of {depth}": functools.partial(engine.pairs_player, depth)
        for depth in engine.DEPTHS
        if depth != engine.DEPTH
    },
    **keys.OPERATIONS,
    **tokens.OPERATIONS,
    **jobs.OPERATIONS,
    **throttles.OPERATIONS,
}
LARGE = (*engine.LARGE, *keys.LARGE, *tokens.LARGE, *jobs.LARGE, *throttles.LARGE)


def best(prepare: Callable[[], object], call: Callable[[], object], frames: int) -> float:
    """Returns the nanoseconds per frame of the fastest of GOES calls."""
    took = []
    for _ in range(GOES):
        prepare()
        start = time.perf_counter_ns()
        call()
        took.append(time.perf_counter_ns() - start)
    return min(took) / frames


def play_round(players: Mapping[str, engine.Player], kernel) -> dict[str, float]:
    """Returns each player's time, divided by the lower of the kernel's times just before and just after."""

    def measure_kernel() -> float:
        return best(lambda: kernel.prepare(KERNEL_BATCHES), lambda: kernel.run(KERNEL_BATCHES), KERNEL_BATCHES * 64)

    ratios = {}
    before = measure_kernel()
    for name, player in players.items():
        took = best(player.prepare, player, player.frames)
        after = measure_kernel()
        ratios[name] = took / min(before, after)
        before = after
    return ratios


def measure_ratios(only: str = "") -> dict[str, float]:
    reference = load_reference()
    small = {name: make() for name, make in SMALL.items() if only in name}
    makers = [each for each in (engine, keys, tokens, jobs, throttles) if any(only in name for name in each.LARGE)]
    large = {name: player for each in makers for name, player in each.large_players().items() if only in name}
    groups = [
        (small, reference.Kernel(engine.KNOWN, engine.REQUESTS)),
        (large, reference.Kernel(engine.NAME_COUNTS[-1], LARGE_REQUESTS)),
    ]
    gc.freeze()
    rounds = [
        {name: ratio for players, kernel in groups for name, ratio in play_round(players, kernel).items()}
        for _ in range(ROUNDS)
    ]
    for player in (*small.values(), *large.values()):
        player.check()
    return {name: statistics.median(ratios[name] for ratios in rounds) for name in rounds[0]}


def play_marked(only: str = "") -> dict[str, int]:
    """Runs each operation once in the function that callgrind looks for. Returns the number of frames of each."""
    count_instructions = load_native().count_instructions
    counts = {}
    for name, make in SMALL.items():
        if only not in name:
            continue
        player = make()
        player.prepare()
        player()  # Python's work at the first call is not counted
        player.prepare()
        count_instructions(player)
        player.check()
        counts[name] = player.frames
    return counts


if __name__ == "__main__":
    gc.disable()
    text, kind, *extension = sys.argv[1:]
    if kind == "instructions":
        load("_native", Path(extension[0]))
        print(json.dumps(play_marked(text)))
    else:
        print(json.dumps(measure_ratios(text)))
