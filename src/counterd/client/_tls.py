"""TLS for the clients: makes contexts, and sockets with TLS for the blocking clients.

Floor: side (ARCHITECTURE.md); imported only if TLS is used. SecureSocket manages the buffers of ssl itself (MemoryBIO),
so that poll() works as for a socket without TLS:

- recv() decrypts all bytes that it has read, so no data waits that poll() does not report;
- send() counts bytes as sent only when the kernel has accepted all their encrypted bytes. If send() returns less than
  it was given, the caller has to send the same remaining bytes next, because they may be encrypted already;
- close() sends nothing to the server, because the connection may continue in another process that has the descriptor.
  Each frame contains its length, so a frame that was cut off is noticed.
"""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterd.client._addresses import Tls

RECORD = 16384  # bytes: the largest record
RECEIVE_SIZE = 65536
# The reasons that OpenSSL gives if the answer is not TLS.
NOT_TLS = frozenset(("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE"))


def make_context(tls: Tls | ssl.SSLContext) -> ssl.SSLContext:
    """Returns the TLS context for a connection. The files are read each time, so that new certificates are used
    immediately.

    Raises OSError, which names the file that cannot be used.
    """
    if isinstance(tls, ssl.SSLContext):
        return tls
    try:
        context = ssl.create_default_context(cafile=tls.cacert or None)
    except OSError as error:
        raise OSError(f"{tls.cacert or 'the certificates of this system'}: {_text(error)}") from error
    if tls.cert:
        try:
            context.load_cert_chain(tls.cert, tls.key or None, password="")  # else OpenSSL asks the terminal
        except OSError as error:
            files = f"{tls.cert} with {tls.key}" if tls.key else tls.cert
            raise OSError(f"{files}: {_text(error)}") from error
    return context


def handshake_error(error: OSError) -> OSError:
    """If the server may have no TLS or no room, returns an error that says more than the error of asyncio or
    OpenSSL."""
    if not isinstance(error, (ssl.SSLError, ConnectionError)) or isinstance(error, ConnectionRefusedError):
        return error
    ended = isinstance(error, (ConnectionError, ssl.SSLEOFError))
    is_hinted = ended or getattr(error, "reason", None) in NOT_TLS
    text = (error.strerror if ended else str(error)) or "the server closed the connection"
    hint = ": it may not use TLS, have no room, or not allow this address" if is_hinted else ""
    return OSError(f"TLS handshake: {text}{hint}")


def _text(error: OSError) -> str:
    return error.strerror or str(error)


class SecureSocket:
    """A connected socket with TLS.

    The socket behaves like a socket that never blocks. The constructor does the TLS handshake.
    """

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, host: str, timeout: float) -> None:
        """timeout: how many seconds the handshake may take; then TimeoutError is raised.

        Other failures raise another OSError.
        """
        self._socket = connected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._unsent = b""  # encrypted, and not taken by the kernel
        self._covers = 0  # so many bytes are counted as sent when _unsent has been sent
        self._ended = False  # the server sends no more
        self._shake_hands(time.monotonic() + timeout)
        connected.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """Returns how many bytes were sent. Raises BlockingIOError if no bytes were sent, or another OSError."""
        taken = 0
        try:
            while True:
                if self._unsent:
                    self._flush()
                    taken, self._covers = taken + self._covers, 0
                if taken >= len(data):
                    return taken
                self._covers = self._tls.write(data[taken : taken + RECORD])
                self._unsent += self._outgoing.read()
        except (BlockingIOError, ssl.SSLWantReadError):
            if taken:
                return taken
            raise BlockingIOError from None

    def recv(self, size: int) -> bytes:
        """Reads up to size bytes and decrypts them.

        Returns b"" at the end of the stream. Raises BlockingIOError if there is no decrypted data yet.
        """
        if not self._ended:
            data = self._socket.recv(size)
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
        pieces = self._decrypted()
        if self._outgoing.pending:  # replies of TLS itself
            self._unsent += self._outgoing.read()
            with suppress(BlockingIOError):  # it is sent before what comes next
                self._flush()
        if pieces and self._ended:
            with suppress(OSError):  # so that poll() reports the end, which was read already
                self._socket.shutdown(socket.SHUT_RD)
        if not pieces and not self._ended:
            raise BlockingIOError
        return b"".join(pieces)

    def _decrypted(self) -> list[bytes]:
        pieces = []
        incoming, read = self._incoming, self._tls.read
        try:
            while not self._ended and (incoming.pending or incoming.eof):  # checking is cheaper than an exception
                piece = read(RECORD)
                if piece:
                    pieces.append(piece)
                else:
                    self._ended = True
        except ssl.SSLWantReadError:
            pass
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            self._ended = True
        return pieces

    def _flush(self) -> None:
        while self._unsent:
            self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def _shake_hands(self, deadline: float) -> None:
        done = False
        while not done:
            try:
                self._tls.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                with suppress(OSError):  # sends the server the reason
                    self._socket.send(self._outgoing.read())
                raise
            self._limit(deadline)
            self._socket.sendall(self._outgoing.read())
            if not done:
                self._limit(deadline)
                data = self._socket.recv(RECEIVE_SIZE)
                if not data:
                    raise ConnectionResetError
                self._incoming.write(data)

    def _limit(self, deadline: float) -> None:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self._socket.settimeout(left)


def secured(connected: socket.socket, tls: Tls | ssl.SSLContext, host: str, timeout: float) -> SecureSocket:
    """Returns the socket with TLS. Closes the socket if the handshake fails."""
    try:
        return SecureSocket(connected, make_context(tls), host, timeout)
    except TimeoutError:
        connected.close()
        raise
    except OSError as error:
        connected.close()
        raise handshake_error(error) from error
    except BaseException:
        connected.close()
        raise
