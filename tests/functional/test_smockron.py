"""A real master with real gatekeepers, among them those of ZeroMQ's own library."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import zmq

from counterd.client.smockron import Gatekeeper, Verdict
from counterd.protocols.smockron import wire
from counterd.protocols.smockron.wire import Command, SocketType, Status
from kit import daemon, gates
from kit.certificates import client_context
from kit.daemon import Address, wait_until
from kit.gates import DAY_MS, SETTINGS, Gate, Peer, addresses, gate
from kit.machine import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from kit.certificates import Files
    from kit.daemon import Daemon


@pytest.fixture
def serve(start: Callable[..., Daemon], tmp_path: Path) -> Callable[..., Daemon]:
    """Starts a master."""

    def serve(rules: Any = gates.RULES, **settings: str) -> Daemon:
        return start({**SETTINGS, "smockron.rules": gates.write_rules(tmp_path, rules), **settings})

    return serve


def figures(counterd: Daemon) -> dict[str, int]:
    """The figures that the daemon logs."""
    count = len(counterd.lines("stats of smockron"))
    counterd.send_signal(signal.SIGUSR1)
    line = counterd.wait_for_log("stats of smockron", count + 1)
    words = (word.partition("=") for word in line.split() if "=" in word)
    return {name: int(value) for name, _, value in words if value.isdigit()}


# ---- accounting and control ------------------------------------------------------------------------------------------


def test_control_messages_reach_all_gatekeepers(serve: Callable[..., Daemon]) -> None:
    counterd = serve()
    with gate(counterd, b"api\0") as one, gate(counterd) as other, gate(counterd, b"login\0") as third:
        before_ms = time.time_ns() // 1_000_000
        one.account(b"api", b"me", 2)
        other.account(b"api", b"me")
        told = one.told()
        assert (told.domain, told.word, told.identifier) == (b"api", "DELAY_UNTIL", b"me")
        assert 0 <= told.time_ms - before_ms - DAY_MS < DAY_MS, "the third is a day too early, by the master's clock"
        assert other.told() == told
        third.account(b"login", b"me", status=Status.REJECTED)
        third.account(b"login", b"me")
        assert third.told().domain == b"login", "and nothing of api before"


def test_a_gatekeeper_that_does_not_read_loses_messages_and_delays_no_others(serve: Callable[..., Daemon]) -> None:
    counterd = serve(**{"smockron.max_queued": "64K"})
    identifiers = [b"%06d" % number for number in range(1000)]
    with gate(counterd) as one, gate(counterd) as deaf:
        deaf.control.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        sent = 0
        while not figures(counterd)["lost"]:
            one.accounting.socket.sendall(
                b"".join(wire.accounting(b"login", Status.ACCEPTED, identifier, 0) for identifier in identifiers)
            )
            for identifier in identifiers:
                assert one.told().identifier == identifier
            one.accounting.settle()
            sent += len(identifiers)
        found = figures(counterd)
        assert found["published"] == sent
        assert found["delivered"] + found["lost"] == 2 * sent, "each was for both"
        one.account(b"login", b"still")
        assert one.told().identifier == b"still"


@pytest.mark.parametrize("unix", [False, True], ids=["tcp", "unix"])
def test_a_gatekeeper_that_never_reads_is_closed(unix: bool, serve: Callable[..., Daemon], short_path: Path) -> None:
    path = str(short_path / "control")
    patience = {"smockron.user_timeout": "2", "smockron.write_timeout": "2"}
    counterd = serve(**{"smockron.max_queued": "64K", "smockron.control_socket": path, **patience})
    with gate(counterd) as one, socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        listening.connect(path if unix else addresses(counterd)[1])
        deaf = Peer(listening, SocketType.SUB)
        listening.sendall(wire.subscribe(b""))
        deaf.settle()
        while not figures(counterd)["lost"]:
            one.account(b"login", b"x" * 4000, 20)
            for _ in range(20):
                one.told()
        wait_until(lambda: figures(counterd)["subscriptions"] == 1, "it has been closed")
        one.account(b"login", b"still")
        assert one.told().identifier == b"still"


def test_a_reload_changes_all_rules_or_none(serve: Callable[..., Daemon], tmp_path: Path) -> None:
    counterd = serve()
    with gate(counterd) as one:
        gates.write_rules(tmp_path, {"new": {"rate": "1/day", "burst": 0}, "bad": {"rate": "fast", "burst": 0}})
        counterd.send_signal(signal.SIGHUP)
        line = counterd.wait_for_log("not reloaded")
        assert line.endswith("""'bad': rate must have a form such as "100/sec" or "10 per 2 min", not 'fast'""")
        one.account(b"login", b"me")
        assert one.told().domain == b"login"
        gates.write_rules(tmp_path, {"new": {"rate": "1/day", "burst": 0}})
        counterd.send_signal(signal.SIGHUP)
        counterd.wait_for_log(" reloaded ")
        one.account(b"login", b"me")
        one.account(b"new", b"me")
        assert one.told().domain == b"new"


def test_a_file_of_rules_with_mistakes_prevents_the_start(tmp_path: Path) -> None:
    path = gates.write_rules(tmp_path, {"a": {"rate": "1/s"}, "b": {"interval": 0, "burst": 1}})
    config = tmp_path / "counterd.conf"
    config.write_text(daemon.config_text({**SETTINGS, "smockron.rules": path}))
    ended = daemon.run("-c", config)
    assert ended.returncode == 2
    assert f"smockron.rules: {path}: 'a': burst is missing\n" in ended.stderr
    assert f"smockron.rules: {path}: 'b': the interval is 0: every request would pass\n" in ended.stderr


# ---- listeners -------------------------------------------------------------------------------------------------------


def test_tls_on_both_ports(serve: Callable[..., Daemon], pem: Files) -> None:
    counterd = serve(**{"smockron.tls.cert": str(pem.server), "smockron.bind": "127.0.0.1"})
    with contextlib.ExitStack() as stack:
        sockets = []
        for address in addresses(counterd):
            plain = stack.enter_context(socket.create_connection(address, PATIENCE))
            sockets.append(stack.enter_context(client_context().wrap_socket(plain, server_hostname="localhost")))
        one = Gate(*sockets)
        one.account(b"login", b"me")
        assert one.told().identifier == b"me"


def test_limits_count_connections_of_both_ports(serve: Callable[..., Daemon]) -> None:
    counterd = serve(**{"smockron.max_connections": "3"})
    with gate(counterd), socket.create_connection(addresses(counterd)[1], PATIENCE) as third:
        Peer(third, SocketType.SUB)
        with socket.create_connection(addresses(counterd)[0], PATIENCE) as fourth:
            assert fourth.recv(1) == b""
        counterd.wait_for_log("connection refused")


def test_the_daemon_stops_while_gatekeepers_are_connected(serve: Callable[..., Daemon]) -> None:
    counterd = serve()
    with gate(counterd) as one:
        one.account(b"login", b"me")
        counterd.send_signal(signal.SIGTERM)
        assert one.told().identifier == b"me"
        with contextlib.suppress(ConnectionError):
            assert one.control.socket.recv(1) == b""
        counterd.process.wait(PATIENCE)


def test_a_publisher_at_the_control_port_gets_an_error(serve: Callable[..., Daemon]) -> None:
    counterd = serve()
    with socket.create_connection(addresses(counterd)[1], PATIENCE) as wrong:
        wrong.sendall(wire.greeting() + wire.ready(SocketType.PUB))
        parser = wire.Parser()
        found: list[Any] = []
        while data := wrong.recv(1 << 16):
            found += parser.feed(data)
        assert found[1:] == [Command(b"ERROR", b"\x13Invalid socket type")], "after READY"


# ---- ZeroMQ's own library --------------------------------------------------------------------------------------------


class Real:
    """A gatekeeper made with ZeroMQ, during the block. where: both addresses of a master, or of a router."""

    def __init__(self, where: Iterable[Address], *options: tuple[int, int]) -> None:
        self.context = zmq.Context()
        self.pub, self.sub = self.context.socket(zmq.PUB), self.context.socket(zmq.SUB)
        for each, address in zip((self.pub, self.sub), where, strict=True):
            for option, value in options:
                each.setsockopt(option, value)
            each.setsockopt(zmq.RCVTIMEO, 100)
            each.connect(f"tcp://{address.host}:{address.port}")

    def __enter__(self) -> Real:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def account(self, domain: bytes, identifier: bytes) -> None:
        self.pub.send_multipart([domain + b"\0", b"ACCEPTED", identifier, b"0", b"", b""])

    def told(self) -> list[bytes]:
        """Returns the next control message; None if there is none for a while."""
        with contextlib.suppress(zmq.Again):
            return self.sub.recv_multipart()
        return []

    def asks_until_told(self, identifier: bytes, domain: bytes = b"login") -> list[bytes]:
        """Sends repeatedly until a message arrives: whatever is sent before all is connected is lost."""

        def heard() -> list[bytes]:
            self.account(domain, identifier)
            return self.told()

        return wait_until(heard, "a control message")


def test_zeromq_publishes_and_subscribes(serve: Callable[..., Daemon]) -> None:
    counterd = serve()
    with Real(addresses(counterd)) as real:
        real.sub.subscribe(b"login\0")
        domain, word, identifier, moment = real.asks_until_told(b"me")
        assert (domain, word, identifier) == (b"login\0", b"DELAY_UNTIL", b"me")
        assert moment.isdigit()
        real.sub.unsubscribe(b"login\0")
        wait_until(lambda: figures(counterd)["subscriptions"] == 0, "it has cancelled")
        while real.told():
            pass
        real.account(b"login", b"x" * 300)
        assert real.told() == []
        real.sub.subscribe(b"")
        while real.asks_until_told(b"y" * 300)[2] != b"y" * 300:
            pass


def test_zeromqs_heartbeats_are_answered_and_it_reconnects(
    serve: Callable[..., Daemon], start: Callable[..., Daemon], tmp_path: Path
) -> None:
    counterd = serve()
    heartbeats = (zmq.HEARTBEAT_IVL, 20), (zmq.HEARTBEAT_TIMEOUT, 2000), (zmq.RECONNECT_IVL, 10)
    with Real(addresses(counterd), *heartbeats) as real:
        real.sub.subscribe(b"login\0")
        assert real.asks_until_told(b"me")
        ports = dict(zip(("port", "control_port"), addresses(counterd), strict=True))
        counterd.kill()
        again = {f"smockron.{name}": str(address.port) for name, address in ports.items()}
        start({**SETTINGS, **again, "smockron.rules": tmp_path / "rules.json"})
        while real.told():
            pass
        assert real.asks_until_told(b"again")[2] == b"again"


@contextlib.contextmanager
def router(*masters: Daemon) -> Iterator[list[Address]]:
    """Runs a router made with ZeroMQ between gatekeepers and these masters. Yields its addresses for each of the two
    ports.
    """
    context = zmq.Context()
    found, threads = [], []
    for port, (front, back) in enumerate([(zmq.XSUB, zmq.XPUB), (zmq.XPUB, zmq.XSUB)]):
        gatekeepers, behind = context.socket(front), context.socket(back)
        found.append(Address("127.0.0.1", gatekeepers.bind_to_random_port("tcp://127.0.0.1")))
        for master in masters:
            behind.connect("tcp://{}:{}".format(*addresses(master)[port]))
        threads.append(threading.Thread(target=route, args=(gatekeepers, behind)))
        threads[-1].start()
    try:
        yield found
    finally:
        context.term()
        for thread in threads:
            thread.join()


def route(*sockets: zmq.Socket[bytes]) -> None:
    """Routes messages until the context ends."""
    with contextlib.suppress(zmq.ContextTerminated):
        zmq.proxy(*sockets)
    for each in sockets:
        each.close(linger=0)


def our_gatekeeper(where: Sequence[Address], domain: str) -> Gatekeeper:
    """A gatekeeper of counterd's, behind a router."""
    accounting, control = (f"{address.host}:{address.port}" for address in where)
    return Gatekeeper((accounting, control), domain)


def test_behind_a_router_each_master_has_its_domains(serve: Callable[..., Daemon], tmp_path: Path) -> None:
    masters = []
    for domain in "login", "more":
        (tmp_path / domain).mkdir()
        rules = gates.write_rules(tmp_path / domain, {domain: {"rate": "1/day", "burst": 0}})
        masters.append(serve(**{"smockron.rules": str(rules)}))
    with router(*masters) as where, Real(where) as real, our_gatekeeper(where, "more") as ours:
        real.sub.subscribe(b"login\0")
        real.sub.subscribe(b"more\0")
        assert real.asks_until_told(b"me", b"login")[:3] == [b"login\0", b"DELAY_UNTIL", b"me"]
        while real.asks_until_told(b"me", b"more")[:3] != [b"more\0", b"DELAY_UNTIL", b"me"]:
            pass
        wait_until(lambda: ours.decide("me").verdict is Verdict.REJECT, "ours heard it too")
        assert [figures(each)["identifiers"] for each in masters] == [1, 1]  # although both heard of all requests
