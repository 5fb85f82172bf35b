"""Who lets whom go first: the rules step by step, and six clients that are after the same two permits.

The clients are those for asyncio, with a server in memory and a clock that jumps.
"""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from counterd.client import aio
from counterd.client._tenure import (
    AWAY_LONGEST_S,
    AWAY_S,
    LOOK_S,
    SLICE_AMONG_FEW_S,
    SLICE_LONGEST_S,
    SLICE_S,
    Seen,
    Tenure,
)
from kit import memory

if TYPE_CHECKING:
    from collections.abc import Iterator

FULL = 1  # room for the caller's request, but not beside what it has just given back
TAKEN = 0


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """What is drawn is the same in each run."""
    before = random.getstate()
    random.seed(1)
    yield
    random.setstate(before)


def used(tenure: Tenure, since: float, until: float) -> None:
    tenure.granted("hold", since)
    tenure.released("hold", until)


def crowded() -> tuple[Tenure, float]:
    """A tenure whose slice is over, and which has seen five refusals of others; and what time it is."""
    tenure = Tenure()
    used(tenure, 0, SLICE_S)
    assert tenure.looked(SLICE_S, Seen(FULL, 5)) is None
    used(tenure, SLICE_S, 2 * SLICE_S)
    return tenure, 2 * SLICE_S


def test_asks_at_once_until_the_slice_is_over() -> None:
    tenure = Tenure()
    assert tenure.may_ask(0)
    used(tenure, 0, 0.01)
    assert tenure.may_ask(0.01)
    used(tenure, 0.02, SLICE_S)
    assert not tenure.may_ask(SLICE_S)


def test_asks_at_once_if_it_was_away_already() -> None:
    tenure = Tenure()
    used(tenure, 0, 1)
    assert not tenure.may_ask(1 + AWAY_S)
    assert tenure.may_ask(1.01 + AWAY_S)
    used(tenure, 3, 3.01)
    assert tenure.may_ask(3.01)  # a tenure of its own


def test_is_not_away_while_it_still_has_some() -> None:
    tenure = Tenure()
    tenure.granted("another", 0)
    used(tenure, 0, 1)
    tenure.refused()
    assert not tenure.may_ask(2 + AWAY_S)
    tenure.released("another", 2)
    tenure.refused()
    assert tenure.may_ask(2)


def test_goes_on_while_nobody_is_refused() -> None:
    tenure, now = crowded()
    for _ in range(5):
        assert tenure.looked(now, Seen(FULL, 5)) is None
        assert tenure.may_ask(now)
        used(tenure, now, now + SLICE_S)
        now += SLICE_S


def test_goes_on_while_there_is_room_for_another() -> None:
    tenure, now = crowded()
    assert tenure.looked(now, Seen(FULL + 1, 9)) is None


def test_goes_on_where_the_server_does_not_tell() -> None:
    tenure = Tenure()
    used(tenure, 0, SLICE_S)
    for number in range(1, 5):
        assert tenure.looked(number * SLICE_S, Seen(FULL, None)) is None


def test_lets_others_go_first_if_they_were_refused() -> None:
    tenure, now = crowded()
    assert tenure.looked(now, Seen(FULL, 6)) == LOOK_S
    assert not tenure.may_ask(now)
    assert tenure.looked(now + LOOK_S, Seen(TAKEN, 7)) is None
    assert tenure.may_ask(now + LOOK_S)


def test_lets_others_go_first_if_it_was_refused_itself() -> None:
    tenure = Tenure()
    tenure.refused()
    used(tenure, 0, SLICE_S)
    assert tenure.looked(SLICE_S, Seen(FULL, None)) == LOOK_S


def test_asks_if_others_were_quicker() -> None:
    tenure, now = crowded()
    assert tenure.looked(now, Seen(TAKEN, 6)) is None
    assert tenure.may_ask(now)


def test_stays_away_until_everybody_has_asked() -> None:
    tenure, now = crowded()
    left = now
    while (pause := tenure.looked(now, Seen(FULL, 6))) is not None:
        assert 0 < pause <= LOOK_S
        now += pause
    assert left + AWAY_S <= now <= left + AWAY_LONGEST_S


def stay_away(tenure: Tenure, now: float, refused: int) -> float:
    """For nothing. Returns when that is over."""
    while (pause := tenure.looked(now, Seen(FULL, refused))) is not None:
        now += pause
    return now


def test_stays_away_more_rarely_if_nobody_takes_anything() -> None:
    """Somebody is refused another name, say: what that costs is bounded."""
    tenure, now = crowded()
    slices, refused = [], 5
    for _ in range(10):
        refused += 1
        now = stay_away(tenure, now, refused)
        begun = now
        while tenure.may_ask(now) and now - begun < 2 * SLICE_LONGEST_S:
            used(tenure, now, now + 0.01)
            now += 0.01
        slices.append(now - begun)
    assert slices[0] == pytest.approx(2 * SLICE_S, abs=0.02)
    assert slices[-1] == pytest.approx(SLICE_LONGEST_S, abs=0.02)
    assert AWAY_LONGEST_S / SLICE_LONGEST_S < 0.06


def test_goes_on_for_longer_among_few() -> None:
    for refused, goes_on in ((6, SLICE_AMONG_FEW_S), (50, SLICE_S)):
        tenure, now = crowded()
        assert tenure.looked(now, Seen(FULL, refused)) is not None
        assert tenure.looked(now + LOOK_S, Seen(TAKEN, refused)) is None
        used(tenure, now, now + goes_on - 0.001)
        assert tenure.may_ask(now + goes_on - 0.001)
        assert not tenure.may_ask(now + goes_on)


def test_what_is_left_by_who_gave_up_is_no_reason_to_stay_away_later() -> None:
    tenure, now = crowded()
    assert tenure.looked(now, Seen(FULL, 6)) is not None
    assert tenure.may_ask(now + AWAY_LONGEST_S + AWAY_S)


# ---- six of them ----------------------------------------------------------------------------------------------------

DONE_S = 12.0  # of the clock that jumps


def grants(count: int, maximum: int, hold_s: float, work_s: float = 0.0) -> list[int]:
    """How many holds each of so many processes got."""
    loop = memory.Loop()
    loop.server.delay = lambda: random.uniform(0.00005, 0.0002)
    clients = [aio.Client() for _ in range(count)]
    got = [0] * count

    async def process(number: int) -> None:
        await asyncio.sleep(random.uniform(0, 0.01))
        while loop.now < DONE_S:
            async with clients[number].hold("pool", maximum=maximum):
                got[number] += 1
                await asyncio.sleep(hold_s)
            await asyncio.sleep(work_s)

    async def main() -> None:
        await asyncio.gather(*map(process, range(count)))
        for client in clients:
            await client.close()

    loop.run(main())
    return sorted(got)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("count", "maximum", "hold_s", "work_s"), [(6, 2, 0.05, 0), (6, 2, 0.005, 0), (6, 2, 0.05, 0.02), (2, 1, 0.05, 0)]
)
def test_nobody_gets_less_than_a_third_of_what_another_gets(
    count: int, maximum: int, hold_s: float, work_s: float, seed: int
) -> None:
    random.seed(seed)
    got = grants(count, maximum, hold_s, work_s)
    assert got[0] > got[-1] / 3
    assert sum(got) > DONE_S / hold_s * maximum * 0.5  # and the permits are in use


@pytest.mark.parametrize(("count", "maximum"), [(1, 1), (2, 2)])
def test_who_keeps_nobody_waiting_never_waits(count: int, maximum: int) -> None:
    """All permits are in use, and nobody else wants one."""
    assert grants(count, maximum, 0.05)[0] > DONE_S / 0.0504 - 2
