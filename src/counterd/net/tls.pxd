# The TLS filter of a stream.

cimport cython
from libc.stdint cimport uint8_t, uint16_t


@cython.final
cdef class Tls:
    cdef object ssl             # OpenSSL: reads from `incoming` and writes to `outgoing`
    cdef object incoming
    cdef object outgoing
    cdef size_t missing         # bytes that the current record still lacks
    cdef uint16_t length        # the last two bytes of the record's header
    cdef int heading            # bytes of a header that have arrived
    cdef bint heard             # the peer has sent something
    cdef bint shaking           # the handshake is under way
    cdef bint ended             # the peer has sent close_notify
    cdef bint kept              # more data has arrived than was taken
    cdef bint broken            # the peer sent invalid TLS, or this side has sent close_notify

    cdef size_t wanted(self) noexcept
    cdef bytes decrypt(self, const uint8_t* data, size_t size, size_t most)
    cdef bytes encrypt(self, bytes data)
    cdef bytes take_output(self)
    cdef bytes say_goodbye(self)

    cdef void follow(self, const uint8_t* data, size_t size) noexcept
    cdef bytes read_all(self, size_t most)
    cdef int fail(self, error) except -1
