# The sockets of a server, and what is known of each.

from libc.stdint cimport uint8_t, uint32_t

from counterd.net._connection cimport Connection
from counterd.net.kernel cimport sockaddr_in6


cdef enum:
    HANDSHAKES = 4              # steps of handshakes in a batch, of all connections: some 1 ms each


cdef class Poller:
    cdef object loop
    cdef public object wrap     # gives a transport that is more than plain, or None
    cdef object reject          # called with a cause and a sentence for a connection that had to be turned away
    cdef list listeners
    cdef list dying             # transports that have closed, and whose connections have yet to hear of it
    cdef int epoll
    cdef int spare              # a descriptor to give up when there is none left
    cdef uint8_t* buffer        # what a read brings
    cdef size_t read_size       # of a read at most
    cdef int handshakes         # steps of them in this batch
    cdef object waiting         # transports whose handshakes go on in a later batch, in order
    cdef bint calling           # call_up() is scheduled
    cdef bint running
    cdef bint burying           # bury() is scheduled

    cdef int accepted(self, int fd, Listener listener, sockaddr_in6* peer) except -1
    cdef int put_off(self, Transport transport) except -1
    cdef int forget(self, Transport transport) except -1
    cdef int watch(self, Socket entry, int fd, uint32_t events) except -1
    cdef int fail(self, entry, error) except -1


cdef class Socket:              # in the epoll set
    cdef Poller poller
    cdef readonly int fd
    cdef uint32_t events        # what the epoll set tells of it; 0 = it is not in there, or only errors are told
    cdef bint watched

    cdef int ready(self, uint32_t events) except -1


cdef class Listener(Socket):
    cdef object make            # a connection
    cdef bint wraps             # its transport is what the poller's wrap gives

    cdef int accept(self, int most) except -1


cdef class Transport(Socket):
    cdef Connection protocol
    cdef list queue             # of bytes that the kernel did not take
    cdef Py_ssize_t queued      # how many they are
    cdef Py_ssize_t sent        # of the first of them
    cdef bint seals             # what is written to the socket is not what the connection writes
    cdef bint reading
    cdef bint heeding           # while it is not read, the connection is told once that the peer has sent its last byte
    cdef bint called            # it has waited, and it is its turn
    cdef bint closing           # as soon as the queue is empty
    cdef bint closed
    cdef object error           # that closed it, or None

    cdef int begin(self) except -1
    cdef int read(self) except -1
    cdef bint send_queue(self) except -1
    cdef int drain(self) except -1
    cdef int enqueue(self, bytes data) except -1
    cdef int update(self) except -1
    cdef int end(self, error) except -1
