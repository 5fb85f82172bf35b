"""The share that one load process has of a Plan, as numbers. See _task.pxd.

Floor 5 (ARCHITECTURE.md).
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.bench._link cimport Link
from counterd.bench._random cimport random_below, zipf_begin, zipf_next


cdef class Task:
    """plan: a Plan. index: the index of this load process. numbers: of the kinds of requests, by name."""

    def __cinit__(self, plan, int index, dict numbers not None):
        cdef uint32_t each = plan.connections // plan.processes
        cdef uint32_t left_over = plan.connections % plan.processes  # which the first processes take
        cdef int i
        self.everywhere = plan.connections
        self.connections = each + (<uint32_t>index < left_over)
        self.first = each * index + min(<uint32_t>index, left_over)
        self.depth = plan.depth
        self.fairness_keys = max(plan.take.keys, 1) if plan.take else 1
        self.random = (plan.seed * 1000003 + index) & 0xffffffffffffffff
        self.names = plan.names
        self.stride = plan.processes
        self.sequence = self.fresh = index
        self.keys = {"uniform": UNIFORM, "zipf": ZIPF, "seq": SEQUENCE}[plan.keys.kind]
        if self.keys == ZIPF:
            zipf_begin(&self.zipf, plan.keys.exponent, self.names)
        for i, op in enumerate(op for op in plan.dialect.ops if op in plan.work.weights):
            self.total += plan.work.weights[op]
            self.ops[i], self.weights[i] = numbers[plan.dialect.sent(plan, op)], self.total

    cdef uint8_t next_op(self) noexcept:
        cdef uint32_t draw = random_below(&self.random, self.total)
        cdef int i = 0
        while draw >= self.weights[i]:
            i += 1
        return self.ops[i]

    cdef uint32_t next_name(self) noexcept:
        cdef uint64_t name
        if self.keys == UNIFORM:
            return random_below(&self.random, self.names)
        if self.keys == ZIPF:
            return zipf_next(&self.zipf, &self.random)
        name = self.sequence % self.names
        self.sequence += self.stride
        return <uint32_t>name

    cdef uint32_t next_fresh(self) noexcept:
        cdef uint32_t name = self.fresh
        self.fresh += <uint32_t>self.stride
        return name

    cdef uint32_t key_of(self, uint32_t link) noexcept:
        """Returns the fairness key of a connection."""
        return (self.first + link) % self.fairness_keys

    cdef uint32_t next_told(self, Link* link) noexcept:
        """Returns a new name that contains the number of its connection: a server handles the names of one connection
        in order."""
        cdef uint32_t name = link.told * self.everywhere + self.first + link.index
        link.told += 1
        return name

    cdef int64_t link_of(self, int64_t told) noexcept:
        """Returns the connection of this process that has sent this name, or -1 if no connection has."""
        cdef int64_t link = told % self.everywhere - self.first
        return link if told >= 0 and 0 <= link < self.connections else -1
