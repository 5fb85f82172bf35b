"""Takes of a few connections without a network, drawn at random, beside the books of what they mean (takes_both.py).

Everybody is answered at once, and time stands still meanwhile. So ticks are at the moments at which they are due, and
connections are there that are resumed by others, which in the simulation takes chance.
"""

from __future__ import annotations

from typing import Any

from kit.promises import MS, SECOND
from kit.pump import TURNS_MAX
from property.takes_both import Both
from property.takes_requests import SHARES, Asker, Client

CONNECTIONS = 4
WAITS_NS = (0, 1, MS, 40 * MS, 300 * MS, 5 * SECOND)


class Peer:
    """A client's end of a connection, for who asks where it comes from."""

    def __init__(self, client: Client, name: int) -> None:
        self.client = client
        self.name = name

    def peer(self) -> tuple[str, int]:
        """As Connection.peer."""
        return "127.0.0.1", self.name

    def origin(self) -> str:
        """As Connection.origin."""
        return f"127.0.0.1:{self.name}"

    def whom(self) -> tuple[bytes, bool]:
        """As Connection.whom: one of two peers, of which one is on this machine."""
        return b"%d" % self.name, self.name == 0


class History:
    """A store, its connections, and what is drawn for them. random: a random.Random, or what draws like one."""

    def __init__(self, random: Any) -> None:
        self.random = random
        self.now = 10_000 * SECOND
        self.asker = Asker(random, random.choice(SHARES))
        self.both = Both(self.asker)
        self.store = self.both.begin(self.now)
        self.clients: list[Client] = []
        for _ in range(CONNECTIONS):
            self.come()

    def step(self) -> None:
        draw = self.random
        client = draw.choice(self.clients)
        often = [self.ask] * 8 + [self.wait] * 3
        draw.choice([*often, self.leave, self.leave, self.lend_token, self.reload, self.set_limits])(client)
        self.settle()

    # ---- what happens ----

    def come(self) -> None:
        client = Client()
        session = self.store.session(self.now)
        session.owner = Peer(client, self.random.choice((0, 0, 1)))
        self.both.connect(client, session, session.owner.whom())
        self.clients.append(client)

    def ask(self, client: Client) -> None:
        if not client.session.closing:
            self.hear(client, client.session.receive(self.asker.batch(client, self.random.choice((1, 1, 3))), self.now))

    def hear(self, client: Client, output: bytes) -> None:
        client.fed = client.sent
        answers, _ = self.both.answered(client, output, self.now)
        for _, answer in answers:
            client.learn(*answer)
        self.both.check(self.now)

    def leave(self, client: Client) -> None:
        """At once, or after the end of what it sends."""
        if self.random.random() < 0.3:
            client.hangs_up = True
            self.hear(client, client.session.eof(self.now))
            self.settle()
        self.close(client)
        self.come()

    def close(self, client: Client) -> None:
        self.asker.leave(client)
        self.clients.remove(client)
        client.session.closed(self.now)
        client.session.owner = None
        self.both.closed(client, self.now)
        self.both.check(self.now)

    def lend_token(self, client: Client) -> None:
        """Somebody else may go on with what it holds, while it is there."""
        if client.token:
            self.asker.heirs.append((client.token, self.random.choice((0, 1, 2, 65537))))

    def reload(self, _client: Client) -> None:
        self.both.reload()

    def set_limits(self, _client: Client) -> None:
        draw = self.random
        if draw.random() < 0.5:
            self.both.limit_resumptions(draw.choice((0, 1, 5, 5)))
        elif self.asker.tight:
            self.both.limit_holdings(draw.choice((0, 1, 3)))
        else:
            self.both.limit_shares(draw.choice(SHARES))

    def wait(self, _client: Client) -> None:
        """Lets time pass, and looks each time that something happens."""
        until = self.now + self.random.choice(WAITS_NS)
        while 0 <= (due := self.store.next_deadline()) <= until:
            self.now = max(self.now, due)
            self.settle()
        self.now = max(self.now, until)

    def settle(self) -> None:
        """Turns, until nothing is due and nobody has more to hear."""
        for _ in range(TURNS_MAX):
            due = self.both.check(self.now)
            self.store.audit()
            if 0 <= due <= self.now:
                self.now = self.both.tick(self.now)
                self.both.check(self.now)
            heard = [session.owner.client for session in self.store.take_dirty() if session.owner is not None]
            heard += [client for client in self.clients if client.session.more and client not in heard]
            for client in heard:
                if client.session.dropped:
                    self.close(client)
                    self.come()
                else:
                    self.hear(client, client.session.take_output(self.now))
            if not (heard or 0 <= due <= self.now):
                return
        raise AssertionError("there is always something due")

    def end(self) -> None:
        """All that was asked has been answered in time; all go, nothing is left, and rates are forgotten."""
        for client in list(self.clients):
            self.close(client)
        self.settle()
        for now in self.both.ends(self.now):
            self.now = self.both.tick(now)
            self.both.check(self.now)
