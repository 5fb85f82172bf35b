"""The sentinel protocol as counterbench loads it: its flows, their rules, and whether the room kept its promises.

A side, pure Python. A flow is either a semaphore or a rate, so a load's permits are those of flows 1, 2, ..., and its
rates those of 1000001, 1000002, ...; values are all of one flow, 1, of which there can be both.

The load processes count what is surely held (granted, and its release not sent). There is no Dump, so the room is
asked: of a flow of which so many are in use, all that is left is granted at once, and one more is not. Needs flows
whose limit is the plan's maximum, whom nobody else asks, and leases that are longer than anything is held.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.bench.asking import asked, bounded, resolve
from counterd.bench.dialect import Checks, Dialect, Mistakes, Rules
from counterd.errors import ProtocolError
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.wire import Response, ResponseParser, Status

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

    from counterd.bench._board import Board
    from counterd.bench.plan import Plan

NAMESPACE = "counterbench"
FIRST_SEMAPHORE = 1
FIRST_RATE = 1_000_001
PARAM_FLOW = 1
FLOWS_MAX = 8192  # of each kind: a room has room for twice as many
NAME_SIZE_MAX = 996  # bytes of a value in a frame of the protocol
I32_MAX = 0x7FFFFFFF
GIVE_BACK_S = 30.0
LOOK_S = 5.0  # that an earlier load's tokens may take to end
PAUSE_S = 0.02
AT_ONCE = 500  # requests: less than anybody's socket holds


def requests_of(plan: Plan, name: bytes) -> dict[str, bytes]:
    """Flows and tokens are numbers: these have the first flow, and no token yet. Only values have names."""
    return {
        "noop": wire.ping(0, NAMESPACE.encode()),
        "acquire": wire.acquire(0, FIRST_SEMAPHORE, plan.resources),
        "release": wire.release(0, 0),
        "keep": wire.keep(0, 0),
        "flow": wire.flow(0, FIRST_RATE, plan.resources),
        "param": wire.param_flow(0, PARAM_FLOW, plan.resources, [name]),
    }


def mistakes_of(plan: Plan) -> Mistakes:
    """What a room has no room for."""
    kinds = plan.work.weights.keys()
    return [
        (
            plan.names > FLOWS_MAX and kinds != {"param"},
            f"there are {FLOWS_MAX} flows of a kind at most, not {plan.names}; values of param can be more",
        ),
        (plan.resources > I32_MAX, f"resources are 1 to {I32_MAX} in the sentinel protocol"),
        (
            plan.verify and plan.maximum >= I32_MAX,
            f"--verify asks for one more than the maximum, which has to be less than {I32_MAX}",
        ),
        (
            plan.verify and bool(kinds) and "acquire" not in kinds,
            "--verify is about what was acquired: with sentinel acquire has to be asked",
        ),
    ]


# ---- rules ----------------------------------------------------------------------------------------------------------


def rules_of(names: int, maximum: int, **semaphore: int) -> str:
    """JSON for sentinel.rules: so many semaphores and rates, each of that maximum at once or a second, and one flow of
    values that have it each. semaphore: what else their clusterConfig says. ValueError: there cannot be so many.
    """
    if names > FLOWS_MAX:
        raise ValueError(f"there are {FLOWS_MAX} flows of a kind at most, not {names}")
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


# ---- --verify -------------------------------------------------------------------------------------------------------


def checks_of(plan: Plan) -> Checks:
    """ProtocolError: it cannot be verified."""
    look(plan)
    return Checks(lambda board: while_held(plan, board), lambda _: when_gone(plan))


class Finding(NamedTuple):
    """What is wrong with a flow, and whether that may pass: tokens of earlier loads end."""

    text: str
    passes: bool


def look(plan: Plan) -> None:
    """ProtocolError: a flow is not there, has another limit, or is in use."""
    if found := _wait(plan, LOOK_S):
        first = min(found, key=lambda each: each.passes)
        raise ProtocolError(f"{first.text}: the count of each rule has to be --maximum, and nobody else may ask")


def while_held(plan: Plan, board: Board) -> list[str]:
    """Violations while nothing is under way and all connections are open."""
    return bounded([each.text for each in probe(plan, board.all_held())])


def when_gone(plan: Plan) -> list[str]:
    """Violations once all connections are closed: whatever is not back after GIVE_BACK_S."""
    when = f"{GIVE_BACK_S:g} s after the last connection was closed"
    return bounded([f"{each.text}, {when}" for each in _wait(plan, GIVE_BACK_S)])


def _wait(plan: Plan, seconds: float) -> list[Finding]:
    """What is found wrong where nothing is held, after that time at most."""
    end = time.monotonic() + seconds
    while (found := probe(plan, {})) and all(each.passes for each in found) and time.monotonic() < end:
        time.sleep(PAUSE_S)
    return found


def probe(plan: Plan, held: Mapping[int, int]) -> list[Finding]:
    """Of each flow: are so many in use, and no others? By its number, counted from 0. Changes nothing."""
    found: list[Finding] = []
    with resolve(plan).connect() as connection:
        for start in range(0, plan.names, AT_ONCE // 2):
            numbers = range(start, min(plan.names, start + AT_ONCE // 2))
            left = [max(0, plan.maximum - held.get(number, 0)) for number in numbers]
            wanted = [
                wire.acquire(number, FIRST_SEMAPHORE + number, max(1, count))
                for number, most in zip(numbers, left, strict=True)
                for count in (most + 1, most)
            ]
            answers = _asked(connection, wanted)
            _asked(connection, [wire.release(0, each.token_id) for each in answers if each.status == Status.OK])
            for number, most, more, rest in zip(numbers, left, answers[::2], answers[1::2], strict=True):
                found += _judged(FIRST_SEMAPHORE + number, plan.maximum, most, more.status, rest.status)
    return found


def _judged(flow: int, maximum: int, left: int, more: int, rest: int) -> Iterator[Finding]:
    """more, rest: the status of one too many, and of all that is left."""
    used = f"flow {flow}: {maximum - left} of {maximum} are held, and"
    if more == Status.OK:
        yield Finding(f"{used} {left + 1} more were granted", False)
    elif more != Status.BLOCKED:
        yield Finding(f"{used} the answer is status {more}", False)
    elif left and rest != Status.OK:
        yield Finding(f"{used} the other {left} are not to be had", True)


def _asked(connection: socket.socket, requests: list[bytes]) -> list[Response]:
    return asked(connection, requests, ResponseParser(), "asked what is left")


DIALECT = Dialect(
    name="sentinel",
    order=2,
    port=wire.PORT,
    codec="counterd.protocols.sentinel._load",
    ops=("noop", "acquire", "release", "flow", "param", "keep"),
    ops_help="flow, param (a value), keep (of what was acquired), noop too",
    requests=requests_of,
    name_size_max=NAME_SIZE_MAX,
    tokens="granted",
    mistakes=mistakes_of,
    checks=checks_of,
    broken="a limit was exceeded, or a token told twice,",
    rules=Rules(
        rules_of,
        "they have as many flows of each kind, with that maximum; rates need a higher sentinel.max_allowed_qps, too.",
    ),
)
