# Room that grows, rings and a heap; and memory that processes share.
#
# Floor 5, header only. Sizes only grow; whoever owns one frees its cells with PyMem_Free.

from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef extern from *:
    int64_t atomic_add "__sync_add_and_fetch"(int64_t* target, int64_t value) nogil
    uint64_t atomic_swap "__sync_lock_test_and_set"(uint64_t* target, uint64_t value) nogil

cdef enum:
    RING_MIN = 8
    HEAP_MIN = 1024


cdef struct Permit:
    uint64_t token          # what a release gives back, where permits have such
    uint32_t name


cdef struct Hold:           # a permit, and when it is released
    int64_t due_ns
    uint32_t link
    uint32_t generation     # of the link; another one has not got the permit
    Permit permit


cdef struct Heap:           # the permit that is due first comes first
    Hold* cells
    size_t size
    size_t capacity


cdef inline void* allocate(size_t count, size_t size) except NULL:
    """Allocates memory that is filled with zeros."""
    cdef void* memory = PyMem_Calloc(count, size)
    if memory == NULL:
        raise MemoryError(f"no room for {count * size} bytes")
    return memory


cdef inline int ring_grow(void** ring, uint32_t* mask, uint32_t* head, uint32_t count, size_t size) except -1:
    """Makes room for at least one more.

    The number of cells is a power of two, and the mask is this number minus one.
    """
    cdef uint32_t capacity = mask[0] + 1 if ring[0] != NULL else 0
    cdef uint32_t start = head[0] & mask[0]
    cdef uint32_t wanted = max(RING_MIN, 2 * capacity)
    cdef uint8_t* grown
    if count < capacity:
        return 0
    grown = <uint8_t*>allocate(wanted, size)
    if capacity:
        memcpy(grown, <uint8_t*>ring[0] + start * size, (capacity - start) * size)
        memcpy(grown + (capacity - start) * size, ring[0], start * size)
    PyMem_Free(ring[0])
    ring[0] = grown
    mask[0] = wanted - 1
    head[0] = 0
    return 0


cdef inline int heap_push(Heap* heap, Hold permit) except -1:
    cdef size_t at = heap.size
    cdef size_t capacity
    cdef void* cells
    if at == heap.capacity:
        capacity = max(HEAP_MIN, 2 * heap.capacity)
        cells = PyMem_Realloc(heap.cells, capacity * sizeof(Hold))
        if cells == NULL:
            raise MemoryError(f"no room for {capacity} permits")
        heap.cells = <Hold*>cells
        heap.capacity = capacity
    heap.size += 1
    while at and heap.cells[(at - 1) // 2].due_ns > permit.due_ns:
        heap.cells[at] = heap.cells[(at - 1) // 2]
        at = (at - 1) // 2
    heap.cells[at] = permit
    return 0


cdef inline void heap_pop(Heap* heap) noexcept:
    cdef Hold last
    cdef size_t at = 0, child = 1
    heap.size -= 1
    last = heap.cells[heap.size]
    while child < heap.size:
        if child + 1 < heap.size and heap.cells[child + 1].due_ns < heap.cells[child].due_ns:
            child += 1
        if heap.cells[child].due_ns >= last.due_ns:
            break
        heap.cells[at] = heap.cells[child]
        at = child
        child = 2 * at + 1
    heap.cells[at] = last
