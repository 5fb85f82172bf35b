# The epoll set of a server, and the sockets in it.

from libc.stdint cimport uint8_t, uint16_t, uint32_t

cdef enum:
    COSTLY = 4                  # costly reads in a batch of all sockets; each takes some 1 ms


cdef class Poller:
    cdef readonly object loop
    cdef object reject          # called with a cause and a sentence for a connection that had to be closed
    cdef list listeners
    cdef list closing           # ended sockets that still have their descriptor
    cdef int epoll
    cdef int spare              # a reserve descriptor, freed when no other is left
    cdef uint8_t* buffer        # for the bytes of a read
    cdef size_t read_size       # most bytes of a read
    cdef int costly             # costly reads in this batch so far
    cdef object waiting         # sockets whose costly read waits for a later batch, in order
    cdef bint calling           # call_up() is scheduled
    cdef bint running
    cdef bint releasing         # release() is scheduled

    cdef bint has_turn(self, Socket entry) except -1
    cdef int watch(self, Socket entry, uint32_t events) except -1
    cdef int unwatch(self, Socket entry) except -1
    cdef int release_later(self, Socket entry) except -1
    cdef int fail(self, Socket entry, error) except -1


cdef class Socket:              # in the epoll set
    cdef Poller poller
    cdef readonly int fd
    cdef uint32_t events        # the events that the epoll set reports; 0 = only errors
    cdef bint watched
    cdef bint called            # it has waited for its costly read, which may be now

    cdef int ready(self, uint32_t events) except -1
    cdef int resume(self) except -1
    cdef int release(self) except -1
    cdef int give_up(self) except -1


cdef class Acceptor:            # an interface
    cpdef accepted(self, int fd, bytes address, uint16_t port)


cdef class Listener(Socket):
    cdef Acceptor acceptor

    cdef int accept(self, int most) except -1
