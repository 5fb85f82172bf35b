"""Level 1: the vectors against the engine in memory, with no socket and no clock."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from conformance import vectors
from property.model import make_store, outputs, settle

if TYPE_CHECKING:
    from counterd._core import Session

CASES = vectors.load("counter")


class EnginePeer:
    """A vectors.Peer on a session, which it treats as net would."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._output = bytearray()

    def send(self, data: bytes) -> None:
        self._take(self._session.receive(data, 0))

    def recv_exactly(self, size: int) -> bytes:
        assert len(self._output) >= size, f"expected {size} bytes, received {self._output.hex(' ')}"
        received = bytes(self._output[:size])
        del self._output[:size]
        return received

    def expect_nothing_more(self) -> None:
        assert not self._output, f"expected nothing, received {self._output.hex(' ')}"
        assert not self._session.closing

    def expect_eof(self) -> None:
        assert not self._output, f"expected the end, received {self._output.hex(' ')}"
        assert self._session.closing
        self.close()

    def half_close(self) -> None:
        self._take(self._session.eof(0))

    def close(self) -> None:
        self._session.closed(0)
        self._settle()

    def _take(self, output: bytes) -> None:
        self._output += output + b"".join(outputs(self._session))
        if self._session.closing:  # all has been written: net closes
            self._session.closed(0)
        self._settle()

    def _settle(self) -> None:
        settle(self._session.store)
        self._session.store.audit()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_engine_does_what_the_vector_says(case: vectors.Case) -> None:
    store = make_store(64, 64, name_memory=1 << 20)
    vectors.run_case(case, lambda: EnginePeer(store.session()))
    assert store.sessions_open == 0
    assert store.snapshot()["busy"] == 0
    assert store.snapshot()["holdings"] == 0


def test_all_cases_share_one_store() -> None:
    """As they share a server at the other levels; with only as many records as the busiest of them needs."""
    store = make_store(16, 64, name_memory=1 << 20)
    for case in CASES:
        vectors.run_case(case, lambda: EnginePeer(store.session()))
    assert store.snapshot()["busy"] == 0
    assert store.snapshot()["reclaimed"] > 0


def test_the_runner_fails_where_the_reference_differs() -> None:
    """So that a passing level 1 means something."""
    for case in CASES:
        if case.differs and not case.skip:
            store = make_store(64, 64, name_memory=1 << 20)
            with pytest.raises(AssertionError, match=f"^{re.escape(case.name)}, "):
                vectors.run_case(case, lambda: EnginePeer(store.session()), reference=True)  # noqa: B023
