"""The sentinel protocol: cluster tokens for the clients of Sentinel, by rate, by value and by concurrency.

Floor 2 (ARCHITECTURE.md).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from counterd.contract import Extensions, Figures, Files, ProtocolSpec
from counterd.protocols.sentinel.wire import PORT
from counterd.settings import absolute_path, extension_name, integer, setting
from counterd.tables import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from counterd.contract import PluginHost
    from counterd.protocols.sentinel._store import SentinelStore
    from counterd.protocols.sentinel.rules import Rules
    from counterd.tables import Table

TOKENS_MAX = 1 << 26
PARAM_VALUES_MAX = 1 << 24
QPS_MAX = 1_000_000_000
INTERVAL_MAX_MS = 60_000
RULES_INTERVAL_MAX_S = 86_400
NS_PER_MS = 1_000_000
EXPIRED = "Tokens whose lease expired, by cause: the client was gone (offline) or the call took too long (timeout)."


EXTENSION = "package.module:name or entry point; empty means counterd's own"
MS = integer(1, INTERVAL_MAX_MS)


@dataclass(frozen=True)
class SentinelSettings:
    """The protocol's own settings."""

    rules: str = setting(absolute_path, "", "absolute path; empty means no rules", reload=True)
    rules_interval: int = setting(integer(0, RULES_INTERVAL_MAX_S), 0, "seconds; 0 means no polling", reload=True)
    max_allowed_qps: int = setting(integer(1, QPS_MAX), 30_000, "requests a second", reload=True)
    max_tokens: int = setting(integer(1, TOKENS_MAX), 1 << 20, "tokens")
    max_param_values: int = setting(integer(1, PARAM_VALUES_MAX), 1 << 17, "values")
    sweep_interval: int = setting(MS, 100, "milliseconds", reload=True)
    sweep_max_tokens: int = setting(integer(0, TOKENS_MAX), 100_000, "tokens; 0 means no limit", reload=True)
    sweep_max_duration: int = setting(MS, 50, "milliseconds", reload=True)
    token_service: str = setting(extension_name, "", EXTENSION)
    expire_strategy: str = setting(extension_name, "", EXTENSION)
    rule_source: str = setting(extension_name, "", "package.module:name or entry point; empty means the file")
    extension_timeout: int = setting(MS, 1000, "milliseconds")


def make_store(settings: SentinelSettings, _figures: Figures, now_ns: int) -> SentinelStore:
    """Makes the store for these settings. Clients of this protocol cannot ask for figures of the daemon."""
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
    """Loads the rules in the file, unless an extension is the source of the rules."""
    from counterd.protocols.sentinel.rules import Rules  # noqa: PLC0415 - as above

    if not settings.rule_source:
        store.load_rules(files.get("sentinel.rules", Rules()))


def extend(store: SentinelStore, settings: SentinelSettings, host: PluginHost) -> None:
    """Connects the store to the extensions that the settings name."""
    from counterd.protocols.sentinel import extending  # noqa: PLC0415 - as above

    extending.extend(store, host, settings.extension_timeout)


def reload(store: SentinelStore, settings: SentinelSettings) -> None:
    """Applies the settings that can change while the store runs."""
    store.set_limits(**_limits(settings))


def _limits(settings: SentinelSettings) -> dict[str, int]:
    return {
        "max_allowed_qps": settings.max_allowed_qps,
        "sweep_interval_ns": settings.sweep_interval * NS_PER_MS,
        "sweep_max_tokens": settings.sweep_max_tokens,
        "sweep_max_duration_ns": settings.sweep_max_duration * NS_PER_MS,
    }


def tables() -> tuple[Table, ...]:
    """Returns the tables that people can ask for."""
    from counterd.protocols.sentinel._tables import TABLES  # noqa: PLC0415 - as above

    return TABLES


FIGURES = (
    Figure("rules_flow", "sentinel_rules", "gauge", "Rules, by type.", {"type": "flow"}),
    Figure("rules_param", "sentinel_rules", "gauge", "Rules, by type.", {"type": "param"}),
    Figure("namespaces", "sentinel_namespaces", "gauge", "Namespaces with at least one connection."),
    Figure("tokens", "sentinel_tokens", "gauge", "Tokens that are held, for calls in progress."),
    Figure("tokens_max", "sentinel_tokens_limit", "gauge", "Tokens that can be held at the same time."),
    Figure("granted", "sentinel_tokens_granted_total", "counter", "Tokens that were granted."),
    Figure(
        "released", "sentinel_tokens_released_total", "counter", "Tokens that were released before their lease expired."
    ),
    Figure("kept", "sentinel_tokens_kept_total", "counter", "Leases that clients renewed."),
    Figure(
        "late",
        "sentinel_tokens_late_total",
        "counter",
        "Requests to release or renew a token that arrived after its lease had expired.",
    ),
    Figure("expired_offline", "sentinel_tokens_expired_total", "counter", EXPIRED, {"cause": "offline"}),
    Figure("expired_lease", "sentinel_tokens_expired_total", "counter", EXPIRED, {"cause": "timeout"}),
    Figure("param_values", "sentinel_param_values", "gauge", "Parameter values that are counted."),
    Figure("param_values_max", "sentinel_param_values_limit", "gauge", "Parameter values that can be counted."),
    Figure(
        "calls_pending",
        "sentinel_extension_calls",
        "gauge",
        "Requests that wait for an answer of the extension sentinel.token_service.",
    ),
    Figure(
        "calls_overdue",
        "sentinel_extension_overdue_total",
        "counter",
        "Requests that an extension did not answer in time.",
    ),
    Figure(
        "region",
        "sentinel_region_bytes",
        "gauge",
        "Bytes of address space that are reserved for all tables; memory is used only as they fill.",
    ),
)

PROTOCOL = ProtocolSpec(
    name="sentinel",
    default_port=PORT,
    settings=SentinelSettings,
    make_store=make_store,
    reload=reload,
    figures=FIGURES,
    files=Files({"sentinel.rules": read_rules}, load),
    tables=tables,
    extensions=Extensions(
        {
            "sentinel.token_service": ("request_token", "release_token", "keep_token"),
            "sentinel.expire_strategy": ("expired",),
            "sentinel.rule_source": ("load",),
        },
        extend,
    ),
)
