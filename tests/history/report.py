"""What is told of a history that has no explanation: where every attempt at one ends."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable

    from history.operations import Operation

BEFORE = 12  # operations that had ended by then, to be shown


class Way(NamedTuple):
    """One explanation of all operations that had ended before: the state that it leads to, and which of the others it
    has applied.
    """

    state: str
    done: tuple[Operation, ...]


class Violation(NamedTuple):
    """No order of this object's operations explains their answers.

    Up to the end of `stuck` there is none; before it there were, and `ways` are some of them. `under_way`: all that
    might have taken effect, or not yet, when `stuck` ended.
    """

    key: Hashable
    history: tuple[Operation, ...]
    stuck: Operation
    under_way: tuple[Operation, ...]
    ways: tuple[Way, ...]

    def __str__(self) -> str:
        names = {operation: f"#{number}" for number, operation in enumerate(self.shown(), 1)}
        origin = min(operation.started for operation in names)
        earlier = [operation for operation in names if operation not in self.under_way]
        rows = [f"{self.key!r}: no order of its {len(self.history)} operations explains all answers."]
        rows += ["Stuck at the end of", line(self.stuck, names, origin)]
        rows += ["Before that, with what had ended explained, the state was"]
        for state, done in self.ways:
            already = [names[operation] for operation in done]
            rows.append(f"  {state}" + (f", by then done: {' '.join(already)}" if already else ""))
        rows += ["Under way, in µs:", *(line(operation, names, origin) for operation in self.under_way)]
        if earlier:
            rows += ["The last that had ended before:", *(line(operation, names, origin) for operation in earlier)]
        return "\n".join(rows)

    def shown(self) -> tuple[Operation, ...]:
        """The operations that the report shows, by start."""
        by_then = self.stuck.ended or 0
        ended = [
            operation
            for operation in self.history
            if operation.ended is not None and operation.ended <= by_then and operation not in self.under_way
        ]
        latest = sorted(ended, key=lambda operation: operation.ended or 0)[-BEFORE:]
        return tuple(sorted((*latest, *self.under_way), key=lambda operation: operation.started))


def line(operation: Operation, names: dict[Operation, str], origin: int) -> str:
    """A row of a table: the time, the client, the call and its answer."""
    started = f"{(operation.started - origin) / 1000:12.3f}"
    ended = "      ..." if operation.ended is None else f"{(operation.ended - origin) / 1000:.3f}"
    answer = "" if operation.ended is None or operation.answer is None else f" -> {operation.answer}"
    return f"  {names[operation]:>4} {started} - {ended:<12} client {operation.client}: {operation.call}{answer}"
