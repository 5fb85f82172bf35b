# What a load process is to ask: the work of a Plan as numbers, names and bytes.
#
# A side. All that does not depend on what has been answered, or when.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.bench._random cimport Zipf
from counterd.bench._words cimport OPS, Dialect, Op, Template

cdef enum Keys:
    UNIFORM
    ZIPF
    SEQUENCE

cdef enum:
    DRAWN = 18              # kinds of requests that a mix can have


cdef class Task:
    cdef Dialect dialect
    cdef Template[OPS] templates
    cdef Template marker_acquire
    cdef Template marker_get
    cdef uint64_t random
    cdef uint32_t index             # of this process

    # names
    cdef Keys keys
    cdef Zipf zipf
    cdef uint32_t names
    cdef size_t name_size
    cdef uint64_t sequence          # of this process's share, which is each `stride`th name
    cdef uint64_t stride
    cdef uint64_t fill_next
    cdef uint32_t fresh             # the next name that no other request of this run has had
    cdef uint64_t token             # the next one without its number among those of this run
    cdef bint fills_numbers
    cdef bint fills_buffers

    # work
    cdef bint pairs                 # acquire and release in turn
    cdef bint in_turn               # likewise, of permits with tokens
    cdef bint names_tokens          # an acquire says which token it wants
    cdef bint holds
    cdef bint hold_is_random
    cdef double hold_ns
    cdef Op[DRAWN] ops
    cdef uint32_t[DRAWN] weights    # running sums
    cdef bint track_held
    cdef bint track_inserted        # what a purge takes back
    cdef uint32_t resources
    cdef int64_t maximum
    cdef uint32_t depth
    cdef bint keep_alive

    cdef int set_work(self, plan) except -1
    cdef int set_names(self, plan, int index) except -1
    cdef int set_templates(self, plan, int index) except -1
    cdef int set_numbers(self, int number) except -1
    cdef Op next_op(self) noexcept
    cdef uint32_t next_name(self) noexcept
    cdef uint32_t next_fresh(self) noexcept
    cdef uint64_t next_token(self) noexcept
    cdef str name_of(self, uint32_t name)
