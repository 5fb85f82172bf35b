"""What chaos does, to whom and when: a schedule that comes from seed and round alone, and who plays it.

A fault that lasts is healed after a while, and at the end of its round at the latest. A client's own faults (resets,
garbage, slow reading) are done by its process, which is told to; the rest is done from outside.
"""

from __future__ import annotations

import random
import signal
import time
from typing import TYPE_CHECKING, NamedTuple

import daemon
from chaos.world import LONG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from chaos.crew import Crew
    from chaos.world import World

# How often each is chosen, among all.
BY_CLIENT = {
    "reset": 10, "half_close": 8, "close": 4, "truncated": 8, "garbage": 6, "slow": 3, "fill": 2,
}  # fmt: skip
BY_DRIVER = {"kill": 8, "stop_client": 6, "stop_server": 3, "descriptors": 2, "reload": 3, "bad_reload": 2}
BY_LINK = {"delay": 3, "loss": 3, "cut": 2}
BY_FAR_CLIENT = {"vanish": 4}
BY_CLOCK = {"clock": 2}
SPANS_S = {
    "stop_client": (0.1, 1.0), "stop_server": (0.05, 0.5), "descriptors": (0.2, 0.6), "reload": (0.3, 1.0),
    "delay": (0.5, 2.0), "loss": (0.5, 2.0), "cut": (1.0, 5.0), "clock": (0.2, 1.0),
}  # fmt: skip
STEPS_S = (-86_400, -3600, -10, 10, 3600, 86_400)
INTRUDERS = 40
CHANGES: tuple[dict[str, object], ...] = (
    {"counter.holdings_per_connection": 12},
    {"counter.max_requests_per_second": 300, "throttr.max_requests_per_second": 300},
    {"counter.max_connections_per_address": 3},
    {"throttr.max_queued": "8K", "counter.keepalive_idle": 2},
)
# With what would throw them all out, if it were taken over.
MISTAKES: tuple[dict[str, object], ...] = (
    {"counter.max_conections": 1, "counter.idle_timeout": 1},
    {"counter.idle_timeout": "soon", "throttr.max_connections": 1},
    {"counter.tls.cert": "/nowhere.pem", "counter.allow": "192.0.2.1"},
)


class Fault(NamedTuple):
    """at: part of the round that has gone. slot, which: whose, and which of its connections. chance: for the rest."""

    kind: str
    at: float
    slot: int
    which: int
    chance: float

    def __str__(self) -> str:
        return f"{self.at:4.2f} {self.kind} slot {self.slot}.{self.which}"

    def choose(self, choices: Sequence[object]) -> int:
        return int(self.chance * len(choices))


def kinds(world: World) -> dict[str, int]:
    """Those that can be had here."""
    found = {**BY_CLIENT, **BY_DRIVER}
    if world.link is not None:
        found |= BY_FAR_CLIENT | (BY_LINK if world.link.means else {"cut": BY_LINK["cut"]})
    return found | (BY_CLOCK if world.shift else {})


def schedule(seed: str, number: int, count: int, slots: int, weights: dict[str, int]) -> list[Fault]:
    """Of a round. The first round has each kind once, so that whatever a kind makes the daemon keep, it has by then."""
    chance = random.Random(f"{seed} {number}")
    chosen = sorted(weights)
    if number > 0:
        chosen = chance.choices(chosen, [weights[kind] for kind in chosen], k=count)
    chance.shuffle(chosen)
    moments = sorted(chance.random() for _ in chosen)
    return [
        Fault(kind, at, chance.randrange(slots), chance.randrange(1 << 16), chance.random())
        for kind, at in zip(chosen, moments, strict=True)
    ]


class Driver:
    """Plays one round's schedule. disturbed_ns: when the link was first disturbed."""

    def __init__(self, world: World, crew: Crew) -> None:
        self.world = world
        self.crew = crew
        self.disturbed_ns: int | None = None
        self._lasting: dict[Hashable, tuple[float, Callable[[], object]]] = {}
        self._has_reloaded = False

    def play(self, faults: Sequence[Fault], seconds: float) -> None:
        begun = time.monotonic()
        for fault in faults:
            self.wait(begun + fault.at * seconds)
            if fault.kind in BY_CLIENT:
                self.crew.tell(fault.slot, "do", fault.kind, fault.which)
            elif fault.kind in BY_LINK:
                self._disturb(fault)
            else:
                getattr(self, f"_{fault.kind}")(fault)
        self.wait(begun + seconds)

    def wait(self, until_s: float) -> None:
        """Heals meanwhile what is due."""
        while True:
            now_s = time.monotonic()
            for key in [key for key, (due_s, _) in self._lasting.items() if due_s <= now_s]:
                self._heal(key)
            if now_s >= until_s:
                return
            time.sleep(min(0.01, until_s - now_s))

    def heal(self) -> None:
        """Everything; and the configuration is again what it was."""
        for key in list(self._lasting):
            self._heal(key)
        counterd = self.world.counterd
        if self._has_reloaded:
            before = len(counterd.lines(" reloaded "))
            counterd.config.write_text(daemon.config_text(self.world.settings))
            counterd.send_signal(signal.SIGHUP)
            counterd.wait_for_log(" reloaded ", before + 1, LONG_S)

    # ---- each kind ----

    def _kill(self, fault: Fault) -> None:
        self._heal(("stop_client", fault.slot))
        self.crew.replace(fault.slot)

    def _vanish(self, fault: Fault) -> None:
        """Only from another host: who is on this one is not probed, for it cannot."""
        far = [place for place, slot in enumerate(self.crew.slots) if slot.place == "far"]
        self.crew.tell(far[fault.choose(far)], "do", fault.kind, fault.which)

    def _stop_client(self, fault: Fault) -> None:
        worker = self.crew.stop(fault.slot)
        self._lasts(fault, lambda: worker.send_signal(signal.SIGCONT), ("stop_client", fault.slot))

    def _stop_server(self, fault: Fault) -> None:
        self.world.counterd.send_signal(signal.SIGSTOP)
        self._lasts(fault, lambda: self.world.counterd.send_signal(signal.SIGCONT), fault.kind)

    def _descriptors(self, fault: Fault) -> None:
        self._heal(fault.kind)
        limits = self.world.starve(int(fault.chance * 4))
        intruders = self.world.intrude(INTRUDERS)

        def heal() -> None:
            for intruder in intruders:
                intruder.close()
            self.world.feed(limits)

        self._lasts(fault, heal, fault.kind)

    def _reload(self, fault: Fault) -> None:
        self._write(CHANGES[fault.choose(CHANGES)])
        self._lasts(fault, lambda: self._write({}), fault.kind)

    def _bad_reload(self, fault: Fault) -> None:
        self._heal("reload")
        self._write(MISTAKES[fault.choose(MISTAKES)])

    def _write(self, changes: dict[str, object]) -> None:
        counterd = self.world.counterd
        self._has_reloaded = True
        counterd.config.write_text(daemon.config_text({**self.world.settings, **changes}))
        counterd.send_signal(signal.SIGHUP)

    def _disturb(self, fault: Fault) -> None:
        link = self.world.link
        assert link is not None
        self._heal("link")
        if self.disturbed_ns is None:
            self.disturbed_ns = time.monotonic_ns()
        if fault.kind == "cut":
            link.cut(loses_power=fault.chance < 0.5)
        else:
            link.disturb(fault.kind)
        self._lasts(fault, link.heal, "link")

    def _clock(self, fault: Fault) -> None:
        self.world.step_clock(STEPS_S[fault.choose(STEPS_S)])
        self._lasts(fault, lambda: self.world.step_clock(0), fault.kind)

    def _lasts(self, fault: Fault, heal: Callable[[], object], key: Hashable) -> None:
        shortest, longest = SPANS_S[fault.kind]
        self._lasting[key] = (time.monotonic() + shortest + fault.chance * (longest - shortest), heal)

    def _heal(self, key: Hashable) -> None:
        if key in self._lasting:
            _, heal = self._lasting.pop(key)
            heal()
