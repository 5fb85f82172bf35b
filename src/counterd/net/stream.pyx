"""One connected socket. No other code receives from it, sends to it, or closes it.

Floor 3 (ARCHITECTURE.md). A Stream reads when its poller calls ready(), and passes input to its Handler. Output goes to
the kernel immediately. Bytes that the kernel does not accept are queued in the Stream, in order. If the connection uses
TLS, input and output pass through a Tls (tls.pyx).

A Stream has these states, in this order:
- open: reads (unless it is paused) and sends
- ending: sends nothing new, and shuts output down when the queue is empty; still reads
- closing: reads nothing, sends nothing new, and closes when the queue is empty
- closed: the handler is notified at the end of the batch; the descriptor can be reused only after that

A paused stream still notices a reset and, after heed_end(), also the peer's last byte.

A read passes on at most poller.read_size bytes. A TLS record can contain more bytes, and must be read completely before
it can be decrypted. The rest of the record's data waits in the Tls for the next batches. Meanwhile the stream waits for
EPOLLOUT, which is always ready, so each batch serves the stream unless it is paused.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, errno
from posix.unistd cimport close as c_close

from counterd.net.kernel cimport (
    EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, EPOLLRDHUP, FIONREAD, MSG_DONTWAIT, MSG_NOSIGNAL, SHUT_WR, c_recv, c_send,
    c_shutdown, ioctl, os_error, socket_error,
)
from counterd.net.poller cimport Poller, Socket
from counterd.net.tls cimport Tls

from counterd.net.tls import TlsFailed


cdef class Handler:
    """Gets the notifications of a stream. The class is an interface. stream_closed() is the last call."""

    cpdef established(self):
        """The TLS handshake is complete: data can be received and sent."""

    cpdef received(self, bytes data):
        """One read returned this data."""

    cpdef received_nothing(self):
        """One read returned no data: its TLS records were incomplete or empty."""

    cpdef input_ended(self):
        """The peer has sent its last byte, and all input was passed on."""

    cpdef end_sent(self):
        """The peer's last byte has arrived, but earlier input was not read, because the stream is paused."""

    cpdef output_stuck(self):
        """The kernel did not accept all output: some of it is queued now."""

    cpdef output_moved(self):
        """All queued output was sent."""

    cpdef tls_failed(self, cause, reason):
        """The peer's TLS is invalid, or the peer refused this side's TLS.

        cause: one of server.HANDSHAKES_FAILED. reason: a sentence.
        """

    cpdef stream_broken(self):
        """No more input can be decrypted. The peer was sent a TLS alert. The handler has to end the stream."""

    cpdef stream_closed(self, error):
        """The stream is closed. error: what closed the stream, or None if this side closed it."""


@cython.final
cdef class Stream(Socket):
    """A connected socket.

    A stream owns the descriptor as soon as the stream is created. tls: encrypts and decrypts, or None.
    """

    def __cinit__(self, Poller poller not None, int fd, Tls tls):
        self.poller = poller
        self.fd = fd
        self.tls = tls

    cpdef int begin(self, Handler handler) except -1:
        """Starts reading, and notifies the handler from now on."""
        self.handler = handler
        self.reading = True
        return self.update()

    # ---- called by the handler ----

    cpdef int send(self, bytes data) except -1:
        """Sends data after the queued output. Does nothing if the stream is ending."""
        if PyBytes_GET_SIZE(data) == 0 or self.ending or self.closing:
            return 0
        return self.transmit(data) if self.tls is None else self.encrypt(data)

    cpdef int pause(self) except -1:
        """Stops reading until read_on()."""
        self.reading = False
        return self.update()

    cpdef int read_on(self) except -1:
        self.reading = not self.closing and not self.closed
        return self.update()

    cpdef int heed_end(self, bint heeding) except -1:
        """Sets whether end_sent() is called, once, when the peer's last byte arrives while the stream is paused."""
        self.heeding = heeding
        return self.update()

    cpdef int mark_input(self) except -1:
        """Marks the end of the input that has arrived until now, for all_passed_on()."""
        cdef int unread = 0
        ioctl(self.fd, FIONREAD, &unread)
        self.unread = unread
        return 0

    cdef bint all_passed_on(self) noexcept:
        """Returns whether the handler got all input that had arrived at mark_input()."""
        return self.unread <= 0 and not self.keeps()

    cpdef int end_output(self) except -1:
        """Shuts output down when the queue is empty. Input still goes to the handler, but is not decrypted."""
        self.ending = True
        if self.tls is not None:
            self.transmit(self.tls.say_goodbye())
        if self.queued == 0 and not self.closed:
            c_shutdown(self.fd, SHUT_WR)
        return 0

    cpdef close(self):
        """Closes the stream when all queued output was sent.

        Does not wait until the kernel accepts a close_notify of TLS, because no time limit would apply to this wait.
        """
        cdef bint owed = self.queued > 0
        if self.closed or self.closing:
            return
        self.closing = True
        if self.tls is not None:
            self.transmit(self.tls.say_goodbye())
        if owed:
            self.pause()
        else:
            self.end(None)

    cpdef abort(self):
        """Closes the stream immediately."""
        self.end(None)

    cpdef int end(self, error) except -1:
        """Closes the stream immediately. error: the cause, or None if this side ends the stream."""
        if self.closed:
            return 0
        if error is not None and self.tls is not None and self.tls.shaking and self.tls.heard:
            self.handler.tls_failed("protocol", "the peer ended the connection in the middle of the handshake")
        self.closed = True
        self.owed = self.owed or self.queued > 0
        self.reading = False
        self.queue = None
        self.queued = 0
        self.error = error
        return self.poller.release_later(self)

    # ---- called by the poller ----

    cdef int ready(self, uint32_t events) except -1:
        if events & EPOLLOUT and self.queued:
            self.drain()
        if self.closed:
            return 0
        if self.reading and (events & EPOLLIN or self.keeps()):
            if self.tls is not None and self.tls.shaking:
                return self.poller.put_off(self)
            return self.read()
        if self.heeding and events & EPOLLRDHUP and not events & EPOLLERR:
            self.heed_end(False)
            self.handler.end_sent()
        elif events & (EPOLLERR | EPOLLHUP):
            return self.end(os_error(socket_error(self.fd)))
        return 0

    cdef int take_turn(self) except -1:
        self.update()
        return self.read() if self.reading else 0

    cdef int release(self) except -1:
        cdef Handler handler = self.handler
        self.poller.unwatch(self)
        c_close(self.fd)
        self.fd = -1
        self.handler = None
        if handler is not None:
            handler.stream_closed(self.error)
        return 0

    cdef int give_up(self) except -1:
        return self.end(None)

    # ---- input ----

    cdef int read(self) except -1:
        cdef ssize_t size
        cdef size_t most = self.poller.read_size
        if self.tls is not None:
            if self.tls.kept:
                return self.decrypt(0)
            most = min(most, self.tls.wanted())
        size = c_recv(self.fd, self.poller.buffer, most, MSG_DONTWAIT)
        if size > 0:
            self.unread -= size
            if self.tls is not None and not self.ending:
                return self.decrypt(size)
            self.handler.received(PyBytes_FromStringAndSize(<char*>self.poller.buffer, size))
        elif size == 0:
            self.end_input()
        elif errno != EAGAIN and errno != EINTR:
            self.end(os_error(errno))
        return 0

    cdef int decrypt(self, size_t size) except -1:
        """Passes on the data of `size` received bytes, which are in the poller's buffer."""
        cdef bytes data
        cdef bint shaking = self.tls.shaking, kept = self.tls.kept
        try:
            data = self.tls.decrypt(self.poller.buffer, size, self.poller.read_size)
        except TlsFailed as failure:
            return self.fail(failure)
        self.transmit(self.tls.take_output())  # of the handshake, or answers to records without data
        if shaking and not self.tls.shaking and not self.closed:
            self.handler.established()
        if self.closed:
            return 0
        if PyBytes_GET_SIZE(data):
            self.handler.received(data)
        else:
            self.handler.received_nothing()
        if self.tls.ended and not self.closed and not self.ending:
            self.end_input()
        if kept or self.tls.kept:
            self.update()
        return 0

    cdef int end_input(self) except -1:
        """Called when the peer has ended its stream, by a FIN or by a close_notify of TLS."""
        if self.tls is not None and self.tls.shaking:
            if self.tls.heard:
                self.handler.tls_failed("protocol", "the peer ended the connection in the middle of the handshake")
            return self.end(None)
        self.reading = False
        self.handler.input_ended()
        return self.update()  # usually the stream is closed by now, and the epoll set needs no change

    cdef int fail(self, failure) except -1:
        """Ends TLS after an error: sends the alert, and lets the peer read it."""
        self.handler.tls_failed(failure.cause, failure.reason)
        self.ending = True
        self.transmit(self.tls.take_output())
        if not self.closed:
            self.handler.stream_broken()
        return 0

    # ---- output ----

    cdef int encrypt(self, bytes data) except -1:
        cdef bytes records
        try:
            records = self.tls.encrypt(data)
        except TlsFailed as failure:
            return self.fail(failure)
        return self.transmit(records)

    cdef int transmit(self, bytes data) except -1:
        """Sends bytes, and queues the bytes that the kernel does not accept."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(data)
        cdef ssize_t sent = 0
        if size == 0 or self.closed:
            return 0
        if self.queued == 0:
            sent = self.push(PyBytes_AS_STRING(data), size)
            if sent == size:
                return 0
        return self.enqueue(data, sent)

    cdef int enqueue(self, bytes data, ssize_t sent) except -1:
        """Queues data of which the kernel has already accepted the first `sent` bytes.

        Notifies the handler, unless the handler ends the stream.
        """
        cdef bint first = self.queued == 0
        if self.closed:
            return 0
        if first:
            self.queue = []
            self.sent = sent
        self.queue.append(data)
        self.queued += PyBytes_GET_SIZE(data) - sent
        self.update()
        if first and not self.ending and not self.closing:
            self.handler.output_stuck()
        return 0

    cdef ssize_t push(self, const char* data, size_t size) except? -1:
        """Sends bytes and returns how many the kernel accepted. An error closes the stream."""
        cdef ssize_t sent = c_send(self.fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent >= 0:
            return sent
        if errno != EAGAIN and errno != EINTR:
            self.owed = True
            self.end(os_error(errno))
        return 0

    cdef int drain(self) except -1:
        """Sends queued output when the kernel has room again."""
        cdef bytes first
        cdef ssize_t sent
        while self.queued:
            first = self.queue[0]
            sent = self.push(PyBytes_AS_STRING(first) + self.sent, PyBytes_GET_SIZE(first) - self.sent)
            if sent == 0 or self.closed:
                return 0
            self.sent += sent
            self.queued -= sent
            if self.sent == PyBytes_GET_SIZE(first):
                self.sent = 0
                del self.queue[0]
        if self.closing:
            return self.end(None)
        self.update()
        if self.ending:
            c_shutdown(self.fd, SHUT_WR)
        self.handler.output_moved()
        return 0

    # ---- both ----

    cdef bint keeps(self) noexcept:
        """Returns whether the Tls has decrypted data that was not passed on yet."""
        return self.tls is not None and self.tls.kept

    cdef int update(self) except -1:
        """Makes the epoll set report the events that the stream waits for."""
        cdef uint32_t events = EPOLLIN if self.reading else EPOLLRDHUP if self.heeding else 0
        if self.queued or (self.reading and self.keeps()):
            events |= EPOLLOUT
        if self.closed or (self.watched and events == self.events):
            return 0
        return self.poller.watch(self, events)
