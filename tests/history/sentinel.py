"""The sentinel protocol: docs/protocols/sentinel.md as a model. Its objects are the tokens of a flow, the window of a
flow, that of a parameter rule with all its values, and who is connected to a namespace.

Answers are (status, what it tells): connected of a Ping, the token's id of an Acquire, the ms left of a Keep, else 0;
of Flow and Param (status, remaining, ms to wait). Release and Keep name the flow too, which clients know.

What is checked exactly, but for the moments of calls, which are known within each call:

- tokens: what is granted never exceeds the threshold, and nothing is refused that fits; a lease ends when its strategy
  says, or so long after its owner has gone, who is whoever kept it last; each token is released once. By when a token
  has to have gone whose lease is over, so that no refusal can be blamed on it, is what the model is told: `sweep_ns`.
- windows: each sample, what was borrowed and who waits, so that `remaining` has to be right to the last one.
- rules: a new one holds from some moment of its `Load` on, which whoever reloads records, as a client of its own.
- namespaces: how many are connected.

What is not: thresholds by the number of clients (thresholdType 0), for these are two objects in one; the limit of
requests for each namespace, and memory: where `limited` or `memory` says that there was a shortage, what is refused for
it is believed. Neither is draining, nor a rule whose lease terms change.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.rules import CONCURRENCY, GLOBAL
from counterd.protocols.sentinel.wire import Status
from history import leases, windows
from history.leases import Acquire, Keep, Release, TokenRule, Tokens
from history.model import Model
from history.operations import Closed
from history.windows import Flow, Param, RateRule, Rates

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator

    from counterd.protocols.sentinel.rules import Rules
    from history.operations import Operation

__all__ = [
    "Acquire", "Closed", "Flow", "Keep", "Load", "Param", "Ping", "RateRule", "Release", "SentinelModel", "TokenRule",
    "objects", "request", "told",
]  # fmt: skip

NS_PER_MS = 1_000_000
TOKENS, WINDOW, VALUES, NAMESPACE = "tokens", "window", "values", "namespace"
KINDS = {Acquire: TOKENS, Release: TOKENS, Keep: TOKENS, Flow: WINDOW, Param: VALUES}
PASSED = (Status.OK, Status.SHOULD_WAIT)
STEPS = {Acquire: leases.acquired, Release: leases.released, Keep: leases.kept}

Key = tuple[str, Any]
Rule = TokenRule | RateRule


class Ping(NamedTuple):
    namespace: bytes


class Load(NamedTuple):
    """A change of the rules, as an operation on one object; answered with True. rule: None if it was removed."""

    key: Key
    rule: Rule | None


def objects(rules: Rules) -> dict[Key, Rule]:
    """The objects that can be called under these rules, with their rules. Raises ValueError for a rule that is not
    modelled.
    """
    found: dict[Key, Rule] = {}
    for flow in rules.flows:
        if flow.grade == CONCURRENCY:
            times = flow.resource_timeout_ms * NS_PER_MS, flow.client_offline_ms * NS_PER_MS
            found[TOKENS, flow.flow_id] = TokenRule(flow.count, flow.resource_timeout_strategy, *times)
        else:
            found[WINDOW, flow.flow_id] = RateRule(flow.count, flow.sample_count, flow.window_ms)
    for param in rules.params:
        items = tuple(sorted(param.items.items()))
        found[VALUES, param.flow_id] = RateRule(param.count, param.sample_count, param.window_ms, items)
    for rule in (*rules.flows, *rules.params):
        if rule.threshold_type != GLOBAL:
            raise ValueError(f"thresholdType 0 is not modelled: {rule}")
    return found


class SentinelModel(Model):
    """rules: of all objects at first, as objects() has them. sweep_ns: see above.

    slack_ns: by which the server's moment of a call may lie outside of the call. memory, limited: anything may be
    refused for that.
    """

    def __init__(
        self,
        rules: dict[Key, Rule],
        *,
        sweep_ns: int,
        slack_ns: int = 0,
        memory: bool = False,
        limited: bool = False,
    ) -> None:
        self.rules = rules
        self.sweep_ns = sweep_ns
        self.slack_ns = slack_ns
        self.memory = memory
        self.limited = limited

    def key(self, call: Any) -> Key:
        if isinstance(call, Load):
            return call.key
        return (NAMESPACE, call.namespace) if isinstance(call, Ping) else (KINDS[type(call)], call.flow)

    def initial(self) -> None:
        """The same for every object, as the model is not told which one it is: step() creates the state at the first
        call.
        """

    def step(self, state: Any, operation: Operation) -> Iterable[Hashable]:
        call, answer = operation.call, operation.answer
        if isinstance(call, Closed):
            return (self._closed(state, operation),)
        state = self._begun(self.key(call)) if state is None else state
        if isinstance(call, Load):
            return (state.loaded(call.rule),)
        found: list[Hashable] = []
        for possible, after in self._outcomes(state, operation):
            if answer in (None, possible) and after not in found:
                found.append(after)
        return found

    def observes(self, operation: Operation) -> bool:
        """A refusal; but not status 7, which may be what removes an expired token."""
        if operation.answer is None or isinstance(operation.call, Load):
            return False
        status = operation.answer[0]
        if isinstance(operation.call, Release):
            return False
        return status not in (*PASSED, Status.ALREADY_RELEASED)

    def alike(self, operation: Operation) -> Hashable | None:
        """Equal for the same Flow or Param with the same answer. Not for tokens, which have ids, and leases with a
        start.
        """
        if operation.answer is not None and isinstance(operation.call, Flow | Param):
            return operation.call, operation.answer
        return None

    def describe(self, state: Any) -> str:
        return "nothing has happened yet" if state is None else str(state)

    # ---- inside ----

    def _begun(self, key: Key) -> Any:
        rule = self.rules.get(key)
        if key[0] == NAMESPACE:
            return frozenset()
        return Tokens(rule, rule is not None) if key[0] == TOKENS else Rates(rule)  # type: ignore[arg-type]

    def _closed(self, state: Any, operation: Operation) -> Hashable:
        if isinstance(state, frozenset):
            return state - {operation.client}
        if isinstance(state, Tokens):
            return leases.left(state, operation.client, self._clock(operation))
        return state

    def _clock(self, operation: Operation) -> leases.Clock:
        return leases.clock_of(operation, self.slack_ns, self.sweep_ns)

    def _outcomes(self, state: Any, operation: Operation) -> Iterator[tuple[Any, Hashable]]:
        """The possible answers, each with the state that it leaves."""
        call = operation.call
        if isinstance(call, Ping):
            connected = state | {operation.client}
            yield (int(Status.OK), len(connected)), connected
            if self.memory:
                yield (int(Status.FAIL), 0), state
            return
        if isinstance(call, Flow | Param):
            yield from windows.asked(state, operation, self.slack_ns)
            if self.limited and state.rule is not None:
                yield (int(Status.TOO_MANY_REQUESTS), 0, 0), state
            if self.memory and isinstance(call, Param) and state.rule is not None:
                yield (int(Status.NOT_AVAILABLE), 0, 0), state
            return
        yield from STEPS[type(call)](state, operation, self._clock(operation))
        if self.memory and isinstance(call, Acquire) and state.is_ruled:
            yield (int(Status.NOT_AVAILABLE), 0), state


# ---- on the wire ----


def request(call: Any, xid: int = 0) -> bytes:
    """The bytes of the request. Release and Keep name only the token."""
    if isinstance(call, Param):
        body = struct.pack(">qii", call.flow, call.count, len(call.values)) + b"".join(call.values)
        return wire.frame(xid, wire.MessageType.PARAM, body)
    arguments = (call.token,) if isinstance(call, Release | Keep) else call
    return getattr(wire, type(call).__name__.lower())(xid, *arguments)


def told(call: Any, response: wire.Response) -> tuple[int, ...]:
    """The answer, as histories have it, that a response stands for."""
    if isinstance(call, Flow | Param):
        return response.status, response.remaining, response.wait_ms
    return response.status, response.connected + response.token_id + response.left_ms  # two of which are 0
