"""Runs Dump, and CHANNELS, all the while: so it is known when the server let go of a client, and what counters had."""

from __future__ import annotations

import socket
import threading
import time
from typing import NamedTuple

from chaos.world import LONG_S
from counterd.protocols.counter import wire
from counterd.protocols.throttr import wire as throttr_wire

PAUSE_S = 0.03


class Sample(NamedTuple):
    """One listing: when it was asked for, when its end was there, and consumptions (subscriptions) by name.

    settled_ns: when the server said after it that it had nothing left to give back of those who had gone; None if it
    had. So whoever is missing in the listing has been let go of by then.
    """

    asked_ns: int
    ended_ns: int
    consumptions: dict[bytes, int]
    settled_ns: int | None


class Monitor:
    """A connection and a thread of its own. samples: of this round. error: what went wrong with it."""

    def __init__(self, address: str) -> None:
        self.error: BaseException | None = None
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(LONG_S)  # one that hangs is a violation, not a run without an end
        self._socket.connect(address)
        self.samples = [self._sample()]  # so it is let in before anything happens
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self) -> list[Sample]:
        """Those there are, whose place the next round's take."""
        taken, self.samples = self.samples, []
        return taken

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(PAUSE_S):
                self.samples.append(self._sample())
        except BaseException as error:  # noqa: BLE001  whatever it is, the round says it
            self.error = error

    def _receive(self) -> bytes:
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed a connection that only watches")
        return data

    def _sample(self) -> Sample:
        raise NotImplementedError


class CounterMonitor(Monitor):
    def __init__(self, address: str) -> None:
        self._parser = wire.ResponseParser()
        super().__init__(address)

    def _sample(self) -> Sample:
        asked_ns = time.monotonic_ns()
        self._socket.sendall(wire.dump(1) + wire.stats(2))
        consumptions: dict[bytes, int] = {}
        ended_ns = 0
        while True:
            for response in self._parser.feed(self._receive()):
                if response.status != wire.Status.NO_ERROR:
                    raise ConnectionError(f"Dump or Stats was refused: {response}")
                if response.opcode == wire.Opcode.STATS:
                    leaving = int(wire.decode_stats(response.body)["holdings_leaving"])
                    return Sample(asked_ns, ended_ns, consumptions, None if leaving else time.monotonic_ns())
                if response.body:
                    entry = wire.decode_dump_entry(response.body)
                    if entry.name in consumptions:
                        raise ConnectionError(f"Dump tells twice of {entry.name!r}")
                    consumptions[entry.name] = entry.consumption
                else:
                    ended_ns = time.monotonic_ns()


class ThrottrMonitor(Monitor):
    """Who is not subscribed any more asks for nothing any more, so nothing is left to wait for."""

    def __init__(self, address: str) -> None:
        self._encoder = throttr_wire.Encoder(throttr_wire.ValueSize.UINT16)
        self._parser = throttr_wire.Parser(throttr_wire.ValueSize.UINT16)
        super().__init__(address)

    def _sample(self) -> Sample:
        asked_ns = time.monotonic_ns()
        request = self._encoder.channels()
        self._parser.expect(request)
        self._socket.sendall(request)
        while not (replies := self._parser.feed(self._receive())):
            pass
        subscriptions = {entry.channel: entry.subscriptions for entry in replies[0].result}
        if len(subscriptions) != len(replies[0].result):
            raise ConnectionError(f"CHANNELS tells twice of one: {replies[0].result}")
        return Sample(asked_ns, time.monotonic_ns(), subscriptions, time.monotonic_ns())


MONITORS = {"counter": CounterMonitor, "throttr": ThrottrMonitor}
