# One connected socket, and the interface of its handler.

cimport cython
from libc.stdint cimport uint32_t

from counterd.net.poller cimport Poller, Socket
from counterd.net.tls cimport Tls


cdef class Handler:             # an interface
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
    cdef Handler handler        # None after stream_closed()
    cdef readonly Tls tls       # encrypts and decrypts; or None
    cdef list queue             # output that the kernel did not accept
    cdef readonly Py_ssize_t queued     # bytes in the queue that were not sent
    cdef Py_ssize_t sent        # bytes of the queue's first item that were sent
    cdef readonly Py_ssize_t unread     # bytes that the kernel had at mark_input() and that were not read yet
    cdef readonly bint reading
    cdef readonly bint heeding  # while paused, end_sent() is called once when the peer's last byte has arrived
    cdef readonly bint ending   # nothing more is sent; output is shut down when the queue is empty
    cdef readonly bint closing  # the stream is closed when the queue is empty
    cdef readonly bint closed
    cdef readonly bint owed     # output was lost when the stream was closed
    cdef object error           # that closed the stream, or None

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
