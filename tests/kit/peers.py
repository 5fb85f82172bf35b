"""What the functional tests say to a socket and read from it, beside what the client can do."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
import termios
import threading
from array import array
from typing import TYPE_CHECKING

from counterd.protocols.counter import wire

if TYPE_CHECKING:
    from collections.abc import Iterator

RECEIVE_SIZE = 1 << 18
NAME = b"held"
GET_SIZE = wire.HEADER_SIZE + 2 + len(NAME)
NUMBER_SIZE = wire.HEADER_SIZE + 4  # of a response with a number


def receive(connection: socket.socket, size: int) -> bytes:
    """Receives exactly so many bytes, or fewer if the connection ends."""
    received = bytearray()
    while len(received) < size:
        data = connection.recv(min(RECEIVE_SIZE, size - len(received)))
        if not data:
            break
        received += data
    return bytes(received)


def receive_all(connection: socket.socket) -> bytes:
    """Receives everything up to the server's end."""
    received = bytearray()
    while data := connection.recv(RECEIVE_SIZE):
        received += data
    return bytes(received)


def ends(connection: socket.socket) -> bool:
    """Whether the server closes the connection without another byte, with FIN or RST."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def responses(data: bytes) -> list[wire.Response]:
    """Parses all responses in the bytes, which must not end within one."""
    parser = wire.ResponseParser()
    found = parser.feed(data)
    assert not parser._buffer, f"{len(parser._buffer)} bytes of an unfinished response"
    return found


def ask(connection: socket.socket, request: bytes) -> wire.Response:
    """Sends a request, and receives its response."""
    connection.sendall(request)
    header = receive(connection, wire.HEADER_SIZE)
    assert len(header) == wire.HEADER_SIZE, f"the end after {header!r}"
    (response,) = responses(header + receive(connection, int.from_bytes(header[4:8], "big")))
    return response


def acquire_many(connection: socket.socket, names: list[bytes]) -> None:
    """Acquires 1 of each name, pipelined."""
    size = 4096
    for start in range(0, len(names), size):
        batch = names[start : start + size]
        connection.sendall(b"".join(wire.acquire(0, name, 1, 1000) for name in batch))
        received = receive(connection, NUMBER_SIZE * len(batch))
        assert received == wire.frame(2, 0, b"\0\0\0\1", magic=0x91) * len(batch)


def gets(count: int) -> bytes:
    """Makes requests for the consumption of NAME; their opaques count from 0."""
    return _numbered(wire.get(0, NAME), count)


def get_responses(count: int, consumption: int) -> bytes:
    """The responses to gets()."""
    return _numbered(wire.frame(1, 0, struct.pack(">I", consumption), magic=0x91), count)


def _numbered(frame: bytes, count: int) -> bytes:
    """Copies of the frame with the opaques 0, 1, 2 and so on."""
    opaques = array("I", range(count))
    opaques.byteswap()
    data = opaques.tobytes()
    frames = bytearray(frame * count)
    for byte in range(4):
        frames[8 + byte :: len(frame)] = data[byte::4]
    return bytes(frames)


def unacknowledged(connection: socket.socket) -> int:
    """The number of bytes that were sent and have not arrived at the other machine."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, b"\0" * 4))[0]


def reset(connection: socket.socket) -> None:
    """Closes a connection with RST in place of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextlib.contextmanager
def sending(connection: socket.socket, data: bytes) -> Iterator[threading.Thread]:
    """Sends the data from a thread while the block runs, and joins it."""

    def send() -> None:
        with contextlib.suppress(OSError):
            connection.sendall(data)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield thread
    finally:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        thread.join()
