# The counter protocol's store, for the modules that build sessions and tables on it.

from libc.stdint cimport uint64_t

from counterd._core cimport Store
from counterd.protocols.counter._counters cimport Counters
from counterd.protocols.counter._messages cimport OPCODES


cdef class CounterStore(Store):
    cdef Counters counters
    # What follows is this process's.
    cdef object others          # what the floors above count, for Stats
    cdef bint draining          # nothing is handed out any more
    cdef uint64_t[OPCODES] requests  # by Opcode, those that parsed
    cdef uint64_t[OPCODES + 1][256] refusals  # by Opcode, the last for whatever is none; by Status

    cdef bytes stats_body(self)
