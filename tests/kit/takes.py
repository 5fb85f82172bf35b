"""Clients of one store that send Takes, and a clock that a test drives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterd.cluster.lease_protocol import partition_of
from counterd.contract import Changes, CounterChange, CounterUpdate, Scope, Update
from counterd.protocols.counter import leased_limits, wire
from kit.counters import make_store
from kit.pump import START_NS, Pump

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kit.pump import Peer

MS = 1_000_000  # ns
NAME = b"shared:a"
PART = partition_of(NAME)
LEASE_MS = 10_000


@dataclass
class Answers:
    """What a client has received: the answers to its Takes, by opaque; and all others, in order."""

    takes: dict[int, wire.Grant | wire.Shortage | int] = field(default_factory=dict)
    others: list[wire.Response] = field(default_factory=list)


class Taker:
    """A client's connection."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.session = peer.session
        self.texts: dict[int, str] = {}  # of Takes that were refused for another reason than a shortage
        self._answers = Answers()
        self._parser = wire.ResponseParser()
        self._opaque = 0

    def send(self, data: bytes) -> None:
        self.peer.send(data)

    @property
    def answers(self) -> Answers:
        """Returns all answers so far."""
        for response in self._parser.feed(self.peer.read()):
            if response.opcode != wire.Opcode.TAKE:
                self._answers.others.append(response)
                continue
            assert response.opaque not in self._answers.takes, "two replies to one Take"
            decoded: Any = response.status
            if response.status == wire.Status.NO_ERROR:
                decoded = wire.decode_grant(response.body)
            elif response.status == wire.Status.RESOURCE_NOT_AVAILABLE:
                decoded = wire.decode_shortage(response.body)
            else:
                self.texts[response.opaque] = response.body.decode()
            self._answers.takes[response.opaque] = decoded
        return self._answers

    def take(self, *items: wire.Permit | wire.Rate, wait_ms: int = 0, **others: Any) -> int:
        """Sends a Take. Returns its opaque."""
        self._opaque += 1
        self.send(wire.take(self._opaque, items, wait_ms, **others))
        return self._opaque

    def of(self, opaque: int) -> wire.Grant | wire.Shortage | int | None:
        """Returns the reply to a Take; None if there is none yet."""
        return self.answers.takes.get(opaque)

    def has(self, opaque: int) -> bool:
        return isinstance(self.of(opaque), wire.Grant)

    def status(self, request: bytes) -> int:
        """Returns the status of the reply to another request."""
        count = len(self.answers.others)
        self.send(request)
        (response,) = self.answers.others[count:]
        return response.status

    def acquire(self, name: bytes, amount: int = 1, maximum: int = 1) -> int:
        return self.status(wire.acquire(0, name, amount, maximum))

    def release(self, name: bytes, amount: int = 1) -> int:
        return self.status(wire.release(0, name, amount))

    def cancel(self, take: int) -> int:
        return self.status(wire.cancel(0, take))

    def settle(self, opaque: int, name: bytes, used: int) -> int:
        grant = self.of(opaque)
        assert isinstance(grant, wire.Grant)
        return self.status(wire.settle(0, grant.number, name, used))

    def resume(self, grace_ms: int, token: bytes = b"", attempt: int = 0) -> wire.Resumption | int:
        """Asks for a token, or presents one. Returns the new token, or the status of a refusal."""
        status = self.status(wire.resume(0, grace_ms, token, attempt))
        return wire.decode_resumption(self.answers.others[-1].body) if status == wire.Status.NO_ERROR else status

    def close(self) -> None:
        self.peer.close()


class Desk:
    """A counter store, which is audited at each turn, and its connections."""

    def __init__(self, **sizes: Any) -> None:
        self.store = make_store(**{"waiters": 64, "posted_max": 1 << 18, "now_ns": START_NS, **sizes})
        self.pump = Pump(self.store, audits=True)
        self._takers: list[Taker] = []  # a connection that nobody refers to ends when the garbage collector comes

    def taker(self) -> Taker:
        self._takers.append(Taker(self.pump.connect()))
        return self._takers[-1]

    def some(self, count: int) -> Sequence[Taker]:
        return [self.taker() for _ in range(count)]

    def wait(self, ms: float) -> None:
        """Lets time pass."""
        self.pump.advance(int(ms * MS))


class Shop(Desk):
    """A store that shares the names which begin with `shared:`, with their policy. A test answers in the place of the
    servers.
    """

    def __init__(self, unreachable: str = "closed", *, drops: bool = False, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.limits = leased_limits(self.store, b"shared:")
        self.limits.set_policy(unreachable, drops)
        self.lease(PART)

    def update(self, partition: int = PART, **what: Any) -> None:
        self.limits.apply(partition, Update(**what), self.pump.now_ns)
        self.pump.settle()

    def lease(self, partition: int) -> None:
        self.update(partition, lease_ns=self.pump.now_ns + LEASE_MS * MS)

    def changes(self, partition: int = PART, *, most: int = 100, scope: Scope = Scope.BACKGROUND) -> Changes:
        return self.limits.changes(partition, most, scope)

    def counters(self, partition: int = PART, *, report: bool = False) -> list[CounterChange]:
        """The changes of counters in the next call."""
        changes = self.changes(partition, scope=Scope.REPORT if report else Scope.BACKGROUND)
        assert not changes.rates
        return changes.blocking + changes.background

    def answer(
        self, change: CounterChange, rights: int, *, others: int = 0, yields: bool = False, refused: bool = False
    ) -> None:
        """Gives these rights. others: use of other daemons."""
        update = CounterUpdate(change.number, rights, change.maximum, change.used + others, yields, refused)
        self.update(counters=[update])

    def give(self, rights: int, **others: Any) -> None:
        """Answers the only change."""
        (change,) = self.counters()
        self.answer(change, rights, **others)

    def urgency(self, partition: int = PART) -> str:
        blocking, urgent = (bits >> partition & 1 for bits in self.limits.has_urgent())
        return "urgent" if urgent else "refused before" if blocking else ""
