"""The sentinel protocol for scripted servers: a small, correct server of tokens and rates.

Each flow is limited both by concurrency and by rate. Tokens outlive their connection, up to the end of their lease.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

from counterd.protocols.sentinel.wire import MessageType, Status
from kit import scripted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kit.scripted import Peer

HEAD = struct.Struct(">Hib")
LEASE_MS = 600_000


class Asked(NamedTuple):
    """A request as received. id: of a flow or a token."""

    connection: int
    xid: int
    type: int
    id: int
    count: int
    body: bytes


class Held(NamedTuple):
    """A token. ends: on the monotonic clock."""

    flow_id: int
    count: int
    owner: int
    ends: float


def response(asked: Asked, status: int, data: bytes = b"") -> bytes:
    """Makes a response to a request."""
    return HEAD.pack(6 + len(data), asked.xid, asked.type) + status.to_bytes(1, "big", signed=True) + data


class Tokens(scripted.Server):
    """The server. limits: of every flow, or by flow; flows that are not there have no rule. used: by flow.

    lease_ms: of each token. wait_ms: in the answer to a prioritized FLOW.
    waits: types of requests that are kept in held_back until go_on(). says: wrong statuses to answer, by type.
    """

    def __init__(
        self, limits: int | Mapping[int, int] = 1_000_000, *, lease_ms: int = LEASE_MS, **options: Any
    ) -> None:
        super().__init__(**options)
        self.limits = limits
        self.lease_ms = lease_ms
        self.wait_ms = 0
        self.tokens: dict[int, Held] = {}
        self.used: Counter[int] = Counter()
        self.ids = itertools.count(-5)
        self.waits: set[int] = set()
        self.held_back: list[Asked] = []
        self.says: dict[int, int] = {}

    def answer(self, asked: Asked) -> bytes:
        if asked.type in self.waits:
            self.held_back.append(asked)
            return b""
        return response(asked, self.says[asked.type]) if asked.type in self.says else self.right_answer(asked)

    def go_on(self) -> None:
        """Answers the requests that were held back, the last first."""
        with self.lock:
            self.waits.clear()
            while self.held_back:
                asked = self.held_back.pop()
                with contextlib.suppress(OSError):  # the client is gone
                    self.peer_of(asked).socket.sendall(self.right_answer(asked))

    def cut(self, peer: Peer, data: bytes) -> tuple[list[Asked], bytes]:
        found, at = [], 0
        while len(data) - at >= 2 and len(data) - at >= 2 + int.from_bytes(data[at : at + 2], "big"):
            length, xid, kind = HEAD.unpack_from(data, at)
            body = data[at + HEAD.size : at + 2 + length]
            number, count = struct.unpack(">qi", (body + bytes(12))[:12]) if kind != MessageType.PING else (0, 0)
            found.append(Asked(peer.number, xid, kind, number, count, body))
            at += 2 + length
        return found, data[at:]

    def right_answer(self, asked: Asked) -> bytes:
        self._expire()
        if asked.type == MessageType.PING:
            return response(asked, Status.OK, struct.pack(">i", len(self.peers)))
        if asked.type in (MessageType.FLOW, MessageType.PARAM, MessageType.ACQUIRE):
            limit = self.limits if isinstance(self.limits, int) else self.limits.get(asked.id)
            if limit is None:
                return response(asked, Status.NO_RULE, bytes(8))
            return self._acquire(asked, limit) if asked.type == MessageType.ACQUIRE else self._flow(asked, limit)
        is_keep = asked.type == MessageType.KEEP
        if asked.id not in self.tokens:
            return response(asked, Status.ALREADY_RELEASED, bytes(4 * is_keep))
        if not is_keep:
            self.end(asked.id)
            return response(asked, Status.RELEASE_OK)
        self.tokens[asked.id] = self.tokens[asked.id]._replace(owner=asked.connection, ends=self._lease_end())
        return response(asked, Status.OK, struct.pack(">i", self.lease_ms))

    def _flow(self, asked: Asked, limit: int) -> bytes:
        if asked.count <= limit:
            return response(asked, Status.OK, struct.pack(">ii", limit - asked.count, 0))
        if self.wait_ms and asked.type == MessageType.FLOW and asked.body[12]:
            return response(asked, Status.SHOULD_WAIT, struct.pack(">ii", 0, self.wait_ms))
        return response(asked, Status.BLOCKED, bytes(8))

    def _acquire(self, asked: Asked, limit: int) -> bytes:
        if self.used[asked.id] + asked.count > limit:
            return response(asked, Status.BLOCKED, bytes(8))
        return response(asked, Status.OK, struct.pack(">q", self.grant(asked)))

    def grant(self, asked: Asked) -> int:
        """Makes a token. Returns its id."""
        token = next(self.ids) or next(self.ids)
        self.tokens[token] = Held(asked.id, asked.count, asked.connection, self._lease_end())
        self.used[asked.id] += asked.count
        return token

    def end(self, token: int) -> None:
        """Ends a token."""
        held = self.tokens.pop(token)
        self.used[held.flow_id] -= held.count

    def end_all(self) -> None:
        with self.lock:
            for token in list(self.tokens):
                self.end(token)

    def _lease_end(self) -> float:
        return time.monotonic() + self.lease_ms / 1000

    def _expire(self) -> None:
        now = time.monotonic()
        for token in [token for token, held in self.tokens.items() if held.ends <= now]:
            self.end(token)

    # ---- for tests ----

    def of(self, *types: MessageType) -> list[Asked]:
        """Returns the requests of these types."""
        return [each for each in list(self.seen) if each.type in types]
