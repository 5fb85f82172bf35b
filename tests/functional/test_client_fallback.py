"""The blocking client of tokens where its server says strange things, too late, or nothing: what it does by itself."""

from __future__ import annotations

import contextlib
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import scripted
from counterd.client import _fallback, _keeper, _shared
from counterd.client.sentinel import Answer, Blocked, Client, NoSuchRule, TokenLost, TokenRefused
from counterd.errors import ConnectionLost, ProtocolError, Timeout
from counterd.protocols.sentinel.wire import MessageType, Status
from daemon import PATIENCE, wait_until
from ports import free_ports
from tokens import Late, Request, Server

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SHORT = 0.05  # a timeout that passes
PASSED, REFUSED = Answer(0, fallback=True), Answer(1, fallback=True)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        yield made


def made(server: Server, **options: Any) -> Client:
    return Client(*server.address, **{"timeout": PATIENCE, "limits": {101: 1}, **options})


@contextlib.contextmanager
def impatient(client: Client) -> Iterator[None]:
    """Its connection waits for no answer that is not there already."""
    client.ping()
    client._link._timeout = SHORT
    yield
    client._link._timeout = PATIENCE


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "counterd.client.sentinel"]


# ---- answers --------------------------------------------------------------------------------------------------------


def test_answers_in_another_order(server: Server) -> None:
    """Each thread gets its own."""
    server.waits = {MessageType.FLOW}
    server.limits = dict.fromkeys(range(1, 6), 10)
    got: dict[int, Answer] = {}
    with made(server) as client:

        def ask(number: int) -> None:
            got[number] = client.flow(number, number)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 6)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(server.held_back) == 5, "all have asked")
        assert client.acquire(5).id, "others do not wait for them"
        server.go_on()
        for thread in threads:
            thread.join(PATIENCE)
    assert got == {number: Answer(0, 10 - number) for number in range(1, 6)}


def test_the_namespace_is_said_first(server: Server) -> None:
    with made(server, namespace="sch\u00f6n") as client:
        client.flow(101)
        client._link._drop("the test cut it")
        client.flow(101)
    asked = [(request.connection, request.type) for request in server.asked_for]
    assert asked == [(0, MessageType.PING), (0, MessageType.FLOW), (1, MessageType.PING), (1, MessageType.FLOW)]
    assert server.asked_for[0].data == struct.pack(">i", 6) + "sch\u00f6n".encode()


def test_what_makes_no_sense(server: Server) -> None:
    server.says = {MessageType.PING: 0}  # which is too short
    with made(server, limits={}) as client, pytest.raises(ProtocolError, match="no local limit is given for flow 101"):
        client.flow(101)


# ---- too late -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("holds", [False, True])
def test_a_grant_that_comes_too_late_is_given_back(server: Server, holds: bool) -> None:
    """At once, though nobody uses the client any more."""
    with made(server, fallback="closed") as client:
        with impatient(client):
            server.waits = {MessageType.ACQUIRE}
            with pytest.raises(Timeout):
                client.hold(101).__enter__() if holds else client.acquire(101)
        time.sleep(2 * SHORT)
        server.go_on()
        wait_until(lambda: server.seen(MessageType.RELEASE), "it is given back")
        wait_until(lambda: server.in_use() == 0, "it is free")
        wait_until(lambda: client.stats().late == 1, "it is counted")
        assert not client._link.closed


def test_a_server_that_owes_grants_for_too_long(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_keeper, "LATE_MAX_S", 2 * SHORT)
    with made(server, fallback="closed") as client:
        server.waits = {MessageType.ACQUIRE}
        with impatient(client), pytest.raises(Timeout):
            client.acquire(101)
        wait_until(lambda: client._link.closed, "it is given up")
        server.go_on()
        assert client.ping()


def test_leases_are_kept_while_a_grant_is_owed(server: Server) -> None:
    server.limits = {101: 1, 102: 1}
    with made(server, fallback="closed") as client, client.hold(101) as hold:
        server.waits = {MessageType.ACQUIRE}
        with impatient(client), pytest.raises(Timeout):
            client.acquire(102)
        wait_until(lambda: len(server.seen(MessageType.KEEP)) > 1, "it is kept again")
        assert not hold.lost
        assert server.in_use() == 1
        server.go_on()
        wait_until(lambda: client.stats().late == 1, "it is given back")


@pytest.mark.parametrize("status", [Status.NO_RULE, Status.NOT_AVAILABLE, Status.FAIL])
def test_a_lease_that_is_not_renewed_now(server: Server, status: Status) -> None:
    """It is asked for again, and goes on in time."""
    with made(server) as client, client.hold(101) as hold:
        for says in ({}, {MessageType.KEEP: status}, {}):
            server.says = says
            kept = len(server.seen(MessageType.KEEP))
            wait_until(lambda kept=kept: len(server.seen(MessageType.KEEP)) > kept, "it is kept")
        assert not hold.lost
        server.says = {MessageType.RELEASE: status}


def test_a_token_that_is_unknown_when_it_is_given_back(server: Server) -> None:
    with made(server) as client:
        client._leases.usual[101] = 60.0  # so that it is not kept before
        hold = client.hold(101).__enter__()
        server.tokens.clear()
        assert not hold.lost
        with pytest.raises(TokenLost, match="the server does not know it"):
            hold.__exit__(None, None, None)
        assert client.stats().lost == 1


# ---- falling back ---------------------------------------------------------------------------------------------------


def test_local_limits_while_there_is_no_server(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    """One line when it begins, one when it ends: not one for each call."""
    (port,) = free_ports(1)
    with Client(port=port, limits={101: 2, 201: 1}, timeout=PATIENCE) as client:
        assert [client.flow(101) for _ in range(3)] == [PASSED, PASSED, REFUSED]
        assert [client.param(201, ["a"]), client.param(201, ["b"]), client.param(201, ["a"])] == [
            PASSED,
            PASSED,
            REFUSED,
        ]
        with client.hold(101) as hold:
            assert (hold.fallback, hold.lost) == (True, False)
            second = client.acquire(101)
            assert client.keep(second) > 10**9
            with pytest.raises(Blocked), client.hold(101, timeout=SHORT):
                pytest.fail("granted")
            with pytest.raises(Blocked):
                client.acquire(101)
            assert client.release(second)
            assert not client.release(second)
        with pytest.raises(ConnectionLost, match=r"cannot connect .*; no local limit is given for flow 7$"):
            client.flow(7)
        with pytest.raises(ConnectionLost, match=r"for flow 7$"):
            client.acquire(7)
        begun = lines(caplog)
        assert len(begun) == 1
        assert begun[0].startswith(f"cannot connect to 127.0.0.1:{port}: ")
        assert begun[0].endswith("refused: going on with local limits")
        assert client.stats().falling_back in begun[0]
        refused = client.stats().refused
        assert client.stats()[1:] == (1, 6, refused, 0, 0)
    assert lines(caplog)[1].endswith(f": let 6 through without it, and refused {refused}")


def test_it_ends_when_the_server_is_back(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_fallback, "QUIET_S", 0.0)
    with made(server, fallback="open") as client:
        for _ in range(2):
            with impatient(client):
                server.waits = {MessageType.FLOW}
                assert [client.flow(101), client.flow(101)] == [PASSED, PASSED]
            server.go_on()
            assert not client.flow(101).fallback
            assert client.stats().falling_back == ""
    assert [line.partition(":")[0].partition(" after")[0] for line in lines(caplog)] == [
        "127.0.0.1",
        "the server decides again",
    ] * 2
    assert lines(caplog)[3].endswith("let 2 through without it, and refused 0")


def test_open_and_closed() -> None:
    (port,) = free_ports(1)
    with Client(port=port, fallback="open") as opened, Client(port=port, fallback="closed") as closed:
        with opened.hold(7, 1000):
            assert opened.flow(7, 1000) == PASSED
        assert closed.flow(7) == REFUSED
        with pytest.raises(ConnectionLost, match=r"^cannot connect"):
            closed.acquire(7)


def test_a_hold_that_nothing_is_let_through_for_waits_for_the_server() -> None:
    (port,) = free_ports(1)
    with Client(port=port, fallback="closed", timeout=PATIENCE) as client:
        start = time.monotonic()
        with pytest.raises(ConnectionLost, match="cannot connect"), client.hold(101, timeout=0.15):
            pytest.fail("granted")
        assert time.monotonic() - start >= 0.15
        held = threading.Event()

        def wait() -> None:
            with client.hold(101):
                held.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        with Late(port):
            assert held.wait(PATIENCE)
            waiting.join(PATIENCE)


@pytest.mark.parametrize("status", [-4, -2, -1, 3, 5, 4, 99])
def test_answers_that_are_no_decision(server: Server, status: int, caplog: pytest.LogCaptureFixture) -> None:
    server.says = dict.fromkeys((MessageType.FLOW, MessageType.PARAM, MessageType.ACQUIRE), status)
    with made(server) as client:
        assert [client.flow(101), client.flow(101)] == [PASSED, REFUSED]
        assert client.param(101, ["a"]) == PASSED
        assert client.acquire(101).fallback
        for call in (client.flow, client.acquire, lambda flow_id: client.param(flow_id, [1])):
            with pytest.raises(NoSuchRule if status == 3 else TokenRefused, match=rf"\(status {status}\): .* flow 7$"):
                call(7)
        with pytest.raises(TokenRefused), client.hold(7):
            pytest.fail("granted")
        assert len(lines(caplog)) == 2, "one for each flow"


def test_a_token_that_can_neither_be_kept_nor_given_back(server: Server) -> None:
    with made(server) as client:
        token = client.acquire(101)
        server.says = {MessageType.KEEP: 5, MessageType.RELEASE: -1, MessageType.PING: -1}
        with pytest.raises(TokenRefused, match=rf"not available \(status 5\): token {token.id} of flow 101"):
            client.keep(token)
        with pytest.raises(TokenRefused, match=r"failed \(status -1\)"):
            client.release(token)
        with pytest.raises(TokenRefused, match=r"failed \(status -1\)"):
            client.ping()
        server.says = {MessageType.RELEASE: 3}
        assert client.release(token), "its rule has gone, and so has it"


# ---- the connection -------------------------------------------------------------------------------------------------


def test_no_call_waits_for_a_server_that_does_not_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    """But the first: then only the keeper does."""
    connecting: list[str] = []

    def does_not_accept(*_: object) -> None:
        connecting.append(threading.current_thread().name)
        raise TimeoutError

    monkeypatch.setattr(_shared, "connected_socket", does_not_accept)
    with Client(fallback="open", connect_timeout=SHORT) as client:

        def asks() -> bool:
            assert client.flow(101) == PASSED
            return len(connecting) == 4

        wait_until(asks, "it has tried again")
        assert client.stats().falling_back == "127.0.0.1:18730 did not accept a connection within 0.05 s"
    assert connecting == ["MainThread"] + ["counterd-keep"] * 3


def test_calls_reach_a_server_that_is_back() -> None:
    (port,) = free_ports(1)
    with Client(port=port, timeout=PATIENCE, limits={101: 10**6}) as client:
        assert client.flow(101).fallback
        with Late(port):
            wait_until(lambda: not client.flow(101).fallback, "it is found")


def test_a_server_that_closes_each_connection(server: Server) -> None:
    """As one that has no room does: that is not tried without a pause."""

    def close(_: Request) -> bytes:
        raise scripted.Hangup

    server.answer = close  # type: ignore[method-assign]
    with made(server, fallback="open") as client:
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            assert client.flow(101) == PASSED
    assert len(server.peers) < 10


def test_a_lock_that_a_thread_of_the_client_has(server: Server) -> None:
    """A signal handler may close the client wherever it comes."""
    for keepers in (True, False):
        client = made(server)
        with client.hold(101), client._keeper.lock if keepers else client._connecting:
            client.close()
        wait_until(lambda: not any(thread.name == "counterd-keep" for thread in threading.enumerate()), "it ends")


@pytest.mark.parametrize("call", [lambda client: client.flow(101), lambda client: client.acquire(101)])
def test_closed_while_it_waits(server: Server, call: Callable[[Client], object]) -> None:
    """That is no reason to fall back."""
    server.waits = {MessageType.FLOW, MessageType.ACQUIRE}
    client = made(server, fallback="open")
    errors: list[Exception] = []

    def ask() -> None:
        with pytest.raises(ConnectionLost, match=r"close\(\) was called") as caught:
            call(client)
        errors.append(caught.value)

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: server.held_back, "it has asked")
    client.close()
    asking.join(PATIENCE)
    assert len(errors) == 1


def test_logging_is_left_to_the_program() -> None:
    code = "import logging, counterd.client.sentinel as told; print(logging.getLogger(told.__name__).handlers)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert ended.stdout == "[]\n"
