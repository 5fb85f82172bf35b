"""TLS beneath the clients: what a context is made of, and a socket of the blocking ones that speaks it.

Stands beside the floors; is imported only where there is TLS. SecureSocket keeps ssl's buffers itself (MemoryBIO), so
that a plain and a secure socket are the same to whoever waits in poll():

- recv() leaves nothing behind that could be decrypted: what poll() does not tell of is not there;
- send() says that bytes were taken once all that became of them is with the kernel. Whoever hears that fewer were sends
  the others next, as they are, and those are what has been encrypted already;
- closing says nothing to the server, as the connection may live on in another process that has the descriptor. Frames
  say how long they are, so nobody can cut one short unseen.
"""

from __future__ import annotations

import socket
import ssl
import time
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from counterd.client._addresses import Tls

RECORD = 16384  # bytes: what one has at most
RECEIVE_SIZE = 65536
# What OpenSSL calls an answer that is no TLS at all.
NOT_TLS = frozenset(("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG", "UNEXPECTED_MESSAGE"))


def make_context(tls: Tls | ssl.SSLContext) -> ssl.SSLContext:
    """What a connection is secured with. Files are read each time, so that new certificates are used from then on.

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
    """With words, where asyncio and OpenSSL have few: that the server closed the connection, or speaks no TLS."""
    if not isinstance(error, (ssl.SSLError, ConnectionError)) or isinstance(error, ConnectionRefusedError):
        return error
    ended = isinstance(error, (ConnectionError, ssl.SSLEOFError))
    is_hinted = ended or getattr(error, "reason", None) in NOT_TLS
    text = (error.strerror if ended else str(error)) or "the server closed the connection"
    hint = ": it may speak no TLS, have no room, or not allow this address" if is_hinted else ""
    return OSError(f"TLS handshake: {text}{hint}")


def _text(error: OSError) -> str:
    return error.strerror or str(error)


class SecureSocket:
    """A connected socket with TLS on it, made when that is agreed on. Like a socket that never blocks."""

    def __init__(self, connected: socket.socket, context: ssl.SSLContext, host: str, timeout: float) -> None:
        """timeout: seconds that the handshake may take; TimeoutError. Other failures are an OSError too."""
        self._socket = connected
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)
        self._unsent = b""  # encrypted, and not taken by the kernel
        self._covers = 0  # the bytes that are told as sent when it is
        self._ended = False  # the server has said its last
        self._shake_hands(time.monotonic() + timeout)
        connected.setblocking(False)

    def fileno(self) -> int:
        return self._socket.fileno()

    def shutdown(self, how: int) -> None:
        self._socket.shutdown(how)

    def close(self) -> None:
        self._socket.close()

    def send(self, data: bytes | bytearray | memoryview) -> int:
        """How many bytes were taken. BlockingIOError if none were; other OSErrors."""
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
        """All that can be decrypted of so many bytes, b"" at the end. BlockingIOError if that is nothing yet."""
        if not self._ended:
            data = self._socket.recv(size)
            if data:
                self._incoming.write(data)
            else:
                self._incoming.write_eof()
        pieces = self._decrypted()
        if self._outgoing.pending:  # what the protocol itself answers
            self._unsent += self._outgoing.read()
            with suppress(BlockingIOError):  # then it goes out before what is sent next
                self._flush()
        if pieces and self._ended:
            with suppress(OSError):  # poll() is to tell the end too, which is read already
                self._socket.shutdown(socket.SHUT_RD)
        if not pieces and not self._ended:
            raise BlockingIOError
        return b"".join(pieces)

    def _decrypted(self) -> list[bytes]:
        pieces = []
        incoming, read = self._incoming, self._tls.read
        try:
            while not self._ended and (incoming.pending or incoming.eof):  # an exception costs more than to look
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
                with suppress(OSError):  # it is told why
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
    """The socket with TLS on it; closed if that cannot be."""
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
