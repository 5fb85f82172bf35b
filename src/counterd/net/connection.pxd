# A connection, and the objects that all connections of a server share.

cimport cython
from libc.stdint cimport int64_t, uint16_t, uint64_t

from counterd._core cimport Session, Store
from counterd.net.batches cimport Batches
from counterd.net.driver cimport Driver
from counterd.net.stream cimport Handler, Stream

# The states of a connection: see connection.pyx.
cdef enum State:
    ARRIVING
    OPEN
    PARTING
    ENDED
    LINGERING
    GONE


cdef class Events:              # callbacks of the server
    cdef object entered         # (connection): it has a session now
    cdef object renumbered      # (connection): its session has another number than before
    cdef object left            # (connection): it is gone
    cdef object lost            # (connection, error or None): gone by an error, with unsent output, or after part()
    cdef object rejected        # (cause, sentence): a new connection was refused
    cdef object tls_failed      # (connection, cause, sentence)
    cdef object slowed          # (connection)
    cdef object stuck           # (connection): its peer reads output more slowly than it sends requests
    cdef object moved           # (connection): it is no longer stuck
    cdef object dropped         # (connection): the session dropped it, because its peer does not read posted messages


@cython.final
cdef class Common:              # shared by the connections of a server
    cdef readonly object loop
    cdef readonly Store store
    cdef readonly Driver driver
    cdef readonly Batches batches
    cdef Events events
    cdef public bint parting            # the server ends all its connections
    cdef public int64_t request_ns      # time that a request costs its connection; 0 = the request rate is not limited
    cdef public object handshake_s      # seconds that a TLS handshake may take
    cdef readonly int handshakes        # TLS handshakes under way
    cdef readonly uint64_t slowed       # how often a connection was paused because it exceeded the request rate


@cython.final
cdef class Connection(Handler):
    cdef Common common
    cdef Store store
    cdef readonly Stream stream
    cdef Session session                # None while the state is ARRIVING
    cdef State state
    cdef object timer                   # of the handshake, of a pause by slow_down(), or of lingering; or None
    cdef readonly object patience       # name of the server's limit on how long output may be stuck
    cdef readonly bytes address         # of the peer, 4 or 16 bytes; None on a Unix socket
    cdef uint16_t port
    cdef int protocol_port              # number of the protocol's port that it came by
    cdef public int64_t number          # the engine's; 0 without a session, negative once another connection has it
    cdef public uint64_t serial         # unique within the server; 0 until it has a session
    cdef readonly int64_t since_ns      # when it was accepted, on the monotonic clock
    cdef readonly int64_t entered_ns    # when its session began
    cdef readonly int64_t active_ns     # when it last sent something
    cdef readonly int64_t paid_ns       # its requests so far have used up its time until this moment
    cdef Py_ssize_t discarded           # bytes discarded while lingering
    cdef bint pulling                   # it waits for the driver to call pull()
    cdef bint hasty                     # the peer's last byte has arrived during a pause: it is no longer slowed down

    cdef int begin(self) except -1
    cdef bint is_idle(self, int64_t before_ns) noexcept
    cdef int become(self, State state) except -1
    cdef int stop_timer(self) except -1
    cdef int charge(self, uint64_t requests, int64_t now_ns) except -1
    cdef int slow_down(self, int64_t now_ns) except -1
    cdef int read_again(self) except -1
    cdef int follow_session(self) except -1
    cdef int finish(self) except -1
    cdef int wake_store(self) except -1
