"""Simulates the engine, in worlds of which each is one seed's. Exit status 1 if a promise was broken."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # as pytest has it

from simulation.run import PROTOCOLS, simulate  # noqa: E402 - by now it is found


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/simulation", description=__doc__)
    parser.add_argument("--steps", type=int, default=2_000_000, help="of each protocol")
    parser.add_argument("--seed", type=int, default=1, help="of the first world")
    parser.add_argument("--protocol", choices=sorted(PROTOCOLS), action="append", help="all, if none is given")
    parser.add_argument("--worlds", type=int, default=0, help="at most so many, each with its seed")
    options = parser.parse_args()
    logging.disable()  # gatekeepers say each time that they have lost their master
    fine = True
    for protocol in options.protocol or sorted(PROTOCOLS):
        fine = simulate(protocol, options.steps, options.seed, options.worlds, time.process_time) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
