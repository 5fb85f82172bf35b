"""The sentinel protocol for counterbench: its flows, their rules, and the checks of --verify.

Floor 5 (ARCHITECTURE.md), pure Python. A flow is either a semaphore or a rate. So the permits of a load belong to
flows 1, 2, ..., and its rates to flows 1000001, 1000002, ... All values belong to flow 1, because a parameter rule can
have the same id as a flow rule.

The load processes count the permits that are certainly held: they were granted, and their release was not sent. The
protocol has no Dump, so the checks send requests: if a flow has the expected number of held permits, the server grants
all other permits in one request, and refuses one more. The checks need flows whose limit is the plan's maximum and that
no other client uses, and leases that last longer than any permit is held.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.bench.connection import asked, bounded, resolve
from counterd.bench.dialect import ACQUIRE, GRANTED, NOOP, RELEASE, Checks, Dialect, Mistakes, Op, Rules
from counterd.errors import ProtocolError
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.wire import Response, ResponseParser, Status

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping

    from counterd.bench._board import Board
    from counterd.bench.options import Options

NAMESPACE = "counterbench"
FIRST_SEMAPHORE = 1
FIRST_RATE = 1_000_001
PARAM_FLOW = 1
FLOW = Op(options=GRANTED)
FLOWS_MAX = 8192  # of each kind: a server can have twice as many
NAME_SIZE_MAX = 996  # bytes of a value in a frame of the protocol
I32_MAX = 0x7FFFFFFF
GIVE_BACK_S = 30.0
LOOK_S = 5.0  # how long the tokens of an earlier load may take to end
PAUSE_S = 0.02
AT_ONCE = 500  # requests: they fit into the buffer of any socket


def requests_of(plan: Options, name: bytes) -> dict[str, bytes]:
    """Returns each kind of request, with the first flow and without a token.

    The flow and the token are numbers; only values have names.
    """
    return {
        "noop": wire.ping(0, NAMESPACE.encode()),
        "acquire": wire.acquire(0, FIRST_SEMAPHORE, plan.resources),
        "release": wire.release(0, 0),
        "keep": wire.keep(0, 0),
        "flow": wire.flow(0, FIRST_RATE, plan.resources),
        "param": wire.param_flow(0, PARAM_FLOW, plan.resources, [name]),
    }


def mistakes_of(plan: Options) -> Mistakes:
    """Returns the options that are too large for a server of the protocol."""
    kinds = plan.work.weights.keys()
    return [
        (
            plan.names > FLOWS_MAX and kinds != {"param"},
            f"there can be at most {FLOWS_MAX} flows of a kind, not {plan.names}; param can have more values",
        ),
        (plan.resources > I32_MAX, f"resources must be 1 to {I32_MAX} in the sentinel protocol"),
        (
            plan.verify and plan.maximum >= I32_MAX,
            f"--verify asks for one more than the maximum, so the maximum must be less than {I32_MAX}",
        ),
        (
            plan.verify and bool(kinds) and "acquire" not in kinds,
            "--verify checks acquired permits: with sentinel, --ops must contain acquire",
        ),
    ]


# ---- rules ----------------------------------------------------------------------------------------------------------


def rules_of(names: int, maximum: int, **semaphore: int) -> str:
    """Returns JSON for sentinel.rules, with a number of semaphores, a number of rates, and one flow for values.

    maximum: the limit of each semaphore, and of each rate and value in a second. semaphore: further members of the
    semaphores' clusterConfig. Raises ValueError if there are too many names.
    """
    if names > FLOWS_MAX:
        raise ValueError(f"there can be at most {FLOWS_MAX} flows of a kind, not {names}")
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


def checks_of(plan: Options) -> Checks:
    """Returns the checks of --verify. Raises ProtocolError if the load cannot be verified."""
    look(plan)
    return Checks(lambda board: while_held(plan, board), lambda _: when_gone(plan))


class Finding(NamedTuple):
    """A mistake in a flow, and whether it may disappear by itself, because tokens of earlier loads end."""

    text: str
    passes: bool


def look(plan: Options) -> None:
    """Raises ProtocolError if a flow does not exist, has another limit, or is in use."""
    if found := _wait(plan, LOOK_S):
        first = min(found, key=lambda each: each.passes)
        raise ProtocolError(
            f"{first.text}: the count of each rule must be --maximum, and no other client may use the flows"
        )


def while_held(plan: Options, board: Board) -> list[str]:
    """Returns the violations while no request is in flight and all connections are open."""
    return bounded([each.text for each in probe(plan, board.all_held())])


def when_gone(plan: Options) -> list[str]:
    """Returns the violations after all connections were closed: permits that are not given back after GIVE_BACK_S."""
    when = f"{GIVE_BACK_S:g} s after the last connection was closed"
    return bounded([f"{each.text}, {when}" for each in _wait(plan, GIVE_BACK_S)])


def _wait(plan: Options, seconds: float) -> list[Finding]:
    """Returns the mistakes at a time when nothing should be held.

    Waits for at most this many seconds until there are no mistakes.
    """
    end = time.monotonic() + seconds
    while (found := probe(plan, {})) and all(each.passes for each in found) and time.monotonic() < end:
        time.sleep(PAUSE_S)
    return found


def probe(plan: Options, held: Mapping[int, int]) -> list[Finding]:
    """Checks whether each flow has exactly the expected number of held permits. held: this number, by the number of the
    flow, counted from 0.

    The check changes nothing.
    """
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
    """Yields the mistakes of a flow.

    more: the status of a request for one permit too many. rest: the status of a request for all other permits.
    """
    used = f"flow {flow}: {maximum - left} of {maximum} are held, and"
    if more == Status.OK:
        yield Finding(f"{used} {left + 1} more were granted", False)
    elif more != Status.BLOCKED:
        yield Finding(f"{used} the answer is status {more}", False)
    elif left and rest != Status.OK:
        yield Finding(f"{used} the other {left} cannot be acquired", True)


def _asked(connection: socket.socket, requests: list[bytes]) -> list[Response]:
    return asked(connection, requests, ResponseParser(), "asked what is left")


DIALECT = Dialect(
    name="sentinel",
    order=2,
    port=wire.PORT,
    ops={"noop": NOOP, "acquire": ACQUIRE, "release": RELEASE, "flow": FLOW, "param": FLOW, "keep": Op("keep")},
    ops_help="also flow, param (a value), keep (of an acquired token), noop",
    requests=requests_of,
    name_size_max=NAME_SIZE_MAX,
    tokens="granted",
    mistakes=mistakes_of,
    checks=checks_of,
    broken="a limit was exceeded, or a token was granted twice,",
    rules=Rules(
        rules_of,
        "the file has --names flows of each kind, with this maximum. Rates also need a higher "
        "sentinel.max_allowed_qps.",
    ),
)
