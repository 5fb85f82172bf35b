"""The sentinel protocol's world: rates in their windows, tokens whose leases end at their moment, and who answers late.

The books (leases.py) are executed beside the engine, request by request in the order in which it does: so what passes
is what a window still had room for, no token is given out above its threshold, each counts until it is released or
its lease is over, never longer than until a sweep has come by, and goes once. In some worlds a token service answers
for the engine, or an expire strategy judges leases: late, twice, wrongly or never.

How many are connected to a namespace is only known within bounds for as long as ticks have yet to give back what those
had who went.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.sentinel._session import SentinelSession
from counterd.protocols.sentinel._store import SentinelStore
from counterd.protocols.sentinel._tables import TABLES
from counterd.protocols.sentinel.rules import FlowRule, ParamRule, Rules
from counterd.protocols.sentinel.wire import Status
from kit.promises import Violation
from property.sentinel_model import LIMITER, MS, NAMESPACES_MAX, TICK_NS, reply
from simulation.leases import Rate, Token, Tokens, clamped, is_for_calls, threshold
from simulation.sentinel_clients import (
    ACQUIRE,
    BLANKS,
    CALLS,
    FLOW,
    ITEMS_MAX,
    KEEP,
    NOTHING,
    PARAM,
    PING,
    RELEASE,
    RULES_MAX,
    UNKNOWN,
    Books,
    Request,
    SentinelClients,
)

if TYPE_CHECKING:
    from counterd.protocols.sentinel._store import Call, Lease
    from simulation.world import Link

KINDS = {"request": ACQUIRE, "release": RELEASE, "keep": KEEP}
CALLS_MAX = 1024
TOKENS, _ = TABLES
BATCH_MAX = 256
SURE = 500  # tokens that a slice of a sweep comes through in any case
FILLING = FlowRule("shop", 900, "all", 0, 1e12, 1, 10, 1000, 2000, 2000, 0)


class Pending(NamedTuple):
    """What a token service has yet to answer. link: None for a token that nobody waits for."""

    link: Link | None
    request: Request
    deadline: int


class SentinelWorld(SentinelClients):
    name = "sentinel"

    # ---- what it is made of ----

    def make_store(self) -> SentinelStore:
        draw = self.random
        self.seen: dict[tuple[int, int], int] = {}  # answers by type and status
        self.tokens_max = draw.choice((8, 60, 400, 2000))
        self.values_max = draw.choice((3, 20, 300))
        self.draw_bounds()
        self.calm = self.latency * draw.choice((20, 200, 2000))  # between what is meddled with
        self.timing()
        self.leaving: list[dict[bytes, None]] = []  # namespaces of those who went, which are yet to be given back
        self.unarmed: list[Books] = []
        self.connected: dict[bytes, int] = {}
        self.rates: dict[int, Rate] = {}
        self.limits: dict[str, Rate] = {}
        self.values: dict[int, dict[bytes, Rate]] = {}
        self.kept: dict[tuple[Rate, bytes], int] = {}  # values that may be in the store until then
        self.tokens = Tokens()
        self.ids: deque[int] = deque(maxlen=300)  # tokens that were given out lately
        self.pending: dict[int, Pending] = {}
        self.noted: deque[tuple[int, Pending]] = deque()  # that ticks have yet to submit
        self.abandoned: dict[int, None] = {}
        self.batches: dict[int, tuple[int, list[int]]] = {}
        self.ticket = self.batch_ticket = self.xid = self.granted = self.given_back = self.checked = self.ticked = 0
        self.bounded_until = 0
        self.draining = self.ticking = False
        self.swept: deque[tuple[int, int]] = deque()  # when, and how many
        store = SentinelStore(
            namespaces=64, holdings=max(256, 8 * self.crowd), holdings_per_connection=NAMESPACES_MAX,
            name_memory=1 << 21,
            hash_key=draw.getrandbits(128).to_bytes(16, "little"),
            token_key=draw.getrandbits(128).to_bytes(16, "little"),
            reply_max=16, posted_max=draw.choice((64, 65536)), tokens=self.tokens_max, param_values=self.values_max,
            rules=RULES_MAX, items=ITEMS_MAX, make_session=SentinelSession,
        )  # fmt: skip
        store.set_limits(**self.bounds)
        self.flow_rules: dict[int, FlowRule] = {}
        self.param_rules: dict[int, ParamRule] = {}
        rules = self.make_rules()
        store.load_rules(rules)
        self.loaded(rules)
        if self.serves:
            store.delegate(self.submitted, self.patience_ns)
        if self.judges:
            store.delegate_expiry(self.asked, self.patience_ns)
        return store

    def loaded(self, rules: Rules) -> None:
        """Rates stay where they are as fine and as long, and tokens stay."""
        before = self.param_rules
        self.flow_rules = {rule.flow_id: rule for rule in rules.flows}
        self.param_rules = {rule.flow_id: rule for rule in rules.params}
        self.tokens.load(rules.flows)
        for flow_id in [flow_id for flow_id in self.rates if flow_id not in self.flow_rules]:
            if not self.tokens.calls.get(flow_id):
                del self.rates[flow_id]
        for rule in rules.flows:
            rate = self.rates.get(rule.flow_id)
            if rate is None or not rate.is_like(rule):
                self.rates[rule.flow_id] = Rate(rule.sample_count, rule.window_ms)
        for flow_id, old in before.items():
            known = self.values[flow_id]
            for item in old.items:  # it stays for a while, as others do
                self.keep_value(known.setdefault(item, Rate(old.sample_count, old.window_ms)), item)
            param = self.param_rules.get(flow_id)
            if param is None or (old.sample_count, old.window_ms) != (param.sample_count, param.window_ms):
                del self.values[flow_id]
        for param in rules.params:
            self.values.setdefault(param.flow_id, {})
        names = sorted({rule.namespace for rule in (*rules.flows, *rules.params)})
        self.limits = {name: self.limits.get(name) or Rate(*LIMITER) for name in names}

    def keep_value(self, rate: Rate, key: bytes) -> None:
        """It may be in the store for so long after it was asked for."""
        self.kept[rate, key] = (self.now // rate.length_ns + max(rate.samples, 2)) * rate.length_ns

    def is_hot(self, rate: Rate, key: bytes) -> bool:
        return any(
            key in rule.items and self.values[flow_id].get(key) is rate for flow_id, rule in self.param_rules.items()
        )

    def arrived(self) -> Books:
        return Books()

    # ---- what the engine answers ----

    def answered(self, link: Link, output: bytes) -> None:
        books: Books = link.books
        session = link.session
        executed = session.requests - link.executed
        link.executed = session.requests
        position = 0
        if output and not executed:
            position = self.fetched(link, output)
        for _ in range(executed):
            if not books.queue:
                raise Violation("replies", f"{executed} requests of connection {link.number} were executed")
            request = books.queue.popleft()
            if not self.is_delegated(link, request):
                position = self.judge(link, request, output, position)
        if position != len(output):
            raise Violation("replies", f"connection {link.number} was sent {output[position : position + 40].hex(' ')}")
        if books.queue and not session.more and not session.closing and books.queue[0].ends <= link.bytes_fed:
            raise Violation("progress", f"{books.queue[0]} was read by connection {link.number}, and not answered")

    def judge(self, link: Link, request: Request, output: bytes, position: int) -> int:
        """The next reply; returns where it ends."""
        end = position + 2 + int.from_bytes(output[position : position + 2], "big")
        data = output[position:end]
        if request.kind == NOTHING:
            if data != request.what:
                raise Violation("replies", f"{request} was answered {data.hex(' ')}")
            self.saw(data[6], data[7] - 256)
            self.mark(link, request, data[7], link.bytes_out + end, data)
            return end
        if len(data) != end - position or len(data) < 8 or data[2:7] != struct.pack(">iB", request.xid, request.kind):
            raise Violation("replies", f"{request} was answered {data.hex(' ')}")
        status = data[7] - 256 if data[7] > 127 else data[7]
        if self.serves and request.kind in (ACQUIRE, RELEASE, KEEP):
            told: tuple[int, ...] = (Status.NOT_AVAILABLE,)  # for nobody was asked
        elif request.kind == PING:
            told = self.judge_ping(link, request.what, status, int.from_bytes(data[8:12], "big"))
        elif request.kind == FLOW:
            told = self.judge_flow(request, (status, *struct.unpack_from(">ii", data, 8)))
        elif request.kind == PARAM:
            told = self.judge_param(request, (status, *struct.unpack_from(">ii", data, 8)))
        elif request.kind == ACQUIRE:
            id = int.from_bytes(data[8:], "big", signed=True)
            told = self.judge_acquire(link, request.flow_id, request.count, status, id)
        elif request.kind == RELEASE:
            told = self.judge_release(request.what)
        else:
            told = self.judge_keep(link, request.what)
        if data != reply(request.xid, request.kind, *told):
            raise Violation("replies", f"{request} was answered {data.hex(' ')}, not {told}")
        self.saw(request.kind, status)
        self.mark(link, request, status, link.bytes_out + end, data)
        return end

    def saw(self, kind: int, status: int) -> None:
        key = (kind if kind <= KEEP else UNKNOWN, status)
        self.seen[key] = self.seen.get(key, 0) + 1

    def mark(self, link: Link, request: Request, status: int, end: int, data: bytes) -> None:
        got = request.kind == ACQUIRE and status == Status.OK
        link.marks.append((end, int.from_bytes(data[8:], "big", signed=True) if got else 0))
        link.todo.remove(request)

    def delivered(self, link: Link, answer: int) -> None:
        if answer:
            link.books.held.append(answer)

    # ---- rates ----

    def connections(self, rule: FlowRule | ParamRule) -> range:
        """How many there may be in its namespace."""
        name = rule.namespace.encode()
        sure = self.connected.get(name, 0)
        return range(sure, sure + sum(name in names for names in self.leaving) + 1)

    def judge_ping(self, link: Link, name: bytes, status: int, count: int) -> tuple[int, ...]:
        names = link.books.namespaces
        if name in BLANKS:
            return (Status.FAIL,)
        if name not in names:
            names[name] = None
            self.connected[name] = self.connected.get(name, 0) + 1
        sure = self.connected[name]
        most = sure + sum(name in others for others in self.leaving)
        if status == Status.OK and not sure <= count <= most:
            raise Violation("connected", f"{count} are told to be connected, there are {sure} to {most}")
        return Status.OK, count

    def is_allowed(self, rule: FlowRule | ParamRule) -> bool:
        limit = self.limits[rule.namespace]
        if limit.left(self.bounds["max_allowed_qps"], 1, self.now) < 0:
            return False
        limit.add(1, self.now)
        return True

    def judge_flow(self, request: Request, told: tuple[int, ...]) -> tuple[int, ...]:
        rule = self.flow_rules.get(request.flow_id)
        if rule is None or is_for_calls(rule):
            return (Status.NO_RULE,)
        if not self.is_allowed(rule):
            return (Status.TOO_MANY_REQUESTS,)
        rate = self.rates[request.flow_id]
        expected = []
        for connected in self.connections(rule):
            expected.append(rate.ask(threshold(rule, rule.count, connected), request.count, request.flag, self.now))
        if told not in expected:
            raise Violation("rate", f"{request} was answered {told}, not {expected[:3]}")
        if told[0] == Status.OK:
            rate.add(request.count, self.now)
        elif told[0] == Status.SHOULD_WAIT:
            rate.borrow(request.count, self.now)
        return told

    def judge_param(self, request: Request, told: tuple[int, ...]) -> tuple[int, ...]:
        """All of the values pass or none; and there is room for them, unless as many as may be are kept."""
        rule = self.param_rules.get(request.flow_id)
        if rule is None:
            return (Status.NO_RULE,)
        if not self.is_allowed(rule):
            return (Status.TOO_MANY_REQUESTS,)
        expected = []
        for connected in self.connections(rule):
            expected.append(self.pass_values(rule, request, connected))
        if told[0] == Status.NOT_AVAILABLE:
            if self.store.snapshot()["param_values"] < self.values_max:
                raise Violation("values", f"{request} was answered {told}, where there is room for more")
        elif told not in expected:
            raise Violation("rate", f"{request} was answered {told}, not {expected[:3]}")
        elif told[0] == Status.OK:
            for _, key in request.what:
                self.values[rule.flow_id][key].add(request.count, self.now)
        return told

    def pass_values(self, rule: ParamRule, request: Request, connected: int) -> tuple[int, ...]:
        known = self.values[rule.flow_id]
        asked: dict[bytes, int] = {}
        left = 0.0
        for _, key in request.what:
            if key not in known:
                known[key] = Rate(rule.sample_count, rule.window_ms)
            self.keep_value(known[key], key)
            besides = asked.get(key, 0)
            limit = threshold(rule, rule.items.get(key, rule.count), connected)
            left = known[key].left(limit, request.count, self.now, besides)
            if left < 0:
                return Status.BLOCKED, 0, 0
            asked[key] = besides + request.count
        return Status.OK, clamped(left) if len(request.what) == 1 else -1, 0

    # ---- tokens ----

    def judge_acquire(self, link: Link | None, flow_id: int, count: int, status: int, id: int) -> tuple[int, ...]:
        rule = self.flow_rules.get(flow_id)
        if rule is None or not is_for_calls(rule):
            return (Status.NO_RULE,)
        calls = self.tokens.calls.get(flow_id, 0) + count
        fits = {calls <= threshold(rule, rule.count, connected) for connected in self.connections(rule)}
        if fits == {False} or (status == Status.BLOCKED and False in fits):
            return (Status.BLOCKED,)
        if self.draining or len(self.tokens.by_id) == self.tokens_max:
            return (Status.NOT_AVAILABLE,)
        if status == Status.OK:
            if id == 0 or id in self.tokens.by_id:
                raise Violation("tokens", f"{id} is given out, and means something else")
            self.tokens.add(id, Token(rule, count, link, self.now))
            self.ids.append(id)
            self.granted += 1
        return Status.OK, id

    def find(self, id: int) -> Token | None:
        """A token whose lease is not over. One whose is goes; but where an expire strategy says when that is."""
        token = self.tokens.by_id.get(id)
        if token is not None and not self.judges and token.ends(self.now) <= self.now:
            self.drop(id)
            return None
        return token

    def drop(self, id: int) -> None:
        flow_id = self.tokens.remove(id).rule.flow_id
        self.given_back += 1
        if flow_id not in self.flow_rules and not self.tokens.calls[flow_id]:
            self.rates.pop(flow_id, None)

    def judge_release(self, id: int) -> tuple[int, ...]:
        token = self.find(id)
        if token is None:
            return (Status.ALREADY_RELEASED,)
        self.drop(id)
        return (Status.RELEASE_OK if is_for_calls(self.flow_rules.get(token.rule.flow_id)) else Status.NO_RULE,)

    def judge_keep(self, link: Link | None, id: int) -> tuple[int, ...]:
        token = self.find(id)
        if token is None:
            return (Status.ALREADY_RELEASED,)
        if not is_for_calls(self.flow_rules.get(token.rule.flow_id)):
            return (Status.NO_RULE,)
        token.owner = link
        token.kept += 1
        token.begin(self.now)
        return Status.OK, clamped(max(token.due - self.now, 0) // MS)

    # ---- who answers for the engine ----

    def is_delegated(self, link: Link, request: Request) -> bool:
        if not self.serves or request.kind not in (ACQUIRE, RELEASE, KEEP):
            return False
        if len(self.pending) >= CALLS_MAX or (request.kind == ACQUIRE and self.draining):
            return False
        self.note(link, request)
        return True

    def note(self, link: Link | None, request: Request) -> None:
        self.ticket += 1
        self.pending[self.ticket] = Pending(link, request, self.now + self.patience_ns)
        self.noted.append((self.ticket, self.pending[self.ticket]))

    def submitted(self, calls: list[Call]) -> None:
        """The token service is asked: it begins with each a while later, or never."""
        for call in calls:
            ticket, pending = self.noted.popleft()
            link, request, _ = pending
            asked = request.flow_id, request.count, request.flag, 0
            if request.kind != ACQUIRE:
                asked = 0, 0, False, request.what
            who = (True, "") if link is None else (False, link.origin())
            told = call.ticket, KINDS[call.kind], *call[2:6], call.client == 0, call.address
            if told != (ticket, request.kind, *asked, *who):
                raise Violation("service", f"{call} stands for {request}")
            chance = self.random.random()
            if chance < 0.02:
                self.tell((ticket, Status.NOT_AVAILABLE, 0))
            elif chance < 0.97 or not self.open:
                self.push(self.slowness(), self.serve, (call, link))

    def slowness(self) -> int:
        """Mostly in time."""
        return 1 + int(self.patience_ns * self.random.random() ** 4 * 1.5)

    def serve(self, argument: tuple[Call, Link | None]) -> None:
        """The service has the store do it, and tells what came of that at once, or later; now and then nonsense too."""
        call, link = argument
        store = self.store
        value = 0
        is_gone = link is not None and link.books.gone is not None
        if call.kind == "request":
            status, value = store.request_token(call.flow_id, call.count, call.prioritized, call.client, self.now)
            told = self.judge_acquire(link, call.flow_id, call.count, status, value)
            if is_gone and told[0] != Status.NO_RULE:
                told = (Status.NOT_AVAILABLE,)
        elif call.kind == "release":
            status = store.release_token(call.token_id, self.now)
            told = self.judge_release(call.token_id)
        else:
            status, value = store.keep_token(call.token_id, call.client, self.now)
            told = (Status.NOT_AVAILABLE,) if is_gone else self.judge_keep(link, call.token_id)
        if (status, value) != (*told, 0)[:2]:
            raise Violation("service", f"{call} came to {status}, {value}, not {told}")
        self.step("serve", None, status)
        chance = self.random.random()
        if chance < 0.1:
            self.push(self.slowness(), self.tell, (call.ticket, status, value))
        if chance < 0.02:
            self.tell((call.ticket + self.random.choice((-1, 1000)), 99, 1))
        if chance > 0.05:
            self.tell((call.ticket, status, value))

    def tell(self, argument: tuple[int, int, int]) -> None:
        """What a service says. A token that nobody waits for any more is to be released by it."""
        ticket, status, value = argument
        pending = self.pending.pop(ticket, None)
        told = status if Status.BAD_REQUEST <= status <= Status.ALREADY_RELEASED else Status.FAIL
        link = None
        if pending is not None:
            link = self.posted(pending, told, value if told == Status.OK else 0)
            is_lost = link is None and pending.request.kind == ACQUIRE
        else:
            is_lost = ticket in self.abandoned
            self.abandoned.pop(ticket, None)
        if is_lost and told == Status.OK:
            self.note(None, Request(0, 0, RELEASE, what=value))
        self.store.answer(ticket, status, value, self.now)
        if link is not None and link.session.number == 0:  # dropped, or this was the last that its peer waited for
            self.left(link)
        if not self.ticking:
            self.step("answer", link, ticket)

    def posted(self, pending: Pending, status: int, value: int) -> Link | None:
        """The link that is told so, if it is there."""
        link = pending.link
        if link is None or link.session is None or link.session.closing:
            return None
        link.books.posts.append((pending.request, status, value))
        return link

    def fetched(self, link: Link, output: bytes) -> int:
        """Replies that others have caused, in the order in which they did; returns where they end."""
        position = 0
        while position < len(output):
            if not link.books.posts:
                raise Violation("service", f"connection {link.number} was sent {output[position:].hex(' ')}")
            request, status, value = link.books.posts.popleft()
            data = reply(request.xid, request.kind, status, *(() if request.kind == RELEASE else (value,)))
            if output[position : position + len(data)] != data:
                raise Violation("service", f"{request} was answered {output[position:].hex(' ')}, not {data.hex(' ')}")
            position += len(data)
            self.saw(request.kind, status)
            self.mark(link, request, status, link.bytes_out + position, data)
        return position

    def overdue(self) -> list[Link]:
        """What a tick does first of all about calls and batches: those whom it answers."""
        told = []
        for ticket, pending in list(self.pending.items()):
            if pending.deadline > self.now:
                break
            del self.pending[ticket]
            if pending.request.kind == ACQUIRE:
                self.abandoned[ticket] = None
                if len(self.abandoned) > CALLS_MAX:
                    del self.abandoned[next(iter(self.abandoned))]
            link = self.posted(pending, Status.NOT_AVAILABLE, 0)
            if link is not None:
                told.append(link)
        for ticket, (deadline, _) in list(self.batches.items()):
            if deadline > self.now:
                break
            del self.batches[ticket]
        return told

    def asked(self, ticket: int, leases: list[Lease]) -> None:
        """The expire strategy is asked: it judges later, twice, or never."""
        self.batch_ticket += 1
        ids = [lease.token_id for lease in leases]
        if ticket != self.batch_ticket or not 0 < len(ids) <= BATCH_MAX:
            raise Violation("judging", f"batch {ticket} of {len(ids)} is not {self.batch_ticket}")
        for lease in leases:
            token = self.tokens.by_id.get(lease.token_id)
            if token is None or token.judged > self.now or token.ends(self.now) > self.now:
                raise Violation("judging", f"{lease} is to be judged, and is not over, or is already")
            online = token.owner is None or token.owner.books.gone is None
            told = token.rule.flow_id, token.count, (self.now - token.since) // MS, online
            if lease[1:] != told:
                raise Violation("judging", f"{lease} is told of {told}")
            token.judged = self.now + self.patience_ns
            token.batch = ticket
        self.batches[ticket] = self.now + self.patience_ns, ids
        chance = self.random.random()
        for _ in range(0 if chance < 0.05 else 2 if chance < 0.1 else 1):
            going = [id for id in ids if not self.open or self.random.random() < 0.6]
            self.push(self.slowness(), self.verdict, (ticket, [*going, 5]))

    def verdict(self, argument: tuple[int, list[int]]) -> None:
        """These go, the rest of the batch has another lease."""
        ticket, going = argument
        for id in self.batches.pop(ticket, (0, ()))[1]:
            token = self.tokens.by_id.get(id)
            if token is None or not token.judged or token.batch != ticket:
                continue
            if id in going:
                self.drop(id)
            else:
                token.due = self.now + 2 * token.rule.resource_timeout_ms * MS
                token.judged = 0
                token.renewed = token.owner is not None and token.owner.books.gone is not None
        self.store.expire(ticket, going, self.now)
        self.step("expire", None, ticket)

    # ---- what has to hold ----

    def left(self, link: Link) -> None:
        books: Books = link.books
        if books.gone is not None:
            return
        books.gone = self.now
        if link.session.dropped:
            books.posts.clear()
        for name in books.namespaces:
            self.connected[name] -= 1
        self.unarmed.append(books)
        if self.random.random() < 0.1:  # and at once, before any tick, somebody else releases some of it
            for id in [id for id, token in self.tokens.by_id.items() if token.owner is link]:
                if self.random.random() < 0.3:
                    self.push(1, self.release_for_nobody, id)
        if books.namespaces:
            self.leaving.append(books.namespaces)
        for token in self.tokens.by_id.values() if self.judges else ():
            token.renewed = token.renewed and token.owner is not link

    def tick(self) -> None:
        self.ticking = True
        told = self.overdue()
        self.store.tick(self.now)
        self.ticking = False
        for link in told:
            if link.session.number == 0:
                self.left(link)
        figures = self.store.snapshot()
        if figures["holdings_leaving"] == 0:
            self.leaving.clear()
        if figures["tokens"] != len(self.tokens.by_id):
            self.find_swept()
        due = self.store.next_deadline()
        if due == -1 or due > self.now:
            for books in self.unarmed:
                books.armed = self.now
            self.unarmed.clear()
            self.check_swept()
        self.ticked = self.now
        self.step("tick", None)

    def rows(self) -> dict[int, tuple[Any, ...]]:
        """All tokens of the store."""
        walk = TOKENS.walk(self.store, self.tokens_max)
        while not walk.step():
            pass
        return {int(row[0]): (int(row[1]), *row[2:]) for row in walk.rows()}

    def find_swept(self) -> None:
        """What a tick has freed: leases that are over, no more at a time than is allowed."""
        there = self.rows()
        swept = [id for id in self.tokens.by_id if id not in there]
        for id in swept:
            token = self.tokens.by_id[id]
            if token.judged > self.now or (self.judges and not token.judged):
                raise Violation("judging", f"token {id} has gone, and was to be judged until {token.judged}")
            if not token.judged and token.ends(self.now) > self.now:
                raise Violation("lease", f"token {id} has gone, and its lease ends at {token.ends(self.now)}")
            self.drop(id)
        if len(there) != len(self.tokens.by_id):
            raise Violation("tokens", f"there are {len(there)}, not {len(self.tokens.by_id)}")
        self.swept.append((self.now, len(swept)))
        while self.swept[0][0] <= self.now - self.bounds["sweep_interval_ns"]:
            self.swept.popleft()
        most = self.bounds["sweep_max_tokens"]
        if most and sum(count for _, count in self.swept) > 2 * most:
            raise Violation("sweep", f"{[*self.swept]} are more than {most} each {self.interval} ns")

    def check_swept(self) -> None:
        """With nothing left to do now, whose lease was over before the last sweep is gone, and so are old values."""
        for kept in [kept for kept, until in self.kept.items() if until + TICK_NS <= self.now]:
            del self.kept[kept]
        if self.judges or self.bounds["sweep_max_tokens"] or len(self.tokens.by_id) > SURE:
            return
        if self.now < self.bounded_until:
            return
        for id, token in self.tokens.by_id.items():
            over = token.wakes(self.now)
            if over + TICK_NS <= self.now - self.interval:
                raise Violation("sweep", f"token {id} is still there, and its lease was over at {over}")

    def check(self) -> int:
        due: int = self.store.next_deadline()
        self.checked += 1
        if self.checked % 16 == 0:
            self.check_calls()
        if self.checked % 64 == 0:
            self.check_deadline(due)
            self.check_values()
        return due

    def check_calls(self) -> None:
        for flow_id, calls in self.tokens.calls.items():
            told = self.store.flow(flow_id)
            if (told["now_calls"] if told else 0) != calls:
                raise Violation("nowCalls", f"{told} of flow {flow_id}, whose tokens stand for {calls}")
        figures = self.store.snapshot()
        gone = figures["released"] + figures["expired_offline"] + figures["expired_lease"]
        if (figures["granted"], gone, self.store.held()) != (self.granted, self.given_back, len(self.tokens.by_id)):
            raise Violation("tokens", f"{figures}, with {self.granted} granted and {self.given_back} given back")

    def check_deadline(self, due: int) -> None:
        """The next tick is none too late for anybody."""
        last = min((token.wakes(self.now) for token in self.tokens.by_id.values()), default=-1)
        bound = max(last + TICK_NS, self.ticked + self.interval) if last >= 0 else -1
        for _, _, deadline in self.pending.values():
            bound = deadline if bound < 0 else min(bound, deadline)
            break
        if bound >= 0 and (due == -1 or due > bound):
            raise Violation("deadline", f"something is due at {bound}, and the next moment is {due}")

    def check_values(self) -> None:
        """Each of which something counts is kept; and none longer than its window."""
        figures = self.store.snapshot()
        cool = [(rate, key) for rate, key in self.kept if not self.is_hot(rate, key)]
        known = [(rate, key) for values in self.values.values() for key, rate in values.items()]
        sure = sum(rate.sum(rate.enter(self.now)) > 0 and not self.is_hot(rate, key) for rate, key in known)
        hot = sum(len(rule.items) for rule in self.param_rules.values())
        if not sure <= figures["param_values"] <= len(cool) or figures["hot_items"] != hot:
            raise Violation("values", f"{sure} to {len(cool)} and {hot} are there, the store has {figures}")

    # ---- from outside ----

    def round(self, until: int) -> None:
        self.push(self.random.randrange(self.calm), self.happen, None)
        super().round(until)

    def outside(self, _: None) -> None:
        """See happen(), which comes oftener."""

    def happen(self, _: None) -> None:
        if not self.open:
            return
        self.meddle()
        self.push(self.random.randrange(self.calm), self.happen, None)

    def meddle(self) -> None:
        draw = self.random
        chance = draw.random()
        if chance < 0.3:
            self.change_rules(self.make_rules())
        elif chance < 0.35:
            self.refuse_rules()
        elif chance < 0.45:
            self.draw_bounds()
            self.store.set_limits(**self.bounds)
            self.swept.clear()
            self.bounded_until = self.now + 2 * self.interval  # the last sweep was under other bounds
            self.step("limits", None)
        elif chance < 0.7:
            self.now += int(draw.random() * draw.choice((2, 20, 300, 4000)) * MS)  # it was busy, or stopped
        elif chance < 0.71 and self.drains:
            self.draining = True
            self.store.begin_drain()
            self.step("drain", None)
        else:
            self.ask_for_nobody()

    def change_rules(self, rules: Rules) -> None:
        """Unless it has no room for their items: those that were such may still be there, besides all that can be."""
        try:
            self.store.load_rules(rules)
        except ValueError as error:
            figures = self.store.snapshot()
            if figures["param_values"] + sum(len(rule.items) for rule in rules.params) <= self.values_max:
                raise Violation("rules", str(error)) from None
            self.step("refused", None)
        else:
            self.loaded(rules)
            self.step("rules", None)

    def refuse_rules(self) -> None:
        """Too many: nothing changes."""
        flows = tuple(FlowRule("x", 5000 + number, "", 0, 1.0, 1, 10, 1000, 2, 2, 0) for number in range(RULES_MAX + 1))
        try:
            self.store.load_rules(Rules(flows, ()))
        except ValueError:
            self.step("refused", None)
        else:
            raise Violation("rules", "more are taken than there is room for")

    def ask_for_nobody(self) -> None:
        """For one who never goes; so it is released after a while, where the server would renew it for ever."""
        flow_id = self.flow_id(CALLS)
        status, id = self.store.request_token(flow_id, 1, False, 0, self.now)
        if (status, id) != (*self.judge_acquire(None, flow_id, 1, status, id), 0)[:2]:
            raise Violation("tokens", f"nobody asked for {flow_id} and was answered {status}, {id}")
        self.step("request", None, flow_id)
        if id:
            delay = int(self.random.random() * 500 * MS)
            if self.random.random() < 0.5:  # when its lease is over, or just not yet
                delay = min(delay, self.tokens.by_id[id].ends(self.now) - self.now - self.random.choice((0, 1)))
            self.push(delay, self.release_for_nobody, id)

    def release_for_nobody(self, id: int) -> None:
        status = self.store.release_token(id, self.now)
        if (status,) != self.judge_release(id):
            raise Violation("tokens", f"{id} was released for nobody, and answered {status}")
        self.step("release", None)

    def settled(self) -> None:
        """Whose tokens are whose."""
        there = self.rows()
        for id, token in self.tokens.by_id.items():
            owner = 0 if token.owner is None or token.owner.session is None else token.owner.session.number
            told = token.rule.flow_id, token.count, owner
            row = there[id]
            if (*row[:3], row[5]) != (*told, token.kept):
                raise Violation("owners", f"token {id} is {row}, not {told}, kept {token.kept} times")

    def emptied(self) -> None:
        store = self.store
        bound = 10 * len(self.tokens.by_id) + 1000
        while (due := store.next_deadline()) >= 0:
            self.now = max(self.now, due)
            self.tick()
            for ticket, (_, ids) in list(self.batches.items()):
                self.verdict((ticket, ids))
            bound -= 1
            if not bound:
                raise Violation("progress", "ticks do not come to an end")
        self.check_calls()
        figures = store.snapshot()
        left = {key: figures[key] for key in ("tokens", "param_values", "namespaces", "holdings", "calls_pending")}
        if any(left.values()) or self.tokens.by_id:
            raise Violation("empty", f"everybody has gone, and there is {left}")
        if not self.draining:
            self.fill()

    def fill(self) -> None:
        """All that was ever free is free: there is room for as many tokens as at first."""
        rules = Rules((*self.flow_rules.values(), FILLING), tuple(self.param_rules.values()))
        self.store.load_rules(rules)
        self.loaded(rules)
        for number in range(self.tokens_max + 1):
            status, id = self.store.request_token(FILLING.flow_id, 1, False, 0, self.now)
            self.judge_acquire(None, FILLING.flow_id, 1, status, id)
            if status != (Status.OK if number < self.tokens_max else Status.NOT_AVAILABLE):
                raise Violation("room", f"token {number} of {self.tokens_max} was answered {status}")
        self.step("request", None)
        for id in list(self.tokens.by_id):
            self.store.release_token(id, self.now)
            self.drop(id)
        self.step("release", None)
