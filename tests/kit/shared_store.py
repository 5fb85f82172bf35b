"""A store of shared permits in Python: contract.LeasedLimits, but for rates, which are a test's.

Requests wait in one queue for each name, or are blocked until the authority was asked. Who asked is told by callbacks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterd.cluster import lease_protocol
from counterd.contract import CHANGES_BYTES_MAX, Changes, CounterChange, Scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from counterd.contract import CounterUpdate, Update


@dataclass(eq=False)
class Request:
    """stays: it waits until it is granted. calls: of its name when it was blocked."""

    name: bytes
    amount: int
    maximum: int
    stays: bool = False
    calls: int = 0


@dataclass(eq=False)
class Share:
    """A name: what is in use and allowed, and who waits. reported: what was in use in the last call."""

    number: int
    name: bytes
    partition: int
    used: int = 0
    peak: int = 0
    rights: int = 0
    maximum: int = 0
    calls: int = 0
    reported: int = 0
    is_asked: bool = False
    yields: bool = False
    is_refused: bool = False
    queue: deque[Request] = field(default_factory=deque)
    blocked: list[Request] = field(default_factory=list)

    def has_rights(self, request: Request) -> bool:
        return self.used + request.amount <= self.rights and request.maximum >= self.maximum


class SharedStore:
    """granted, refused: called with a request. dropped: called with the names whose permits are dropped, as their lease
    is over; None: they are kept."""

    def __init__(
        self,
        granted: Callable[[Request], None],
        refused: Callable[[Request], None] = lambda _: None,
        dropped: Callable[[list[bytes]], None] | None = None,
    ) -> None:
        self.granted, self.refused, self.dropped = granted, refused, dropped
        self.shares: dict[bytes, Share] = {}
        self.numbers: dict[int, Share] = {}
        self.blocking: dict[Share, bool] = {}  # and whether it is more than a request that was refused before
        self.background: dict[Share, None] = {}  # with rights or use, the first ones longest ago
        self.unreported: list[list[Share]] = [[] for _ in range(lease_protocol.PARTITIONS)]
        self.until_ns = [0] * lease_protocol.PARTITIONS
        self.reachable = [True] * lease_protocol.PARTITIONS
        self.daemons = 1
        self.now_ns = 0
        self.rates: list[Any] = []
        self.updates: list[Update] = []

    # ---- requests ----

    def share(self, name: bytes) -> Share:
        if name not in self.shares:
            share = Share(len(self.shares) + 1, name, lease_protocol.partition_of(name))
            self.shares[name] = self.numbers[share.number] = share
        return self.shares[name]

    def ask(self, request: Request, now_ns: int) -> None:
        self.now_ns = now_ns
        share = self.share(request.name)
        if not share.queue and self._allows(share, request):
            self._grant(share, request)
        elif request.stays:
            share.queue.append(request)
            self._call_soon(share, not share.is_refused or len(share.queue) == 1)
        elif self.reachable[share.partition]:
            request.calls = share.calls
            share.blocked.append(request)
            self._call_soon(share, True)
        else:
            self.refused(request)

    def give_up(self, request: Request) -> None:
        share = self.share(request.name)
        if request in share.queue:
            share.queue.remove(request)
            self._drain(share)

    def release(self, name: bytes, amount: int, now_ns: int) -> None:
        self.now_ns = now_ns
        share = self.share(name)
        assert share.used >= amount
        share.used -= amount
        self._give_up_rights(share)
        self._drain(share)

    def turn(self, now_ns: int) -> None:
        """Ends the leases that are over."""
        self.now_ns = now_ns
        for partition, until_ns in enumerate(self.until_ns):
            if 0 < until_ns <= now_ns:
                self._lose(partition)

    def _allows(self, share: Share, request: Request) -> bool:
        return self.now_ns < self.until_ns[share.partition] and share.has_rights(request)

    def _grant(self, share: Share, request: Request) -> None:
        share.used += request.amount
        share.peak = max(share.peak, share.used)
        self.granted(request)

    def _drain(self, share: Share) -> None:
        while share.queue and self._allows(share, share.queue[0]):
            self._grant(share, share.queue.popleft())

    def _call_soon(self, share: Share, is_urgent: bool) -> None:
        if not share.is_asked:
            self.blocking[share] = self.blocking.get(share, False) or is_urgent

    def _give_up_rights(self, share: Share) -> None:
        if share.yields and share.rights > share.used:
            share.rights = share.used
            self._call_soon(share, True)

    # ---- the policy's half ----

    def changes(self, partition: int, most: int, scope: Scope) -> Changes:
        size = 0  # of names
        blocking: list[CounterChange] = []
        for share in [share for share in self.blocking if share.partition == partition][:most]:
            if size < CHANGES_BYTES_MAX:
                size += len(share.name)
                blocking.append(self._change(share))
        self.blocking.update({share: True for share in self.blocking if share.partition == partition})
        if scope == Scope.REPORT:
            self.unreported[partition] = [share for share in self.background if share.partition == partition]
        background = self._background(partition, 0 if scope == Scope.BLOCKING else most, scope >= Scope.REPORT)
        return Changes(blocking, background, self.rates, not self.unreported[partition])

    def _background(self, partition: int, most: int, every: bool) -> list[CounterChange]:
        found: list[CounterChange] = []
        size = 0
        for share in [share for share in self.background if share.partition == partition][:most]:
            if size >= CHANGES_BYTES_MAX or (every and share not in self.unreported[partition]):
                break
            if every or share.rights != share.used or share.used != share.reported:
                size += len(share.name)
                found.append(self._change(share))
            elif not share.used:
                del self.background[share]
            else:
                self.background[share] = self.background.pop(share)
        return found

    def _change(self, share: Share) -> CounterChange:
        self.blocking.pop(share, None)
        self.background.pop(share, None)
        if share in self.unreported[share.partition]:
            self.unreported[share.partition].remove(share)
        share.is_asked = True
        share.calls += 1
        first = share.queue[0] if share.queue else share.blocked[0] if share.blocked else None
        waiting = sum(request.amount for request in [*share.queue, *share.blocked])
        peak, share.peak = share.peak, share.used
        share.reported = share.used
        return CounterChange(
            share.number, share.name, first.maximum if first else share.maximum, first.amount if first else 0, waiting,
            share.used, peak, share.rights, bool(share.queue),
        )  # fmt: skip

    def apply(self, partition: int, update: Update, now_ns: int) -> None:
        self.now_ns = now_ns
        self.updates.append(update)
        self._end_changes(update)
        if update.lease_ns == 0:
            self._lose(partition)
        elif update.lease_ns > 0:
            self.until_ns[partition] = update.lease_ns
        if update.is_reachable is not None:
            self._set_reachable(partition, update.is_reachable)
        self.daemons = update.daemons or self.daemons
        for each in update.counters:
            self._answer(self.numbers[each.number], each)
        for name in update.wanted:
            self.share(name).yields = True
            self._give_up_rights(self.share(name))

    def _end_changes(self, update: Update) -> None:
        """Does what an update says of changes that are not answered. Those of rates have other numbers."""
        for number, amount, yields in update.kept:
            if number in self.numbers:
                share = self.numbers[number]
                share.rights = min(share.rights, amount)
                share.yields |= yields
        for number in [*update.unchanged, *update.forgotten]:
            if number in self.numbers:
                share = self.numbers[number]
                share.is_asked = False
                self.background[share] = None
                if number in update.forgotten:  # also if nobody waits any more: the call may have given it rights
                    self._call_soon(share, True)

    def _answer(self, share: Share, update: CounterUpdate) -> None:
        share.is_asked = False
        self.background[share] = None
        share.rights, share.maximum = update.rights, update.maximum
        share.yields, share.is_refused = update.yields, update.is_refused
        if update.yields:  # what became free meanwhile is only for those who wait
            wanted = share.used + sum(request.amount for request in [*share.queue, *share.blocked])
            if share.rights > wanted:
                share.rights = wanted
                self._call_soon(share, True)
        self._drain(share)
        for request in [*share.blocked]:
            if request.calls < share.calls:
                share.blocked.remove(request)
                if not share.queue and self._allows(share, request):
                    self._grant(share, request)
                else:
                    self.refused(request)
        self._give_up_rights(share)
        if share.queue or share.blocked:
            self._call_soon(share, bool(share.blocked) or not update.is_refused)

    def _lose(self, partition: int) -> None:
        if self.until_ns[partition] == 0:
            return
        self.until_ns[partition] = 0
        mine = [share for share in self.shares.values() if share.partition == partition]
        for share in mine:
            share.rights, share.yields = 0, False
        if self.dropped is not None:
            self.dropped([share.name for share in mine if share.used])

    def _set_reachable(self, partition: int, is_reachable: bool) -> None:
        self.reachable[partition] = is_reachable
        if not is_reachable:
            for share in self.shares.values():
                if share.partition == partition:
                    blocked, share.blocked = share.blocked, []
                    for request in blocked:
                        self.refused(request)

    def has_urgent(self) -> tuple[int, int]:
        blocking = urgent = 0
        for share, is_urgent in self.blocking.items():
            blocking |= 1 << share.partition
            urgent |= is_urgent << share.partition
        return blocking, urgent
