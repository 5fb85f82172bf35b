"""The blocking client against a small server whose answers each test sets.

With real servers, threads and processes: tests/functional/test_client.py and the files beside it."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import math
import pkgutil
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import counterd.client
from counterd import errors
from counterd.client import Client, DumpEntry
from counterd.protocols.counter import wire
from kit.daemon import wait_until
from kit.machine import PATIENCE
from kit.scripted.counter import Answers, responded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kit.scripted.counter import Answer


@pytest.fixture
def serve() -> Iterator[Callable[..., Answers]]:
    """Starts a server that gives these answers, on a free TCP port or on the given socket."""
    with contextlib.ExitStack() as stack:

        def start(*answers: Answer, **options: Any) -> Answers:
            return stack.enter_context(Answers(*answers, **options))

        yield start


def connected(script: Answers, timeout: float = PATIENCE) -> Client:
    return Client(port=script.port, timeout=timeout)


def success(*bodies: bytes) -> Answer:
    return lambda opcode, opaque, _: [responded(opcode, opaque, body) for body in bodies or (b"",)]


def failure(status: int, text: bytes) -> Answer:
    return lambda opcode, opaque, _: [responded(opcode, opaque, text, status)]


def silence(opcode: int, opaque: int, body: bytes) -> list[bytes]:
    return []


def hang_up(opcode: int, opaque: int, body: bytes) -> None:
    return None


def later(opened: Callable[[], object], *answers: Answer) -> Answer:
    """Gives these answers to one request, once a gate is open."""

    def answer(opcode: int, opaque: int, body: bytes) -> Iterator[bytes]:
        opened()
        for each in answers:
            yield from each(opcode, opaque, body) or ()

    return answer


def assert_replaced(client: Client, script: Answers) -> None:
    """Checks that the client closed the connection, and that the next call opens another one, which works."""
    before = len(script.peers)
    client.noop()
    assert len(script.peers) == before + 1


def test_requests_and_results(serve) -> None:
    script = serve(success(), success(b"\0\0\1\0"), success(b"\0\0\0\5"), success(), success(b"\0\1\0\1a7"))
    with connected(script) as client:
        assert client.noop() is None
        assert client.get("é") == 256
        assert client.acquire(b"\0n", 5, maximum=6) == 5
        assert client.release("n", 4) is None
        assert client.stats() == {"a": "7"}
    assert script.seen == [
        (0x00, b""),
        (0x01, b"\0\2\xc3\xa9"),
        (0x02, b"\0\0\0\5\0\0\0\6\0\2\0n"),
        (0x03, b"\0\0\0\4\0\1n"),
        (0x10, b""),
    ]


def test_acquire_and_release_one_permit_by_default(serve) -> None:
    script = serve(success(b"\0\0\0\1"), success())
    with connected(script) as client:
        client.acquire("n", maximum=3)
        client.release("n")
    assert [body[:4] for _, body in script.seen] == [b"\0\0\0\1"] * 2


def test_dump_reads_all_entries(serve) -> None:
    entries = success(b"\0\0\0\1\0\0\0\2\0\1a", b"\0\0\0\0\0\0\0\3\0\2b\0", b"")
    with connected(serve(entries, success(b""), success())) as client:
        assert client.dump() == [DumpEntry(b"a", 1, 2), DumpEntry(b"b\0", 0, 3)]
        assert client.dump() == []
        client.noop()


def test_a_response_that_comes_in_pieces(serve) -> None:
    def pieces(opcode: int, opaque: int, _: bytes) -> Iterator[bytes]:
        for byte in responded(opcode, opaque, b"\0\0\0\7"):
            time.sleep(0.002)  # so that they come one by one
            yield bytes([byte])

    with connected(serve(pieces)) as client:
        assert client.get("n") == 7


def test_a_client_of_a_unix_socket(serve, tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    listening.listen()
    with Client(path=tmp_path / "socket") as client:
        serve(success(b"\0\0\0\7"), listening=listening)
        assert client.get("n") == 7


@pytest.mark.parametrize(("status", "kind"), sorted(wire.ERRORS.items()))
def test_a_refusal_keeps_the_connection(serve, status: int, kind: type[errors.ServerError]) -> None:
    with connected(serve(failure(status, b"so \xff"), success())) as client:
        with pytest.raises(kind) as caught:
            client.get("n")
        assert (caught.value.status, caught.value.text) == (status, "so \\xff")
        client.noop()


def test_a_response_with_an_unknown_status(serve) -> None:
    with connected(serve(failure(0x33, b"?"), success())) as client:
        with pytest.raises(errors.ServerError) as caught:
            client.dump()
        assert type(caught.value) is errors.ServerError
        client.noop()


def test_invalid_arguments_are_not_sent(serve) -> None:
    script = serve(success())
    with connected(script) as client:
        with pytest.raises(ValueError, match=r"^name"):
            client.get("")
        with pytest.raises(ValueError, match=r"^maximum"):
            client.acquire("n", maximum=1 << 32)
        with pytest.raises(ValueError, match=r"^permits"):
            client.release("n", -1)
        client.noop()
    assert script.seen == [(0x00, b"")]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda code, opaque, _: [responded(code, opaque + 1)], "the opcode 00 and the opaque 00000002"),
        (lambda code, opaque, _: [responded(code + 1, opaque)], "the opcode 01 and the opaque 00000001"),
        (
            lambda *_: [b"HTTP/1.1 400"],
            r"^127\.0\.0\.1:[0-9]+: this is not the start of a response: 48 54 54 50.*: this is an HTTP server",
        ),
        (lambda *_: [b"HTTQ"], r"^127\.0\.0\.1:[0-9]+: this is not the start of a response: 48 54 54 51$"),
        (success(b"abc"), "expected a reply without a body, not 61 62 63"),
    ],
)
def test_invalid_responses_are_protocol_errors(serve, answer: Answer, message: str) -> None:
    script = serve(answer, success())
    with connected(script) as client:
        with pytest.raises(errors.ProtocolError, match=message):
            client.noop()
        assert_replaced(client, script)


@pytest.mark.parametrize("call", [lambda client: client.get("n"), Client.stats, Client.dump])
def test_an_invalid_result_is_a_protocol_error(serve, call) -> None:
    script = serve(success(b"abc"), success())
    with connected(script) as client:
        with pytest.raises(errors.ProtocolError, match="61 62 63"):
            call(client)
        assert_replaced(client, script)


def test_an_unexpected_response_is_a_protocol_error(serve) -> None:
    """Whether it comes in one read with the expected response, when no call waits any more, or later."""
    script = serve(success(b"", b""), *[success()] * 2)
    with connected(script) as client:
        client.noop()
        with contextlib.suppress(errors.ProtocolError):
            client.noop()
        client.noop()
    assert len(script.peers) == 2


def test_a_protocol_error_is_not_followed_by_an_error_for_the_loss(serve) -> None:
    script = serve(success(b"\0\0\0\1"), success(b"abc"), success())
    with connected(script) as client:
        client.acquire("n", maximum=1)
        with pytest.raises(errors.ProtocolError):
            client.noop()
        client.noop()


def test_a_call_that_times_out_keeps_the_connection(serve) -> None:
    opened = threading.Event()
    script = serve(later(lambda: opened.wait(PATIENCE), success(b"\0\0\0\7")), success(b"\0\0\0\5"))
    with connected(script, timeout=0.05) as client:
        with pytest.raises(
            errors.Timeout, match=r"^127\.0\.0\.1:[0-9]+ did not answer within 0\.05 s: does this address serve .*\?$"
        ):
            client.get("late")
        opened.set()
        client._link._timeout = PATIENCE
        assert client.get("n") == 5  # and not what came too late
        assert client._link.calls.pending == {}
    assert len(script.peers) == 1


def test_a_late_grant_is_given_back(serve) -> None:
    opened = threading.Event()
    late = later(lambda: opened.wait(PATIENCE), success(b"\0\0\0\3"))
    script = serve(success(b"\0\0\0\1"), late, *[success()] * 3)
    with connected(script) as client:
        client.acquire("kept", maximum=1)
        client._link._timeout = 0.05
        with pytest.raises(errors.Timeout):
            client.acquire("late", 3, maximum=3)
        client._link._timeout = PATIENCE
        opened.set()
        client.noop()
        client.noop()  # after which the release has been answered
        assert client._link.calls.held == 1
    assert sorted(script.seen[2:]) == [(0x00, b""), (0x00, b""), (0x03, b"\0\0\0\3\0\4late")]


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.acquire("n", maximum=1),
        lambda client: client.hold("n", maximum=1).__enter__(),
        lambda client: client.pipeline().noop().acquire("n", maximum=1).execute(),
    ],
)
def test_an_acquire_that_times_out_ends_a_connection_that_holds_nothing(serve, ask) -> None:
    """Else a late grant would stay with a connection that no thread reads."""
    script = serve(silence, silence, success())
    with connected(script, timeout=0.05) as client:
        with pytest.raises(errors.Timeout):
            ask(client)
        assert client._link.closed == "an acquire was not answered in time, and this client holds nothing"


def test_the_timeout_counts_for_the_whole_call(serve) -> None:
    """Entries that keep coming, each of them in time, do not make it longer."""
    ended = threading.Event()

    def many(opcode: int, opaque: int, body: bytes) -> Iterator[bytes]:
        while not ended.wait(0.005):
            yield responded(opcode, opaque, b"\0\0\0\1\0\0\0\2\0\1a")

    with connected(serve(many), timeout=0.1) as client:
        with pytest.raises(errors.Timeout):
            client.dump()
        ended.set()


def test_the_server_closes_the_connection(serve) -> None:
    script = serve(hang_up, success())
    with connected(script) as client:
        with pytest.raises(
            errors.ConnectionLost, match=r"^127\.0\.0\.1:[0-9]+ closed the connection: it may expect TLS, "
        ):
            client.noop()
        assert_replaced(client, script)


def test_the_server_resets_the_connection(serve) -> None:
    def reset(opcode: int, opaque: int, body: bytes) -> None:
        script.peers[-1].socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    script = serve(reset, success())
    with connected(script) as client:
        with pytest.raises(errors.ConnectionLost, match=r"^lost the connection to .*: .*reset by peer"):
            client.noop()
        assert_replaced(client, script)


def test_a_call_is_repeated_if_the_connection_ends_and_nothing_was_held(serve) -> None:
    """So a server that closes idle connections, or is restarted, causes no error. But only once."""
    script = serve(success(), hang_up, success(b"\0\0\0\1"))
    with connected(script) as client:
        client.noop()
        assert client.acquire("n", maximum=1) == 1
    assert [opcode for opcode, _ in script.seen] == [0x00, 0x02, 0x02]


def test_a_call_is_not_repeated_if_permits_are_lost(serve) -> None:
    script = serve(success(b"\0\0\0\1"), hang_up, success())
    with connected(script) as client:
        client.acquire("n", maximum=2)
        with pytest.raises(errors.ConnectionLost, match=r"closed the connection$"):
            client.acquire("n", maximum=2)
        assert_replaced(client, script)


def test_a_release_whose_reply_is_lost(serve) -> None:
    """The server has read it, so nothing was lost before: it raises nothing, unless something else was held."""
    script = serve(success(b"\0\0\0\2"), success(), hang_up, success(b"\0\0\0\2"), hang_up, success())
    with connected(script) as client:
        client.acquire("n", 2, maximum=2)
        client.release("n")
        client.release("n")
        client.acquire("n", 2, maximum=2)
        with pytest.raises(errors.ConnectionLost, match=r"closed the connection$"):
            client.release("n")
        assert_replaced(client, script)


def test_a_release_that_may_have_come_too_late_raises(serve) -> None:
    """The connection had ended before, or was reset: the permits may have been given to another client since."""

    def reset(opcode: int, opaque: int, body: bytes) -> None:
        script.peers[-1].socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    script = serve(success(b"\0\0\0\1"), hang_up, success(b"\0\0\0\1"), reset, success())
    with connected(script) as client:
        client.acquire("n", maximum=1)
        script.peers[-1].socket.shutdown(socket.SHUT_WR)
        with pytest.raises(errors.ConnectionLost, match=r"closed the connection$"):
            client.release("n")
        wait_until(lambda: len(script.seen) == 2, "the server has read it")
        client.acquire("n", maximum=1)
        with pytest.raises(errors.ConnectionLost, match=r"reset by peer"):
            client.release("n")
        assert_replaced(client, script)


def test_a_hold_hears_of_its_loss_once_and_not_after_its_block(serve) -> None:
    called: list[object] = []
    script = serve(success(b"\0\0\0\1"), success())
    with Client(port=script.port, timeout=PATIENCE, watch=True) as client:
        hold = client.hold("n", maximum=1, on_lost=called.append)
        with hold:
            client._lose(client._link)
            client._lose(client._link)
        client._lose(client._link)
    assert called == [hold]


def test_invalid_arguments_of_a_semaphore(serve) -> None:
    with connected(serve()) as client, pytest.raises(TypeError, match=r"^maximum must be a whole number"):
        client.semaphore("n", "2")  # type: ignore[arg-type]


def test_a_call_is_repeated_once(serve) -> None:
    script = serve(success(), hang_up, hang_up, success())
    with connected(script) as client:
        client.noop()
        with pytest.raises(errors.ConnectionLost, match=r"closed the connection: it may expect TLS, "):
            client.noop()
        assert [opcode for opcode, _ in script.seen] == [0x00] * 3


def test_a_loss_of_permits_while_idle_is_raised(serve) -> None:
    script = serve(success(b"\0\0\0\1"), success())
    with connected(script) as client:
        client.acquire("n", maximum=1)
        script.peers[-1].socket.shutdown(socket.SHUT_RDWR)
        assert not client._link.is_alive()
        with pytest.raises(
            errors.ConnectionLost, match="everything that was acquired through this connection has been given back"
        ):
            client.get("n")
        assert_replaced(client, script)


def test_an_interrupt_while_bytes_are_read_ends_the_connection(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    script = serve(success(), success())
    with connected(script) as client:
        with monkeypatch.context() as patched:
            patched.setattr(wire.ResponseParser, "feed", interrupt)
            with pytest.raises(KeyboardInterrupt):
                client.noop()
        assert_replaced(client, script)


def test_an_interrupted_acquire_gives_back_its_grant(serve) -> None:
    """The caller itself does, which waits up to a second for the answer."""
    opened = threading.Event()
    late = later(lambda: opened.wait(PATIENCE), success(b"\0\0\0\2"))
    script = serve(success(b"\0\0\0\1"), late, *[success()] * 3)
    with connected(script) as client:
        client.acquire("kept", maximum=1)
        client._link.calls.has_takes = False  # type: ignore[attr-defined]
        poller: Any = client._link._poller

        class Interrupted:
            def poll(self, _: float) -> None:
                client._link._poller = poller
                opened.set()
                raise KeyboardInterrupt

        client._link._poller = Interrupted()  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt), client.hold("n", 2, maximum=2):
            pytest.fail("granted")
        client.noop()
        client.noop()  # after which the release has been answered
        assert client._link.calls.held == 1
        assert client._link.holds == set()
        assert not client._wait_queues._queues
    assert sorted(script.seen[2:]) == [(0x00, b""), (0x00, b""), (0x03, b"\0\0\0\2\0\1n")]


def test_a_hold_gives_its_permits_back(serve) -> None:
    script = serve(success(b"\0\0\0\2"), success())
    with connected(script) as client, client.hold(b"n\xff", 2, maximum=3):
        pass
    assert script.seen == [(0x02, b"\0\0\0\2\0\0\0\3\0\2n\xff"), (0x03, b"\0\0\0\2\0\2n\xff")]


def test_a_hold_with_timeout_0_asks_once(serve) -> None:
    refused = failure(0x21, b"Resource not available")
    script = serve(refused, success(b"\0\0\0\3"))
    with connected(script) as client:
        with pytest.raises(errors.NotAvailable) as caught, client.hold("n", 2, maximum=4, timeout=0):
            pytest.fail("granted")
        error = caught.value
        assert (error.name, error.resources, error.maximum, error.consumption) == (b"n", 2, 4, 3)
    assert [opcode for opcode, _ in script.seen] == [0x02, 0x01]


def test_a_hold_whose_release_is_refused(serve) -> None:
    script = serve(*[success(b"\0\0\0\1"), failure(0x22, b"Not acquired")] * 2)
    with connected(script) as client:
        with pytest.raises(errors.NotAcquired), client.hold("n", maximum=1):
            pass
        with pytest.raises(ZeroDivisionError), client.hold("n", maximum=1):
            _ = 1 // 0


def test_a_server_that_does_not_know_resume(serve) -> None:
    """Such as yrmcdsd: the client works as without `resume`."""
    script = serve(*[failure(0x81, b"Unknown command")] * 2, success(b"\0\0\0\1"), success())
    with Client("127.0.0.1", script.port, resume=30, name="me") as client, client.hold("n", maximum=1) as hold:
        assert not hold.lost
    assert [opcode for opcode, _ in script.seen] == [0x25, 0x23, 0x02, 0x03]


def test_close_ends_the_client(serve) -> None:
    script = serve()
    client = connected(script)
    assert client.where == f"127.0.0.1:{script.port}"
    assert client.fileno() >= 0
    client.close()
    client.close()
    for call in (client.noop, client.fileno, client.hold("n", maximum=1).__enter__):
        with pytest.raises(errors.ConnectionLost, match=r"^the connection to .* has ended: close\(\) was called"):
            call()
    assert script.seen == []


def test_the_error_if_no_server_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(errors.ConnectionLost, match=f"^cannot connect to 127.0.0.1:{port}: .*refused"):
        Client(port=port).noop()
    with pytest.raises(errors.ConnectionLost, match=f"^cannot connect to {tmp_path}/none: .*No such file"):
        Client(path=tmp_path / "none").noop()


def test_connecting_times_out_if_the_server_does_not_accept() -> None:
    """The queue of a listening socket is full, so the kernel does not answer further connections."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listening.getsockname())
        with pytest.raises(errors.Timeout, match=r"did not accept a connection within 0\.1 s$"):
            Client(port=listening.getsockname()[1], timeout=0.1).noop()


def test_an_infinite_timeout(serve) -> None:
    script = serve(success(b""))
    with Client(port=script.port, timeout=math.inf) as client:
        client.noop()


def test_a_client_made_before_its_server_starts(serve, tmp_path: Path) -> None:
    """It connects when it is used, and a hold waits for the server."""
    path = str(tmp_path / "socket")
    client = Client(path=path)
    assert (client.where, repr(client)) == (path, f"<Client {path}>")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    script = serve(success(b"\0\0\0\1"), success(), listening=listening)
    with client, client.hold("n", maximum=1, timeout=PATIENCE):
        assert client.where == path
    assert len(script.peers) == 1


@pytest.mark.parametrize("call", [Client.noop, Client.fileno])
def test_calls_after_closing_an_unused_client(call: Callable[[Client], object]) -> None:
    client = Client("counter://192.0.2.1")
    client.close()
    with pytest.raises(errors.ConnectionLost, match=r"close\(\) was called"):
        call(client)


def test_get_with_a_default(serve) -> None:
    script = serve(failure(0x01, b"Not found"), success(b"\0\0\0\7"), failure(0x01, b"Not found"))
    with connected(script) as client:
        assert (client.get("n", default=0), client.get("n", default=0)) == (0, 7)
        with pytest.raises(errors.NotFound):
            client.get("n")


def test_a_pipeline_as_a_context_manager(serve) -> None:
    """Requests that were not sent when the block ends are never sent."""
    script = serve(success(b"\0\0\0\7"))
    with connected(script) as client:
        with client.pipeline() as pipeline:
            assert pipeline.get("n").execute() == [7]
            pipeline.noop()
        assert pipeline.execute() == []
    assert len(script.seen) == 1


def test_repr_of_a_semaphore(serve) -> None:
    script = serve(success(b"\0\0\0\1"), success())
    with connected(script) as client:
        semaphore = client.semaphore("s\u00e9", 3)
        with semaphore:
            assert repr(semaphore) == "<Semaphore s\u00e9, maximum 3, 1 acquired here>"


def test_timeouts_must_be_numbers() -> None:
    with pytest.raises(TypeError, match=r"^timeout must be a number of seconds, not '5s'$"):
        Client(timeout="5s")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^connect_timeout must be a number of seconds, not '5s'$"):
        Client(connect_timeout="5s")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^timeout must be None, or a number of seconds, not '5s'$"):
        Client().hold("n", maximum=1, timeout="5s")  # type: ignore[arg-type]


# The folders of the protocols that have such clients, as far as they are installed.
FOLDERS = {each.name for each in pkgutil.iter_modules(counterd.client.__path__)} & {"throttr", "sentinel", "beanstalk"}


@pytest.mark.parametrize("module", ["counterd.client", *(f"counterd.client.{name}" for name in sorted(FOLDERS))])
def test_every_protocol_has_a_client_and_an_async_client(module: str) -> None:
    imported = importlib.import_module(module)
    assert {"Client", "AsyncClient"} <= {*imported.__all__}
    assert inspect.iscoroutinefunction(imported.AsyncClient.__aenter__)
    assert not inspect.iscoroutinefunction(imported.Client.__enter__)


def test_asyncio_is_imported_only_with_the_async_client() -> None:
    code = (
        "import sys, counterd.client; assert 'asyncio' not in sys.modules; "
        "from counterd.client import AsyncClient, aio; assert AsyncClient is aio.Client"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'Clients'"):
        counterd.client.Clients  # type: ignore[attr-defined] # noqa: B018
