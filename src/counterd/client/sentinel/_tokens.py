"""Tokens and leases of the sentinel protocol, and the calls of a connection.

Floor: side (ARCHITECTURE.md). No I/O and no clock: callers pass the time.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from counterd.client._calls import Call, Pending
from counterd.client._holding import RAISE, Wanted
from counterd.errors import ConnectionLost, ProtocolError, Timeout
from counterd.protocols.sentinel import wire
from counterd.protocols.sentinel.errors import TokenLost, TokenRefused, token_error
from counterd.protocols.sentinel.wire import MessageType, Status

if TYPE_CHECKING:
    from collections.abc import Iterable

    from counterd.client._calls import Request
    from counterd.protocols.sentinel.errors import Blocked
    from counterd.protocols.sentinel.wire import Response, Value

FLOW_MAX = (1 << 63) - 1
COUNT_MAX = (1 << 31) - 1
# The errors if a server does not answer or cannot be reached.
FAILURES = (ConnectionLost, Timeout, ProtocolError)
# A new hold asks after this time at the latest what remains of its lease, even if its flow had longer leases before,
# because the rule may have changed. Most holds have ended by then, and cost no request.
FIRST_KEEP_S = 0.25
LEAST_S = 0.01  # between two KEEPs of a token
AGAIN_S = 0.1  # after a KEEP that was not answered, if the length of the lease is not known
SHARES = 3  # a KEEP is sent after 1/SHARES of the remaining lease, so two KEEPs may fail

RELEASED = frozenset((Status.RELEASE_OK, Status.ALREADY_RELEASED, Status.NO_RULE))  # a token is not held after these
UNKNOWN = "the server no longer knows the token"

# An enumeration's members are looked up slowly before Python 3.12.
_ACQUIRE, _OK = int(MessageType.ACQUIRE), int(Status.OK)
_TYPE, _FLOW, _FLOW_END = 6, 7, 15  # offsets in the frame of a request


class Answer(NamedTuple):
    """The result of flow() or param().

    status: 0 means pass, 1 means blocked, 2 means pass after wait_ms milliseconds, which the caller has to wait.
    remaining: how many more calls could pass now; -1 if that is not known.
    fallback: whether the client's fallback decided, and not the server.
    """

    status: int
    remaining: int = -1
    wait_ms: int = 0
    fallback: bool = False

    @property
    def passed(self) -> bool:
        """Whether the calls may pass. If they have to wait, they may pass after wait_ms milliseconds."""
        return self.status != Status.BLOCKED


class Token:
    """A token for calls of a flow that run now. acquire() returns it.

    id: the server's number of the token, never 0. flow_id, count: the arguments of acquire().
    fallback: whether the token is the client's own, which the server does not know.
    """

    __slots__ = ("__weakref__", "count", "fallback", "flow_id", "id")

    def __init__(self, id: int, flow_id: int, count: int, fallback: bool = False) -> None:
        self.id = id
        self.flow_id = flow_id
        self.count = count
        self.fallback = fallback

    def __repr__(self) -> str:
        return f"<Token {self.id} for {self}{', fallback' if self.fallback else ''}>"

    def __str__(self) -> str:
        return f"{self.count} of flow {self.flow_id}"


def flow_key(flow_id: int) -> bytes:
    """Returns the name of the wait queue of a flow."""
    return flow_id.to_bytes(8, "big")


def check(flow_id: int, count: int) -> None:
    """Raises ValueError or TypeError for numbers that no server would accept."""
    for what, number, largest in (("flow_id", flow_id, FLOW_MAX), ("count", count, COUNT_MAX)):
        if not isinstance(number, int):
            raise TypeError(f"{what} must be a whole number, not {number!r}")
        if not 1 <= number <= largest:
            raise ValueError(f"{what} must be 1 to {largest}, not {number}")


def values_of(values: Iterable[Value]) -> list[Value]:
    """Returns the values as a list of at least one value. Refuses text, because text would become a list of letters."""
    if isinstance(values, (str, bytes)):
        raise TypeError(f"values must be a list of values, not {values!r}")
    if not (found := list(values)):
        raise ValueError("values must contain at least one value")
    return found


def read_namespace(text: str | bytes) -> bytes:
    """Returns the namespace as bytes for the server. Raises ValueError if no server would register the namespace."""
    namespace = text.encode() if isinstance(text, str) else text
    if not namespace.strip():
        raise ValueError(f"namespace must not be blank: {text!r}")
    wire.ping(0, namespace)
    return namespace


def refused(status: int, flow_id: int, count: int) -> TokenRefused:
    """Returns the error for a request about a flow."""
    error = token_error(status)
    error.name, error.resources = b"flow %d" % flow_id, count
    return error


def blocked(flow_id: int, count: int, *, maximum: int | None = None, waited: float | None = None) -> Blocked:
    error = cast("Blocked", refused(Status.BLOCKED, flow_id, count))
    error.maximum, error.waited = maximum, waited
    return error


def not_kept(status: int, token: Token) -> TokenRefused | TokenLost:
    """Returns the error for a KEEP or a RELEASE request."""
    if status == Status.ALREADY_RELEASED:
        return lost(token, UNKNOWN)
    error = token_error(status)
    error.name = b"token %d of flow %d" % (token.id, token.flow_id)
    return error


def lost(token: Token, why: str) -> TokenLost:
    return TokenLost(f"lost {token}: {why}")


class AskedToken(Wanted):
    """The token that a hold asks for."""

    def __init__(self, flow_id: int, count: int, prioritized: bool, timeout: float | None, on_lost: Any) -> None:
        if on_lost != RAISE and not callable(on_lost):
            raise ValueError(f'on_lost must be "raise" or callable, not {on_lost!r}')
        check(flow_id, count)
        super().__init__(flow_key(flow_id), timeout, on_lost)
        self.flow_id = flow_id
        self.count = count
        self.request = (wire.acquire, flow_id, count, prioritized)

    def __str__(self) -> str:
        return f"{self.count} of flow {self.flow_id}"

    def blocked(self, waited: float | None) -> Blocked:
        """Returns the error for a caller that is refused, or whose timeout is over."""
        return blocked(self.flow_id, self.count, waited=waited)

    def token(self, response: Response) -> Token:
        """Returns the token that was granted."""
        return Token(response.token_id, self.flow_id, self.count)


class Lease:
    """The lease of a token that a hold keeps alive: when it has to be renewed, and until when the token is certainly
    held."""

    def __init__(self, token: Token, now: float, usual: float | None) -> None:
        """usual: the last known lease of the flow in seconds. If it is None, the lease is renewed immediately."""
        self.token = token
        self.due = now if usual is None else now + min(usual / SHARES, FIRST_KEEP_S)
        self.ends = math.inf
        self.lost = ""  # why
        self.counted = False  # as lost, in the statistics

    def answered(self, asked: float, now: float, response: Response | None) -> None:
        """Takes the response to a KEEP that was sent at the time `asked`, or None if there was no response."""
        if response is not None and response.status == Status.OK:
            remaining = response.left_ms / 1000
            self.ends = asked + remaining
            self.due = now + max(remaining / SHARES, LEAST_S)
        elif response is not None and response.status == Status.ALREADY_RELEASED:
            self.lost = UNKNOWN
        else:
            self.due = now + (AGAIN_S if self.ends == math.inf else max((self.ends - now) / SHARES, LEAST_S))

    def look(self, now: float) -> bool:
        """Returns whether the token is lost. A token is lost at the end of a lease that was not renewed."""
        if now >= self.ends and not self.lost:
            self.lost = "its lease is over"
        return bool(self.lost)

    @property
    def next(self) -> float:
        """When the lease has to be renewed, or ends."""
        return min(self.due, self.ends)


class Leases:
    """The leases that a client keeps alive. Threads may share a Leases."""

    def __init__(self) -> None:
        self.holds: dict[Lease, Any] = {}
        self.usual: dict[int, float] = {}  # by flow: seconds of its last known lease

    def begin(self, token: Token, hold: Any, now: float) -> Lease:
        lease = Lease(token, now, self.usual.get(token.flow_id))
        self.holds[lease] = hold
        return lease

    def due(self, now: float) -> list[Lease]:
        """Returns the leases that have to be renewed now."""
        return [lease for lease in list(self.holds) if lease.due <= now]

    def due_at(self, retry_at: float | None) -> float:
        """Returns when the next lease has to be renewed, or ends. Returns infinity if there is no lease.

        retry_at: when a client without a connection may connect; None if the client has a connection.
        """
        leases = list(self.holds)
        if not leases:
            return math.inf
        if retry_at is None:
            return min(lease.next for lease in leases)
        return min(retry_at, *(lease.ends for lease in leases))

    def answered(self, due: list[Lease], asked: float, now: float, responses: list[Response | None]) -> None:
        """Takes the responses to KEEPs that were sent at the time `asked`."""
        for lease, response in zip(due, responses, strict=True):
            lease.answered(asked, now, response)
            if response is not None and lease.ends < math.inf:
                self.usual[lease.token.flow_id] = lease.ends - now

    def hurry(self) -> set[Token]:
        """Makes all leases due now, because there is a new connection. Returns the tokens of these leases."""
        leases = list(self.holds)
        for lease in leases:
            lease.due = 0.0
        return {lease.token for lease in leases}

    def take_lost(self, now: float) -> list[tuple[Lease, Any]]:
        """Removes the lost leases, and returns them with their holds, except holds that have ended meanwhile."""
        lost = [lease for lease in list(self.holds) if lease.look(now)]
        taken = [(lease, self.holds.pop(lease, None)) for lease in lost]
        return [(lease, hold) for lease, hold in taken if hold is not None]

    def forget(self, why: str) -> None:
        """Marks all leases as lost for this reason, and removes them."""
        for lease in list(self.holds):
            lease.lost = lease.lost or why
        self.holds.clear()


def release(token: Token) -> Request:
    """Returns the request that gives a token back. The request has the flow's key, which is the name of a queue."""
    return _release, flow_key(token.flow_id), token.id


def _release(xid: int, _: bytes, token_id: int) -> bytes:
    return wire.release(xid, token_id)


class Tally:
    """late: how many tokens were granted after their caller had stopped waiting.

    lost: how many tokens of holds were lost.
    """

    late = 0
    lost = 0


class TokenCalls(Pending):
    """The calls of one connection of the sentinel protocol. held: always 0, because tokens outlive their connection."""

    MASK = (1 << 31) - 1

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally
        self._parser = wire.ResponseParser()

    def feed(self, data: bytes) -> None:
        responses = self._parser.feed(data)
        for response in responses:
            call = self.pending.get(response.xid)
            if call is None or call.frame[_TYPE] != response.type:
                raise ProtocolError(f"no request has the type {response.type} and the xid {response.xid}")
            self.pending.pop(response.xid, None)  # it may be gone: a signal handler may have closed the connection
            if response.type == _ACQUIRE and response.status == _OK:
                call.permits = response.token_id
            if not call.settle(response, None):
                self.forget(call)
        self.answered = self.answered or bool(responses)

    def forget(self, call: Call) -> None:
        if call.permits:
            self._tally.late += 1
            self.give_back.append((_release, call.frame[_FLOW:_FLOW_END], call.permits))
            call.permits = 0

    def may_grant(self, call: Call) -> bool:
        return call.frame[_TYPE] == _ACQUIRE

    def _take_back(self, call: Call) -> None:
        self.pending.pop(int.from_bytes(call.frame[2:6], "big"), None)
        call.frame = b""
