"""counterbench against the smockron protocol of a real daemon, sockets of libzmq, and faulty servers."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from counterd.bench.dialects.smockron import CONTROL_DOMAIN, DOMAIN, rules_of
from counterd.protocols.smockron import wire
from kit import daemon, gates
from kit.loading import load, load_fails

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.daemon import Address, Daemon

OUTCOMES = {
    "noop": {"answered"},
    "account": {"taken"},
    "mix:account=3,noop=1": {"answered", "taken"},
    "control": {"delayed"},
}
SHORT = {"counterd.bench._load.GRACE_S": 0.05}


class Place:
    """The addresses of a master."""

    def __init__(self, address: Address | tuple[str, int]) -> None:
        self.address = address


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Daemon]:
    """A daemon with the rules for a load."""
    rules = gates.write_rules(tmp_path, rules_of(1, 1_000_000))
    with daemon.running(tmp_path, {**gates.SETTINGS, "smockron.rules": str(rules)}) as process:
        yield process


def load_on(counterd: Daemon, **options: Any) -> Any:
    accounting, control = gates.addresses(counterd)
    return load(Place(accounting), protocol="smockron", control_port=control.port, **options)


@pytest.mark.parametrize("work", OUTCOMES)
def test_every_kind_of_request(work: str, master: Daemon) -> None:
    for more in (
        {"depth": 1},
        {"depth": 50, "processes": 2},
        {"depth": 3, "rate": 1e5},
        {"connections": 7, "processes": 3, "name_size": 40},
    ):
        run = load_on(master, **{"connections": 4, "requests": 2000, "work": work, "names": 100, **more})
        assert (run.requests, run.errors, set(run.outcomes)) == (2000, {}, OUTCOMES[work]), more
        assert run.latency.get_total_count() == 2000


def test_the_master_has_counted_all_taken_messages(master: Daemon) -> None:
    run = load_on(master, connections=3, requests=1000, depth=7, names=30, work="account")
    assert run.outcomes == {"taken": 1000}
    stats = master.logged_stats(["smockron"])["smockron"]
    figures = daemon.numbers(dict(word.split("=", 1) for word in stats.split() if "=" in word))
    assert figures["identifiers"] + figures["expired"] >= 30


def test_control_messages_about_other_identifiers_are_not_counted(master: Daemon) -> None:
    """Nor those of another load, whose identifiers have the same numbers."""
    with gates.gate(master) as gate:
        stop = threading.Event()

        def disturb() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                for identifier in (b"nnnnnnnn%08x" % number, b"someone", b"", b"i0000000%08x" % (0xFFFFFFFF - number)):
                    gate.account(CONTROL_DOMAIN, identifier)

        thread = threading.Thread(target=disturb)
        thread.start()
        run = load_on(master, connections=4, requests=3000, depth=9, work="control")
        stop.set()
        thread.join()
    assert (run.requests, run.errors) == (3000, {})


def test_a_domain_without_a_rule_answers_no_control(tmp_path: Path) -> None:
    rules = gates.write_rules(tmp_path)
    with daemon.running(tmp_path, {**gates.SETTINGS, "smockron.rules": str(rules)}) as process:
        run = load_on(process, connections=2, duration=0.1, work="control", patches=SHORT)
        assert (run.requests, run.errors) == (0, {"unanswered": 2})


def test_the_control_port_refuses_a_load(master: Daemon) -> None:
    _, control = gates.addresses(master)
    why = load_fails(Place(control), protocol="smockron", work="account", requests=10)
    assert "error reply" in why
    assert "Invalid socket type" in why


# ---- sockets of libzmq -----------------------------------------------------------------------------------------------


class Library:
    """A master's two sockets, and a thread that gives each message to `take`, while the block runs."""

    def __init__(self, take: Callable[[zmq.Socket[bytes], list[bytes]], object]) -> None:
        self._context = zmq.Context()
        self._sub, self._pub = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        self._sub.subscribe(b"")
        self._sub.rcvtimeo = 20
        ports = [each.bind_to_random_port("tcp://127.0.0.1") for each in (self._sub, self._pub)]
        self.address = ("127.0.0.1", ports[0])
        self.control_port = ports[1]
        self._take = take
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Library:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        idle = False
        while not (idle and self._ends.is_set()):
            idle = True
            with contextlib.suppress(zmq.Again):
                self._take(self._pub, self._sub.recv_multipart())
                idle = False


def test_a_subscriber_of_libzmq_gets_each_message() -> None:
    found: Counter[bytes] = Counter()

    def take(_: zmq.Socket[bytes], parts: list[bytes]) -> None:
        assert parts[:2] == [DOMAIN + b"\0", b"ACCEPTED"]
        assert len(parts) == 6
        assert parts[3].isdigit()
        found[parts[2]] += 1

    with Library(take) as library:
        run = load(library, protocol="smockron", work="account", connections=5, requests=4000, depth=64, names=500)
    assert (run.requests, run.errors, run.outcomes) == (4000, {}, {"taken": 4000})
    assert found.total() == 4000
    assert all(len(identifier) == 16 for identifier in found)


def test_lost_control_messages_are_not_measured() -> None:
    """Each tenth message gets no control message; the first counts as lost once a later one is answered."""
    counted = Counter[str]()

    def take(pub: zmq.Socket[bytes], parts: list[bytes]) -> None:
        counted["all"] += 1
        if counted["all"] % 10:
            pub.send_multipart([parts[0], b"DELAY_UNTIL", parts[2], parts[3]])

    with Library(take) as library:
        run = load(
            library, protocol="smockron", work="control", connections=1, duration=0.1, depth=20,
            control_port=library.control_port, patches=SHORT,
        )  # fmt: skip
    assert (run.requests, run.errors, run.outcomes) == (18, {"unanswered": 2}, {"delayed": 18})


# ---- servers that are wrong ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def saying(*said: bytes) -> Iterator[Place]:
    """A server that sends this to each connection, then waits for its end."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                connection.sendall(b"".join(said))
                while connection.recv(1 << 16):
                    pass

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        try:
            yield Place(listening.getsockname())
        finally:
            listening.shutdown(socket.SHUT_RDWR)


READY = wire.ready(wire.SocketType.SUB)


@pytest.mark.parametrize(
    "said",
    [
        (b"-ERR unknown command\r\n",),
        (wire.greeting()[:10] + b"\1" + bytes(53), READY),
        (wire.greeting(), wire.message(b"hello")),
        (wire.greeting(), READY, wire.message(b"\1a", b"b")),
        (wire.greeting(), READY, wire.subscribe(b""), wire.command(b"PONG", b"\0\0\0\0")),
        (wire.greeting(), READY, wire.subscribe(b""), wire.message(b"hello")),
    ],
)
def test_a_server_that_is_no_master_is_an_error(said: tuple[bytes, ...]) -> None:
    with saying(*said) as place:
        assert "wrong answer" in _said(place)


def _said(place: Place) -> str:
    """The error with which a load ends; the load may have begun when the wrong answer arrives."""
    options = {"protocol": "smockron", "work": "account", "requests": 10, "connections": 1}
    try:
        return load_fails(place, SHORT, **options)
    except AssertionError:
        run = load(place, patches=SHORT, **options)
        return " ".join([*run.errors, *run.evidence])
