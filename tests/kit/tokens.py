"""A sentinel server for the tests of its clients. It keeps every request, and a test controls its answers.

It uses plain sockets and a thread for each connection. By default it is a small, correct server of tokens. `limits` has
its flows, each limited both by concurrency and by rate.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import NamedTuple

from counterd.protocols.sentinel.wire import MessageType, Status
from kit import scripted

HEAD = struct.Struct(">Hib")
LEASE_MS = 4000


class Request(NamedTuple):
    """A request as received. what: the id of a flow or token."""

    connection: int  # counted from 0, in the order they were accepted
    xid: int
    type: int
    what: int
    count: int
    data: bytes


class Held(NamedTuple):
    """A token. ends: on the monotonic clock."""

    flow_id: int
    count: int
    owner: int
    ends: float


class Server(scripted.Server):
    """The server. limits: by flow. lease_ms: of each token. tokens: those that are held.

    waits: types of requests that are kept in held_back until go_on(). says: wrong statuses to answer, by type.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path=path)
        self.limits = {101: 2}
        self.lease_ms = LEASE_MS
        self.tokens: dict[int, Held] = {}
        self.asked_for: list[Request] = []
        self.wait_ms = 0  # in the answer to a prioritized FLOW
        self.waits: set[int] = set()
        self.held_back: list[Request] = []
        self.says: dict[int, int] = {}
        self._next = 0

    # ---- controlled by tests ----

    def answer(self, request: Request) -> bytes | None:
        """Returns the answer to a request; None for no answer."""
        if request.type in self.waits:
            self.held_back.append(request)
            return None
        if request.type in self.says:
            return response(request, self.says[request.type])
        return self.correct(request)

    def go_on(self) -> None:
        """Answers the requests that were held back, the last first."""
        with self.lock:
            self.waits.clear()
            while self.held_back:
                request = self.held_back.pop()
                with contextlib.suppress(OSError):  # the client is gone
                    self.peers[request.connection].socket.sendall(self.correct(request))

    # ---- a correct server ----

    def serve(self, peer: scripted.Peer) -> None:
        buffer = b""
        while data := peer.socket.recv(scripted.RECEIVE_SIZE):
            requests, buffer = self.cut(peer, buffer + data)
            for request in requests:
                with self.lock:
                    self.asked_for.append(request)
                    said = self.answer(request)
                if said is not None:
                    peer.socket.sendall(said)

    def cut(self, peer: scripted.Peer, data: bytes) -> tuple[list[Request], bytes]:
        """Parses requests. Returns (the requests, the rest)."""
        found, at = [], 0
        while len(data) - at >= 2 and len(data) - at >= 2 + int.from_bytes(data[at : at + 2], "big"):
            length, xid, kind = HEAD.unpack_from(data, at)
            body = data[at + HEAD.size : at + 2 + length]
            what = int.from_bytes(body[:8], "big", signed=True) if kind else 0
            count = int.from_bytes(body[8:12], "big") if kind else 0
            found.append(Request(peer.number, xid, kind, what, count, body))
            at += 2 + length
        return found, data[at:]

    def correct(self, request: Request) -> bytes:
        """Executes a request. Returns the correct answer."""
        self.expire()
        if request.type == MessageType.PING:
            return response(request, Status.OK, struct.pack(">i", len(self.peers)))
        if request.type in (MessageType.FLOW, MessageType.PARAM):
            return self._flow(request)
        if request.type == MessageType.ACQUIRE:
            return self._acquire(request)
        held = self.tokens.get(request.what)
        if held is None:
            return response(request, Status.ALREADY_RELEASED)
        if request.type == MessageType.RELEASE:
            del self.tokens[request.what]
            return response(request, Status.RELEASE_OK)
        ends = time.monotonic() + self.lease_ms / 1000
        self.tokens[request.what] = held._replace(owner=request.connection, ends=ends)
        return response(request, Status.OK, struct.pack(">i", self.lease_ms))

    def _flow(self, request: Request) -> bytes:
        limit = self.limits.get(request.what)
        if limit is None:
            return response(request, Status.NO_RULE, bytes(8))
        if request.count <= limit:
            return response(request, Status.OK, struct.pack(">ii", limit - request.count, 0))
        if self.wait_ms and request.type == MessageType.FLOW and request.data[12]:
            return response(request, Status.SHOULD_WAIT, struct.pack(">ii", 0, self.wait_ms))
        return response(request, Status.BLOCKED, bytes(8))

    def _acquire(self, request: Request) -> bytes:
        limit = self.limits.get(request.what)
        if limit is None:
            return response(request, Status.NO_RULE, bytes(8))
        if self.in_use(request.what) + request.count > limit:
            return response(request, Status.BLOCKED, bytes(8))
        self._next = -self._next if self._next > 0 else 1 - self._next  # 1, -1, 2, -2 and so on
        ends = time.monotonic() + self.lease_ms / 1000
        self.tokens[self._next] = Held(request.what, request.count, request.connection, ends)
        return response(request, Status.OK, struct.pack(">q", self._next))

    def expire(self) -> None:
        """Ends tokens whose lease is over."""
        now = time.monotonic()
        for token_id, held in list(self.tokens.items()):
            if held.ends <= now:
                del self.tokens[token_id]

    # ---- for tests ----

    def in_use(self, flow_id: int = 101) -> int:
        return sum(held.count for held in list(self.tokens.values()) if held.flow_id == flow_id)

    def seen(self, kind: MessageType) -> list[Request]:
        """Returns the requests of a type."""
        return [each for each in list(self.asked_for) if each.type == kind]

    def hang_up(self) -> None:
        """Ends all connections, but still listens."""
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)


class Late(Server):
    """A server that listens on a given port."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._listener.close()
        self._listener = socket.create_server(("127.0.0.1", port))


def response(request: Request, status: int, data: bytes = b"") -> bytes:
    """Makes a response to a request."""
    return HEAD.pack(6 + len(data), request.xid, request.type) + status.to_bytes(1, "big", signed=True) + data
