# What a connection and the roster of a server are made of, for whoever calls them for every read.

from libc.stdint cimport int64_t, uint16_t, uint32_t, uint64_t

from counterd._core cimport Session, Store
from counterd.net.driver cimport Driver

cdef enum:
    TIMES = 21              # bounds of the histogram of batches in time: 1.024 us to 1.07 s, each twice the last
    TIME_BITS = 10
    SIZES = 15              # and in bytes: 16 to 262,144
    SIZE_BITS = 4


cdef class Roster:
    cdef readonly object loop
    cdef readonly Store store
    cdef readonly Driver driver
    cdef readonly dict connections  # those that take part, by the engine's number
    cdef readonly set arriving      # those that were let in, and are still in their handshake
    cdef object _limits
    cdef Py_ssize_t max_connections
    cdef bint guarded               # not everybody may connect, or not as often as they like
    cdef public object watch        # told "opened" or "closed" and the connection; None = nobody wants to know
    cdef public bint parting
    cdef readonly uint64_t slowed   # pauses of connections that sent more than they may
    cdef int64_t request_ns         # of a connection's time that a request takes up; 0 = any number may come
    cdef uint64_t serial            # of the last connection
    cdef uint32_t highest           # number that any has had
    cdef readonly dict addresses    # how many connections each IP address has, in bytes
    cdef uint64_t[TIMES + 1] batch_times
    cdef uint64_t[SIZES + 1] batch_sizes
    cdef uint64_t batch_ns
    cdef uint64_t batch_bytes

    cdef int adopt(self, limits) except -1
    cdef Py_ssize_t count(self)
    cdef bint admit(self, Connection connection) except -1
    cdef bint admits(self, Connection connection) except -1
    cdef Session enter(self, Connection connection)
    cdef int remove(self, Connection connection, error) except -1
    cdef void count_batch(self, Py_ssize_t size, int64_t took_ns) noexcept


cdef class Connection:
    cdef readonly Roster server
    cdef readonly object patience   # name of the server's limit on how long output may be stuck
    cdef readonly int fd
    cdef readonly int64_t since_ns  # when it came, on the monotonic clock
    cdef readonly int64_t entered_ns    # when it began to take part, and had its number
    cdef readonly int64_t active_ns     # when it last sent something
    cdef readonly int64_t number    # the engine's; 0 before it takes part, negative once another has it
    cdef uint64_t serial            # which never repeats
    cdef bytes address              # of its peer, 4 or 16 bytes; None on a Unix socket
    cdef uint16_t port
    cdef bint sealed                # only the transport may write to the socket
    cdef object transport
    cdef object linger_timer
    cdef object slow_timer          # until which it is not read, since it has sent too much; or None
    cdef readonly int64_t paid_ns   # the moment up to which its requests take up its time
    cdef Session session            # None during the handshake
    cdef Store store
    cdef Py_ssize_t discarded       # bytes thrown away while lingering
    cdef Py_ssize_t unread          # bytes that the kernel had received when parting began and that we have yet to
    cdef bint queued
    cdef bint pulling               # it waits for the driver to call pull()
    cdef bint hasty                 # the peer has sent its last byte while it was slowed down: it is so no more
    cdef bint ended                 # the peer has sent its last byte, and all before that was read
    cdef bint parting
    cdef bint lingering

    cpdef connection_made(self, transport)
    cdef bint take_part(self) except -1
    cpdef data_received(self, bytes data)
    cpdef eof_received(self)
    cpdef end_sent(self)
    cpdef pause_writing(self)
    cpdef resume_writing(self)
    cpdef connection_lost(self, exc)
    cdef int read_sealed(self, Py_ssize_t size) except -1
    cdef int charge(self, uint64_t requests, int64_t now_ns) except -1
    cdef int slow_down(self, int64_t now_ns) except -1
    cdef int be_slow_no_more(self) except -1
    cdef bint is_idle(self, int64_t before_ns) noexcept
    cdef int send(self, bytes output) except -1
    cdef int settle(self) except -1
    cdef int finish(self) except -1
    cdef int wake_store(self) except -1
