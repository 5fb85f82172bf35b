# A connection, and what all connections of a server share.

cimport cython
from libc.stdint cimport int64_t, uint16_t, uint64_t

from counterd._core cimport Session, Store
from counterd.net.batches cimport Batches
from counterd.net.driver cimport Driver
from counterd.net.stream cimport Handler, Stream

# What a connection is doing: see connection.pyx.
cdef enum State:
    ARRIVING
    OPEN
    PARTING
    ENDED
    LINGERING
    GONE


cdef class Events:              # what happens to connections: functions of the one that keeps the books
    cdef object entered         # (connection): it has a session from now on
    cdef object left            # (connection): it is gone
    cdef object lost            # (connection, error or None): if it went by an error, or was owed output, or all part
    cdef object rejected        # (cause, sentence): a connection that was to come in
    cdef object tls_failed      # (connection, cause, sentence)
    cdef object slowed          # (connection)
    cdef object stuck           # (connection): its peer reads slower than it asks
    cdef object moved           # (connection): it was stuck, and is no more
    cdef object dropped         # (connection): its session gave it up, as its peer does not take what others send it


@cython.final
cdef class Common:              # what the connections of a server share
    cdef readonly object loop
    cdef readonly Store store
    cdef readonly Driver driver
    cdef readonly Batches batches
    cdef Events events
    cdef public bint parting            # the server takes leave of all
    cdef public int64_t request_ns      # of a connection's time that a request takes up; 0 = any number may come
    cdef public object handshake_s      # how long a TLS handshake may take
    cdef readonly int handshakes        # that are under way
    cdef readonly uint64_t slowed       # pauses of connections that sent more than they may


@cython.final
cdef class Connection(Handler):
    cdef Common common
    cdef Store store
    cdef readonly Stream stream
    cdef Session session                # None while it arrives
    cdef State state
    cdef object timer                   # of a handshake, of being slowed down, or of lingering; or None
    cdef readonly object patience       # name of the server's limit on how long output may be stuck
    cdef readonly bytes address         # of its peer, 4 or 16 bytes; None on a Unix socket
    cdef uint16_t port
    cdef int entrance                   # by which it came
    cdef public int64_t number          # the engine's; 0 until it has entered, negative once another has it
    cdef public uint64_t serial         # which never repeats; 0 until it has entered
    cdef readonly int64_t since_ns      # when it came, on the monotonic clock
    cdef readonly int64_t entered_ns    # when its session began, and it had its number
    cdef readonly int64_t active_ns     # when it last sent something
    cdef readonly int64_t paid_ns       # the moment up to which its requests take up its time
    cdef Py_ssize_t discarded           # bytes thrown away while lingering
    cdef bint pulling                   # it waits for the driver to call pull()
    cdef bint hasty                     # the peer has sent its last byte while it was slowed down: it is so no more

    cdef int begin(self) except -1
    cdef bint is_idle(self, int64_t before_ns) noexcept
    cdef int become(self, State state) except -1
    cdef int stop_timer(self) except -1
    cdef int charge(self, uint64_t requests, int64_t now_ns) except -1
    cdef int slow_down(self, int64_t now_ns) except -1
    cdef int read_again(self) except -1
    cdef int settle(self) except -1
    cdef int finish(self) except -1
    cdef int wake_store(self) except -1
