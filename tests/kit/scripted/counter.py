"""The counter protocol for scripted servers: a small, correct server, and one that has an answer for each request."""

from __future__ import annotations

import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import Opcode, Status
from kit import scripted

if TYPE_CHECKING:
    from kit.scripted import Peer

HEADER = struct.Struct(">BBBBII")
NUMBERS = {Opcode.ACQUIRE: 2, Opcode.RELEASE: 1}  # how many are before the name
# Called with the opcode, the opaque and the body of a request. Returns pieces to send; None closes the connection.
Answer = Callable[[int, int, bytes], Iterable[bytes] | None]


class Request(NamedTuple):
    """A request as received."""

    connection: int
    opcode: int
    opaque: int
    name: bytes
    resources: int
    maximum: int
    body: bytes
    seconds: float  # of the monotonic clock


def cut(connection: int, data: bytes) -> tuple[list[Request], bytes]:
    """Cuts requests out of a stream. Returns (the requests, the rest)."""
    found, at = [], 0
    while len(data) - at >= wire.HEADER_SIZE:
        magic, opcode, _, _, length, opaque = HEADER.unpack_from(data, at)
        assert magic == wire.REQUEST_MAGIC
        body = data[at + wire.HEADER_SIZE : at + wire.HEADER_SIZE + length]
        if len(body) < length:
            break
        at += wire.HEADER_SIZE + length
        numbers = NUMBERS.get(opcode, 0)
        resources, maximum = (*struct.unpack_from(f">{numbers}I", body), 0, 0)[:2]
        name = body[4 * numbers + 2 :]
        assert opcode >= Opcode.TAKE or not body or struct.unpack_from(">H", body, 4 * numbers) == (len(name),)
        found.append(Request(connection, opcode, opaque, name, resources, maximum, body, time.monotonic()))
    return found, data[at:]


def responded(opcode: int, opaque: int, body: bytes = b"", status: int = 0) -> bytes:
    """Makes a response."""
    return wire.frame(opcode, opaque, body, magic=wire.RESPONSE_MAGIC, flags=status)


def response(request: Request, body: bytes = b"") -> bytes:
    """Makes a successful response to a request."""
    return responded(request.opcode, request.opaque, body)


def refusal(request: Request, status: int) -> bytes:
    """Makes a response that refuses a request."""
    return responded(request.opcode, request.opaque, wire.ERROR_TEXTS[Status(status)].encode(), status)


class Counters:
    """What a correct server without Takes keeps.

    used, most: permits that are, or were, in use at once.
    """

    def __init__(self) -> None:
        self.used: Counter[bytes] = Counter()
        self.most: Counter[bytes] = Counter()

    def execute(self, held: Counter[bytes], request: Request, maximum: int) -> bytes:
        """Executes a request of a connection that holds this, as if it asked with this maximum. Returns the answer."""
        name, resources, bodies = request.name, request.resources, [b""]
        if request.opcode >= Opcode.TAKE:
            return refusal(request, Status.UNKNOWN_COMMAND)
        if request.opcode == Opcode.GET:
            if name not in self.used:
                return refusal(request, Status.NOT_FOUND)
            bodies = [struct.pack(">I", self.used[name])]
        elif request.opcode == Opcode.ACQUIRE:
            if self.used[name] + resources > maximum:
                return refusal(request, Status.RESOURCE_NOT_AVAILABLE)
            self.used[name] += resources
            self.most[name] = max(self.most[name], self.used[name])
            held[name] += resources
            bodies = [struct.pack(">I", resources)]
        elif request.opcode == Opcode.RELEASE:
            if held[name] < resources:
                return refusal(request, Status.NOT_ACQUIRED)
            self.used[name] -= resources
            held[name] -= resources
        elif request.opcode == Opcode.DUMP:
            entries = [struct.pack(">IIH", used, self.most[key], len(key)) + key for key, used in self.used.items()]
            bodies = [*entries, b""]
        return b"".join(response(request, body) for body in bodies)

    def give_back(self, held: Counter[bytes]) -> None:
        self.used.subtract(held)
        held.clear()


class Server(scripted.Server):
    """A correct server."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.counters = Counters()
        self.used = self.counters.used

    def cut(self, peer: Peer, data: bytes) -> tuple[list[Request], bytes]:
        return cut(peer.number, data)

    def limit(self, request: Request) -> int:
        """Returns the limit of a counter. A test may override it."""
        return request.maximum

    def right_answer(self, request: Request) -> bytes:
        return self.counters.execute(self.peer_of(request).held, request, self.limit(request))

    def reply(self, request: Request) -> bytes:
        """Answers. Statistics are right whatever a test answers."""
        if request.opcode >= Opcode.STATS:
            with self.lock:
                return self.right_answer(request)
        return super().reply(request)

    def give_back(self, peer: Peer) -> None:
        with self.lock:
            self.counters.give_back(peer.held)

    def asked(self, *opcodes: int) -> list[Request]:
        """Returns the requests with these opcodes, or all of the load."""
        return [each for each in list(self.seen) if each.opcode in (opcodes or range(4))]


class Answers(scripted.Server):
    """Gives the next answer to each request, and closes the connection if there is none or it is None.

    The next connection continues where the last one ended. seen: (opcode, body) of the requests. A Take is refused as
    unknown, and is none of these requests.
    """

    def __init__(self, *answers: Answer, **options: Any) -> None:
        super().__init__(**options)
        self._answers = iter(answers)

    def serve(self, peer: Peer) -> None:
        while header := peer.received(wire.HEADER_SIZE):
            body = peer.received(int.from_bytes(header[4:8], "big"))
            opaque = int.from_bytes(header[8:12], "big")
            if header[1] == Opcode.TAKE:
                peer.socket.sendall(responded(Opcode.TAKE, opaque, status=Status.UNKNOWN_COMMAND))
                continue
            self.seen.append((header[1], body))
            answer = next(self._answers, None)
            pieces = answer and answer(header[1], opaque, body)
            if pieces is None:
                return
            for piece in pieces:
                peer.socket.sendall(piece)
