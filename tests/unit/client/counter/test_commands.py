"""The requests of a pipeline, in order; and how often clients that wait for a server try to connect."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from counterd.client import Client, Permit, aio
from counterd.client.counter._commands import Pipelined
from counterd.errors import ConnectionLost
from counterd.protocols.counter import wire
from kit.machine import PATIENCE
from kit.shapes import BLOCKING, SHAPES, begun, got, run
from ports import free_ports


def test_a_pipeline_sends_its_requests_in_order() -> None:
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
def test_each_method_returns_the_pipeline(method: str) -> None:
    requests = Pipelined()
    assert getattr(requests, method)("a") is requests


@SHAPES
def test_holds_that_wait_for_a_server_rarely_try_to_connect(shape: str) -> None:
    """And not each time that one of the other holds has tried."""

    async def scenario() -> None:
        kind: Any = Client if shape == BLOCKING else aio.Client
        client = kind("127.0.0.1", free_ports(1)[0], timeout=PATIENCE)
        connected = client._server
        asked = []

        def count() -> Any:
            asked.append(1)
            return connected()

        client._server = count
        takes = [begun(shape, client.take(Permit(b"a", maximum=1), timeout=0.4).acquire) for _ in range(20)]
        for error in await asyncio.gather(*takes, return_exceptions=True):
            assert isinstance(error, ConnectionLost)
        assert len(asked) < 20 * 20
        await got(client.close())

    run(shape, scenario())
