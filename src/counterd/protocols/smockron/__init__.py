"""The smockron protocol: a master that tells gatekeepers which identifiers to delay, over ZMTP. Floor 2."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from counterd.contract import Figures, Files, Room, Shared
from counterd.listing import ROWS, ROWS_MAX, Column, Figure, Table, name_of_bytes, ranked_parameters, read_parameters
from counterd.settings import absolute_path, integer, redis_url, setting, size, socket_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from counterd.listing import Walk
    from counterd.protocols.smockron._store import SmockronStore
    from counterd.protocols.smockron.rules import Rules

IDENTIFIERS_MAX = 1 << 28
MESSAGE_MIN, MESSAGE_MAX = 1 << 13, 1 << 24  # the longest identifier has to fit
QUEUED_MIN, QUEUED_MAX = 1 << 16, 1 << 30
REDIS = "redis://HOST:PORT/DATABASE, rediss:// for TLS, unix:///PATH?db=N; empty is in memory"
DOMAIN_SORTS = ("told", "accepted", "delayed", "rejected", "identifiers")  # as in _tables.pyx


@dataclass(frozen=True)
class SmockronSettings:
    """The protocol's own settings."""

    control_port: int = setting(integer(0, 65535), 10005, "TCP port; 0 is any free one")
    control_socket: str = setting(socket_path, "", "absolute path; empty is no Unix socket")
    state: str = setting(redis_url, "", REDIS, secret=True)
    rules: str = setting(absolute_path, "", "absolute path of a file; empty is no domain", reload=True)
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
    """Loads the rules of the file."""
    store.load_rules(files.get("smockron.rules", {}))


def reload(store: SmockronStore, settings: SmockronSettings) -> None:
    """Applies the settings that may change while the store runs."""
    store.limit_posted(settings.max_queued)


def open_throttled(store: SmockronStore, parameters: Mapping[str, str]) -> Walk:
    """Begins a walk through the identifiers that have to wait."""
    from counterd.protocols.smockron._tables import ThrottledWalk  # noqa: PLC0415 - as above

    readers = {"match": name_of_bytes, "limit": integer(1, ROWS_MAX)}
    values = read_parameters(parameters, readers, {"match": b"", "limit": ROWS})
    return ThrottledWalk(store, values["match"], values["limit"])


def open_domains(store: SmockronStore, parameters: Mapping[str, str]) -> Walk:
    """Begins a walk through the domains."""
    from counterd.protocols.smockron._tables import DomainsWalk  # noqa: PLC0415 - as above

    match, sort, limit = ranked_parameters(parameters, DOMAIN_SORTS)
    return DomainsWalk(store, match, limit, sort)


BROKEN = "Connections that were closed for what they sent."

FIGURES = (
    Figure("identifiers", "smockron_identifiers", "gauge", "Identifiers in memory."),
    Figure("identifiers_max", "smockron_identifiers_limit", "gauge", "Identifiers that memory has room for."),
    Figure("expired", "smockron_expired_total", "counter", "Identifiers that expired."),
    Figure("evicted", "smockron_evicted_total", "counter", "Identifiers that were forgotten to make room for others."),
    Figure("domains", "smockron_domains", "gauge", "Domains, with those that have identifiers but no rule any more."),
    Figure("subscriptions", "smockron_subscriptions", "gauge", "Subscriptions of gatekeepers to control messages."),
    Figure("published", "smockron_control_total", "counter", "Control messages."),
    Figure("delivered", "smockron_control_sent_total", "counter", "Control messages delivered to subscribers."),
    Figure("lost", "smockron_control_lost_total", "counter", "Deliveries lost because the subscriber did not read."),
    Figure("silent", "smockron_silent_total", "counter", "Connections that were silent for longer than they said."),
    Figure("broken:not_zmtp", "smockron_broken_total", "counter", BROKEN, {"cause": "not_zmtp"}),
    Figure("broken:old_version", "smockron_broken_total", "counter", BROKEN, {"cause": "old_version"}),
    Figure("broken:mechanism", "smockron_broken_total", "counter", BROKEN, {"cause": "mechanism"}),
    Figure("broken:flags", "smockron_broken_total", "counter", BROKEN, {"cause": "flags"}),
    Figure("broken:too_long", "smockron_broken_total", "counter", BROKEN, {"cause": "too_long"}),
    Figure("broken:too_many_frames", "smockron_broken_total", "counter", BROKEN, {"cause": "too_many_frames"}),
    Figure("asking", "smockron_state_waiting", "gauge", "Requests that Redis is yet to decide about."),
    Figure("alone", "smockron_state_failing", "gauge", "1 while Redis is unavailable: this master decides alone."),
    Figure("longest_probe", "smockron_table_longest_probe", "gauge", "Slots that an insertion looked past, at most."),
    Figure(
        "region", "smockron_region_bytes", "gauge", "Size of the mapping that has everything in it; used as needed."
    ),
)

TABLES = (
    Table(
        "throttled",
        "The identifiers that have to wait, those first that wait longest; `match` has to be in their names.",
        (
            Column("identifier", "name", "what gatekeepers call it"),
            Column("domain", "name", "the domain that it has to wait in"),
            Column("wait", "seconds", "until its next request is let through at once"),
        ),
        (),
        open_throttled,
        ("match",),
    ),
    Table(
        "domains",
        "The domains, those first in which most was told to wait, or in another order.",
        (
            Column("domain", "name", "its name"),
            Column("interval", "seconds", "what a request uses up; 0 if no rule is for it any more"),
            Column("burst", "seconds", "how far requests can be ahead of that"),
            Column("identifiers", "integer", "that something is known of"),
            Column("accepted", "integer", "requests that were let through"),
            Column("delayed", "integer", "requests that were let through later"),
            Column("rejected", "integer", "requests that were not, as far as gatekeepers say so"),
            Column("told", "integer", "control messages: DELAY_UNTIL"),
        ),
        DOMAIN_SORTS,
        open_domains,
        metrics=(
            Figure("accepted", "smockron_domain_accepted_total", "counter", "Requests that were let through."),
            Figure("delayed", "smockron_domain_delayed_total", "counter", "Requests that were let through later."),
            Figure("rejected", "smockron_domain_rejected_total", "counter", "Requests that were not."),
            Figure("told", "smockron_domain_throttled_total", "counter", "Control messages: DELAY_UNTIL."),
        ),
    ),
)

ROOM = Room(
    name="smockron",
    default_port=10004,
    settings=SmockronSettings,
    make_store=make_store,
    reload=reload,
    figures=FIGURES,
    files=Files({"smockron.rules": read_rules}, load),
    tables=TABLES,
    shared=Shared("smockron.state", "counterd.protocols.smockron.shared"),
    ports=("control",),
)
