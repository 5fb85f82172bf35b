"""A socket with TLS: no decrypted data is left that poll() does not report, and nothing is encrypted twice."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
from typing import TYPE_CHECKING

import pytest

from counterd.client import _tls
from counterd.client._addresses import Tls
from counterd.client._tls import SecureSocket, make_context, secured
from kit.certificates import client_context, server_context
from kit.daemon import PATIENCE
from kit.scripted.counter import Server

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kit.certificates import Files

MANY = bytes(range(256)) * 256  # four records


@pytest.fixture
def ends() -> Iterator[tuple[SecureSocket, ssl.SSLSocket]]:
    """The client's end and the server's."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    server = server_context().wrap_socket(far, server_side=True, do_handshake_on_connect=False)
    server.settimeout(PATIENCE)
    thread = threading.Thread(target=server.do_handshake)
    thread.start()
    with server:
        client = SecureSocket(near, client_context(), "localhost", PATIENCE)
        thread.join()
        yield client, server
        client.close()


def is_readable(client: SecureSocket, milliseconds: int = 0) -> bool:
    poller = select.poll()
    poller.register(client, select.POLLIN)
    return bool(poller.poll(milliseconds))


def received(client: SecureSocket, size: int) -> bytes:
    """Receives so many bytes, which poll() must announce."""
    data = b""
    while len(data) < size:
        assert is_readable(client, 15_000)
        with contextlib.suppress(BlockingIOError):
            data += client.recv(65536)
    return data


def test_no_decrypted_data_is_left_unreported(ends: tuple[SecureSocket, ssl.SSLSocket]) -> None:
    client, server = ends
    for _ in range(100):
        server.sendall(b"x" * 100)
    assert received(client, 10_000) == b"x" * 10_000
    assert not is_readable(client)
    with pytest.raises(BlockingIOError):
        client.recv(65536)


def test_a_record_may_come_in_pieces() -> None:
    """The server's side is made by hand: a byte at a time."""
    near, far = socket.socketpair()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = server_context().wrap_bio(incoming, outgoing, server_side=True)

    def shake_hands() -> None:
        while True:
            try:
                server.do_handshake()
                return
            except ssl.SSLWantReadError:
                far.sendall(outgoing.read())
                incoming.write(far.recv(65536))

    thread = threading.Thread(target=shake_hands)
    thread.start()
    with near, far:
        client = SecureSocket(near, client_context(), "localhost", PATIENCE)
        thread.join()
        server.write(b"one")
        record = outgoing.read()
        for byte in record[:-1]:
            far.sendall(bytes([byte]))
            with pytest.raises(BlockingIOError):
                client.recv(65536)
        far.sendall(record[-1:])
        assert client.recv(65536) == b"one"


def test_send_reports_only_what_the_kernel_took(ends: tuple[SecureSocket, ssl.SSLSocket]) -> None:
    """Bytes that were encrypted but not sent are not reported as sent, and are followed by exactly the rest."""
    client, server = ends
    client._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    data = MANY * 64
    left = memoryview(data)
    with contextlib.suppress(BlockingIOError):
        while left:
            left = left[client.send(left) :]
    assert left, "the kernel has taken it all"
    with pytest.raises(BlockingIOError):
        client.send(left)
    got = bytearray()

    def receive() -> None:
        while len(got) < len(data):
            got.extend(server.recv(65536))

    thread = threading.Thread(target=receive)
    thread.start()
    poller = select.poll()
    poller.register(client, select.POLLOUT)
    while left:
        poller.poll()
        with contextlib.suppress(BlockingIOError):
            left = left[client.send(bytearray(left)) :]
    thread.join()
    assert got == data


def test_the_end_is_reported_after_the_data_before_it(ends: tuple[SecureSocket, ssl.SSLSocket]) -> None:
    """Also if the server keeps the TCP connection open."""
    client, server = ends
    server.sendall(b"last")
    server.settimeout(0.0)
    with contextlib.suppress(ssl.SSLWantReadError):
        server.unwrap()
    assert received(client, 4) == b"last"
    assert is_readable(client, 1000)
    assert client.recv(65536) == b""
    assert client.recv(65536) == b""


def test_an_end_without_close_notify_counts_as_the_end(ends: tuple[SecureSocket, ssl.SSLSocket]) -> None:
    client, server = ends
    server.sendall(b"last")
    server.shutdown(socket.SHUT_WR)
    assert received(client, 4) == b"last"
    assert is_readable(client, 1000)
    assert client.recv(65536) == b""


def test_closing_sends_no_close_notify(ends: tuple[SecureSocket, ssl.SSLSocket]) -> None:
    """Another process may have the descriptor, and holds last as long as that has it."""
    client, server = ends
    with socket.socket(fileno=socket.dup(client.fileno())):
        client.close()
        server.settimeout(0.05)
        with pytest.raises(TimeoutError):
            server.recv(1)
        server.settimeout(PATIENCE)


def test_a_record_that_cannot_be_decrypted_is_an_error(ends: tuple[SecureSocket, ssl.SSLSocket]) -> None:
    client, server = ends
    server.sendall(b"fine")
    assert received(client, 4) == b"fine"
    socket.socket.send(server, b"\x17\x03\x03\x00\x20" + bytes(32))
    assert is_readable(client, 1000)
    with pytest.raises(OSError, match=r"(?i)mac|decryption"):
        client.recv(65536)


# ---- beginning ----


@pytest.mark.parametrize(
    ("host", "trusts", "why"),
    [("elsewhere", True, "Hostname mismatch"), ("localhost", False, "CERTIFICATE_VERIFY_FAILED")],
)
def test_untrusted_servers_are_refused(host: str, trusts: bool, why: str, pem: Files) -> None:
    with Server(context=server_context()) as server:
        near = socket.create_connection(server.address)
        tls = Tls(cacert=pem.cacert if trusts else pem.other)
        with pytest.raises(OSError, match=f"^TLS handshake: .*{why}"):
            secured(near, tls, host, PATIENCE)
        assert near.fileno() == -1
        assert server.wait_for_ends(1) == ["reset"]
        assert "ALERT" in str(server.failed[0]), "the server was told why"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"", "the server closed the connection: it may not use TLS, have no room, or not allow this address"),
        (b"\x91\x00\x00\x01" + bytes(28), ": it may not use TLS, have no room, or not allow this address"),
    ],
)
def test_a_server_without_tls_fails_the_handshake(answer: bytes, why: str) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.sendall(answer)
        far.shutdown(socket.SHUT_WR)
        with pytest.raises(OSError, match=f"^TLS handshake: .*{why}$"):
            secured(near, client_context(), "localhost", PATIENCE)


def test_a_slow_handshake_times_out() -> None:
    near, far = socket.socketpair()
    with near, far, pytest.raises(TimeoutError):
        secured(near, client_context(), "localhost", 0.02)
    assert near.fileno() == -1


def test_an_interrupted_handshake_closes_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    near, far = socket.socketpair()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_tls, "SecureSocket", interrupt)
    with near, far, pytest.raises(KeyboardInterrupt):
        secured(near, client_context(), "localhost", PATIENCE)
    assert near.fileno() == -1


# ---- files ----


def test_a_client_sends_its_certificate(pem: Files) -> None:
    for files in ({"cert": pem.cert, "key": pem.key}, {"cert": pem.both}):
        with Server(context=server_context(clients=ssl.CERT_REQUIRED)) as server:
            tls = Tls(cacert=pem.cacert, **files)
            client = secured(socket.create_connection(server.address), tls, "localhost", PATIENCE)
            assert client._tls.cipher() is not None
            client.close()  # perhaps with a ticket unread, which is a reset
            server.wait_for_ends(1)
            assert server.failed == []


def test_a_given_context_is_used() -> None:
    context = client_context()
    assert make_context(context) is context


def test_the_authorities_of_the_system_are_the_default() -> None:
    context = make_context(Tls())
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_unusable_files_are_named_in_the_error(pem: Files) -> None:
    c = pem
    for tls, why in [
        (Tls(cacert="/none"), "^/none: No such file or directory$"),
        (Tls(cacert=c.key), f"^{c.key}: "),
        (Tls(cert="/none"), "^/none: No such file or directory$"),
        (Tls(cert=c.cert), f"^{c.cert}: "),
        (Tls(cert=c.both, key=c.other), f"^{c.both} with {c.other}: "),
    ]:
        with pytest.raises(OSError, match=why):
            make_context(tls)
