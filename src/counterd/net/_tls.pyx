"""TLS over a poller's socket: to the connection a transport as any other.

Floor 3. OpenSSL sees no socket: what a read brings is put into one buffer, and what it has to say is taken out of
another; so reads, writes and what lies between are bounded as in the plain transport, which this is but for what passes
through. The connection stands from the beginning, so that it is admitted before anything is spent on it, and counts
while its handshake lasts; but it has a session only when that is over, as nobody knows before who it is.

States, besides those of a plain transport:
- shaking   the handshake is under way, for handshake_timeout at most
- silent    close_notify has been said, or nothing can be said any more; what still arrives is thrown away

What a peer may do, and what it costs:
- end without close_notify (a FIN between two records or within one): taken for the end as well. Whoever can cut the
  stream can do so at any point, also by a reset, so close_notify would protect nothing here: requests carry their own
  length, one that is cut is never executed, and what the peer holds comes back either way, as it does when it dies.
- never answer our close_notify: it is not waited for.
- ask for new keys, send empty records or records of a byte: OpenSSL bounds some of it, and a read takes no more than
  the rest of a record and READ_BEYOND bytes, so that it is never much work: new keys take some 15 us each time.
- renegotiate: refused (Server.context). Not read: what OpenSSL has to say is queued, and that stops reading.
- begin handshakes without end: HANDSHAKES steps of them in a batch, the rest waits, in order, while others are
  served.
"""

import ssl

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint16_t

from counterd.net._poller cimport HANDSHAKES, Transport
from counterd.net.kernel cimport MSG_DONTWAIT, MSG_NOSIGNAL, SHUT_WR, c_recv, c_send, c_shutdown, os_error

cdef enum:
    RECORD = 16384          # bytes of data in a record at most, and of what is encrypted in one go
    HEADER = 5              # of a record; the last two are the length of what follows
    READ_SHAKING = 2048     # bytes of a read while the handshake is under way: a hello with all that is in them today
    READ_BEYOND = 512       # bytes of a read besides what is missing of a record: at most 23 further records

cdef WantRead = ssl.SSLWantReadError
cdef ZeroReturn = ssl.SSLZeroReturnError
cdef Error = ssl.SSLError


cdef class TlsTransport(Transport):
    """context: with certificate and all else; server: what the connection belongs to."""

    def __cinit__(self, context, server):
        self.server = server
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self.ssl = context
        self.seals = True
        self.shaking = True

    cdef int begin(self) except -1:
        self.ssl = self.ssl.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.server.handshakes += 1
        self.timer = self.poller.loop.call_later(self.server.limits.handshake_timeout, self.give_up)
        return 0

    # ---- what arrives ----

    cdef int read(self) except -1:
        cdef ssize_t size
        cdef size_t most = READ_SHAKING
        if self.shaking:
            if self.poller.handshakes >= HANDSHAKES or (self.poller.waiting and not self.called):
                return self.poller.put_off(self)
            self.called = False
            self.poller.handshakes += 1
        else:
            most = self.missing + READ_BEYOND
        size = c_recv(self.fd, self.poller.buffer, min(most, self.poller.read_size), MSG_DONTWAIT)
        if size > 0:
            self.heard = True
            data = PyBytes_FromStringAndSize(<char*>self.poller.buffer, size)
            if self.silent:
                self.protocol.data_received(data)  # which throws it away, and bounds how much that may be
                return 0
            self.incoming.write(data)
            self.follow(size)
            return self.advance(size)
        if size == 0:
            if self.shaking:
                if self.heard:
                    self.server.tls_failed(self.protocol, "protocol", "it ended in the middle of the handshake")
                return self.end(None)
            return self.told_goodbye()
        if errno != EAGAIN and errno != EINTR:
            self.end(os_error(errno))
        return 0

    cdef void follow(self, size_t size) noexcept:
        """Finds out where in a record so many bytes, which are in the buffer, have led."""
        cdef const uint8_t* data = self.poller.buffer
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

    cdef int advance(self, Py_ssize_t size) except -1:
        """Takes so many bytes that have arrived as far as they go."""
        cdef bytes data = b""
        if not self.shaking or self.shake():
            data = self.decrypt()
        if self.closed or self.silent:
            return 0
        if PyBytes_GET_SIZE(data):
            self.protocol.unread -= size - PyBytes_GET_SIZE(data)
            self.protocol.data_received(data)
        else:
            self.protocol.read_sealed(size)
        if self.goodbye and not self.closed and not self.silent:
            self.told_goodbye()
        return 0

    cdef bint shake(self) except -1:
        """Goes on with the handshake; returns whether it is done."""
        try:
            self.ssl.do_handshake()
        except WantRead:
            self.flush()
            return False
        except Error as error:
            self.fail(error)
            return False
        self.shaken()
        return self.protocol.take_part()

    cdef int shaken(self) except -1:
        """The handshake is over, one way or the other."""
        if self.shaking:
            self.shaking = False
            if self.timer is not None:
                self.timer.cancel()
                self.timer = None
                self.server.handshakes -= 1
        return 0

    cdef bytes decrypt(self):
        """All data that has arrived, of however many records: a read is a read to the connection."""
        cdef bytes data = b""
        cdef bytes piece
        cdef list pieces = None
        try:
            while True:
                piece = self.ssl.read(RECORD)
                if PyBytes_GET_SIZE(piece) == 0:
                    self.goodbye = True
                    break
                if PyBytes_GET_SIZE(data) == 0:
                    data = piece
                elif pieces is None:
                    pieces = [data, piece]
                else:
                    pieces.append(piece)
                if not self.incoming.pending and not self.ssl.pending():
                    break
        except WantRead:
            pass
        except ZeroReturn:
            self.goodbye = True
        except Error as error:
            self.fail(error)
            return b""
        self.flush()  # the last of the handshake, tickets for coming back, answers to what was no data
        return data if pieces is None else b"".join(pieces)

    cdef int told_goodbye(self) except -1:
        """The peer has sent its last byte."""
        self.reading = False
        self.protocol.eof_received()
        if not self.closed:
            self.update()
        return 0

    # ---- what goes out ----

    def write(self, bytes data not None):
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef Py_ssize_t written = 0
        cdef list pieces
        if self.closed or self.closing or self.silent or size == 0:
            return
        try:
            written = self.ssl.write(data if size <= RECORD else data[:RECORD])
            if written == size:
                self.flush()
                return
            pieces = [self.outgoing.read()]
            while written < size:  # a peer may have asked for shorter records
                written += self.ssl.write(data[written : written + RECORD])
                pieces.append(self.outgoing.read())
        except Error as error:
            self.fail(error)
            return
        self.transmit(b"".join(pieces))

    cdef int flush(self) except -1:
        """Sends what OpenSSL has to say."""
        if not self.closed and self.outgoing.pending:
            self.transmit(self.outgoing.read())
        return 0

    cdef int transmit(self, bytes sealed) except -1:
        """To the kernel; what it does not take is queued, and the connection told unless it has nothing more to say."""
        cdef ssize_t sent = 0
        cdef bint first = self.queued == 0
        if first:
            sent = c_send(self.fd, PyBytes_AS_STRING(sealed), PyBytes_GET_SIZE(sealed), MSG_DONTWAIT | MSG_NOSIGNAL)
            if sent == PyBytes_GET_SIZE(sealed):
                return 0
            if sent < 0:
                if errno != EAGAIN and errno != EINTR:
                    return self.end(os_error(errno))
                sent = 0
        self.enqueue(sealed[sent:] if sent else sealed)
        if first and not self.silent:
            self.protocol.pause_writing()
        return 0

    cdef int drain(self) except -1:
        if not self.silent or self.closing:
            return Transport.drain(self)
        if self.send_queue():
            if self.shutting:
                c_shutdown(self.fd, SHUT_WR)
            self.update()
        return 0

    # ---- the end ----

    def give_up(self):
        """The handshake has taken too long."""
        self.server.tls_failed(self.protocol, "timeout", "the handshake took too long")
        self.end(None)

    cdef int fail(self, error) except -1:
        """What the peer sent is no TLS, or none that may be. It is told why, and has time to read that."""
        reason = error.reason or str(error)
        about_certificate = "CERTIFICATE" in reason or "UNKNOWN_CA" in reason
        if "ALERT" in reason:
            reason = f"the client refused it: {reason}"
        elif about_certificate and getattr(error, "verify_message", ""):
            reason = f"{reason}: {error.verify_message}"
        self.server.tls_failed(self.protocol, "certificate" if about_certificate else "protocol", reason)
        self.shaken()
        self.silent = True
        self.flush()
        if not self.closed:
            self.protocol.finish()
        return 0

    cdef int say_goodbye(self) except -1:
        """Ends the peer's stream as TLS would have it."""
        if not self.silent and not self.shaking and not self.closed:
            self.silent = True
            try:
                self.ssl.unwrap()
            except Error:  # it says ours, and complains that the peer's is not there yet
                pass
            self.flush()
        return 0

    def write_eof(self):
        self.say_goodbye()
        if self.queued:
            self.shutting = True
        elif not self.closed:
            c_shutdown(self.fd, SHUT_WR)

    def close(self):
        cdef bint owed = self.queued > 0
        self.say_goodbye()
        if owed:
            Transport.close(self)
        else:
            self.end(None)  # a goodbye that the kernel does not take is not waited for: nobody would look after that

    cdef int end(self, error) except -1:
        if self.shaking and self.heard and error is not None and not self.closed:
            self.server.tls_failed(self.protocol, "protocol", "it was cut off in the middle of the handshake")
        self.shaken()
        return Transport.end(self, error)

    # ---- what is known ----

    def tls(self):
        """Version, cipher, and the subject of the peer's certificate; empty as long as they are not known."""
        if self.shaking:
            return "", "", ""
        try:
            certificate = self.ssl.getpeercert() or {}
        except ValueError:  # there was no end of the handshake, or what came after it was no TLS
            return "", "", ""
        subject = ", ".join(f"{name}={value}" for part in certificate.get("subject", ()) for name, value in part)
        return self.ssl.version() or "", self.ssl.cipher()[0], subject
