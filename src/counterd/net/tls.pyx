"""TLS as a filter of bytes, within a stream: what arrives is decrypted, what goes out is encrypted.

Floor 3. OpenSSL sees no socket: what a read brings is put into one buffer, and what it has to say is taken out of
another; so reads, writes and what lies between are bounded as for a plain stream. The handshake is over before anything
is encrypted: until then the connection counts, but nobody knows who it is, and it has no session.

What a peer may do, and what it costs:
- end without close_notify (a FIN between two records or within one): taken for the end as well. Whoever can cut the
  stream can do so at any point, also by a reset, so close_notify would protect nothing here: requests carry their own
  length, one that is cut is never executed, and what the peer holds comes back either way, as it does when it dies.
- never answer our close_notify: it is not waited for.
- ask for new keys, send empty records or records of a byte: OpenSSL bounds some of it, and a read takes no more than
  the rest of a record and READ_BEYOND bytes, so that it is never much work: new keys take some 15 us each.
- renegotiate: refused (Server.context). Not read: what OpenSSL has to say is queued, and that stops reading.
- begin handshakes without end: a read during one is costly to the poller. A few are made in a batch, the rest wait, in
  order, while others are served.
"""

import ssl

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint16_t

cdef enum:
    RECORD = 16384          # bytes of data in a record at most, and of what is encrypted in one go
    HEADER = 5              # of a record; the last two are the length of what follows
    READ_SHAKING = 2048     # bytes of a read while the handshake is under way: a hello with all that is in them today
    READ_BEYOND = 512       # bytes of a read besides what is missing of a record: at most 23 further records

cdef WantRead = ssl.SSLWantReadError
cdef ZeroReturn = ssl.SSLZeroReturnError
cdef Error = ssl.SSLError


class TlsFailed(Exception):
    """What the peer sent is no TLS, or none that may be. cause: "certificate" or "protocol"; reason: a sentence."""

    def __init__(self, cause, reason):
        super().__init__(cause, reason)
        self.cause = cause
        self.reason = reason


@cython.final
cdef class Tls:
    """The server's side of one connection. context: with certificate and all else."""

    def __cinit__(self, context):
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.ssl = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.shaking = True

    cdef size_t wanted(self) noexcept:
        """Bytes of the next read at most."""
        return READ_SHAKING if self.shaking else self.missing + READ_BEYOND

    cdef bytes decrypt(self, const uint8_t* data, size_t size, size_t most):
        """The data in what was kept and has arrived, so many bytes at most: the rest is kept. Nothing as long as the
        handshake is under way. Raises TlsFailed."""
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
        """Finds out where in a record these bytes have led."""
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
        """The data of however many records: a read is a read to the connection."""
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
        """The records of it. Raises TlsFailed."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef Py_ssize_t written = 0
        cdef list pieces
        try:
            written = self.ssl.write(data if size <= RECORD else data[:RECORD])
            if written == size:
                return self.outgoing.read()
            pieces = [self.outgoing.read()]
            while written < size:  # a peer may have asked for shorter records
                written += self.ssl.write(data[written : written + RECORD])
                pieces.append(self.outgoing.read())
        except Error as error:
            self.fail(error)
        return b"".join(pieces)

    cdef bytes take_output(self):
        """What OpenSSL has to say by itself."""
        return self.outgoing.read() if self.outgoing.pending else b""

    cdef bytes say_goodbye(self):
        """Ends the peer's stream as TLS would have it; what was kept of its data is thrown away."""
        self.kept = False
        if not self.broken and not self.shaking:
            self.broken = True
            try:
                self.ssl.unwrap()
            except Error:  # it says ours, and complains that the peer's is not there yet
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
        """Version, cipher, and the subject of the peer's certificate; empty as long as they are not known."""
        if self.shaking:
            return "", "", ""
        try:
            certificate = self.ssl.getpeercert() or {}
        except ValueError:  # there was no end of the handshake, or what came after it was no TLS
            return "", "", ""
        subject = ", ".join(f"{name}={value}" for part in certificate.get("subject", ()) for name, value in part)
        return self.ssl.version() or "", self.ssl.cipher()[0], subject
