"""A store never grants more of a shared limit than it has rights to, whatever requests and answers come, in any
order.

The input is what a random history is drawn from (property/leased_limits_model.py)."""

from __future__ import annotations

from typing import Any

from fuzz.takes import Drawn
from property.leased_limits_model import History

STEPS_MAX = 100
TOKENS: list[bytes] = []  # an input has no words


def one_input(data: bytes) -> None:
    """Plays the input; raises on any violation."""
    source: Any = Drawn(data)
    history = History(source)
    for _ in range(STEPS_MAX):
        if not source:
            break
        history.step()
    history.end()
