# The epoll set of a server, and what may be in it.

from libc.stdint cimport uint8_t, uint16_t, uint32_t

cdef enum:
    COSTLY = 4                  # costly reads in a batch, of all sockets together: some 1 ms each


cdef class Poller:
    cdef readonly object loop
    cdef object reject          # called with a cause and a sentence for a connection that had to be turned away
    cdef list listeners
    cdef list closing           # sockets that have ended, and still have their descriptor
    cdef int epoll
    cdef int spare              # a descriptor to give up when there is none left
    cdef uint8_t* buffer        # what a read brings
    cdef size_t read_size       # of a read at most
    cdef int costly             # costly reads in this batch
    cdef object waiting         # sockets whose costly reads come in a later batch, in order
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
    cdef uint32_t events        # what the epoll set tells of it; 0 = only errors
    cdef bint watched
    cdef bint called            # it has waited, and it is its turn

    cdef int ready(self, uint32_t events) except -1
    cdef int resume(self) except -1
    cdef int release(self) except -1
    cdef int give_up(self) except -1


cdef class Acceptor:            # of connections: an interface
    cpdef accepted(self, int fd, bytes address, uint16_t port)


cdef class Listener(Socket):
    cdef Acceptor acceptor

    cdef int accept(self, int most) except -1
