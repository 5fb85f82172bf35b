"""Level 3: the vectors against a real beanstalkd, so that they describe its behaviour and not our idea of it.

It is Debian's, 1.12; differences of 1.13 are in `why`. Each case has a beanstalkd of its own."""

from __future__ import annotations

import re
import socket

import pytest

from conformance import vectors
from kit import reference
from kit.machine import PATIENCE

CASES = [case for case in vectors.load("beanstalk") if not case.skip]


def play(case: vectors.Case, *, differs: bool = False, timeout: float = PATIENCE) -> None:
    with reference.beanstalkd() as address:
        vectors.run_case(
            case, lambda: vectors.SocketPeer(socket.create_connection(address), timeout=timeout), reference=not differs
        )


@pytest.mark.needs("beanstalkd")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_does_what_the_vector_says(case: vectors.Case) -> None:
    play(case)


@pytest.mark.needs("beanstalkd")
@pytest.mark.parametrize("case", [case for case in CASES if case.differs], ids=str)
def test_the_reference_really_differs(case: vectors.Case) -> None:
    """Otherwise the vector's `reference` and `why` are outdated."""
    with pytest.raises(AssertionError, match=f"^{re.escape(case.name)}, step "):
        play(case, differs=True, timeout=0.5)
