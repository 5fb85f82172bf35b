"""The sentinel protocol: cluster tokens for the clients of Sentinel, by rate, by value and by concurrency. Floor 2."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from counterd.contract import Extensions, Figures, Files, Room
from counterd.listing import CONNECTION, ROWS, ROWS_MAX, Column, Figure, Table, read_parameters
from counterd.settings import absolute_path, choice, extension_name, integer, setting

if TYPE_CHECKING:
    from collections.abc import Mapping

    from counterd.contract import PluginHost
    from counterd.listing import Walk
    from counterd.protocols.sentinel._store import SentinelStore
    from counterd.protocols.sentinel.rules import Rules

TOKENS_MAX = 1 << 26
PARAM_VALUES_MAX = 1 << 24
QPS_MAX = 1_000_000_000
INTERVAL_MAX_MS = 60_000
RULES_INTERVAL_MAX_S = 86_400
NS_PER_MS = 1_000_000
FLOW_ID_MAX = (1 << 63) - 1
TOKEN_SORTS = ("held", "count")
FLOW_SORTS = ("now", "passed", "blocked", "expired")
EXPIRED = "Tokens whose lease ended: their client had gone, or their call took too long."


EXTENSION = "package.module:name or entry point; empty is counterd's own"
MS = integer(1, INTERVAL_MAX_MS)


@dataclass(frozen=True)
class SentinelSettings:
    """The protocol's own settings."""

    rules: str = setting(absolute_path, "", "absolute path; empty is no rules", reload=True)
    rules_interval: int = setting(integer(0, RULES_INTERVAL_MAX_S), 0, "seconds; 0 is only then", reload=True)
    max_allowed_qps: int = setting(integer(1, QPS_MAX), 30_000, "requests a second", reload=True)
    max_tokens: int = setting(integer(1, TOKENS_MAX), 1 << 20, "tokens")
    max_param_values: int = setting(integer(1, PARAM_VALUES_MAX), 1 << 17, "values")
    sweep_interval: int = setting(MS, 100, "milliseconds", reload=True)
    sweep_max_tokens: int = setting(integer(0, TOKENS_MAX), 100_000, "tokens; 0 is no limit", reload=True)
    sweep_max_duration: int = setting(MS, 50, "milliseconds", reload=True)
    token_service: str = setting(extension_name, "", EXTENSION)
    expire_strategy: str = setting(extension_name, "", EXTENSION)
    rule_source: str = setting(extension_name, "", "package.module:name or entry point; empty is the file")
    extension_timeout: int = setting(MS, 1000, "milliseconds")


def make_store(settings: SentinelSettings, _figures: Figures, now_ns: int) -> SentinelStore:
    """Makes the store for these settings. Clients of this protocol cannot ask for figures of the floors above."""
    from counterd.protocols.sentinel._session import open_store  # noqa: PLC0415 - settings are read before it is built

    return open_store(
        max_tokens=settings.max_tokens,
        max_param_values=settings.max_param_values,
        hash_key=os.urandom(16),
        now_ns=now_ns,
        token_key=os.urandom(16),
        **_limits(settings),
    )


def read_rules(text: bytes) -> Rules:
    """Parses the file of sentinel.rules. Raises RulesError."""
    from counterd.protocols.sentinel.rules import parse_rules  # noqa: PLC0415 - clients import this without rules

    return parse_rules(text)


def load(store: SentinelStore, settings: SentinelSettings, files: Mapping[str, Any]) -> None:
    """Loads the rules of the file, unless an extension is the source of rules."""
    from counterd.protocols.sentinel.rules import Rules  # noqa: PLC0415 - as above

    if not settings.rule_source:
        store.load_rules(files.get("sentinel.rules", Rules()))


def extend(store: SentinelStore, settings: SentinelSettings, host: PluginHost) -> None:
    """Connects the store to the extensions that the settings name."""
    from counterd.protocols.sentinel import extending  # noqa: PLC0415 - as above

    extending.extend(store, host, settings.extension_timeout)


def reload(store: SentinelStore, settings: SentinelSettings) -> None:
    """Applies the settings that may change while the store runs."""
    store.set_limits(**_limits(settings))


def _limits(settings: SentinelSettings) -> dict[str, int]:
    return {
        "max_allowed_qps": settings.max_allowed_qps,
        "sweep_interval_ns": settings.sweep_interval * NS_PER_MS,
        "sweep_max_tokens": settings.sweep_max_tokens,
        "sweep_max_duration_ns": settings.sweep_max_duration * NS_PER_MS,
    }


def open_tokens(store: SentinelStore, parameters: Mapping[str, str]) -> Walk:
    """Begins a walk through the tokens."""
    from counterd.protocols.sentinel._tables import TokensWalk  # noqa: PLC0415 - as above

    readers = {
        "flow": integer(1, FLOW_ID_MAX),
        "connection": CONNECTION,
        "sort": choice(*TOKEN_SORTS),
        "limit": integer(1, ROWS_MAX),
    }
    values = read_parameters(parameters, readers, {"flow": 0, "connection": 0, "sort": TOKEN_SORTS[0], "limit": ROWS})
    return TokensWalk(store, b"", values["limit"], values["sort"], values["flow"], values["connection"])


def open_flows(store: SentinelStore, parameters: Mapping[str, str]) -> Walk:
    """Begins a walk through the flows."""
    from counterd.protocols.sentinel._tables import FlowsWalk  # noqa: PLC0415 - as above

    readers = {"sort": choice(*FLOW_SORTS), "limit": integer(1, ROWS_MAX)}
    values = read_parameters(parameters, readers, {"sort": FLOW_SORTS[0], "limit": ROWS})
    return FlowsWalk(store, b"", values["limit"], values["sort"])


FIGURES = (
    Figure("rules_flow", "sentinel_rules", "gauge", "Rules, by what they limit.", {"type": "flow"}),
    Figure("rules_param", "sentinel_rules", "gauge", "Rules, by what they limit.", {"type": "param"}),
    Figure("namespaces", "sentinel_namespaces", "gauge", "Namespaces that somebody is connected to."),
    Figure("tokens", "sentinel_tokens", "gauge", "Tokens that are out: calls in progress."),
    Figure("tokens_max", "sentinel_tokens_limit", "gauge", "Tokens that can be out."),
    Figure("granted", "sentinel_tokens_granted_total", "counter", "Tokens that were given out."),
    Figure("released", "sentinel_tokens_released_total", "counter", "Tokens that were released in time."),
    Figure("kept", "sentinel_tokens_kept_total", "counter", "Leases that were renewed by a client."),
    Figure("late", "sentinel_tokens_late_total", "counter", "Tokens released or kept when their lease was over."),
    Figure("expired_offline", "sentinel_tokens_expired_total", "counter", EXPIRED, {"cause": "offline"}),
    Figure("expired_lease", "sentinel_tokens_expired_total", "counter", EXPIRED, {"cause": "timeout"}),
    Figure("param_values", "sentinel_param_values", "gauge", "Values of parameters that are counted."),
    Figure("param_values_max", "sentinel_param_values_limit", "gauge", "Values of parameters that can be counted."),
    Figure("calls_pending", "sentinel_extension_calls", "gauge", "Requests that a token service has yet to answer."),
    Figure("calls_overdue", "sentinel_extension_overdue_total", "counter", "What extensions did not answer in time."),
    Figure("region", "sentinel_region_bytes", "gauge", "Size of the mapping that has everything in it."),
)

TABLES = (
    Table(
        "tokens",
        "The calls that are in progress, those first that take longest, or have the largest count.",
        (
            Column("token", "text", "its id"),
            Column("flow", "text", "the id of its rule"),
            Column("count", "integer", "how much of the flow it stands for"),
            Column("connection", "connection", "who has it"),
            Column("held", "seconds", "since when it has been out"),
            Column("left", "seconds", "until its lease is over; below zero, until the next sweep"),
            Column("kept", "integer", "how often its lease was renewed by a client"),
        ),
        TOKEN_SORTS,
        open_tokens,
        ("flow", "connection"),
    ),
    Table(
        "flows",
        "The flows, those first that have most of what `sort` says.",
        (
            Column("flow", "text", "its id"),
            Column("resource", "name", "what its rule calls it"),
            Column("limits", "text", "concurrency or qps; or there is no rule any more, and tokens are out"),
            Column("threshold", "integer", "calls at once, or a second, with those that are connected now"),
            Column("now", "integer", "calls that are in progress"),
            Column("passed", "integer", "calls that were let through, since the start"),
            Column("blocked", "integer", "calls that were refused"),
            Column("waiting", "integer", "calls that were told to wait"),
            Column("expired", "integer", "calls whose lease ended before they did"),
        ),
        FLOW_SORTS,
        open_flows,
    ),
)

ROOM = Room(
    name="sentinel",
    default_port=18730,
    settings=SentinelSettings,
    make_store=make_store,
    reload=reload,
    figures=FIGURES,
    files=Files({"sentinel.rules": read_rules}, load),
    tables=TABLES,
    extensions=Extensions(
        {
            "sentinel.token_service": ("request_token", "release_token", "keep_token"),
            "sentinel.expire_strategy": ("expired",),
            "sentinel.rule_source": ("load",),
        },
        extend,
    ),
)
