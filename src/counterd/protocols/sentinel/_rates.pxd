# Rules, and the rates that they allow: the half of the sentinel room's store that FLOW and PARAM are about.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Store
from counterd._table cimport Pool, Table
from counterd.protocols.sentinel._records cimport Namespace, Param, Records
from counterd.protocols.sentinel._window cimport Window

# What requests come to; on the wire these are signed bytes. docs/protocols/sentinel.md, "On the wire".
cdef enum:
    BAD_REQUEST = -4
    TOO_MANY_REQUESTS = -2
    FAIL = -1
    OK = 0
    BLOCKED = 1
    SHOULD_WAIT = 2
    NO_RULE = 3
    NOT_AVAILABLE = 5
    RELEASE_OK = 6
    ALREADY_RELEASED = 7


cdef struct Answer:             # to a request for some of a rate
    int status
    int32_t remaining
    int32_t wait_ms


cdef class RateStore(Store):
    cdef Records records
    cdef int64_t now_ns         # of the call under way, or the last
    cdef int64_t scheduled_ns   # when tick() will be called
    cdef double qps_max         # of FLOW and PARAM in each namespace
    cdef uint32_t values_max    # but for hot items
    cdef uint32_t rules_max     # of flows; and of parameters
    cdef uint32_t items_max     # hot items of all rules
    cdef dict namespaces        # {name: number}
    cdef dict resources         # {flow id: what its rule calls it}
    cdef dict hot               # {number of a parameter's rule: {value on the wire: its number}}

    cdef void map_records(self, uint32_t tokens, uint32_t values) noexcept
    cdef uint8_t* map_table(
        self, Table* table, Pool* pool, uint8_t* place, uint32_t capacity, size_t record_size, uint32_t name_inline
    ) noexcept
    cdef uint32_t connected(self, uint32_t namespace) noexcept
    cdef double threshold(self, double count, uint8_t threshold_type, uint32_t namespace) noexcept
    cdef bint is_allowed(self, uint32_t namespace) noexcept
    cdef Answer ask_flow(self, uint32_t number, uint32_t count, bint prioritized) noexcept
    cdef Answer ask_param(self, uint32_t number, uint32_t count, uint32_t values, const uint8_t* data) noexcept
    cdef int ask_value(
        self, const Param* param, const uint8_t* data, uint32_t size, uint32_t count, double* left
    ) noexcept
    cdef uint32_t value_find(self, const Param* param, const uint8_t* data, uint32_t size, bint is_needed) noexcept
    cdef bint has_room_for_value(self) noexcept
    cdef uint32_t value_create(self, uint32_t tag, const uint8_t* key, uint32_t size, const Window* window) noexcept
    cdef void value_remove(self, uint32_t number) noexcept
    cdef int expire_values(self, int steps) noexcept
    cdef void expect(self, int64_t due_ns) noexcept

    cdef uint32_t find(self, const Table* table, int64_t flow_id) noexcept
    cdef uint32_t find_or_insert(self, Table* table, int64_t flow_id, bint* is_new) noexcept
    cdef int64_t flow_id(self, uint32_t number) noexcept
    cdef int64_t param_id(self, uint32_t number) noexcept
    cdef int load_namespaces(self, names) except -1
    cdef int drop_flow(self, uint32_t number) except -1
    cdef int load_flow(self, rule) except -1
    cdef bint keeps_window(self, uint32_t number, rule) except -1
    cdef int load_param(self, rule) except -1
    cdef int load_items(self, uint32_t number, items) except -1
    cdef int cool(self, uint32_t number, const Param* param) except -1


cdef uint32_t value_size(const uint8_t* data, uint32_t left) noexcept
