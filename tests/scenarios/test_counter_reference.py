"""Blocks of the counter protocol's clients, cancelled at every await, with the real yrmcdsd."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kit import reference
from kit.interrupting import WAYS
from scenarios import counter, holds
from scenarios.test_interrupted import UNCLOSED, check, name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from scenarios.test_interrupted import Use

# Not those that end a connection: yrmcdsd takes up to 3 s to see that, or does not at all.
USES = (counter.held, holds.fails_within, counter.semaphore, holds.waited_for, holds.gives_up, counter.refused)
CASES = [
    pytest.param(use, way, id=name(counter.Held, use, False, way))
    for use in (*USES, counter.decorated)
    for way in WAYS
    if (use.__name__, way) not in UNCLOSED
]


class Reference:
    """The reference server; stands for a Server."""

    def __init__(self, address: Any) -> None:
        self._address = address

    def where(self, protocol: str) -> Any:
        return self._address


@pytest.fixture(scope="module")
def yrmcdsd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    with reference.running(tmp_path_factory.mktemp("yrmcdsd")) as address:
        yield Reference(address)


@pytest.mark.needs("yrmcdsd")
@pytest.mark.parametrize(("use", "way"), CASES)
def test_cancelled_at_every_await(yrmcdsd: Reference, use: Use, way: str) -> None:
    check(counter.Held(yrmcdsd), "asyncio", use, False, way)  # type: ignore[arg-type]
