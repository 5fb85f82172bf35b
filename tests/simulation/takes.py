"""The world of Takes: clients that wait for several permits and rates at once, settle, and come back with tokens.

It is the counter protocol's, with the requests that counterd has added to it. What is asked (takes_requests.py) and
what the store has to do (takes_both.py) is as in the property test. Here there is a network between the two. Clients
that have gone come back under another connection, with their tokens or without. The daemon is killed and started again;
then only the numbers of grants go on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kit.promises import MS, SECOND, US, Violation
from property.takes_both import Both
from property.takes_requests import SHARES, Asker, Client
from simulation.world import World

if TYPE_CHECKING:
    from counterd.protocols.counter._store import CounterStore
    from simulation.world import Link


class TakesWorld(World):
    """Link.books is a Client, and Link.todo its."""

    name = "takes"

    def make_store(self) -> CounterStore:
        draw = self.random
        self.crowd = min(self.crowd, 30)
        self.burst = min(self.burst, 8)
        self.latency = draw.choice((200 * US, 5 * MS, 50 * MS))
        self.asker = Asker(draw, SHARES[self.seed % len(SHARES)])
        self.rough = 0.3 if self.asker.narrow else self.rough
        self.both = Both(self.asker)
        self.seen = self.both.seen
        store: CounterStore = self.both.begin(self.now)
        return store

    def arrived(self) -> Client:
        return Client()

    def admit(self, session: Any) -> Link:
        link = super().admit(session)
        client: Client = link.books
        client.todo = link.todo
        self.both.connect(client, session, link.whom())
        return link

    # ---- what clients ask, and are answered ----

    def think(self, link: Link) -> None:
        if not self.asker.has_nothing_to_do(link.books):
            super().think(link)

    def compose(self, link: Link) -> bytes:
        return self.asker.batch(link.books, self.batch())

    def nonsense(self, link: Link) -> bytes:
        return self.asker.nonsense(link.books).data

    def answered(self, link: Link, output: bytes) -> None:
        client: Client = link.books
        client.fed, client.hangs_up = link.bytes_fed, link.ended
        answers, waits = self.both.answered(client, output, self.now)
        for _ in range(waits):
            if self.random.random() < 0.7:  # its client goes on meanwhile
                self.push(self.delay() * 4, self.think, link)
        for position, answer in answers:
            link.marks.append((link.bytes_out + position, answer))

    def delivered(self, link: Link, answer: tuple[Any, int, Any]) -> None:
        link.books.learn(*answer)
        if answer[2] is not None and self.random.random() < 0.7:  # something was granted: it is not held for long
            self.push(self.delay() * 2, self.think, link)

    def went(self, link: Link) -> None:
        """Its client may come back under another connection."""
        self.asker.leave(link.books)

    def left(self, link: Link) -> None:
        (self.both.closed if link.dead else self.both.left)(link.books, self.now)

    # ---- what has to hold ----

    def tick(self) -> None:
        self.now = self.both.tick(self.now)
        self.step("tick", None)

    def check(self) -> int:
        return self.both.check(self.now)

    # ---- from outside ----

    def outside(self, _: None) -> None:
        if self.open:
            self.meddle()
            self.push(int(self.latency * (30 + 500 * self.random.random())), self.outside, None)

    def meddle(self) -> None:
        draw = self.random.random()
        if draw < 0.5:
            self.both.reload()
            self.step("reload", None)
        elif draw < 0.6 and self.asker.tight:
            self.both.limit_holdings(self.random.choice((0, 1, 1, 3)))
            self.step("settings", None)
        elif draw < 0.62:
            self.both.limit_resumptions(self.random.choice((0, 1, 5, 5)))
            self.step("settings", None)
        elif draw < 0.70:
            self.evict()
        elif draw < 0.75:
            self.both.set_ahead(self.random.randrange(SECOND), self.now)
            self.step("wall", None)
        elif draw < 0.82 and not self.both.books.draining:
            self.both.begin_drain()
            self.push(self.random.randrange(5 * SECOND), self.crash, self.store)
            self.step("drain", None)
        elif draw < 0.86:
            self.crash(self.store)
        elif draw < 0.90:
            self.both.limit_shares(self.random.choice(SHARES))
            self.step("settings", None)

    def evict(self) -> None:
        party = self.random.choice(self.both.books.parties) if self.both.books.parties else None
        if party is None or party.state == "leaving":
            return
        client = self.both.evict(party, self.now)
        link = None if client is None else client.session.owner
        self.step("evict", link)
        if link is not None and not link.dead:
            self.lost(link)

    def crash(self, store: Any) -> None:
        """The daemon is killed, or has been drained for long enough, and another one is started."""
        if store is not self.store:
            return
        self.seen["daemon", "killed"] += 1
        for link in list(self.links.values()):
            self.leave(link)
            link.dead = True
            link.session.owner = None
            link.session = None
        self.links.clear()
        self.waiting.clear()
        self.turn_at = -1
        self.now += self.random.randrange(3 * SECOND)
        self.store = self.both.begin(self.now)
        self.step("crash", None)
        for _ in range(self.crowd if self.open else 0):
            self.push(self.delay(), self.connect, None)

    # ---- the end of a round ----

    def claim_answered(self) -> None:
        super().claim_answered()
        waits = self.both.books.waits
        if waits or any(link.books.owed for link in self.links.values()):
            raise Violation("progress", f"{len(waits)} Takes wait for ever")

    def emptied(self) -> None:
        for now in self.both.ends(self.now):
            self.now = now
            self.tick()
