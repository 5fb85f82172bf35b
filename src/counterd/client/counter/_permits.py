"""The calls of one connection of the counter protocol. No I/O, no clock.

Floor: side (ARCHITECTURE.md); shared by the blocking client and the client for asyncio.
"""

from __future__ import annotations

import struct
from collections import Counter
from typing import TYPE_CHECKING, Any

from counterd.client._calls import Call, Pending, Request
from counterd.errors import NotAvailable, ProtocolError, ServerError
from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import HEADER_SIZE, OnDeath, Opcode, Permit, Rate, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from counterd.errors import CounterdError
    from counterd.protocols.counter.wire import Grant, Shortage

# An enumeration's members are looked up slowly before Python 3.12.
_GET, _ACQUIRE, _RELEASE, _DUMP = map(int, (Opcode.GET, Opcode.ACQUIRE, Opcode.RELEASE, Opcode.DUMP))
_TAKE = int(Opcode.TAKE)
_NOT_FOUND, _NOT_AVAILABLE, _UNKNOWN = map(
    int, (Status.NOT_FOUND, Status.RESOURCE_NOT_AVAILABLE, Status.UNKNOWN_COMMAND)
)
_NUMBERS = struct.Struct(">II")  # of an acquire: resources and maximum
# Where the name begins in a frame.
_GET_NAME, _ACQUIRE_NAME, _RELEASE_NAME = HEADER_SIZE + 2, HEADER_SIZE + 10, HEADER_SIZE + 6


class Batch:
    """The permits, by name, that requests of a pipeline were granted, and that they release themselves."""

    def __init__(self) -> None:
        self.granted: Counter[bytes] = Counter()  # and not released by a later request of the batch
        self.releasing: Counter[bytes] = Counter()  # by releases that are not answered yet

    def take(self) -> Iterator[tuple[bytes, int]]:
        """Removes the permits that no request of the batch will release, and yields them."""
        for name, permits in self.granted.items():
            left = permits - self.releasing[name]
            if left > 0:
                self.granted[name] -= left
                yield name, left

    def answered(self, frame: bytes, permits: int, success: bool) -> None:
        if frame[1] == _ACQUIRE:
            self.granted[frame[_ACQUIRE_NAME:]] += permits
        elif frame[1] == _RELEASE:
            name, released = frame[_RELEASE_NAME:], _released(frame)
            self.releasing[name] -= released
            if success:
                self.granted[name] = max(self.granted[name] - released, 0)


class PermitCalls(Pending):
    """The calls of one connection of the counter protocol. held: how many permits are held."""

    MASK = wire.U32_MAX
    has_takes = True  # the server has not refused a Take as unknown

    def __init__(self) -> None:
        super().__init__()
        self._parser = wire.ResponseParser()
        # With a client that resumes: how much is held of each name, and the names that the end has left in doubt.
        self.names: Counter[bytes] | None = None
        self.doubtful: list[bytes] = []

    @property
    def doubt(self) -> str:
        return "" if self.answered else ": does this address serve the counter protocol?"

    def add(self, call: Call, encode: Callable[..., bytes], *arguments: Any) -> bytes:
        frame = super().add(call, encode, *arguments)
        if frame[1] == _TAKE:
            call.items = arguments[0]
        elif frame[1] == _RELEASE:
            self.held -= _released(frame)
            if call.batch is not None:
                call.batch.releasing[frame[_RELEASE_NAME:]] += _released(frame)
        return frame

    def add_all(self, calls: Sequence[Call], requests: Sequence[Request]) -> bytes:
        if len(calls) > 1:
            batch = Batch()
            for call in calls:
                call.batch = batch
        return super().add_all(calls, requests)

    def feed(self, data: bytes) -> None:
        pending = self.pending
        responses = self._parser.feed(data)
        for opcode, status, opaque, body in responses:
            call = pending.get(opaque)
            # yrmcdsd does not copy an opcode that it does not know.
            if call is None or (call.frame[1] != opcode and status != _UNKNOWN):
                raise ProtocolError(f"no request has the opcode {opcode:02x} and the opaque {opaque:08x}")
            if status:
                pending.pop(opaque, None)  # it may be gone: a signal handler may have closed the connection
                self.held += _released(call.frame)
                if status == _UNKNOWN and call.frame[1] == _TAKE:
                    self.has_takes = False
                wanted = call.settle(None, _refusal(call, status, body))
            elif opcode == _DUMP:
                self._dumped(call, opaque, body)
                continue
            else:
                if opcode == _ACQUIRE and body > call.frame[HEADER_SIZE : HEADER_SIZE + 4]:
                    raise ProtocolError(f"more was granted than was asked for: {body[:16].hex(' ')}")
                result = _DECODERS[opcode](body)
                pending.pop(opaque, None)
                if opcode == _ACQUIRE:
                    self.held += result
                    call.permits = result
                elif opcode == _TAKE:
                    self.held += sum(item.amount for item in call.items if isinstance(item, Permit))
                    call.grant = result
                if self.names is not None:
                    self._book(self.names, call)
                wanted = call.settle(result, None)
            if call.batch is not None:
                call.batch.answered(call.frame, call.permits, not status)
            if not wanted:
                self.forget(call)
        self.answered = self.answered or bool(responses)

    def forget(self, call: Call) -> None:
        """Gives back what this call, and all requests that were sent with it, were granted."""
        if call.batch is not None:
            self.give_back += [self.release(name, permits) for name, permits in call.batch.take()]
        elif call.permits:
            self.give_back.append(self.release(call.frame[_ACQUIRE_NAME:], call.permits))
            call.permits = 0
        elif call.grant is not None:
            self.give_back += returns(call.grant, call.items)
            call.grant = None

    def fail(self, error: Callable[[], CounterdError]) -> None:
        if self.names is not None:
            for call in self.pending.values():
                if call.frame[1] in (_ACQUIRE, _RELEASE):
                    self.doubtful.append(call.frame[_ACQUIRE_NAME if call.frame[1] == _ACQUIRE else _RELEASE_NAME :])
                elif call.frame[1] == _TAKE:
                    self.doubtful += [item.name for item in call.items if isinstance(item, Permit)]
                if call.frame[1] == _RELEASE:
                    self._book(self.names, call)
        super().fail(error)

    def asks_held(self) -> list[Request]:
        """Returns the requests that ask the server how many permits of the uncertain names this client holds."""
        return [(wire.held, name) for name in self.doubtful]

    def inherit(self, ended: PermitCalls, doubtful: dict[bytes, int]) -> None:
        """Takes over what was held through a connection that was lost.

        Nobody knows whether the requests without a reply on that connection were executed. Among them, acquires and
        Takes count as refused, and releases count as executed. doubtful: how many permits of each uncertain name are
        held, according to the server. Surplus permits are given back.
        """
        assert ended.names is not None
        self.names = ended.names
        self.held += ended.held
        self.give_back, ended.give_back = [*self.give_back, *ended.give_back], []
        for name, held in doubtful.items():
            surplus = held - self.names[name]
            if surplus > 0:
                self.names[name] += surplus
                self.held += surplus
                self.give_back.append(self.release(name, surplus))

    def _book(self, names: Counter[bytes], call: Call) -> None:
        """Updates the numbers of held permits after a request has succeeded."""
        frame = call.frame
        if frame[1] == _ACQUIRE:
            names[frame[_ACQUIRE_NAME:]] += call.permits
        elif frame[1] == _RELEASE:
            names[frame[_RELEASE_NAME:]] -= _released(frame)
        elif frame[1] == _TAKE:
            for item in call.items:
                if isinstance(item, Permit):
                    names[item.name] += item.amount

    def release(self, name: bytes, permits: int) -> Request:
        return wire.release, name, permits

    def may_grant(self, call: Call) -> bool:
        return call.frame[1] in (_ACQUIRE, _TAKE)

    def refunds(self, grant: Any, request: Request) -> list[Request]:
        return [each for each in returns(grant, request[1]) if each[0] is wire.settle]

    def cancel(self, call: Call) -> Request | None:
        opaque = int.from_bytes(call.frame[8:12], "big")
        return (wire.cancel, opaque) if call.frame[1] == _TAKE and self.pending.get(opaque) is call else None

    def _take_back(self, call: Call) -> None:
        self.pending.pop(int.from_bytes(call.frame[8:12], "big"), None)
        self.held += _released(call.frame)
        call.frame = b""

    def _dumped(self, call: Call, opaque: int, body: bytes) -> None:
        if call.entries is None:
            call.entries = []
        if body:
            call.entries.append(wire.decode_dump_entry(body))
        else:
            self.pending.pop(opaque, None)
            call.settle(call.entries, None)


def check_takes(calls: Any) -> None:
    """Raises UnknownCommand if the server of this connection is known to have no Takes."""
    if not calls.has_takes:
        raise wire.server_error(_UNKNOWN, wire.ERROR_TEXTS[Status.UNKNOWN_COMMAND])


def _released(frame: bytes) -> int:
    """Returns how many permits a request gives back. Returns 0 if the request is not a release."""
    return int.from_bytes(frame[HEADER_SIZE : HEADER_SIZE + 4], "big") if frame[1] == _RELEASE else 0


def returns(grant: Grant, items: Sequence[Permit | Rate]) -> list[Request]:
    """Returns the requests that give back everything that a Take was granted."""
    requests: list[Request] = []
    for item in items:
        if isinstance(item, Permit):
            requests.append((wire.release, item.name, item.amount))
        elif item.on_death != OnDeath.FINAL:
            requests.append((wire.settle, grant.number, item.name, 0))
    return requests


def _refusal(call: Call, status: int, body: bytes) -> ServerError:
    frame = call.frame
    if frame[1] == _TAKE and status == _NOT_AVAILABLE:
        return _shortage(call.items, wire.decode_shortage(body))
    error = wire.server_error(status, body.decode("utf-8", "backslashreplace"))
    if frame[1] == _ACQUIRE:
        error.resources, error.maximum = _NUMBERS.unpack_from(frame, HEADER_SIZE)
        error.name = frame[_ACQUIRE_NAME:]
        if isinstance(error, NotAvailable) and (limit := wire.limit_of(error.text)) is not None:
            error.limit = error.maximum = limit
    elif frame[1] == _RELEASE:
        error.resources, error.name = _released(frame), frame[_RELEASE_NAME:]
    elif frame[1] == _GET:
        error.name = frame[_GET_NAME:]
    elif frame[1] == _TAKE:
        # If one is not found, it is a rate whose numbers were left to the server.
        asked = [each for each in call.items if status != _NOT_FOUND or (isinstance(each, Rate) and not each.limit)]
        if len(asked) == 1:
            _name_item(error, asked[0])
    return error


def _name_item(error: ServerError, item: Permit | Rate) -> None:
    error.name, error.resources = item.name, item.amount
    error.maximum = item.maximum if isinstance(item, Permit) else item.burst or None


def _numbers(rate: Rate, most: int) -> str:
    """Returns the numbers of a rate for people. most: how many units can be taken at once."""
    if not rate.limit:
        return f"at most {most} at once"
    burst = "" if most == rate.limit else f", at most {most} at once"
    return f"limit {rate.limit} per {rate.period_us / 1_000_000:g} s{burst}"


def _shortage(items: Sequence[Permit | Rate], short: Shortage) -> ServerError:
    """Returns the error for a Take that was refused."""
    error = NotAvailable(_NOT_AVAILABLE, short.text)
    if short.item >= len(items):
        raise ProtocolError(f"too little of item {short.item} of {len(items)} is available")
    item = items[short.item]
    _name_item(error, item)
    if isinstance(item, Rate):
        error._rate = _numbers(item, short.most)
    error.retry_after = None if short.retry_ms is None else short.retry_ms / 1000
    error.maximum = short.most
    if error.draining:  # not because of what is in use
        return error
    error.consumption = max(short.most - short.left, 0)
    if item.amount > short.most:
        error.limit = short.most
    return error


def _decode_nothing(body: bytes) -> None:
    if body:
        raise ProtocolError(f"expected a reply without a body, not {body[:16].hex(' ')}")


_DECODERS: dict[int, Callable[[bytes], Any]] = {
    Opcode.NOOP: _decode_nothing,
    Opcode.GET: wire.decode_consumption,
    Opcode.ACQUIRE: wire.decode_consumption,
    Opcode.RELEASE: _decode_nothing,
    Opcode.STATS: wire.decode_stats,
    Opcode.TAKE: wire.decode_grant,
    Opcode.CANCEL: _decode_nothing,
    Opcode.SETTLE: _decode_nothing,
    Opcode.RESUME: wire.decode_resumption,
    Opcode.GOODBYE: _decode_nothing,
    Opcode.WHO: _decode_nothing,
    Opcode.HELD: wire.decode_consumption,
}
