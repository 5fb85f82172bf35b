# What a stream encrypts with.

cimport cython
from libc.stdint cimport uint8_t, uint16_t


@cython.final
cdef class Tls:
    cdef object ssl             # the machine: bytes come to it by incoming and leave it by outgoing
    cdef object incoming
    cdef object outgoing
    cdef size_t missing         # bytes of a record that has begun to arrive
    cdef uint16_t length        # the last two bytes of its header
    cdef int heading            # how much of a header has arrived
    cdef bint heard             # the peer has sent something
    cdef bint shaking           # the handshake is under way
    cdef bint ended             # the peer has said close_notify
    cdef bint kept              # there is more data in what has arrived than was taken
    cdef bint broken            # the peer sent what is no TLS, or this side has said close_notify

    cdef size_t wanted(self) noexcept
    cdef bytes decrypt(self, const uint8_t* data, size_t size, size_t most)
    cdef bytes encrypt(self, bytes data)
    cdef bytes take_output(self)
    cdef bytes say_goodbye(self)

    cdef void follow(self, const uint8_t* data, size_t size) noexcept
    cdef bytes read_all(self, size_t most)
    cdef int fail(self, error) except -1
