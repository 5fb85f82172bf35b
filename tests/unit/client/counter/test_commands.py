"""What a pipeline asks for, in order."""

from __future__ import annotations

import pytest

from counterd.client.counter._commands import Pipelined
from counterd.protocols.counter import wire


def test_requests_in_order() -> None:
    requests = Pipelined()
    requests.noop().get("é").acquire("a", maximum=3).acquire(b"b", 2, maximum=4).release("a").release(b"b", 2)
    requests.stats().dump()
    taken = requests._taken()
    assert [encode for encode, *_ in taken] == [
        wire.noop,
        wire.get,
        *[wire.acquire] * 2,
        *[wire.release] * 2,
        wire.stats,
        wire.dump,
    ]
    assert [arguments for _, *arguments in taken[:6]] == [
        [],
        [b"\xc3\xa9", False],
        [b"a", 1, 3],
        [b"b", 2, 4],
        [b"a", 1],
        [b"b", 2],
    ]
    assert requests._taken() == []


@pytest.mark.parametrize("method", ["get", "release"])
def test_each_method_gives_the_pipeline(method: str) -> None:
    requests = Pipelined()
    assert getattr(requests, method)("a") is requests
