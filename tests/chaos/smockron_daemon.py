"""The daemon of the smockron protocol, which chaos kills, and which then has forgotten all identifiers."""

from __future__ import annotations

import json
import signal
import socket
import time
from typing import TYPE_CHECKING

from chaos.killable import KillableDaemon
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.rules import parse_rules
from history import Operation
from history.smockron import Load, Restarted, rates_of
from kit.gates import Peer
from kit.machine import LONG_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

DIALECT, CONTROL = "smockron", "smockron-control"  # as its ports are logged
DIALECTS = (DIALECT, CONTROL)
RULER = -3  # the client of changes of the rules in a history
RELOADED, TAKEN = r"INFO +reloaded |ERROR +not reloaded: ", r"INFO +reloaded "
REFUSED = r"not reloaded: "  # logged because of faults
FILL = "fill"  # of the client that fills the table of identifiers
# Intervals and bursts, in ms. A burst stays what it is: what is left of an identifier is else a matter of when it went.
RATES = {"api": (50, 500), "fast": (2, 100), "login": (200, 0), "apis": (20, 60), FILL: (1, 2000)}
CHANGES: tuple[dict[str, int | None], ...] = ({"api": 100, "apis": 5}, {"login": None}, {"fast": None, "login": 400})
MISTAKES = ("", '{"api": {"rate": "soon"}}', '{"api": {"interval": 1}, "login": {"burst": 1}}', '{"api": {}, "api": 1}')


def document(changes: Mapping[str, int | None]) -> str:
    """The content of the file, with these intervals in place of others; None: there is no such domain."""
    intervals = {**{domain: interval for domain, (interval, _) in RATES.items()}, **changes}
    return json.dumps(
        {
            domain: {"interval": interval, "burst": f"{RATES[domain][1]} ms"}
            for domain, interval in intervals.items()
            if interval is not None
        }
    )


def load_of(changes: Mapping[str, int | None]) -> Load:
    return Load(rates_of(parse_rules(document(changes))))


class SmockronDaemon(KillableDaemon):
    """loads: the changes of rules in this round. descriptors: the number at its start."""

    dialect = DIALECT
    ports = {"smockron.port": DIALECT, "smockron.control_port": CONTROL}  # noqa: RUF012 - nobody changes it
    restarted = (Restarted(), True)

    def __init__(self, directory: Path, settings: Mapping[str, object], program: Sequence[str]) -> None:
        self.rules = directory / "limits.json"
        self.path = str(directory / DIALECT)
        places = {
            "control_port": 0,
            "control_socket": directory / CONTROL,
            "rules": self.rules,
            "max_identifiers": 65536,
        }
        super().__init__(directory, {**settings, **{f"{DIALECT}.{key}": one for key, one in places.items()}}, program)
        self.loads: list[Operation] = []
        self.descriptors = 0

    def __enter__(self) -> SmockronDaemon:
        self.rules.write_text(document({}))
        self._begin()
        return self

    def _begin(self) -> None:
        super()._begin()
        self.descriptors = self.counterd.descriptors()

    # ---- what happens to it ----

    def crash(self) -> None:
        self._die(time.monotonic_ns())

    def load(self, changes: Mapping[str, int | None]) -> None:
        """Makes it load these rules."""
        started_ns = time.monotonic_ns()
        assert self._reload(document(changes)), "the rules of domains are not taken any more"
        self.loads.append(Operation(RULER, load_of(changes), started_ns, time.monotonic_ns(), True))

    def mislead(self, mistake: str) -> None:
        """Makes it load invalid rules; afterwards the file is what it was before."""
        before = self.rules.read_text()
        assert not self._reload(mistake), f"rules with mistakes were taken: {mistake}"
        self.rules.write_text(before)

    def _reload(self, text: str) -> bool:
        """Whether the file was accepted. A refusal may have several lines, all of them before the line that is waited
        for.
        """
        self.rules.write_text(text)
        before, taken = len(self.counterd.lines(RELOADED)), len(self.counterd.lines(TAKEN))
        self.counterd.send_signal(signal.SIGHUP)
        self.counterd.wait_for_log(RELOADED, before + 1, LONG_S)
        self.counterd.logged_stats([DIALECT], LONG_S)
        return len(self.counterd.lines(TAKEN)) > taken

    def take_loads(self) -> list[Operation]:
        """Returns the changes, beginning with the rules at the start of the round."""
        taken, self.loads = [Operation(RULER, load_of({}), 0, 0, True), *self.loads], []
        return taken

    def forget(self, keys: Iterable[tuple[bytes, bytes]]) -> None:
        """Makes it forget these identifiers, and waits until it has."""
        with socket.socket(socket.AF_UNIX) as connected:
            connected.settimeout(LONG_S)
            connected.connect(self.path)
            gate = Peer(connected, wire.SocketType.PUB)
            connected.sendall(
                b"".join(wire.accounting(domain, wire.Status.FORGET, identifier, 0) for domain, identifier in keys)
            )
            gate.settle()

    def errors(self) -> list[str]:
        return self.complaints(REFUSED)
