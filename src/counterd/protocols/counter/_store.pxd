# The counter protocol's store, for the modules with its sessions and tables.

from libc.stdint cimport uint64_t

from counterd._core cimport Store
from counterd.protocols.counter._counters cimport Counters
from counterd.protocols.counter._messages cimport OPCODES


cdef class CounterStore(Store):
    cdef Counters counters
    # Not in the region:
    cdef object others          # returns the figures of the floors above, for Stats
    cdef bint draining          # nothing is handed out any more
    cdef uint64_t[OPCODES] requests  # valid requests by Opcode
    cdef uint64_t[OPCODES + 1][256] refusals  # by Opcode, the last for unknown ones; by Status

    cdef bytes stats_body(self)
