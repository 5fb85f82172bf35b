"""A store and its books side by side, where Takes wait: what it does has to be what the books allow.

The books (takes_model.py) execute each request that the engine has executed, so every reply is known before it comes,
byte by byte. What a tick serves, and in which order, is the engine's choice: its table of waiters tells it, and it has
to be one that is allowed. After a tick nothing is half done: there is less to do than a tick can, and the tick is at a
moment at which everything that has come to its end is due.

Whoever drives the store (the property test, the fuzzer, the simulation) tells of each call, in their order.
"""

from __future__ import annotations

import bisect
import json
import struct
from collections import Counter as Tally
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter._session import open_store
from counterd.protocols.counter._tables import TABLES
from counterd.protocols.counter.limits import parse_limits
from kit.counters import ACQUIRE, INVALID, NOT_AVAILABLE, NOT_FOUND, OK
from kit.promises import MS, SECOND, Violation
from property.takes_model import (
    CANCEL,
    CANCELLED,
    DRAINING,
    FULL,
    GOODBYE,
    NO_TIME,
    RESUME,
    TAKE,
    TEXTS,
    WHO,
    Books,
    Pace,
    Party,
    Wait,
    decide,
    decide_take,
    short_body,
    short_items,
    short_text,
    why_impossible,
)  # fmt: skip

if TYPE_CHECKING:
    from collections.abc import Iterable

    from property.takes_requests import Asker, Client, Request

TICK = 1 << 20  # ns, of the engine's wheels
UNIX_NS = 1_700_000_000 * SECOND
ROWS = 1000
(WAITERS,) = (table for table in TABLES if table.name == "waiters")
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


class Both:
    """Of one daemon after the other: the numbers of grants go on."""

    def __init__(self, asker: Asker) -> None:
        self.asker = asker
        self.sizes = asker.sizes
        self.seen: Tally[tuple[Any, Any]] = Tally()  # answers by opcode and status, and what else has happened
        self.fence: list[tuple[int, int]] = []  # of grants: when each was decided, and its number
        self.tokens: set[bytes] = set()  # that were ever given
        self.decided = self.walled = self.ahead = 0

    def begin(self, now: int) -> Any:
        """A new daemon."""
        sizes, draw = self.sizes, self.asker.draw
        self.now = now
        self.store: Any = open_store(
            buckets=sizes.buckets,
            holdings=sizes.holdings,
            holdings_per_connection=sizes.per_connection,
            waiters=sizes.waiters,
            name_memory=1 << 16,
            posted_max=draw.choice((1, 30)) if self.asker.narrow else 1 << 18,
            now_ns=now,
            hash_key=draw.getrandbits(128).to_bytes(16, "little"),
            figures=dict,
        )
        self.books = Books(sizes)
        self.clients: dict[Client, None] = {}  # that are connected
        self.store.limit_takes(sizes.waiters_per_connection, sizes.settle_s)
        self.store.limit_resumptions(sizes.resume_s)
        self.store.limit_shares(*sizes.shares)
        self.set_wall()
        self.granted = self.resumed = 0
        self.mixed: set[tuple[bytes, bool]] = set()
        return self.store

    def set_wall(self) -> None:
        self.store.set_wall(UNIX_NS + self.now + self.ahead, self.now)

    def set_ahead(self, more: int, now: int) -> None:
        """The clock of the machine is set, forwards."""
        self.ahead += more
        self.now = now
        self.set_wall()

    # ---- connections ----

    def connect(self, client: Client, session: Any, peer: tuple[bytes, bool]) -> None:
        client.session = session
        client.party = Party(session.number, client, peer)
        self.books.parties.append(client.party)
        self.clients[client] = None

    def left(self, client: Client, now: int) -> None:
        """Its session has let go of all that it held."""
        party = client.party
        if party is None or party.state != "open" or party.client is not client:
            return
        self.books.now = now
        party.client = None
        party.title = client.title
        self.books.end(party)
        for wait in self.books.waits_of(party):
            wait.client = None
        client.waits.clear()
        client.owed.clear()

    def closed(self, client: Client, now: int) -> None:
        self.clients.pop(client, None)
        self.left(client, now)

    # ---- what the engine answers ----

    def answered(self, client: Client, output: bytes, now: int) -> tuple[list[tuple[int, Any]], int]:
        """What a session has said. Returns what its client learns, each with the position at which that ends, and how
        many Takes of its have begun to wait."""
        self.now = self.books.now = now
        answers = []
        position, done, serial = 0, 0, self.books.serial
        while position < len(output):
            magic, opcode, status, _, length, opaque = _HEADER(output, position)
            end = position + 12 + length
            if magic != 0x91 or end > len(output):
                raise Violation("replies", f"{client} was sent {output[position : position + 40]!r}")
            body = output[position + 12 : end]
            position = end
            answer: Any = None
            if opcode == TAKE and opaque in client.owed:
                answer = self.judge_late(client, opaque, status, body)
            elif opcode == TAKE and status == CANCELLED:
                done += self.pass_waits(client, lambda request: request.opcode in (CANCEL, GOODBYE))
                self.judge_cancelled(client, opaque, body)
            else:
                done += self.pass_waits(client, lambda request, opaque=opaque: request.opaque == opaque) + 1
                request = client.todo.popleft()
                answer = self.judge(client, request, opcode, status, body)
            self.seen[opcode, status] += 1
            if answer is not None:
                answers.append((position, answer))
        session = client.session
        left = session.requests - client.executed - done
        for _ in range(left):
            if not client.todo or not self.may_wait(client.todo[0]):
                raise Violation("replies", f"{left} more requests of {client} were executed")
            self.begin_wait(client, client.todo.popleft())
        if left < 0:
            raise Violation("replies", f"{session.requests - client.executed} were executed, {done} answered")
        client.executed = session.requests
        if client.todo and not session.more and not session.closing and client.todo[0].end <= client.fed:
            raise Violation("progress", f"{client.todo[0]} was read by {client}, and not answered")
        return answers, self.books.serial - serial

    def pass_waits(self, client: Client, is_answered: Any) -> int:
        """Those before the one that is answered began to wait. Returns how many."""
        count = 0
        while client.todo and not is_answered(client.todo[0]):
            if not self.may_wait(client.todo[0]):
                raise Violation("replies", f"{client.todo[0]} was not answered")
            self.begin_wait(client, client.todo.popleft())
            count += 1
        if not client.todo:
            raise Violation("replies", f"{client} was answered, and had asked nothing")
        return count

    def may_wait(self, request: Request) -> bool:
        return request.opcode == TAKE and request.wait_ms > 0 and not request.is_bad

    def begin_wait(self, client: Client, request: Request) -> None:
        books, party = self.books, client.party
        status, body, _ = decide_take(books, party, request, None, is_over=client.hangs_up)
        if status is not None:
            raise Violation("waits", f"{request} waits, and should be answered {status:#x} {body!r}")
        books.serial += 1
        queue = short_items(books, request.items)[0].item.thing
        wait = Wait(
            party, client, request.opaque, request.items, self.now + request.wait_ms * MS,
            request.key or ("connection", party.number), request.weight, request.priority, books.serial, queue,
        )  # fmt: skip
        books.waits[wait.serial] = wait
        client.waits[request.opaque] = wait
        if len(request.items) > 1:
            self.mixed.update(item.thing for item in request.items)

    def judge_cancelled(self, client: Client, opaque: int, body: bytes) -> None:
        """A Take of this connection, by its own Cancel or Goodbye."""
        request = client.todo[0]
        wait = client.waits.get(opaque)
        if wait is None or wait.party is not client.party:
            raise Violation("replies", f"a Take of {client} was cancelled that does not wait")
        if request.opcode == CANCEL and (request.take != opaque or request.is_done):
            raise Violation("replies", f"{request} has cancelled the Take {opaque}")
        if body != TEXTS[CANCELLED]:
            raise Violation("replies", f"a cancelled Take was told {body!r}")
        request.is_done = True
        self.drop_wait(wait)

    def drop_wait(self, wait: Wait) -> None:
        """One that has ended without a grant."""
        self.books.end_wait(wait)
        if wait.client is not None:
            wait.client.waits.pop(wait.opaque, None)

    # ---- replies to requests ----

    def judge(self, client: Client, request: Request, opcode: int, status: int, body: bytes) -> Any:
        """A reply in turn, which has to be the right one. Returns what the client learns."""
        if opcode != request.opcode:
            raise Violation("replies", f"{request} was answered as {opcode:#x}")
        if request.is_bad:
            expected: tuple[int | None, bytes] = (INVALID, TEXTS[INVALID])
        elif opcode == TAKE:
            return self.judge_take(client, request, status, body)
        elif opcode == RESUME:
            return self.judge_resume(client, request, status, body)
        else:
            expected = decide(self.books, client.party, request, status)
            if opcode == WHO:
                client.title = request.title
        if (status, body) != expected:
            name = "limit" if opcode == ACQUIRE and status == OK else "replies"
            raise Violation(name, f"{request} of {client} was answered {status:#x} {body!r}, "
                            f"and not {expected}")  # fmt: skip
        return (request, status, None)

    # ---- Takes ----

    def judge_take(self, client: Client, request: Request, status: int, body: bytes) -> Any:
        expected, text, limited = decide_take(self.books, client.party, request, status, is_over=client.hangs_up)
        if status != expected:
            name = "limit" if status == OK else "refused"
            raise Violation(name, f"{request} of {client} was answered {status:#x} {body!r}, and not "
                            f"{expected} {text!r}")  # fmt: skip
        if status != OK:
            if body != text:
                raise Violation("replies", f"{request} was told {body!r}, and not {text!r}")
            return (request, status, None)
        number = _GRANT(body)[0]
        self.decided += 1
        self.number(self.decided, number)
        self.books.grant(client.party, limited, number)
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

    def judge_late(self, client: Client, opaque: int, status: int, body: bytes) -> Any:
        """The reply to a Take that has waited."""
        outcome: Outcome = client.owed.pop(opaque)
        self.seen["late", (status, short_text(body)) if status == NOT_AVAILABLE else status] += 1
        if status != outcome.status or (status != OK and body != outcome.body):
            raise Violation("late", f"the Take {opaque} of {client} was told {status:#x} {body!r}, and "
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

    def judge_resume(self, client: Client, request: Request, status: int, body: bytes) -> Any:
        books, own = self.books, client.party
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
            raise Violation("resume", f"{request} of {client} was answered {status:#x} {body!r}, and "
                            f"not {expected:#x}")  # fmt: skip
        if status != OK:
            return (request, status, None)
        token, grace_ms = _STAY(body)
        if other is not None:
            self.hand_over(client, own, other, request)
        party = client.party
        party.former = (request.token, request.attempt) if other is not None else (b"", 0)
        party.token, party.grace_ms = token, min(request.grace_ms, self.sizes.resume_s * 1000)
        if token in self.tokens or grace_ms != party.grace_ms or int.from_bytes(token[:4], "big") != party.number:
            raise Violation("resume", f"{request} was given {token!r} for {grace_ms} ms")
        self.tokens.add(token)
        return (request, status, token)

    def hand_over(self, client: Client, own: Party, other: Party, request: Request) -> None:
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
            old = other.client
            old.party, own.client = own, old
            own.token, own.former = b"", (b"", 0)
        own.peer, other.peer = other.peer, own.peer
        client.party, other.client = other, client
        if not client.title:
            client.title = other.title

    # ---- a tick ----

    def tick(self, now: int) -> int:
        """A tick, now or soon. Returns when."""
        books = self.books
        began = now // TICK * TICK
        self.now = books.now = began + TICK if any(began < due <= now for due in books.dues()) else now
        if self.now - self.walled >= SECOND:
            self.walled = self.now
            self.set_wall()
        self.store.tick(self.now)
        self.live_tick()
        return self.now

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
            id(client.party) for client in self.clients if client.session.number == 0
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
        walk = WAITERS.walk(self.store, ROWS)
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
            if wait.client is not None:
                del wait.client.waits[wait.opaque]
        else:
            self.drop_wait(wait)
        if wait.client is None:
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
        wait.client.owed[wait.opaque] = outcome

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

    def check(self, now: int) -> int:
        """Holds the books against the store. Returns when something is due."""
        store, books = self.store, self.books
        self.now = books.now = now
        for client in self.clients:
            if client.session.number == 0:
                self.seen["dropped", "posted"] += client.session.dropped
                self.left(client, now)
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
        for client in self.clients:
            number = client.session.number
            if client.party is not None and number and client.party.number != number:
                raise Violation("resume", f"a connection is {number}, and should be {client.party.number}")

    def notice_cancelled(self) -> None:
        """A Resume that is under way cancels what the other connection waits for, before it is answered."""
        targets = []
        for client in self.clients:
            request = client.todo[0] if client.todo else None
            if request is not None and request.opcode == RESUME and request.token and client.session.more:
                targets.append(self.books.find(request.token, request.attempt))
        rows = self.rows()
        for wait in [wait for wait in self.books.waits.values() if wait.serial not in rows]:
            if wait.party not in targets:
                raise Violation("lost", f"{wait} does not wait any more, and nobody was told")
            self.seen["resumed", "cancelled"] += 1
            client = wait.client
            self.drop_wait(wait)
            if client is not None:
                client.owed[wait.opaque] = Outcome(CANCELLED, TEXTS[CANCELLED])

    # ---- from outside ----

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

    def limit_holdings(self, most: int) -> None:
        self.sizes.per_connection = most
        self.store.limit_holdings(most)

    def limit_resumptions(self, seconds: int) -> None:
        self.sizes.resume_s = seconds
        self.store.limit_resumptions(seconds)

    def limit_shares(self, shares: tuple[int, int]) -> None:
        self.sizes.shares = shares
        self.store.limit_shares(*shares)

    def begin_drain(self) -> None:
        self.books.draining = self.books.stale = True
        self.store.begin_drain()

    def evict(self, party: Party, now: int) -> Client | None:
        """A person ends a connection, or what has stayed of one. Returns whose connection has to be closed now."""
        is_kept = party.state == "kept"
        if self.store.evict(party.number, now) != is_kept:
            raise Violation("resume", f"{party.number} is {party.state}, and was evicted otherwise")
        if is_kept:
            party.until = min(party.until, now)
        party.token, party.former = (party.token if is_kept else b""), (b"", 0)
        return party.client

    def ends(self, now: int) -> Iterable[int]:
        """The moments at which something is left to do, of which each has a tick before the next one is told, after
        everybody has gone: what stays is given back in its time, and rates are forgotten once they are full."""
        for window in (0, self.decided + 1):
            self.store.begin_window(window)
            while (due := self.store.next_deadline()) >= 0:
                now = max(now, due)
                yield now
        names = ("busy", "waiters", "holdings", "charges", "kept", "kept_holdings", "rates", "records", "name_memory")
        figures = self.store.snapshot()
        left = {name: figures[name] for name in names if figures[name]}
        if left or self.books.parties or self.books.charges:
            raise Violation("empty", f"everybody has gone, and there is {left}, {self.books.parties}")


def in_order(least: int, value: int, most: int) -> bool:
    return least <= value <= most
