"""One connected socket: the only place that receives from it, sends to it, and closes it.

Floor 3. A Stream reads when its poller says so, and passes on what arrives to its Handler. What it is to send goes to
the kernel at once; what the kernel does not take is queued here, in order, until it does. With a Tls (tls.pyx) bytes
pass through that on their way in and out, and all else is the same.

States, in this order:
- open      it reads (unless paused) and sends
- ending    nothing more is sent, and output is shut down once the queue is empty; it reads on
- closing   nothing is read or sent any more but the queue, and it is closed once that is empty
- closed    the handler is told at the end of the batch, and only then the descriptor is free for another

While it is paused a reset is still noticed; so is the peer's last byte, if heed_end() asked for that.

A read passes on poller.read_size bytes at most. A record of TLS may hold more, and is all read before any of it is
known: the rest waits in the Tls, for the next batches. Meanwhile the epoll set is asked whether there is room to send,
which there is: so this stream waits for its turns as any other, and for nothing while it is paused.
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
    """What a stream tells: an interface. Nothing is called after stream_closed()."""

    cpdef established(self):
        """The TLS handshake is over: data may come, and may be sent."""

    cpdef received(self, bytes data):
        """Data that arrived with one read."""

    cpdef received_nothing(self):
        """A read brought no data: the records of TLS that it completed had none."""

    cpdef input_ended(self):
        """The peer has sent its last byte, and all before that was passed on."""

    cpdef end_sent(self):
        """The peer has sent its last byte; what came before that is not read, as the stream is paused."""

    cpdef output_stuck(self):
        """The kernel did not take everything: something is queued now."""

    cpdef output_moved(self):
        """All that was queued has gone out."""

    cpdef tls_failed(self, cause, reason):
        """What the peer sent is no TLS, or none that may be: one of server.HANDSHAKES_FAILED, and a sentence."""

    cpdef stream_broken(self):
        """What arrives from now on cannot be understood, and the peer was told why: the stream is to be ended."""

    cpdef stream_closed(self, error):
        """It is closed; error is what closed it, if that was not this side."""


@cython.final
cdef class Stream(Socket):
    """Owns a descriptor from the moment it is made. tls: what it encrypts with, or None."""

    def __cinit__(self, Poller poller not None, int fd, Tls tls):
        self.poller = poller
        self.fd = fd
        self.tls = tls

    cpdef int begin(self, Handler handler) except -1:
        """Tells the handler what happens, from now on."""
        self.handler = handler
        self.reading = True
        return self.update()

    # ---- called by the handler ----

    cpdef int send(self, bytes data) except -1:
        """Sends it, behind what is queued; nothing once the stream is ending."""
        if PyBytes_GET_SIZE(data) == 0 or self.ending or self.closing:
            return 0
        return self.transmit(data) if self.tls is None else self.encrypt(data)

    cpdef int pause(self) except -1:
        """Reads no more for now."""
        self.reading = False
        return self.update()

    cpdef int read_on(self) except -1:
        self.reading = not self.closing and not self.closed
        return self.update()

    cpdef int heed_end(self, bint heeding) except -1:
        """Whether end_sent() is called, once, when the peer has sent its last byte while the stream is paused."""
        self.heeding = heeding
        return self.update()

    cpdef int mark_input(self) except -1:
        """What has arrived by now is what all_passed_on() is about."""
        cdef int unread = 0
        ioctl(self.fd, FIONREAD, &unread)
        self.unread = unread
        return 0

    cdef bint all_passed_on(self) noexcept:
        """Whether the handler has had all that had arrived at mark_input()."""
        return self.unread <= 0 and not self.keeps()

    cpdef int end_output(self) except -1:
        """Ends the peer's stream behind what is queued. What still arrives goes to the handler, TLS or not."""
        self.ending = True
        if self.tls is not None:
            self.transmit(self.tls.say_goodbye())
        if self.queued == 0 and not self.closed:
            c_shutdown(self.fd, SHUT_WR)
        return 0

    cpdef close(self):
        """Once everything that is queued has gone out.

        A goodbye of TLS that the kernel does not take is not waited for: nobody would look after that.
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
        """Now."""
        self.end(None)

    cpdef int end(self, error) except -1:
        """Now. error: what ended it, if that was not this side."""
        if self.closed:
            return 0
        if error is not None and self.tls is not None and self.tls.shaking and self.tls.heard:
            self.handler.tls_failed("protocol", "it was cut off in the middle of the handshake")
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
            return self.read()
        if self.heeding and events & EPOLLRDHUP and not events & EPOLLERR:
            self.heed_end(False)
            self.handler.end_sent()
        elif events & (EPOLLERR | EPOLLHUP):
            return self.end(os_error(socket_error(self.fd)))
        return 0

    cdef int resume(self) except -1:
        return self.update()

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

    # ---- what arrives ----

    cdef int read(self) except -1:
        cdef ssize_t size
        cdef size_t most = self.poller.read_size
        if self.tls is not None:
            if self.tls.shaking and not self.poller.has_turn(self):
                return 0
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
        """Passes on the data in so many bytes, which are in the poller's buffer."""
        cdef bytes data
        cdef bint shaking = self.tls.shaking, kept = self.tls.kept
        try:
            data = self.tls.decrypt(self.poller.buffer, size, self.poller.read_size)
        except TlsFailed as failure:
            return self.fail(failure)
        self.transmit(self.tls.take_output())  # of the handshake, or answers to what was no data
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
        """The peer has sent its last byte, in its stream or by the word of TLS."""
        if self.tls is not None and self.tls.shaking:
            if self.tls.heard:
                self.handler.tls_failed("protocol", "it ended in the middle of the handshake")
            return self.end(None)
        self.reading = False
        self.handler.input_ended()
        return self.update()  # mostly it is closed by now, and the epoll set need not be told

    cdef int fail(self, failure) except -1:
        """The peer is told why, and has time to read that."""
        self.handler.tls_failed(failure.cause, failure.reason)
        self.ending = True
        self.transmit(self.tls.take_output())
        if not self.closed:
            self.handler.stream_broken()
        return 0

    # ---- what goes out ----

    cdef int encrypt(self, bytes data) except -1:
        cdef bytes records
        try:
            records = self.tls.encrypt(data)
        except TlsFailed as failure:
            return self.fail(failure)
        return self.transmit(records)

    cdef int transmit(self, bytes data) except -1:
        """To the kernel; what it does not take is queued, and the handler told unless it has nothing more to say."""
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
        """The kernel has taken so much of it."""
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
        """How much the kernel takes. An error closes the stream."""
        cdef ssize_t sent = c_send(self.fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent >= 0:
            return sent
        if errno != EAGAIN and errno != EINTR:
            self.owed = True
            self.end(os_error(errno))
        return 0

    cdef int drain(self) except -1:
        """There is room again for what is queued."""
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
        """Whether it has read more than it has passed on."""
        return self.tls is not None and self.tls.kept

    cdef int update(self) except -1:
        """Has the epoll set tell of what is waited for."""
        cdef uint32_t events = EPOLLIN if self.reading else EPOLLRDHUP if self.heeding else 0
        if self.queued or (self.reading and self.keeps()):
            events |= EPOLLOUT
        if self.closed or (self.watched and events == self.events):
            return 0
        return self.poller.watch(self, events)
