"""Stores of the sentinel protocol and their connections, driven as net would."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conformance.sentinel.engine import MS, SECOND, SWEEP_NS, Pump, make_store
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.rules import FlowRule, ParamRule, Rules
from kit.pump import START_NS as START

if TYPE_CHECKING:
    from counterd.protocols.sentinel.wire import Response

__all__ = ["MS", "NOBODY", "SECOND", "START", "SWEEP_NS", "TICK", "Connection", "Rig", "calls", "rate", "values"]

TICK = 1 << 20  # of the wheel: what is over is found no later
NOBODY = 0  # a client who never goes
IGNORE, RELEASE, KEEP = range(3)  # what a lease does
MANY = 1_000_000


def calls(
    flow_id: int, count: float = MANY, *, timeout_ms: int = 1000, offline_ms: int = 300, strategy: int = IGNORE
) -> FlowRule:
    """Makes a rule that limits the concurrent calls."""
    return FlowRule("n", flow_id, "calls", 0, count, 1, 10, 1000, timeout_ms, offline_ms, strategy)


def rate(flow_id: int, count: float = MANY, *, namespace: str = "n", kind: int = 1) -> FlowRule:
    return FlowRule(namespace, flow_id, "rate", 1, count, kind, 10, 1000, 2000, 2000, 0)


def values(
    flow_id: int,
    count: float = 3,
    items: dict[wire.Value, int] | None = None,
    *,
    samples: int = 10,
    window_ms: int = 1000,
) -> ParamRule:
    encoded = {wire.encode_value(value): limit for value, limit in (items or {}).items()}
    return ParamRule("n", flow_id, "values", count, 1, samples, window_ms, encoded)


class Rig(Pump):
    """A store with these rules."""

    def __init__(self, *rules: FlowRule | ParamRule, start: int = START, **settings: Any) -> None:
        super().__init__(make_store(Rules((), ()), max_allowed_qps=MANY, **settings), now_ns=start)
        self.load(*rules)

    def load(self, *rules: FlowRule | ParamRule) -> None:
        flows = tuple(rule for rule in rules if isinstance(rule, FlowRule))
        self.store.load_rules(Rules(flows, tuple(rule for rule in rules if isinstance(rule, ParamRule))))

    def connection(self) -> Connection:
        return Connection(self)

    def figures(self, *names: str) -> list[int]:
        snapshot = self.store.snapshot()
        return [snapshot[name] for name in names]

    def now_calls(self, flow_id: int) -> int:
        flow = self.store.flow(flow_id)
        return flow["now_calls"] if flow else 0

    def request(self, flow_id: int, count: int = 1, client: int = NOBODY) -> tuple[int, int]:
        return self.store.request_token(flow_id, count, False, client, self.now_ns)  # type: ignore[no-any-return]

    def release(self, token_id: int) -> int:
        return self.store.release_token(token_id, self.now_ns)  # type: ignore[no-any-return]


class Connection:
    """A session of the store, and the responses that it was sent."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.peer = rig.connect()
        self.session = self.peer.session
        self.parser = wire.ResponseParser()

    def send(self, *requests: bytes) -> None:
        """Sends without a tick of the store."""
        self.peer.take(self.session.receive(b"".join(requests), self.rig.now_ns))

    def told(self) -> list[Response]:
        """The responses since the last call."""
        return self.parser.feed(self.peer.recv_exactly(len(self.peer.output)))

    def ask(self, request: bytes) -> Response:
        self.send(request)
        (response,) = self.told()
        return response

    def acquire(self, flow_id: int, count: int = 1) -> int:
        """Acquires a token, which must be granted."""
        response = self.ask(wire.acquire(1, flow_id, count))
        assert response.status == 0
        return response.token_id

    def acquire_many(self, flow_id: int, number: int) -> list[int]:
        """Acquires so many tokens, of one each."""
        for _ in range(0, number, 2000):
            self.send(wire.acquire(1, flow_id, 1) * min(2000, number))
            number -= 2000
            self.rig.settle()
        responses = self.told()
        assert not any(response.status for response in responses)
        return [response.token_id for response in responses]

    def close(self) -> None:
        """Closes the connection without a tick of the store."""
        self.session.closed(self.rig.now_ns)
