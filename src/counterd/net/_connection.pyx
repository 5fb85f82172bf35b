"""One connection: bytes from a transport into the session, one write per read out of it.

Floor 3, an asyncio protocol: its transport is the poller's, or any other whose socket may be written to while nothing
is queued. It knows sockets and the contract of a session, and no protocol.

States of a connection:
- arriving   it is let in and counts, and its handshake is under way: it has no session yet, and takes no part
- open       what arrives goes to the session; reading is paused only while output is queued or the session has more
- queued     the kernel took less than everything: the transport holds the rest and tells us when it is out
- parting    the daemon is stopping: what the kernel has received by now is still read and answered
- lingering  nothing is owed any more; writing is shut down and input is discarded, so that the peer can read the last
             answer before a reset could throw it away; for LINGER_S or LINGER_BYTES at most
- lost       the transport is gone and the session told so
"""

import array
import socket

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, ERANGE, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd._core cimport CLOSING, Session, Store, is_streaming
from counterd.net.clock cimport monotonic_ns
from counterd.net.driver cimport Driver
from counterd.net.kernel cimport (
    MSG_DONTWAIT, MSG_NOSIGNAL, SO_PEERCRED, SO_PEERGROUPS, SOL_SOCKET, c_send, getsockopt, os_error, ucred,
)

from counterd.net.access import EVERYONE

cdef extern from *:
    int __builtin_clzll(unsigned long long value) nogil

cdef extern from "<sys/ioctl.h>" nogil:
    int ioctl(int fd, unsigned long request, void* argument)
    unsigned long FIONREAD

cdef int64_t SECOND = 1000000000
cdef int64_t SLOW_CHECK_NS = SECOND     # between two looks whether a connection that is slowed down has another limit

cdef enum:
    LINGER_S = 1            # long enough for a reply to cross any network, and for its reader to look
    LINGER_BYTES = 1048576  # no honest peer has more under way


cdef class Roster:
    """Who is connected: the part of a Server (see server.py) that every connection passes when it comes and goes.

    The rest of it, which few ever call, are the methods that Server adds.
    """

    def __cinit__(self, loop, Store store not None, limits, *_):
        self.loop = loop
        self.store = store
        self.driver = Driver(loop, store)
        self.connections = {}
        self.arriving = set()
        self.addresses = {}
        self.adopt(limits)

    @property
    def limits(self):
        """What may change while the server runs: a Limits, which takes effect when it is assigned."""
        return self._limits

    @limits.setter
    def limits(self, limits):
        self.adopt(limits)
        self.limits_changed()

    cdef int adopt(self, limits) except -1:
        self._limits = limits
        self.max_connections = limits.max_connections
        self.guarded = limits.access != EVERYONE or limits.max_per_address > 0
        self.request_ns = SECOND // limits.requests_per_second if limits.requests_per_second else 0
        return 0

    cdef Py_ssize_t count(self):
        """How many are here, whether or not they take part yet."""
        return len(self.connections) + len(self.arriving)

    cdef bint admit(self, Connection connection) except -1:
        """Lets it in, or returns False; the caller closes it then."""
        cdef bytes address = connection.address
        if (self.guarded or self.count() >= self.max_connections) and not self.admits(connection):
            return False
        connection.since_ns = connection.active_ns = monotonic_ns()
        self.arriving.add(connection)
        if address is not None:
            self.addresses[address] = self.addresses.get(address, 0) + 1
        return True

    cdef bint admits(self, Connection connection) except -1:
        """Whether the limits let it in; if not, that is counted and reported."""
        limits = self._limits
        cdef bytes address = connection.address
        if address is None:
            if limits.access.users or limits.access.groups:
                pid, uid, gids = peer_process(connection.fd)
                if not limits.access.allows_process(uid, gids):
                    self.reject("allow", f"user {uid} (process {pid}) is not among those allowed")
                    return False
        elif limits.access.networks and not limits.access.allows_address(address):
            self.reject("allow", f"{connection.peer()[0]} is not among the addresses allowed")
            return False
        if self.count() >= self.max_connections:
            self.reject("max_connections", f"{self.count()} connections are open, the limit")
            return False
        if limits.max_per_address and self.addresses.get(address, 0) >= limits.max_per_address:
            self.reject(
                "per_address", f"{connection.peer()[0]} has {self.addresses[address]} open, the limit of one address"
            )
            return False
        return True

    cdef Session enter(self, Connection connection):
        """The session of a connection that has been let in and takes part from now on; None if there is no room."""
        cdef Connection former
        cdef Session session
        cdef uint32_t number
        connection.active_ns = monotonic_ns()
        try:
            session = self.store.session(connection.active_ns)
        except MemoryError as error:
            self.reject("memory", str(error))
            self.driver.wake()  # what it has already had may have to be given back
            return None
        number = session.connection
        if number in self.connections:
            # One that has ended and is still being answered: the engine has let go of it, so it makes way.
            former = self.connections.pop(number)
            former.number = -<int64_t>former.serial
            self.connections[former.number] = former
        self.arriving.discard(connection)
        self.serial += 1
        connection.serial = self.serial
        connection.number = number
        connection.entered_ns = connection.active_ns
        self.connections[number] = connection
        self.highest = max(self.highest, number)
        if self.watch is not None:
            self.watch("opened", connection)
        return session

    cdef int remove(self, Connection connection, error) except -1:
        cdef bytes address = connection.address
        if address is not None:
            count = self.addresses.pop(address)
            if count > 1:
                self.addresses[address] = count - 1
        if connection.number:
            del self.connections[connection.number]
            if self.watch is not None:
                self.watch("closed", connection)
        else:
            self.arriving.discard(connection)
        if self.parting or connection.queued or error is not None:
            self.lost(connection, error, connection.queued)
        return 0

    def idle_among(self, uint32_t first, uint32_t count, int64_t before_ns):
        """Of the connections with so many numbers from first on, those that have sent nothing since that moment, though
        nothing hindered them. And whether there may be any beyond."""
        cdef Connection connection
        cdef int64_t number
        cdef list idle = []
        for number in range(first, <int64_t>first + count):
            connection = self.connections.get(number)
            if connection is not None and connection.is_idle(before_ns):
                idle.append(connection)
        return idle, number < self.highest

    cdef void count_batch(self, Py_ssize_t size, int64_t took_ns) noexcept:
        """One read of so many bytes, answered within that time."""
        self.batch_times[power_above(took_ns, TIME_BITS, TIMES)] += 1
        self.batch_ns += took_ns
        self.batch_sizes[power_above(size, SIZE_BITS, SIZES)] += 1
        self.batch_bytes += size

    def batches(self):
        """What was counted of batches: by time, all nanoseconds, by size, all bytes."""
        return (
            tuple([self.batch_times[i] for i in range(TIMES + 1)]), self.batch_ns,
            tuple([self.batch_sizes[i] for i in range(SIZES + 1)]), self.batch_bytes,
        )


cdef inline int power_above(uint64_t value, int first, int count) noexcept:
    """Which of so many powers of two, from 2**first on, is the least that is not below the value; count if none is."""
    cdef int bits = 64 - __builtin_clzll(value - 1) if value > 1 else 0
    return min(max(bits - first, 0), count)


cdef class Connection:
    """A connection of a Server, which admits it and keeps the books."""

    def __cinit__(self, Roster server not None, patience):
        self.server = server
        self.store = server.store
        self.patience = patience
        self.fd = -1

    # ---- called by the transport ----

    cpdef connection_made(self, transport):
        self.fd = transport.get_extra_info("socket").fileno()
        if not self.server.admit(self):
            self.fd = -1
            transport.abort()
            return
        self.transport = transport
        if not self.sealed:
            self.take_part()

    cdef bint take_part(self) except -1:
        """Begins its session, once whatever has to precede that is over; returns whether it could."""
        cdef Session session = self.server.enter(self)
        if session is None:
            self.abort()
            return False
        session.owner = self
        self.session = session
        if self.server.parting:
            self.part()
        return True

    cpdef data_received(self, bytes data):
        cdef Session session = self.session
        cdef uint64_t before
        cdef int64_t now_ns
        cdef bytes output
        if self.lingering:
            self.discarded += PyBytes_GET_SIZE(data)
            if self.discarded > LINGER_BYTES:
                self.abort()
            return
        before = session.requests
        now_ns = monotonic_ns()
        self.active_ns = now_ns
        output = session.receive(data, now_ns)
        if PyBytes_GET_SIZE(output):
            self.send(output)
        self.server.count_batch(PyBytes_GET_SIZE(data), monotonic_ns() - now_ns)
        self.unread -= PyBytes_GET_SIZE(data)
        if self.server.request_ns:
            self.charge(session.requests - before, now_ns)
        if is_streaming(session) or session.state == CLOSING or self.store.stirred or self.parting:
            self.settle()

    cpdef eof_received(self):
        self.ended = True
        if self.lingering:
            self.transport.close()
        else:
            self.send(self.session.eof(monotonic_ns()))
            self.settle()
        return True  # this side closes when it has said everything

    cpdef end_sent(self):
        """The peer has sent its last byte, and we have yet to read what came before that, as it is slowed down.

        Whether it has gone, or half-closed and waits for its answers, nobody can tell. It can ask no more than that, so
        all of it is read now: what the peer holds is not to wait until the time of its last requests has passed.
        """
        self.hasty = True
        self.be_slow_no_more()
        self.settle()

    cpdef pause_writing(self):
        """The transport could not send everything."""
        self.queued = True
        self.transport.pause_reading()
        self.server.output_stuck(self)

    cpdef resume_writing(self):
        """Everything that was queued has gone out."""
        self.queued = False
        self.active_ns = monotonic_ns()  # it may have waited for its answers
        self.server.output_moved(self)
        self.settle()

    cpdef connection_lost(self, exc):
        if self.transport is None:
            return  # it was refused
        if self.linger_timer is not None:
            self.linger_timer.cancel()
        if self.slow_timer is not None:
            self.slow_timer.cancel()
        self.transport = self.linger_timer = self.slow_timer = None
        self.fd = -1
        if self.session is not None:
            self.session.closed(monotonic_ns())
            self.session.owner = None
        self.server.remove(self, exc)
        self.wake_store()

    # ---- called by the server and the driver ----

    def pull(self):
        """Fetches the session's next output, if the last has gone out."""
        cdef bytes output
        cdef uint64_t before
        cdef int64_t now_ns
        self.pulling = False
        if self.transport is None:
            return
        if self.queued:
            self.session.wait()
        if self.session.dropped:
            self.server.drop(self)
            return
        if self.queued:
            return
        try:
            before = self.session.requests
            now_ns = monotonic_ns()
            output = self.session.take_output(now_ns)
            if self.server.request_ns:
                self.charge(self.session.requests - before, now_ns)
            if not self.lingering:  # what others say after its end is thrown away: nobody is to wait for it
                self.send(output)
                self.settle()
        except Exception as error:  # where no transport is the caller, closing the connection is up to us
            self.server.loop.call_exception_handler({"message": "fetching output failed", "exception": error})
            self.abort()

    def part(self):
        """Ends the connection once what it has asked so far is answered; at once, if it has had no way to ask."""
        cdef int unread = 0
        if self.session is None:
            self.abort()
        elif self.transport is not None and not self.parting:
            ioctl(self.fd, FIONREAD, &unread)
            self.unread = unread
            self.parting = True
            self.be_slow_no_more()
            self.settle()

    def abort(self):
        """Ends the connection now."""
        if self.transport is not None:
            self.transport.abort()

    def close(self):
        """Ends the connection as soon as what it was answered has gone out."""
        if self.transport is not None:
            self.transport.close()

    @property
    def id(self):
        """NUMBER-SERIAL: the engine's number of it, and one that no other connection of this server ever has."""
        return f"{self.number}-{self.serial}"

    @property
    def requests(self):
        """How many it has made so far."""
        return self.session.requests if self.session is not None else 0

    def peer(self):
        """Where it comes from: an IP address as text and a port, or ("", 0) on a Unix socket."""
        if self.address is None:
            return "", 0
        family = socket.AF_INET if PyBytes_GET_SIZE(self.address) == 4 else socket.AF_INET6
        return socket.inet_ntop(family, self.address), self.port

    def origin(self):
        """Where it comes from, for people: 127.0.0.1:5432, [::1]:5432 or unix uid=0 pid=12; unix once that has gone."""
        if self.address is None:
            if self.fd < 0:
                return "unix"
            pid, uid, _ = peer_process(self.fd)
            return f"unix uid={uid} pid={pid}"
        address, port = self.peer()
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    def tls(self):
        """Of a connection over TLS, its version, cipher, and the subject of the peer's certificate or ""; else None."""
        return self.transport.tls() if self.sealed and self.transport is not None else None

    def queue_size(self):
        """Bytes that the transport still holds."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    # ---- inside ----

    cdef int read_sealed(self, Py_ssize_t size) except -1:
        """So many bytes of what the kernel had received were none for the session."""
        self.unread -= size
        if self.parting:
            self.settle()
        return 0

    cdef int charge(self, uint64_t requests, int64_t now_ns) except -1:
        """Takes the time for them. Up to a second is saved up; what is overdrawn passes before more is read.

        So whoever sends steadily at the rate is never stopped, and a read with any number of requests is answered.
        """
        if requests == 0 or self.parting or self.hasty or self.ended or self.session.closing:
            return 0
        self.paid_ns = max(self.paid_ns, now_ns - SECOND) + <int64_t>requests * self.server.request_ns
        if self.paid_ns > now_ns and self.slow_timer is None:
            self.slow_down(now_ns)
            self.transport.pause_reading()
            self.transport.heed_end(True)
            self.server.slowed += 1
            self.server.slowed_down(self)
        return 0

    cdef int slow_down(self, int64_t now_ns) except -1:
        cdef int64_t left_ns = min(self.paid_ns - now_ns, SLOW_CHECK_NS)
        self.slow_timer = self.server.loop.call_later(left_ns / 1e9, self.quicken, self.server.request_ns)
        return 0

    def quicken(self, int64_t request_ns):
        """Has it read again if the time that its requests took is over.

        request_ns: of the server, when the time was reckoned. Under another limit nothing is held against it.
        """
        cdef int64_t now_ns = monotonic_ns()
        if self.server.request_ns != request_ns:
            self.paid_ns = 0
        if self.paid_ns > now_ns:
            self.slow_down(now_ns)
            return
        self.be_slow_no_more()
        self.active_ns = now_ns
        self.settle()

    cdef int be_slow_no_more(self) except -1:
        if self.slow_timer is not None:
            self.slow_timer.cancel()
            self.slow_timer = None
            self.transport.heed_end(False)
        return 0

    cdef bint is_idle(self, int64_t before_ns) noexcept:
        """Whether it has sent nothing since that moment, and was neither owed anything nor kept from sending."""
        return (
            self.active_ns < before_ns and not self.queued and not self.pulling and self.slow_timer is None
            and not self.parting and not self.ended and not self.lingering and not self.session.awaited
        )

    cdef int send(self, bytes output) except -1:
        """One send(2) straight to the socket; what the kernel does not take goes to the transport."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(output)
        cdef Py_ssize_t sent = 0
        if size == 0:
            return 0
        if self.sealed:
            self.transport.write(output)
            return 0
        if not self.queued:
            sent = c_send(self.fd, PyBytes_AS_STRING(output), size, MSG_DONTWAIT | MSG_NOSIGNAL)
            if sent == size:
                return 0
            if sent < 0:
                if errno != EAGAIN and errno != EINTR:
                    self.abort()
                    return 0
                sent = 0
            self.transport.set_write_buffer_limits(high=0)  # it calls pause_writing() as soon as anything is queued
        self.transport.write(output[sent:] if sent else output)
        return 0

    cdef int settle(self) except -1:
        """Decides what comes next, after anything that may have changed the session's state."""
        self.wake_store()
        if (self.session is None or self.transport is None or self.queued or self.lingering
                or self.transport.is_closing()):
            return 0
        if is_streaming(self.session):
            self.transport.pause_reading()
            if not self.pulling:
                self.pulling = True
                self.server.driver.enqueue(self)
        elif self.session.state == CLOSING:
            self.finish()
        elif self.parting and (self.unread <= 0 or self.ended):
            if self.session.awaited:
                self.transport.pause_reading()  # what it asks from now on is too late, what it has asked is answered
            else:
                self.finish()
        elif not self.ended and self.slow_timer is None:
            self.transport.resume_reading()
        return 0

    cdef int finish(self) except -1:
        """Nothing is owed any more."""
        if self.ended:
            self.transport.close()
            return 0
        self.lingering = True
        self.transport.write_eof()
        self.transport.resume_reading()
        self.linger_timer = self.server.loop.call_later(LINGER_S, self.abort)
        return 0

    cdef int wake_store(self) except -1:
        if self.store.stirred:
            self.store.stirred = False
            self.server.driver.wake()
        return 0


def peer_process(int fd):
    """Process, user and set of all groups of who connected to a Unix socket, as they were then."""
    cdef ucred peer
    cdef unsigned int size = sizeof(peer)
    cdef bytes groups = b""
    if getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0:
        raise os_error(errno)
    size = 0
    while getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, <char*>PyBytes_AS_STRING(groups), &size) < 0:
        if errno != ERANGE:  # which comes with the size that would do
            raise os_error(errno)
        groups = PyBytes_FromStringAndSize(NULL, size)
    return peer.pid, peer.uid, frozenset((peer.gid, *array.array("I", groups[:size])))
