"""Heaps of records: the first record in order is always known. Any number of heaps share one array of records.

Floor 1 (ARCHITECTURE.md). heap.pxd has the interface, the types and the invariants.
"""

from libc.stdint cimport uint32_t

from counterd.engine.debug cimport debug_check


cdef bint node_is_before(const Node* one, const Node* other) noexcept nogil:
    return one.key < other.key or one.key == other.key and one.serial < other.serial


cdef uint32_t node_spine(const Heap* heap, uint32_t number) noexcept nogil:
    return node_at(heap, number).spine if number else 0


cdef bint node_lean(const Heap* heap, Node* node) noexcept nogil:
    """Moves the child with the longer spine to the left. Returns whether the node's own spine changed."""
    cdef uint32_t right = node_spine(heap, node.right)
    if node_spine(heap, node.left) < right:
        node.left, node.right = node.right, node.left
        right = node_spine(heap, node.right)
    if node.spine == right + 1:
        return False
    node.spine = right + 1
    return True


cdef uint32_t heap_merge(const Heap* heap, uint32_t one, uint32_t other) noexcept nogil:
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


cdef void heap_insert(const Heap* heap, uint32_t* first, uint32_t number) noexcept nogil:
    """Inserts a node into the heap that begins at *first. The caller must have set the node's key and serial."""
    cdef Node* node = node_at(heap, number)
    node.left = node.right = node.parent = 0
    node.spine = 1
    first[0] = heap_merge(heap, first[0], number)


cdef void heap_remove(const Heap* heap, uint32_t* first, uint32_t number) noexcept nogil:
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


cdef uint32_t heap_after(const Heap* heap, uint32_t number) noexcept nogil:
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
