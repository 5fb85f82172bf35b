"""Level 3: the vectors against a real token server of Sentinel, where there is one.

It is Java, and not to be had as a package, so these tests are there only if SENTINEL_REFERENCE says where it listens:

    SENTINEL_REFERENCE=127.0.0.1:18730 python -m pytest tests/conformance/sentinel/test_reference.py

It must have been given the rules of rules.json beside this file (each namespace's flowRules and paramFlowRules, as a
datasource gives them), all these namespaces and maxAllowedQps = 40, and has to be started anew for each run, because
cases leave behind what has passed. Played is what needs neither driven time nor other rules, and is not marked "skip".
Each step of these has been seen, byte for byte, from Sentinel 1.8.9.
"""

from __future__ import annotations

import os
import socket

import pytest

from conformance import vectors

ADDRESS = os.environ.get("SENTINEL_REFERENCE", "")
CASES = vectors.load("sentinel")
PLAYED = [case for case in CASES if not (case.skip or case.driven or case.happenings)]


def test_cases_that_cannot_be_compared_have_a_reason() -> None:
    """Each concerns an extension of counterd; and no case is left out that the reference could answer."""
    assert {case.section for case in PLAYED} == {"PING", "FLOW", "PARAM", "On the wire"}
    assert len(PLAYED) > 40
    assert all(case.why for case in CASES if case.skip)
    assert all("the reference" in case.why for case in CASES if case.skip and case.section in ("PING", "FLOW", "PARAM"))
    for case in PLAYED:
        assert case.differs == any(step.reference != step.expect for step in case.steps)


if ADDRESS:

    def connect() -> socket.socket:
        host, _, port = ADDRESS.rpartition(":")
        return socket.create_connection((host, int(port)))

    @pytest.mark.parametrize("case", PLAYED, ids=str)
    def test_the_reference_does_what_the_vector_says(case: vectors.Case) -> None:
        vectors.run_case(case, lambda: vectors.SocketPeer(connect()), reference=True)
