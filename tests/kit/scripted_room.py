"""A sentinel server for the tests of counterbench. It keeps every request, and a test controls its answers.

A test overrides `answer`. The rest is a small, correct server whose flows all have the same limit.
"""

from __future__ import annotations

import itertools
import struct
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from counterd.protocols.sentinel.wire import MessageType, Status
from kit import scripted

if TYPE_CHECKING:
    from kit.scripted import Peer

HEAD = struct.Struct(">Hib")


class Asked(NamedTuple):
    """A request as received. id: of a flow or a token."""

    connection: int
    xid: int
    type: int
    id: int
    count: int
    body: bytes


class Answer(NamedTuple):
    status: int
    data: bytes = b""


class Room(scripted.Server):
    """Serves during the block. seen: all requests. tokens: the flow of each token that is not given back."""

    def __init__(self, limit: int = 1_000_000) -> None:
        super().__init__()
        self.limits = limit
        self.seen: list[Asked] = []
        self.tokens: dict[int, tuple[int, int]] = {}  # (flow, count) by token
        self.used: Counter[int] = Counter()  # type: ignore[assignment]
        self.ids = itertools.count(-5)

    # ---- what a test overrides ----

    def answer(self, asked: Asked) -> Answer:
        return self.right_answer(asked)

    # ---- a correct room ----

    def serve(self, peer: Peer) -> None:
        buffer = b""
        while data := peer.socket.recv(scripted.RECEIVE_SIZE):
            found, buffer = self._cut(peer, buffer + data)
            peer.batches.append(len(found))
            with self.lock:
                self.seen += found
                replies = [self._reply(each) for each in found]
            peer.socket.sendall(b"".join(replies))

    def give_back(self, peer: Peer) -> None:
        """Does nothing: tokens outlive their connection."""

    def right_answer(self, asked: Asked) -> Answer:
        if asked.type < MessageType.ACQUIRE:
            return Answer(Status.OK, struct.pack(">i", 1) if asked.type == MessageType.PING else bytes(8))
        if asked.type == MessageType.ACQUIRE:
            if self.used[asked.id] + asked.count > self.limits:
                return Answer(Status.BLOCKED, bytes(8))
            return Answer(Status.OK, struct.pack(">q", self.grant(asked)))
        if asked.type == MessageType.KEEP:
            return Answer(Status.OK if asked.id in self.tokens else Status.ALREADY_RELEASED, bytes(4))
        if asked.id not in self.tokens:
            return Answer(Status.ALREADY_RELEASED)
        flow, count = self.tokens.pop(asked.id)
        self.used[flow] -= count
        return Answer(Status.RELEASE_OK)

    def grant(self, asked: Asked) -> int:
        token = next(self.ids) or next(self.ids)
        self.tokens[token] = (asked.id, asked.count)
        self.used[asked.id] += asked.count
        return token

    def of(self, *types: MessageType) -> list[Asked]:
        return [each for each in self.seen if each.type in types]

    # ---- inside ----

    def _cut(self, peer: Peer, data: bytes) -> tuple[list[Asked], bytes]:
        found, at = [], 0
        while len(data) - at >= HEAD.size:
            length, xid, kind = HEAD.unpack_from(data, at)
            body = data[at + HEAD.size : at + 2 + length]
            if len(body) < length - 5:
                break
            number, count = struct.unpack(">qi", (body + bytes(12))[:12]) if kind != MessageType.PING else (0, 0)
            found.append(Asked(peer.number, xid, kind, number, count, body))
            at += 2 + length
        return found, data[at:]

    def _reply(self, asked: Asked) -> bytes:
        status, data = self.answer(asked)
        return struct.pack(">Hibb", 6 + len(data), asked.xid, asked.type, status) + data
