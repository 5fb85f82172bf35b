"""Interfaces and default implementations of the sentinel protocol's extensions, for those who write extensions.

Floor 2 (ARCHITECTURE.md). docs/guides/sentinel-extensions.md describes how to use them. An extension is a class or
function that is called once, at the start, with a Context. It returns an object with the methods of TokenService,
ExpireStrategy or RuleSource. The object's class need not be a subclass. The configuration names the extension, as
`package.module:attribute` or as an entry point of the group `counterd.sentinel`. The object's methods are called one
after the other, in the extension's own thread. Each call has a time limit, the setting sentinel.extension_timeout. The
methods may wait for a network or a file; the daemon serves requests meanwhile.
"""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, runtime_checkable

from counterd.contract import Context
from counterd.json_documents import read_document
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
    """The answer of a TokenService to a client.

    status: a Status. token_id: the id of a granted token, any 64-bit number except 0. left_ms: the remaining lease of a
    kept token, in ms.
    """

    status: int
    token_id: int = 0
    left_ms: int = 0


@runtime_checkable
class TokenService(Protocol):
    """Grants and takes back concurrent tokens. The setting sentinel.token_service names it.

    A token service does not decide about requests by rate and by value. A token service is not notified of disconnects,
    so it has to take back the tokens of dead clients by itself. If the service does not answer in time, the client gets
    NOT_AVAILABLE. If the service grants a token after that, the store calls release_token() for this token.

    If the service raises an exception or returns anything except a TokenResult, the error is logged and the client gets
    the reply FAIL. Context.default is a DefaultTokenService.
    """

    def request_token(self, flow_id: int, count: int, prioritized: bool, client: str) -> TokenResult:
        """Grants or refuses `count` permits of a flow. The result is OK with the id of a token, BLOCKED, NO_RULE, or
        another status.

        client: the address of the client, such as 10.0.0.7:40112.
        """

    def release_token(self, token_id: int) -> TokenResult:
        """Takes a token back. The result is RELEASE_OK, or ALREADY_RELEASED if there is no token with this id."""

    def keep_token(self, token_id: int) -> TokenResult:
        """Renews a token. The result is OK and left_ms, or ALREADY_RELEASED."""


@runtime_checkable
class ExpireStrategy(Protocol):
    """Decides which tokens end when their lease is over. The setting sentinel.expire_strategy names it.

    While the strategy decides, clients can still release and keep these tokens. The decision does not apply to a token
    whose lease was renewed meanwhile. If the strategy raises an exception, returns an invalid result or does not answer
    in time, all tokens end. Context.default is a RegularExpireStrategy.
    """

    def expired(self, tokens: Sequence[Lease]) -> Iterable[int]:
        """Returns the ids of the tokens that end.

        All other tokens get another lease of 2 x their rule's resourceTimeout.
        """


@runtime_checkable
class RuleSource(Protocol):
    """Provides the rules. The setting sentinel.rule_source names it.

    A source is called at the start, at each reload, and every sentinel.rules_interval seconds. If the source raises an
    exception, has a wrong rule, or does not answer in time, the daemon does not start. An error after the start is
    logged, and the rules do not change. Context.default is a FileRuleSource.
    """

    def load(self) -> object:
        """Returns all rules, in the form of the file's JSON: a dict of namespaces. See docs/protocols/sentinel.md."""


# ---- default implementations -----------------------------------------------------------------------------------------

# The client of the request that a thread is serving, as in a Call: the owner of tokens.
_client: contextvars.ContextVar[int] = contextvars.ContextVar("client")


class DefaultTokenService:
    """The engine's own tokens. These tokens have the leases of the flow's rule, and are given back if their owner dies.

    Another service can call it from its request_token() and keep_token(), in the same context (contextvars). Then the
    client of that request owns the token. A call waits for the engine's next turn.
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
                "no client waits for a token here: call this within a call of the token service"
            ) from None

    def _run(self, function: Callable[[int], _T]) -> _T:
        return self._host.on_loop(function, self._timeout)


class RegularExpireStrategy:
    """Ends all tokens whose lease is over."""

    def expired(self, tokens: Sequence[Lease]) -> Iterable[int]:
        return [token.token_id for token in tokens]


class FileRuleSource:
    """Reads the file that the setting sentinel.rules names. If the setting names no file, there are no rules."""

    def __init__(self, host: PluginHost) -> None:
        self._host = host

    def load(self) -> object:
        text = self._host.read("sentinel.rules")
        return read_document(text) if text else {}
