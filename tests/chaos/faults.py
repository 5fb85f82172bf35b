"""What chaos does, to whom and when: a schedule that comes from seed and round alone, and who plays it.

A fault that lasts is healed after a while, and at the end of its round at the latest. A client's own faults (resets,
garbage, slow reading) are done by its process, which is told to; the rest is done from outside.
"""

from __future__ import annotations

import random
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from chaos import sentinel_rules, smockron_daemon
from history import Operation
from history.sentinel import Load
from kit import daemon
from kit.machine import LONG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from chaos.processes import ClientProcesses
    from chaos.world import World

# How often each is chosen, among all.
BY_CLIENT = {
    "reset": 10, "half_close": 8, "close": 4, "truncated": 8, "garbage": 6, "slow": 3, "fill": 2, "take_over": 8,
}  # fmt: skip
BY_DRIVER = {
    "kill": 8, "stop_client": 6, "stop_server": 3, "descriptors": 2, "reload": 3, "bad_reload": 2, "rules": 3,
    "bad_rules": 2, "crash": 3, "kill_writer": 3, "stop_writer": 3, "full_disk": 2,
    "crash_master": 3, "stop_master": 3, "limits": 3, "bad_limits": 2,
}  # fmt: skip
BY_LINK = {"delay": 3, "loss": 3, "cut": 2}
BY_FAR_CLIENT = {"vanish": 4}
BY_CLOCK = {"clock": 2}
SPANS_S = {
    "stop_client": (0.1, 1.0), "stop_server": (0.05, 0.5), "descriptors": (0.2, 0.6), "reload": (0.3, 1.0),
    "rules": (0.3, 1.0), "stop_writer": (0.1, 1.5), "full_disk": (0.2, 1.5),
    "stop_master": (0.05, 0.5), "limits": (0.3, 1.5),
    "delay": (0.5, 2.0), "loss": (0.5, 2.0), "cut": (1.0, 5.0), "clock": (0.2, 1.0),
}  # fmt: skip
STEPS_S = (-86_400, -3600, -10, 10, 3600, 86_400)
INTRUDERS = 40
CHANGES: tuple[dict[str, object], ...] = (
    {"counter.holdings_per_connection": 12},
    {"counter.max_requests_per_second": 300, "throttr.max_requests_per_second": 300},
    {"counter.max_connections_per_address": 3},
    {"throttr.max_queued": "8K", "counter.keepalive_idle": 2},
    {"sentinel.max_allowed_qps": 20, "sentinel.sweep_interval": 300, "sentinel.max_requests_per_second": 300},
)
QPS = "sentinel.max_allowed_qps"
RULER = -1  # the client that the rules are of
RELOADED, TAKEN = r"INFO +reloaded |ERROR +not reloaded: ", r"INFO +reloaded "
# With what would throw them all out, if it were taken over.
MISTAKES: tuple[dict[str, object], ...] = (
    {"counter.max_conections": 1, "counter.idle_timeout": 1},
    {"counter.idle_timeout": "soon", "throttr.max_connections": 1},
    {"counter.tls.cert": "/nowhere.pem", "counter.allow": "192.0.2.1"},
    {"sentinel.rules": "/nowhere.json", "sentinel.idle_timeout": 1},
)


class Fault(NamedTuple):
    """at: the part of the round after which it happens. slot, which: the process, and its connection. chance: for other
    choices.
    """

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
    """The kinds of faults that this machine supports."""
    found = {**BY_CLIENT, **BY_DRIVER}
    if world.link is not None:
        found |= BY_FAR_CLIENT | (BY_LINK if world.link.means else {"cut": BY_LINK["cut"]})
    return found | (BY_CLOCK if world.shift else {})


def schedule(seed: str, number: int, count: int, slots: int, weights: dict[str, int]) -> list[Fault]:
    """The faults of a round. The first round has each kind once, so that it has caused all memory that a kind makes the
    daemon keep.
    """
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
    """Executes a round's schedule. disturbed_ns: when the link was first disturbed. loads: changes of the rules.
    limited: whether the sentinel protocol may have had a limit of requests.
    """

    def __init__(self, world: World, processes: ClientProcesses) -> None:
        self.world = world
        self.processes = processes
        self.disturbed_ns: int | None = None
        self.loads: list[Operation] = []
        self.limited = False
        self._rules_text = sentinel_rules.text()
        self._rules_are = sentinel_rules.rules()
        self._lasting: dict[Hashable, tuple[float, Callable[[], object]]] = {}
        self._has_reloaded = False

    def play(self, faults: Sequence[Fault], seconds: float) -> None:
        begun = time.monotonic()
        for fault in faults:
            self.wait(begun + fault.at * seconds)
            if fault.kind in BY_CLIENT:
                self.processes.tell(fault.slot, "do", fault.kind, fault.which)
            elif fault.kind in BY_LINK:
                self._disturb(fault)
            else:
                getattr(self, f"_{fault.kind}")(fault)
        self.wait(begun + seconds)

    def wait(self, until_s: float) -> None:
        """Waits, and heals faults that are due."""
        while True:
            now_s = time.monotonic()
            for key in [key for key, (due_s, _) in self._lasting.items() if due_s <= now_s]:
                self._heal(key)
            if now_s >= until_s:
                return
            time.sleep(min(0.01, until_s - now_s))

    def heal(self) -> None:
        """Ends all faults, and restores the configuration and the memory for jobs."""
        for key in list(self._lasting):
            self._heal(key)
        self.world.clear()
        if self._has_reloaded:
            assert self._load({}), "the configuration and the rules as they were are not taken any more"

    # ---- each kind ----

    def _kill(self, fault: Fault) -> None:
        self._heal(("stop_client", fault.slot))
        self.processes.replace(fault.slot)

    def _vanish(self, fault: Fault) -> None:
        """Only a client on another host: a local one gets no keepalive probes, as it cannot vanish."""
        far = [place for place, slot in enumerate(self.processes.slots) if slot.place == "far"]
        self.processes.tell(far[fault.choose(far)], "do", fault.kind, fault.which)

    def _stop_client(self, fault: Fault) -> None:
        worker = self.processes.stop(fault.slot)
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
        changes = CHANGES[fault.choose(CHANGES)]
        self.limited |= QPS in changes
        self._write(changes)
        self._lasts(fault, lambda: self._write({}), fault.kind)

    def _bad_reload(self, fault: Fault) -> None:
        self._heal("reload")
        assert not self._write(MISTAKES[fault.choose(MISTAKES)]), "a configuration with mistakes was taken"

    def _rules(self, fault: Fault) -> None:
        self._load(sentinel_rules.CHANGES[fault.choose(sentinel_rules.CHANGES)])
        self._lasts(fault, lambda: self._load({}), fault.kind)

    def _bad_rules(self, fault: Fault) -> None:
        """Loads invalid rules. Afterwards the file is what it was before, so that it has the daemon's rules."""
        self._heal("reload")
        self.world.rules.write_text(sentinel_rules.MISTAKES[fault.choose(sentinel_rules.MISTAKES)])
        assert not self._write({}), "rules with mistakes were taken"
        self.world.rules.write_text(self._rules_text)

    def _load(self, changes: dict[int, dict[str, Any] | None]) -> bool:
        """Whether the daemon has loaded rules with these changes: not while it has no descriptor for the file."""
        self._heal("reload")
        started_ns = time.monotonic_ns()
        self.world.rules.write_text(sentinel_rules.text(changes))
        if not self._write({}):
            self.world.rules.write_text(self._rules_text)
            return False
        rules, before = sentinel_rules.rules(changes), self._rules_are
        self._rules_text, self._rules_are = sentinel_rules.text(changes), rules
        for key in before.keys() | rules.keys():
            if before.get(key) != rules.get(key):
                call = Load(key, rules.get(key))
                self.loads.append(Operation(RULER, call, started_ns, time.monotonic_ns(), True))
        return True

    def _write(self, changes: dict[str, object]) -> bool:
        """Makes the daemon read a configuration with these changes, and returns whether it was accepted.

        One at a time: of two that wait, the daemon would read only one. A refusal may have several lines, all of them
        before the line that is waited for.
        """
        self._heal("stop_server")
        counterd = self.world.counterd
        self._has_reloaded = True
        before, taken = len(counterd.lines(RELOADED)), len(counterd.lines(TAKEN))
        counterd.config.write_text(daemon.config_text({**self.world.settings, **changes}))
        counterd.send_signal(signal.SIGHUP)
        counterd.wait_for_log(RELOADED, before + 1, LONG_S)
        self.world.logged_stats()
        return len(counterd.lines(TAKEN)) > taken

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

    def _crash(self, fault: Fault) -> None:
        """Kills the daemon of the beanstalk protocol."""
        self._heal("stop_writer")
        self._heal("full_disk")
        self.world.beanstalk.crash(with_writer=fault.chance < 0.5)

    def _kill_writer(self, fault: Fault) -> None:
        del fault
        self.world.beanstalk.kill_writer()

    def _stop_writer(self, fault: Fault) -> None:
        self._heal(fault.kind)
        writer = self.world.beanstalk.stop_writer()
        self._lasts(fault, lambda: self.world.beanstalk.go_on(writer), fault.kind)

    def _full_disk(self, fault: Fault) -> None:
        self.world.beanstalk.fill_disk()
        self._lasts(fault, self.world.beanstalk.empty_disk, fault.kind)

    def _crash_master(self, fault: Fault) -> None:
        del fault
        self._heal("stop_master")
        self.world.smockron.crash()

    def _stop_master(self, fault: Fault) -> None:
        counterd = self.world.smockron.counterd
        counterd.send_signal(signal.SIGSTOP)
        self._lasts(fault, lambda: counterd.send_signal(signal.SIGCONT), fault.kind)

    def _limits(self, fault: Fault) -> None:
        """Changes the rules of domains."""
        self._limit(smockron_daemon.CHANGES[fault.choose(smockron_daemon.CHANGES)])
        self._lasts(fault, lambda: self._limit({}), fault.kind)

    def _bad_limits(self, fault: Fault) -> None:
        self._heal("stop_master")
        self.world.smockron.mislead(smockron_daemon.MISTAKES[fault.choose(smockron_daemon.MISTAKES)])

    def _limit(self, changes: dict[str, int | None]) -> None:
        self._heal("stop_master")
        self.world.smockron.load(changes)

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
