"""The process of a few clients, of which chaos starts many: each a connection, with what it asks and is told on record.

It is told what to do in lines of JSON on its standard input: ["round", number, directory], ["do", kind, which],
["greet"], ["leave"]; and says ["here", client] of each that was let in, ["greeted"] when one more was, ["left"] when
all have gone, ["did", client, kind] of what was to be done and could be, ["lost", client, why] of one that ended and
nobody ended it, ["wrong", client, what] of what no server may say. What it asks comes from the seed, the round and its
number alone.
It records before it sends, so that a history is true whenever the process is killed.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import json
import os
import random
import selectors
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from chaos import dialects
from chaos.counter_dialect import CounterDialect
from chaos.dialect import MORE
from counterd.errors import ProtocolError
from counterd.protocols.counter.wire import Opcode, Response
from history import Recorder
from history.smockron import Told
from history.takes import Take
from kit import peers

if TYPE_CHECKING:
    from collections.abc import Callable

    from chaos.dialect import Dialect

CONNECTIONS = 3  # of a process
IDS = 10_000  # clients that a process can number
LOOPBACK = "127.0.0.1"
CONNECT_S = 3.0  # to a host that may be cut off
AGAIN_S = 0.1  # after one that could not connect, or was turned away
THINK_S = 0.006  # at most, between two batches of a connection
GOODBYE_S = 60.0  # for a server's last answers
RECEIVE_SIZE = 1 << 16
DEAF_S = (0.5, 5.0)  # of one that reads slowly: some are cut off
FULL_S = 0.7  # until the one who took all dies
QUIET_S = 0.3  # after which all is acknowledged
TCP_REPAIR = 19  # linux/tcp.h: to close a socket then tells nobody
WAYS = ("close", "reset", "half_close", "release")  # to leave


class Plan(NamedTuple):
    """What a process is told at its start. address: a path, or host and port. slot: its slot's number."""

    dialect: str
    address: str | list[Any]
    seed: str
    slot: int
    number: int

    @property
    def is_far(self) -> bool:
        return isinstance(self.address, list) and self.address[0] != LOOPBACK


class Ended(Exception):
    """The connection has ended, and why."""


class Connection:
    """One client. fresh: the server has not admitted it yet. suspect: it gave the server a reason to close it."""

    def __init__(self, worker: Worker, client: int) -> None:
        self.worker = worker
        self.client = client
        self.dialect: Dialect = worker.make_dialect(client)
        self.recorder = Recorder(worker.path, client)
        self.waiting: collections.deque[tuple[Any, int | None]] = collections.deque()
        self.takes: dict[int, tuple[Take, int]] = {}  # by opaque: answered in any order
        self.to_send = b""
        self.fresh = True
        self.suspect = False
        self.closing = False  # no requests any more
        self.vanishes = False
        self.says_goodbye = False  # closes its side, once all has been sent
        self.next_s = 0.0
        self.deadline_s = 0.0  # of a goodbye
        self.deaf_until_s = 0.0
        self.full_until_s = 0.0
        address = worker.plan.address
        is_unix = isinstance(address, str)
        self.socket = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
        self.socket.setblocking(False)
        self.connected_by_s: float | None = time.monotonic() + CONNECT_S
        result = self.socket.connect_ex(address if is_unix else tuple(address))
        if result not in (0, errno.EINPROGRESS):
            raise OSError(result, os.strerror(result))

    # ---- asking ----

    def ask(self, asked: list[tuple[Any, bytes]]) -> None:
        """Sends requests in one piece. A text in place of a call is not recorded."""
        for call, data in asked:
            token = None if isinstance(call, str) else self.recorder.start(call)
            if isinstance(call, Take) and token is not None:
                self.takes[call.opaque] = call, token
            else:
                self.waiting.append((call, token))
            self.to_send += data
        self.send()

    def send(self) -> None:
        if self.to_send and self.connected_by_s is None:
            with contextlib.suppress(BlockingIOError):
                sent = self._try(self.socket.send, self.to_send)
                self.to_send = self.to_send[sent:]
            if self.says_goodbye and not self.to_send:
                self._try(self.socket.shutdown, socket.SHUT_WR)

    def turn(self, now_s: float) -> None:
        """Sends the next requests by itself."""
        if self.connected_by_s is not None:
            if now_s > self.connected_by_s:
                raise Ended("no connection")
            return
        self.send()
        if self.deadline_s and now_s > self.deadline_s:
            raise Ended("no answer to a goodbye")
        if self.full_until_s and now_s > self.full_until_s and not self.closing:
            self.reset()
        if self.vanishes and not self.closing:
            self.vanish()
        elif not self.waiting and not self.closing and now_s >= self.next_s:
            self.ask([self.dialect.hello()] if self.fresh else self.dialect.batch())
            if isinstance(self.dialect, CounterDialect) and (way := self.dialect.ends()):
                getattr(self, way)()

    def receive(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = self._try(self.socket.recv, RECEIVE_SIZE)
            if not data:
                raise Ended("end of stream")
            for answer in self.dialect.feed(data):
                if isinstance(answer, Told):
                    self.recorder.end(self.recorder.start(answer), True)
                elif isinstance(answer, Response) and answer.opcode == Opcode.TAKE and answer.opaque in self.takes:
                    call, token = self.takes.pop(answer.opaque)
                    self.recorder.end(token, self.dialect.take(call, answer))
                else:
                    self._answered(answer)
            if not self.waiting:
                self.next_s = time.monotonic() + self.dialect.chance.random() * THINK_S

    def connected(self) -> None:
        if error := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise Ended(os.strerror(error))
        self.connected_by_s = None

    def _answered(self, answer: Any) -> None:
        if not self.waiting:
            raise ProtocolError(f"an answer that nothing asked for: {answer}")
        call, token = self.waiting[0]
        told = self.dialect.take(call, answer)
        if told is MORE:
            return
        self.waiting.popleft()
        if token is not None:
            self.recorder.end(token, told)
        if self.fresh:
            self.fresh = False
            if not self.dialect.is_welcome(told):
                self.end()
                raise Ended("turned away")
            self.worker.let_in(self)

    def _try(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except BlockingIOError:
            raise
        except OSError as error:
            raise Ended(str(error)) from None

    # ---- ends ----

    def end(self) -> None:
        """Records that the connection may end from now on."""
        if not self.suspect:
            self.suspect = True
            self.recorder.closing()

    def close(self) -> None:
        self.end()
        raise Ended("closed")

    def reset(self) -> None:
        self.end()
        peers.reset(self.socket)
        raise Ended("reset")

    def vanish(self) -> None:
        """Ends like a host that loses its power: it sends nothing any more.

        Only once it expects no reply and has acknowledged everything: a peer that sends to a host that is up again gets
        a reset.
        """
        self.vanishes = True
        if not self.waiting and not self.takes and time.monotonic() > self.next_s + QUIET_S:
            self.end()
            self.socket.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
            raise Ended("vanished")

    def take_over(self) -> None:
        """Leaves the connection open and unread, so that another one takes over its holdings."""
        self.end()
        self.worker.ghosts.append(self.socket.dup())
        raise Ended("taken over")

    def half_close(self) -> None:
        """Half-closes: the server has to send all replies, and then the end."""
        self.end()
        self.closing = self.says_goodbye = True
        self.deadline_s = time.monotonic() + GOODBYE_S
        if not self.to_send:
            self._try(self.socket.shutdown, socket.SHUT_WR)

    def release(self) -> None:
        """Gives back all holdings, as clients should, and then ends."""
        self.ask(self.dialect.give_back())
        self.half_close()

    def garbage(self) -> None:
        if self.dialect.forgives:
            self.ask([(dialects.GARBAGE, self.dialect.garbage())])
            return
        self.end()
        self.closing = True
        self.deadline_s = time.monotonic() + GOODBYE_S
        self.waiting.append((dialects.GARBAGE, None))
        self.to_send += self.dialect.garbage()
        self.send()

    def truncated(self) -> None:
        """Sends a part of a request, which must never count as one."""
        self.end()
        self.to_send += self.dialect.truncated()
        self.send()
        raise Ended("truncated")

    def slow(self) -> None:
        """Requests more than it reads, and keeps its holdings. The server may cut off such a client."""
        self.end()
        self.deaf_until_s = time.monotonic() + self.dialect.chance.uniform(*DEAF_S)
        self.worker.watch(self)
        self.ask(self.dialect.much())

    def fill(self) -> None:
        """Takes everything that is free, and ends with it."""
        self.full_until_s = time.monotonic() + FULL_S
        self.ask(self.dialect.all())


class Worker:
    """The process: its connections, and the commands that it gets."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.selector = selectors.DefaultSelector()
        self.connections: list[Connection | None] = []
        self.again_s = [0.0] * CONNECTIONS
        self.path = Path()
        self.clients = 0
        self.leaving = False
        self.greeting = False
        self.make_dialect: Callable[[int], Dialect] = NotImplemented
        self.ghosts: list[socket.socket] = []  # of connections that another one is to go on with
        self._told = b""

    def run(self) -> None:
        os.set_blocking(0, False)
        self.selector.register(0, selectors.EVENT_READ)
        while True:
            for key, events in self.selector.select(0.002 if self.connections else None):
                if key.fd == 0:
                    if not self.listen():
                        return
                elif key.data in self.connections:
                    self.guarded(key.data, functools.partial(self.serve, key.data, events))
            self.turn()

    def listen(self) -> bool:
        """Executes its commands. Returns False at their end."""
        data = os.read(0, RECEIVE_SIZE)
        *lines, self._told = (self._told + data).split(b"\n")
        for line in lines:
            verb, *arguments = json.loads(line)
            getattr(self, verb)(*arguments)
        return bool(data)

    def turn(self) -> None:
        now_s = time.monotonic()
        for place, connection in enumerate(self.connections):
            if connection is None:
                if not self.leaving and now_s >= self.again_s[place]:
                    self.open(place)
            else:
                self.guarded(connection, functools.partial(connection.turn, now_s))
                if connection.deaf_until_s and now_s > connection.deaf_until_s:
                    connection.deaf_until_s = 0.0
                    self.watch(connection)
        if self.leaving and not any(self.connections):
            self.connections = []
            self.leaving = False
            say("left")

    def open(self, place: int) -> None:
        self.clients += 1
        try:
            connection = Connection(self, self.plan.number * IDS + self.clients)
        except OSError:
            self.again_s[place] = time.monotonic() + AGAIN_S
            return
        self.connections[place] = connection
        self.selector.register(connection.socket, selectors.EVENT_WRITE, connection)

    def serve(self, connection: Connection, events: int) -> None:
        if connection.connected_by_s is not None:
            connection.connected()
            self.selector.modify(connection.socket, selectors.EVENT_READ, connection)
        elif events:
            connection.receive()

    def guarded(self, connection: Connection, step: Callable[[], None]) -> None:
        """Calls the function, and cleans up the connection if it ends."""
        try:
            step()
        except Ended as ended:
            self.bury(connection, str(ended))
        except ProtocolError as error:
            say("wrong", connection.client, str(error))
            connection.end()
            self.bury(connection, str(error))

    def bury(self, connection: Connection, why: str) -> None:
        if not connection.suspect and not connection.fresh:
            say("lost", connection.client, why)
        elif connection.closing and (owed := [str(call) for call, token in connection.waiting if token is not None]):
            say("owed", connection.client, f"{why}: {', '.join(owed)}")
        connection.end()
        if isinstance(connection.dialect, CounterDialect):
            connection.dialect.offer_token(self.plan.is_far)
        self.again_s[self.connections.index(connection)] = time.monotonic() + AGAIN_S * connection.fresh
        self.connections[self.connections.index(connection)] = None
        with contextlib.suppress(KeyError, ValueError):  # one that is deaf is not watched, and may be closed already
            self.selector.unregister(connection.socket)
        connection.recorder.close()
        connection.socket.close()

    def watch(self, connection: Connection) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(connection.socket)
        if not connection.deaf_until_s:
            self.selector.register(connection.socket, selectors.EVENT_READ, connection)

    def let_in(self, connection: Connection) -> None:
        say("here", connection.client)
        self.lay_ghosts()
        if self.greeting and connection is self.connections[0]:
            self.greeting = False
            say("greeted")

    def lay_ghosts(self) -> None:
        while self.ghosts:
            self.ghosts.pop().close()

    # ---- what it is told ----

    def round(self, number: int, directory: str) -> None:
        self.path = Path(directory) / f"{self.plan.number}.history"
        chance = random.Random(f"{self.plan.seed} {number} {self.plan.slot} {self.plan.number}")
        self.make_dialect = functools.partial(dialects.DIALECTS[self.plan.dialect], chance, number)
        CounterDialect.resumables.clear()
        self.connections = [None] * CONNECTIONS
        self.leaving = self.greeting = False

    def do(self, kind: str, which: int) -> None:
        """Executes a client's own fault. Does nothing if that client is not connected, or about to end."""
        if not self.connections:
            return
        connection = self.connections[which % CONNECTIONS]
        if connection is None or connection.fresh or connection.closing or connection.deaf_until_s:
            return
        if kind == "take_over" and not getattr(connection.dialect, "token", b""):
            kind = "close"
        say("did", connection.client, kind)
        self.guarded(connection, getattr(connection, kind))

    def greet(self) -> None:
        """Opens a new connection in the first place, now, or when the one in it has got all its replies."""
        self.greeting = True
        connection = self.connections[0]
        if connection is not None and connection.fresh:
            self.bury(connection, "connects again")
        elif connection is not None and not connection.closing:
            self.guarded(connection, connection.reset)

    def leave(self) -> None:
        self.leaving = True
        self.lay_ghosts()
        for connection in filter(None, list(self.connections)):
            if connection.deaf_until_s:
                connection.deaf_until_s = 0.0
                self.watch(connection)
            if connection.fresh:
                self.bury(connection, "leaves")
            elif not connection.closing:
                self.guarded(connection, getattr(connection, connection.dialect.chance.choice(WAYS)))


def say(*words: Any) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    Worker(Plan(**json.loads(sys.argv[1]))).run()
