"""Plain sockets, read and written by an epoll set of our own within the loop: the cheap transport.

Floor 3. To the loop all sockets of a server are one descriptor, that of the epoll set. When that is readable, run()
takes one batch of what is ready, so timers, signals and turns of the driver come between two batches; to a Connection,
a Transport is what asyncio calls one. What it saves against the loop's own transports is their bookkeeping for each
read and each connection: docs/PERFORMANCE.md.

States of a transport:
- reading   what arrives goes to the connection; paused by it, a dead peer is still noticed
- queued    the kernel took less than everything: the rest is here, and goes out as it can
- closing   nothing is read any more, and what is queued goes out first
- closed    the connection hears of it at the end of the batch, and only then the descriptor is free for another
"""

from collections import deque

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EAGAIN, EINTR, EMFILE, ENFILE, ENOBUFS, ENOMEM, errno
from libc.string cimport memset
from posix.fcntl cimport O_RDONLY, open as c_open
from posix.unistd cimport close as c_close

from counterd.net.kernel cimport (
    AF_INET, AF_INET6, EPOLLERR, EPOLLHUP, EPOLLIN, EPOLLOUT, EPOLLRDHUP, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL,
    EPOLL_CTL_MOD, MSG_DONTWAIT, MSG_NOSIGNAL, SHUT_WR, SOCK_CLOEXEC, SOCK_NONBLOCK, SOL_SOCKET, SO_KEEPALIVE,
    accept4, c_recv, c_send, c_shutdown, epoll_create1, epoll_ctl, epoll_event, epoll_wait, ntohs, os_error,
    setsockopt, sockaddr_in, sockaddr_in6, socket_error,
)

from counterd.net.sockets import BACKLOG

cdef extern from "<fcntl.h>" nogil:
    int O_CLOEXEC

cdef enum:
    BATCH = 64          # sockets served before the loop has its turn
    ACCEPTS = 32        # connections accepted in one batch, of each listening socket: some 10 us each

READ_MAX = 262144           # bytes of one read
REST_S = 0.1                # before accepting is tried again where it could not be done


cdef class Poller:
    """The epoll set of a server. reject: called for a connection that is turned away, with the cause and a sentence."""

    def __cinit__(self, loop, reject):
        self.epoll = self.spare = -1
        self.loop = loop
        self.reject = reject
        self.waiting = deque()
        self.listeners = []
        self.dying = []
        self.buffer = <uint8_t*>PyMem_Malloc(READ_MAX)
        self.epoll = epoll_create1(EPOLL_CLOEXEC)
        if self.buffer == NULL or self.epoll < 0:
            raise os_error(errno)
        self.reserve()
        self.limit_reads(READ_MAX)
        loop.add_reader(self.epoll, self.run)

    def __dealloc__(self):
        if self.epoll >= 0:
            c_close(self.epoll)
        if self.spare >= 0:
            c_close(self.spare)
        PyMem_Free(self.buffer)

    def listen(self, int fd, make, bint wraps=False):
        """Accepts connections on a listening socket from now on.

        make: gives a Connection for each. wraps: whether `wrap` gives the transports, unless it is None.
        """
        cdef Listener listener = Listener.__new__(Listener)
        listener.poller = self
        listener.make = make
        listener.wraps = wraps
        self.watch(listener, fd, EPOLLIN)
        self.listeners.append(listener)

    def unlisten(self):
        """Accepts those that wait, and then no more; not to be called from within a batch. The listening sockets stay
        the caller's."""
        cdef Listener listener
        for listener in self.listeners:
            listener.accept(BACKLOG)
            epoll_ctl(self.epoll, EPOLL_CTL_DEL, listener.fd, NULL)
            Py_DECREF(listener)
        self.listeners.clear()

    def limit_reads(self, size):
        """Reads so many bytes at once from now on, within READ_MAX."""
        self.read_size = min(size, READ_MAX)

    def run(self):
        """One batch of what is ready."""
        cdef epoll_event[BATCH] events
        cdef int count = epoll_wait(self.epoll, events, BATCH, 0)
        cdef int i = 0
        cdef Socket entry = None
        self.running = True
        self.handshakes = 0
        try:
            while i < count:
                try:
                    while i < count:
                        entry = <Socket>events[i].data.ptr
                        i += 1
                        entry.ready(events[i - 1].events)
                except Exception as error:  # a bug of ours: it costs this connection, not the others
                    self.fail(entry, error)
        finally:
            self.running = False
        if self.dying:
            self.bury()

    def bury(self):
        """Tells the connections of transports that have closed, and frees their descriptors."""
        self.burying = False
        while self.dying:
            self.forget(self.dying.pop())

    cdef int put_off(self, Transport transport) except -1:
        """Reads it in a later batch. Till then the epoll set is silent about it: if it told of all that wait, again and
        again, it would tell of the others the later the more these are."""
        self.watch(transport, transport.fd, 0)
        self.waiting.append(transport)
        if not self.calling:
            self.calling = True
            self.loop.call_soon(self.call_up)
        return 0

    def call_up(self):
        """Those that have waited longest have their turn in the next batch."""
        cdef Transport transport
        cdef int _turn
        for _turn in range(min(HANDSHAKES, len(self.waiting))):
            transport = self.waiting.popleft()
            transport.called = True
            if not transport.closed:
                transport.update()
        self.calling = bool(self.waiting)
        if self.calling:
            self.loop.call_soon(self.call_up)

    def reserve(self):
        self.spare = c_open(b"/dev/null", O_RDONLY | O_CLOEXEC)

    def turn_away(self, int listening):
        """No descriptor is left: the one in reserve serves to close the next connection, which would wait for ever.

        Returns whether there was one.
        """
        cdef int fd
        if self.spare >= 0:
            c_close(self.spare)
        fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC)
        if fd >= 0:
            c_close(fd)
        self.reserve()
        if fd >= 0:
            self.reject("descriptors", "no descriptor is left, although fewer connections are open than may be")
        return fd >= 0

    def rest(self):
        """Nothing can be accepted for now, and asking again at once would take all of the CPU."""
        cdef Listener listener
        for listener in self.listeners:
            self.watch(listener, listener.fd, 0)
        self.loop.call_later(REST_S, self.resume)

    def resume(self):
        cdef Listener listener
        for listener in self.listeners:
            self.watch(listener, listener.fd, EPOLLIN)

    cdef int accepted(self, int fd, Listener listener, sockaddr_in6* peer) except -1:
        """Begins to serve a connection."""
        cdef Transport transport = None
        cdef Connection connection
        cdef int off = 0
        try:
            if listener.wraps and self.wrap is not None:
                transport = self.wrap()
            else:
                transport = Transport.__new__(Transport)
            transport.poller = self
            transport.reading = True
            transport.protocol = connection = listener.make()
            connection.address = address_of(peer)
            connection.port = ntohs(peer.sin6_port)
            if is_loopback(connection.address):
                setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &off, sizeof(off))
            connection.sealed = transport.seals
            self.watch(transport, fd, EPOLLIN)
        except Exception:
            c_close(fd)
            raise
        try:
            connection.connection_made(transport)
            if not transport.closed:
                transport.begin()
        except Exception:
            transport.abort()
            raise
        if transport.closed:  # refused: this batch knows nothing of it yet, and the descriptor is needed for the next
            self.dying.remove(transport)
            self.forget(transport)
        return 0

    cdef int forget(self, Transport transport) except -1:
        # Closing alone would leave it in the epoll set for as long as another process has a copy, and a child that this
        # one starts has copies until it is another program: the set would tell of what is freed below.
        epoll_ctl(self.epoll, EPOLL_CTL_DEL, transport.fd, NULL)
        c_close(transport.fd)
        try:
            transport.protocol.connection_lost(transport.error)
        except Exception as error:
            self.fail(None, error)
        transport.protocol = None
        Py_DECREF(transport)
        return 0

    cdef int watch(self, Socket entry, int fd, uint32_t events) except -1:
        """Has the epoll set tell of these events, and of errors always. The set holds a reference."""
        cdef epoll_event event
        memset(&event, 0, sizeof(event))
        event.events = events
        event.data.ptr = <void*>entry
        if epoll_ctl(self.epoll, EPOLL_CTL_MOD if entry.watched else EPOLL_CTL_ADD, fd, &event) < 0:
            raise os_error(errno)
        if not entry.watched:
            Py_INCREF(entry)
        entry.watched = True
        entry.fd = fd
        entry.events = events
        return 0

    cdef int fail(self, entry, error) except -1:
        self.loop.call_exception_handler({"message": "serving a connection failed", "exception": error})
        if isinstance(entry, Transport):
            entry.abort()
        return 0


cdef class Socket:
    cdef int ready(self, uint32_t events) except -1:
        return 0


cdef class Listener(Socket):
    """A listening socket."""

    cdef int ready(self, uint32_t events) except -1:
        return self.accept(ACCEPTS)

    cdef int accept(self, int most) except -1:
        cdef int _turn, fd
        cdef sockaddr_in6 peer
        cdef unsigned int size
        for _turn in range(most):
            size = sizeof(peer)
            memset(&peer, 0, size)
            fd = accept4(self.fd, &peer, &size, SOCK_NONBLOCK | SOCK_CLOEXEC)
            if fd >= 0:
                self.poller.accepted(fd, self, &peer)
            elif errno == EAGAIN:
                return 0
            elif errno == EMFILE or errno == ENFILE:  # which the kernel says before it looks whether somebody waits
                if not self.poller.turn_away(self.fd):
                    if self.poller.spare < 0:
                        self.poller.rest()
                    return 0
            elif errno == ENOBUFS or errno == ENOMEM:
                self.poller.rest()
                return 0
        return 0


cdef class Transport(Socket):
    """A connected socket. A part of asyncio.Transport: what Connection asks for."""

    cdef int begin(self) except -1:
        """The connection stays."""
        return 0

    cdef int ready(self, uint32_t events) except -1:
        if self.closed:
            return 0
        if events & EPOLLOUT:
            self.drain()
        if self.closed:
            return 0
        if self.reading and events & EPOLLIN:
            return self.read()
        if events & EPOLLRDHUP and not events & EPOLLERR and self.heeding:
            self.heeding = False
            self.update()
            self.protocol.end_sent()
        elif events & (EPOLLERR | EPOLLHUP):
            return self.end(os_error(socket_error(self.fd)))
        return 0

    cdef int read(self) except -1:
        cdef ssize_t size = c_recv(self.fd, self.poller.buffer, self.poller.read_size, MSG_DONTWAIT)
        if size > 0:
            self.protocol.data_received(PyBytes_FromStringAndSize(<char*>self.poller.buffer, size))
        elif size == 0:
            self.reading = False
            self.protocol.eof_received()
            if not self.closed:  # mostly it is, and the epoll set need not be told
                self.update()
        elif errno != EAGAIN and errno != EINTR:
            self.end(os_error(errno))
        return 0

    cdef bint send_queue(self) except -1:
        """Sends what the kernel takes of the queue; returns whether that was all."""
        cdef bytes first
        cdef ssize_t sent
        while self.queue:
            first = self.queue[0]
            sent = c_send(
                self.fd, PyBytes_AS_STRING(first) + self.sent, PyBytes_GET_SIZE(first) - self.sent,
                MSG_DONTWAIT | MSG_NOSIGNAL,
            )
            if sent < 0:
                if errno != EAGAIN and errno != EINTR:
                    self.end(os_error(errno))
                return False
            self.sent += sent
            self.queued -= sent
            if self.sent == PyBytes_GET_SIZE(first):
                self.sent = 0
                del self.queue[0]
        return True

    cdef int drain(self) except -1:
        """There is room again for what is queued."""
        if not self.send_queue():
            return 0
        if self.closing:
            return self.end(None)
        self.update()
        self.protocol.resume_writing()
        return 0

    cdef int enqueue(self, bytes data) except -1:
        if self.queue is None:
            self.queue = []
        self.queue.append(data)
        self.queued += PyBytes_GET_SIZE(data)
        return self.update()

    cdef int update(self) except -1:
        cdef uint32_t events = EPOLLIN if self.reading else EPOLLRDHUP if self.heeding else 0
        if self.queued:
            events |= EPOLLOUT
        return self.poller.watch(self, self.fd, events) if events != self.events else 0

    cdef int end(self, error) except -1:
        if self.closed:
            return 0
        self.closed = True
        self.reading = False
        self.queue = None
        self.queued = 0
        self.error = error
        self.poller.dying.append(self)
        if not self.poller.running and not self.poller.burying:
            self.poller.burying = True
            self.poller.loop.call_soon(self.poller.bury)
        return 0

    # ---- called by the connection ----

    def get_extra_info(self, str name not None, default=None):
        """Of "socket": something that has a fileno()."""
        return self if name == "socket" else default

    def fileno(self):
        return self.fd

    def set_write_buffer_limits(self, high=None, low=None):
        """They are 0: the connection is told as soon as anything is queued, and when nothing is any more."""

    def get_write_buffer_size(self):
        return self.queued

    def write(self, bytes data not None):
        """What the kernel did not take when the connection tried it; it goes out when there is room."""
        if self.closed or self.closing or PyBytes_GET_SIZE(data) == 0:
            return
        self.enqueue(data)
        if self.queued == PyBytes_GET_SIZE(data):
            self.protocol.pause_writing()

    def write_eof(self):
        """No more will be written; nothing may be queued."""
        c_shutdown(self.fd, SHUT_WR)

    def pause_reading(self):
        self.reading = False
        if not self.closed:
            self.update()

    def resume_reading(self):
        if not self.closed and not self.closing:
            self.reading = True
            self.update()

    def heed_end(self, bint heeding):
        """Whether end_sent() is called, once, when the peer has sent its last byte while nothing is read."""
        self.heeding = heeding
        if not self.closed:
            self.update()

    def is_closing(self):
        return self.closed or self.closing

    def close(self):
        """Once everything that is queued has gone out."""
        if self.queued:
            self.closing = True
            self.pause_reading()
        else:
            self.end(None)

    def abort(self):
        """Now."""
        self.end(None)


cdef bytes MAPPED = bytes(10) + b"\xff\xff"  # before an IPv4 address in an IPv6 one
cdef bytes LOOPBACK = bytes(15) + b"\x01"       # of IPv6


cdef bytes address_of(sockaddr_in6* peer):
    """The bytes of an IP address: 4, also of one that came to an IPv6 socket, or 16. None of another family."""
    cdef sockaddr_in* older = <sockaddr_in*>peer
    cdef bytes address
    if peer.sin6_family == AF_INET:
        return PyBytes_FromStringAndSize(<char*>&older.sin_addr, 4)
    if peer.sin6_family != AF_INET6:
        return None
    address = PyBytes_FromStringAndSize(<char*>peer.sin6_addr.s6_addr, 16)
    return address[12:] if address.startswith(MAPPED) else address


cdef bint is_loopback(bytes address):
    """Whether the peer is on this machine: it cannot vanish without the kernel, which is its own, saying so.

    So it is not probed. Probes to thousands of such peers fall due together, and loopback drops what its queue has no
    room for (net.core.netdev_max_backlog, 1,000 packets): those whose probes are lost three times would be given up.
    """
    if address is None:
        return False
    return address[0] == 127 if PyBytes_GET_SIZE(address) == 4 else address == LOOPBACK
