"""counterctl cluster with valid and invalid answers; tests/functional/test_counterctl_cluster.py has real servers."""

from __future__ import annotations

import asyncio
import struct
from typing import TYPE_CHECKING, Any

import pytest

from counterd.cli.ctl import cluster
from counterd.cluster.lease_protocol import PARTITIONS
from counterd.control.link import LinkFailed, Login, connect
from kit.redises import Refusal, serving

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from counterd.control.link import Link

SHARE = struct.pack("<6d", 5, 3, 0, 0, 0, 0)
NAN = float("nan")
RIGHT: dict[bytes, Any] = {
    b"TIME": [b"100", b"500000"],
    b"ZRANGE": [b"host-1-ab.1", b"104500"],
    b"HSCAN": [b"0", [b"name", SHARE]],
    b"HGET": SHARE,
    b"GET": struct.pack("<3d", 103e6, 0, 10),
    b"ZADD": 1,
}
ODD_TIMES = (b"OK", None, 7, [], [b"1"], [b"1", b"x"], [b"1", None], [[], []], [b"9" * 400, b"9" * 400])
ODD_LEASES = (b"OK", None, 7, [b"a"], [7, 7], [b"a", b"x"], [b"a", b"nan"], [b"a", b"inf"], [b"\xff", b"1"])
ODD_PAGES = (
    *(b"OK", None, 7, [], [b"0"], [0, []], [b"0", None], [b"0", 7], [b"0", [b"a", None]], [b"0", [b"a", b"short"]]),
    *([b"0", [b"a", struct.pack("<6d", *each)]] for each in ((NAN,) * 6, (1, 1, 9, 0, 0, 0))),
)
ODD_SHARES = (b"", b"short", 7, [], struct.pack("<6d", *[float("inf")] * 6))
ODD_RATES = (b"", b"short", 7, [], struct.pack("<3d", NAN, 0, 1))


def asked(ask: Callable[[list[Link]], Awaitable[Any]], **odd: Any) -> Any:
    """Returns what ask() returns of a server with these answers, which has all partitions."""
    answers = {**RIGHT, **{command.encode(): answer for command, answer in odd.items()}}

    async def run() -> Any:
        async with serving(lambda words: answers[words[0]]) as server:
            link = await connect(server.place, Login("", "", None), lambda _: None)
            try:
                return await ask([link] * PARTITIONS)
            finally:
                link.cut("the end")

    return asyncio.run(run())


def of_name(links: list[Link]) -> Awaitable[Any]:
    return cluster.read_shares(links, b"name")


def evict(links: list[Link]) -> Awaitable[Any]:
    return cluster.end_leases(links, "host-1-ab")


def test_valid_answers() -> None:
    assert asked(cluster.read_daemons) == [("host-1-ab", 4.0, PARTITIONS, PARTITIONS, PARTITIONS * 5, PARTITIONS * 3)]
    assert asked(of_name) == [(None, 5, 3, None, 0, 2.5), ("host-1-ab", 5, 3, "plenty", 0, None)]
    assert asked(of_name, HGET=None, GET=None) == []
    assert asked(evict) == PARTITIONS


@pytest.mark.parametrize(
    ("ask", "command", "answer"),
    [
        *((cluster.read_daemons, "TIME", each) for each in ODD_TIMES),
        *((cluster.read_daemons, "ZRANGE", each) for each in ODD_LEASES),
        *((cluster.read_daemons, "HSCAN", each) for each in ODD_PAGES),
        *((of_name, "HGET", each) for each in ODD_SHARES),
        *((of_name, "GET", each) for each in ODD_RATES),
        *((evict, "ZADD", each) for each in (None, [], b"OK")),
    ],
)
def test_invalid_answers_are_errors(ask: Callable[[list[Link]], Awaitable[Any]], command: str, answer: Any) -> None:
    """The error names the server and the command."""
    with pytest.raises(LinkFailed, match=rf"^127\.0\.0\.1:\d+: invalid reply to {command}: "):
        asked(ask, **{command: answer})


def test_a_refusal_of_the_server_is_an_error() -> None:
    with pytest.raises(LinkFailed, match=r"^127\.0\.0\.1:\d+: WRONGTYPE "):
        asked(cluster.read_daemons, HSCAN=Refusal("WRONGTYPE Operation against a key"))


def test_an_endless_scan_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "PAGES_MAX", 5)
    with pytest.raises(LinkFailed, match="HSCAN does not end"):
        asked(cluster.read_daemons, HSCAN=[b"7", []])
