# The connection table of a server.

from libc.stdint cimport uint32_t, uint64_t

from counterd.net.connection cimport Common
from counterd.net.poller cimport Acceptor, Poller


cdef class Table:
    cdef object _limits
    cdef Py_ssize_t max_connections
    cdef bint guarded               # not everybody may connect, or not as often as they like
    cdef public object context      # TLS of the connections to come over TCP; None = they are plain
    cdef public object watch        # told "opened" or "closed" and the connection; None = nobody wants to know
    cdef readonly dict connections  # those that have a session, by the engine's number
    cdef readonly set arriving      # those that were let in, and are still in their handshake
    cdef readonly dict addresses    # how many connections each IP address has, in bytes
    cdef uint64_t serial            # of the last connection that entered
    cdef uint32_t highest           # number that any has had

    cdef refused(self, int fd, bytes address)


cdef class Entrance(Acceptor):
    cdef Table table
    cdef Common common
    cdef Poller poller
    cdef bint secure
    cdef object patience
