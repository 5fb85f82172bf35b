"""A server of the sentinel protocol for the tests of its clients: keeps every request, and answers as told.

Plain sockets and a thread for each connection. But for what it is told to do otherwise it is a small, correct server of
tokens, whose flows are what `limits` says, all of them by concurrency and by rate.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import NamedTuple

import scripted
from counterd.protocols.sentinel.wire import MessageType, Status

HEAD = struct.Struct(">Hib")
LEASE_MS = 4000


class Request(NamedTuple):
    """As it came in. what: a flow's id, or a token's. count: of a namespace its bytes."""

    connection: int  # counted from 0, in the order they were accepted
    xid: int
    type: int
    what: int
    count: int
    data: bytes


class Held(NamedTuple):
    """A token. ends: of the monotonic clock."""

    flow_id: int
    count: int
    owner: int
    ends: float


class Server(scripted.Server):
    """limits: by flow. lease_ms: of each token. tokens: those that are held.

    waits: types of requests that are held_back until the test says so. says: statuses, by type, in place of the right.
    """

    def __init__(self, path: str | None = None) -> None:
        super().__init__(path=path)
        self.limits = {101: 2}
        self.lease_ms = LEASE_MS
        self.tokens: dict[int, Held] = {}
        self.asked_for: list[Request] = []
        self.wait_ms = 0  # what a prioritized FLOW is told
        self.waits: set[int] = set()
        self.held_back: list[Request] = []
        self.says: dict[int, int] = {}
        self._next = 0

    # ---- what a test tells it ----

    def answer(self, request: Request) -> bytes | None:
        """What a request is answered with; None: nothing."""
        if request.type in self.waits:
            self.held_back.append(request)
            return None
        if request.type in self.says:
            return response(request, self.says[request.type])
        return self.correct(request)

    def go_on(self) -> None:
        """Answers what it has not, the last first."""
        with self.lock:
            self.waits.clear()
            while self.held_back:
                request = self.held_back.pop()
                with contextlib.suppress(OSError):  # the client has gone
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
        """(the requests, the rest)."""
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
        """What it does and says when nothing is wrong."""
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
        """Frees what nobody has kept."""
        now = time.monotonic()
        for token_id, held in list(self.tokens.items()):
            if held.ends <= now:
                del self.tokens[token_id]

    # ---- what a test asks ----

    def in_use(self, flow_id: int = 101) -> int:
        return sum(held.count for held in list(self.tokens.values()) if held.flow_id == flow_id)

    def seen(self, kind: MessageType) -> list[Request]:
        """Of that kind."""
        return [each for each in list(self.asked_for) if each.type == kind]

    def hang_up(self) -> None:
        """Ends all connections, and goes on listening."""
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.socket.shutdown(socket.SHUT_RDWR)


class Late(Server):
    """Begins to listen on a port that was free."""

    def __init__(self, port: int) -> None:
        super().__init__()
        self._listener.close()
        self._listener = socket.create_server(("127.0.0.1", port))


def response(request: Request, status: int, data: bytes = b"") -> bytes:
    """To that request."""
    return HEAD.pack(6 + len(data), request.xid, request.type) + status.to_bytes(1, "big", signed=True) + data
