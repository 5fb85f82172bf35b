# TLS of one connection of the load.
#
# Floor 5.

from libc.stdint cimport uint8_t

cdef class Layer:
    cdef object tls
    cdef object incoming
    cdef object outgoing
    cdef bint agreed            # the handshake is over
    cdef bint ended             # the server has said its last

    cdef bytes shake_hands(self, int fd)
    cdef bytes seal(self, const uint8_t* data, size_t size)
    cdef ssize_t receive(self, int fd, uint8_t* room) except? -1
