"""The world of Takes: clients that wait for several permits and rates at once, settle, and come back with tokens.

It is the counter protocol's, with the requests that counterd has added to it. The books (shares.py) execute each
request that the engine has executed, so every reply is known before it comes, byte by byte. What a tick serves, and in
which order, is the engine's choice: its table of waiters tells it, and it has to be one that is allowed.

A tick is at a moment at which everything that has come to its end is due, and there is less to do than a tick can, so
after it nothing is half done. Clients that have gone come back under another connection, with their tokens or without.
The daemon is killed and started again; then only the numbers of grants go on.
"""

from __future__ import annotations

import bisect
import json
import struct
from collections import Counter as Tally
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter._session import open_store
from counterd.protocols.counter._tables import WaitersWalk
from counterd.protocols.counter.limits import parse_limits
from simulation.asking import Asker, Client, Request
from simulation.shares import Books, Pace, Party, Sizes, Wait
from simulation.verdicts import (
    ACQUIRE,
    CANCEL,
    CANCELLED,
    DRAINING,
    FULL,
    GOODBYE,
    INVALID,
    NO_TIME,
    NOT_AVAILABLE,
    NOT_FOUND,
    OK,
    RESUME,
    TAKE,
    TEXTS,
    WHO,
    decide,
    decide_take,
    short_body,
    short_items,
    short_text,
    why_impossible,
)  # fmt: skip
from simulation.world import MS, SECOND, US, Violation, World

if TYPE_CHECKING:
    from counterd.protocols.counter._store import CounterStore
    from simulation.world import Link

TICK = 1 << 20  # ns, of the engine's wheels
UNIX_NS = 1_700_000_000 * SECOND
ROWS = 1000
SHARES = ((100, 100), (50, 100), (20, 60))  # in percent: of a peer elsewhere, and on this machine
LABEL_MAX = 31  # bytes of a key that the table shows

_HEADER = struct.Struct(">BBBBII").unpack_from
_GRANT = struct.Struct(">Q").unpack_from
_STAY = struct.Struct(">12sI").unpack


@dataclass(eq=False)
class Outcome:
    """What has become of a Take that waited, and what its client is yet to be told. body: of a refusal.

    least, most: of each item, between which what was left may be: others were granted in the same tick.
    """

    status: int
    body: bytes = b""
    wait: Wait | None = None
    decided: int = 0
    least: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)


class TakesWorld(World):
    """Requests in Link.todo are those that were not executed yet, or not answered."""

    name = "takes"

    def make_store(self) -> CounterStore:
        draw = self.random
        self.crowd = min(self.crowd, 30)
        self.burst = min(self.burst, 8)
        self.latency = draw.choice((200 * US, 5 * MS, 50 * MS))
        # tight: there is little of everything, and a connection has one Take that waits at most. narrow: who does not
        # read is dropped soon, and only permits are waited for. So it can be told from outside what was granted.
        self.tight = draw.random() < 0.25
        self.narrow = not self.tight and draw.random() < 0.2
        tight = self.tight
        self.rough = 0.3 if self.narrow else self.rough
        self.sizes = Sizes(
            buckets=draw.choice((3, 6, 10)) if tight else 256,
            holdings=draw.choice((4, 8, 20)) if tight else 20_000,
            per_connection=draw.choice((0, 1, 3)) if tight else 0,
            waiters=draw.choice((1, 4, 16)) if tight else 64,
            waiters_per_connection=draw.choice((0, 2, 10)),
            settle_s=draw.choice((1, 3, 3600)),
            resume_s=draw.choice((0, 1, 5, 5)),
            shares=SHARES[self.seed % len(SHARES)],
        )
        self.asker = Asker(draw, self.sizes, tight=tight, narrow=self.narrow)
        self.seen: Tally[tuple[Any, Any]] = Tally()  # answers by opcode and status, and what else has happened
        self.fence: list[tuple[int, int]] = []  # of grants: when each was decided, and its number
        self.tokens: set[bytes] = set()  # that were ever given
        self.decided = self.walled = self.ahead = 0
        self.begin()
        return self.store

    def begin(self) -> None:
        """A new daemon."""
        sizes = self.sizes
        self.store: Any = open_store(
            buckets=sizes.buckets,
            holdings=sizes.holdings,
            holdings_per_connection=sizes.per_connection,
            waiters=sizes.waiters,
            name_memory=1 << 16,
            posted_max=self.random.choice((1, 30)) if self.narrow else 1 << 18,
            now_ns=self.now,
            hash_key=self.random.getrandbits(128).to_bytes(16, "little"),
            figures=dict,
        )
        self.books = Books(sizes)
        self.store.limit_takes(sizes.waiters_per_connection, sizes.settle_s)
        self.store.limit_stays(sizes.resume_s)
        self.store.limit_shares(*sizes.shares)
        self.store.set_wall(UNIX_NS + self.now + self.ahead, self.now)
        self.granted = self.resumed = 0
        self.mixed: set[tuple[bytes, bool]] = set()

    def arrived(self) -> Client:
        return Client()

    def admit(self, session: Any) -> Link:
        link = super().admit(session)
        link.books.party = Party(session.number, link, link.whom())
        self.books.parties.append(link.books.party)
        return link

    def party(self, link: Link) -> Party:
        """Who it is now."""
        party: Party = link.books.party
        return party

    # ---- what clients ask ----

    def think(self, link: Link) -> None:
        if not self.asker.has_nothing_to_do(link.books):
            super().think(link)

    def compose(self, link: Link) -> bytes:
        data = b""
        for _ in range(self.batch()):
            request = self.asker.request(link.books)
            data += request.data
            request.end = link.bytes_sent + len(data)
            link.todo.append(request)
        return data

    def nonsense(self, link: Link) -> bytes:
        request = self.asker.nonsense(link.books)
        request.end = link.bytes_sent + 12
        link.todo.append(request)
        return request.data

    # ---- what the engine answers ----

    def answered(self, link: Link, output: bytes) -> None:
        self.books.now = self.now
        position, done = 0, 0
        while position < len(output):
            magic, opcode, status, _, length, opaque = _HEADER(output, position)
            end = position + 12 + length
            if magic != 0x91 or end > len(output):
                raise Violation("replies", f"connection {link.number} was sent {output[position : position + 40]!r}")
            body = output[position + 12 : end]
            position = end
            answer: Any = None
            if opcode == TAKE and opaque in link.books.owed:
                answer = self.judge_late(link, opaque, status, body)
            elif opcode == TAKE and status == CANCELLED:
                done += self.pass_waits(link, lambda request: request.opcode in (CANCEL, GOODBYE))
                self.judge_cancelled(link, opaque, body)
            else:
                done += self.pass_waits(link, lambda request, opaque=opaque: request.opaque == opaque) + 1
                request = link.todo.popleft()
                answer = self.judge(link, request, opcode, status, body)
            self.seen[opcode, status] += 1
            if answer is not None:
                link.marks.append((link.bytes_out + position, answer))
        session = link.session
        left = session.requests - link.executed - done
        for _ in range(left):
            if not link.todo or not self.may_wait(link.todo[0]):
                raise Violation("replies", f"{left} more requests of connection {link.number} were executed")
            self.begin_wait(link, link.todo.popleft())
        if left < 0:
            raise Violation("replies", f"{session.requests - link.executed} were executed, {done} answered")
        link.executed = session.requests
        if link.todo and not session.more and not session.closing and link.todo[0].end <= link.bytes_fed:
            raise Violation("progress", f"{link.todo[0]} was read by connection {link.number}, and not answered")

    def pass_waits(self, link: Link, is_answered: Any) -> int:
        """Those before the one that is answered began to wait. Returns how many."""
        count = 0
        while link.todo and not is_answered(link.todo[0]):
            if not self.may_wait(link.todo[0]):
                raise Violation("replies", f"{link.todo[0]} was not answered")
            self.begin_wait(link, link.todo.popleft())
            count += 1
        if not link.todo:
            raise Violation("replies", f"connection {link.number} was answered, and had asked nothing")
        return count

    def may_wait(self, request: Request) -> bool:
        return request.opcode == TAKE and request.wait_ms > 0 and not request.is_bad

    def begin_wait(self, link: Link, request: Request) -> None:
        books, party = self.books, self.party(link)
        status, body, _ = decide_take(books, party, request, None, is_over=link.ended)
        if status is not None:
            raise Violation("waits", f"{request} waits, and should be answered {status:#x} {body!r}")
        books.serial += 1
        queue = short_items(books, request.items)[0].item.thing
        wait = Wait(
            party, link, request.opaque, request.items, self.now + request.wait_ms * MS,
            request.key or ("connection", party.number), request.weight, request.priority, books.serial, queue,
        )  # fmt: skip
        books.waits[wait.serial] = wait
        link.books.waits[request.opaque] = wait
        if self.random.random() < 0.7:  # its client goes on meanwhile
            self.push(self.delay() * 4, self.think, link)
        if len(request.items) > 1:
            self.mixed.update(item.thing for item in request.items)

    def judge_cancelled(self, link: Link, opaque: int, body: bytes) -> None:
        """A Take of this connection, by its own Cancel or Goodbye."""
        request = link.todo[0]
        wait = link.books.waits.get(opaque)
        if wait is None or wait.party is not link.books.party:
            raise Violation("replies", f"a Take of connection {link.number} was cancelled that does not wait")
        if request.opcode == CANCEL and (request.take != opaque or request.is_done):
            raise Violation("replies", f"{request} has cancelled the Take {opaque}")
        if body != TEXTS[CANCELLED]:
            raise Violation("replies", f"a cancelled Take was told {body!r}")
        request.is_done = True
        self.drop_wait(wait)

    def drop_wait(self, wait: Wait) -> None:
        """One that has ended without a grant."""
        self.books.end_wait(wait)
        if wait.link is not None:
            wait.link.books.waits.pop(wait.opaque, None)

    # ---- replies to requests ----

    def judge(self, link: Link, request: Request, opcode: int, status: int, body: bytes) -> Any:
        """A reply in turn, which has to be the right one. Returns what the client learns."""
        if opcode != request.opcode:
            raise Violation("replies", f"{request} was answered as {opcode:#x}")
        if request.is_bad:
            expected: tuple[int | None, bytes] = (INVALID, TEXTS[INVALID])
        elif opcode == TAKE:
            return self.judge_take(link, request, status, body)
        elif opcode == RESUME:
            return self.judge_resume(link, request, status, body)
        else:
            expected = decide(self.books, self.party(link), request, status)
            if opcode == WHO:
                link.books.title = request.title
        if (status, body) != expected:
            name = "limit" if opcode == ACQUIRE and status == OK else "replies"
            raise Violation(name, f"{request} of connection {link.number} was answered {status:#x} {body!r}, "
                            f"and not {expected}")  # fmt: skip
        return (request, status, None)

    # ---- Takes ----

    def judge_take(self, link: Link, request: Request, status: int, body: bytes) -> Any:
        expected, text, limited = decide_take(self.books, self.party(link), request, status, is_over=link.ended)
        if status != expected:
            name = "limit" if status == OK else "refused"
            raise Violation(name, f"{request} of connection {link.number} was answered {status:#x} {body!r}, and not "
                            f"{expected} {text!r}")  # fmt: skip
        if status != OK:
            if body != text:
                raise Violation("replies", f"{request} was told {body!r}, and not {text!r}")
            return (request, status, None)
        number = _GRANT(body)[0]
        self.decided += 1
        self.number(self.decided, number)
        self.books.grant(self.party(link), limited, number)
        left = b"".join(self.books.left(each).to_bytes(4, "big") for each in limited)
        if body[8:] != left:
            raise Violation("left", f"{request} was told {body[8:]!r}, and not {left!r}")
        return (request.items, status, number)

    def number(self, decided: int, number: int) -> None:
        """Numbers of grants rise, in the order in which these were decided."""
        at = bisect.bisect(self.fence, (decided, number))
        before = self.fence[at - 1][1] if at else 0
        if number <= before or (at < len(self.fence) and self.fence[at][1] <= number):
            raise Violation("fence", f"a grant has number {number}, after {before}")
        self.fence.insert(at, (decided, number))

    def judge_late(self, link: Link, opaque: int, status: int, body: bytes) -> Any:
        """The reply to a Take that has waited."""
        outcome: Outcome = link.books.owed.pop(opaque)
        self.seen["late", (status, short_text(body)) if status == NOT_AVAILABLE else status] += 1
        if status != outcome.status or (status != OK and body != outcome.body):
            raise Violation("late", f"the Take {opaque} of connection {link.number} was told {status:#x} {body!r}, and "
                            f"not {outcome.status:#x} {outcome.body!r}")  # fmt: skip
        wait = outcome.wait
        if status != OK or wait is None:
            return (None, status, None)
        number = _GRANT(body)[0]
        self.number(outcome.decided, number)
        for charge in wait.charges:
            charge.grant = number
        left = [int.from_bytes(body[at : at + 4], "big") for at in range(8, len(body), 4)]
        if len(left) != len(wait.items) or not all(map(in_order, outcome.least, left, outcome.most)):
            raise Violation("left", f"{wait} was told {left}, and not {outcome.least} to {outcome.most}")
        return (wait.items, status, number)

    # ---- Resume ----

    def judge_resume(self, link: Link, request: Request, status: int, body: bytes) -> Any:
        books, own = self.books, self.party(link)
        other = books.find(request.token, request.attempt) if request.token else None
        holds = own.held or books.charges_of(own) or books.waits_of(own)
        if books.draining:
            expected, text = NOT_AVAILABLE, DRAINING
        elif self.sizes.resume_s == 0:
            expected, text = NOT_AVAILABLE, TEXTS[NOT_AVAILABLE]
        elif request.token and (other is own or holds):
            expected, text = INVALID, TEXTS[INVALID]
        elif request.token and other is None:
            expected, text = NOT_FOUND, TEXTS[NOT_FOUND]
        else:
            expected, text = OK, b""
        if status != expected or (status != OK and body != text):
            raise Violation("resume", f"{request} of connection {link.number} was answered {status:#x} {body!r}, and "
                            f"not {expected:#x}")  # fmt: skip
        if status != OK:
            return (request, status, None)
        token, grace_ms = _STAY(body)
        if other is not None:
            self.hand_over(link, own, other, request)
        party = self.party(link)
        party.former = (request.token, request.attempt) if other is not None else (b"", 0)
        party.token, party.grace_ms = token, min(request.grace_ms, self.sizes.resume_s * 1000)
        if token in self.tokens or grace_ms != party.grace_ms or int.from_bytes(token[:4], "big") != party.number:
            raise Violation("resume", f"{request} was given {token!r} for {grace_ms} ms")
        self.tokens.add(token)
        return (request, status, token)

    def hand_over(self, link: Link, own: Party, other: Party, request: Request) -> None:
        """The connection has everything that the other one held; that has nothing, and the number of this one."""
        books = self.books
        if books.waits_of(other):
            raise Violation("resume", f"{other.number} was taken over, and waits on")
        self.seen["resumed", other.state] += 1
        self.seen["resumed", "again" if request.token != other.token else "at first"] += 1
        self.resumed += 1
        if other.state == "kept":
            books.parties.remove(own)
            other.state = "open"
        else:
            old = other.link
            old.books.party, own.link = own, old
            own.token, own.former = b"", (b"", 0)
        own.peer, other.peer = other.peer, own.peer
        link.books.party, other.link = other, link
        if not link.books.title:
            link.books.title = other.title

    # ---- what clients know ----

    def delivered(self, link: Link, answer: tuple[Any, int, Any]) -> None:
        link.books.learn(*answer)
        if answer[2] is not None and self.random.random() < 0.7:  # something was granted: it is not held for long
            self.push(self.delay() * 2, self.think, link)

    def went(self, link: Link) -> None:
        """Its client may come back under another connection."""
        self.asker.leave(link.books)

    def left(self, link: Link) -> None:
        client: Client = link.books
        party = client.party
        if party is None or party.state != "open" or party.link is not link:
            return
        self.books.now = self.now
        party.link = None
        party.title = client.title
        self.books.end(party)
        for wait in self.books.waits_of(party):
            wait.link = None
        client.waits.clear()
        client.owed.clear()

    # ---- a tick ----

    def tick(self) -> None:
        books = self.books
        began = self.now // TICK * TICK
        if any(began < due <= self.now for due in books.dues()):
            self.now = began + TICK
        if self.now - self.walled >= SECOND:
            self.walled = self.now
            self.store.set_wall(UNIX_NS + self.now + self.ahead, self.now)
        self.store.tick(self.now)
        books.now = self.now
        self.live_tick()
        self.step("tick", None)

    def live_tick(self) -> None:
        """What the engine has done, which has to be what there was to do."""
        books = self.books
        before = list(books.waits.values())
        gone = {wait.serial: None for wait in books.leave()}
        refused = self.refusals(before, gone)
        books.expire_charges()
        books.stale = False
        rows = self.rows()
        figures = self.store.snapshot()
        dropped = {
            id(link.books.party) for link in self.links.values() if link.session.number == 0 and link.books.party
        }  # fmt: skip
        removed = [wait for wait in before if wait.serial not in rows]
        for wait in before:
            if wait.serial in rows and (wait.serial in gone or wait.serial in refused):
                raise Violation("late", f"{wait} waits on")
        maybe = [wait for wait in removed if wait.serial not in gone and wait.serial not in refused]
        count = figures["granted_later"] - self.granted
        self.granted = figures["granted_later"]
        granted = self.choose(maybe, count, dropped)
        books.shares.claim_turns(before, granted, set(rows))
        books.shares.settle(before, granted, set(rows), self.mixed)
        self.settle_granted(granted)
        for wait in removed:
            self.end_wait(wait, granted, refused)
        for serial, row in rows.items():
            self.place(books.waits[serial], row)

    def refusals(self, before: list[Wait], gone: dict[int, None]) -> dict[int, tuple[int, bytes]]:
        """Of those whose wait is over: what they have to be told."""
        books, found = self.books, {}
        for wait in before:
            if wait.serial in gone:
                continue
            limited = [books.limited(item) for item in wait.items]
            at = wait.items.index(wait.wanted)
            impossible = why_impossible(books, limited, at)
            if impossible is not None:
                found[wait.serial] = impossible
            elif wait.until <= self.now:
                short = limited[at]
                ms = NO_TIME if books.is_there(short) else books.retry_ms(short)
                found[wait.serial] = NOT_AVAILABLE, short_body(books, limited, at, ms) + TEXTS[NOT_AVAILABLE]
        return found

    def rows(self) -> dict[int, Any]:
        """The engine's table of who waits, by serial. Empty without asking if nobody does."""
        if not self.books.waits:
            return {}
        walk = WaitersWalk(self.store, b"", ROWS, "age")
        while not walk.step():
            pass
        return {row[0]: row for row in walk.rows()}

    def leases(self) -> dict[tuple[int, bytes], int]:
        return {(number, name): amount for number, name, amount, _ in self.store.leases(1 << 20)}

    def choose(self, maybe: list[Wait], count: int, dropped: set[int]) -> list[Wait]:
        """Those that were granted. The others found no room, or their connections were dropped."""
        if count == len(maybe):
            return maybe
        leases = self.leases()
        granted = []
        for wait in maybe:
            need = {item.name: item.amount for item in wait.items if not item.is_rate}
            held = wait.party.held
            before = {name: held.get(name, 0) for name in need}
            for other in granted:
                if other.party is wait.party:
                    for item in other.items:
                        if item.name in before:
                            before[item.name] += item.amount
            number = wait.party.number
            if all(leases.get((number, name), 0) >= before[name] + amount for name, amount in need.items()):
                granted.append(wait)
            elif id(wait.party) not in dropped and self.books.has_holdings(wait.party, need):
                raise Violation("refused", f"{wait} was removed, and not granted")
        if len(granted) != count:
            raise Violation("granted", f"{count} Takes were granted later, and {len(granted)} of {len(maybe)} hold it")
        return granted

    def settle_granted(self, granted: list[Wait]) -> None:
        """Gives them what they were given, in an order in which that is right: the smallest maximum first."""
        books = self.books
        self.decided += 1
        for wait in sorted(
            granted, key=lambda wait: min((item.maximum for item in wait.items if not item.is_rate), default=0)
        ):
            self.claim_room(wait)
            wait.charges = books.grant(wait.party, [books.limited(item) for item in wait.items], 0)

    def claim_room(self, wait: Wait) -> None:
        names = [item.name for item in wait.items if not item.is_rate]
        if not self.books.has_holdings(wait.party, names):
            raise Violation("room", f"{wait} was granted, and there is no room for its holdings")

    def end_wait(self, wait: Wait, granted: list[Wait], refused: dict[int, tuple[int, bytes]]) -> None:
        """Notes what its client is to be told, if that is there."""
        is_granted = wait in granted
        if is_granted:
            self.books.end_wait(wait)
            if wait.link is not None:
                del wait.link.books.waits[wait.opaque]
        else:
            self.drop_wait(wait)
        if wait.link is None:
            return
        status, body = refused.get(wait.serial, (FULL, TEXTS[FULL]))
        outcome = Outcome(OK if is_granted else status, body, wait, self.decided)
        if is_granted:
            for item in wait.items:
                least = self.books.left(self.books.limited(item))
                others = sum(
                    each.amount for other in granted if other is not wait for each in other.items
                    if each.thing == item.thing
                )  # fmt: skip
                outcome.least.append(least)
                outcome.most.append(least + others)
        wait.link.books.owed[wait.opaque] = outcome

    def place(self, wait: Wait, row: tuple[Any, ...]) -> None:
        """Where it waits now, which has to be the queue of one of its items."""
        _, name, amount, _, _, number, _, key, priority, weight, kind, count = row
        queue = (name, kind == "rate")
        wait.queue = queue
        told = (number, key, priority, weight, count)
        label = wait.key[:LABEL_MAX] if isinstance(wait.key, bytes) else b""
        mine = (wait.party.number, label, wait.priority, wait.weight, len(wait.items))
        if told != mine or not any(item.thing == queue and item.amount == amount for item in wait.items):
            raise Violation("table", f"{wait} is told to be {row}")

    # ---- what has to hold ----

    def check(self) -> int:
        store, books = self.store, self.books
        books.now = self.now
        for link in list(self.links.values()):
            if link.session.number == 0:
                self.seen["dropped", "posted"] += link.session.dropped
                self.left(link)
        self.claim_numbers()
        due: int = store.next_deadline()
        leases = self.leases()
        known = {(party.number, name): amount for party in books.parties for name, amount in party.held.items()}
        if leases != known:
            wrong = sorted(set(leases.items()) ^ set(known.items()))
            raise Violation("books", f"the engine and the books differ in {wrong}")
        figures = store.snapshot()
        if figures["waiters"] != len(books.waits):
            self.notice_cancelled()
        told = {name: figures[name] for name in ("waiters", "waits", "charges", "kept", "resumed")}
        mine = {
            "waiters": len(books.waits), "waits": books.serial, "charges": len(books.charges),
            "kept": len(books.kept()), "resumed": self.resumed,
        }  # fmt: skip
        if told != mine:
            raise Violation("books", f"the engine's figures are {told}, and the books' {mine}")
        books.claim_awake(due)
        for event in books.events:
            self.seen[event] += 1
        books.events.clear()
        return due

    def claim_numbers(self) -> None:
        """Each connection has the number that its books have."""
        for link in self.links.values():
            party = link.books.party
            if party is not None and link.session.number and party.number != link.session.number:
                raise Violation("resume", f"{link.number} is {link.session.number}, and should be {party.number}")

    def notice_cancelled(self) -> None:
        """A Resume that is under way cancels what the other connection waits for, before it is answered."""
        targets = []
        for link in self.links.values():
            request = link.todo[0] if link.todo else None
            if request is not None and request.opcode == RESUME and request.token and link.session.more:
                targets.append(self.books.find(request.token, request.attempt))
        rows = self.rows()
        for wait in [wait for wait in self.books.waits.values() if wait.serial not in rows]:
            if wait.party not in targets:
                raise Violation("lost", f"{wait} does not wait any more, and nobody was told")
            self.seen["resumed", "cancelled"] += 1
            link = wait.link
            self.drop_wait(wait)
            if link is not None:
                link.books.owed[wait.opaque] = Outcome(CANCELLED, TEXTS[CANCELLED])

    # ---- from outside ----

    def outside(self, _: None) -> None:
        if self.open:
            self.meddle()
            self.push(int(self.latency * (30 + 500 * self.random.random())), self.outside, None)

    def meddle(self) -> None:
        draw = self.random.random()
        if draw < 0.5:
            self.reload()
        elif draw < 0.6 and self.tight:
            self.sizes.per_connection = self.random.choice((0, 1, 1, 3))
            self.store.limit_holdings(self.sizes.per_connection)
            self.step("settings", None, self.sizes.per_connection)
        elif draw < 0.62:
            self.sizes.resume_s = self.random.choice((0, 1, 5, 5))
            self.store.limit_stays(self.sizes.resume_s)
            self.step("settings", None, self.sizes.resume_s)
        elif draw < 0.70:
            self.evict()
        elif draw < 0.75:
            self.ahead += self.random.randrange(SECOND)  # the clock of the machine is set, forwards
            self.store.set_wall(UNIX_NS + self.now + self.ahead, self.now)
            self.step("wall", None)
        elif draw < 0.82 and not self.books.draining:
            self.books.draining = self.books.stale = True
            self.store.begin_drain()
            self.push(self.random.randrange(5 * SECOND), self.crash, self.store)
            self.step("drain", None)
        elif draw < 0.86:
            self.crash(self.store)
        elif draw < 0.90:
            self.sizes.shares = self.random.choice(SHARES)
            self.store.limit_shares(*self.sizes.shares)
            self.step("settings", None, self.sizes.shares[0])

    def reload(self) -> None:
        """The server's limits change."""
        document = self.asker.limits(
            [item for wait in self.books.waits.values() for item in wait.items if not item.pace]
        )
        caps = {entry["name"].encode(): entry["maximum"] for entry in document["permits"]}
        paces = {
            entry["name"].encode(): Pace(entry["limit"], round(entry["period"] * 1_000_000), entry["burst"])
            for entry in document["rates"]
        }
        self.books.load(caps, paces)
        self.store.load_limits(parse_limits(json.dumps(document)))
        self.step("reload", None)

    def evict(self) -> None:
        """A person ends a connection, or what has stayed of one."""
        party = self.random.choice(self.books.parties) if self.books.parties else None
        if party is None or party.state == "leaving":
            return
        if self.store.evict(party.number, self.now) != (party.state == "kept"):
            raise Violation("resume", f"{party.number} is {party.state}, and was evicted otherwise")
        if party.state == "kept":
            party.until = min(party.until, self.now)
        party.token, party.former = (party.token if party.state == "kept" else b""), (b"", 0)
        self.step("evict", party.link)
        if party.link is not None and not party.link.dead:
            self.lost(party.link)

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
        self.begin()
        self.step("crash", None)
        for _ in range(self.crowd if self.open else 0):
            self.push(self.delay(), self.connect, None)

    # ---- the end of a round ----

    def claim_answered(self) -> None:
        super().claim_answered()
        if self.books.waits or any(link.books.owed for link in self.links.values()):
            raise Violation("progress", f"{len(self.books.waits)} Takes wait for ever")

    def emptied(self) -> None:
        """Everybody has gone. What stays is given back in its time, and rates are forgotten once they are full."""
        store = self.store
        while (due := store.next_deadline()) >= 0:
            self.now = max(self.now, due)
            self.tick()
        self.store.begin_window(self.decided + 1)
        while (due := store.next_deadline()) >= 0:
            self.now = max(self.now, due)
            self.tick()
        figures = store.snapshot()
        names = ("busy", "waiters", "holdings", "charges", "kept", "kept_holdings", "rates", "records", "name_memory")
        left = {name: figures[name] for name in names if figures[name]}
        if left or self.books.parties or self.books.charges:
            raise Violation("empty", f"everybody has gone, and there is {left}, {self.books.parties}")


def in_order(least: int, value: int, most: int) -> bool:
    return least <= value <= most
