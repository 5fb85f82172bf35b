"""What a client for the sentinel protocol decides by itself while its server does not decide, and what it logs.

Floor: side (ARCHITECTURE.md); shared by the blocking client and the client for asyncio. This file has no I/O except the
log, and no clock.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from counterd.client._holding import NO_LOSS
from counterd.client.sentinel._tokens import Answer, Tally, Token, blocked, check, refused
from counterd.protocols.sentinel.errors import TokenRefused
from counterd.protocols.sentinel.wire import Status, encode_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from counterd.client.sentinel._tokens import Lease
    from counterd.errors import CounterdError
    from counterd.protocols.sentinel.wire import Response, Value

LOCAL: Literal["local"] = "local"
OPEN: Literal["open"] = "open"
CLOSED: Literal["closed"] = "closed"
GOES_ON = {LOCAL: "local limits apply", OPEN: "all calls pass", CLOSED: "all calls are refused"}
# The answers that are decisions. After any other the fallback decides, as it does without an answer.
DECISIONS = frozenset(map(int, (Status.OK, Status.BLOCKED, Status.SHOULD_WAIT)))
# "The server decides again" is logged when the fallback was not needed for so long, so that this is not logged often.
QUIET_S = 1.0
WINDOWS = 10  # parts of a second, in which a local limit counts
SERVER = 0  # instead of the id of a flow: all flows, because the server cannot be reached

log = logging.getLogger("counterd.client.sentinel")


class Stats(NamedTuple):
    """The figures of a client.

    falling_back: why the server does not decide now, or "". fallbacks: how often such a time has begun.
    passed, refused: calls about which the fallback decided.
    late: tokens that were granted after their caller had stopped waiting, and were given back immediately.
    lost: tokens of holds that were lost.
    """

    falling_back: str
    fallbacks: int
    passed: int
    refused: int
    late: int
    lost: int


class _Episode:
    """A time in which the server does not decide, for one flow or for all flows."""

    def __init__(self, why: str, now: float) -> None:
        self.why = why
        self.since = self.last = now
        self.passed = self.refused = 0


class Fallback:
    """Decides if the server has not decided, and counts the tokens that this client has. Threads may share a Fallback.

    now: returns the seconds of a monotonic clock.
    """

    def __init__(self, mode: str, limits: Mapping[int, int], now: Callable[[], float]) -> None:
        if mode not in GOES_ON:
            raise ValueError(f'fallback must be "local", "open" or "closed", not {mode!r}')
        for flow_id, limit in limits.items():
            check(flow_id, 1)
            if not isinstance(limit, int) or limit < 0:
                raise ValueError(f"the limit of flow {flow_id} must be a whole number of 0 or more, not {limit!r}")
        self.tally = Tally()
        self._now = now
        self._mode = mode
        self._limits = dict(limits)
        self._episodes: dict[int, _Episode] = {}  # by flow
        self._begun = self._passed = self._refused = 0
        self._ids = itertools.count(1)
        self.after_fork()

    def after_fork(self) -> None:
        """Called in the child of a fork, where all tokens belong to the parent. Forgets all tokens."""
        self._lock = threading.RLock()  # reentrant: a signal handler may have interrupted its thread
        self._granted: weakref.WeakSet[Token] = weakref.WeakSet()  # by the server
        self._own: dict[int, Token] = {}
        self._rates: dict[int, deque[tuple[int, Counter[bytes]]]] = {}

    # ---- what the server answered ----

    def heard(self, flow_id: int, count: int, response: Response) -> TokenRefused | None:
        """Takes the answer of the server for a flow. Returns an error if the answer is not a decision."""
        if response.status not in DECISIONS:
            return refused(response.status, flow_id, count)
        if self._episodes:
            self._ended(SERVER)
            self._ended(flow_id)
        return None

    def granted(self, token: Token) -> None:
        """Called when the server has granted the token."""
        with self._lock:
            self._granted.add(token)

    def gone(self, token: Token) -> None:
        """Called when the token was given back to the server, or is lost."""
        with self._lock:
            self._granted.discard(token)

    def lost(self, lease: Lease) -> None:
        """Counts the token of a hold as lost, but only once."""
        with self._lock:
            if lease.lost and lease.lost not in NO_LOSS and not lease.counted:
                lease.counted = True
                self.tally.lost += 1
                self._granted.discard(lease.token)

    def tokens(self) -> list[Token]:
        """Returns the server's tokens that the program still has."""
        with self._lock:
            return list(self._granted)

    # ---- deciding ----

    def answer(self, flow_id: int, count: int, values: Sequence[Value], error: CounterdError) -> Answer:
        """Decides in place of the server.

        error: why the server did not decide; it is raised if the flow has no local limit.
        """
        keys = [encode_value(value) for value in values] or [b""]
        passed = self._mode == OPEN or (
            self._mode == LOCAL and self._passes(flow_id, count, keys, self._limit(flow_id, error))
        )
        self._fell_back(flow_id, error, passed)
        return Answer(int(Status.OK if passed else Status.BLOCKED), fallback=True)

    def acquire(self, flow_id: int, count: int, error: CounterdError) -> Token:
        """Grants a token in place of the server.

        Raises Blocked if too many tokens are held, or `error` if nothing may pass.
        """
        if self._mode == CLOSED:
            self._fell_back(flow_id, error, False)
            raise error
        token = Token(next(self._ids), flow_id, count, fallback=True)
        try:
            with self._lock:
                if self._mode == LOCAL:
                    limit = self._limit(flow_id, error)
                    have = sum(each.count for each in (*self._granted, *self._own.values()) if each.flow_id == flow_id)
                    if have + count > limit:
                        self._fell_back(flow_id, error, False)
                        raise blocked(flow_id, count, maximum=limit) from error
                self._own[token.id] = token
            self._fell_back(flow_id, error, True)
        except BaseException:  # a signal may have come after the grant
            self._own.pop(token.id, None)
            raise
        return token

    def release(self, token: Token) -> bool:
        """Takes back a token of the fallback. Returns False if the token was given back before."""
        with self._lock:
            return self._own.pop(token.id, None) is not None

    def _limit(self, flow_id: int, error: CounterdError) -> int:
        limit = self._limits.get(flow_id)
        if limit is None:
            self._fell_back(flow_id, error, False)
            if isinstance(error, TokenRefused):
                raise error
            raise type(error)(f"{error}; flow {flow_id} has no local limit") from error
        return limit

    def _passes(self, flow_id: int, count: int, values: Iterable[bytes], limit: int) -> bool:
        """Returns whether all values may pass.

        If they may, counts them. A second consists of the current tenth and the nine tenths before it.
        """
        asked: Counter[bytes] = Counter()
        for value in values:
            asked[value] += count
        with self._lock:
            window = int(self._now() * WINDOWS)
            windows = self._rates.setdefault(flow_id, deque())
            while windows and windows[0][0] <= window - WINDOWS:
                windows.popleft()
            for value, wanted in asked.items():
                if wanted + sum(passed[value] for _, passed in windows) > limit:
                    return False
            if not windows or windows[-1][0] != window:
                windows.append((window, Counter()))
            windows[-1][1].update(asked)
            return True

    # ---- the log ----

    def _fell_back(self, flow_id: int, error: CounterdError, passed: bool) -> None:
        key = flow_id if isinstance(error, TokenRefused) else SERVER
        with self._lock:
            now = self._now()
            episode = self._episodes.get(key)
            if episode is None:
                episode = self._episodes[key] = _Episode(str(error), now)
                self._begun += 1
                alone = self._mode == LOCAL and key and key not in self._limits
                log.warning("%s: %s", error, "the flow has no local limit" if alone else GOES_ON[self._mode])
            episode.last = now
            if passed:
                episode.passed += 1
                self._passed += 1
            else:
                episode.refused += 1
                self._refused += 1

    def _ended(self, key: int) -> None:
        with self._lock:
            episode = self._episodes.get(key)
            if episode is not None and self._now() - episode.last >= QUIET_S:
                del self._episodes[key]
                self._log(key, episode, "the server decides again")

    def close(self) -> list[Token]:
        """Logs the end of all episodes. Returns the server's tokens that the program still has."""
        with self._lock:
            while self._episodes:
                key, episode = self._episodes.popitem()
                self._log(key, episode, "closed")
            return self.tokens()

    def _log(self, key: int, episode: _Episode, what: str) -> None:
        flow = f"flow {key}: " if key else ""
        counts: tuple[Any, ...] = (self._now() - episode.since, episode.passed, episode.refused)
        log.warning("%s%s after %.1f s: %d calls passed without the server, and %d were refused", flow, what, *counts)

    def stats(self) -> Stats:
        with self._lock:
            why = next((episode.why for episode in self._episodes.values()), "")
            return Stats(why, self._begun, self._passed, self._refused, self.tally.late, self.tally.lost)
