# A transport that encrypts.

from libc.stdint cimport uint16_t

from counterd.net._poller cimport Transport


cdef class TlsTransport(Transport):
    cdef object server
    cdef object ssl             # the machine: bytes come to it by incoming and leave it by outgoing
    cdef object incoming
    cdef object outgoing
    cdef object timer           # of the handshake, or None
    cdef size_t missing         # bytes of a record that has begun to arrive
    cdef uint16_t length        # the last two bytes of its header
    cdef int heading            # how much of a header has arrived
    cdef bint heard             # the peer has sent something
    cdef bint shaking           # the handshake is under way
    cdef bint goodbye           # the peer has said close_notify
    cdef bint silent            # this side has said its last word: nothing is encrypted any more, nor decrypted
    cdef bint shutting          # writing is to be shut down once the queue is empty

    cdef void follow(self, size_t size) noexcept
    cdef int advance(self, Py_ssize_t size) except -1
    cdef bint shake(self) except -1
    cdef int shaken(self) except -1
    cdef bytes decrypt(self)
    cdef int fail(self, error) except -1
    cdef int transmit(self, bytes sealed) except -1
    cdef int flush(self) except -1
    cdef int say_goodbye(self) except -1
    cdef int told_goodbye(self) except -1
