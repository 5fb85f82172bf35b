"""Histories of a real daemon with concurrent clients have an order; cut connections give back their holdings.

A daemon that is killed goes on with its jobs, and has forgotten all identifiers."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from functools import partial
from random import Random
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from counterd.protocols.beanstalk import wire as beanstalk_wire
from counterd.protocols.counter import wire
from counterd.protocols.sentinel import wire as sentinel_wire
from counterd.protocols.sentinel.rules import read_rules
from counterd.protocols.smockron import wire as smockron_wire
from counterd.protocols.smockron.rules import parse_rules
from history import Closed, Operation, Recorder, beanstalk, check, load, sentinel, smockron
from history.beanstalk import JobModel, disorder
from history.counter import CounterModel, Release
from history.crowd import Jobs, counter_calls, sentinel_calls
from kit.daemon import PATIENCE, Daemon, run, running, wait_until
from kit.gates import SETTINGS, addresses, write_rules
from kit.gates import Peer as Gate
from kit.jobs import Peer
from kit.peers import ask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

CLIENTS = 8
CALLS = 60
LATE_NS = 5_000_000_000  # by which a busy machine may be behind with its sweeps
# Flow 1 is of tokens, flow 2 a rate; parameters have rule 1.
RULES: dict[str, Any] = {
    "shop": {
        "flowRules": [
            {
                "resource": "pay", "clusterMode": True, "count": 3, "grade": 0,
                "clusterConfig": {
                    "flowId": 1, "thresholdType": 1, "resourceTimeout": 60_000, "clientOfflineTime": 50,
                },
            },
            {
                "resource": "pay", "clusterMode": True, "count": 20, "grade": 1,
                "clusterConfig": {"flowId": 2, "thresholdType": 1, "sampleCount": 4, "windowIntervalMs": 200},
            },
        ],
        "paramFlowRules": [
            {
                "resource": "pay", "clusterMode": True, "count": 50, "paramIdx": 0,
                "clusterConfig": {"flowId": 1, "thresholdType": 1, "sampleCount": 2, "windowIntervalMs": 100},
            },
        ],
    }
}  # fmt: skip


def call(daemon: Daemon, path: Path, client: int) -> None:
    """Makes calls, and cuts the connection with one under way."""
    rng, choose = Random(client), counter_calls(names=2)
    with Recorder(path, client) as recorder, contextlib.closing(daemon.connect()) as connected:
        for left in reversed(range(CALLS)):
            request = choose(rng)
            token = recorder.start(request)
            data = getattr(wire, type(request).__name__.lower())(0, *request)
            if not left:
                connected.sendall(data)
                break
            response = ask(connected, data)
            tells = response.status == 0 and not isinstance(request, Release)
            recorder.end(token, (response.status, wire.decode_consumption(response.body) if tells else None))
        recorder.closing()


def crowd(paths: Sequence[Path], clients: Sequence[int], of: Callable[[Path, int], None]) -> list[Thread]:
    """Runs clients, each in its own thread."""
    threads = [Thread(target=of, args=(paths[client], client)) for client in clients]
    for thread in threads:
        thread.start()
    return threads


def note_ends(paths: Sequence[Path], clients: Iterable[int], what: str) -> None:
    """Records the ends of all: closing or closed."""
    for client in clients:
        with Recorder(paths[client], client) as recorder:
            getattr(recorder, what)()


def halves(paths: list[Path], of: Callable[[Path, int], None], gone: Callable[[], object]) -> list[Operation]:
    """Records the histories of two halves of the clients in succession: the second finds what the first has left. gone:
    waits until the first is gone.
    """
    for first in (0, CLIENTS // 2):
        clients = range(first, first + CLIENTS // 2)
        for thread in crowd(paths, clients, of):
            thread.join()
        gone()
        note_ends(paths, clients, "closed")
    return load(paths)


def test_daemon_has_an_order_for_everything(tmp_path: Path) -> None:
    paths = [tmp_path / str(client) for client in range(CLIENTS)]
    with running(tmp_path / "daemon") as daemon:
        operations = halves(
            paths,
            lambda path, client: call(daemon, path, client),
            lambda: daemon.wait_for_stats(curr_connections=1, holdings=0),
        )
    assert sum(operation.answer is not None for operation in operations) == CLIENTS * (CALLS - 1)
    assert sum(operation.call == Closed() and operation.ended is not None for operation in operations) == CLIENTS
    assert check(operations, CounterModel()) is None


# ---- sentinel -------------------------------------------------------------------------------------------------------


class Known:
    """The tokens that any client was granted, with their flows: any client may release or keep them."""

    def __init__(self) -> None:
        self.granted: list[tuple[int, int]] = []


def exchange(connected: socket.socket, data: bytes) -> sentinel_wire.Response:
    parser = sentinel_wire.ResponseParser()
    connected.sendall(data)
    while not (responses := parser.feed(connected.recv(1 << 16))):
        pass
    return responses[0]


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), PATIENCE)


def call_sentinel(port: int, known: Known, path: Path, client: int) -> None:
    """As call(), in the namespace that all clients share."""
    rng, choose = Random(client), sentinel_calls(known, "tokens tokens window values")
    with Recorder(path, client) as recorder, contextlib.closing(connect(port)) as connected:
        for left in reversed(range(CALLS)):
            request = sentinel.Ping(b"shop") if left == CALLS - 1 else choose(rng)
            token = recorder.start(request)
            if not left:
                connected.sendall(sentinel.request(request))
                break
            answer = sentinel.told(request, exchange(connected, sentinel.request(request)))
            recorder.end(token, answer)
            if isinstance(request, sentinel.Acquire) and answer[0] == sentinel_wire.Status.OK:
                known.granted.append((request.flow, answer[1]))
        recorder.closing()


def test_daemon_has_an_order_for_tokens_windows_and_values(tmp_path: Path) -> None:
    """When all clients have gone, one can have all tokens of a flow."""
    paths = [tmp_path / str(client) for client in range(CLIENTS)]
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps(RULES))
    settings = {"sentinel.enable": "true", "sentinel.port": 0, "sentinel.bind": "127.0.0.1", "sentinel.rules": rules}
    known = Known()
    with running(tmp_path / "daemon", settings) as daemon:
        port = daemon.address_of("sentinel").port

        def are_gone() -> bool:
            with contextlib.closing(connect(port)) as connected:
                return exchange(connected, sentinel_wire.ping(0, b"shop")).connected == 1

        operations = halves(
            paths,
            lambda path, client: call_sentinel(port, known, path, client),
            lambda: wait_until(are_gone, "nobody else is connected"),
        )
        with contextlib.closing(connect(port)) as connected:
            wait_until(lambda: not exchange(connected, sentinel_wire.acquire(0, 1, 3)).status, "all tokens are free")
    assert sum(operation.answer is not None for operation in operations) == CLIENTS * (CALLS - 1)
    assert check(operations, sentinel.SentinelModel(sentinel.objects(read_rules(RULES)), sweep_ns=LATE_NS)) is None


# ---- beanstalk ------------------------------------------------------------------------------------------------------

BEANSTALK: dict[str, Any] = {
    "counter.enable": "false", "counter.port": "", "counter.bind": "",
    "beanstalk.enable": "true", "beanstalk.port": 0, "beanstalk.bind": "127.0.0.1",
}  # fmt: skip
CROWDS = range(4), range(4, 8), range(8, 12)  # clients
DRIVER, REAPER, SLEEPER, HEIR, STRANGER = range(12, 17)
FOR_EVER = 1 << 30  # calls
SLACK_NS = 20_000_000  # by which the wall clock, which a restart goes by, may differ from the monotonic one
# What has to come up, or the history says little.
SEEN = (
    (beanstalk.Put, "INSERTED"), (beanstalk.Reserve, "RESERVED"), (beanstalk.Release, "RELEASED"),
    (beanstalk.Bury, "BURIED"), (beanstalk.KickJob, "KICKED"), (beanstalk.Touch, "TOUCHED"),
    (beanstalk.Delete, "DELETED"),
)  # fmt: skip


class Worker(Peer):
    """A connection that uses and watches the tube "0"."""

    def __init__(self, counterd: Daemon) -> None:
        super().__init__(counterd.connect())
        for request in (beanstalk_wire.use(b"0"), beanstalk_wire.watch(b"0"), beanstalk_wire.ignore(b"default")):
            self.ask(request)

    def do(self, recorder: Recorder, call: Any) -> beanstalk.Answer:
        token = recorder.start(call)
        answer = beanstalk.told(self.ask(beanstalk.request(call)))
        recorder.end(token, answer)
        return answer


def work(counterd: Daemon, known: Jobs, calls: int, path: Path, client: int) -> None:
    """As call(), as long as the daemon runs."""
    rng = Random(client)
    with Recorder(path, client) as recorder, contextlib.suppress(ConnectionError):
        worker = Worker(counterd)
        with contextlib.closing(worker):
            for _ in range(calls):
                request = known.choose(rng, timeout_max=1)
                known.taken(request, worker.do(recorder, request))
            request = known.choose(rng)
            recorder.start(request)
            worker.socket.sendall(beanstalk.request(request))
            recorder.closing()


def reap(counterd: Daemon, known: Jobs, path: Path) -> None:
    """Looks for every job that any client knows of; reserves and deletes those and all that no client was told of."""
    worker = Worker(counterd)
    with Recorder(path, REAPER) as recorder, contextlib.closing(worker):
        for kind in (beanstalk.Peek, beanstalk.Delete):
            for job in sorted(set(known.known)):
                worker.do(recorder, kind(job))
        while worker.figure("current-jobs-ready") or worker.figure("current-jobs-delayed"):
            _, job, _ = worker.do(recorder, beanstalk.Reserve(b"0", 1))
            if job is not None:
                worker.do(recorder, beanstalk.Delete(job))


def outlast(counterd: Daemon, first: Path, second: Path) -> None:
    """Lets a worker keep a job for too long, so that another one reserves and deletes it."""
    with Recorder(first, SLEEPER) as slow, Recorder(second, HEIR) as quick:
        sleeper, successor = Worker(counterd), Worker(counterd)
        sleeper.do(slow, beanstalk.Put(b"0", 0, 0, 1, b"of one second"))
        sleeper.do(slow, beanstalk.Reserve(b"0", 0))
        _, job, _ = successor.do(quick, beanstalk.Reserve(b"0", int(PATIENCE)))
        assert job is not None
        successor.do(quick, beanstalk.Delete(job))
        for worker in (sleeper, successor):
            worker.close()


def live(counterd: Daemon, known: Jobs, paths: Sequence[Path], clients: Sequence[int]) -> None:
    """Runs a crowd, until the daemon has released all that it held."""
    for thread in crowd(paths, clients, partial(work, counterd, known, CALLS)):
        thread.join()
    observer = Worker(counterd)
    wait_until(lambda: observer.figure("current-connections") == 1, "they are gone")
    note_ends(paths, clients, "closed")
    observer.close()


def lives(directory: Path) -> list[Operation]:
    """Records the histories of three crowds: the daemon is killed while the second works, and the third finds what is
    left.
    """
    known = Jobs()
    paths = [directory / str(client) for client in range(STRANGER)]
    first, second, third = CROWDS
    settings = {**BEANSTALK, "beanstalk.journal": directory / "journal"}
    with Recorder(paths[DRIVER], DRIVER) as driver:
        with running(directory / "daemon", settings) as counterd:
            live(counterd, known, paths, first)
            enough = len(known.known) + CALLS
            threads = crowd(paths, second, partial(work, counterd, known, FOR_EVER))
            wait_until(lambda: len(known.known) > enough, "the second crowd has had jobs")
            note_ends(paths, second, "closing")
            killed = driver.start(beanstalk.Restarted())
            counterd.kill()
            for thread in threads:
                thread.join()
        with running(directory / "daemon", settings) as counterd:
            driver.end(killed, ("OK", None, b""))
            note_ends(paths, second, "closed")
            live(counterd, known, paths, third)
            reap(counterd, known, paths[REAPER])
            outlast(counterd, paths[SLEEPER], paths[HEIR])
    assert run("journal", "check", directory / "journal").stdout.endswith("ok, 0 records\n")
    return load(paths)


def lies(operations: list[Operation]) -> dict[str, list[Operation]]:
    """Variants of the history that the clients would have seen if a promise had been broken."""
    puts = {one.answer[1]: one for one in operations if is_told(one, beanstalk.Put, "INSERTED")}
    patient = {job for job, put in puts.items() if put.call.ttr == 60}
    doubtful = {one.call.job for one in operations if isinstance(one.call, beanstalk.Delete) and one.answer is None}
    given = next(one for one in operations if is_told(one, beanstalk.Reserve, "RESERVED") and one.answer[1] in patient)
    seen = (one for one in operations if one.client == REAPER and is_told(one, beanstalk.Peek, "FOUND"))
    found = next(one for one in seen if one.call.job not in doubtful)
    deleted = next(one for one in operations if is_told(one, beanstalk.Delete, "DELETED") and one.call.job in puts)
    end_ns = max(one.ended or 0 for one in operations)
    first, inherited = (
        next(one for one in operations if one.client == client and is_told(one, beanstalk.Reserve, "RESERVED"))
        for client in (SLEEPER, HEIR)
    )
    assert first.ended is not None
    early = inherited._replace(started=first.ended + 1, ended=first.ended + 2)
    again = "RESERVED", deleted.call.job, puts[deleted.call.job].call.body
    return {
        "given to two": [*operations, given._replace(client=STRANGER)],
        "lost": [found._replace(answer=("NOT_FOUND", None, b"")) if one is found else one for one in operations],
        "not for as long as it may take": [early if one is inherited else one for one in operations],
        "back": [*operations, Operation(STRANGER, beanstalk.Reserve(b"0", 0), end_ns + 1, end_ns + 2, again)],
    }


def is_told(operation: Operation, kind: type, status: str) -> bool:
    return isinstance(operation.call, kind) and operation.answer is not None and operation.answer[0] == status


def test_daemon_keeps_its_jobs_after_a_kill(tmp_path: Path) -> None:
    operations = lives(tmp_path)
    model = JobModel(late_ns=LATE_NS, slack_ns=SLACK_NS, journal=True)
    for kind, status in SEEN:
        assert any(is_told(one, kind, status) for one in operations), f"nobody was told {status}"
    violation = check(beanstalk.jobs(operations), model)
    assert violation is None, violation
    assert disorder(operations) == []
    for lie, history in lies(operations).items():
        assert check(beanstalk.jobs(history), model) is not None, f"{lie}, and nobody notices"


# ---- smockron -------------------------------------------------------------------------------------------------------

# So slow that nobody gets through, however long it all takes.
THROTTLED = {"hot": {"interval": 1000, "burst": 3}, "cold": {"interval": 2000, "burst": 0}}
GATES = range(4), range(4, 8)  # clients of two lives
FIRST, SECOND, THIRD = 8, 9, 10  # who listen, the first in the first
ALONE, RULER = 11, 12


def account(counterd: Daemon, recorder: Recorder, calls: Iterable[smockron.Account]) -> None:
    """Sends accounting messages one after the other, each after the one before was taken."""
    with socket.create_connection(addresses(counterd)[0], PATIENCE) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # else each PING waits for an acknowledgement
        gate = Gate(connected, smockron_wire.SocketType.PUB)
        for call in calls:
            token = recorder.start(call)
            connected.sendall(smockron.request(call))
            gate.settle()
            recorder.end(token, True)


def throttle(counterd: Daemon, calls: int, path: Path, client: int) -> None:
    """As call(), as long as the daemon runs."""
    rng = Random(client)

    def choose() -> smockron.Account:
        status = rng.choices(("ACCEPTED", "DELAYED", "REJECTED", "FORGET"), (40, 5, 2, 1))[0]
        moment_ms = time.time_ns() // smockron.NS_PER_MS + rng.randrange(100) if status == "DELAYED" else 0
        return smockron.Account(b"hot", b"%d" % rng.randrange(3), status, moment_ms)

    with Recorder(path, client) as recorder, contextlib.suppress(ConnectionError, AssertionError):
        account(counterd, recorder, (choose() for _ in range(calls)))


@contextlib.contextmanager
def listening(counterd: Daemon, path: Path, client: int) -> Iterator[Event]:
    """Runs a subscriber as long as the block and the daemon do; the event is set once it has subscribed."""
    begun, stopping = Event(), Event()

    def listen() -> None:
        with (
            Recorder(path, client) as recorder,
            socket.create_connection(addresses(counterd)[1], PATIENCE) as connected,
            contextlib.suppress(ConnectionError, AssertionError),
        ):
            gate = Gate(connected, smockron_wire.SocketType.SUB)
            call: Any = smockron.Subscribe(b"")
            connected.sendall(smockron_wire.subscribe(b""))
            while True:
                is_last = stopping.is_set()
                token = recorder.start(call)
                connected.sendall(smockron_wire.ping(0))
                while not isinstance(found := gate.next(), smockron_wire.Command):
                    recorder.end(recorder.start(smockron.told([found])), True)
                recorder.end(token, True)
                begun.set()
                if is_last:
                    return
                call = smockron.Ping()
                stopping.wait(0.005)

    thread = Thread(target=listen)
    thread.start()
    try:
        yield begun
    finally:
        stopping.set()
        thread.join()


def heard(operations: Iterable[Operation]) -> list[tuple[bytes, str, bytes, int]]:
    """All messages that subscribers were told."""
    return [message for one in operations if isinstance(one.call, smockron.Told) for message in one.call.messages]


def throttled_lives(directory: Path) -> list[Operation]:
    """Records the histories of gatekeepers: the daemon is killed under the first, and the next one knows nothing."""
    paths = [directory / str(client) for client in range(RULER + 1)]
    rules = write_rules(directory, THROTTLED)
    settings = {**SETTINGS, "counter.port": "", "counter.bind": "", "smockron.rules": rules}
    with Recorder(paths[RULER], RULER) as driver:
        driver.end(driver.start(smockron.Load(smockron.rates_of(parse_rules(rules.read_bytes())))), True)
        with running(directory / "daemon", settings) as counterd, listening(counterd, paths[FIRST], FIRST) as begun:
            assert begun.wait(PATIENCE)
            threads = crowd(paths, GATES[0], partial(throttle, counterd, FOR_EVER))
            wait_until(lambda: len(heard(load([paths[FIRST]]))) > CALLS, "the first crowd has been told")
            killed = driver.start(smockron.Restarted())
            counterd.kill()
            for thread in threads:
                thread.join()
        with running(directory / "daemon", settings) as counterd:
            driver.end(killed, True)
            with listening(counterd, paths[SECOND], SECOND) as begun, listening(counterd, paths[THIRD], THIRD) as other:
                assert begun.wait(PATIENCE)
                assert other.wait(PATIENCE)
                for thread in crowd(paths, GATES[1], partial(throttle, counterd, CALLS)):
                    thread.join()
                with Recorder(paths[ALONE], ALONE) as recorder:
                    account(counterd, recorder, [smockron.Account(b"cold", b"alone", "ACCEPTED", 0)] * 3)
    return load(path for path in paths if path.exists())


def throttled_lies(operations: list[Operation]) -> dict[str, list[Operation]]:
    """Variants of the history that the gatekeepers would have seen if a promise had been broken."""
    told = [one for one in operations if isinstance(one.call, smockron.Told) and one.call.messages[0][2] == b"alone"]
    calls = sorted({one.call for one in told}, key=lambda call: call.messages[0][3])
    first = next(one for one in told if one.call == calls[0])
    second, *others = (one for one in told if one.call == calls[1])
    domain, word, identifier, moment_ms = second.call.messages[0]
    moved = [smockron.Told(((domain, word, identifier, moment_ms + by_ms),)) for by_ms in (700, -700)]
    sent = next(one for one in operations if isinstance(one.call, smockron.Account) and one.client == ALONE)
    every = [second, *others]
    return {
        "a message lost on the way to one": [one for one in operations if one is not second],
        "a message lost": [one for one in operations if one not in every],
        "a message twice": [*operations, first._replace(started=(first.ended or 0) + 1)],
        "too long": [one._replace(call=moved[0]) if one in every else one for one in operations],
        "too short": [one._replace(call=moved[1]) if one in every else one for one in operations],
        "a request that nobody made": [one for one in operations if one is not sent],
        "an update lost": [*operations, sent._replace(started=(sent.ended or 0) + 1, ended=(sent.ended or 0) + 2)],
    }


def test_daemon_sends_all_and_only_right_control_messages(tmp_path: Path) -> None:
    wall_ns = time.time_ns() - time.monotonic_ns()
    operations = throttled_lives(tmp_path)
    assert smockron.unexplained(operations, wall_ns, slack_ns=SLACK_NS) == []
    for client in (FIRST, SECOND, THIRD):
        words = [message[1] for message in heard(one for one in operations if one.client == client)]
        assert words.count("DELAY_UNTIL") > CALLS // 2, "hardly anybody had to wait, and the history says little"
    assert "FORGET" in words
    for lie, history in throttled_lies(operations).items():
        history.sort(key=lambda one: one.started)
        assert smockron.unexplained(history, wall_ns, slack_ns=SLACK_NS), f"{lie}, and nobody notices"
