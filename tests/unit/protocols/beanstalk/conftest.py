"""A store, driven as net would, for the tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from conformance.beanstalk.engine import make_store
from conformance.driven import Bench
from kit.journaled import Journaled

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def bench() -> Iterator[Bench]:
    """Audited in the end."""
    made = Bench(make_store())
    yield made
    made.settle()
    made.store.audit()


@pytest.fixture
def kept() -> Iterator[Journaled]:
    """Audited in the end."""
    made = Journaled()
    yield made
    made.bench.settle()
    made.bench.store.audit()
