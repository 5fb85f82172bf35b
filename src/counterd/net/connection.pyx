"""One connection: passes bytes from its stream to its session, and writes the replies, once for each read.

Floor 3 (ARCHITECTURE.md). A connection knows its stream and the contract of a session, but no protocol. A connection
notifies the server through the callbacks in Events. The class Common has the objects that all connections of a server
share.

A connection has these states, in this order. A connection can skip states, but never goes back:
- arriving: the connection was admitted and counts; its TLS handshake is in progress, so it has no session yet
- open: input goes to the session
- parting: the daemon is stopping; input that the kernel has already received is still read and answered
- ended: the peer has sent its last byte; earlier requests are still answered, then the connection is closed
- lingering: all replies were sent. Writing is shut down, and input is discarded for at most LINGER_S and LINGER_BYTES:
  so the peer can read the last reply, which a reset would discard
- gone: the stream is closed, and the session was notified

Reading is paused only in four cases: output is queued, the session has more output, a request is parked, or the
connection exceeds the request rate (slow_down(): state open, with a timer).
"""

import array

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport ERANGE, errno
from libc.stdint cimport int64_t, uint16_t, uint64_t

from counterd._core cimport CLOSING, PARKED, READING, Session, Store, is_owed, is_streaming
from counterd.net.clock cimport monotonic_ns
from counterd.net.driver cimport Driver
from counterd.net.kernel cimport SO_PEERCRED, SO_PEERGROUPS, SOL_SOCKET, getsockopt, os_error, ucred
from counterd.net.poller cimport is_loopback
from counterd.net.stream cimport Handler, Stream

from counterd.net.access import address_text

cdef int64_t SECOND = 1000000000
cdef int64_t SLOW_CHECK_NS = SECOND     # how often a connection that is slowed down checks for a new limit

cdef enum:
    LINGER_S = 1            # enough for a reply to cross any network and be read
    LINGER_BYTES = 1048576  # an honest peer does not have more in flight


cdef class Events:
    """The callbacks for events of connections. connection.pxd lists their arguments."""

    def __cinit__(self, *, entered, renumbered, left, lost, rejected, tls_failed, slowed, stuck, moved, dropped):
        self.entered = entered
        self.renumbered = renumbered
        self.left = left
        self.lost = lost
        self.rejected = rejected
        self.tls_failed = tls_failed
        self.slowed = slowed
        self.stuck = stuck
        self.moved = moved
        self.dropped = dropped


@cython.final
cdef class Common:
    """The objects that all connections of a server share."""

    def __cinit__(self, loop, Store store not None, Driver driver not None, Events events not None):
        self.loop = loop
        self.store = store
        self.driver = driver
        self.events = events
        self.batches = Batches()


@cython.final
cdef class Connection(Handler):
    """A connection that was admitted.

    patience: the name of the limit on how long its output may be stuck.
    address, port: the peer's; None and 0 on a Unix socket.
    protocol_port: the number of the protocol's port that the peer connected to.
    """

    def __cinit__(
        self, Common common not None, Stream stream not None, patience, bytes address, uint16_t port, int protocol_port
    ):
        self.common = common
        self.store = common.store
        self.stream = stream
        self.patience = patience
        self.address = address
        self.port = port
        self.protocol_port = protocol_port

    cdef int begin(self) except -1:
        """Starts to serve the stream."""
        self.since_ns = self.active_ns = monotonic_ns()
        self.stream.begin(self)
        if self.stream.tls is None:
            self.established()
        else:
            self.common.handshakes += 1
            self.timer = self.common.loop.call_later(self.common.handshake_s, self.give_up)
        return 0

    # ---- called by the stream ----

    cpdef established(self):
        """Starts the session of the connection."""
        cdef Session session
        cdef int64_t now_ns = monotonic_ns()
        try:
            session = self.store.session(now_ns, self.protocol_port)
        except MemoryError as error:
            self.common.events.rejected("memory", str(error))
            self.common.driver.wake()  # its number in the region may have to be given back
            self.abort()
            return
        self.entered_ns = self.active_ns = now_ns
        self.number = session.connection
        session.owner = self
        self.session = session
        self.become(OPEN)
        self.common.events.entered(self)
        if self.common.parting:
            self.part()
        elif session.state != READING:  # it speaks first
            self.follow_session()

    cpdef received(self, bytes data):
        cdef Session session = self.session
        cdef uint64_t before
        cdef int64_t now_ns
        if self.state == LINGERING:
            self.discarded += PyBytes_GET_SIZE(data)
            if self.discarded > LINGER_BYTES:
                self.abort()
            return
        before = session.requests
        now_ns = monotonic_ns()
        self.active_ns = now_ns
        self.stream.send(session.receive(data, now_ns))
        self.common.batches.count(PyBytes_GET_SIZE(data), monotonic_ns() - now_ns)
        if self.common.request_ns:
            self.charge(session.requests - before, now_ns)
        if session.state != READING or self.store.has_work or self.state == PARTING:
            self.follow_session()

    cpdef received_nothing(self):
        if self.state == PARTING:
            self.follow_session()

    cpdef input_ended(self):
        if self.state == LINGERING:
            self.stream.close()
            return
        self.become(ENDED)
        self.stream.send(self.session.eof(monotonic_ns()))
        self.follow_session()

    cpdef end_sent(self):
        """Called when the peer's last byte has arrived, but earlier input was not read yet because of a pause.

        The peer may be gone, or it may have half-closed the connection and wait for replies; the two cases look the
        same. The peer can send nothing more, so the rest of the input is read immediately, without a request rate.
        Otherwise the peer's holdings would be given back only after the pause.
        """
        self.hasty = True
        self.session.hang_up(monotonic_ns())
        self.read_again()

    cpdef output_stuck(self):
        self.stream.pause()
        self.common.events.stuck(self)

    cpdef output_moved(self):
        self.active_ns = monotonic_ns()  # the peer may have waited for its replies
        self.common.events.moved(self)
        self.follow_session()

    cpdef tls_failed(self, cause, reason):
        self.common.events.tls_failed(self, cause, reason)

    cpdef stream_broken(self):
        self.finish()

    cpdef stream_closed(self, error):
        self.become(GONE)
        if self.session is not None:
            self.session.closed(monotonic_ns())
            self.session.owner = None
        self.common.events.left(self)
        if error is not None or self.stream.owed or self.common.parting:
            self.common.events.lost(self, error)
        self.wake_store()

    # ---- called by the server and the driver ----

    def pull(self):
        """Sends the session's next output, if the previous output was sent."""
        cdef bytes output
        cdef uint64_t before
        cdef int64_t now_ns
        self.pulling = False
        if self.stream.closed:
            return
        if self.stream.queued:
            self.session.wait()
        if self.session.dropped:
            self.common.events.dropped(self)
            self.abort()
            return
        if self.stream.queued:
            return
        try:
            before = self.session.requests
            now_ns = monotonic_ns()
            output = self.session.take_output(now_ns)
            if self.common.request_ns:
                self.charge(self.session.requests - before, now_ns)
            if self.state != LINGERING:  # messages posted after the end are discarded, so that nothing waits for them
                self.stream.send(output)
                self.follow_session()
        except Exception as error:  # not called by a stream, so the connection has to be closed here
            self.common.loop.call_exception_handler({"message": (
                "the session's output could not be fetched"
            ), "exception": error})
            self.abort()

    def part(self):
        """Ends the connection when the requests so far are answered.

        If the connection has no session, ends it immediately.
        """
        if self.session is None:
            self.abort()
        elif self.state == OPEN and not self.stream.closed:
            self.stream.mark_input()
            self.become(PARTING)
            self.session.hang_up(monotonic_ns())
            self.follow_session()

    def abort(self):
        """Ends the connection immediately."""
        self.stream.abort()

    def evict(self):
        """Ends the connection immediately. The connection's holdings get no grace time."""
        self.store.evict(self.session_number(), monotonic_ns())
        self.abort()

    def session_number(self):
        """Returns the engine's number of the connection, or 0 if the session has ended."""
        return self.session.connection if self.session is not None else 0

    def close(self):
        """Ends the connection when its queued output was sent."""
        self.stream.close()

    # ---- properties ----

    @property
    def id(self):
        """The ID NUMBER-SERIAL: the engine's number, and a serial number that is unique within the server."""
        return f"{self.number}-{self.serial}"

    @property
    def fd(self):
        """The descriptor; -1 after it was closed."""
        return self.stream.fd

    @property
    def requests(self):
        """How many requests were executed so far."""
        return self.session.requests if self.session is not None else 0

    @property
    def queued(self):
        """How many bytes of output the kernel has not accepted yet."""
        return self.stream.queued

    @property
    def owed(self):
        """Whether output was still queued when the connection was closed."""
        return self.stream.owed

    def peer(self):
        """Returns the peer's IP address as text and its port. Returns ("", 0) on a Unix socket."""
        return ("", 0) if self.address is None else (address_text(self.address), self.port)

    def origin(self):
        """Returns the peer as text: 127.0.0.1:5432, [::1]:5432 or unix uid=0 pid=12.

        After a Unix socket was closed, returns "unix".
        """
        if self.address is None:
            if self.stream.fd < 0:
                return "unix"
            pid, uid, _ = peer_process(self.stream.fd)
            return f"unix uid={uid} pid={pid}"
        address, port = self.peer()
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"

    def whom(self):
        """Implements contract.Peer.whom. A host with IPv6 mostly has a whole /64 of addresses."""
        if self.address is None:
            _, uid, _ = peer_process(self.stream.fd)
            return b"user %d" % uid, True
        is_local = is_loopback(self.address)
        return (self.address if len(self.address) == 4 or is_local else self.address[:8]), is_local

    def tls(self):
        """Returns the TLS version, the cipher, and the subject of the peer's certificate or "".

        Returns None without TLS.
        """
        return self.stream.tls.describe() if self.stream.tls is not None else None

    cdef bint is_idle(self, int64_t before_ns) noexcept:
        """Returns whether the peer has sent nothing since before_ns, was not kept from sending, and expects no output.
        """
        if (
            self.active_ns >= before_ns or self.state != OPEN or self.timer is not None or self.stream.queued
            or self.pulling or is_owed(self.session) or self.session.state == PARKED
        ):
            return False
        self.stream.mark_input()  # the peer may have sent something while this process was stopped or busy
        return self.stream.all_passed_on()

    # ---- inside ----

    cdef int become(self, State state) except -1:
        """Changes the state of the connection, and stops the timer of the previous state."""
        if self.state == ARRIVING and self.timer is not None:
            self.common.handshakes -= 1
        self.stop_timer()
        self.state = state
        return 0

    cdef int stop_timer(self) except -1:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
            self.stream.heed_end(False)
        return 0

    def give_up(self):
        """Called when the TLS handshake has taken too long."""
        self.common.events.tls_failed(self, "timeout", "the handshake took too long")
        self.abort()

    cdef int charge(self, uint64_t requests, int64_t now_ns) except -1:
        """Charges the connection for the time that its requests are worth at the request rate. Unused time is saved, up
        to a second. After overdrawn time, the connection must wait that long before its next read.

        So a client that sends steadily at the rate is never paused, and all requests of a read are answered.
        """
        if requests == 0 or self.state != OPEN or self.hasty or self.session.state == CLOSING:
            return 0
        self.paid_ns = max(self.paid_ns, now_ns - SECOND) + <int64_t>requests * self.common.request_ns
        if self.paid_ns > now_ns and self.timer is None:
            self.slow_down(now_ns)
            self.stream.pause()
            self.stream.heed_end(True)
            self.common.slowed += 1
            self.common.events.slowed(self)
        return 0

    cdef int slow_down(self, int64_t now_ns) except -1:
        cdef int64_t left_ns = min(self.paid_ns - now_ns, SLOW_CHECK_NS)
        self.timer = self.common.loop.call_later(left_ns / 1e9, self.look_again, self.common.request_ns)
        return 0

    def look_again(self, int64_t request_ns):
        """Resumes reading when the overdrawn time has passed.

        request_ns: the time per request when the timer was set. If the request rate has changed since then, the debt is
        cancelled.
        """
        cdef int64_t now_ns = monotonic_ns()
        if self.common.request_ns != request_ns:
            self.paid_ns = 0
        if self.paid_ns > now_ns:
            self.slow_down(now_ns)
            return
        self.active_ns = now_ns
        self.read_again()

    cdef int read_again(self) except -1:
        self.stop_timer()
        return self.follow_session()

    cdef int follow_session(self) except -1:
        """Decides what the connection does next.

        Called after everything that may have changed the state of the session.
        """
        self.wake_store()
        if self.session is None or self.state >= LINGERING:
            return 0
        if self.session.connection and self.session.connection != self.number:
            self.common.events.renumbered(self)
        if self.stream.queued or self.stream.closing or self.stream.closed:
            return 0
        if is_streaming(self.session):
            self.stream.pause()
            if not self.pulling:
                self.pulling = True
                self.common.driver.enqueue(self)
        elif self.session.state == CLOSING:
            self.finish()
        elif self.session.state == PARKED:
            self.stream.pause()
            self.stream.heed_end(self.state == OPEN and not self.hasty)
        elif self.state == PARTING and self.stream.all_passed_on():
            if is_owed(self.session):
                self.stream.pause()  # requests from now on are too late; earlier ones are answered
            else:
                self.finish()
        elif self.state != ENDED and self.timer is None:
            self.stream.heed_end(False)
            self.stream.read_on()
        return 0

    cdef int finish(self) except -1:
        """Called when all replies were sent. Closes the connection, or lingers if the peer may still send."""
        if self.state == ENDED:
            self.stream.close()
            return 0
        self.become(LINGERING)
        self.stream.end_output()
        self.stream.read_on()
        self.timer = self.common.loop.call_later(LINGER_S, self.abort)
        return 0

    cdef int wake_store(self) except -1:
        if self.store.has_work:
            self.store.has_work = False
            self.common.driver.wake()
        return 0


def peer_process(int fd):
    """Returns the pid, the user and all groups of the process that connected to a Unix socket, at the time when it
    connected."""
    cdef ucred peer
    cdef unsigned int size = sizeof(peer)
    cdef bytes groups = b""
    if getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0:
        raise os_error(errno)
    size = 0
    while getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, <char*>PyBytes_AS_STRING(groups), &size) < 0:
        if errno != ERANGE:  # ERANGE comes with the size that is needed
            raise os_error(errno)
        groups = PyBytes_FromStringAndSize(NULL, size)
    return peer.pid, peer.uid, frozenset((peer.gid, *array.array("I", groups[:size])))
