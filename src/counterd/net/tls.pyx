"""TLS as a filter within a stream: decrypts input and encrypts output.

Floor 3 (ARCHITECTURE.md). OpenSSL gets no socket: received bytes are put into one buffer, and OpenSSL's output is taken
from another buffer. So reads, writes and queues have the same limits as without TLS. Until the handshake is complete,
the connection counts but has no session, and no replies are encrypted.

A peer can do the following, at these costs:
- End without close_notify (a FIN between two records or within a record): this counts as the end of the input. An
  attacker who can cut the stream can do so at any point, also by a reset. So a required close_notify would protect
  nothing. Requests carry their length, so a request that was cut is never executed. The peer's holdings are given back
  with and without close_notify.
- Never answer this side's close_notify: this side does not wait for the answer.
- Ask for new keys, or send empty records or records of one byte: OpenSSL limits a part of this. A read takes at most
  the rest of a record and READ_BEYOND bytes, so the work of a read is bounded. New keys take about 15 us.
- Renegotiate: the server refuses renegotiation (see Server.context).
- Stop reading: OpenSSL's output is queued, and queued output stops the reading of input.
- Begin many handshakes: a read during a handshake is costly, so it waits for its turn between two batches of the
  poller. Other connections are served between two turns.
"""

import ssl

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t

cdef enum:
    RECORD = 16384          # most bytes of data in a record, and encrypted in one call
    HEADER = 5              # bytes of a record's header; the last two are the length of the rest
    READ_SHAKING = 2048     # bytes of a read during the handshake: enough for a ClientHello of today
    READ_BEYOND = 512       # bytes of a read beyond the end of the current record: at most 23 more records

cdef WantRead = ssl.SSLWantReadError
cdef ZeroReturn = ssl.SSLZeroReturnError
cdef Error = ssl.SSLError


class TlsFailed(Exception):
    """The peer's TLS is invalid, or a handshake was refused. cause: "certificate" or "protocol". reason: a sentence."""

    def __init__(self, cause, reason):
        super().__init__(cause, reason)
        self.cause = cause
        self.reason = reason


@cython.final
cdef class Tls:
    """The server's side of one TLS connection. context: an ssl.SSLContext with the certificate."""

    def __cinit__(self, context):
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.ssl = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.shaking = True

    cdef size_t wanted(self) noexcept:
        """Returns how many bytes the next read may take at most."""
        return READ_SHAKING if self.shaking else self.missing + READ_BEYOND

    cdef bytes decrypt(self, const uint8_t* data, size_t size, size_t most):
        """Decrypts kept and new input, and returns at most `most` bytes of data. The rest of the data is kept.

        Returns b"" during the handshake. Raises TlsFailed.
        """
        self.heard = True
        self.incoming.write(PyBytes_FromStringAndSize(<const char*>data, size))
        self.follow(data, size)
        try:
            if self.shaking:
                self.ssl.do_handshake()
                self.shaking = False
            return self.read_all(most)
        except WantRead:
            return b""
        except Error as error:
            self.fail(error)

    cdef void follow(self, const uint8_t* data, size_t size) noexcept:
        """Follows the record headers in the input, to know how many bytes the current record lacks."""
        cdef size_t position = 0, step
        while position < size:
            if self.missing:
                step = min(self.missing, size - position)
                self.missing -= step
                position += step
            else:
                self.heading += 1
                self.length = <uint16_t>(self.length << 8 | data[position])
                position += 1
                if self.heading == HEADER:
                    self.heading = 0
                    self.missing = self.length

    cdef bytes read_all(self, size_t most):
        """Returns the data of all complete records, so that one read is one batch of the connection."""
        cdef bytes data = b""
        cdef bytes piece
        cdef list pieces = None
        self.kept = False
        try:
            while True:
                piece = self.ssl.read(min(most, <size_t>RECORD))
                if PyBytes_GET_SIZE(piece) == 0:
                    self.ended = True
                    break
                if PyBytes_GET_SIZE(data) == 0:
                    data = piece
                elif pieces is None:
                    pieces = [data, piece]
                else:
                    pieces.append(piece)
                if not self.incoming.pending and not self.ssl.pending():
                    break
                most -= PyBytes_GET_SIZE(piece)
                if most == 0:
                    self.kept = True
                    break
        except WantRead:
            pass
        except ZeroReturn:
            self.ended = True
        return data if pieces is None else b"".join(pieces)

    cdef bytes encrypt(self, bytes data):
        """Encrypts data and returns the records. Raises TlsFailed."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef Py_ssize_t written = 0
        cdef list pieces
        try:
            written = self.ssl.write(data if size <= RECORD else data[:RECORD])
            if written == size:
                return self.outgoing.read()
            pieces = [self.outgoing.read()]
            while written < size:  # the peer may have negotiated shorter records
                written += self.ssl.write(data[written : written + RECORD])
                pieces.append(self.outgoing.read())
        except Error as error:
            self.fail(error)
        return b"".join(pieces)

    cdef bytes take_output(self):
        """Returns the output that OpenSSL has made by itself: of the handshake, alerts and answers."""
        return self.outgoing.read() if self.outgoing.pending else b""

    cdef bytes say_goodbye(self):
        """Returns a close_notify, if one can be sent. Discards the data that was kept."""
        self.kept = False
        if not self.broken and not self.shaking:
            self.broken = True
            try:
                self.ssl.unwrap()
            except Error:  # it has sent this side's, and complains that the peer's has not arrived
                pass
        return self.take_output()

    cdef int fail(self, error) except -1:
        reason = error.reason or str(error)
        about_certificate = "CERTIFICATE" in reason or "UNKNOWN_CA" in reason
        if "ALERT" in reason:
            reason = f"the client refused it: {reason}"
        elif about_certificate and getattr(error, "verify_message", ""):
            reason = f"{reason}: {error.verify_message}"
        self.shaking = False
        self.broken = True
        raise TlsFailed("certificate" if about_certificate else "protocol", reason)

    def describe(self):
        """Returns the TLS version, the cipher, and the subject of the peer's certificate. Unknown values are empty."""
        if self.shaking:
            return "", "", ""
        try:
            certificate = self.ssl.getpeercert() or {}
        except ValueError:  # the handshake was not completed, or TLS failed later
            return "", "", ""
        subject = ", ".join(f"{name}={value}" for part in certificate.get("subject", ()) for name, value in part)
        return self.ssl.version() or "", self.ssl.cipher()[0], subject
