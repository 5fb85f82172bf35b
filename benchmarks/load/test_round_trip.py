"""A client's round trip over loopback to the real daemon: one request at a time, and 64 of them at once."""

from __future__ import annotations

import itertools
import socket

import pytest

from native import frames
from peers.servers import counterd

REPLIES = {1: [16, 12], 64: [64 // 2 * 28]}  # bytes back for each batch in turn: 16 for an Acquire, 12 for a Release


@pytest.mark.parametrize("depth", [1, 64])
def test_round_trip(benchmark, depth):
    names = frames.make_names(1_000)
    turns = itertools.cycle(frames.pair_batches(names, 2_000, depth, seed=1))
    replies = REPLIES[depth]

    with counterd() as server, socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(10)

        def round_trips() -> None:
            """As many as there are kinds of replies, so that each time is of the same."""
            for size in replies:
                connection.sendall(next(turns))
                left = size
                while left:
                    left -= len(connection.recv(left))

        benchmark.pedantic(round_trips, rounds=5_000 // depth, warmup_rounds=10)
        if benchmark.stats:  # none with --benchmark-disable
            median = benchmark.stats["median"] * 1e6
            benchmark.extra_info["us_per_round_trip"] = median / len(replies)
            benchmark.extra_info["us_per_request"] = median / len(replies) / depth
