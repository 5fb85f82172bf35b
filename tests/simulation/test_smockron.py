"""That the smockron protocol's world notices: each promise is broken once, by a gatekeeper, or in the books."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from counterd.client.smockron._delays import DelayCache
from counterd.client.smockron._gatekeeping import Core
from counterd.client.smockron._zmtp import ZmtpSession
from kit.promises import MS
from property.smockron_model import Model
from simulation import run
from simulation.smockron import SmockronWorld

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from counterd.protocols.smockron.rules import Rule

STEPS = 6_000
WORLDS = 16


def a_gatekeeper_decides_a_millisecond_early(patch: pytest.MonkeyPatch) -> None:
    decide = Core.decide
    patch.setattr(Core, "decide", lambda core, *request: decide(core, *request[:3], request[3] + MS, request[4]))


def a_gatekeeper_believes_what_it_was_told_last(patch: pytest.MonkeyPatch) -> None:
    def remember(told: DelayCache, times: dict[bytes, int], identifier: bytes, until_ns: int, now_ns: int) -> None:
        told.forget(times, identifier)
        before(told, times, identifier, until_ns, now_ns)

    before = DelayCache.remember
    patch.setattr(DelayCache, "remember", remember)


def a_gatekeeper_does_not_listen(patch: pytest.MonkeyPatch) -> None:
    """And the books believe that it need not."""
    patch.setattr(DelayCache, "remember", lambda *_: None)
    patch.setattr(SmockronWorld, "hear", lambda *_: None)
    patch.setattr(SmockronWorld, "unheard", lambda *_: 0)


def a_gatekeeper_subscribes_once_only(patch: pytest.MonkeyPatch) -> None:
    def closed(line: ZmtpSession, now: float) -> None:
        before(line, now)
        line._topics.clear()

    before = ZmtpSession.closed
    patch.setattr(ZmtpSession, "closed", closed)


def a_gatekeeper_loses_messages(patch: pytest.MonkeyPatch) -> None:
    def collect(core: Core, master: Any, now_ns: int) -> bytes:
        for gate in master.filled:
            if len(gate.queue) > 2:
                gate.queue.pop()
        return before(core, master, now_ns)

    before = Core._collect
    patch.setattr(Core, "_collect", collect)


def a_burst_counts_twice(patch: pytest.MonkeyPatch) -> None:
    def load_rules(model: Model, rules: Mapping[bytes, Rule]) -> None:
        bursts = {name: rule.burst._replace(ns=2 * rule.burst.ns) for name, rule in rules.items()}
        before(model, {name: rule._replace(burst=bursts[name]) for name, rule in rules.items()})

    before = Model.load_rules
    patch.setattr(Model, "load_rules", load_rules)


DEFECTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    a_gatekeeper_decides_a_millisecond_early: "obeys",
    a_gatekeeper_believes_what_it_was_told_last: "obeys",
    a_gatekeeper_does_not_listen: "rate",
    a_gatekeeper_subscribes_once_only: "recovers",
    a_gatekeeper_loses_messages: "counts",
    a_burst_counts_twice: "told",
}


@pytest.mark.parametrize(("defect", "promise"), DEFECTS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_broken_promise_is_told(
    defect: Callable[[pytest.MonkeyPatch], None],
    promise: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    defect(monkeypatch)
    for seed in range(1, WORLDS + 1):
        if not run.simulate("smockron", STEPS, seed, 1, lambda: 0.0):
            break
        capsys.readouterr()
    else:
        pytest.fail("nobody noticed")
    assert f": {promise}: " in capsys.readouterr().out.splitlines()[0]
