"""Takes keep their promises for any requests, in any order; and raw bytes in the extensions' requests break nothing.

The input is what the history of the property test is drawn from (property/takes_history.py). Between its steps there
are raw frames, to which the engine has to reply with something, or nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from counterd.protocols.counter import wire
from counterd.protocols.counter.wire import OnDeath, Permit, Rate
from fuzz.stream import Source, fenced
from kit.takes import Desk
from property.takes_history import History

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS_MAX = 60
OPCODES = [opcode for opcode in wire.Opcode if opcode >= wire.Opcode.TAKE]
EXTRA = Permit(b"extra", 1, 1)  # of which the history knows nothing

TOKENS = [
    wire.take(1, [EXTRA])[12:],
    wire.take(1, [Rate(b"r", 1, 2, 3, 4, OnDeath.REFUNDED), EXTRA], 5, key=b"key", weight=6, priority=7)[12:],
    wire.take(1, [EXTRA, Rate(b"x", 1), Rate(b"y", 2, on_death=OnDeath.CHARGED)], 5)[12:],
    wire.settle(1, 2, b"r", 3)[12:],
    wire.resume(1, 2)[12:],
    wire.resume(1, 2, b"\0\0\0\1" + bytes(8), 3)[12:],
    wire.who(1, "name")[12:],
    wire.held(1, b"r")[12:],
]


class Drawn(Source):
    """An input as the source of a random history."""

    def random(self) -> float:
        return self.byte() / 256

    def randint(self, least: int, most: int) -> int:
        return least + self.byte() % (most - least + 1)

    def randrange(self, end: int) -> int:
        return int(self.random() * end)

    def getrandbits(self, bits: int) -> int:
        return int.from_bytes(self.take(2), "little") % (1 << bits)

    def choices(self, options: Sequence[Any], weights: Sequence[float]) -> list[Any]:
        left = self.random() * sum(weights)
        for option, weight in zip(options, weights, strict=True):
            left -= weight
            if left < 0:
                return [option]
        return [options[-1]]

    def sample(self, options: Sequence[Any], count: int) -> list[Any]:
        left = list(options)
        return [left.pop(self.byte() % len(left)) for _ in range(count)]


def one_input(data: bytes) -> None:
    """Plays the input; raises on any violation."""
    source = Drawn(data)
    history, others = History(source), Desk()
    others.pump.cut = lambda frame: map(fenced, source.pieces(frame))
    others.store.limit_resumptions(1)
    for _ in range(STEPS_MAX):
        if not source:
            break
        history.step()
        if source.byte() % 4 == 0:
            frame = wire.frame(source.choice(OPCODES), 0, source.take(source.byte() % 64))
            stranger = others.taker()
            stranger.send(frame)
            assert stranger.answers
            stranger.close()
    history.end()
