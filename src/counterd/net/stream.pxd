# One connected socket, and what is told of it.

cimport cython
from libc.stdint cimport uint32_t

from counterd.net.poller cimport Poller, Socket
from counterd.net.tls cimport Tls


cdef class Handler:             # of one stream: an interface
    cpdef established(self)
    cpdef received(self, bytes data)
    cpdef received_nothing(self)
    cpdef input_ended(self)
    cpdef end_sent(self)
    cpdef output_stuck(self)
    cpdef output_moved(self)
    cpdef tls_failed(self, cause, reason)
    cpdef stream_broken(self)
    cpdef stream_closed(self, error)


@cython.final
cdef class Stream(Socket):
    cdef Handler handler        # None once it was told of the end
    cdef readonly Tls tls       # what it encrypts with, or None
    cdef list queue             # of bytes that the kernel did not take
    cdef readonly Py_ssize_t queued     # how many they are
    cdef Py_ssize_t sent        # of the first of them
    cdef readonly Py_ssize_t unread     # bytes that the kernel had at mark_input(), and that were not read yet
    cdef readonly bint reading
    cdef readonly bint heeding  # while it is paused, the handler is told once of the peer's last byte
    cdef readonly bint ending   # output is shut down as soon as the queue is empty: nothing more is sent
    cdef readonly bint closing  # it is closed as soon as the queue is empty
    cdef readonly bint closed
    cdef readonly bint owed     # when it was closed, something was to be sent
    cdef object error           # that closed it, or None

    cpdef int begin(self, Handler handler) except -1
    cpdef int send(self, bytes data) except -1
    cpdef int pause(self) except -1
    cpdef int read_on(self) except -1
    cpdef int heed_end(self, bint heeding) except -1
    cpdef int mark_input(self) except -1
    cdef bint all_passed_on(self) noexcept
    cpdef int end_output(self) except -1
    cpdef close(self)
    cpdef abort(self)
    cpdef int end(self, error) except -1

    cdef int read(self) except -1
    cdef int decrypt(self, size_t size) except -1
    cdef int end_input(self) except -1
    cdef int fail(self, failure) except -1
    cdef int encrypt(self, bytes data) except -1
    cdef int transmit(self, bytes data) except -1
    cdef int enqueue(self, bytes data, ssize_t sent) except -1
    cdef ssize_t push(self, const char* data, size_t size) except? -1
    cdef int drain(self) except -1
    cdef bint keeps(self) noexcept
    cdef int update(self) except -1
