"""Answers of Redis servers at random: none is the end of a search, and what is no answer ends its connection."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from typing import TYPE_CHECKING, Any

import hiredis
import pytest

from counterd.cluster.lease_protocol import LIBRARY
from counterd.control.link import Link, LinkFailed, Login, Place, connect
from counterd.control.resp_size_guard import RespSizeGuard
from counterd.control.servers import check_state, read_map, read_role
from kit.machine import examples
from kit.redises import INFO, NO_CLUSTER, Refusal, serving, written

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

WORDS = (b"", b"OK", b"master", b"slave", b"127.0.0.1", b"6379", b"run_id:7", b"cluster_state:ok", b"\xff\r\n*9\r\n")
NUMBERS = (0, 1, -1, 6379, 16383, 65536, 1 << 62)
ASKED: tuple[tuple[bytes, Callable[[Link], Awaitable[Any]]], ...] = (
    (b"CLUSTER", read_map),
    (b"CLUSTER", check_state),
    (b"ROLE", read_role),
    (b"FUNCTION", Link.prepare),
    (b"SCRIPT", Link.prepare),
)
FALSE = (
    [[0, 16383, [b"127.0.0.1", 6379, b"id", []]]],
    [b"master", 7, [[b"127.0.0.1", b"6379", b"7"]]],
    [b"slave", b"127.0.0.1", 6379, b"connected", 7],
)


def value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(6 if depth < 4 else 4)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(WORDS)
    if kind == 2:
        return None
    if kind == 3:
        return Refusal(rng.choice(("ERR no", "MOVED 1 a", "\x7f", "")))
    return [value(rng, depth + 1) for _ in range(rng.randrange(5))]


def changed(rng: random.Random, answer: Any) -> Any:
    """Returns an answer of which something may be odd."""
    if rng.random() < 0.2:
        return value(rng)
    if isinstance(answer, list):
        return [changed(rng, each) for each in answer][: rng.randrange(len(answer) + 3)]
    return answer


def chunks(rng: random.Random, data: bytes) -> list[bytes]:
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(6)))
    return [data[first:last] for first, last in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@pytest.mark.parametrize("seed", range(examples(12)))
def test_who_reads_along_agrees_with_the_parser(seed: int) -> None:
    """About where answers end, and about what makes no sense: nothing gets by that way."""
    rng = random.Random(seed)
    for _ in range(200):
        guard, reader, read, found = RespSizeGuard(), hiredis.Reader(), 0, 0
        answers = [written(value(rng)) for _ in range(1 + rng.randrange(3))]
        ends = [*itertools.accumulate(map(len, answers))]
        for chunk in chunks(rng, b"".join(answers)):
            guard.read(chunk)
            reader.feed(chunk)
            while reader.gets() is not False:
                found += 1
            read += len(chunk)
            assert found == sum(end <= read for end in ends)
            is_within = bool(guard._outer or guard._skip or guard._rest)
            assert is_within == (read not in {0, *ends})


@pytest.mark.parametrize("seed", range(examples(4)))
def test_no_answer_ends_a_search(seed: int) -> None:
    """What asks a server returns what makes sense, or fails as if the server could not be reached."""
    rng = random.Random(seed)
    answers: dict[bytes, Any] = {}

    async def run() -> None:
        async with serving(lambda words: answers[words[0]]) as server:
            for _ in range(200):
                login = Login("", rng.choice(("", "secret")), None)
                answers.update({b"INFO": INFO, b"AUTH": b"OK", b"FUNCTION": Refusal("ERR unknown command")})
                asked, ask = rng.choice((*ASKED, (b"INFO", read_role), (b"AUTH", read_role)))
                answers.update({b"CLUSTER": NO_CLUSTER, b"ROLE": [b"master", 1, []], b"SCRIPT": b"a" * 40})
                answers[asked] = changed(rng, rng.choice(FALSE))
                await act(server.place, login, ask)

    async def act(place: Place, login: Login, ask: Callable[[Link], Awaitable[Any]]) -> None:
        try:
            link = await connect(place, login, lambda _: None)
        except LinkFailed:
            return
        with contextlib.suppress(LinkFailed):
            await link.identify()
            await ask(link)
        link.cut("the end")
        assert link.command in {("", ""), ("FCALL", LIBRARY), ("EVALSHA", "a" * 40)}

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(examples(4)))
def test_bytes_at_random(seed: int) -> None:
    """Each call gets an answer, waits, or fails with its connection. Nothing else comes of them."""
    rng = random.Random(seed)

    async def run() -> None:
        async with serving(lambda _: INFO) as server:
            for _ in range(200):
                link = await connect(server.place, Login("", "", None), lambda _: None)
                found: list[Any] = []
                for _ in range(3):
                    link.send(found.append, "PING")
                data = bytearray(b"".join(written(value(rng)) for _ in range(1 + rng.randrange(3))))
                for _ in range(rng.randrange(4)):
                    data[rng.randrange(len(data))] = rng.choice(b"*$:+-\r\n0123456789\x00\xff>%")
                for chunk in chunks(rng, bytes(data)):
                    if link.is_open:
                        link.data_received(chunk)
                assert link.is_open or len(found) == 3
                link.cut("the end")
                assert len(found) == 3

    asyncio.run(run())
