"""The configuration files of yrmcds, which counterd can use unchanged.

Floor 2 (ARCHITECTURE.md), without file access. yrmcds serves memcache too; the keys for that are ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterd.contract import ForeignFile
from counterd.settings import Setting, addresses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

KEYS: dict[str, str | None] = {
    "log.threshold": "log.level",
    "virtual_ip": "virtual_ip",
    "bind_ip": "bind_ip",
    "port": None,
    "repl_port": None,
    "max_connections": None,
    "temp_dir": None,
    "log.file": None,
    "buckets": None,
    "max_data_size": None,
    "heap_data_limit": None,
    "repl_buffer_size": None,
    "initial_repl_sleep_delay_usec": None,
    "secure_erase": None,
    "lock_memory": None,
    "memory_limit": None,
    "workers": None,
    "gc_interval": None,
    "slave_timeout": None,
}
BIND = "counter.bind"
INSECURE = "counter.insecure"
EVERYWHERE = ("0.0.0.0", "::")


def translate(values: dict[str, Any], given: dict[str, Any], exposed: Callable[[], Sequence[str]]) -> Iterator[str]:
    """Turns virtual_ip and bind_ip into counter.bind, unless counter.bind is set too. Yields warnings for the operator.

    yrmcds serves every client that can connect to it. So a yrmcds configuration implies counter.insecure = true. In a
    case that counterd would normally refuse, this function yields a warning.
    """
    listed = tuple(dict.fromkeys(values.pop("virtual_ip", ()) + values.pop("bind_ip", ())))
    if BIND in given:
        return
    values[BIND] = listed or EVERYWHERE
    for name in ("bind_ip", "virtual_ip"):
        if name in given:
            given.setdefault(BIND, given[name])
    if listed and "bind_ip" not in given:
        only = " ".join(listed)
        yield f"bind_ip is not set: counter listens only on virtual_ip ({only}), but yrmcds listens on all addresses"
    if INSECURE not in given and (open_to := " ".join(exposed())):
        values[INSECURE] = True
        where, ways = open_to, "counter.tls.cert or counter.allow"
        if not listed:
            where, ways = f"ALL addresses ({open_to})", f"{BIND} or bind_ip, {ways}"
        reach = "so everybody who can reach this machine can use it"
        yield f"counter listens on {where}, as yrmcds does, {reach}; set {ways}"


FILE = ForeignFile("yrmcds", KEYS, tuple(Setting(key, addresses, ()) for key in ("virtual_ip", "bind_ip")), translate)
