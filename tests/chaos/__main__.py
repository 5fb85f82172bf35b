#!/usr/bin/env python3
"""Chaos: a real daemon and real clients, and every fault that can happen to them, from a seed.

    python tests/chaos [--seconds 60] [--seed N] [--verbose]

Ends with one line of figures. Exit status: 1 if a promise was broken; then the files of that round are kept."""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos import rounds

ROUND_S = 5.0
PROGRESS_S = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description="Chaos: everything happens to a daemon, and no promise is broken.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long; default: %(default)s")
    parser.add_argument("--seed", default=str(random.randrange(1 << 32)), help="where all chance comes from")
    parser.add_argument("--verbose", action="store_true", help="show each round's schedule")
    options = parser.parse_args()
    print(f"chaos: seed {options.seed}", flush=True)
    shown_s = time.monotonic()

    def say(text: str) -> None:
        nonlocal shown_s
        if options.verbose:
            print(text, flush=True)
        elif time.monotonic() - shown_s > PROGRESS_S:
            shown_s = time.monotonic()
            print(text.partition(":")[0], flush=True)

    figures = rounds.run(options.seed, options.seconds, ROUND_S, say)
    for violation in figures.violations:
        print(violation)
    if figures.kept is not None:
        print(f"what was recorded is in {figures.kept}")
    print(figures)
    return 1 if figures.violations else 0


if __name__ == "__main__":
    sys.exit(main())
