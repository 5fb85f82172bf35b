"""What a program that uses the clients may rely on in their types. mypy checks this file; it is never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from typing_extensions import assert_type

import counterd.client as blocking
from counterd.client import DumpEntry, aio, sentinel, smockron, smockron_asgi, smockron_wsgi
from counterd.errors import CounterdError, NotAvailable


def use(client: blocking.Client) -> None:
    assert_type(client.acquire("name", 2, maximum=3), int)
    assert_type(client.get(b"name"), int)
    assert_type(client.get("name", default=0), int)
    assert_type(client.dump(), list[DumpEntry])
    assert_type(client.dump()[0].name, bytes)
    assert_type(client.stats(), dict[str, str])
    assert_type(client.hold("name", maximum=1), blocking.Hold)
    with client.hold("name", maximum=1, timeout=None, on_lost=lambda hold: hold.lost) as hold:
        assert_type(hold, blocking.Hold)
        assert_type(hold.lost, bool)
    with client.semaphore("name", 3) as permits:
        assert_type(permits, bool)
    assert_type(client.pipeline().get("a").acquire("b", maximum=1), blocking.Pipeline)

    @client.hold("name", maximum=1)
    def decorated(number: int) -> str:
        return str(number)

    @client.hold("name", maximum=1)
    def generated(number: int) -> Iterator[str]:
        yield str(number)

    assert_type(decorated(1), str)
    assert_type(generated(1), Iterator[str])


async def use_with_asyncio() -> None:
    async with aio.Client("counter://localhost", timeout=1) as client:
        assert_type(client, aio.Client)
        assert_type(await client.acquire("name", 2, maximum=3), int)
        assert_type(await client.get(b"name"), int)
        assert_type(await client.dump(), list[DumpEntry])
        assert_type(await client.stats(), dict[str, str])
        assert_type(client.hold("name", maximum=1), aio.Hold)
        async with client.hold("name", maximum=1, on_lost="reacquire") as hold:
            assert_type(hold, aio.Hold)
            assert_type(hold.lost, bool)
        assert_type(await client.semaphore("name", 3).locked(), bool)
        assert_type(client.pipeline().get("a").acquire("b", maximum=1), aio.Pipeline)

        @client.hold("name", maximum=1)
        async def decorated(number: int) -> str:
            return str(number)

        @client.hold("name", maximum=1)
        async def generated(number: int) -> AsyncIterator[str]:
            yield str(number)

        assert_type(await decorated(1), str)
        assert_type([each async for each in generated(1)], list[str])
        try:
            await client.noop()
        except NotAvailable as error:
            assert_type((error.name, error.consumption, error.waited), tuple[bytes, int | None, float | None])
        except CounterdError as error:
            assert_type(error.status, int | None)


def misuse(client: blocking.Client, other: aio.Client) -> None:
    client.acquire("name", 1, 2)  # type: ignore[call-arg]
    client.hold("name", maximum=1, on_lost="nothing")  # type: ignore[arg-type]
    client.get(5)  # type: ignore[arg-type]
    other.hold("name", maximum="1")  # type: ignore[arg-type]


def use_tokens(client: sentinel.Client) -> None:
    assert_type(client.flow(101), sentinel.Answer)
    assert_type(client.param(102, ["a", 5, sentinel.Typed(sentinel.Tag.LONG, 5)], 2).passed, bool)
    token = client.acquire(103, 2, prioritized=True)
    assert_type(token, sentinel.Token)
    assert_type((client.keep(token), client.release(token), client.ping()), tuple[int, bool, int])
    assert_type(client.stats(), sentinel.Stats)
    with client.hold(103, timeout=5, on_lost=lambda hold: hold.raise_if_lost()) as hold:
        assert_type(hold, sentinel.Hold)
        assert_type((hold.lost, hold.fallback), tuple[bool, bool])
    sentinel.Client("sentinel://localhost", fallback="nothing")  # type: ignore[arg-type]
    client.hold(103, on_lost="reacquire")  # type: ignore[arg-type]

    @client.hold(103)
    def decorated(number: int) -> str:
        return str(number)

    assert_type(decorated(1), str)


async def use_tokens_with_asyncio() -> None:
    async with sentinel.AsyncClient(namespace="shop", limits={101: 5}) as client:
        assert_type(await client.flow(101), sentinel.Answer)
        assert_type(await client.param(102, [True]), sentinel.Answer)
        assert_type(await client.acquire(103), sentinel.Token)
        assert_type(client.stats(), sentinel.Stats)
        async with client.hold(103) as hold:
            assert_type(hold, sentinel.AsyncHold)

        @client.hold(103)
        async def generated(number: int) -> AsyncIterator[str]:
            yield str(number)

        assert_type(generated(1), AsyncIterator[str])


def use_gatekeeper(gatekeeper: smockron.Gatekeeper) -> None:
    assert_type(gatekeeper.connect(5), bool)
    decision = gatekeeper.decide("10.0.0.1", b"api", log_info="agent")
    assert_type(decision, smockron.Decision)
    assert_type((decision.verdict, decision.delay_s, decision.until_ms), tuple[smockron.Verdict, float, int])
    assert_type(gatekeeper.stats().away, dict[str, str])
    smockron.Gatekeeper({"api": "db1", "web": "db2"}, rejected=0.1)
    smockron.Gatekeeper(("db2:1", "db2:2"))
    smockron.Gatekeeper({b"api": "db1"}, rejected="none")
    smockron.Gatekeeper(5)  # type: ignore[arg-type]
    try:
        with gatekeeper.admit("10.0.0.1") as admitted:
            assert_type(admitted, smockron.Decision)
    except smockron.Rejected as error:
        assert_type((error.identifier, error.retry_after), tuple[bytes, float])
    smockron_wsgi.Middleware(lambda environ, start_response: [b""], gatekeeper, ["client", "path"])
    smockron_asgi.Middleware(lambda *_: None, gatekeeper)  # type: ignore[arg-type]


async def use_gatekeeper_with_asyncio() -> None:
    async with smockron.AsyncGatekeeper("smockron://localhost", "api") as gatekeeper:
        assert_type(await gatekeeper.connect(), bool)
        assert_type(gatekeeper.decide("10.0.0.1"), smockron.Decision)
        async with gatekeeper.admit("10.0.0.1") as admitted:
            assert_type(admitted, smockron.Decision)
