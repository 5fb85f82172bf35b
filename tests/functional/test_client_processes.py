"""The blocking client in processes of their own, which fork, are killed, or end while they hold permits.

Tests that kill a process run against yrmcdsd as well. The others concern only the client; and yrmcdsd may keep
the holdings of a connection that ends with unread answers."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING

import pytest

from kit import servers
from kit.daemon import PATIENCE, environment

if TYPE_CHECKING:
    from collections.abc import Iterator

# A busy machine may take long to run anything; what it measures takes milliseconds.

PREAMBLE = """\
import multiprocessing, os, signal, sys, threading, time
from counterd.client import Client
from counterd.errors import ConnectionLost, NotAvailable

def say(*words):
    print(*words, flush=True)

client = Client(sys.argv[1], int(sys.argv[2]), timeout=10)
"""


@pytest.fixture(scope="module", params=["counterd", pytest.param("yrmcdsd", marks=pytest.mark.needs("yrmcdsd"))])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.running(request.param, tmp_path_factory.mktemp(request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def counterd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Server]:
    with servers.running("counterd", tmp_path_factory.mktemp("counterd")) as running:
        yield running


class Program:
    """A process that runs this code, with a client."""

    def __init__(self, server: servers.Server, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), *map(str, server.address)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def line(self) -> str:
        """Returns its next line of output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ends(self) -> tuple[int, str, str]:
        """Closes its input. Returns (exit status, the rest of its output, its stderr)."""
        out, err = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, out, err


@contextlib.contextmanager
def running(server: servers.Server, code: str) -> Iterator[Program]:
    program = Program(server, code)
    try:
        yield program
    finally:
        if program.process.poll() is None:
            program.process.kill()
        for stream in (program.process.stdin, program.process.stdout, program.process.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        program.process.wait(PATIENCE)


# ---- killed ---------------------------------------------------------------------------------------------------------


def test_a_waiter_gets_the_permits_of_a_killed_holder(server: servers.Server) -> None:
    code = """
        with client.hold("killed", 2, maximum=2):
            say("holds")
            time.sleep(60)
    """
    with running(server, code) as program, server.client() as client:
        assert program.line() == "holds"
        assert server.used("killed") == 2
        program.process.send_signal(signal.SIGKILL)
        with client.hold("killed", 2, maximum=2, timeout=PATIENCE):
            pass


def test_permits_of_a_killed_parent_come_back_while_its_child_lives(server: servers.Server) -> None:
    code = """
        client.acquire("parent", 1, maximum=2)
        with client.hold("parent", 1, maximum=2):
            if os.fork() == 0:
                client.acquire("child", maximum=1)
                say("child")
                sys.stdin.read()
                assert client.get("child") == 1
                client.release("child")
                say("released")
                os._exit(0)
            time.sleep(60)
    """
    with running(server, code) as program:
        assert program.line() == "child"
        assert server.used("parent") == 2
        program.process.send_signal(signal.SIGKILL)
        server.wait_for_use("parent", 0)
        assert server.used("child") == 1
        assert program.process.stdin is not None
        program.process.stdin.close()
        assert program.line() == "released"


# ---- forks ----------------------------------------------------------------------------------------------------------


def test_a_child_does_not_hear_of_its_parents_losses(counterd: servers.Server) -> None:
    code = """
        for reconnected in (False, True):
            client.acquire("lost", maximum=3)
            client._link._socket.shutdown(2)
            assert not client._link.is_alive()
            if reconnected:  # by who is not told
                client.hold("lost", maximum=3).__enter__()
            if os.fork() == 0:
                client.noop()
                os._exit(0)
            assert os.wait()[1] == 0
            try:
                client.noop()
            except ConnectionLost:
                say("told")
    """
    with running(counterd, code) as program:
        assert program.ends() == (0, "told\ntold\n", "")


def test_a_child_of_multiprocessing(counterd: servers.Server) -> None:
    code = """
        def work(results):
            with client.hold("pool", maximum=2, timeout=0):
                results.put(client.get("pool"))

        context = multiprocessing.get_context("fork")
        results = context.SimpleQueue()
        with client.hold("pool", maximum=2):
            for _ in range(2):
                process = context.Process(target=work, args=(results,))
                process.start()
                process.join(10)
                assert process.exitcode == 0
        say(results.get(), results.get(), client.get("pool"))
    """
    with running(counterd, code) as program:
        assert program.ends() == (0, "2 2 0\n", "")


def test_a_child_replaces_the_locks_of_a_watching_client(counterd: servers.Server) -> None:
    """A thread of the parent has the lock, which no thread of the child will ever release."""
    code = """
        watched = Client(sys.argv[1], int(sys.argv[2]), timeout=10, watch=True)
        client.acquire("locked", maximum=2)
        inherited = [each.hold("inherited", maximum=2) for each in (client, watched)]
        for hold in inherited:
            hold.__enter__()
        locked, forked = threading.Event(), threading.Event()

        def keep():
            with watched._link._lock:
                locked.set()
                forked.wait(10)

        thread = threading.Thread(target=keep)
        thread.start()
        locked.wait(10)
        if os.fork() == 0:
            for hold in inherited:
                hold.__exit__(None, None, None)
            for each in (client, watched):
                with each.hold("locked", maximum=2, timeout=0):
                    assert each.get("locked") == 2
                    try:
                        with each.hold("locked", maximum=2, timeout=0.1):
                            raise AssertionError
                    except NotAvailable as error:
                        assert error.consumption == 2
                each.close()
            os._exit(0)
        forked.set()
        thread.join()
        assert os.wait()[1] == 0
        say(client.get("locked"), client.get("inherited"), [hold.lost for hold in inherited])
        watched.close()
    """
    with running(counterd, code) as program:
        status, out, err = program.ends()
        # From 3.12 on Python warns of every fork of a program with threads.
        assert (status, out) == (0, "1 2 [False, False]\n"), err


def test_a_child_starts_its_own_watching_thread(counterd: servers.Server) -> None:
    code = """
        import socket
        client = Client(sys.argv[1], int(sys.argv[2]), timeout=10, watch=True)
        names = lambda: [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        if os.fork() == 0:
            assert names() == []
            with client.hold("reacquired", maximum=1, on_lost="reacquire") as hold:
                assert names() == ["counterd-watch"]
                lost = hold._has
                with socket.socket(fileno=os.dup(client.fileno())) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
                end = time.monotonic() + 10
                while hold._has is lost or hold.lost:
                    assert time.monotonic() < end
                    time.sleep(0.001)
            assert client.get("reacquired") == 0
            client.close()
            assert names() == []
            os._exit(0)
        assert os.wait()[1] == 0
        client.close()
        say(names())
    """
    with running(counterd, code) as program:
        status, out, err = program.ends()
        assert (status, out) == (0, "[]\n"), err


# ---- ends while something is held -----------------------------------------------------------------------------------

HOLDING = 'with client.hold("ending", 2, maximum=2) as hold:\n    '


@pytest.mark.parametrize(
    ("code", "status", "errors"),
    [
        (HOLDING + "sys.exit(3)", 3, ""),
        (HOLDING + "raise ZeroDivisionError", 1, "ZeroDivisionError"),
        (HOLDING + "os.kill(os.getpid(), signal.SIGINT); time.sleep(10)", -signal.SIGINT, "KeyboardInterrupt"),
        ('hold = client.hold("ending", 2, maximum=2)\nhold.__enter__()', 0, ""),
        ('semaphore = client.semaphore("ending", 2)\nsemaphore.acquire()', 0, ""),
        ('client.acquire("ending", 2, maximum=2)', 0, ""),
    ],
)
@pytest.mark.parametrize("watch", [False, True])
def test_ending_within_a_hold(counterd: servers.Server, code: str, status: int, errors: str, watch: bool) -> None:
    if watch:
        code = "client.close()\nclient = Client(sys.argv[1], int(sys.argv[2]), watch=True)\n" + code.replace(
            "maximum=2)", 'maximum=2, on_lost="reacquire")'
        ).replace('acquire("ending", 2, maximum=2, on_lost="reacquire")', 'acquire("ending", 2, maximum=2)')
    with running(counterd, code) as program:
        ended, out, err = program.ends()
        assert (ended, out) == (status, "")
        assert (err.strip().splitlines() or [""])[-1] == errors
        counterd.wait_for_use("ending", 0)


@pytest.mark.parametrize("watch", [False, True])
def test_ending_while_threads_hold_and_wait(counterd: servers.Server, watch: bool) -> None:
    code = f"""
        client.close()
        client = Client(sys.argv[1], int(sys.argv[2]), watch={watch})

        def hold():
            while True:
                with client.hold("threads", maximum=2):
                    time.sleep(0.001)

        for _ in range(6):
            threading.Thread(target=hold, daemon=True).start()
        time.sleep(0.2)
        say(client.get("threads") <= 2)
    """
    with running(counterd, code) as program:
        assert program.ends() == (0, "True\n", "")
        counterd.wait_for_use("threads", 0)


def test_a_signal_interrupts_a_waiting_hold(counterd: servers.Server) -> None:
    """KeyboardInterrupt in the main thread; the hold leaves the client's queue."""
    code = """
        try:
            with client.hold("signalled", maximum=1):
                raise AssertionError
        except KeyboardInterrupt:
            say("interrupted")
        sys.stdin.readline()
        with client.hold("signalled", maximum=1, timeout=10):
            say("got it", client._link.calls.pending, client._link.calls.held)
    """
    with running(counterd, code) as program, counterd.client() as other:
        with other.hold("signalled", maximum=1):
            counterd.wait_for_waiters(1)
            program.process.send_signal(signal.SIGINT)
            assert program.line() == "interrupted"
        assert program.process.stdin is not None
        assert program.ends() == (0, "got it {} 1\n", "")


# ---- shares ---------------------------------------------------------------------------------------------------------

TAKES_TURNS = """
    while True:
        with client.hold("shared", maximum=2):
            say("has it")
            sys.stdin.readline()
"""
TAKES_TURNS_ASYNC = """
    import asyncio
    from counterd.client import AsyncClient

    async def main():
        async with AsyncClient(sys.argv[1], int(sys.argv[2]), timeout=10) as client:
            while True:
                async with client.hold("shared", maximum=2):
                    say("has it")
                    await asyncio.to_thread(sys.stdin.readline)

    asyncio.run(main())
"""


def test_six_processes_share_two_permits_equally(counterd: servers.Server) -> None:
    """A process goes on when all others wait, and gets permits again when they have had theirs."""
    grants = [0] * 6
    said: queue.SimpleQueue[int] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        codes = [TAKES_TURNS, TAKES_TURNS_ASYNC] * 3
        programs = [stack.enter_context(running(counterd, code)) for code in codes]

        def listen(number: int) -> None:
            while programs[number].line():
                said.put(number)

        listeners = [threading.Thread(target=listen, args=(number,), daemon=True) for number in range(6)]
        for listener in listeners:
            listener.start()
        holders: list[int] = []
        for _ in range(60):
            while len(holders) < 2:
                holders.append(said.get(timeout=PATIENCE))
                grants[holders[-1]] += 1
            counterd.wait_for_waiters(4)
            going = programs[holders.pop(0)].process.stdin
            assert going is not None
            going.write("go on\n")
            going.flush()
        for program in programs:
            program.process.kill()
        for listener in listeners:
            listener.join(PATIENCE)
    assert max(grants) - min(grants) <= 1
    counterd.wait_for_waiters(0)
