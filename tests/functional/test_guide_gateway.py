"""The gateway of docs/guides/model-gateway.md keeps every limit while its workers, clients and network fail.

The gateway is the code in that page, in worker processes; its clients are processes too. The provider is a thread
of the test, which counts the pending calls, and controls what happens. It checks whether connections have ended
before it counts another call, so a call that ended before another began is never counted with it. A minute of the
rates lasts ten years, so that no units come back in time: then the sums have to agree to the unit."""

from __future__ import annotations

import contextlib
import json
import random
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from counterd.protocols.counter import wire
from kit import daemon, pages, peers
from kit.daemon import wait_until
from kit.machine import LONG_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kit.daemon import Address, Daemon

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "model-gateway.md"
GATEWAY = next(block.text for block in pages.blocks(PAGE.read_text("utf-8")) if "class Gateway" in block.text)
MODELS = {"small": 3, "large": 2}
TENANTS = {"refunded": "refund", "charged": "charge"}  # and what happens to the tokens of a call whose worker died
CALLS = 3  # of a tenant, in progress
REQUESTS, TOKENS = 1000, 20_000
TEN_YEARS_S = 10 * 365 * 86_400
ESTIMATE = 20
CLIENTS = 12
WORKER = f"""
MODELS = {MODELS}
PLANS = {{name: Plan({CALLS}, {REQUESTS}, {TOKENS}, 1, after) for name, after in {TENANTS}.items()}}
MINUTE_S, WAIT_S, LOOK_S = {TEN_YEARS_S}, {LONG_S}, 0.05
import socket
import sys
path, upstream, host, port = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as listening:
    listening.bind(path)
    listening.listen()
    print("ready", flush=True)
    asyncio.run(work(listening, upstream, host, int(port)))
"""
# Makes the calls that it is told to make, one after another, and repeats what it is answered.
CLIENT = """
import socket
import sys
for line in sys.stdin:
    path, request = line.split(" ", 1)
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("r") as answer:
        try:
            connection.connect(path)
            connection.sendall(request.encode())
            for piece in answer:
                print(piece, end="", flush=True)
        except OSError:
            pass
    print("{}", flush=True)
"""


@dataclass
class Call:
    """A call, as the provider and its client see it."""

    number: int
    tenant: str
    model: str
    worker: int
    connection: socket.socket | None = None  # to the provider, while it is in progress there
    left: int = 0  # pieces to send
    sent: int = 0  # tokens that the provider has reported
    started: bool = False
    heard: int = 0  # tokens that the client knows of
    used: int | None = None  # as settled
    over: bool = False  # for the client

    @property
    def running(self) -> bool:
        return self.connection is not None


class Upstream(threading.Thread):
    """The provider. lock: while a test has it, nothing is counted. paused: calls begin, but do not continue.

    stuck: a worker whose calls do not continue.
    """

    def __init__(self, path: str, calls: list[Call]) -> None:
        super().__init__()
        self.lock = threading.RLock()
        self.paused = False
        self.stuck: int | None = None
        self.calls = calls
        self.exceeded: list[str] = []
        self.most: Counter[str] = Counter()
        self._random = random.Random(1)
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(path)
        self._listening.listen(64)
        self._selector.register(self._listening, selectors.EVENT_READ)
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        self.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()

    def in_progress(self, **of: Any) -> list[Call]:
        with self.lock:
            return [call for call in self.calls if call.running and of.items() <= vars(call).items()]

    def run(self) -> None:
        while not self._stopped:
            ready = self._selector.select(0.002)
            with self.lock:
                for key, _ in ready:
                    self._read(key.fileobj)
                if not self.paused:
                    for call in self.in_progress():
                        if call.worker != self.stuck:
                            self._continue(call)

    def _read(self, connection: Any) -> None:
        self._look()
        if connection is self._listening:
            self._selector.register(connection.accept()[0], selectors.EVENT_READ)
        elif connection.fileno() >= 0:
            self._start(self.calls[int(json.loads(connection.recv(4096))["prompt"])], connection)

    def _look(self) -> None:
        """Ends the calls of which the connection has ended."""
        for key in list(self._selector.get_map().values()):
            if key.fileobj is not self._listening and _has_ended(key.fileobj):
                self._end(key.fileobj)

    def _end(self, connection: Any) -> None:
        self._selector.unregister(connection)
        connection.close()
        for call in self.in_progress():
            if call.connection is connection:
                call.connection = None

    def _start(self, call: Call, connection: socket.socket) -> None:
        call.connection, call.started = connection, True
        call.left = self._random.randint(1, 5)
        for name, limit, count in (
            (call.model, MODELS[call.model], len(self.in_progress(model=call.model))),
            (call.tenant, CALLS, len(self.in_progress(tenant=call.tenant))),
        ):
            self.most[name] = max(self.most[name], count)
            if count > limit:
                self.exceeded.append(f"{count} of {name}, at call {call.number}")

    def _continue(self, call: Call) -> None:
        """Sends a piece; some answers cost more than was estimated."""
        assert call.connection is not None
        if call.left == 0:
            self._end(call.connection)
            return
        call.left -= 1
        call.sent += self._random.randint(1, 8)
        with contextlib.suppress(OSError):  # its end is read in the next round
            call.connection.sendall(json.dumps({"tokens": call.sent}).encode() + b"\n")


def _has_ended(connection: Any) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


class Network(threading.Thread):
    """The network between a worker and counterd. Once it is cut, nothing passes, and nobody notices.

    unheard: the tenants of the Takes that were granted after that.
    """

    def __init__(self, counterd: Address) -> None:
        super().__init__()
        self.cut = False
        self.unheard: Counter[str] = Counter()
        self._counterd = counterd
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = self._listening.getsockname()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._tenants: dict[int, str] = {}  # of Takes, by opaque
        self._replies = wire.ResponseParser()
        self.lock = threading.Lock()
        self.start()

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here = self._listening.accept()[0]
                there = socket.create_connection(self._counterd)
                self._pairs.append((here, there))
                for source, sink, sees in ((here, there, self._sees_requests), (there, here, self._sees_replies)):
                    threading.Thread(target=self._pass, args=(source, sink, sees, len(self._pairs) == 1)).start()

    def _pass(self, source: socket.socket, sink: socket.socket, sees: Callable[[bytes], None], first: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                with self.lock:
                    if first:
                        sees(data)
                    if not (first and self.cut):
                        sink.sendall(data)
        if not (first and self.cut):
            with contextlib.suppress(OSError):
                sink.shutdown(socket.SHUT_WR)

    def _sees_requests(self, data: bytes) -> None:
        if self.cut:
            return
        while data:  # the client sends whole requests, small enough to arrive as such
            size = wire.HEADER_SIZE + int.from_bytes(data[4:8], "big")
            if data[1] == wire.Opcode.TAKE:
                (tenant,) = (name for name in TENANTS if f"tenant:{name}".encode() in data[:size])
                self._tenants[int.from_bytes(data[8:12], "big")] = tenant
            data = data[size:]

    def _sees_replies(self, data: bytes) -> None:
        for reply in self._replies.feed(data):
            if self.cut and reply.opcode == wire.Opcode.TAKE and reply.status == wire.Status.NO_ERROR:
                self.unheard[self._tenants[reply.opaque]] += 1

    def client_notices(self) -> None:
        self._pairs[0][0].shutdown(socket.SHUT_RDWR)

    def counterd_notices(self) -> None:
        """Makes counterd notice the cut. Its last replies are still read."""
        self._pairs[0][1].shutdown(socket.SHUT_WR)

    def stop(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.join()
        for connection in (each for pair in self._pairs for each in pair):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


@dataclass
class ClientProcess:
    """One of the gateway's clients. call: what it waits for."""

    process: subprocess.Popen[str]
    tenant: str
    call: Call | None = None
    thread: threading.Thread | None = None


@dataclass
class World:
    """Everything, and what happened to each call."""

    counterd: Daemon
    directory: Path
    calls: list[Call] = field(default_factory=list)
    clients: list[ClientProcess] = field(default_factory=list)
    workers: list[subprocess.Popen[str]] = field(default_factory=list)
    usable: list[int] = field(default_factory=list)  # workers to which new calls go
    charged: list[Call] = field(default_factory=list)  # by their estimates, unless refunded
    open: bool = False  # are new calls made?

    def __post_init__(self) -> None:
        self.upstream = Upstream(str(self.directory / "up"), self.calls)
        self.lock = self.upstream.lock
        self.observer = self.counterd.client()

    def path(self, worker: int) -> str:
        return str(self.directory / str(worker))

    def add_worker(self, address: Sequence[Any]) -> None:
        number = len(self.workers)
        command = [
            sys.executable,
            "-c",
            GATEWAY + WORKER,
            self.path(number),
            str(self.directory / "up"),
            *map(str, address),
        ]
        self.workers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=daemon.environment()))
        self.usable.append(number)

    def add_client(self, tenant: str) -> None:
        command = [sys.executable, "-S", "-c", CLIENT]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        client = ClientProcess(process, tenant)
        client.thread = threading.Thread(target=self._hear, args=(client,))
        client.thread.start()
        self.clients.append(client)

    # ---- calls ----

    def go(self) -> None:
        """Lets everything go on."""
        with self.lock:
            self.open, self.upstream.paused = True, False
            for client in self.clients:
                self._call(client)

    def _call(self, client: ClientProcess) -> None:
        if not self.open or client.call or client.process.poll() is not None:
            return
        number = len(self.calls)
        model = ("large", "small")[number // 2 % 2]
        client.call = Call(number, client.tenant, model, self.usable[number % len(self.usable)])
        self.calls.append(client.call)
        request = {"tenant": client.tenant, "model": model, "prompt": str(number), "max_tokens": ESTIMATE - 1}
        assert client.process.stdin
        client.process.stdin.write(f"{self.path(client.call.worker)} {json.dumps(request)}\n")
        client.process.stdin.flush()

    def _hear(self, client: ClientProcess) -> None:
        assert client.process.stdout
        for line in client.process.stdout:
            with self.lock:
                call, answer = client.call, json.loads(line)
                assert call is not None
                call.heard = answer.get("tokens", call.heard)
                call.used = answer.get("used", call.used)
                if not answer:
                    call.over, client.call = True, None
                    self._call(client)

    def pause(self, is_ready: Callable[[], bool]) -> None:
        """Stops the provider in the midst of its calls, and waits until everybody knows of everything it did."""

        def pauses() -> bool:
            with self.lock:
                self.open = not is_ready()
                self.upstream.paused = not self.open
                return self.upstream.paused

        wait_until(pauses, "calls to interrupt")
        wait_until(self._is_settled, "all know of what happened")

    def _is_settled(self) -> bool:
        """Whether each call is in progress, over, or waits in counterd. While calls end, the figure may be too old."""
        with self.lock:
            if any(call.started and not call.running and not call.over for call in self.calls):
                return False
        waiters = int(self.observer.stats()["waiters"])
        with self.lock:
            running = self.upstream.in_progress()
            under_way = sum(not call.over for call in self.calls)
            return all(call.heard == call.sent for call in running) and under_way == len(running) + waiters

    def serves_all(self, worker: int) -> bool:
        """Whether calls of each tenant are in progress in a worker."""
        return {call.tenant for call in self.upstream.in_progress(worker=worker)} == set(TENANTS)

    def until_done(self, count: int) -> None:
        """Waits until so many more calls were completed."""
        before = self._completed()
        wait_until(lambda: self._completed() >= before + count, f"{count} more calls")

    def _completed(self) -> int:
        with self.lock:
            return sum(call.used is not None for call in self.calls)

    # ---- what fails ----

    def kill_worker(self, number: int) -> None:
        with self.lock:
            self.charged += self.upstream.in_progress(worker=number)
            self.usable.remove(number)
            self.workers[number].kill()
            self.workers[number].wait()

    def kill_clients(self, waiting: int, running: int) -> None:
        """Kills clients, first those that wait, so that no call begins whose client is dead already."""
        asking = [client for client in self.clients if client.call]
        self._kill([client for client in asking if client.call and not client.call.running][:waiting])
        self._kill([client for client in asking if client.call and client.call.running][:running])

    def _kill(self, clients: list[ClientProcess]) -> None:
        calls = [client.call for client in clients if client.call]
        before = int(self.observer.stats()["waiters"])
        waiting = sum(not call.running for call in calls)
        for client, call in zip(clients, calls, strict=True):
            call.over, call.used = True, call.heard if call.running else None
            client.process.kill()
            client.process.wait()
        if waiting:
            wait_until(lambda: int(self.observer.stats()["waiters"]) == before - waiting, "they wait no more")
        wait_until(lambda: not any(call.running for call in calls), "their calls have ended")

    def lose_network(self, network: Network, worker: int) -> None:
        """Cuts the network. The worker notices before counterd, which may grant it more meanwhile, of which it never
        hears.
        """
        with network.lock:
            network.cut = True
        lost = self.upstream.in_progress(worker=worker)
        self.charged += lost
        self.usable.remove(worker)
        self.upstream.stuck = worker
        self.go()
        self.until_done(1)
        network.client_notices()
        wait_until(lambda: not any(call.running for call in lost), "its calls have ended")
        network.counterd_notices()
        self.upstream.stuck = None
        self.until_done(10)
        self.usable.append(worker)

    # ---- the end ----

    def finish(self) -> None:
        with self.lock:
            self.open, self.upstream.paused = False, False
        wait_until(lambda: all(call.over for call in self.calls), "all calls are over")
        figures = self.observer.stats()
        names = [*map("model:{}".format, MODELS), *map("tenant:{}".format, TENANTS)]
        wait_until(lambda: not any(self.observer.get(name) for name in names), "nothing is held")
        assert figures["waiters"] == "0"

    def left(self, name: str, limit: int) -> int:
        """How many units of a rate are left."""
        rate = wire.Rate(name.encode(), 1, limit, TEN_YEARS_S * 1_000_000, limit, wire.OnDeath.REFUNDED)
        with self.counterd.connect() as connection:
            reply = peers.ask(connection, wire.take(0, [rate], 0))
            return wire.decode_grant(reply.body).left[0] + 1

    def stop(self) -> None:
        self.open = False
        for process in (*(client.process for client in self.clients), *self.workers):
            process.kill()
        for client in self.clients:
            assert client.thread
            client.thread.join()
            with contextlib.suppress(BrokenPipeError), client.process:
                pass  # closes its pipes
        for worker in self.workers:
            with worker:
                pass
        self.upstream.stop()
        self.observer.close()


@contextlib.contextmanager
def a_world(counterd: Daemon, directory: Path, network: Network) -> Iterator[World]:
    world = World(counterd, directory)
    world.upstream.start()
    try:
        for address in (counterd.address, counterd.address, network.address):
            world.add_worker(address)
        for number in range(CLIENTS):
            world.add_client(list(TENANTS)[number % 2])
        for worker in world.workers:
            assert worker.stdout
            assert worker.stdout.readline() == "ready\n"
        yield world
    finally:
        world.stop()


def test_every_limit_is_kept_while_things_fail(start: Callable[..., Daemon], short_path: Path) -> None:
    counterd = start()
    network = Network(counterd.address)
    with contextlib.ExitStack() as stack:
        stack.callback(network.stop)
        world = stack.enter_context(a_world(counterd, short_path, network))
        world.go()
        world.until_done(20)
        world.pause(lambda: world.serves_all(0))
        world.kill_worker(0)
        world.go()
        world.until_done(20)
        world.pause(lambda: world.serves_all(2) and bool(world.upstream.in_progress(worker=1)))
        world.lose_network(network, 2)
        world.until_done(10)
        world.pause(lambda: len(world.upstream.in_progress()) >= CLIENTS // 4)
        world.kill_clients(CLIENTS // 4, CLIENTS // 4)
        world.go()
        world.until_done(20)
        world.finish()
        assert world.upstream.exceeded == []
        most = world.upstream.most
        assert any(most[name] == limit for name, limit in MODELS.items()), "so it was tried"
        assert any(most[name] == CALLS for name in TENANTS), "likewise"
        assert {worker.poll() for worker in world.workers} == {None, -signal.SIGKILL}
        for tenant, after in TENANTS.items():
            calls = [call for call in world.calls if call.tenant == tenant]
            started = sum(call.started for call in calls) + network.unheard[tenant]
            assert world.left(f"requests:{tenant}", REQUESTS) == REQUESTS - started
            lost = sum(call.tenant == tenant for call in world.charged) + network.unheard[tenant]
            settled = sum(call.used or 0 for call in calls)
            estimates = ESTIMATE * lost if after == "charge" else 0
            assert world.left(f"tokens:{tenant}", TOKENS) == TOKENS - settled - estimates
