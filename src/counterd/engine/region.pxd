# The region: one mapping with the data of all parts of a store, laid out by a list of reservations.
#
# Floor 1, header only. A part reserves each block once, by name and size, with a pointer to where the address is
# stored. The same list sizes the mapping and places the blocks. Pages are zeroed, and cost memory from their first use
# on. The region contains no pointers.
#
# Blocks larger than PACKED_MAX begin at a page. The others are packed into cache lines at the front.

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_PRIVATE, PROT_NONE, PROT_READ, PROT_WRITE, mmap, mprotect,
)

from counterd.engine.debug cimport COUNTERD_DEBUG_BUILD

cdef enum:
    LAYOUT_VERSION = 3      # raise it with each change of a structure in the region or of the order of reservations
    RESERVATIONS_MAX = 64
    PACKED_MAX = 1024       # bytes
    LINE = 64
    PAGE = 4096
    CLOSED_FIRST = 64       # calls; see region_close()
    CLOSED_EVERY = 16


cdef struct Reservation:
    size_t size             # bytes
    void** view             # region_map() stores the address here


cdef struct Header:         # at the beginning of every region
    uint32_t version        # LAYOUT_VERSION
    uint64_t key[2]         # of SipHash


cdef struct Region:         # this process's view
    uint8_t* memory         # NULL until it is mapped
    size_t size             # bytes
    size_t front            # bytes of the packed front
    bint closed             # debug build: access to the front is a fault
    uint64_t calls          # debug build: calls that have ended
    int count
    Reservation[RESERVATIONS_MAX] reservations


cdef inline int region_reserve(Region* region, const char* name, size_t size, void** view) except -1:
    """Reserves `size` bytes. region_map() stores their address in *view.

    Raises ValueError if there are too many reservations.
    """
    if region.count == RESERVATIONS_MAX or region.memory != NULL:
        raise ValueError(f"no more than {RESERVATIONS_MAX} reservations, before the region is mapped: {name.decode()}")
    region.reservations[region.count] = Reservation(size, view)
    region.count += 1
    return 0


cdef inline size_t round_up(size_t size, size_t unit) noexcept:
    return (size + unit - 1) // unit * unit


cdef inline int region_map(Region* region) except -1:
    """Maps the reserved memory and stores the addresses of the reservations.

    Raises MemoryError if it cannot be mapped.
    """
    cdef size_t[2] starts = [0, 0]      # of packed blocks, and of blocks that begin at a page
    cdef size_t size, total = 0
    cdef bint is_large
    cdef int i
    for i in range(region.count):
        size = region.reservations[i].size
        is_large = size > PACKED_MAX
        starts[is_large] += round_up(size, PAGE if is_large else LINE)
    starts[0] = round_up(starts[0], PAGE)
    total = starts[0] + starts[1]
    cdef void* memory = mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
    if memory == MAP_FAILED:
        raise MemoryError(f"cannot map {total} bytes")
    region.memory = <uint8_t*>memory
    region.size = total
    region.front = starts[0]
    starts[1] = starts[0]
    starts[0] = 0
    for i in range(region.count):
        size = region.reservations[i].size
        is_large = size > PACKED_MAX
        region.reservations[i].view[0] = region.memory + starts[is_large]
        starts[is_large] += round_up(size, PAGE if is_large else LINE)
    return 0


cdef inline void region_close(Region* region) noexcept:
    """Ends a call. In a debug build, region_close() then protects the front of the region, which has the states of all
    parts.

    Code that touches the front outside a call then ends the process. Protecting takes longer than most calls, so it is
    done after the first CLOSED_FIRST calls, and then after one in CLOSED_EVERY.
    """
    if COUNTERD_DEBUG_BUILD:
        region.calls += 1
        if region.calls <= CLOSED_FIRST or region.calls % CLOSED_EVERY == 0:
            mprotect(region.memory, region.front, PROT_NONE)
            region.closed = True


cdef inline void region_open(Region* region) noexcept:
    """Begins a call."""
    if COUNTERD_DEBUG_BUILD and region.closed:
        mprotect(region.memory, region.front, PROT_READ | PROT_WRITE)
        region.closed = False
