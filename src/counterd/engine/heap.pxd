# Heaps of records: the first record in order is always known. Any number of heaps share one array of records.
#
# Floor 1, header only. A leftist heap: a node links its two children and its parent by number, so a heap consists of
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


cdef inline Node* node_at(const Heap* heap, uint32_t number) noexcept nogil:
    debug_check(number != 0)
    return <Node*>(heap.base + <size_t>number * heap.stride)


cdef inline bint node_is_before(const Node* one, const Node* other) noexcept nogil:
    return one.key < other.key or one.key == other.key and one.serial < other.serial


cdef inline uint32_t node_spine(const Heap* heap, uint32_t number) noexcept nogil:
    return node_at(heap, number).spine if number else 0


cdef inline bint node_lean(const Heap* heap, Node* node) noexcept nogil:
    """Moves the child with the longer spine to the left. Returns whether the node's own spine changed."""
    cdef uint32_t right = node_spine(heap, node.right)
    if node_spine(heap, node.left) < right:
        node.left, node.right = node.right, node.left
        right = node_spine(heap, node.right)
    if node.spine == right + 1:
        return False
    node.spine = right + 1
    return True


cdef inline uint32_t heap_merge(const Heap* heap, uint32_t one, uint32_t other) noexcept nogil:
    """Merges two heaps, each of which can be empty. Returns the first node of the result."""
    cdef uint32_t parent = 0, child
    cdef Node* node
    while one and other:    # down the two right spines, the earlier node first
        if node_is_before(node_at(heap, other), node_at(heap, one)):
            one, other = other, one
        node = node_at(heap, one)
        node.parent = parent
        parent = one
        one = node.right
    child = one | other
    if child:
        node_at(heap, child).parent = parent
    while parent:           # and back up
        node = node_at(heap, parent)
        node.right = child
        node_lean(heap, node)
        child = parent
        parent = node.parent
    return child


cdef inline void heap_insert(const Heap* heap, uint32_t* first, uint32_t number) noexcept nogil:
    """Inserts a node into the heap that begins at *first. The caller must have set the node's key and serial."""
    cdef Node* node = node_at(heap, number)
    node.left = node.right = node.parent = 0
    node.spine = 1
    first[0] = heap_merge(heap, first[0], number)


cdef inline void heap_remove(const Heap* heap, uint32_t* first, uint32_t number) noexcept nogil:
    """Removes a node from the heap that begins at *first and contains it."""
    cdef const Node* node = node_at(heap, number)
    cdef uint32_t parent = node.parent
    cdef uint32_t merged = heap_merge(heap, node.left, node.right)
    cdef Node* above
    if parent == 0:
        debug_check(first[0] == number)
        first[0] = merged
        return
    if merged:
        node_at(heap, merged).parent = parent
    above = node_at(heap, parent)
    if above.left == number:
        above.left = merged
    else:
        debug_check(above.right == number)
        above.right = merged
    while node_lean(heap, above) and above.parent:
        above = node_at(heap, above.parent)


cdef inline uint32_t heap_after(const Heap* heap, uint32_t number) noexcept nogil:
    """Returns the next node in preorder (node, left subtree, right subtree), or 0."""
    cdef const Node* node = node_at(heap, number)
    cdef const Node* above
    if node.left:
        return node.left
    if node.right:
        return node.right
    while node.parent:
        above = node_at(heap, node.parent)
        if above.left == number and above.right:
            return above.right
        number = node.parent
        node = above
    return 0
