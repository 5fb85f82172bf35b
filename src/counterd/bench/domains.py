"""The domains of a smockron master that a load sends messages about, and the rules that the master needs for them.

A side, pure Python.
"""

from __future__ import annotations

import json

DOMAIN = b"counterbench"  # where nobody has to wait
CONTROL_DOMAIN = b"counterbench-control"  # where a control message follows each accounting message


def domain_rules(maximum: int) -> str:
    """JSON for smockron.rules. maximum: requests a second of each identifier, and as many ahead of that."""
    rules = {DOMAIN: {"rate": f"{maximum}/sec", "burst": maximum}, CONTROL_DOMAIN: {"interval": "100 ms", "burst": 0}}
    return json.dumps({name.decode(): rule for name, rule in rules.items()}, indent=1) + "\n"
