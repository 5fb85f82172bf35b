"""The smockron protocol: a master that tells gatekeepers which identifiers to delay, over ZMTP.

Floor 2 (ARCHITECTURE.md).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from counterd.contract import Figures, Files, ProtocolSpec, Shared
from counterd.protocols.smockron.wire import PORT
from counterd.settings import absolute_path, integer, redis_url, setting, size, socket_path
from counterd.tables import Figure

if TYPE_CHECKING:
    from collections.abc import Mapping

    from counterd.protocols.smockron._store import SmockronStore
    from counterd.protocols.smockron.rules import Rules
    from counterd.tables import Table

IDENTIFIERS_MAX = 1 << 28
MESSAGE_MIN, MESSAGE_MAX = 1 << 13, 1 << 24  # the longest identifier has to fit
QUEUED_MIN, QUEUED_MAX = 1 << 16, 1 << 30
REDIS = "redis://HOST:PORT/DATABASE, rediss:// for TLS, unix:///PATH?db=N; empty means in memory"


@dataclass(frozen=True)
class SmockronSettings:
    """The settings that only this protocol has."""

    control_port: int = setting(integer(0, 65535), PORT + 1, "TCP port; 0 means that the kernel chooses a free port")
    control_socket: str = setting(socket_path, "", "absolute path; empty means no Unix socket")
    state: str = setting(redis_url, "", REDIS, secret=True)
    rules: str = setting(absolute_path, "", "absolute path of a file; empty means that there is no domain", reload=True)
    max_identifiers: int = setting(integer(1, IDENTIFIERS_MAX), 1_000_000)
    max_message_size: int = setting(size(MESSAGE_MIN, MESSAGE_MAX), 1 << 16, "bytes")
    max_queued: int = setting(size(QUEUED_MIN, QUEUED_MAX), 1 << 20, "bytes", reload=True)


def make_store(settings: SmockronSettings, _figures: Figures, now_ns: int) -> SmockronStore:
    """Makes the store for these settings."""
    from counterd.protocols.smockron._session import open_store  # noqa: PLC0415 - settings are read before it is built

    return open_store(
        identifiers=settings.max_identifiers,
        message_max=settings.max_message_size,
        posted_max=settings.max_queued,
        hash_key=os.urandom(16),
        now_ns=now_ns,
    )


def read_rules(text: bytes) -> Rules:
    """Parses the file of smockron.rules. Raises DocumentError."""
    from counterd.protocols.smockron.rules import parse_rules  # noqa: PLC0415 - clients import this without rules

    return parse_rules(text)


def load(store: SmockronStore, _settings: SmockronSettings, files: Mapping[str, Any]) -> None:
    """Loads the rules in the file."""
    store.load_rules(files.get("smockron.rules", {}))


def reload(store: SmockronStore, settings: SmockronSettings) -> None:
    """Applies the settings that can change while the store runs."""
    store.limit_posted(settings.max_queued)


def tables() -> tuple[Table, ...]:
    """Returns the tables that people can ask for."""
    from counterd.protocols.smockron._tables import TABLES  # noqa: PLC0415 - as above

    return TABLES


BROKEN = "Connections that were closed because of a protocol error, by cause."

FIGURES = (
    Figure("identifiers", "smockron_identifiers", "gauge", "Identifiers in memory."),
    Figure("identifiers_max", "smockron_identifiers_limit", "gauge", "Identifiers that can be in memory."),
    Figure("expired", "smockron_expired_total", "counter", "Identifiers that expired."),
    Figure("evicted", "smockron_evicted_total", "counter", "Identifiers that were forgotten to make room for others."),
    Figure(
        "domains", "smockron_domains", "gauge", "Domains, including domains without a rule that still have identifiers."
    ),
    Figure("subscriptions", "smockron_subscriptions", "gauge", "Subscriptions of gatekeepers to control messages."),
    Figure("published", "smockron_control_total", "counter", "Control messages that were published."),
    Figure(
        "delivered", "smockron_control_sent_total", "counter", "Control messages that were delivered to subscribers."
    ),
    Figure(
        "lost",
        "smockron_control_lost_total",
        "counter",
        "Deliveries of control messages that were lost because the subscriber did not read its connection.",
    ),
    Figure(
        "silent",
        "smockron_silent_total",
        "counter",
        "Connections that were closed because the peer was silent for longer than the TTL of its PING.",
    ),
    Figure("broken:not_zmtp", "smockron_broken_total", "counter", BROKEN, {"cause": "not_zmtp"}),
    Figure("broken:old_version", "smockron_broken_total", "counter", BROKEN, {"cause": "old_version"}),
    Figure("broken:mechanism", "smockron_broken_total", "counter", BROKEN, {"cause": "mechanism"}),
    Figure("broken:flags", "smockron_broken_total", "counter", BROKEN, {"cause": "flags"}),
    Figure("broken:too_long", "smockron_broken_total", "counter", BROKEN, {"cause": "too_long"}),
    Figure("broken:too_many_frames", "smockron_broken_total", "counter", BROKEN, {"cause": "too_many_frames"}),
    Figure("asking", "smockron_state_waiting", "gauge", "Requests that wait for a decision of Redis."),
    Figure("alone", "smockron_state_failing", "gauge", "1 if Redis is unavailable and this master decides by itself."),
    Figure(
        "longest_probe", "smockron_table_longest_probe", "gauge", "Longest probe sequence of the hash table, in slots."
    ),
    Figure(
        "region",
        "smockron_region_bytes",
        "gauge",
        "Bytes of address space that are reserved for all tables; memory is used only as they fill.",
    ),
)

PROTOCOL = ProtocolSpec(
    name="smockron",
    default_port=PORT,
    settings=SmockronSettings,
    make_store=make_store,
    reload=reload,
    figures=FIGURES,
    files=Files({"smockron.rules": read_rules}, load),
    tables=tables,
    shared=Shared("smockron.state", "counterd.protocols.smockron.shared"),
    ports=("control",),
)
