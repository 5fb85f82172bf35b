# The epoll set of a server, and the sockets in it.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t

from counterd.net.kernel cimport epoll_event

cdef enum:
    FETCH = 64                  # events fetched at a time


cdef bint is_loopback(bytes address)


cdef class Poller:
    cdef readonly object loop
    cdef object reject          # called with a cause and a sentence for a connection that had to be closed
    cdef list listeners
    cdef list closing           # ended sockets that still have their descriptor
    cdef int epoll
    cdef int spare              # a reserve descriptor, freed when no other is left
    cdef uint8_t* buffer        # for the bytes of a read
    cdef size_t read_size       # most bytes of a read
    cdef epoll_event[FETCH] events  # that were fetched
    cdef int next               # of `events`, the first that was not served yet
    cdef int count
    cdef public int64_t batch_ns    # a batch ends after the socket that exceeds this time
    cdef object waiting         # sockets whose costly read waits for its turn, in order
    cdef bint calling           # call_up() is scheduled
    cdef bint running
    cdef bint releasing         # release() is scheduled

    cdef int put_off(self, Socket entry) except -1
    cdef int serve(self, Socket entry, uint32_t events) except -1
    cdef int watch(self, Socket entry, uint32_t events) except -1
    cdef int unwatch(self, Socket entry) except -1
    cdef int release_later(self, Socket entry) except -1
    cdef int fail(self, Socket entry, error) except -1


cdef class Socket:              # in the epoll set
    cdef Poller poller
    cdef readonly int fd
    cdef uint32_t events        # the events that the epoll set reports; 0 = only errors
    cdef bint watched

    cdef int ready(self, uint32_t events) except -1
    cdef int take_turn(self) except -1
    cdef int release(self) except -1
    cdef int give_up(self) except -1


cdef class Acceptor:            # an interface
    cpdef accepted(self, int fd, bytes address, uint16_t port)


cdef class Listener(Socket):
    cdef Acceptor acceptor

    cdef int accept(self, int most) except -1
