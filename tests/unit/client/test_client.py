"""The client: against a small server that says what a test wants, and against the real reference."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import pytest

import reference
from counterd import errors
from counterd.client import Client, DumpEntry
from counterd.protocols.counter import wire

if TYPE_CHECKING:
    from pathlib import Path

# Gets the opcode, the opaque and the body of a request. Gives what to send, piece by piece; None: close.
Answer = Callable[[int, int, bytes], Iterable[bytes] | None]

PATIENCE = 10  # seconds, longer than anything here takes


class Script:
    """A server for one connection, in a thread: one answer for each request, then it waits for the client to close."""

    def __init__(self, listening: socket.socket, answers: tuple[Answer, ...]) -> None:
        self.listening = listening
        self.requests: list[tuple[int, bytes]] = []
        self.ended = threading.Event()  # the connection is closed
        self.connection: socket.socket
        self._answers = answers
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)  # ends a wait for a connection that never came
        self._thread.join(PATIENCE)
        self.listening.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            self.connection, _ = self.listening.accept()
            with self.connection:
                self.connection.settimeout(PATIENCE)
                self._serve()
        self.ended.set()

    def _serve(self) -> None:
        for answer in self._answers:
            header = self.connection.recv(wire.HEADER_SIZE, socket.MSG_WAITALL)
            if not header:
                return
            size = int.from_bytes(header[4:8], "big")
            body = self.connection.recv(size, socket.MSG_WAITALL) if size else b""
            self.requests.append((header[1], body))
            pieces = answer(header[1], int.from_bytes(header[8:12], "big"), body)
            if pieces is None:
                return
            for piece in pieces:
                self.connection.sendall(piece)
        self.connection.recv(1)


@pytest.fixture
def serve() -> Iterator[Callable[..., Script]]:
    """Starts a Script with these answers, on a free TCP port or on the given socket."""
    scripts: list[Script] = []

    def start(*answers: Answer, listening: socket.socket | None = None) -> Script:
        scripts.append(Script(listening or socket.create_server(("127.0.0.1", 0)), answers))
        return scripts[-1]

    yield start
    for script in scripts:
        script.stop()


def connected(script: Script, timeout: float = PATIENCE) -> Client:
    return Client(port=script.listening.getsockname()[1], timeout=timeout)


def response(opcode: int, opaque: int, body: bytes = b"", status: int = 0) -> bytes:
    return wire.frame(opcode, opaque, body, magic=wire.RESPONSE_MAGIC, flags=status)


def success(*bodies: bytes) -> Answer:
    return lambda opcode, opaque, _: [response(opcode, opaque, body) for body in bodies or (b"",)]


def failure(status: int, text: bytes) -> Answer:
    return lambda opcode, opaque, _: [response(opcode, opaque, text, status)]


def silence(opcode: int, opaque: int, body: bytes) -> list[bytes]:
    return []


def hang_up(opcode: int, opaque: int, body: bytes) -> None:
    return None


def assert_given_up(client: Client, script: Script, why: str) -> None:
    """The client closed the connection, and later calls say why and send nothing."""
    assert script.ended.wait(PATIENCE)
    sent = len(script.requests)
    with pytest.raises(errors.ConnectionLost, match=f"^there is no connection to 127.0.0.1:[0-9]+ any more: .*{why}"):
        client.noop()
    assert len(script.requests) == sent


def test_requests_and_results(serve) -> None:
    script = serve(success(), success(b"\0\0\1\0"), success(b"\0\0\0\5"), success(), success(b"\0\1\0\1a7"))
    with connected(script) as client:
        assert client.noop() is None
        assert client.get("é") == 256
        assert client.acquire(b"\0n", 5, maximum=6) == 5
        assert client.release("n", 4) is None
        assert client.stats() == {"a": "7"}
    assert script.requests == [
        (0x00, b""),
        (0x01, b"\0\2\xc3\xa9"),
        (0x02, b"\0\0\0\5\0\0\0\6\0\2\0n"),
        (0x03, b"\0\0\0\4\0\1n"),
        (0x10, b""),
    ]


def test_one_resource_unless_told(serve) -> None:
    script = serve(success(b"\0\0\0\1"), success())
    with connected(script) as client:
        client.acquire("n", maximum=3)
        client.release("n")
    assert [body[:4] for _, body in script.requests] == [b"\0\0\0\1"] * 2


def test_dump(serve) -> None:
    entries = success(b"\0\0\0\1\0\0\0\2\0\1a", b"\0\0\0\0\0\0\0\3\0\2b\0", b"")
    with connected(serve(entries, success(b""), success())) as client:
        assert client.dump() == [DumpEntry(b"a", 1, 2), DumpEntry(b"b\0", 0, 3)]
        assert client.dump() == []
        client.noop()


def test_a_response_in_pieces(serve) -> None:
    def pieces(opcode: int, opaque: int, _: bytes) -> Iterator[bytes]:
        for byte in response(opcode, opaque, b"\0\0\0\7"):
            time.sleep(0.002)
            yield bytes([byte])

    with connected(serve(pieces)) as client:
        assert client.get("n") == 7


def test_a_unix_socket(serve, tmp_path: Path) -> None:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "socket"))
    listening.listen()
    with Client(path=tmp_path / "socket") as client:
        serve(success(b"\0\0\0\7"), listening=listening)
        assert client.get("n") == 7


@pytest.mark.parametrize(("status", "kind"), sorted(errors.BY_STATUS.items()))
def test_a_refusal_leaves_the_connection(serve, status: int, kind: type[errors.ServerError]) -> None:
    with connected(serve(failure(status, b"so \xff"), success())) as client:
        with pytest.raises(kind) as caught:
            client.get("n")
        assert (caught.value.status, caught.value.text) == (status, "so \\xff")
        client.noop()


def test_an_unknown_status(serve) -> None:
    with connected(serve(failure(0x33, b"?"), success())) as client:
        with pytest.raises(errors.ServerError) as caught:
            client.dump()
        assert type(caught.value) is errors.ServerError
        client.noop()


def test_what_does_not_fit_is_not_sent(serve) -> None:
    script = serve(success())
    with connected(script) as client:
        with pytest.raises(ValueError, match=r"^name"):
            client.get("")
        with pytest.raises(ValueError, match=r"^maximum"):
            client.acquire("n", maximum=1 << 32)
        with pytest.raises(ValueError, match=r"^resources"):
            client.release("n", -1)
        client.noop()
    assert script.requests == [(0x00, b"")]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda code, opaque, _: [response(code, opaque + 1)], "opcode 00 and opaque 00000001, not 00 and 00000002"),
        (lambda code, opaque, _: [response(code + 1, opaque)], "opcode 00 and opaque 00000001, not 01 and 00000001"),
        (lambda *_: [b"HTTP/1.1 400"], "not the start of a response: 48 54 54 50"),
        (success(b"abc"), "expected no body, not 61 62 63"),
    ],
)
def test_what_no_server_may_send(serve, answer: Answer, message: str) -> None:
    script = serve(answer)
    with connected(script) as client:
        with pytest.raises(errors.ProtocolError, match=message):
            client.noop()
        assert_given_up(client, script, message)


@pytest.mark.parametrize("call", [lambda client: client.get("n"), Client.stats, Client.dump])
def test_a_result_that_makes_no_sense(serve, call) -> None:
    script = serve(success(b"abc"))
    with connected(script) as client:
        with pytest.raises(errors.ProtocolError, match="61 62 63"):
            call(client)
        assert_given_up(client, script, "61 62 63")


def test_a_response_too_many(serve) -> None:
    script = serve(success(b"", b""), silence)
    with connected(script) as client:
        client.noop()
        with pytest.raises(errors.ProtocolError, match="opaque 00000002, not 00 and 00000001"):
            client.noop()
        assert_given_up(client, script, "expected a response")


def test_no_response_in_time(serve) -> None:
    script = serve(silence)
    with connected(script, timeout=0.05) as client:
        with pytest.raises(errors.Timeout, match=r"^127\.0\.0\.1:[0-9]+ did not answer within 0\.05 s$"):
            client.noop()
        assert_given_up(client, script, "a call took more than 0.05 s")


def test_the_timeout_is_for_the_whole_call(serve) -> None:
    """Entries that keep coming, each of them in time, do not make it longer."""

    def many(opcode: int, opaque: int, body: bytes) -> Iterator[bytes]:
        for _ in range(300):
            time.sleep(0.01)
            yield response(opcode, opaque, b"\0\0\0\1\0\0\0\2\0\1a")

    script = serve(many)
    with connected(script, timeout=0.3) as client:
        start = time.monotonic()
        with pytest.raises(errors.Timeout):
            client.dump()
        assert time.monotonic() - start < 2
        assert_given_up(client, script, "a call took more")


def test_the_timeout_does_not_start_again(serve) -> None:
    def half(opcode: int, opaque: int, _: bytes) -> Iterator[bytes]:
        time.sleep(0.8)
        yield response(opcode, opaque)[:6]

    with connected(serve(half), timeout=1.0) as client:
        start = time.monotonic()
        with pytest.raises(errors.Timeout):
            client.noop()
        assert 0.9 < time.monotonic() - start < 1.6


def test_the_server_hangs_up(serve) -> None:
    script = serve(success(), hang_up)
    with connected(script) as client:
        client.noop()
        with pytest.raises(errors.ConnectionLost, match=r"^127\.0\.0\.1:[0-9]+ closed the connection$"):
            client.noop()
        assert_given_up(client, script, "closed the connection")


def test_the_server_resets(serve) -> None:
    def reset(opcode: int, opaque: int, body: bytes) -> None:
        script.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    script = serve(reset)
    with connected(script) as client:
        with pytest.raises(errors.ConnectionLost, match=r"^lost the connection to .*: .*reset by peer"):
            client.noop()
        assert_given_up(client, script, "reset by peer")


def test_an_interrupted_call_closes(serve, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    script = serve(success())
    with connected(script) as client:
        monkeypatch.setattr(wire.ResponseParser, "feed", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.noop()
        assert_given_up(client, script, "KeyboardInterrupt interrupted a call")


def test_close(serve) -> None:
    script = serve()
    client = connected(script)
    client.close()
    client.close()
    assert_given_up(client, script, r"close\(\) was called")


def test_nobody_listens(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(errors.ConnectionLost, match=f"^cannot connect to 127.0.0.1:{port}: .*refused"):
        Client(port=port)
    with pytest.raises(errors.ConnectionLost, match=f"^cannot connect to {tmp_path}/none: .*No such file"):
        Client(path=tmp_path / "none")


def test_nobody_accepts() -> None:
    """The queue of a listening socket is full, so the kernel leaves further connections unanswered."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listening, contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex(listening.getsockname())
        with pytest.raises(errors.Timeout, match=r"did not accept a connection within 0\.1 s$"):
            Client(port=listening.getsockname()[1], timeout=0.1)


# ---- against the reference


@pytest.fixture(scope="module")
def yrmcdsd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[reference.Address]:
    with reference.running(tmp_path_factory.mktemp("yrmcdsd")) as address:
        yield address


def test_the_whole_protocol_with_the_reference(yrmcdsd: reference.Address) -> None:
    with Client(*yrmcdsd) as client, Client(*yrmcdsd) as other:
        client.noop()
        with pytest.raises(errors.NotFound, match=r"^Not found"):
            client.get("jobs")
        assert client.acquire("jobs", 3, maximum=4) == 3
        assert other.get(b"jobs") == 3
        with pytest.raises(errors.NotAvailable, match=r"^Resource not available"):
            other.acquire("jobs", 2, maximum=4)
        with pytest.raises(errors.InvalidArguments, match=r"^Invalid arguments"):
            other.acquire("jobs", 0, maximum=4)
        with pytest.raises(errors.NotAcquired, match=r"^Not acquired"):
            other.release("jobs")
        client.release("jobs", 2)
        assert other.acquire("jobs", maximum=4) == 1
        assert other.dump() == [DumpEntry(b"jobs", 2, 3)]
        stats = other.stats()
        assert int(stats["curr_connections"]) >= 2
        assert stats["command:release"] == "2"


def test_closing_gives_back_at_the_reference(yrmcdsd: reference.Address) -> None:
    with Client(*yrmcdsd) as other:
        with Client(*yrmcdsd) as client:
            client.acquire("closing", 2, maximum=2)
            assert other.get("closing") == 2
        deadline = time.monotonic() + 2
        while other.get("closing"):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_long_names_at_the_reference(yrmcdsd: reference.Address) -> None:
    with Client(*yrmcdsd) as client:
        name = b"\0" * wire.NAME_MAX
        assert client.acquire(name, maximum=1) == 1
        assert DumpEntry(name, 1, 1) in client.dump()
