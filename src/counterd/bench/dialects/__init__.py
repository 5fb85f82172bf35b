"""Finds the dialects in this folder: those of counterd's protocols, and those of other servers.

Floor 5 (ARCHITECTURE.md), pure Python. NAME.py exports DIALECT, and _NAME.pyx beside it has the LoadCodec. A dialect of
a protocol needs only the wire.py of this protocol, and the rest of counterbench names no dialect: deleting both files
removes it.
"""

from __future__ import annotations

import importlib
import pkgutil

from counterd.bench.dialect import Dialect


def _found() -> dict[str, Dialect]:
    """Returns the dialects by name, in the order in which people see them."""
    modules = [f"{__name__}.{each.name}" for each in pkgutil.iter_modules(__path__) if not each.name.startswith("_")]
    dialects: list[Dialect] = [importlib.import_module(module).DIALECT for module in modules]
    return {dialect.name: dialect for dialect in sorted(dialects, key=lambda each: each.order)}


DIALECTS = _found()
OPS = tuple(dict.fromkeys(op for dialect in DIALECTS.values() for op in dialect.ops))  # all that a mix can contain
PROTOCOL_HELP = " ".join(
    (
        "The protocol of the server: one of counterd's, or for comparisons redis, redis-lua or memcached.",
        *(each.help for each in DIALECTS.values() if each.help),
        "redis has a counterpart of all requests for counters and keys,",
        "redis-lua has the usual scripts for semaphores and rates,",
        "and memcached has incr, decr and get.",
    )
)
OPS_HELP = " ".join(
    (
        "acquire-release (alternately), acquire, release, get, noop, or mix:acquire=5,release=5,get=1.",
        *(f"With {name}: {each.ops_help}." for name, each in DIALECTS.items() if each.ops_help),
        f"[default: {Dialect.work};",
        "; ".join(f"{each.work} with {name}" for name, each in DIALECTS.items() if each.work != Dialect.work) + "]",
    )
)
RULES = {name: each.rules for name, each in DIALECTS.items() if each.rules is not None}
_FILES = " or ".join(f"{name}.rules" for name in RULES)
RULES_HELP = f"Prints the rules that a server needs for a load, for the file in {_FILES}.\n\n" + " ".join(
    f"With {name} {rules.help}" for name, rules in RULES.items()
)
