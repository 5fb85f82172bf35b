"""Fixtures: stores of the throttr protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from unit.protocols.throttr.rig import Connection, Rig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Makes rigs, which are audited after the test."""
    rigs: list[Rig] = []

    def made(**options: Any) -> Rig:
        rigs.append(Rig(**options))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.settle()
        rig.store.audit()


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig()


@pytest.fixture
def client(rig: Rig) -> Connection:
    return rig.connect()
