# The numbers of connections, by which the region refers to them.
#
# Floor 1, header only. A number is reused after it was put back, which happens when nothing in the region refers to it.

from libc.stdint cimport uint32_t

from counterd.engine.pool cimport Pool, pool_put, pool_take
from counterd.engine.region cimport Region, region_reserve

cdef enum:
    CONNECTIONS_MAX = 1048576   # the default of fs.nr_open, Linux's limit for the open files of a process


cdef struct Connections:    # this process's view
    Pool* pool
    uint32_t* links         # by number; link the free ones


cdef inline int connections_reserve(Connections* connections, Region* region) except -1:
    region_reserve(region, b"connections", sizeof(Pool), <void**>&connections.pool)
    region_reserve(
        region, b"connections", (CONNECTIONS_MAX + 1) * sizeof(uint32_t), <void**>&connections.links
    )
    return 0


cdef inline void connections_begin(Connections* connections) noexcept nogil:
    """Call this once, after the region was mapped."""
    connections.pool.capacity = CONNECTIONS_MAX


cdef inline uint32_t connections_take(Connections* connections) noexcept nogil:
    """Returns a number, or 0 if CONNECTIONS_MAX connections are open or have holdings left to give back."""
    return pool_take(connections.pool, connections.links, sizeof(uint32_t))


cdef inline void connections_put(Connections* connections, uint32_t number) noexcept nogil:
    pool_put(connections.pool, connections.links, sizeof(uint32_t), number)


cdef inline int connection_check(uint32_t connection) except -1:
    """Raises ValueError for a number that no connection can have."""
    if connection > CONNECTIONS_MAX:
        raise ValueError(f"connection must be the number of a connection, at most {CONNECTIONS_MAX}, not {connection}")
    return 0
