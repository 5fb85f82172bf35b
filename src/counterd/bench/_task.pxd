# A load process's share of a Plan, as numbers: which connections are its own, and what they draw.
#
# Floor 5. All that does not depend on what has been answered, or when.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.bench._codec cimport OPS_MAX
from counterd.bench._link cimport Link
from counterd.bench._random cimport Zipf

cdef enum Keys:
    UNIFORM
    ZIPF
    SEQUENCE


cdef class Task:
    cdef uint64_t random
    cdef uint32_t fairness_keys     # which the connections have in turn
    cdef uint32_t depth
    cdef uint32_t connections       # of this process,
    cdef uint32_t everywhere        # of all processes,
    cdef uint32_t first             # and how many those before this one have

    # names
    cdef Keys keys
    cdef Zipf zipf
    cdef uint32_t names
    cdef uint64_t sequence          # of this process's share, which is each `stride`th name
    cdef uint64_t stride
    cdef uint32_t fresh             # the next name that no other request of this run has had

    # work
    cdef uint8_t[OPS_MAX] ops
    cdef uint32_t[OPS_MAX] weights  # running sums,
    cdef uint32_t total             # and the last of them

    cdef uint8_t next_op(self) noexcept
    cdef uint32_t next_name(self) noexcept
    cdef uint32_t next_fresh(self) noexcept
    cdef uint32_t key_of(self, uint32_t link) noexcept
    cdef uint32_t next_told(self, Link* link) noexcept
    cdef int64_t link_of(self, int64_t told) noexcept
