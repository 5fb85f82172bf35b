"""A gatekeeper's session with one port of a master, without I/O: ZMTP's handshake, subscriptions and heartbeats. A
session has no clock.

Floor: side (ARCHITECTURE.md). A session has one connection after another: opened() begins a connection and closed()
ends it. The owner of the socket takes the bytes to send from `out`. Section names are those in
docs/protocols/smockron.md.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from counterd.client._backoff import CONNECT_FIRST_S, CONNECT_LONGEST_S, Backoff
from counterd.errors import ProtocolError, Timeout
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import PEERS, Command, Parser, SocketType

if TYPE_CHECKING:
    from counterd.client._addresses import Address

PREFIXES_MAX = 1 << 16  # subscriptions that a master may make: more than it can have domains
PREFIX_MAX = 1024  # bytes of one subscription
OUT_MAX = 1 << 20  # bytes: if more are unsent when a PING comes, the peer does not read
# In heartbeats: after PATIENCE a master that does not answer is given up; after TTL the master may give up this end.
PATIENCE = 2
TTL = 3
# After so many seconds, a subscription counts as taken by a peer that may not answer PINGs.
JOIN_S = 0.5
HURRY_S = 1.0  # a connection that is lost all the time is not made again at once
CONTEXT_SIZE = 4  # bytes
BEGIN, END = b"\x01", b"\x00"  # the first byte of a message that subscribes or unsubscribes


class ZmtpSession:
    """kind: the socket type of this end.

    address: the peer's. prefixes: the peer's subscriptions, and how often it has subscribed to each. changes: how often
    it has subscribed or unsubscribed, on all connections.

    joined: how many of its own subscriptions, in their order, the peer has taken. A PING follows each subscription, and
    its context says how many were sent before. As the peer handles what it receives in order, it has taken these when
    it answers with the same context. Some peers answer without a context: the number of their PONGs says the same.

    away_since: when the last connection was lost, or the first attempt failed.
    """

    def __init__(self, kind: SocketType, address: Address, heartbeat: float, timeout: float) -> None:
        """heartbeat: the seconds between two PINGs. timeout: how many seconds the handshake may take."""
        self.kind = kind
        self.address = address
        self.out = bytearray()
        self.is_connecting = self.is_open = self.is_ready = False
        self.joined = self.changes = 0
        self.has_failed = False  # the last attempt failed, or the last connection was lost
        self.prefixes: Counter[bytes] = Counter()
        self.retry_at = self.ready_at = self.away_since = 0.0
        self.due = 0.0  # when look() has something to do
        self._heartbeat = heartbeat
        self._timeout = timeout
        self._topics: list[bytes] = []  # what a SUB subscribes to
        self._asked = 0  # how many subscriptions there were at the last PING with a context
        self._asks: deque[tuple[int, int, float]] = deque()  # unanswered: of how many, number of the PING, when
        self._backoff = Backoff(CONNECT_FIRST_S, CONNECT_LONGEST_S)
        self._parser = Parser()
        self._has_introduced = False  # READY was sent
        self._pinged_at = 0.0
        self._pings = self._pongs = 0  # of this connection
        self._unanswered_since: float | None = None  # when the first PING was sent after which nothing came
        self._answers = False  # the peer is known to answer PINGs

    def opened(self, now: float) -> None:
        """Called when there is a connection."""
        self.is_connecting, self.is_open = False, True
        self.out = bytearray(wire.greeting())
        self.due = now + self._timeout
        self._parser = Parser()
        self._has_introduced = self._answers = False
        self._pings = self._pongs = 0
        self._unanswered_since = None

    def closed(self, now: float) -> None:
        """Called when the connection has ended, or an attempt to make one has failed."""
        if self.is_ready and now - self.ready_at >= CONNECT_LONGEST_S:
            self._backoff.reset()
        if not self.has_failed:
            self.away_since = now
        self.reset()
        self.has_failed = True
        self.retry_at = now + self._backoff.delay()

    def hurry(self, now: float) -> None:
        """Called when another port of the peer can be reached: another attempt is due, if this port has been away for
        a while."""
        if self.has_failed and not self.is_open and now - self.away_since >= HURRY_S:
            self.retry_at = 0.0
            self._backoff.reset()

    def reset(self) -> None:
        """Forgets the connection, but does not count that as a failure."""
        self.is_connecting = self.is_open = self.is_ready = self.has_failed = False
        self.joined = self._asked = 0
        self._asks.clear()
        self.retry_at = 0.0
        self.out.clear()
        self.prefixes.clear()

    @property
    def is_settled(self) -> bool:
        """Whether the peer has taken all subscriptions."""
        return self.is_ready and self.joined == len(self._topics)

    def subscribe(self, topic: bytes) -> None:
        """Subscribes a SUB socket to a topic, on this connection and all later connections."""
        self._topics.append(topic)
        if self.is_ready:
            self._send_subscription(topic)

    def feed(self, data: bytes, now: float) -> list[tuple[bytes, ...]]:
        """Takes bytes that have arrived. Returns the messages in these bytes. Raises ProtocolError."""
        self._unanswered_since = None
        found = self._parser.feed(data)
        if self._parser.minor is not None and not self._has_introduced:
            self._has_introduced = True
            self.out += wire.ready(self.kind)
        messages = []
        for item in found:
            if not self.is_ready:
                self._take_ready(item, now)
            elif isinstance(item, Command):
                self._take_command(item)
            elif self.kind is SocketType.SUB:
                messages.append(item)
            elif len(item) == 1 and item[0][:1] in (BEGIN, END):  # subscriptions of ZMTP 3.0
                self._take_subscription(item[0][1:], item[0][:1] == BEGIN)
        return messages

    def look(self, now: float) -> None:
        """Sends a PING if it is time for one. If the peer may not answer PINGs, counts subscriptions as taken after
        JOIN_S.

        Raises Timeout if the peer has to be given up.
        """
        if not self.is_ready:
            if now >= self.due:
                raise Timeout(f"{self.address} did not finish ZMTP's handshake within {self._timeout:g} s")
            return
        silent_since = self._unanswered_since
        if silent_since is not None and self._answers and now - silent_since >= PATIENCE * self._heartbeat:
            raise Timeout(f"{self.address} did not answer a PING within {PATIENCE * self._heartbeat:g} s")
        if now - self._pinged_at >= self._heartbeat or self._asked < len(self._topics):
            self._ping(now)
        self.due = self._pinged_at + self._heartbeat
        if not self._answers:
            while self._asks and now >= self._asks[0][2] + JOIN_S:
                self.joined = self._asks.popleft()[0]
            if self._asks:
                self.due = min(self.due, self._asks[0][2] + JOIN_S)

    def _ping(self, now: float) -> None:
        context = b""
        self._pings += 1
        if self._asked < len(self._topics):
            self._asked = len(self._topics)
            self._asks.append((self._asked, self._pings, now))
            context = self._asked.to_bytes(CONTEXT_SIZE, "big")
        self.out += wire.ping(TTL * self._heartbeat, context)
        self._pinged_at = now
        if self._unanswered_since is None:
            self._unanswered_since = now

    def _take_ready(self, item: Command | tuple[bytes, ...], now: float) -> None:
        """Handles the peer's READY (section "Handshake").

        A peer with ZMTP 3.0 may not answer PINGs. Only the first answer shows that the peer answers PINGs.
        """
        if isinstance(item, Command) and item.name == b"ERROR":
            raise ProtocolError(f"{self.address} refused the handshake: {wire.error_reason(item.data)}")
        if not isinstance(item, Command) or item.name != b"READY":
            raise ProtocolError(f"{self.address} did not begin with READY")
        peer = wire.metadata(item.data).get("socket-type", b"")
        if peer not in PEERS[self.kind]:
            expected = " or ".join(kind.decode() for kind in PEERS[self.kind])
            raise ProtocolError(f"{self.address} is of type {peer.decode('latin-1')!r}, expected {expected}")
        self.is_ready = True
        self.has_failed = False
        self.ready_at = now
        self._answers = bool(self._parser.minor)
        for topic in self._topics:
            self._send_subscription(topic)
        self._ping(now)
        self.due = now + self._heartbeat

    def _take_command(self, command: Command) -> None:
        if command.name == b"PING":
            if len(self.out) > OUT_MAX:
                raise ProtocolError(f"{self.address} sends PINGs, but does not read the answers")
            self.out += wire.pong(command.data)
        elif command.name == b"PONG":
            self._answers = True
            self._take_pong(command.data)
        elif command.name == b"ERROR":
            raise ProtocolError(f"{self.address} ends the connection: {wire.error_reason(command.data)}")
        elif self.kind is SocketType.PUB and command.name in (b"SUBSCRIBE", b"CANCEL"):
            self._take_subscription(command.data, command.name == b"SUBSCRIBE")

    def _take_pong(self, context: bytes) -> None:
        """Handles a PONG: the subscriptions before its PING were taken."""
        self._pongs += 1
        count = int.from_bytes(context, "big")
        while self._asks and (self._asks[0][0] <= count or self._asks[0][1] <= self._pongs):
            self.joined = self._asks.popleft()[0]

    def _take_subscription(self, prefix: bytes, begins: bool) -> None:
        """Handles a subscription (section "Subscriptions"). Repeated subscriptions are counted."""
        self.changes += 1
        if begins:
            if len(prefix) > PREFIX_MAX or len(self.prefixes) >= PREFIXES_MAX:
                raise ProtocolError(
                    f"{self.address} subscribes to more than {PREFIXES_MAX} topics, or to a topic of {len(prefix)} "
                    "bytes"
                )
            self.prefixes[prefix] += 1
        elif self.prefixes[prefix] > 1:
            self.prefixes[prefix] -= 1
        else:
            del self.prefixes[prefix]

    def _send_subscription(self, topic: bytes) -> None:
        self.out += wire.subscribe(topic) if self._parser.minor else wire.message(BEGIN + topic)
