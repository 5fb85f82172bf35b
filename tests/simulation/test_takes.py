"""That the world of Takes notices: each promise is broken once, by the engine or in the books, which is the same to who
compares the two."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from counterd.protocols.counter import wire
from kit.promises import MS
from property.takes_both import Both
from property.takes_model import Books, Bucket
from property.takes_turns import Shares
from simulation import run
from simulation.takes import TakesWorld

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 2_500


def wrap(patch: pytest.MonkeyPatch, owner: type, name: str, around: Callable[..., Any]) -> None:
    """Has a method called through `around`, which is told what there was."""
    before = getattr(owner, name)
    patch.setattr(owner, name, lambda *args, **names: around(before, *args, **names))


# ---- the engine, behind the books' back -----------------------------------------------------------------------------


def a_permit_is_given_back_by_nobody(patch: pytest.MonkeyPatch) -> None:
    def step(before: Any, world: Any, *args: Any) -> None:
        for party in world.both.books.parties:
            if world.steps % 20 == 0 and party.client is not None and party.held and not party.client.session.more:
                party.client.session.receive(wire.release(0, next(iter(party.held)), 1), world.now)
        before(world, *args)

    wrap(patch, TakesWorld, "step", step)


def waits_end_early(patch: pytest.MonkeyPatch) -> None:
    """In the books no wait has come to its end yet."""
    wrap(patch, Both, "refusals", lambda _before, _both, _waits, _gone: {})


def numbers_begin_anew(patch: pytest.MonkeyPatch) -> None:
    """With each daemon."""
    wrap(patch, Both, "number", lambda before, both, at, number: before(both, at, number % (1 << 20) + 1))


def a_reply_is_lost(patch: pytest.MonkeyPatch) -> None:
    def answered(before: Any, world: Any, link: Any, output: bytes) -> None:
        before(world, link, b"" if world.steps % 50 == 0 else output)

    wrap(patch, TakesWorld, "answered", answered)


def limits_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Books, "load", lambda before, books, _caps, _paces: before(books, {}, {}))


# ---- the books ------------------------------------------------------------------------------------------------------


def rates_are_faster(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Bucket, "at", lambda before, bucket, pace, now: before(bucket, pace, now) + MS)


def what_has_come_back_is_refunded(patch: pytest.MonkeyPatch) -> None:
    wrap(patch, Bucket, "look", lambda _before, _bucket, _pace, _now: None)


def grace_times_are_longer(patch: pytest.MonkeyPatch) -> None:
    def end(before: Any, books: Any, party: Any) -> None:
        before(books, party)
        party.until += 20 * MS

    wrap(patch, Books, "end", end)


def a_token_is_valid_for_any_attempt(patch: pytest.MonkeyPatch) -> None:
    def find(before: Any, books: Any, token: bytes, _attempt: int) -> Any:
        for party in books.parties:
            if party.former[0] == token != b"":
                return party
        return before(books, token, 0)

    wrap(patch, Books, "find", find)


def keys_get_the_same(patch: pytest.MonkeyPatch) -> None:
    """Whatever their weights are."""

    def settle_pair(before: Any, shares: Any, pair: Any, *args: Any) -> None:
        pair.weights = (1000, 1)
        before(shares, pair, *args)

    wrap(patch, Shares, "settle_pair", settle_pair)


def the_last_goes_first(patch: pytest.MonkeyPatch) -> None:
    """The last of the same key is thought to be the first."""
    wrap(patch, Shares, "claim_turns", lambda before, shares, waits, granted, still: before(
        shares, granted, [wait for wait in waits if wait.serial in still], {wait.serial for wait in granted}
    ))  # fmt: skip


# With the promise, and a world in which the defect is noticed.
DEFECTS: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, int]] = {
    a_permit_is_given_back_by_nobody: ("books", 1),
    waits_end_early: ("refused", 2),
    numbers_begin_anew: ("fence", 1),
    a_reply_is_lost: ("waits", 1),
    limits_are_not_loaded: ("refused", 1),
    rates_are_faster: ("left", 1),
    what_has_come_back_is_refunded: ("left", 22),
    grace_times_are_longer: ("books", 2),
    a_token_is_valid_for_any_attempt: ("resume", 3),
    keys_get_the_same: ("shares", 9),
    the_last_goes_first: ("turn", 2),
}


@pytest.mark.parametrize(("defect", "told"), DEFECTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_told(
    defect: Callable[[pytest.MonkeyPatch], None],
    told: tuple[str, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    promise, seed = told
    defect(monkeypatch)
    assert not run.simulate("takes", STEPS, seed, 1, lambda: 0.0)
    assert f": {promise}: " in capsys.readouterr().out
