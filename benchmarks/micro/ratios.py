"""What the ledger costs and what prefetching gains, measured in turn in one run.

    python benchmarks/micro/ratios.py [--rounds 9]

Each round times every variant once on the same batches; a ratio is the median of the rounds' ratios, a time the median
of the rounds' times, in nanoseconds a frame.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from native import engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    print(f"{'names':>8} {'pattern':>8} {'no ledger':>10} {'ledger':>8} {'ratio':>6} {'no prefetch':>12} {'gain':>6}")
    for count in engine.NAME_COUNTS:
        for pattern in engine.PATTERNS:
            players = {variant: engine.variant_player(variant, pattern, count) for variant in engine.VARIANTS}
            rounds = []
            for _ in range(options.rounds + 1):
                took = {}
                for variant, player in players.items():
                    player.prepare()
                    start = time.perf_counter()
                    player()
                    took[variant] = (time.perf_counter() - start) / player.frames * 1e9
                rounds.append(took)
            for player in players.values():
                player.check()
            del rounds[0]  # it warmed the caches
            full, bare, slow = (statistics.median(row[variant] for row in rounds) for variant in engine.VARIANTS)
            cost = statistics.median(row["ledger"] / row["no ledger"] for row in rounds)
            gain = statistics.median(row["ledger, no prefetch"] / row["ledger"] for row in rounds)
            print(
                f"{count:>8} {pattern:>8} {bare:>10.1f} {full:>8.1f} {cost:>6.2f} {slow:>12.1f} {gain:>6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
