"""TLS with clients that were not written for these tests: Python's, blocking and asyncio, and OpenSSL's own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from conformance.beanstalk.engine import make_store as make_beanstalk_store
from counterd.client import throttr
from counterd.protocols.counter import wire
from counterd.protocols.throttr._session import open_store
from kit import needs, peers
from kit.certificates import authority, certificate, client_context, server_context
from kit.daemon import PATIENCE, wait_until
from kit.serving import Serving, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOOP = wire.noop(1)
REPLY = wire.frame(0, 1, magic=0x91)
VERSIONS = pytest.mark.parametrize("version", ["tls1_2", "tls1_3"])
COUNTERS = 10_000


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(context=server_context()) as running:
        yield running


def connect(server: Serving, context: ssl.SSLContext | None = None, **options: object) -> ssl.SSLSocket:
    context = context or client_context()
    return context.wrap_socket(server.connect(), server_hostname="127.0.0.1", **options)  # type: ignore[arg-type]


@contextlib.contextmanager
def s_client(server: Serving, directory: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs OpenSSL's client: it sends what it reads from stdin, and writes what it receives after its own messages."""
    authority("ours").cert_pem.write_to_path(directory / "authority.pem")
    host, port = server.address
    program = [needs.path("openssl"), "s_client", "-connect", f"{host}:{port}", "-servername", host]
    trust = ["-CAfile", str(directory / "authority.pem"), "-verify_return_error", "-verify_ip", "127.0.0.1"]
    with subprocess.Popen(
        [*program, *trust, *options], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def type_in(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(data)


def read_until(process: subprocess.Popen[bytes], wanted: bytes) -> bytes:
    """Reads its output up to this text."""
    assert process.stdout is not None
    said = bytearray()
    while wanted not in said:
        assert select.select([process.stdout], [], [], PATIENCE)[0], bytes(said)
        data = os.read(process.stdout.fileno(), 1 << 16)
        assert data, bytes(said)
        said += data
    return bytes(said)


# ---- clients of others ----------------------------------------------------------------------------------------------


def test_large_transfers_in_both_directions_at_once(server: Serving) -> None:
    """From one thread: of two, in recv() and in sendall(), Python lets one mistake the other's state for its own, and
    wait for ever."""
    count = 100_000

    async def main() -> bytes:
        reader, writer = await asyncio.open_connection(*server.address, ssl=client_context())
        writer.write(b"".join(wire.noop(number) for number in range(count)))
        received = await asyncio.wait_for(reader.readexactly(count * len(REPLY)), PATIENCE)
        writer.close()
        await writer.wait_closed()
        return received

    assert [response.opaque for response in peers.responses(asyncio.run(main()))] == list(range(count))


def test_many_clients_at_once(server: Serving) -> None:
    async def ask(context: ssl.SSLContext) -> bytes:
        reader, writer = await asyncio.open_connection(*server.address, ssl=context)
        writer.write(NOOP * 10)
        answer = await reader.readexactly(10 * len(REPLY))
        writer.close()
        await writer.wait_closed()
        return answer

    async def main() -> list[bytes]:
        context = client_context()
        return await asyncio.gather(*(ask(context) for _ in range(50)))

    assert asyncio.run(main()) == [REPLY * 10] * 50
    server.wait_for(connections=0, handshakes=0)


@pytest.mark.needs("openssl")
@VERSIONS
def test_openssl_s_client(server: Serving, tmp_path: Path, version: str) -> None:
    with s_client(server, tmp_path, "-quiet", f"-{version}") as process:
        type_in(process, NOOP * 1000)
        assert read_until(process, REPLY * 1000).count(REPLY) == 1000


@pytest.mark.needs("openssl")
def test_a_client_with_short_records(server: Serving, tmp_path: Path) -> None:
    with connect(server) as holder, s_client(server, tmp_path, "-quiet", "-maxfraglen", "512") as process:
        peers.acquire_many(holder, [b"counter %05d" % number for number in range(COUNTERS)])
        type_in(process, wire.dump(7) + wire.noop(8))
        said = read_until(process, wire.frame(0, 8, magic=0x91))
        assert said.count(b"counter ") == COUNTERS


@pytest.mark.needs("openssl")
def test_key_updates_are_answered(server: Serving, tmp_path: Path) -> None:
    with s_client(server, tmp_path, "-tls1_3") as process:
        read_until(process, b"Verify return code: 0")
        for line in (b"k\n", b"K\n") * 3:
            type_in(process, line)
            read_until(process, b"KEYUPDATE")
        type_in(process, NOOP)
        read_until(process, REPLY)


@pytest.mark.needs("openssl")
def test_renegotiation_is_refused(server: Serving, tmp_path: Path) -> None:
    with s_client(server, tmp_path, "-tls1_2") as process, connect(server) as other:
        read_until(process, b"Verify return code: 0")
        wait_until(lambda: server.figures()["handshakes"] == 0, "handshakes are over")
        type_in(process, b"R\n")
        read_until(process, b"RENEGOTIATING")
        process.wait(PATIENCE)  # it takes the refusal for an error
        other.sendall(NOOP)
        assert peers.receive(other, len(REPLY)) == REPLY


@pytest.mark.parametrize("clients", [ssl.CERT_NONE, ssl.CERT_REQUIRED])
def test_a_client_resumes_its_session_with_a_ticket(clients: ssl.VerifyMode) -> None:
    with serving(context=server_context(clients=clients)) as server:
        context = client_context(own=certificate("worker"))
        session = None
        for _ in range(2):
            with connect(server, context, session=session) as connection:
                connection.sendall(NOOP)
                assert peers.receive(connection, len(REPLY)) == REPLY
                known = [each.tls() for each in server.call(lambda: list(server.server.connections.values()))]
                assert ("commonName=worker" in known[-1][2]) is (clients == ssl.CERT_REQUIRED)
                assert connection.session_reused is (session is not None)
                session = connection.session


# ---- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close_notify", "fin", "reset"])
def test_holdings_come_back_however_the_client_ends(server: Serving, end: str) -> None:
    name = end.encode()
    connection = connect(server)
    assert peers.ask(connection, wire.acquire(1, name, 1, 1)).status == 0
    assert server.in_use(name) == 1
    if end == "close_notify":
        connection.unwrap().close()
    else:
        if end == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    wait_until(lambda: server.in_use(name) == 0, "it comes back")


def test_a_stopping_server_sends_close_notify() -> None:
    with contextlib.ExitStack() as stack:
        with serving(context=server_context()) as server:
            connection = stack.enter_context(connect(server))
            assert peers.ask(connection, NOOP).opaque == 1
        assert connection.recv(1) == b""  # and no error


# ---- before the handshake is over -----------------------------------------------------------------------------------


def test_events_for_every_connection_do_not_reach_handshakes() -> None:
    """They are no connections of the protocol yet: they are not listed, and get no events."""
    store = open_store(
        value_size=4,
        memory_limit=1 << 20,
        max_message=1 << 20,
        max_queued=1 << 16,
        expiry_grace_ns=0,
        hash_key=bytes(16),
        now_ns=time.monotonic_ns(),
    )
    context = client_context()
    with (
        serving(context=server_context(), store=store) as server,
        contextlib.ExitStack() as stack,
        throttr.Client(*server.address, value_size="uint32", tls=context) as publisher,
    ):
        plain = [stack.enter_context(server.connect()) for _ in range(20)]
        server.wait_for(handshakes=20)
        assert publisher.info().connections == len(publisher.connections()) == 1
        for _ in range(10):
            publisher.publish(b"*", b"x")
        for connected in plain:
            secured = stack.enter_context(context.wrap_socket(connected, server_hostname="127.0.0.1"))
            secured.sendall(b"\x18")  # WHOAMI
            assert peers.receive(secured, 17)[0] == 1
        assert publisher.info().connections == 21
        assert server.figures()["handshakes_failed:protocol"] == 0


# ---- those that mean harm -------------------------------------------------------------------------------------------


def test_a_waiting_worker_gets_a_job() -> None:
    """Another connection has put it, so no bytes come from the worker meanwhile."""
    with (
        serving(context=server_context(), store=make_beanstalk_store()) as server,
        connect(server) as worker,
        connect(server) as producer,
    ):
        worker.sendall(b"reserve\r\n")
        wait_until(lambda: server.call(server.store.snapshot)["waiting"] == 1, "it waits")
        body = b"x" * 50_000
        producer.sendall(b"put 0 0 60 50000\r\n" + body + b"\r\n")
        assert peers.receive(producer, 12) == b"INSERTED 1\r\n"
        assert peers.receive(worker, 18 + 50_002) == b"RESERVED 1 50000\r\n" + body + b"\r\n"


def test_endless_handshakes_time_out_and_others_are_served() -> None:
    with serving(context=server_context(), handshake_timeout=1) as server, contextlib.ExitStack() as stack:
        silent = [stack.enter_context(server.connect()) for _ in range(50)]
        for connection in silent[::2]:
            connection.sendall(b"\x16\x03\x01\x02")
        with connect(server) as other:
            assert peers.ask(other, NOOP).opaque == 1
            server.wait_for(handshakes_failed__timeout=50, handshakes=0, connections=1)
            assert all(peers.ends(connection) for connection in silent)


def test_a_client_without_tls_is_closed(server: Serving) -> None:
    before = server.figures()["handshakes_failed:protocol"]
    for data in (NOOP, b"GET / HTTP/1.0\r\n\r\n", os.urandom(100_000), b"\x16\x03\x01\x40\x00" + bytes(1 << 16)):
        with server.connect() as connection, contextlib.suppress(ConnectionError):
            connection.sendall(data)
            peers.receive_all(connection)
    server.wait_for(handshakes_failed__protocol=before + 4, connections=0)


def test_a_client_that_never_reads_is_not_read() -> None:
    with serving(context=server_context(), user_timeout=1) as server:
        context = client_context()
        with context.wrap_socket(server.connect(), server_hostname="127.0.0.1") as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            connection.settimeout(PATIENCE)
            with contextlib.suppress(OSError):  # it is cut off
                while True:
                    connection.sendall(wire.stats(1) * 1000)
            server.wait_for(slow_readers=1, connections=0)
