"""An epoll set of our own within the loop: sockets are served in batches, and plain ones as cheaply as the kernel does.

Floor 3. To the loop all sockets of a server are one descriptor, that of the epoll set. When that is readable, run()
takes one batch of what is ready, so timers, signals and turns of the driver come between two batches. What it saves
against the loop's own transports is their bookkeeping for each read and each connection: docs/PERFORMANCE.md.

It knows when a socket is ready, and nothing of what is sent or received: that is each Socket's own (stream.pyx).

- The set holds a reference to each Socket that it watches.
- A socket that ends keeps its descriptor until the batch is over, which may still have an event of it.
- An exception is a bug of ours: it costs the socket that it came from, and the others are served on.
"""

from collections import deque

from cpython.bytes cimport PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EAGAIN, EMFILE, ENFILE, ENOBUFS, ENOMEM, errno
from libc.stdint cimport uint16_t
from libc.string cimport memset
from posix.fcntl cimport O_RDONLY, open as c_open
from posix.unistd cimport close as c_close

from counterd.net.kernel cimport (
    AF_INET, AF_INET6, EPOLLIN, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, SOCK_CLOEXEC,
    SOCK_NONBLOCK, SOL_SOCKET, SO_KEEPALIVE, accept4, epoll_create1, epoll_ctl, epoll_event, epoll_wait, ntohs,
    os_error, setsockopt, sockaddr_in, sockaddr_in6,
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
        self.closing = []
        self.buffer = <uint8_t*>PyMem_Malloc(READ_MAX)
        if self.buffer == NULL:
            raise MemoryError
        self.epoll = epoll_create1(EPOLL_CLOEXEC)
        if self.epoll < 0:
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

    def listen(self, int fd, Acceptor acceptor not None):
        """Accepts connections on a listening socket from now on, and hands them over."""
        cdef Listener listener = Listener.__new__(Listener)
        listener.poller = self
        listener.fd = fd
        listener.acceptor = acceptor
        self.watch(listener, EPOLLIN)
        self.listeners.append(listener)

    def unlisten(self):
        """Accepts those that wait, and then no more; not to be called from within a batch. The listening sockets stay
        the caller's."""
        cdef Listener listener
        for listener in self.listeners:
            listener.accept(BACKLOG)
            self.unwatch(listener)
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
        self.costly = 0
        try:
            while i < count:
                try:
                    while i < count:
                        entry = <Socket>events[i].data.ptr
                        i += 1
                        entry.ready(events[i - 1].events)
                except Exception as error:
                    self.fail(entry, error)
        finally:
            self.running = False
        if self.closing:
            self.release()

    # ---- turns of costly reads ----

    cdef bint has_turn(self, Socket entry) except -1:
        """Whether a costly read may be now. If not, it waits for a later batch, and is read when it is ready then.

        Till then the epoll set is silent about it: if it told of all that wait, again and again, it would tell of the
        others the later the more these are.
        """
        if self.costly < COSTLY and (entry.called or not self.waiting):
            entry.called = False
            self.costly += 1
            return True
        self.watch(entry, 0)
        self.waiting.append(entry)
        if not self.calling:
            self.calling = True
            self.loop.call_soon(self.call_up)
        return False

    def call_up(self):
        """Those that have waited longest have their turn in the next batch."""
        cdef Socket entry
        cdef int _turn
        for _turn in range(min(COSTLY, len(self.waiting))):
            entry = self.waiting.popleft()
            entry.called = True
            entry.resume()
        self.calling = bool(self.waiting)
        if self.calling:
            self.loop.call_soon(self.call_up)

    # ---- descriptors ----

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
            self.watch(listener, 0)
        self.loop.call_later(REST_S, self.resume)

    def resume(self):
        cdef Listener listener
        for listener in self.listeners:
            self.watch(listener, EPOLLIN)

    cdef int release_later(self, Socket entry) except -1:
        """It has ended: its descriptor is released at the end of the batch, or in the loop's next turn."""
        self.closing.append(entry)
        if not self.running and not self.releasing:
            self.releasing = True
            self.loop.call_soon(self.release)
        return 0

    def release(self):
        """Releases the descriptors of sockets that have ended."""
        cdef Socket entry
        self.releasing = False
        while self.closing:
            entry = self.closing.pop()
            try:
                entry.release()
            except Exception as error:
                self.fail(entry, error)

    cdef int watch(self, Socket entry, uint32_t events) except -1:
        """Has the epoll set tell of these events, and of errors always."""
        cdef epoll_event event
        memset(&event, 0, sizeof(event))
        event.events = events
        event.data.ptr = <void*>entry
        if epoll_ctl(self.epoll, EPOLL_CTL_MOD if entry.watched else EPOLL_CTL_ADD, entry.fd, &event) < 0:
            raise os_error(errno)
        if not entry.watched:
            Py_INCREF(entry)
        entry.watched = True
        entry.events = events
        return 0

    cdef int unwatch(self, Socket entry) except -1:
        """To be called before its descriptor is closed. Closing alone would leave it in the set for as long as another
        process has a copy, and a child that this one starts has copies until it is another program."""
        if entry.watched:
            entry.watched = False
            epoll_ctl(self.epoll, EPOLL_CTL_DEL, entry.fd, NULL)
            Py_DECREF(entry)
        return 0

    cdef int fail(self, Socket entry, error) except -1:
        self.loop.call_exception_handler({"message": "serving a connection failed", "exception": error})
        return entry.give_up()


cdef class Socket:
    """What the epoll set tells of: an interface. Each method but ready() has nothing to do where nothing is open."""

    cdef int ready(self, uint32_t events) except -1:
        return 0

    cdef int resume(self) except -1:
        """It has waited for a costly read, and is to be watched again."""
        return 0

    cdef int release(self) except -1:
        """It has ended, and nothing refers to its descriptor any more."""
        return 0

    cdef int give_up(self) except -1:
        """An exception came out of it."""
        return 0


cdef class Acceptor:
    """What a listener hands connections over to: an interface."""

    cpdef accepted(self, int fd, bytes address, uint16_t port):
        """A connection. Takes the descriptor over, whatever comes of it.

        address: of the peer, 4 or 16 bytes; None on a Unix socket, where the port is 0.
        """


cdef class Listener(Socket):
    """A listening socket."""

    cdef int ready(self, uint32_t events) except -1:
        return self.accept(ACCEPTS)

    cdef int accept(self, int most) except -1:
        cdef int _turn, fd
        cdef int off = 0
        cdef sockaddr_in6 peer
        cdef unsigned int size
        cdef bytes address
        for _turn in range(most):
            size = sizeof(peer)
            memset(&peer, 0, size)
            fd = accept4(self.fd, &peer, &size, SOCK_NONBLOCK | SOCK_CLOEXEC)
            if fd >= 0:
                address = address_of(&peer)
                if is_loopback(address):
                    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &off, sizeof(off))
                self.acceptor.accepted(fd, address, ntohs(peer.sin6_port))
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
