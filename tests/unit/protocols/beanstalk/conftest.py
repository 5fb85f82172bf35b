"""A store, driven as net would, for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conformance.beanstalk.engine import make_store
from kit.journaled import Journaled
from kit.pump import Pump

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def bench() -> Iterator[Pump]:
    """A store, which is audited after the test."""
    made = Pump(make_store())
    yield made
    made.settle()
    made.store.audit()


@pytest.fixture
def kept() -> Iterator[Journaled]:
    """A store with a journal, which is audited after the test."""
    made = Journaled()
    yield made
    made.bench.settle()
    made.bench.store.audit()
