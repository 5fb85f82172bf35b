"""counterctl's connection to a small master; tests/functional/test_counterctl_smockron.py has a real one."""

from __future__ import annotations

import time
from typing import Any

from counterd.cli.ctl.smockron.zmtp import Subscriber
from counterd.client._addresses import Address
from counterd.protocols.smockron import wire
from kit.machine import PATIENCE
from kit.scripted.smockron import Master


class Timed(Subscriber):
    """A Subscriber that records times. came: when something arrived. deadlines: those of what was sent."""

    def __init__(self, *arguments: Any) -> None:
        self.came: list[float] = []
        self.deadlines: list[float] = []
        super().__init__(*arguments)

    def _next(self, deadline: float) -> Any:
        item = super()._next(deadline)
        self.came.append(time.monotonic())
        return item

    def _send(self, request: bytes, deadline: float) -> None:
        self.deadlines.append(deadline)
        super()._send(request, deadline)


def test_a_pong_has_its_whole_timeout_after_silence() -> None:
    with Master() as master, Timed(Address(*master.control.address), PATIENCE) as subscriber:
        subscriber.subscribe()
        count = len(subscriber.came)
        master.control.tell(wire.ping(1, b"context"))
        master.tell("DELAY_UNTIL", b"a", 1)
        assert subscriber.next_control().identifier == b"a"
        assert subscriber.deadlines[-1] >= subscriber.came[count] + PATIENCE
