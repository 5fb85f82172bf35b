# The region: one mapping that holds everything a store's parts share, laid out by a list of reservations.
#
# Floor 1, header only but for region_map(), which is the system call's (_core.pyx). A part reserves what it needs once,
# by name and size, and says where it wants the address; the same list counts the bytes and maps them. Pages are zeroed
# and cost memory from their first use on. Nothing in the region is a pointer.
#
# What is larger than PACKED_MAX begins at a page; the rest is packed into cache lines, at the front.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum:
    LAYOUT_VERSION = 1      # to be raised whenever a structure in the region, or the order of reservations, changes
    RESERVATIONS_MAX = 64
    PACKED_MAX = 1024       # bytes
    LINE = 64
    PAGE = 4096


cdef struct Reservation:
    const char* name        # for messages
    size_t size             # bytes
    void** view             # where the address belongs once the region is mapped


cdef struct Header:         # at the beginning of every region
    uint32_t version        # LAYOUT_VERSION
    uint64_t key[2]         # of SipHash


cdef struct Region:         # this process's view
    Header* header
    uint8_t* memory         # NULL until it is mapped
    size_t size             # bytes
    size_t front            # bytes of it that are packed
    int count
    Reservation[RESERVATIONS_MAX] reservations


cdef inline int region_reserve(Region* region, const char* name, size_t size, void** view) except -1:
    """Reserves memory, whose address *view has once the region is mapped. Raises ValueError if there are too many."""
    if region.count == RESERVATIONS_MAX or region.memory != NULL:
        raise ValueError(f"no more than {RESERVATIONS_MAX} reservations, before the region is mapped: {name.decode()}")
    region.reservations[region.count] = Reservation(name, size, view)
    region.count += 1
    return 0
