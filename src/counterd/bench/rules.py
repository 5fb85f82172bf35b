"""The rules that a server needs for a load, by protocol.

A side, pure Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from counterd.bench.domains import domain_rules
from counterd.bench.flows import rules_of

if TYPE_CHECKING:
    from collections.abc import Callable

RULES_HELP = """Prints the rules that a server needs for a load, for a file that sentinel.rules or smockron.rules names.

With sentinel they have as many flows of each kind, with that maximum; rates need a higher sentinel.max_allowed_qps,
too. With smockron they have two domains: one for account, with that maximum a second, and one for control."""
RULES: dict[str, Callable[[int, int], str]] = {  # by the number of names, and the maximum
    "sentinel": rules_of,
    "smockron": lambda _, maximum: domain_rules(maximum),
}
