"""Microseconds of a decision of a gatekeeper, by what is decided; `extra_info` has them: us_per_decision. No sockets.

Its masters do not answer, so what it tells them waits, and the oldest goes: that is part of what is timed.
"""

from __future__ import annotations

import time

import pytest

from counterd.client.smockron import Gatekeeper, Verdict

IDENTIFIER = b"n" * 16
DECISIONS = 900  # fewer than may be delayed at a time
UNTIL_S = {Verdict.PASS: 0, Verdict.DELAY: 3600, Verdict.REJECT: 7200}  # from now on


@pytest.mark.parametrize("verdict", Verdict)
def test_decide(benchmark, verdict):
    with Gatekeeper("127.0.0.1:1", max_delay_s=5_400) as gatekeeper:
        core, now_ns = gatekeeper._core, time.monotonic_ns()
        core.delays.remember(core.masters[0].gates[0].times, IDENTIFIER, now_ns + UNTIL_S[verdict] * 10**9, now_ns)
        decided = []

        def leave() -> None:
            while decided:
                gatekeeper.gave_up(decided.pop())

        def decide() -> None:
            decided[:] = [gatekeeper.decide(IDENTIFIER) for _ in range(DECISIONS)]

        benchmark.pedantic(decide, setup=leave, rounds=100, warmup_rounds=1)
        assert {each.verdict for each in decided} == {verdict}
    if benchmark.stats:  # none with --benchmark-disable
        benchmark.extra_info["us_per_decision"] = benchmark.stats["min"] / DECISIONS * 1e6
