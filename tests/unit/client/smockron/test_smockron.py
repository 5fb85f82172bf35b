"""The gatekeepers for threads and for asyncio against a small master whose behaviour each test sets."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from counterd.client import _background, _connection, smockron
from counterd.client.smockron import AsyncGatekeeper, Gatekeeper, Rejected, Verdict, _aio, _sockets
from counterd.client.smockron._gatekeeping import Core
from counterd.errors import ConnectionLost
from counterd.protocols.smockron import wire
from kit import loops
from kit.certificates import client_context, server_context
from kit.daemon import wait_until
from kit.machine import LONG_S, PATIENCE, is_open
from kit.scripted.smockron import Master, unix_ms
from unit.client.smockron.test_zmtp import OLD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("unhurried")
FAR_S = 1e6  # seconds: nobody is told to wait for longer
LOOPS = pytest.mark.parametrize("loop_name", loops.NEW_LOOP)


@pytest.fixture
def master() -> Iterator[Master]:
    with Master() as running:
        yield running


@contextlib.contextmanager
def gatekeeper(master: Master, **options: Any) -> Iterator[Gatekeeper]:
    """A connected gatekeeper."""
    with Gatekeeper(master.where, **{"timeout": PATIENCE, "max_delay_s": FAR_S, **options}) as made:
        assert made.connect(PATIENCE)
        yield made


@contextlib.asynccontextmanager
async def async_gatekeeper(master: Master, **options: Any) -> Any:
    async with AsyncGatekeeper(master.where, **{"timeout": PATIENCE, "max_delay_s": FAR_S, **options}) as made:
        assert await made.connect(PATIENCE)
        yield made


def told(made: Any, count: int = 1) -> None:
    wait_until(lambda: made.stats().told >= count, "it was told")


async def async_told(made: Any, count: int = 1) -> None:
    await loops.until(lambda: made.stats().told >= count, "it was told")


async def elsewhere(function: Callable[..., Any], *arguments: Any) -> Any:
    return await asyncio.to_thread(function, *arguments)


# ---- both ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["threads", *loops.NEW_LOOP])
def test_a_new_domain_is_accounted_for_once_its_control_messages_arrive(
    master: Master, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the master could tell what the first messages cause before it has read the subscription."""
    monkeypatch.setattr("counterd.client.smockron._zmtp.JOIN_S", LONG_S)

    def uses(made: Any) -> None:
        master.control.answers = False
        for domain in ("late", None):
            assert made.decide("a", domain).verdict is Verdict.PASS

    def check() -> None:
        assert [message[0] for message in master.wait_for(1)] == [b"default\0"], "the first one waits"
        wait_until(lambda: b"late\0" in master.control.commands(b"SUBSCRIBE"), "it is subscribed to")
        wait_until(lambda: len(master.control.commands(b"PING")) == 2, "the master is asked")
        master.control.tell(wire.pong(master.control.commands(b"PING")[-1]))
        assert [message[0] for message in master.wait_for(2)] == [b"default\0", b"late\0"]

    async def main() -> None:
        async with async_gatekeeper(master) as made:
            uses(made)
            await elsewhere(check)

    if shape == "threads":
        with gatekeeper(master) as made:
            uses(made)
            check()
    else:
        loops.run(main(), shape)


@pytest.fixture(params=["ZMTP 3.0 without PONG", "PONG without context"])
def terse(master: Master, request: pytest.FixtureRequest) -> Master:
    """A master that never confirms subscriptions."""
    for port in (master.accounting, master.control):
        if request.param == "PONG without context":
            port.echoes = False
        else:
            port.answers, port.greeting = False, bytes(OLD)
    return master


def test_a_master_without_pongs_counts_as_connected_after_some_time(terse: Master) -> None:
    with Gatekeeper(terse.where, timeout=PATIENCE, heartbeat=LONG_S) as made:
        connecting = threading.Thread(target=made.connect, args=(2 * LONG_S,))
        connecting.start()
        connecting.join(PATIENCE)
        assert not connecting.is_alive()
        terse.control.hang_up()
        wait_until(lambda: made.stats().lost, "it saw that")
        wait_until(lambda: not made.stats().away, "it is back")
    with Gatekeeper(terse.where, timeout=PATIENCE, heartbeat=LONG_S) as made:
        made.decide("a")
    assert len(terse.wait_for(1)) == 1


@LOOPS
def test_a_master_without_pongs_counts_as_connected_after_some_time_asyncio(terse: Master, loop_name: str) -> None:
    async def main() -> None:
        async with AsyncGatekeeper(terse.where, timeout=PATIENCE, heartbeat=LONG_S) as made:
            assert await made.connect(PATIENCE)
            terse.control.hang_up()
            await loops.until(lambda: made.stats().lost, "it saw that")
            await loops.until(lambda: not made.stats().away, "it is back")
        async with AsyncGatekeeper(terse.where, timeout=PATIENCE, heartbeat=LONG_S) as made:
            made.decide("a")

    loops.run(main(), loop_name)
    assert len(terse.wait_for(1)) == 1


def test_decisions_are_accounted_and_control_messages_obeyed(master: Master) -> None:
    with gatekeeper(master, rejected="all") as made:
        assert master.control.commands(b"SUBSCRIBE") == [b"default\0"]
        assert made.decide("a", log_info="info").verdict is Verdict.PASS
        master.tell("DELAY_UNTIL", b"a", unix_ms() + 100_000)
        told(made)
        decision = made.decide("a")
        assert decision.verdict is Verdict.DELAY
        assert 0 < decision.delay_s <= 100
        assert made.stats().delaying == 1
        made.gave_up(decision)
        assert made.stats().delaying == 0
        master.tell("FORGET", b"a", 0)
        told(made, 2)
        assert made.decide("a").verdict is Verdict.PASS
    messages = master.wait_for(3)
    assert [message[:3] for message in messages] == [
        (b"default\0", status, b"a") for status in (b"ACCEPTED", b"DELAYED", b"ACCEPTED")
    ]
    assert messages[0][5] == b"info"
    assert int(messages[1][4]) == decision.until_ms


@LOOPS
def test_decisions_are_accounted_and_control_messages_obeyed_asyncio(master: Master, loop_name: str) -> None:
    async def main() -> None:
        async with async_gatekeeper(master) as made:
            assert made.decide("a", log_info="info").verdict is Verdict.PASS
            await elsewhere(master.tell, "DELAY_UNTIL", b"a", unix_ms() + 100_000)
            await async_told(made)
            decision = made.decide("a")
            assert decision.verdict is Verdict.DELAY
            made.gave_up(decision)
            assert made.stats().delaying == 0
        await elsewhere(master.wait_for, 2)

    loops.run(main(), loop_name)
    assert [message[1] for message in master.accounting.messages()] == [b"ACCEPTED", b"DELAYED"]


@LOOPS
def test_a_large_read_is_handled_in_pieces(master: Master, loop_name: str) -> None:
    moment = b"%d" % (unix_ms() + LONG_S * 1000)
    message = wire.message(b"default\0", b"DELAY_UNTIL", b"same", moment)
    count = 5000

    async def main() -> None:
        async with async_gatekeeper(master) as made:
            told = [0]
            sending = asyncio.create_task(elsewhere(master.control.tell, message * count))
            while told[-1] < count:
                await asyncio.sleep(0)
                told.append(made.stats().told)
            await sending
            most = max(after - before for before, after in itertools.pairwise(told))
            assert most * len(message) <= 2 * _aio.PIECE, "the end of one read, and the beginning of the next"

    loops.run(main(), loop_name)


def test_decisions_before_the_connection_are_accounted(master: Master) -> None:
    """Also if the gatekeeper is closed at once."""
    master.accounting.says = wire.message(b"\1default\0")  # as ZMTP 3.0 has it
    with Gatekeeper(master.where, timeout=PATIENCE) as made:
        for _ in range(20):
            made.decide("a")
    assert len(master.wait_for(20)) == 20
    assert made.stats().sent == 20


@LOOPS
def test_decisions_before_the_connection_are_accounted_asyncio(master: Master, loop_name: str) -> None:
    async def main() -> None:
        async with AsyncGatekeeper(master.where, timeout=PATIENCE) as made:
            for _ in range(20):
                made.decide("a")
        assert made.stats().sent == 20

    loops.run(main(), loop_name)
    assert len(master.wait_for(20)) == 20


def test_a_lost_connection_is_made_again(master: Master) -> None:
    with gatekeeper(master) as made:
        for count, port in enumerate((master.accounting, master.control, master.accounting), 1):
            port.hang_up()
            wait_until(lambda count=count: made.stats().lost >= count, "it saw that")
            assert made.decide("a").verdict is Verdict.PASS
            assert made.connect(PATIENCE)
        master.tell("DELAY_UNTIL", b"a", unix_ms() + 100_000)
        told(made)
        assert made.decide("a").verdict is Verdict.DELAY
        assert made.stats().away == {}
    assert master.control.commands(b"SUBSCRIBE") == 2 * [b"default\0"]


@LOOPS
def test_a_lost_connection_is_made_again_asyncio(master: Master, loop_name: str) -> None:
    async def main() -> None:
        async with async_gatekeeper(master) as made:
            for count, port in enumerate((master.accounting, master.control), 1):
                port.hang_up()
                await loops.until(lambda count=count: made.stats().lost >= count, "it saw that")
                assert made.decide("a").verdict is Verdict.PASS
                assert await made.connect(PATIENCE)
            await elsewhere(master.tell, "DELAY_UNTIL", b"a", unix_ms() + 100_000)
            await async_told(made)
            assert made.stats().away == {}

    loops.run(main(), loop_name)


def test_a_master_that_answers_no_ping_is_given_up(master: Master) -> None:
    master.control.answers = False
    with Gatekeeper(master.where, timeout=PATIENCE, heartbeat=0.02) as made:
        assert not made.connect(0.0)
        wait_until(lambda: made.stats().lost, "it was given up")
        wait_until(lambda: master.control.commands(b"PING"), "it was asked")
        assert len(master.control.peers) >= 1


@LOOPS
def test_a_master_that_answers_no_ping_is_given_up_asyncio(master: Master, loop_name: str) -> None:
    master.accounting.answers = False

    async def main() -> None:
        async with async_gatekeeper(master, heartbeat=0.02) as made:
            await loops.until(lambda: made.stats().lost, "it was given up")

    loops.run(main(), loop_name)


def test_the_pings_of_a_master_are_answered(master: Master) -> None:
    with gatekeeper(master):
        master.control.tell(wire.ping(1, b"context"))
        wait_until(lambda: master.control.commands(b"PONG") == [b"context"], "a PONG")


def test_a_master_that_does_not_greet_is_given_up(master: Master) -> None:
    master.control.greets = master.accounting.greets = False
    with Gatekeeper(master.where, timeout=0.05) as made:
        assert not made.connect(0.01)
        wait_until(lambda: made.stats().lost >= 2, "it tried again")
        assert next(iter(made.stats().away.values())).endswith("did not finish ZMTP's handshake within 0.05 s")
        assert made.decide("a").verdict is Verdict.PASS


def test_without_a_master_requests_pass_and_closing_is_quick() -> None:
    with Gatekeeper(("127.0.0.1:1", "127.0.0.1:2")) as made:
        assert made.decide("a").verdict is Verdict.PASS
        wait_until(lambda: made.stats().lost, "it tried")
        assert "cannot connect to 127.0.0.1:2" in made.stats().away["127.0.0.1:1"]
        assert not made.connect(0.01)
    with pytest.raises(ConnectionLost, match="the gatekeeper is closed"):
        made.decide("a")
    made.close()


@LOOPS
def test_without_a_master_requests_pass_asyncio(loop_name: str) -> None:
    async def main() -> None:
        async with AsyncGatekeeper(("127.0.0.1:1", "127.0.0.1:2")) as made:
            assert made.decide("a").verdict is Verdict.PASS
            await loops.until(lambda: made.stats().lost, "it tried")
            assert not await made.connect(0.01)
        with pytest.raises(ConnectionLost, match="the gatekeeper is closed"):
            made.decide("a")

    loops.run(main(), loop_name)


@pytest.mark.parametrize("shape", ["threads", *loops.NEW_LOOP])
def test_an_exception_while_connecting_is_logged_and_retried(
    master: Master, shape: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fails = [True]
    connecting, opening = _sockets.connected_socket, _aio.open_transport

    def connect(*arguments: Any) -> Any:
        return connecting(*arguments) if not fails else 1 // 0

    async def open_transport(*arguments: Any) -> Any:
        return await opening(*arguments) if not fails else 1 // 0

    def check(made: Any) -> None:
        (why,) = made.stats().away.values()
        assert why.startswith("internal error: ZeroDivisionError(")
        fails.clear()

    async def main() -> None:
        async with AsyncGatekeeper(master.where, timeout=PATIENCE) as made:
            made.decide("a")
            await loops.until(lambda: made.stats().lost, "it failed")
            check(made)
            assert await made.connect(PATIENCE)

    monkeypatch.setattr(_sockets, "connected_socket", connect)
    monkeypatch.setattr(_aio, "open_transport", open_transport)
    if shape == "threads":
        with Gatekeeper(master.where, timeout=PATIENCE) as made:
            assert made.decide("a").verdict is Verdict.PASS
            wait_until(lambda: made.stats().lost, "it failed")
            check(made)
            assert made.connect(PATIENCE)
    else:
        loops.run(main(), shape)
    said = {record.getMessage() for record in caplog.records if record.exc_info}
    assert said
    assert said <= {f"a bug ended an attempt to connect to the master at {each}" for each in master.where}


def test_the_thread_goes_on_after_an_exception(
    master: Master, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taking = Core.take
    with gatekeeper(master) as made:
        monkeypatch.setattr(Core, "take", lambda *_: 1 // 0)
        made.decide("a")
        wait_until(lambda: made.stats().lost == 2, "it failed")
        (why,) = made.stats().away.values()
        assert why.startswith("the thread failed: ZeroDivisionError(")
        monkeypatch.setattr(Core, "take", taking)
        assert made.connect(PATIENCE)
    assert "the thread of a gatekeeper failed" in {record.getMessage() for record in caplog.records if record.exc_info}


@pytest.mark.parametrize("cause", ["slow", "hopeless"])
def test_a_master_that_cannot_be_connected_to_does_not_stop_the_others(
    master: Master, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    """Not even while its host is looked up."""
    connecting, begun, over = _sockets.connected_socket, threading.Event(), threading.Event()

    def connect(address: Any, timeout: float) -> Any:
        if address.host == "127.0.0.1":
            return connecting(address, timeout)
        begun.set()
        over.wait(PATIENCE)
        raise OSError("it cannot be found")

    monkeypatch.setattr(_sockets, "connected_socket", connect)
    with Gatekeeper({"default": master.where, "other": "other.invalid"}, timeout=PATIENCE) as made:
        made.decide("a", "other")
        assert begun.wait(PATIENCE)
        if cause == "hopeless":
            over.set()
            wait_until(lambda: made.stats().away, "it has failed")
        for _ in range(20):
            made.decide("a")
        master.wait_for(20)
        master.tell("DELAY_UNTIL", b"a", unix_ms() + 100_000)
        told(made)
        over.set()


def test_gatekeepers_over_unix_sockets(short_path: Path) -> None:
    with Master(paths=(str(short_path / "a"), str(short_path / "c"))) as master, gatekeeper(master) as made:
        made.decide("a")
        master.wait_for(1)


def test_gatekeepers_over_tls() -> None:
    context = client_context()
    with Master() as master:
        master.accounting.context = master.control.context = server_context()
        with gatekeeper(master, tls=context) as made:
            made.decide("a")
            master.wait_for(1)

        async def main() -> None:
            async with async_gatekeeper(master, tls=context) as made:
                made.decide("a")
                await elsewhere(master.wait_for, 2)

        loops.run(main())


# ---- admitting -------------------------------------------------------------------------------------------------------


def test_admit_waits_until_the_delay_is_over(master: Master, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[float, int]] = []
    with gatekeeper(master) as made:
        clock = SimpleNamespace(sleep=lambda seconds: waits.append((seconds, made.stats().delaying)))
        monkeypatch.setattr(smockron, "time", clock)
        with made.admit("a") as decision:
            assert decision.verdict is Verdict.PASS
        assert waits == []
        master.tell("DELAY_UNTIL", b"a", unix_ms() + 100_000)
        told(made)
        with made.admit("a") as decision:
            assert decision.verdict is Verdict.DELAY
            assert waits == [(decision.delay_s, 1)]
            assert made.stats().delaying == 0


def test_a_rejection_says_when_to_retry(master: Master) -> None:
    with gatekeeper(master, max_delay_s=5.0) as made:
        master.tell("DELAY_UNTIL", b"a", unix_ms() + 100_000)
        told(made)
        with pytest.raises(Rejected, match=r"^a was rejected in default: retry in [0-9]+ s$") as raised:
            made.admit("a").__enter__()
        assert 0 < raised.value.retry_after <= 100
        assert (raised.value.identifier, raised.value.domain) == (b"a", b"default")


@LOOPS
def test_admit_waits_until_the_delay_is_over_asyncio(master: Master, loop_name: str) -> None:
    async def main() -> None:
        async with async_gatekeeper(master, max_delay_s=LONG_S) as made:
            async with made.admit("a") as decision:
                assert decision.verdict is Verdict.PASS
            await elsewhere(master.tell, "DELAY_UNTIL", b"a", unix_ms() + 100_000)
            await elsewhere(master.tell, "DELAY_UNTIL", b"b", unix_ms() + 1_000_000)
            await elsewhere(master.tell, "DELAY_UNTIL", b"c", unix_ms() + 50)
            await async_told(made, 2)
            with pytest.raises(Rejected):
                await made.admit("b").__aenter__()

            async def waits() -> None:
                async with made.admit("a"):
                    raise AssertionError

            waiting = asyncio.ensure_future(waits())
            await loops.until(lambda: made.stats().delaying, "it waits")
            waiting.cancel()
            await asyncio.wait([waiting])
            assert made.stats().delaying == 0
            async with made.admit("c"):  # however long it takes to come here
                pass

    loops.run(main(), loop_name)


# ---- connecting, closing and logging ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cause", ["thread", "descriptor"])
def test_requests_pass_if_no_thread_can_be_started(
    master: Master, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, cause: str
) -> None:
    error = RuntimeError("can't start new thread") if cause == "thread" else OSError("too many open files")

    def fails(*_: Any) -> None:
        raise error

    with Gatekeeper(master.where, timeout=PATIENCE) as made:
        descriptors = len([*Path("/dev/fd").iterdir()])
        with monkeypatch.context() as patch:
            patch.setattr(*((threading.Thread, "start") if cause == "thread" else (_background, "Waker")), fails)
            for _ in range(3):
                made._core.masters[0].control.retry_at = 0.0
                assert made.decide("a").verdict is Verdict.PASS
            assert not made.connect(0.0)
        assert len([*Path("/dev/fd").iterdir()]) == descriptors
        assert made.stats().lost == 3
        assert list(made.stats().away.values()) == [f"cannot start a thread: {error}"]
        made._core.masters[0].control.retry_at = 0.0
        assert made.connect(PATIENCE)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_the_background_thread_connects_if_no_other_can_be_started(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting, connecting, names = threading.Thread.start, _sockets.connected_socket, []

    def start(thread: threading.Thread) -> None:
        if thread.name == "counterd-connect":
            raise RuntimeError("can't start new thread")
        starting(thread)

    def connect(*arguments: Any) -> Any:
        names.append(threading.current_thread().name)
        return connecting(*arguments)

    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(_sockets, "connected_socket", connect)
    with gatekeeper(master) as made:
        master.control.hang_up()
        wait_until(lambda: made.stats().lost, "it saw that")
        assert made.connect(PATIENCE)
    assert names == 3 * ["counterd-gatekeeper"]


def test_closing_ends_a_connect_that_waits(master: Master) -> None:
    master.accounting.greets = False
    made = Gatekeeper(master.where, timeout=PATIENCE)
    ends: list[BaseException] = []

    def connect() -> None:
        try:
            made.connect(LONG_S)
        except ConnectionLost as error:
            ends.append(error)

    thread = threading.Thread(target=connect)
    thread.start()
    wait_until(lambda: master.accounting.peers, "it connects")
    made.close()
    thread.join(PATIENCE)
    assert [str(each) for each in ends] == ["the gatekeeper is closed"]


@LOOPS
def test_closing_ends_a_connect_that_waits_asyncio(master: Master, loop_name: str) -> None:
    master.accounting.greets = False

    async def main() -> None:
        made = AsyncGatekeeper(master.where, timeout=PATIENCE)
        connecting = asyncio.ensure_future(made.connect(LONG_S))
        await loops.until(lambda: master.accounting.peers, "it connects")
        await made.close()
        with pytest.raises(ConnectionLost, match="the gatekeeper is closed"):
            await asyncio.wait_for(connecting, PATIENCE)

    loops.run(main(), loop_name)


def test_nothing_is_logged_under_the_lock(master: Master) -> None:
    """A log handler that waits for a decision finds the gatekeeper unlocked."""
    decided: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            thread = threading.Thread(target=made.decide, args=("a",))
            thread.start()
            thread.join(PATIENCE)
            assert not thread.is_alive()
            decided.append(record.getMessage())

    handler = Handler()
    logger = logging.getLogger("counterd.client.smockron")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        with gatekeeper(master) as made:
            master.accounting.hang_up()
            wait_until(lambda: len(decided) == 2, "both lines")
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert decided[0].startswith(f"cannot reach the master at {master.where[0]}; requests pass: ")
    assert decided[1].startswith(f"the master at {master.where[0]} is back after ")


def test_closing_in_a_signal_handler_that_interrupts_a_decision(master: Master) -> None:
    """The decision has a lock that the thread needs, so close() does not wait for the thread."""
    with gatekeeper(master) as made:

        def handle(frame: Any, event: str, _: object) -> None:
            if event == "call" and frame.f_code is Core.decide.__code__:
                sys.setprofile(None)
                made.close()
                closed.append(time.monotonic())

        closed: list[float] = []
        begun = time.monotonic()
        sys.setprofile(handle)
        try:
            made.decide("a")
        finally:
            sys.setprofile(None)
        assert closed[0] - begun < LONG_S, "how long close() waits for the thread"
        with pytest.raises(ConnectionLost):
            made.decide("b")
    assert len(master.wait_for(1)) == 1


@pytest.mark.parametrize("is_reached", [True, False])
def test_a_program_can_end_without_closing_its_gatekeeper(master: Master, is_reached: bool) -> None:
    """Also while a host is looked up."""
    code = f"""
        import socket, time
        from counterd.client.smockron import Gatekeeper
        if not {is_reached}:
            socket.getaddrinfo = lambda *_, **__: time.sleep({LONG_S})
        made = Gatekeeper({master.where!r})
        assert made.connect({PATIENCE if is_reached else 0.1}) is {is_reached}
        made.decide("a")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


# ---- threads, processes and loops ------------------------------------------------------------------------------------


def test_threads_share_a_gatekeeper(master: Master) -> None:
    with gatekeeper(master) as made:

        def decide() -> None:
            for number in range(500):
                made.decide(str(number))

        threads = [threading.Thread(target=decide) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made.stats().passed == 2000
        master.wait_for(2000)
    assert made.stats().sent == 2000


def test_a_forked_child_connects_for_itself(master: Master) -> None:
    with gatekeeper(master) as made:
        master.tell("DELAY_UNTIL", b"a", unix_ms() + 100_000)
        told(made)
        child = os.fork()
        if child == 0:
            try:
                good = made.decide("a").verdict is Verdict.DELAY
                made.decide("child")
                made.close()
                os._exit(0 if good and made.stats().sent == 2 else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
        made.decide("parent")
        master.wait_for(3)
        assert made.stats().lost == 0
    assert {message[2] for message in master.accounting.messages()} == {b"a", b"child", b"parent"}
    assert len(master.accounting.peers) == 2


def test_a_forked_child_closes_sockets_that_a_thread_connects(master: Master) -> None:
    """Here the thread waits for the handshake of TLS, which the master does not answer."""
    master.control.serve = lambda peer: [*iter(lambda: peer.socket.recv(4096), b"")]  # type: ignore[method-assign]
    with Gatekeeper(master.where, tls=client_context(), timeout=PATIENCE) as made:
        made.decide("a")
        wait_until(lambda: master.control.peers, "it connects")
        numbers = {sock.fileno() for sock in list(_connection._sockets)} - {-1}
        assert numbers
        child = os.fork()
        if child == 0:
            os._exit(any(map(is_open, numbers)))
        assert os.waitpid(child, 0)[1] == 0
        assert all(map(is_open, numbers))
        for port in (master.accounting, master.control):
            port.serve = lambda peer: None  # type: ignore[method-assign]
        master.control.hang_up()


def test_a_forked_child_connects_for_itself_asyncio(master: Master) -> None:
    async def main() -> None:
        async with async_gatekeeper(master) as made:
            child = os.fork()
            if child == 0:
                os._exit(_decides_in_a_loop_of_its_own(made))
            assert (await elsewhere(os.waitpid, child, 0))[1] == 0
            made.decide("parent")
            await elsewhere(master.wait_for, 2)
            assert made.stats().lost == 0

    loops.run(main())
    assert {message[2] for message in master.accounting.messages()} == {b"child", b"parent"}


def _decides_in_a_loop_of_its_own(made: AsyncGatekeeper) -> int:
    async def main() -> None:
        made.decide("child")
        await made.close()

    with contextlib.suppress(BaseException):
        asyncio.events._set_running_loop(None)
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        return 0
    return 1


def test_a_gatekeeper_belongs_to_one_loop_until_that_is_closed(master: Master) -> None:
    made = AsyncGatekeeper(master.where, timeout=PATIENCE)
    with pytest.raises(RuntimeError, match="no running event loop"):
        made.decide("nowhere")
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()

    async def decide(name: str) -> None:
        made.decide(name)
        assert await made.connect(PATIENCE)

    async def end() -> None:
        made.decide("last")
        await made.close()

    try:
        first.run_until_complete(decide("first"))
        with pytest.raises(RuntimeError, match="belongs to another event loop: make one for each"):
            second.run_until_complete(decide("second"))
        first.run_until_complete(end())
        again = AsyncGatekeeper(master.where, timeout=PATIENCE)
        second.run_until_complete(again.connect(PATIENCE))
        second.run_until_complete(again.close())
    finally:
        first.close()
        second.close()
    assert [message[2] for message in master.wait_for(2)] == [b"first", b"last"]


@LOOPS
@loops.leaves_connections_open
def test_a_gatekeeper_of_a_closed_loop_has_no_connections_and_can_be_closed(master: Master, loop_name: str) -> None:
    made = AsyncGatekeeper(master.where, timeout=PATIENCE)

    async def connect() -> None:
        assert await made.connect(PATIENCE)

    loops.run(connect(), loop_name)
    loops.run(connect(), loop_name)  # begins anew
    for port in (master.accounting, master.control):
        port.wait_for_ends(1)
    loops.run(made.close(), loop_name)
    for port in (master.accounting, master.control):
        port.wait_for_ends(2)


def test_another_loop_cannot_close_a_gatekeeper(master: Master) -> None:
    made = AsyncGatekeeper(master.where, timeout=PATIENCE)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        assert first.run_until_complete(made.connect(PATIENCE))
        with pytest.raises(RuntimeError, match="belongs to another event loop: make one for each"):
            second.run_until_complete(made.close())
        assert first.run_until_complete(made.connect(PATIENCE))
        first.run_until_complete(made.close())
        second.run_until_complete(made.close())
    finally:
        first.close()
        second.close()


def test_repr_of_gatekeepers() -> None:
    assert repr(Gatekeeper({"a": "h:1", "b": "i"})) == "<Gatekeeper h:1, i:10004>"
    assert repr(AsyncGatekeeper("h")) == "<AsyncGatekeeper h:10004>"
