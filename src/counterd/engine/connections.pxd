# The numbers of connections: what the region knows a connection by.
#
# Floor 1, header only. A number is given to another connection once it was put back, which is when nothing in the
# region names it any more.

from libc.stdint cimport uint32_t

from counterd.engine.pool cimport Pool, pool_put, pool_take
from counterd.engine.region cimport Region, region_reserve

cdef enum:
    CONNECTIONS_MAX = 1048576   # the default of fs.nr_open, Linux's bound for the files of a process


cdef struct Connections:    # this process's view
    Pool* pool
    uint32_t* links         # by number; of those that are free


cdef inline int connections_reserve(Connections* connections, Region* region) except -1:
    region_reserve(region, b"connections", sizeof(Pool), <void**>&connections.pool)
    region_reserve(
        region, b"connections", (CONNECTIONS_MAX + 1) * sizeof(uint32_t), <void**>&connections.links
    )
    return 0


cdef inline void connections_begin(Connections* connections) noexcept nogil:
    """To be called once, when the region is mapped."""
    connections.pool.capacity = CONNECTIONS_MAX


cdef inline uint32_t connections_take(Connections* connections) noexcept nogil:
    """A number, or 0 if CONNECTIONS_MAX are open or still leaving."""
    return pool_take(connections.pool, connections.links, sizeof(uint32_t))


cdef inline void connections_put(Connections* connections, uint32_t number) noexcept nogil:
    pool_put(connections.pool, connections.links, sizeof(uint32_t), number)
