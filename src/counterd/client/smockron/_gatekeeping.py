"""The core of a gatekeeper, without I/O: decides, remembers what masters announce, and makes the messages for them.

Floor: side (ARCHITECTURE.md); shared by the gatekeeper for threads and the gatekeeper for asyncio. This file reads no
clock, and never waits, locks or logs. Callers pass the times of two clocks: the monotonic clock, in nanoseconds
(`now_ns`) or seconds (`now`), for decisions; and Unix time (`wall_ns`), for messages. A time in a message is converted
when the message arrives. So a later change of the wall clock does not change how long anybody waits.

An accounting message is kept in the Gate of its domain until the domain's master has subscribed to the domain, and has
taken the subscription of the gatekeeper to the domain's control messages, so that the effect of the message is not
missed; but at most for HELD_NS. A master counts a late message as if the request arrived now, so an old message would
limit clients unfairly. If the connection for control messages is missing for BLIND_S, messages are sent without it.
"""

from __future__ import annotations

import logging
import math
import random
from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

from counterd.client._connection import as_bytes
from counterd.client.smockron._delays import DelayCache, DelayedRequests
from counterd.client.smockron._masters import read_masters
from counterd.client.smockron._zmtp import TTL, ZmtpSession
from counterd.errors import ConnectionLost
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.errors import Rejected
from counterd.protocols.smockron.wire import SocketType, Status, Word

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable

    from counterd.client.smockron._masters import Masters, Pair

DOMAINS_MAX = 4096  # of one master, which closes a connection that has more subscriptions
HELD_NS = 2_000_000_000
BLIND_S = 1.0  # less than HELD_NS, so that nothing is dropped
BATCH = 2048  # messages that are sent in one piece
LOG_INFO_MAX = 1024  # bytes
ALL: Literal["all"] = "all"
SHARES = {"all": 1.0, "none": 0.0}  # the share of rejected requests that are reported to masters
MS, HALF_MS = 1_000_000, 500_000  # ns
_LAST = bytes((0, 0))  # an empty frame, which ends a message
_SHORTS = tuple(bytes((wire.MORE, size)) for size in range(256))  # how a short frame begins that is not the last

log = logging.getLogger("counterd.client.smockron")
News = Union[tuple[Any, ...], None]  # noqa: UP007 - arguments for log.log(), to be called without a lock


class Verdict(str, Enum):
    """What happens to a request: it passes, waits or is rejected."""

    PASS = "pass"
    DELAY = "delay"
    REJECT = "reject"


class Decision(NamedTuple):
    """The decision about one request.

    delay_s: how many seconds the request has to wait, or would have to wait if it were not rejected; 0 if it passes.
    until_ms: when the delay ends, in milliseconds of Unix time; 0 if the request passes.
    number: the number of a delayed request, for gave_up(); 0 for other requests.
    """

    verdict: Verdict
    delay_s: float = 0.0
    until_ms: int = 0
    number: int = 0


PASSED = Decision(Verdict.PASS)


class Stats(NamedTuple):
    """The result of stats() of a gatekeeper.

    passed, delayed, rejected: requests by decision.
    delaying: requests that wait now.
    remembered: identifiers that have to wait now, as far as the gatekeeper knows.
    evicted: identifiers that were forgotten because there were too many.
    told: control messages that arrived.
    unknown: messages from masters that the gatekeeper does not know how to use.
    sent: accounting messages that were sent.
    held: accounting messages that are kept until they can be sent.
    dropped: accounting messages that were kept for too long, or were too many.
    unwanted: accounting messages of domains from which the master has unsubscribed.
    lost: connections that ended, and attempts to connect that failed.
    away: why masters cannot be reached now, by their address.
    """

    passed: int
    delayed: int
    rejected: int
    delaying: int
    remembered: int
    evicted: int
    told: int
    unknown: int
    sent: int
    held: int
    dropped: int
    unwanted: int
    lost: int
    away: dict[str, str]


@dataclass(frozen=True)
class Options:
    """The arguments of a gatekeeper that have a default. Raises ValueError for impossible values."""

    max_delay_s: float = 5.0
    max_delayed: int = 1000
    rejected: Literal["all", "none"] | float = ALL
    max_remembered: int = 100_000
    max_held: int = 10_000
    heartbeat: float = 5.0
    timeout: float = 5.0

    def __post_init__(self) -> None:
        for name, least in (("max_delay_s", 0), ("max_delayed", 0), ("max_remembered", 1), ("max_held", 1)):
            value = getattr(self, name)
            if not value >= least:
                raise ValueError(f"{name} must be {least} or more, not {value!r}")
        if not 0 < self.heartbeat <= wire.TTL_MAX / 10 / TTL:
            raise ValueError(f"heartbeat must be more than 0 seconds and at most {wire.TTL_MAX // 10 // TTL}")
        if not self.timeout > 0:
            raise ValueError(f"timeout must be more than 0 seconds, not {self.timeout!r}")
        if isinstance(self.rejected, str) and self.rejected not in SHARES:
            raise ValueError(f'rejected must be "all", "none" or a share, not {self.rejected!r}')
        if not 0 <= self.share <= 1:
            raise ValueError(f"rejected must be a share from 0 to 1, not {self.rejected!r}")

    @property
    def share(self) -> float:
        return SHARES[self.rejected] if isinstance(self.rejected, str) else self.rejected


class Flow(Enum):
    """What happens to the accounting messages of a domain."""

    HELD = 0  # kept: the master has not subscribed to it yet, or has not taken the subscription to it
    OPEN = 1  # sent
    UNWANTED = 2  # discarded: the master has unsubscribed


HELD, OPEN, UNWANTED = Flow  # much faster to look up than the members of the class
_, DELAY, REJECT = Verdict


class Master:
    """A master with its two connections. filled: the gates that have something to send.

    is_blind: the accounting connection works, but the control connection has been missing for BLIND_S.
    is_leaving: the gatekeeper closes, so it needs no control messages.
    """

    def __init__(self, pair: Pair, options: Options) -> None:
        self.accounting = ZmtpSession(SocketType.PUB, pair.accounting, options.heartbeat, options.timeout)
        self.control = ZmtpSession(SocketType.SUB, pair.control, options.heartbeat, options.timeout)
        self.sessions = (self.control, self.accounting)
        self.gates: list[Gate] = []
        self.filled: list[Gate] = []
        self.is_blind = self.is_leaving = False
        self.directed = self.footing  # when the flows of the gates were set
        self.away = ""  # why it cannot be reached
        self.away_since = 0.0

    @property
    def joined(self) -> int:
        """How many gates, in their order, receive control messages. All, if nothing can be waited for."""
        if self.is_leaving or (self.is_blind and not self.control.is_open):
            return len(self.gates)
        return self.control.joined

    @property
    def footing(self) -> tuple[int, bool, int]:
        """Everything on which the flows of the gates depend."""
        return self.joined, self.accounting.is_ready, self.accounting.changes

    @property
    def blind_at(self) -> float:
        """When accounting messages are sent without control messages, unless the control connection is back before."""
        if self.control.is_ready or not self.accounting.is_ready:
            return math.inf
        return max(self.control.away_since, self.accounting.ready_at) + BLIND_S

    @property
    def is_ready(self) -> bool:
        """Whether both connections work, and the master has subscribed to at least one of the domains, if there are
        any."""
        return (
            self.control.is_settled
            and self.accounting.is_ready
            and (not self.gates or any(gate.flow is not HELD for gate in self.gates))
        )

    def wants(self, session: ZmtpSession, now: float) -> bool:
        """Whether it is time to connect.

        The connection for control messages comes first, because it receives the effects of accounting messages.
        """
        if session.is_open or session.is_connecting or now < session.retry_at:
            return False
        return session is self.control or self.control.is_ready or self.control.has_failed

    @property
    def due(self) -> float:
        """When there is work for a connection. Infinity if there is no work."""
        times = [session.due for session in self.sessions if session.is_open]
        if not self.is_blind:
            times.append(self.blind_at)
        away = (session for session in self.sessions if not (session.is_open or session.is_connecting))
        times += [session.retry_at for session in away if session.has_failed]
        return min(times, default=math.inf)


class Kind(NamedTuple):
    """A kind of accounting message of a domain. begin: the first two frames of such a message."""

    status: Status
    begin: bytes


class Gate:
    """A domain: the messages that have to be sent, and the identifiers that have to wait."""

    __slots__ = ("accepted", "delayed", "flow", "master", "name", "queue", "rejected", "times", "topic")

    def __init__(self, name: bytes, master: Master, times: dict[bytes, int]) -> None:
        self.name = name
        self.master = master
        self.times = times
        self.topic = wire.topic(name)
        self.accepted, self.delayed, self.rejected = (
            Kind(status, wire.frame(self.topic, wire.MORE) + wire.frame(status.value.encode(), wire.MORE))
            for status in (Status.ACCEPTED, Status.DELAYED, Status.REJECTED)
        )
        self.queue: deque[tuple[int, bytes]] = deque()
        self.flow = HELD


class Core:
    """The state of a gatekeeper.

    is_awake: whether a turn is due soon, which looks for bytes to send; otherwise wake() has to cause one.
    """

    def __init__(self, masters: Masters, domain: str | bytes, tls: bool | ssl.SSLContext, options: Options) -> None:
        self.masters: list[Master] = []
        self.is_awake = False
        self.wake: Callable[[], object] = _nothing
        self.delays = DelayCache(options.max_remembered)
        self._options = options
        self._max_delay_ns = options.max_delay_s * 1e9
        self._share = options.share
        self._default = as_bytes(domain)
        self._gates: dict[str | bytes | None, Gate] = {}  # by every form of their names
        self._pairs: dict[Pair, Master] = {}
        self._waiting = DelayedRequests()
        self._received_ms, self._received = -1, b""  # the time of the last message, and the frame that has it
        self._passed = self._delayed = self._rejected = 0
        self._heard = self._unknown = self._sent = self._dropped = self._unwanted = self._lost = 0
        self._everywhere, self._somewhere = read_masters(masters, tls)
        for name in self._somewhere or (self._default,):
            self._gate(name)

    @property
    def where(self) -> str:
        return ", ".join(str(master.accounting.address) for master in self.masters)

    @property
    def is_ready(self) -> bool:
        return all(master.is_ready for master in self.masters)

    # ---- deciding ----

    def decide(
        self, identifier: str | bytes, domain: str | bytes | None, log_info: str | bytes, now_ns: int, wall_ns: int
    ) -> Decision:
        """Decides about a request that arrives now.

        The code is short for requests that pass, because most requests pass.
        """
        gate = self._gates.get(domain) or self._gate(domain)
        name = identifier if type(identifier) is bytes else as_bytes(identifier)
        until_ns = gate.times.get(name, 0)
        if until_ns > now_ns:
            return self._limit(gate, name, log_info, until_ns, now_ns, wall_ns=wall_ns)
        self._put(gate, gate.accepted, name, log_info, now_ns, wall_ns=wall_ns)
        self._passed += 1
        return PASSED

    def gave_up(self, decision: Decision) -> None:
        """Called when the request no longer waits."""
        self._waiting.remove(decision.number)

    def rejection(self, identifier: str | bytes, domain: str | bytes | None, decision: Decision) -> Rejected:
        """Returns the error for a request that was rejected."""
        name = self._default if domain is None else as_bytes(domain)
        return Rejected(as_bytes(identifier), name, decision.delay_s)

    def _limit(
        self, gate: Gate, identifier: bytes, log_info: str | bytes, until_ns: int, now_ns: int, *, wall_ns: int
    ) -> Decision:
        delay_ns = until_ns - now_ns
        until_ms = (wall_ns + delay_ns + HALF_MS) // MS
        if delay_ns > self._max_delay_ns or self._waiting.count(now_ns) >= self._options.max_delayed:
            if self._share == 1 or random.random() < self._share:
                self._put(gate, gate.rejected, identifier, log_info, now_ns, wall_ns=wall_ns)
            self._rejected += 1
            return Decision(REJECT, delay_ns / 1e9, until_ms)
        self._put(gate, gate.delayed, identifier, log_info, now_ns, wall_ns=wall_ns, until_ms=until_ms)
        self._delayed += 1
        return Decision(DELAY, delay_ns / 1e9, until_ms, self._waiting.add(until_ns))

    def _put(
        self,
        gate: Gate,
        kind: Kind,
        identifier: bytes,
        log_info: str | bytes,
        now_ns: int,
        *,
        wall_ns: int,
        until_ms: int = 0,
    ) -> None:
        """Adds an accounting message.

        Short frames are joined in this method, which is five times as fast as wire.accounting().
        """
        master = gate.master
        now_ms = wall_ns // MS
        if log_info or len(identifier) >= len(_SHORTS):
            message = wire.accounting(
                gate.name, kind.status, identifier, now_ms, until_ms or None, log_info=as_bytes(log_info)[:LOG_INFO_MAX]
            )
        else:
            if now_ms != self._received_ms:
                self._received_ms, self._received = now_ms, _number(now_ms)
            until = _number(until_ms) if until_ms else _SHORTS[0]
            message = b"".join((kind.begin, _SHORTS[len(identifier)], identifier, self._received, until, _LAST))
        if gate.flow is UNWANTED:
            self._unwanted += 1
            return
        queue = gate.queue
        if not queue:
            master.filled.append(gate)
        elif queue[0][0] < now_ns - HELD_NS:
            self._drop_old(queue, now_ns)
        elif len(queue) >= self._options.max_held:
            queue.popleft()
            self._dropped += 1
        queue.append((now_ns, message))
        if gate.flow is OPEN and not self.is_awake:
            self._has_work()

    def _has_work(self) -> None:
        if not self.is_awake:
            self.is_awake = True
            self.wake()

    # ---- domains ----

    def _gate(self, domain: str | bytes | None) -> Gate:
        """Returns the gate of a domain.

        Makes the gate if it does not exist yet. Raises ValueError if the domain has no master.
        """
        name = self._default if domain is None else as_bytes(domain)
        gate = self._gates.get(name)
        if gate is None:
            pair = self._everywhere or self._somewhere.get(name)
            if pair is None:
                raise ValueError(f"no master is configured for the domain {name!r}")
            gate = self._new_gate(name, pair)
        self._gates[name] = self._gates[domain] = gate
        return gate

    def _new_gate(self, name: bytes, pair: Pair) -> Gate:
        topic = wire.topic(name)  # ValueError if it cannot be a domain
        master = self._pairs.get(pair)
        if master is None:
            master = self._pairs[pair] = Master(pair, self._options)
            self.masters.append(master)
        if len(master.gates) >= DOMAINS_MAX:
            raise ValueError(f"the master at {pair.accounting} has {DOMAINS_MAX} domains already")
        gate = Gate(name, master, self.delays.new_domain())
        master.gates.append(gate)
        master.control.subscribe(topic)
        self._redirect(master)
        if master.control.is_ready:
            self._has_work()
        return gate

    def _direct(self, master: Master) -> None:
        """Sets, for each gate, what happens to its messages, according to the subscriptions of both sides."""
        prefixes = master.accounting.prefixes
        sizes = set(map(len, prefixes))
        master.directed = master.footing
        joined = master.joined
        for number, gate in enumerate(master.gates, 1):
            is_wanted = any(gate.topic[:size] in prefixes for size in sizes)
            if is_wanted and number <= joined:
                gate.flow = OPEN
                if gate.queue:
                    self._has_work()
            elif is_wanted or not master.accounting.is_ready:
                gate.flow = HELD
            elif gate.flow is OPEN:
                gate.flow = UNWANTED
                self._unwanted += len(gate.queue)
                gate.queue.clear()

    def _redirect(self, master: Master) -> None:
        """Calls _direct() if it is necessary."""
        if master.directed != master.footing:
            self._direct(master)

    # ---- what the owner of the sockets calls ----

    def feed(self, master: Master, session: ZmtpSession, data: bytes, now_ns: int, wall_ns: int) -> News:
        """Takes bytes that have arrived. After a ProtocolError the caller has to close the connection."""
        now = now_ns / 1e9
        was_ready = session.is_ready
        messages = session.feed(data, now)
        if session.is_ready and not was_ready:
            for each in master.sessions:
                each.hurry(now)
        for parts in messages:
            control = wire.control(parts)
            gate = self._gates.get(control.domain) if control else None
            if control is None or gate is None or gate.master is not master:
                self._unknown += 1
                continue
            self._heard += 1
            if control.word == Word.FORGET.value:
                self.delays.forget(gate.times, control.identifier)
            else:
                until_ns = now_ns + control.time_ms * MS - wall_ns
                self.delays.remember(gate.times, control.identifier, until_ns, now_ns)
        return self._changed(master, now)

    def look(self, master: Master, session: ZmtpSession, now: float) -> News:
        """Does what is due on an open connection. After a Timeout the caller has to close the connection."""
        session.look(now)
        return self._changed(master, now)

    def _changed(self, master: Master, now: float) -> News:
        """Called when the connections may have changed. Notes that the master can be reached again, if that is so."""
        master.is_blind = now >= master.blind_at
        self._redirect(master)
        if not master.away or not master.is_ready:
            return None
        master.away = ""
        away_s = now - master.away_since
        return logging.INFO, "the master at %s is back after %.1f s", master.accounting.address, away_s

    def take(self, master: Master, session: ZmtpSession, now_ns: int) -> bytes:
        """Returns the bytes to send now."""
        found = bytes(session.out)
        session.out.clear()
        return found + self._collect(master, now_ns) if session is master.accounting and session.is_ready else found

    def _collect(self, master: Master, now_ns: int) -> bytes:
        pieces: list[bytes] = []
        filled, master.filled = master.filled, []
        for gate in filled:
            queue = gate.queue
            if gate.flow is OPEN:
                self._drop_old(queue, now_ns)
                count = min(len(queue), BATCH - len(pieces))
                pieces += [queue.popleft()[1] for _ in range(count)]
            if queue:
                master.filled.append(gate)
        self._sent += len(pieces)
        return b"".join(pieces)

    def _drop_old(self, queue: deque[tuple[int, bytes]], now_ns: int) -> None:
        oldest = now_ns - HELD_NS
        while queue and queue[0][0] < oldest:
            queue.popleft()
            self._dropped += 1

    def lost(self, master: Master, session: ZmtpSession, why: str, now: float) -> News:
        """Called when a connection has ended, or could not be made."""
        self._lost += 1
        session.closed(now)
        self._changed(master, now)
        if master.away:
            return None
        master.away, master.away_since = why, now
        return logging.WARNING, "cannot reach the master at %s; requests pass: %s", master.accounting.address, why

    def leave(self) -> None:
        """Called when the gatekeeper closes: what is kept can be sent without waiting for control messages."""
        for master in self.masters:
            master.is_leaving = True
            self._redirect(master)

    def has_unsent(self) -> bool:
        """Returns whether a master that can be reached has yet to be sent something."""
        reached = (master for master in self.masters if master.accounting.is_ready or not master.away)
        return any(gate.queue for master in reached for gate in master.gates)

    def reset(self) -> None:
        """Forgets connections and unsent messages, which belong to the parent process or to a closed event loop."""
        self.is_awake = False
        self._waiting = DelayedRequests()
        self.delays.rebuild()
        for master in self.masters:
            master.filled.clear()
            master.away = ""
            for session in master.sessions:
                session.reset()
            for gate in master.gates:
                gate.queue.clear()
                gate.flow = HELD

    def stats(self, now_ns: int) -> Stats:
        self.delays.expire(now_ns)
        return Stats(
            passed=self._passed,
            delayed=self._delayed,
            rejected=self._rejected,
            delaying=self._waiting.count(now_ns),
            remembered=self.delays.count,
            evicted=self.delays.evicted,
            told=self._heard,
            unknown=self._unknown,
            sent=self._sent,
            held=sum(len(gate.queue) for master in self.masters for gate in master.gates),
            dropped=self._dropped,
            unwanted=self._unwanted,
            lost=self._lost,
            away={str(master.accounting.address): master.away for master in self.masters if master.away},
        )


def report(news: News) -> None:
    if news is not None:
        log.log(*news)


def closed() -> ConnectionLost:
    return ConnectionLost("the gatekeeper is closed")


def _number(number: int) -> bytes:
    """Returns the bytes of a frame that is not the last one."""
    digits = b"%d" % number
    return _SHORTS[len(digits)] + digits


def _nothing() -> None:
    """Does nothing, because nobody sends yet."""
