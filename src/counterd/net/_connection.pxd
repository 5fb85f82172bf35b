# What a connection and the roster of a server are made of, for whoever calls them for every read.

from counterd._core cimport Session, Store
from counterd.net.driver cimport Driver


cdef class Roster:
    cdef readonly object loop
    cdef readonly Store store
    cdef readonly Driver driver
    cdef readonly set connections
    cdef public object limits
    cdef public bint parting

    cdef Session admit(self, Connection connection)
    cdef int remove(self, Connection connection, error) except -1


cdef class Connection:
    cdef readonly Roster server
    cdef readonly object patience   # name of the server's limit on how long output may be stuck
    cdef readonly int fd
    cdef object transport
    cdef object linger_timer
    cdef Session session
    cdef Store store
    cdef Py_ssize_t discarded       # bytes thrown away while lingering
    cdef Py_ssize_t unread          # bytes that the kernel had received when parting began and that we have yet to
    cdef bint queued
    cdef bint pulling               # it waits for the driver to call pull()
    cdef bint ended                 # the peer has sent its last byte
    cdef bint parting
    cdef bint lingering

    cpdef connection_made(self, transport)
    cpdef data_received(self, bytes data)
    cpdef eof_received(self)
    cpdef pause_writing(self)
    cpdef resume_writing(self)
    cpdef connection_lost(self, exc)
    cdef int send(self, bytes output) except -1
    cdef int settle(self) except -1
    cdef int finish(self) except -1
    cdef int wake_store(self) except -1
