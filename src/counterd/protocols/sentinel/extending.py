"""Connects the store to the extensions that the settings name: passes calls to them and checks the results.

Floor 2 (ARCHITECTURE.md). Each call gets an answer, no matter what an extension does: from the extension, from this
module if the extension fails, or from the store after the time limit.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from counterd.contract import Busy
from counterd.protocols.sentinel.extensions import (
    DefaultTokenService,
    FileRuleSource,
    RegularExpireStrategy,
    TokenResult,
    _client,
)
from counterd.protocols.sentinel.rules import read_rules
from counterd.protocols.sentinel.wire import LEASE_MAX, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from counterd.contract import Plugin, PluginHost
    from counterd.protocols.sentinel._calls import Call, Lease
    from counterd.protocols.sentinel._store import SentinelStore
    from counterd.protocols.sentinel.extensions import ExpireStrategy, RuleSource, TokenService
    from counterd.protocols.sentinel.rules import Rules

METHODS = {"request": "request_token", "release": "release_token", "keep": "keep_token"}
STATUSES = frozenset(Status)


def extend(store: SentinelStore, host: PluginHost, timeout_ms: int) -> None:
    """Creates the extensions that the settings name, and makes the store delegate decisions to them."""
    limit, limit_ns = timeout_ms / 1000, timeout_ms * 1_000_000
    service = host.make("sentinel.token_service", DefaultTokenService(store, host, limit), limit)
    if service is not None:
        store.delegate(partial(submit_calls, store, service), limit_ns)
    strategy = host.make("sentinel.expire_strategy", RegularExpireStrategy(), limit)
    if strategy is not None:
        store.delegate_expiry(partial(submit_leases, store, strategy), limit_ns)
    source = host.make("sentinel.rule_source", FileRuleSource(host), limit)
    if source is not None:
        source.refresh("load", partial(fetch, source.extension), store.load_rules, "sentinel.rules_interval")


# ---- a token service -------------------------------------------------------------------------------------------------


def submit_calls(store: SentinelStore, plugin: Plugin, calls: Sequence[Call]) -> None:
    """The argument submit of SentinelStore.delegate(). Passes each call to the service."""
    for call in calls:
        plugin.ask(METHODS[call.kind], partial(serve, plugin.extension, call), partial(answer, store, call.ticket))


def answer(store: SentinelStore, ticket: int, outcome: tuple[int, int] | Exception, now_ns: int) -> None:
    """Passes the outcome of a call to the store."""
    if isinstance(outcome, Exception):
        outcome = (Status.NOT_AVAILABLE if isinstance(outcome, Busy) else Status.FAIL, 0)
    store.answer(ticket, *outcome, now_ns)


def serve(service: TokenService, call: Call) -> tuple[int, int]:
    """Calls the service, in the service's thread.

    Returns a status and a value. Raises the exceptions of the service.
    """
    token = _client.set(call.client)
    try:
        if call.kind == "request":
            result = service.request_token(call.flow_id, call.count, call.prioritized, call.address)
        else:
            method: Callable[[int], TokenResult] = getattr(service, METHODS[call.kind])
            result = method(call.token_id)
    finally:
        _client.reset(token)
    return checked(call.kind, result)


def checked(kind: str, result: object) -> tuple[int, int]:
    """Returns the status and the value of a service's result.

    Raises TypeError or ValueError if the result is invalid.
    """
    if not isinstance(result, TokenResult):
        raise TypeError(f"expected a TokenResult, not {type(result).__name__}")
    status, token_id, left_ms = result
    if status not in STATUSES:
        raise ValueError(f"unknown status {status!r}")
    status = int(status)
    if kind == "request" and status == Status.OK:
        if type(token_id) is not int or not -(1 << 63) <= token_id < 1 << 63 or token_id == 0:
            raise ValueError(f"a token id must be a 64-bit number other than 0, not {token_id!r}")
        return status, token_id
    if kind == "keep" and status == Status.OK:
        if type(left_ms) is not int or left_ms < 0:
            raise ValueError(f"left_ms must be a number of milliseconds, not {left_ms!r}")
        return status, min(left_ms, LEASE_MAX)
    return status, 0


# ---- an expire strategy ----------------------------------------------------------------------------------------------


def submit_leases(store: SentinelStore, plugin: Plugin, batch: int, leases: Sequence[Lease]) -> None:
    """The argument submit of SentinelStore.delegate_expiry(). Passes a batch to the strategy."""
    ids = frozenset(lease.token_id for lease in leases)

    def judged(outcome: frozenset[int] | Exception, now_ns: int) -> None:
        store.expire(batch, ids if isinstance(outcome, Exception) else outcome, now_ns)

    plugin.ask("expired", partial(judge, plugin.extension, leases, ids), judged)


def judge(strategy: ExpireStrategy, leases: Sequence[Lease], ids: frozenset[int]) -> frozenset[int]:
    """Calls the strategy, in the strategy's thread.

    Returns the ids of the tokens that end. Raises the exceptions of the strategy.
    """
    going = frozenset(strategy.expired(leases))
    if not going <= ids:
        raise ValueError(f"expected only ids of the tokens that were passed, not {next(iter(going - ids))!r}")
    return going


# ---- a rule source ---------------------------------------------------------------------------------------------------


def fetch(source: RuleSource) -> Rules:
    """Loads and checks the rules of a source, in the source's thread.

    Raises RulesError, or the exceptions of the source.
    """
    return read_rules(source.load())
