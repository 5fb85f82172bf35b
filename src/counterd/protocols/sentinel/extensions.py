"""What can be replaced of the sentinel room, and what is there to begin with: for those who write extensions.

Floor 2. docs/guides/sentinel-extensions.md shows how. An extension is a class, or a function, that is called once, at
the start, with a Context, and returns what has the methods of one of TokenService, ExpireStrategy and RuleSource; it
needs to be a subclass of nothing. The configuration names it, as `package.module:attribute` or as an entry point of the
group `counterd.sentinel`. Its methods are called one after the other, in a thread of its own, each with a time limit,
the setting sentinel.extension_timeout: they may wait for a network or a file, and the daemon serves meanwhile.
"""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, runtime_checkable

from counterd.contract import Context
from counterd.documents import read_document
from counterd.protocols.sentinel._calls import Lease
from counterd.protocols.sentinel.wire import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from counterd.contract import PluginHost
    from counterd.protocols.sentinel._store import SentinelStore

__all__ = [
    "Context", "DefaultTokenService", "ExpireStrategy", "FileRuleSource", "Lease", "RegularExpireStrategy",
    "RuleSource", "Status", "TokenResult", "TokenService",
]  # fmt: skip

_T = TypeVar("_T")


class TokenResult(NamedTuple):
    """What a TokenService answers, and a client is told.

    status: of Status, as the protocol has it. token_id: of a token that was granted, any 64-bit number but 0.
    left_ms: how long a token that is kept now lasts.
    """

    status: int
    token_id: int = 0
    left_ms: int = 0


@runtime_checkable
class TokenService(Protocol):
    """Decides about concurrent tokens: who is granted one, and when it is given back. The setting token_service.

    Requests by rate and by value are not its business. What it grants it has to get back by itself if a client dies:
    it is told of no disconnect. A client that is not answered in time is told NOT_AVAILABLE; a token that was
    granted to it all the same is released by a call of release_token().

    An exception, or what is no TokenResult, is logged, and the client is told FAIL. Context.default is a
    DefaultTokenService.
    """

    def request_token(self, flow_id: int, count: int, prioritized: bool, client: str) -> TokenResult:
        """Grants or refuses `count` permits of a flow: OK with a token's id, BLOCKED, NO_RULE...

        client: the address of who asks, such as 10.0.0.7:40112.
        """

    def release_token(self, token_id: int) -> TokenResult:
        """Takes a token back: RELEASE_OK, or ALREADY_RELEASED if there is none of that id."""

    def keep_token(self, token_id: int) -> TokenResult:
        """Renews a token: OK and left_ms, or ALREADY_RELEASED."""


@runtime_checkable
class ExpireStrategy(Protocol):
    """Decides which tokens go when their lease is over. The setting expire_strategy.

    While it decides, they can be released and kept as ever; what is kept, and whose lease that renews, is not decided
    about. If it raises, returns anything else or does not answer in time, all go. Context.default is a
    RegularExpireStrategy.
    """

    def expired(self, tokens: Sequence[Lease]) -> Iterable[int]:
        """The ids of those that go; the others have another lease, of 2 x the resourceTimeout of their rule."""


@runtime_checkable
class RuleSource(Protocol):
    """Where the rules come from. The setting rule_source.

    It is asked at the start, at each reload, and every sentinel.rules_interval seconds. If it raises, or a rule is
    wrong, or it does not answer in time, the daemon does not start; later that is logged and the rules stay as they
    are. Context.default is a FileRuleSource.
    """

    def load(self) -> object:
        """All rules, in the shape of the file's JSON: a dict of namespaces, see docs/protocols/sentinel.md."""


# ---- what is there to begin with -------------------------------------------------------------------------------------

# Whose request a thread is at: what the room calls a client, by which tokens are owned.
_client: contextvars.ContextVar[int] = contextvars.ContextVar("client")


class DefaultTokenService:
    """The engine's own tokens. What it grants has the leases of the flow's rule, and is given back if its owner dies.

    For calls out of request_token() and keep_token() of another service, and in the same context (contextvars): who is
    answered there is the owner here. A call waits for the engine's next turn.
    """

    def __init__(self, store: SentinelStore, host: PluginHost, timeout: float) -> None:
        self._store = store
        self._host = host
        self._timeout = timeout

    def request_token(self, flow_id: int, count: int, prioritized: bool, client: str) -> TokenResult:
        owner = self._owner()
        request = self._store.request_token
        status, token_id = self._run(lambda now_ns: request(flow_id, count, prioritized, owner, now_ns))
        return TokenResult(status, token_id=token_id)

    def release_token(self, token_id: int) -> TokenResult:
        return TokenResult(self._run(lambda now_ns: self._store.release_token(token_id, now_ns)))

    def keep_token(self, token_id: int) -> TokenResult:
        owner = self._owner()
        status, left_ms = self._run(lambda now_ns: self._store.keep_token(token_id, owner, now_ns))
        return TokenResult(status, left_ms=left_ms)

    def _owner(self) -> int:
        try:
            return _client.get()
        except LookupError:
            raise RuntimeError(
                "nobody asks here for whom a token could be: call it within the service's call"
            ) from None

    def _run(self, function: Callable[[int], _T]) -> _T:
        return self._host.on_loop(function, self._timeout)


class RegularExpireStrategy:
    """A lease that is over is over."""

    def expired(self, tokens: Sequence[Lease]) -> Iterable[int]:
        return [token.token_id for token in tokens]


class FileRuleSource:
    """The file that the setting sentinel.rules names, as it is now; no rules if it names none."""

    def __init__(self, host: PluginHost) -> None:
        self._host = host

    def load(self) -> object:
        text = self._host.read("sentinel.rules")
        return read_document(text) if text else {}
