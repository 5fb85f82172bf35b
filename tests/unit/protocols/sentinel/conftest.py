"""Fixtures: stores of the sentinel protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from unit.protocols.sentinel.rig import SECOND, Rig, calls, rate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs, which are audited after the test."""
    rigs: list[Rig] = []

    def made(*rules: Any, **options: Any) -> Rig:
        rigs.append(Rig(*rules, **options))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.store.audit()
        rig.settle()
        rig.store.audit()


@pytest.fixture
def asked() -> list[Any]:
    """The requests that a token service received."""
    return []


@pytest.fixture
def served(make_rig: Callable[..., Rig], asked: list[Any]) -> Rig:
    """A rig with a token service, which has a second to answer."""
    rig = make_rig(calls(1), rate(2, 9))
    rig.store.delegate(asked.extend, SECOND)
    return rig
