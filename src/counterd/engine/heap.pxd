# Heaps of records: the first record in order is always known. Any number of heaps share one array of records.
#
# Floor 1. A leftist heap: a node links its two children and its parent by number, so a heap consists of
# its nodes and one word, the number of its first node. Numbers begin at 1; 0 means none. Inserting and removing each
# take at most about 2 log2(n) steps of one cache line. The bound is not amortised: no work is postponed.
#
# Invariants:
# - a node is not before its parent, by key and then by serial;
# - `spine` is the number of nodes on the path along right children, including the node itself;
# - the left child's spine is not shorter than the right child's, so a spine has at most log2(n + 1) nodes.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd.engine.debug cimport debug_check


cdef struct Node:           # 32 bytes, at the same offset in each record
    uint64_t key            # the lower key comes first; changed only while the node is in no heap
    uint64_t serial         # between equal keys, the lower serial comes first
    uint32_t left
    uint32_t right
    uint32_t parent         # 0: the node is the first of its heap
    uint32_t spine


cdef struct Heap:           # this process's view of the array
    uint8_t* base           # where the node of record 0 would be
    size_t stride           # bytes from a record to the next


cdef bint node_is_before(const Node* one, const Node* other) noexcept nogil
cdef uint32_t node_spine(const Heap* heap, uint32_t number) noexcept nogil
cdef void heap_insert(const Heap* heap, uint32_t* first, uint32_t number) noexcept nogil
cdef void heap_remove(const Heap* heap, uint32_t* first, uint32_t number) noexcept nogil
cdef uint32_t heap_after(const Heap* heap, uint32_t number) noexcept nogil


cdef inline Node* node_at(const Heap* heap, uint32_t number) noexcept nogil:
    debug_check(number != 0)
    return <Node*>(heap.base + <size_t>number * heap.stride)
