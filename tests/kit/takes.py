"""Clients of one store that send Takes, and a clock that a test drives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter import wire
from property.model import make_store, outputs

if TYPE_CHECKING:
    from collections.abc import Sequence

MS = 1_000_000  # ns
START_NS = 1_000 * MS


@dataclass
class Answers:
    """What a client was answered: its Takes, by opaque; and everything else, in order."""

    takes: dict[int, wire.Grant | wire.Shortage | int] = field(default_factory=dict)
    others: list[wire.Response] = field(default_factory=list)


class Taker:
    """One connection."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.session = desk.store.session(desk.now_ns)
        self.answers = Answers()
        self._parser = wire.ResponseParser()
        self._opaque = 0

    def send(self, data: bytes) -> None:
        self.read(self.session.receive(data, self.desk.now_ns))
        self.desk.run()

    def read(self, data: bytes) -> None:
        for response in self._parser.feed(data):
            if response.opcode != wire.Opcode.TAKE:
                self.answers.others.append(response)
                continue
            assert response.opaque not in self.answers.takes, "two replies to one Take"
            decoded: Any = response.status
            if response.status == wire.Status.NO_ERROR:
                decoded = wire.decode_grant(response.body)
            elif response.status == wire.Status.RESOURCE_NOT_AVAILABLE:
                decoded = wire.decode_shortage(response.body)
            self.answers.takes[response.opaque] = decoded

    def take(self, *items: wire.Permit | wire.Rate, wait_ms: int = 0, **others: Any) -> int:
        """Sends a Take. Returns its opaque."""
        self._opaque += 1
        self.send(wire.take(self._opaque, items, wait_ms, **others))
        return self._opaque

    def of(self, opaque: int) -> wire.Grant | wire.Shortage | int | None:
        """The reply to a Take; None if there is none yet."""
        return self.answers.takes.get(opaque)

    def has(self, opaque: int) -> bool:
        return isinstance(self.of(opaque), wire.Grant)

    def status(self, request: bytes) -> int:
        """The status of the reply to another request."""
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

    def close(self) -> None:
        self.session.closed(self.desk.now_ns)
        self.desk.takers.remove(self)
        self.desk.run()


class Desk:
    """The store, its connections and the time."""

    def __init__(self, **sizes: Any) -> None:
        self.now_ns = START_NS
        self.store = make_store(**{"waiters": 64, "posted_max": 1 << 18, "now_ns": self.now_ns, **sizes})
        self.takers: list[Taker] = []

    def taker(self) -> Taker:
        made = Taker(self)
        self.takers.append(made)
        return made

    def some(self, count: int) -> Sequence[Taker]:
        return [self.taker() for _ in range(count)]

    def run(self) -> None:
        """Does all that is due now, as the driver does."""
        for _ in range(10_000):
            self.store.audit()
            due = self.store.next_deadline()
            if due < 0 or due > self.now_ns:
                break
            self.store.tick(self.now_ns)
            for session in self.store.take_dirty():
                for taker in self.takers:
                    if taker.session is session:
                        for piece in outputs(session, self.now_ns):
                            taker.read(piece)
        else:
            raise AssertionError("there is always something due")

    def wait(self, ms: float) -> None:
        """Lets time pass, and does what falls due meanwhile."""
        until = self.now_ns + int(ms * MS)
        while 0 <= (due := self.store.next_deadline()) <= until:
            self.now_ns = max(self.now_ns, due)
            self.run()
        self.now_ns = until
        self.run()
