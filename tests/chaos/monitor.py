"""Runs Dump, CHANNELS, PING, list-tubes all the while.

So it is known when the server let go of a client, and what counters had.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from chaos.dialect import JOBS, sign_of_life
from counterd.protocols.counter import wire
from counterd.protocols.sentinel import wire as sentinel_wire
from counterd.protocols.throttr import wire as throttr_wire
from kit.daemon import wait_until
from kit.jobs import Peer
from kit.machine import LONG_S

if TYPE_CHECKING:
    from collections.abc import Callable

PAUSE_S = 0.03
NAMESPACES_MAX = 60  # that a connection asks about: it is registered in each
SEEN_GONE = 2  # times; what is asked again was asked later than whatever is known of the end


class Sample(NamedTuple):
    """One listing: when it was requested, when its end was there, and consumptions (subscriptions) by name.

    settled_ns: when the server reported after it that it had nothing left to give back of ended connections; None if it
    had. So clients that are missing in the listing have been cleaned up by then. is_whole: a missing name has no
    consumption; otherwise it was not asked for.
    """

    asked_ns: int
    ended_ns: int
    consumptions: dict[bytes, int]
    settled_ns: int | None
    is_whole: bool = True

    def lacks(self, name: bytes) -> bool:
        """Whether it shows that nothing of that name is in use."""
        return (self.is_whole or name in self.consumptions) and not self.consumptions.get(name)


class Monitor:
    """A connection and a thread of its own. samples: those of this round. error: what failed. clients: returns the
    admitted clients, for monitors that have to ask for each.
    """

    def __init__(self, address: str, clients: Callable[[], list[int]]) -> None:
        self.error: BaseException | None = None
        self.address = address
        self.clients = clients
        self._socket = self._connected()
        self.samples = [self._sample()]  # so it is let in before anything happens
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self) -> list[Sample]:
        """Returns the samples so far; later ones belong to the next round."""
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

    def _connected(self) -> socket.socket:
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(LONG_S)  # one that hangs is a violation, not a run without an end
        try:
            connected.connect(self.address)
        except OSError:
            connected.close()
            raise
        return connected

    def _receive(self) -> bytes:
        data = self._socket.recv(1 << 18)
        if not data:
            raise ConnectionError("the server closed a connection that only watches")
        return data

    def _sample(self) -> Sample:
        raise NotImplementedError


class CounterMonitor(Monitor):
    def __init__(self, address: str, clients: Callable[[], list[int]]) -> None:
        self._parser = wire.ResponseParser()
        super().__init__(address, clients)

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
    """A client without its subscription sends no more requests, so there is nothing left to wait for."""

    def __init__(self, address: str, clients: Callable[[], list[int]]) -> None:
        self._encoder = throttr_wire.Encoder(throttr_wire.ValueSize.UINT16)
        self._parser = throttr_wire.Parser(throttr_wire.ValueSize.UINT16)
        super().__init__(address, clients)

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


class SentinelMonitor(Monitor):
    """In a namespace with one other client it gets 2, and when that has ended, 1.

    A client leaves all namespaces at once: no request is served between two of them. The time when its tokens lost
    their owner is before that.
    """

    def __init__(self, address: str, clients: Callable[[], list[int]]) -> None:
        self._gone: Counter[int] = Counter()  # how often they were seen to be
        self._registered: set[int] = set()
        super().__init__(address, clients)

    def _sample(self) -> Sample:
        asked_ns = time.monotonic_ns()
        clients = [client for client in self.clients() if self._gone[client] < SEEN_GONE][:NAMESPACES_MAX]
        if len(self._registered.union(clients)) > NAMESPACES_MAX:
            self._begin_anew()
        self._registered.update(clients)
        self._socket.sendall(b"".join(sentinel_wire.ping(client, sign_of_life(client)) for client in clients))
        parser, others = sentinel_wire.ResponseParser(), {}
        while len(others) < len(clients):
            for response in parser.feed(self._receive()):
                if response.status != sentinel_wire.Status.OK:
                    raise ConnectionError(f"PING was refused: {response}")
                others[response.xid] = response.connected - 1
        self._gone.update(client for client, count in others.items() if not count)
        consumptions = {sign_of_life(client): count for client, count in others.items()}
        return Sample(asked_ns, time.monotonic_ns(), consumptions, time.monotonic_ns(), is_whole=False)

    def _begin_anew(self) -> None:
        """Reconnects, once the server admits a connection: it may have no descriptor for it at the moment."""
        while True:
            connected = self._connected()
            try:
                connected.sendall(sentinel_wire.ping(0, b"monitor"))
                if connected.recv(1 << 10):
                    break
            except OSError:
                pass
            connected.close()
            time.sleep(PAUSE_S)
        self._socket.close()
        self._socket = connected
        self._registered.clear()


class BeanstalkMonitor(Monitor):
    """The tube that a client watches exists as long as the client is connected.

    It reconnects with the daemon. lost_ns: the latest moment at which a connection was made that has ended; 0 if none
    has.
    """

    def __init__(self, address: str, clients: Callable[[], list[int]]) -> None:
        self.lost_ns = 0
        super().__init__(address, clients)

    def _sample(self) -> Sample:
        while True:
            try:
                return self._listed(Peer(self._socket))
            except ConnectionError:
                self.lost_ns = self._made_ns
                self._socket.close()
                self._socket = wait_until(self._reconnected, "the daemon is there again", LONG_S)

    def _listed(self, peer: Peer) -> Sample:
        """Holdings of ended connections are ready by the next answer."""
        asked_ns = time.monotonic_ns()
        tubes, ended_ns = peer.tubes(), time.monotonic_ns()
        peer.figure("current-connections")
        return Sample(asked_ns, ended_ns, dict.fromkeys(tubes, 1), time.monotonic_ns())

    def _connected(self) -> socket.socket:
        self._made_ns = time.monotonic_ns()
        return super()._connected()

    def _reconnected(self) -> socket.socket | None:
        try:
            return self._connected()
        except OSError:
            return None


MONITORS = {
    "counter": CounterMonitor, "throttr": ThrottrMonitor, "sentinel": SentinelMonitor, "beanstalk": BeanstalkMonitor,
    JOBS: BeanstalkMonitor,
}  # fmt: skip
