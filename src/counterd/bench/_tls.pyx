"""TLS for one connection of the load. The caller owns the socket.

Floor 5 (ARCHITECTURE.md). Every error raises OSError.
"""

import ssl

cimport libc.errno
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.errno cimport EAGAIN, EINTR, errno
from libc.string cimport memcpy

from counterd.net.kernel cimport MSG_DONTWAIT, c_recv, os_error

cdef enum:
    RECORD = 16384              # bytes: what one has at most
    SEALED = 131072             # what is received at once; a record that was begun before may come to it

cdef uint8_t[SEALED] sealed     # of whoever receives: there is one thread

cdef object WANTS_MORE = ssl.SSLWantReadError
cdef object ENDS = (ssl.SSLEOFError, ssl.SSLZeroReturnError)


cdef class Layer:
    """context: an ssl.SSLContext. host: the host whose certificate the server must have."""

    def __cinit__(self, context, str host not None):
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=host)

    cdef bytes shake_hands(self, int fd):
        """Continues the handshake with the bytes that have arrived, if there are any. Returns the bytes to send."""
        cdef ssize_t size = c_recv(fd, sealed, SEALED, MSG_DONTWAIT)
        if size > 0:
            self.incoming.write(sealed[:size])
        elif size == 0:
            raise OSError("the server closed the connection in the handshake")
        elif errno != EAGAIN and errno != EINTR:
            raise os_error(errno)
        try:
            self.tls.do_handshake()
            self.agreed = True
        except WANTS_MORE:
            pass
        return self.outgoing.read()

    cdef bytes seal(self, const uint8_t* data, size_t size):
        """Encrypts bytes, and returns the bytes to send."""
        self.tls.write(data[:size])
        return self.outgoing.read()

    cdef ssize_t receive(self, int fd, uint8_t* room) except? -1:
        """Reads as recv(2) does: returns how many bytes were read, 0 at the end, or -1 and errno.

        The buffer must have room for 2 SEALED.
        """
        cdef ssize_t got = 0
        cdef bytes piece
        cdef ssize_t size = c_recv(fd, sealed, SEALED, MSG_DONTWAIT)
        if size < 0:
            return -1
        if size:
            self.incoming.write(sealed[:size])
        else:
            self.incoming.write_eof()
        try:
            while not self.ended and (self.incoming.pending or self.incoming.eof):  # an exception costs more than both
                piece = self.tls.read(RECORD)
                memcpy(room + got, PyBytes_AS_STRING(piece), PyBytes_GET_SIZE(piece))
                got += PyBytes_GET_SIZE(piece)
                self.ended = not piece
        except WANTS_MORE:
            pass
        except ENDS:
            self.ended = True
        if got == 0 and not self.ended:
            libc.errno.errno = EAGAIN
            return -1
        return got
