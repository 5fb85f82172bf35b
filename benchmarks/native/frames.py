"""Requests and name sets that all benchmarks share."""

from __future__ import annotations

import random

from counterd.protocols.counter import wire

MAXIMUM = 1_000_000  # so that nothing is refused


def noop() -> bytes:
    return wire.noop(0)


def get(name: bytes) -> bytes:
    return wire.get(0, name)


def acquire(name: bytes, maximum: int = MAXIMUM) -> bytes:
    return wire.acquire(0, name, 1, maximum)


def take(name: bytes, count: int = 1) -> bytes:
    """A permit of that name, and of as many more names."""
    names = [name, *(name + b"%d" % number for number in range(1, count))]
    return wire.take(0, [wire.Permit(each, 1, MAXIMUM) for each in names])


def release(name: bytes) -> bytes:
    return wire.release(0, name, 1)


def make_names(count: int, size: int = 16) -> list[bytes]:
    """Random names of one size, the same in every run: their collisions are part of what is measured."""
    blob = random.Random(size).randbytes(count * size)
    return [blob[i : i + size] for i in range(0, count * size, size)]


def choose_names(names: list[bytes], count: int, seed: int = 1) -> list[bytes]:
    return random.Random(seed).choices(names, k=count)


def batches_of(requests: list[bytes], depth: int) -> list[bytes]:
    return [b"".join(requests[i : i + depth]) for i in range(0, len(requests), depth)]


def pair_batches(names: list[bytes], batches: int, depth: int, seed: int) -> list[bytes]:
    """Batches of `depth` requests: acquire and release of random names in turn; depth 1 alternates between batches."""
    choose = random.Random(seed)
    if depth == 1:
        return [frame for name in choose.choices(names, k=batches // 2) for frame in (acquire(name), release(name))]
    return [
        b"".join(acquire(name) + release(name) for name in choose.choices(names, k=depth // 2)) for _ in range(batches)
    ]


def later_rounds(names: list[bytes], sessions: int, rounds: int, depth: int, seed: int) -> list[tuple[int, bytes]]:
    """(session, batch): each session acquires `depth` names, and when all have, each releases its own."""
    choose = random.Random(seed)
    sequence = []
    for _ in range(rounds):
        chosen = [choose.choices(names, k=depth) for _ in range(sessions)]
        for make in (acquire, release):
            sequence += [(i, b"".join(map(make, chosen[i]))) for i in range(sessions)]
    return sequence
