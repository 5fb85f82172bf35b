"""The histograms of batches."""

from __future__ import annotations

import itertools

from unit.net.fakes import nets


def test_batches_are_counted_by_bytes_and_time() -> None:
    with nets() as make:
        net = make(max_connections=100)
        peer = net.connect()
        sizes = [1, 16, 17, 32, 262_144, 262_145]
        for size in sizes:
            peer.connection.received(bytes(size))
            peer = net.connect()
        histograms = net.server.histograms()
        assert set(histograms) == {"batch_seconds", "batch_bytes"}
        for histogram in histograms.values():
            assert len(histogram.counts) == len(histogram.bounds) + 1
            assert sum(histogram.counts) == len(sizes)
            assert all(after == 2 * before for before, after in itertools.pairwise(histogram.bounds))
        by_size = histograms["batch_bytes"]
        assert by_size.sum == sum(sizes)
        counted = dict(zip((*by_size.bounds, "above"), by_size.counts, strict=True))
        assert {bound: count for bound, count in counted.items() if count} == {16: 2, 32: 2, 262_144: 1, "above": 1}
        assert 0 < histograms["batch_seconds"].sum < 1
        assert histograms["batch_seconds"].bounds[0] == 1.024e-6
