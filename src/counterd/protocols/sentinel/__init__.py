"""The sentinel room: cluster tokens for the clients of Sentinel, by rate, by value and by concurrency. Floor 2."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from counterd.protocols import Figures, Room
from counterd.settings import Setting, absolute_path, integer, python_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    from counterd.protocols.sentinel._store import SentinelStore
    from counterd.protocols.sentinel.rules import Rules

TOKENS_MAX = 1 << 26
PARAM_VALUES_MAX = 1 << 24
QPS_MAX = 1_000_000_000
INTERVAL_MAX_MS = 60_000
RULES_INTERVAL_MAX_S = 86_400
NS_PER_MS = 1_000_000


def make_store(values: Mapping[str, Any], _figures: Figures) -> SentinelStore:
    """The store for the effective configuration; no client can ask for figures of the floors above."""
    from counterd.protocols.sentinel._room import open_store  # noqa: PLC0415 - settings are read before it is built

    return open_store(
        max_tokens=values["sentinel.max_tokens"],
        max_param_values=values["sentinel.max_param_values"],
        hash_key=os.urandom(16),
        token_key=os.urandom(16),
        **_limits(values),
    )


def read_rules(text: bytes) -> Rules:
    """What is in the file of sentinel.rules. Raises RulesError."""
    from counterd.protocols.sentinel.rules import parse_rules  # noqa: PLC0415 - clients come by here, without rules

    return parse_rules(text)


def load(store: SentinelStore, values: Mapping[str, Any], files: Mapping[str, Any]) -> None:
    """Takes over the rules of the file, unless they come from elsewhere."""
    from counterd.protocols.sentinel.rules import Rules  # noqa: PLC0415 - as above

    if not values["sentinel.rule_source"]:
        store.load_rules(files.get("sentinel.rules", Rules()))


def reload(store: SentinelStore, values: Mapping[str, Any]) -> None:
    """Applies what may change while the store runs."""
    store.set_limits(**_limits(values))


def _limits(values: Mapping[str, Any]) -> dict[str, int]:
    return {
        "max_allowed_qps": values["sentinel.max_allowed_qps"],
        "sweep_interval_ns": values["sentinel.sweep_interval"] * NS_PER_MS,
        "sweep_max_tokens": values["sentinel.sweep_max_tokens"],
        "sweep_max_duration_ns": values["sentinel.sweep_max_duration"] * NS_PER_MS,
    }


PLUG_IN = "package.module:name; empty is counterd's own"
MS = integer(1, INTERVAL_MAX_MS)

ROOM = Room(
    name="sentinel",
    default_port=18730,
    settings=(
        Setting("sentinel.rules", absolute_path, "", "absolute path; empty is no rules", reload=True),
        Setting("sentinel.rules_interval", integer(0, RULES_INTERVAL_MAX_S), 0, "seconds; 0 is only then", reload=True),
        Setting("sentinel.max_allowed_qps", integer(1, QPS_MAX), 30_000, "requests a second", reload=True),
        Setting("sentinel.max_tokens", integer(1, TOKENS_MAX), 1 << 20, "tokens"),
        Setting("sentinel.max_param_values", integer(1, PARAM_VALUES_MAX), 1 << 17, "values"),
        Setting("sentinel.sweep_interval", MS, 100, "milliseconds", reload=True),
        Setting("sentinel.sweep_max_tokens", integer(0, TOKENS_MAX), 100_000, "tokens; 0 is no limit", reload=True),
        Setting("sentinel.sweep_max_duration", MS, 50, "milliseconds", reload=True),
        Setting("sentinel.token_service", python_name, "", PLUG_IN),
        Setting("sentinel.expire_strategy", python_name, "", PLUG_IN),
        Setting("sentinel.rule_source", python_name, "", "package.module:name; empty is the file sentinel.rules"),
        Setting("sentinel.extension_timeout", MS, 1000, "milliseconds"),
    ),
    make_store=make_store,
    reload=reload,
    files={"sentinel.rules": read_rules},
    load=load,
)
