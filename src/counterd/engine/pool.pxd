# Pools of numbered cells, handed out in order and reused from a free list.
#
# Floor 1, header only. Cells are numbered from 1; 0 means none, so zeroed memory is an empty pool without capacity. A
# cell never moves while it is in use.

from libc.stdint cimport uint8_t, uint32_t


cdef struct Pool:           # in the region
    uint32_t capacity
    uint32_t fresh          # cells ever handed out; the memory of higher ones was never touched
    uint32_t free           # first free cell
    uint32_t used


cdef inline uint32_t pool_left(const Pool* pool) noexcept nogil:
    return pool.capacity - pool.used


cdef inline uint32_t pool_take(Pool* pool, const void* links, size_t cell_size) noexcept nogil:
    """Returns a free cell, or 0 if there is none.

    links: the field of cell 0 that links free cells; it has the same offset in each cell.
    """
    cdef uint32_t number = pool.free
    if number:
        pool.free = (<const uint32_t*>(<const uint8_t*>links + number * cell_size))[0]
    elif pool.fresh < pool.capacity:
        pool.fresh += 1
        number = pool.fresh
    else:
        return 0
    pool.used += 1
    return number


cdef inline void pool_put(Pool* pool, void* links, size_t cell_size, uint32_t number) noexcept nogil:
    (<uint32_t*>(<uint8_t*>links + number * cell_size))[0] = pool.free
    pool.free = number
    pool.used -= 1
