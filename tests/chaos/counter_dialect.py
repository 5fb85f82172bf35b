"""The requests of the chaos clients in the counter protocol: Acquires, Releases, and Takes that wait for several at
once.

Some connections have tokens. When one has ended, or is left open and not read any more, another one of its process
presents its token, soon or after its grace time, or never.
"""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from chaos.dialect import GARBAGE, LENT, MORE, PIPELINE, Asked, sign_of_life
from counterd.errors import ProtocolError
from counterd.protocols.counter import wire
from history import counter, resumptions, takers, takes

if TYPE_CHECKING:
    import random

DUMP = "Dump"
U32_MAX = 0xFFFFFFFF
# The names that all want, and the most of each that anybody asks for: little, so that they are in each other's way.
HOT = {b"hot %d" % number: maximum for number, maximum in enumerate((1, 2, 3, 5, 8))}
HOT[b"hot, and longer than a record has room for within itself: " + 100 * b"x"] = 4
HOT[b"hot, and so wide that sums of it could wrap"] = U32_MAX
HOT |= LENT
COLD = 200  # names that are seldom asked for
COLD_MAXIMUM = 1000
TEAMS = 3  # of names that are taken together: two counters and a rate
TEAM = {b"a": 2, b"b": 4}  # counters of a team, and their maxima
PACE = (40, 1_000_000, 6)  # of a team's rate: limit, microseconds, burst
WAITS_MS = (0, 0, 20, 200, 2_000, 10_000)  # of Takes for a team
BRIEFLY_MS = (0, 5, 50)  # likewise for a hot name, as nobody else gets it meanwhile
TAKES = 2  # of a connection, that wait at once
GRANTS = 8  # of a connection, that it may still settle
GRACES_MS = (40, 300, 1500)
CUTS = 0.008  # of batches of a connection that has a token, that are its last
ENDS = ("close", "reset", "half_close", "take_over")
RESUMING = 0.7  # of connections that could present a token, those that do
FILL_STEP = 256  # acquires in one piece of who takes all
FILL_STEPS_MAX = 40
DUMPS = 300  # of who reads slowly


class Resumable(NamedTuple):
    """A connection that another one can resume. tries: how often that was asked for.

    held, charges: what its client knew of. Requests without an answer are not in them, and may have been executed.
    """

    client: int
    token: bytes
    held: collections.Counter[bytes]
    charges: collections.deque[tuple[int, bytes]]
    tries: int = 0


class CounterDialect:
    """Makes Acquires, Releases, queries and Takes, and records what it was granted.

    waits: opaques of unanswered Takes. charges: number of a grant, and a rate of it. token: its own, or b"". presents:
    the connection that it asks to resume, until that is answered. to_begin: the requests that it has to make first.
    """

    forgives = False
    resumables: ClassVar[collections.deque[Resumable]] = collections.deque()  # of this process's ended connections

    def __init__(self, chance: random.Random, number: int, client: int) -> None:
        self.chance = chance
        self.client = client
        self.held: collections.Counter[bytes] = collections.Counter()
        self.asked: collections.deque[int] = collections.deque()  # opaques, but for Takes
        self.waits: dict[int, None] = {}
        self.charges: collections.deque[tuple[int, bytes]] = collections.deque(maxlen=GRANTS)
        self.opaque = 0
        self.filling = 0
        self.filled = False
        self.token = b""
        self.presents = self.resumables.popleft() if self.resumables and chance.random() < RESUMING else None
        self.to_begin: list[Asked] = []
        self.parser = wire.ResponseParser()
        self.rates = [b"round %d, rate %d" % (number, team) for team in range(TEAMS)]

    # ---- requests ----

    def hello(self) -> Asked:
        return self._resume() if self.presents else self._sign()

    def is_welcome(self, told: Any) -> bool:
        return told[0] == wire.Status.NO_ERROR or bool(self.to_begin)

    def batch(self) -> list[Asked]:
        if self.to_begin:
            asked, self.to_begin = self.to_begin, []
            return asked
        if self.filling:
            self.filling -= 1
            return [self._acquire(b"fill %d %d %d" % (self.client, self.filling, n), 1, 1) for n in range(FILL_STEP)]
        if self.chance.random() < (0.02 if self.token else 0.1):
            return [self._of_itself()]  # alone, as nothing may be under way behind it
        return [self._any_take() or self._any() for _ in range(self.chance.choice(PIPELINE))]

    def ends(self) -> str:
        """How the client ends its connection now; mostly "", which means not."""
        return self.chance.choice(ENDS) if self.token and self.chance.random() < CUTS else ""

    def offer_token(self, is_far: bool) -> None:
        """Lets another connection resume this one, which has ended.

        is_far: nobody knows when the server notices the end. With unanswered requests too, the search would be too
        long.
        """
        if is_far and (self.asked or self.waits):
            return
        if self.presents:
            self.resumables.append(self.presents)
        elif self.token:
            self.resumables.append(Resumable(self.client, self.token, self.held, self.charges))

    def _of_itself(self) -> Asked:
        dice = self.chance.random()
        if dice < 0.6 and not self.token and not self.filled:
            return self._resume()
        if dice < 0.65:
            return resumptions.Goodbye(), wire.goodbye(self._opaque())
        name = self.chance.choice([*(name for name, amount in self.held.items() if amount), *HOT])
        return resumptions.Held(name), wire.held(self._opaque(), name)

    def _resume(self) -> Asked:
        """Requests a token, or presents one."""
        call = resumptions.Resume(self.chance.choice(GRACES_MS))
        if self.presents is None:
            return call, takers.request(self._opaque(), call)
        self.presents = self.presents._replace(tries=self.presents.tries + 1)
        call = call._replace(old=self.presents.client)
        return call, takers.request(self._opaque(), call, self.presents.token, self.presents.tries)

    def _sign(self) -> Asked:
        return self._acquire(sign_of_life(self.client), 1, 1)

    def _any(self) -> Asked:
        chance = self.chance
        dice = chance.random()
        held = sorted(name for name, amount in self.held.items() if amount > 0 and name != sign_of_life(self.client))
        if dice < 0.40 and held:
            name = chance.choice(held)
            return self._release(name, chance.randint(1, min(self.held[name], U32_MAX)))
        if dice < 0.85:
            name = chance.choice(list(HOT))
            maximum = chance.randint((HOT[name] + 1) // 2, HOT[name])
            return self._acquire(name, chance.randint(1, (maximum + 1) // 2), maximum)
        if dice < 0.93:
            return self._get(chance.choice(list(HOT)))
        name = b"cold %d" % chance.randrange(COLD)
        if dice < 0.97:
            return self._acquire(name + b"~" * chance.choice((0, 0, 40, 400)), chance.randint(1, 5), COLD_MAXIMUM)
        if dice < 0.98:
            return self._acquire(chance.choice(list(HOT)), chance.choice((0, 9)), 8)  # invalid
        return self._release(chance.choice((name, *HOT)), chance.randint(0, 6))  # more than it has, mostly

    def give_back(self) -> list[Asked]:
        held = [
            (name, amount) for name, amount in self.held.items() if amount > 0 and name != sign_of_life(self.client)
        ]
        return [self._release(name, min(amount, U32_MAX)) for name, amount in held]

    def much(self) -> list[Asked]:
        return [(DUMP, wire.dump(self._opaque(), limits=self.chance.random() < 0.5)) for _ in range(DUMPS)]

    def all(self) -> list[Asked]:
        """Acquires that fill the store. The connection has no grace time, as the server keeps at most half of all
        holdings.
        """
        self.filling = FILL_STEPS_MAX
        self.filled = True
        self.to_begin = []
        return [(resumptions.Goodbye(), wire.goodbye(self._opaque()))]

    def garbage(self) -> bytes:
        """Bytes that are no request: the first byte is wrong, or a length is."""
        if self.chance.random() < 0.5:
            return bytes((self.chance.choice((0x00, 0x16, 0x47, 0x91, 0xFF)),)) + self._bytes()
        return wire.frame(
            self.chance.randrange(256), 0, self._bytes(), body_length=self.chance.randint(70_000, 1 << 31)
        )

    def truncated(self) -> bytes:
        name = self.chance.choice(list(HOT))
        whole = self.chance.choice((wire.acquire(0, name, 1, HOT[name]), wire.release(0, name, 1)))
        return whole[: self.chance.randint(1, len(whole) - 1)]

    def _acquire(self, name: bytes, resources: int, maximum: int) -> Asked:
        call = counter.Acquire(name, resources, maximum)
        return call, wire.acquire(self._opaque(), name, resources, maximum)

    def _release(self, name: bytes, resources: int) -> Asked:
        return counter.Release(name, resources), wire.release(self._opaque(), name, resources)

    def _get(self, name: bytes) -> Asked:
        return counter.Get(name), wire.get(self._opaque(), name)

    def _any_take(self) -> Asked | None:
        """A Take, or a request that ends or settles one; mostly none of these."""
        dice = self.chance.random()
        if dice < 0.01 and self.waits:
            return self._later(takes.Cancel(self.chance.choice(list(self.waits))))
        if dice < 0.03 and self.charges:
            return self._later(takes.Settle(*self.chance.choice(self.charges), self.chance.randint(0, 6)))
        return self._take() if dice < 0.13 and len(self.waits) < TAKES else None

    def _take(self) -> Asked:
        """A Take of one hot name, or of several names of a team."""
        chance = self.chance
        team = chance.randrange(TEAMS)
        items: list[tuple[Any, ...]] = []
        if chance.random() < 0.2:
            name = chance.choice(list(HOT))
            items = [(name, chance.randint(1, (HOT[name] + 1) // 2), HOT[name])]
        else:
            for name in chance.sample([*TEAM, b""], chance.choice((1, 2, 2, 3))):
                if name:
                    items.append((b"team %d %b" % (team, name), chance.randint(1, TEAM[name]), TEAM[name]))
                else:
                    items.append((self.rates[team], chance.randint(1, 4), *PACE, chance.randrange(3)))
        waits_ms = BRIEFLY_MS if items[0][0] in HOT else WAITS_MS
        self.opaque = (self.opaque + 1) % (1 << 32)
        self.waits[self.opaque] = None
        options = chance.choice((b"", b"key", b"another")), chance.choice((1, 1, 3)), chance.choice((0, 0, 0, 1))
        call = takes.Take(self.opaque, tuple(items), chance.choice(waits_ms), *options)
        return call, takers.request(self.opaque, call)

    def _later(self, call: Any) -> Asked:
        """A request about an earlier Take."""
        return call, takers.request(self._opaque(), call)

    def _opaque(self) -> int:
        self.opaque = (self.opaque + 1) % (1 << 32)
        self.asked.append(self.opaque)
        return self.opaque

    def _bytes(self) -> bytes:
        return self.chance.randbytes(self.chance.randint(12, 3000))

    # ---- answers ----

    def feed(self, data: bytes) -> list[wire.Response]:
        return self.parser.feed(data)

    def take(self, call: Any, answer: wire.Response) -> Any:
        """Updates what this client holds. Returns the answer as the history has it."""
        if call is GARBAGE:
            if answer.status not in (wire.Status.INVALID_ARGUMENTS, wire.Status.UNKNOWN_COMMAND):
                raise ProtocolError(f"garbage was answered with {answer}")
            return None
        if isinstance(call, takes.Take):
            return self._taken(call, takers.told(answer))
        if answer.opaque != self.asked[0]:
            raise ProtocolError(f"{answer} in place of the answer to {self.asked[0]}: {call}")
        if call is DUMP and answer.status == wire.Status.NO_ERROR and answer.body:
            wire.decode_dump_entry(answer.body)
            return MORE
        self.asked.popleft()
        if answer.status == wire.Status.OUT_OF_MEMORY:
            self.filling = 0
        if answer.status == wire.Status.NO_ERROR and isinstance(call, counter.Acquire | counter.Release):
            self.held[call.name] += call.resources if isinstance(call, counter.Acquire) else -call.resources
        if isinstance(call, resumptions.Held) and answer.status == wire.Status.NO_ERROR:
            self.held[call.name] = wire.decode_consumption(answer.body)
        elif isinstance(call, resumptions.Resume):
            self._resumed(answer)
        elif isinstance(call, resumptions.Goodbye):
            self.token = b""
            self.held.clear()
            self.charges.clear()
            self.to_begin = [] if self.filling else [self._sign()]
        return takers.told(answer)

    def _resumed(self, answer: wire.Response) -> None:
        """After a Resume. Releases the sign of life of the old connection, which shows that it has ended."""
        old, self.presents = self.presents, None
        if answer.status == wire.Status.NO_ERROR:
            self.token = wire.decode_resumption(answer.body).token
        if old is None:
            return
        self.to_begin = [self._sign()]
        if answer.status == wire.Status.NO_ERROR:
            self.held, self.charges = old.held, old.charges
            name = sign_of_life(old.client)
            self.to_begin += [self._release(name, self.held[name])] if self.held[name] else []

    def _taken(self, call: takes.Take, told: tuple[int, Any]) -> Any:
        del self.waits[call.opaque]
        if told[0] == wire.Status.NO_ERROR:
            for item in takes.items_of(call):
                if isinstance(item, wire.Permit):
                    self.held[item.name] += item.amount
                elif item.on_death != wire.OnDeath.FINAL:
                    self.charges.append((told[1][0], item.name))
        return told
