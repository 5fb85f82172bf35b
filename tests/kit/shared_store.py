"""A store of shared permits in Python: it grants from rights, and has the methods that cluster.sidecar calls.

Requests wait in one queue for each name, or are parked until the authority was asked. Who asked is told by callbacks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterd.cluster import authority
from counterd.cluster.sidecar import News
from counterd.contract import NEWS_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(eq=False)
class Request:
    """stays: it waits until it is granted. calls: of its name when it was parked."""

    name: bytes
    amount: int
    maximum: int
    stays: bool = False
    calls: int = 0


@dataclass(eq=False)
class Share:
    """A name: what is in use and allowed, and who waits. told: what was in use in the last call."""

    number: int
    name: bytes
    partition: int
    used: int = 0
    peak: int = 0
    rights: int = 0
    maximum: int = 0
    calls: int = 0
    told: int = 0
    is_asked: bool = False
    yields: bool = False
    was_refused: bool = False
    queue: deque[Request] = field(default_factory=deque)
    parked: list[Request] = field(default_factory=list)

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
        self.urgent: dict[Share, bool] = {}  # and whether it is more than a request that was refused before
        self.until_ns = [0] * authority.PARTITIONS
        self.reachable = [True] * authority.PARTITIONS
        self.sidecars = 1
        self.now_ns = 0
        self.rates: list[Any] = []  # news of rates, which are a test's
        self.given: list[Any] = []
        self.settled: list[Any] = []
        self.calm: dict[Share, None] = {}  # with rights or use, the first ones longest ago

    # ---- requests ----

    def share(self, name: bytes) -> Share:
        if name not in self.shares:
            self.shares[name] = Share(len(self.shares) + 1, name, authority.partition_of(name))
        return self.shares[name]

    def ask(self, request: Request, now_ns: int) -> None:
        self.now_ns = now_ns
        share = self.share(request.name)
        if not share.queue and self._allows(share, request):
            self._grant(share, request)
        elif request.stays:
            share.queue.append(request)
            self._hurry(share, not share.was_refused or len(share.queue) == 1)
        elif self.reachable[share.partition]:
            request.calls = share.calls
            share.parked.append(request)
            self._hurry(share, True)
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
        for partition, until_ns in enumerate(self.until_ns):
            if 0 < until_ns <= now_ns:
                self.lose(partition, now_ns)

    def _allows(self, share: Share, request: Request) -> bool:
        return self.now_ns < self.until_ns[share.partition] and share.has_rights(request)

    def _grant(self, share: Share, request: Request) -> None:
        share.used += request.amount
        share.peak = max(share.peak, share.used)
        self.granted(request)

    def _drain(self, share: Share) -> None:
        while share.queue and self._allows(share, share.queue[0]):
            self._grant(share, share.queue.popleft())

    def _hurry(self, share: Share, is_fresh: bool) -> None:
        if not share.is_asked:
            self.urgent[share] = self.urgent.get(share, False) or is_fresh

    def _give_up_rights(self, share: Share) -> None:
        if share.yields and share.rights > share.used:
            share.rights = share.used
            self._hurry(share, True)

    # ---- the sidecar's half ----

    def take_news(self, partition: int, urgent_max: int, calm_max: int, every: bool = False) -> list[News]:
        news: list[News] = []
        size = 0  # of names
        for share in [share for share in self.urgent if share.partition == partition][:urgent_max]:
            if size < NEWS_BYTES_MAX:
                size += len(share.name)
                news.append(self._news(share))
        self.urgent.update({share: False for share in self.urgent if share.partition == partition})
        for share in [share for share in self.calm if share.partition == partition][:calm_max]:
            if size >= NEWS_BYTES_MAX:
                break
            if every or share.rights != share.used or share.used != share.told:
                size += len(share.name)
                news.append(self._news(share))
            elif not share.used:
                del self.calm[share]
            else:
                self.calm[share] = self.calm.pop(share)
        return news

    def take_rates(self, _partition: int, _urgent_max: int, _calm_max: int) -> list[Any]:
        return self.rates

    def give_units(self, given: list[tuple[int, int]]) -> None:
        self.given.append(given)

    def settle_rates(self, settled: list[tuple[int, int, int, int]], _now_ns: int) -> None:
        self.settled.append(settled)

    def _news(self, share: Share) -> News:
        self.urgent.pop(share, None)
        self.calm.pop(share, None)
        share.is_asked = True
        share.calls += 1
        first = share.queue[0] if share.queue else share.parked[0] if share.parked else None
        waiting = sum(request.amount for request in [*share.queue, *share.parked])
        peak, share.peak = share.peak, share.used
        share.told = share.used
        return News(
            share.number, share.name, first.maximum if first else share.maximum, first.amount if first else 0, waiting,
            share.used, peak, share.rights, bool(share.queue),
        )  # fmt: skip

    def _by_number(self, number: int) -> Share:
        return next(share for share in self.shares.values() if share.number == number)

    def keep_rights(self, kept: list[tuple[int, int]]) -> None:
        for number, keep in kept:
            share = self._by_number(number)
            share.rights = min(share.rights, keep)

    def settle_rights(self, settled: list[tuple[int, int, int, int, bool, bool]], now_ns: int) -> None:
        self.now_ns = now_ns
        for number, rights, maximum, _all_used, waited_for, was_refused in settled:
            share = self._by_number(number)
            share.is_asked = False
            self.calm[share] = None
            share.rights, share.maximum, share.yields, share.was_refused = rights, maximum, waited_for, was_refused
            if waited_for:  # what became free meanwhile is only for those who wait
                wanted = share.used + sum(request.amount for request in [*share.queue, *share.parked])
                if rights > wanted:
                    share.rights = wanted
                    self._hurry(share, True)
            self._drain(share)
            for request in [*share.parked]:
                if request.calls < share.calls:
                    share.parked.remove(request)
                    if not share.queue and self._allows(share, request):
                        self._grant(share, request)
                    else:
                        self.refused(request)
            self._give_up_rights(share)
            if share.queue or share.parked:
                self._hurry(share, bool(share.parked) or not was_refused)

    def forget_call(self, numbers: list[int]) -> None:
        for number in {*numbers}.difference(rate[0] for rate in self.rates):
            share = self._by_number(number)
            share.is_asked = False
            self.calm[share] = None
            self._hurry(share, True)  # also if nobody waits any more: the call may have given it rights

    def wanted_elsewhere(self, _partition: int, names: list[bytes], now_ns: int) -> None:
        self.now_ns = now_ns
        for name in names:
            share = self.share(name)
            share.yields = True
            self._give_up_rights(share)

    def set_lease(self, partition: int, until_ns: int) -> None:
        self.until_ns[partition] = until_ns

    def lose(self, partition: int, now_ns: int) -> None:
        self.now_ns = now_ns
        if self.until_ns[partition] == 0:
            return
        self.until_ns[partition] = 0
        mine = [share for share in self.shares.values() if share.partition == partition]
        for share in mine:
            share.rights, share.yields = 0, False
        if self.dropped is not None:
            self.dropped([share.name for share in mine if share.used])

    def set_reachable(self, partition: int, reachable: bool, now_ns: int) -> None:
        self.now_ns = now_ns
        self.reachable[partition] = reachable
        if not reachable:
            for share in self.shares.values():
                if share.partition == partition:
                    parked, share.parked = share.parked, []
                    for request in parked:
                        self.refused(request)

    def set_sidecars(self, count: int) -> None:
        self.sidecars = count

    def urgency(self, partition: int) -> int:
        return max((1 + is_fresh for share, is_fresh in self.urgent.items() if share.partition == partition), default=0)
