"""The flows of a sentinel room that a load asks for, and the rules that such a room needs for them.

A side, pure Python. A flow is either a semaphore or a rate, so a load's permits are those of flows 1, 2, ..., and its
rates those of 1000001, 1000002, ...; values are all of one flow, 1, of which there can be both.
"""

from __future__ import annotations

import json
from typing import Any

NAMESPACE = "counterbench"
FIRST_SEMAPHORE = 1
FIRST_RATE = 1_000_001
PARAM_FLOW = 1
FLOWS_MAX = 8192  # of each kind: a room has room for twice as many


def rules_of(names: int, maximum: int, **semaphore: int) -> str:
    """JSON for sentinel.rules: so many semaphores and rates, each of that maximum at once or a second, and one flow of
    values that have it each. semaphore: what else their clusterConfig says.
    """
    rates = [_flow(FIRST_RATE + number, maximum, 1, {}) for number in range(names)]
    semaphores = [_flow(FIRST_SEMAPHORE + number, maximum, 0, semaphore) for number in range(names)]
    values = {
        "resource": "value", "count": maximum, "paramIdx": 0, "clusterMode": True,
        "clusterConfig": {"flowId": PARAM_FLOW, "thresholdType": 1},
    }  # fmt: skip
    return json.dumps({NAMESPACE: {"flowRules": semaphores + rates, "paramFlowRules": [values]}}, indent=1) + "\n"


def _flow(flow_id: int, maximum: int, grade: int, config: dict[str, int]) -> dict[str, Any]:
    return {
        "resource": f"flow {flow_id}", "grade": grade, "count": maximum, "clusterMode": True,
        "clusterConfig": {"flowId": flow_id, "thresholdType": 1, **config},
    }  # fmt: skip
