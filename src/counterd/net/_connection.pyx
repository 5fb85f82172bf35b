"""One connection: bytes from a transport into the session, one write per read out of it.

Floor 3, an asyncio protocol: its transport is the poller's, or any other whose socket may be written to while nothing
is queued. It knows sockets and the contract of a session, and no protocol.

States of a connection:
- open       what arrives goes to the session; reading is paused only while output is queued or the session has more
- queued     the kernel took less than everything: the transport holds the rest and tells us when it is out
- parting    the daemon is stopping: what the kernel has received by now is still read and answered
- lingering  nothing is owed any more; writing is shut down and input is discarded, so that the peer can read the last
             answer before a reset could throw it away; for LINGER_S or LINGER_BYTES at most
- lost       the transport is gone and the session told so
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, errno

from counterd._core cimport Session, Store
from counterd.net.clock cimport monotonic_ns
from counterd.net.driver cimport Driver
from counterd.net.kernel cimport MSG_DONTWAIT, MSG_NOSIGNAL, c_send

from counterd.net.sockets import peer_address

cdef extern from "<sys/ioctl.h>" nogil:
    int ioctl(int fd, unsigned long request, void* argument)
    unsigned long FIONREAD

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
        self.connections = set()
        self.limits = limits

    cdef Session admit(self, Connection connection):
        """A session for a connection that may stay, or None; the caller closes it then."""
        cdef Session session
        if len(self.connections) >= self.limits.max_connections:
            self.reject("max_connections", f"{len(self.connections)} connections are open, the limit")
            return None
        try:
            session = self.store.session(monotonic_ns())
        except MemoryError as error:
            self.reject("memory", str(error))
            self.driver.wake()  # what it has already had may have to be given back
            return None
        self.connections.add(connection)
        return session

    cdef int remove(self, Connection connection, error) except -1:
        self.connections.discard(connection)
        if self.parting or connection.queued or error is not None:
            self.lost(connection, error, connection.queued)
        return 0


cdef class Connection:
    """A connection of a Server, which admits it and keeps the books."""

    def __cinit__(self, Roster server not None, patience):
        self.server = server
        self.patience = patience
        self.fd = -1

    # ---- called by the transport ----

    cpdef connection_made(self, transport):
        cdef Session session = self.server.admit(self)
        if session is None:
            transport.abort()
            return
        session.owner = self
        self.session = session
        self.store = session.store
        self.fd = transport.get_extra_info("socket").fileno()
        self.transport = transport
        if self.server.parting:
            self.part()

    cpdef data_received(self, bytes data):
        cdef Session session = self.session
        cdef bytes output
        if self.lingering:
            self.discarded += PyBytes_GET_SIZE(data)
            if self.discarded > LINGER_BYTES:
                self.abort()
            return
        output = session.receive(data, monotonic_ns())
        if PyBytes_GET_SIZE(output):
            self.send(output)
        self.unread -= PyBytes_GET_SIZE(data)
        if session.more or session.closing or self.store.stirred or self.parting:
            self.settle()

    cpdef eof_received(self):
        self.ended = True
        if self.lingering:
            self.transport.close()
        else:
            self.send(self.session.eof(monotonic_ns()))
            self.settle()
        return True  # this side closes when it has said everything

    cpdef pause_writing(self):
        """The transport could not send everything."""
        self.queued = True
        self.transport.pause_reading()
        self.server.output_stuck(self)

    cpdef resume_writing(self):
        """Everything that was queued has gone out."""
        self.queued = False
        self.server.output_moved(self)
        self.settle()

    cpdef connection_lost(self, exc):
        if self.transport is None:
            return  # it was refused
        if self.linger_timer is not None:
            self.linger_timer.cancel()
        self.transport = self.linger_timer = None
        self.fd = -1
        self.session.closed(monotonic_ns())
        self.session.owner = None
        self.server.remove(self, exc)
        self.wake_store()

    # ---- called by the server and the driver ----

    def pull(self):
        """Fetches the session's next output, if the last has gone out."""
        cdef bytes output
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
            output = self.session.take_output(monotonic_ns())
            if not self.lingering:  # what others say after its end is thrown away: nobody is to wait for it
                self.send(output)
                self.settle()
        except Exception as error:  # where no transport is the caller, closing the connection is up to us
            self.server.loop.call_exception_handler({"message": "fetching output failed", "exception": error})
            self.abort()

    def part(self):
        """Ends the connection once what it has asked so far is answered."""
        cdef int unread = 0
        if self.transport is not None and not self.parting:
            ioctl(self.fd, FIONREAD, &unread)
            self.unread = unread
            self.parting = True
            self.settle()

    def abort(self):
        """Ends the connection now."""
        if self.transport is not None:
            self.transport.abort()

    def peer(self):
        """Where it comes from: an IP address as text and a port, or ("", 0) on a Unix socket."""
        return peer_address(self.fd)

    def queue_size(self):
        """Bytes that the transport still holds."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    # ---- inside ----

    cdef int send(self, bytes output) except -1:
        """One send(2) straight to the socket; what the kernel does not take goes to the transport."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(output)
        cdef Py_ssize_t sent = 0
        if size == 0:
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
        if self.transport is None or self.queued or self.lingering or self.transport.is_closing():
            return 0
        if self.session.more:
            self.transport.pause_reading()
            if not self.pulling:
                self.pulling = True
                self.server.driver.enqueue(self)
        elif self.session.closing or (self.parting and (self.unread <= 0 or self.ended)):
            self.finish()
        elif not self.ended:
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
