"""A separate epoll set within the event loop, which serves sockets in batches.

Floor 3 (ARCHITECTURE.md). The event loop sees one descriptor for all sockets of a server: the descriptor of the epoll
set. When this descriptor is readable, run() serves one batch of ready sockets. Timers, signals, turns of the driver and
batches of other servers run between two batches. The event loop's own transports do more work for each read and each
connection, which this file avoids: docs/PERFORMANCE.md.

A batch ends when its time is over. The events that were fetched and not served yet are kept, and the next batch begins
with them, in order. So each socket is served once before any is served again. The descriptor of the epoll set is still
readable then, because a socket whose input was not read is still ready.

The poller knows when a socket is ready. Each Socket (stream.pyx) sends and receives by itself.

- The epoll set holds a reference to each Socket that it watches.
- A kept event is discarded when its socket leaves the epoll set.
- A socket that ends keeps its descriptor until the end of the batch, because its own methods may still be running.
- An exception is a bug in counterd. An exception ends the socket that raised it; the other sockets are still served.
"""

from collections import deque

from cpython.bytes cimport PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EAGAIN, EMFILE, ENFILE, ENOBUFS, ENOMEM, errno
from libc.stdint cimport int64_t, uint16_t
from libc.string cimport memset
from posix.fcntl cimport O_RDONLY, open as c_open
from posix.unistd cimport close as c_close

from counterd.net.clock cimport monotonic_ns
from counterd.net.kernel cimport (
    AF_INET, AF_INET6, EPOLLIN, EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CTL_MOD, SOCK_CLOEXEC,
    SOCK_NONBLOCK, SOL_SOCKET, SO_KEEPALIVE, accept4, epoll_create1, epoll_ctl, epoll_event, epoll_wait, ntohs,
    os_error, setsockopt, sockaddr_in, sockaddr_in6,
)

from counterd.net.sockets import BACKLOG

cdef extern from "<fcntl.h>" nogil:
    int O_CLOEXEC

cdef enum:
    ACCEPTS = 32        # connections accepted in one batch from each listening socket: some 10 us each

READ_MAX = 32768            # bytes of one read; the smallest requests in it, 2,730, take less time than a batch
# A batch ends after the socket that exceeds it. It is some 100 reads of a single request, so what the loop does between
# two batches costs little. A request waits for a batch and a turn of the driver of each protocol that is busy.
BATCH_NS = 500_000
REST_S = 0.1                # seconds before the next try, after accept4() ran out of a resource


cdef class Poller:
    """The epoll set of a server. reject: called with a cause and a sentence for each connection that had to be closed.
    """

    def __cinit__(self, loop, reject):
        self.epoll = self.spare = -1
        self.loop = loop
        self.reject = reject
        self.batch_ns = BATCH_NS
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
        """Starts accepting connections on a listening socket, and passes them to the acceptor."""
        cdef Listener listener = Listener.__new__(Listener)
        listener.poller = self
        listener.fd = fd
        listener.acceptor = acceptor
        self.watch(listener, EPOLLIN)
        self.listeners.append(listener)

    def unlisten(self):
        """Accepts the waiting connections, and then no more.

        The caller closes the listening sockets. Must not be called within a batch.
        """
        cdef Listener listener
        for listener in self.listeners:
            listener.accept(BACKLOG)
            self.unwatch(listener)
        self.listeners.clear()

    def limit_reads(self, size):
        """Sets how many bytes a read takes at most. The limit cannot exceed READ_MAX."""
        self.read_size = min(size, READ_MAX)

    def run(self):
        """Serves one batch of ready sockets."""
        cdef int64_t begun_ns = monotonic_ns()
        cdef epoll_event* event
        self.running = True
        try:
            if self.next == self.count:
                self.next = self.count = 0
                self.count = max(0, epoll_wait(self.epoll, self.events, FETCH, 0))
            while self.next < self.count:
                event = &self.events[self.next]
                self.next += 1
                if event.data.ptr != NULL:
                    self.serve(<Socket>event.data.ptr, event.events)
                    if monotonic_ns() - begun_ns >= self.batch_ns:
                        break
        finally:
            self.running = False
        if self.closing:
            self.release()

    cdef int serve(self, Socket entry, uint32_t events) except -1:
        """Serves a socket that has events, or whose turn for a costly read has come, if there are none."""
        try:
            if events:
                entry.ready(events)
            elif entry.watched:
                entry.take_turn()
        except Exception as error:
            self.fail(entry, error)
        return 0

    # ---- turns of costly reads ----

    cdef int put_off(self, Socket entry) except -1:
        """Lets a costly read, of some 1 ms, wait for its turn between two batches, in order.

        Until then the epoll set does not report the socket. Otherwise the batches would be full of waiting sockets, and
        the other sockets would be served late.
        """
        self.watch(entry, 0)
        self.waiting.append(entry)
        if not self.calling:
            self.calling = True
            self.loop.call_soon(self.call_up)
        return 0

    def call_up(self):
        """Lets the sockets that have waited the longest read, for the time of a batch."""
        cdef int64_t begun_ns = monotonic_ns()
        self.running = True
        try:
            while self.waiting:
                self.serve(<Socket>self.waiting.popleft(), 0)
                if monotonic_ns() - begun_ns >= self.batch_ns:
                    break
        finally:
            self.running = False
        self.calling = bool(self.waiting)
        if self.calling:
            self.loop.call_soon(self.call_up)
        if self.closing:
            self.release()

    # ---- descriptors ----

    def reserve(self):
        self.spare = c_open(b"/dev/null", O_RDONLY | O_CLOEXEC)

    def turn_away(self, int listening):
        """Closes the next connection as soon as it is accepted, with the reserve descriptor. There is no other
        descriptor, and the connection would otherwise wait for ever.

        Returns whether a connection was waiting.
        """
        cdef int fd
        if self.spare >= 0:
            c_close(self.spare)
        fd = accept4(listening, NULL, NULL, SOCK_CLOEXEC)
        if fd >= 0:
            c_close(fd)
        self.reserve()
        if fd >= 0:
            self.reject("descriptors", "no descriptor is left, although the limit of connections is not reached")
        return fd >= 0

    def rest(self):
        """Stops accepting connections for REST_S, because to try again immediately would use all of the CPU."""
        cdef Listener listener
        for listener in self.listeners:
            self.watch(listener, 0)
        self.loop.call_later(REST_S, self.resume)

    def resume(self):
        cdef Listener listener
        for listener in self.listeners:
            self.watch(listener, EPOLLIN)

    cdef int release_later(self, Socket entry) except -1:
        """Schedules the release of an ended socket's descriptor: at the end of the batch, or in the next turn of the
        event loop."""
        self.closing.append(entry)
        if not self.running and not self.releasing:
            self.releasing = True
            self.loop.call_soon(self.release)
        return 0

    def release(self):
        """Releases the descriptors of the sockets that have ended."""
        cdef Socket entry
        self.releasing = False
        while self.closing:
            entry = self.closing.pop()
            try:
                entry.release()
            except Exception as error:
                self.fail(entry, error)

    cdef int watch(self, Socket entry, uint32_t events) except -1:
        """Makes the epoll set report these events of a socket. The epoll set always reports errors."""
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
        """Removes a socket from the epoll set.

        Called before the descriptor of the socket is closed: a closed descriptor stays in the set while another process
        has a copy of it. A child process has copies until it calls exec().
        """
        cdef int i
        if entry.watched:
            entry.watched = False
            epoll_ctl(self.epoll, EPOLL_CTL_DEL, entry.fd, NULL)
            for i in range(self.next, self.count):
                if self.events[i].data.ptr == <void*>entry:
                    self.events[i].data.ptr = NULL
            Py_DECREF(entry)
        return 0

    cdef int fail(self, Socket entry, error) except -1:
        self.loop.call_exception_handler({"message": "an exception ended a connection", "exception": error})
        return entry.give_up()


cdef class Socket:
    """A member of the epoll set. The class is an interface. A listening socket needs only ready()."""

    cdef int ready(self, uint32_t events) except -1:
        return 0

    cdef int take_turn(self) except -1:
        """Called for the costly read that was put off. Makes the epoll set report the socket again."""
        return 0

    cdef int release(self) except -1:
        """Called after the end of the socket, when nothing uses its descriptor any more. Closes the descriptor."""
        return 0

    cdef int give_up(self) except -1:
        """Called when a method of the socket has raised an exception. Ends the socket."""
        return 0


cdef class Acceptor:
    """Takes the connections that a listener accepts. The class is an interface."""

    cpdef accepted(self, int fd, bytes address, uint16_t port):
        """Takes a new connection. The acceptor owns the descriptor from now on, even if it raises an exception.

        address: the peer's, 4 or 16 bytes; None on a Unix socket, where the port is 0.
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
            elif errno == EMFILE or errno == ENFILE:  # the kernel returns it even if no connection waits
                if not self.poller.turn_away(self.fd):
                    if self.poller.spare < 0:
                        self.poller.rest()
                    return 0
            elif errno == ENOBUFS or errno == ENOMEM:
                self.poller.rest()
                return 0
        return 0


cdef bytes MAPPED = bytes(10) + b"\xff\xff"  # the prefix of an IPv4 address in an IPv6 address
cdef bytes LOOPBACK = bytes(15) + b"\x01"       # ::1


cdef bytes address_of(sockaddr_in6* peer):
    """Returns an IP address as bytes: 4 bytes for IPv4, even on an IPv6 socket, and 16 bytes for IPv6.

    Returns None for other families.
    """
    cdef sockaddr_in* older = <sockaddr_in*>peer
    cdef bytes address
    if peer.sin6_family == AF_INET:
        return PyBytes_FromStringAndSize(<char*>&older.sin_addr, 4)
    if peer.sin6_family != AF_INET6:
        return None
    address = PyBytes_FromStringAndSize(<char*>peer.sin6_addr.s6_addr, 16)
    return address[12:] if address.startswith(MAPPED) else address


cdef bint is_loopback(bytes address):
    """Returns whether the peer is on this machine. If the peer is on this machine, the kernel reports its death, so
    keepalive is off.

    Keepalive would do harm: thousands of local peers would get their probes at the same time, and loopback drops
    packets beyond its queue (net.core.netdev_max_backlog, 1,000 packets). A peer that loses three probes would be given
    up.
    """
    if address is None:
        return False
    return address[0] == 127 if PyBytes_GET_SIZE(address) == 4 else address == LOOPBACK
