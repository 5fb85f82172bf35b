"""Heaps with an interface for Python, for their tests. Built by benchmarks/native/__init__.py.

They have all operations that a protocol uses, and damage(), with which tests check that the audit finds errors.
"""

from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from counterd.engine.audit cimport audit_heap
from counterd.engine.heap cimport Heap, Node, heap_insert, heap_remove, node_at

assert sizeof(Node) == 32


cdef class Heaps:
    """`count` heaps over `records` records of `stride` bytes, each with a node at `offset`."""

    cdef Heap heap
    cdef uint8_t* memory
    cdef uint32_t* firsts
    cdef readonly uint32_t records
    cdef readonly uint32_t count

    def __cinit__(self, uint32_t records, uint32_t count=1, *, size_t stride=48, size_t offset=8):
        self.memory = <uint8_t*>calloc(records + 1, stride)
        self.firsts = <uint32_t*>calloc(count, sizeof(uint32_t))
        if self.memory == NULL or self.firsts == NULL:
            raise MemoryError(f"no room for {records} records")
        self.heap = Heap(self.memory + offset, stride)
        self.records = records
        self.count = count

    def __dealloc__(self):
        free(self.memory)
        free(self.firsts)

    cdef uint32_t checked(self, uint32_t number) except 0:
        if not 0 < number <= self.records:
            raise IndexError(f"record {number} of {self.records}")
        return number

    def insert(self, uint32_t which, uint32_t number, uint64_t key, uint64_t serial):
        cdef Node* node = node_at(&self.heap, self.checked(number))
        node.key = key
        node.serial = serial
        heap_insert(&self.heap, self.firsts + which, number)

    def remove(self, uint32_t which, uint32_t number):
        heap_remove(&self.heap, self.firsts + which, self.checked(number))

    def first(self, uint32_t which=0):
        return self.firsts[which]

    def spine(self, uint32_t which=0):
        """Returns the number of nodes on the right spine of the first node."""
        return node_at(&self.heap, self.firsts[which]).spine if self.firsts[which] else 0

    def audit(self):
        """Audits all heaps and returns the number of nodes of each."""
        return [audit_heap(&self.heap, self.firsts[which], self.records) for which in range(self.count)]

    def damage(self, uint32_t number, str what, uint64_t value):
        """Overwrites a field of the node with a wrong value."""
        cdef Node* node = node_at(&self.heap, self.checked(number))
        if what == "key":
            node.key = value
        elif what == "left":
            node.left = <uint32_t>value
        elif what == "right":
            node.right = <uint32_t>value
        elif what == "parent":
            node.parent = <uint32_t>value
        elif what == "spine":
            node.spine = <uint32_t>value
        else:
            raise ValueError(what)
