"""Worlds one after the other, and what is told of them."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING

from kit.promises import Violation
from simulation.beanstalk import BeanstalkWorld
from simulation.counter import CounterWorld
from simulation.lent import LentWorld
from simulation.sentinel import SentinelWorld
from simulation.smockron import SmockronWorld
from simulation.takes import TakesWorld
from simulation.throttr import ThrottrWorld

if TYPE_CHECKING:
    from collections.abc import Callable

    from simulation.world import World

PROTOCOLS: dict[str, type[World]] = {
    "beanstalk": BeanstalkWorld,
    "counter": CounterWorld,
    "lent": LentWorld,
    "sentinel": SentinelWorld,
    "smockron": SmockronWorld,
    "takes": TakesWorld,
    "throttr": ThrottrWorld,
}
WORLD_STEPS = 20_000  # of one world, about: each ends with everybody gone


def simulate(protocol: str, steps: int, seed: int, worlds: int, clock: Callable[[], float]) -> bool:
    """So many steps at least, unless `worlds` are enough; False if a promise was broken, which is then told."""
    started = clock()
    done = sessions = count = digest = 0
    first = seed
    while done < steps and not (worlds and count == worlds):
        world = PROTOCOLS[protocol](seed)
        try:
            world.run(min(WORLD_STEPS, steps))
        except Exception as error:  # noqa: BLE001 - whatever it is, its seed has to be told
            tell(world, error, min(WORLD_STEPS, steps))
            print(f"simulation: {protocol}, {done + world.steps:,} steps, 1 violation, seed {seed}", flush=True)
            return False
        done += world.steps
        sessions += world.sessions
        digest ^= world.digest * (count + 1)
        count += 1
        seed += 1
        if count % 10 == 0:
            print(f"{protocol}: {done:,} steps, {count} worlds", file=sys.stderr, flush=True)
    minutes = max(clock() - started, 1e-9) / 60
    print(
        f"simulation: {protocol}, {done:,} steps, {count} worlds, {sessions:,} sessions, 0 violations, "
        f"seeds {first} to {seed - 1}, digest {digest & 0xFFFFFFFF:08x}, "
        f"{done / minutes / 1e6:.1f} million steps a minute of the processor's time",
        flush=True,
    )
    return True


def tell(world: World, error: Exception, steps: int) -> None:
    """What led to a violation, and how to see it again."""
    if not isinstance(error, Violation):
        traceback.print_exception(type(error), error, error.__traceback__)
    print(f"seed {world.seed}, step {world.steps}: {error}")
    for step, now, what, link, size in world.trail:
        print(f"  step {step} at {now / 1e9:.9f} s: {what}{f' of connection {link}' if link else ''}, {size}")
    print(f"again: python tests/simulation --protocol {world.name} --seed {world.seed} --worlds 1 --steps {steps}")
