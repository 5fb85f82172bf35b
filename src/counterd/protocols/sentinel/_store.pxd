# The sentinel room's store, for the modules that build sessions and tables on it.

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Session
from counterd.protocols.sentinel._rates cimport RateStore
from counterd.protocols.sentinel._replies cimport TYPES

cdef enum:
    FORESEEN = 64               # ids that are made ahead: a power of two, and no batch of frames is longer
    STATUSES = 12
    STATUS_MIN = -4


cdef struct Foreseen:       # an id that is to be given
    uint64_t word
    uint32_t tag


cdef class SentinelStore(RateStore):
    cdef object make_session
    cdef uint64_t[TYPES + 1][STATUSES] answers  # by type, TYPES for those that are none, and status from STATUS_MIN on
    cdef bint draining
    cdef Foreseen[FORESEEN] foreseen    # by serial
    cdef uint64_t foreseen_serial       # the last of them

    cdef int64_t sweep_interval_ns
    cdef int64_t sweep_duration_ns
    cdef uint32_t sweep_tokens_max  # 0 = no bound
    cdef int64_t sweep_next_ns  # before which no other begins
    cdef int64_t sweep_began_ns  # -1 = none is under way
    cdef uint32_t sweep_taken

    cdef object submit_calls    # of a token service, or None
    cdef object submit_leases   # of an expire strategy, or None
    cdef int64_t calls_timeout_ns
    cdef int64_t leases_timeout_ns
    cdef uint64_t ticket        # the last
    cdef list calls             # to be submitted by tick()
    cdef list judging           # leases, likewise, one batch
    cdef dict pending           # {ticket: (deadline, session or None, xid, type)}, the oldest first
    cdef dict abandoned         # {ticket: None}: overdue, and a token perhaps comes of them
    cdef dict batches           # {ticket: (deadline, token ids)}, the oldest first
    cdef readonly uint64_t overdue

    cdef int acquire(self, uint32_t number, uint32_t count, uint32_t connection, uint8_t* id) noexcept
    cdef int release(self, const uint8_t* id, uint32_t tag) noexcept
    cdef int keep(self, const uint8_t* id, uint32_t tag, uint32_t connection, int32_t* left_ms) noexcept
    cdef bint is_late(self, uint32_t number) noexcept
    cdef bint is_ruled(self, uint32_t number) noexcept
    cdef void foresee(self, uint32_t count) noexcept
    cdef uint32_t token_create(self) noexcept
    cdef int count_expired(self, uint32_t number) noexcept
    cdef uint32_t owner_of(self, uint32_t connection) noexcept
    cdef void client_enter(self, uint32_t connection) noexcept
    cdef void client_leave(self, uint32_t connection) noexcept
    cdef uint64_t handle(self, uint32_t connection) noexcept
    cdef uint32_t from_handle(self, uint64_t handle) noexcept
    cdef int arm_leavers(self, int steps) noexcept
    cdef int sweep(self, int steps) except? -1
    cdef void end_sweep(self) noexcept
    cdef int end_lease(self, uint32_t number) except -1
    cdef int enter_batch(self, uint32_t number) except -1
    cdef int delegate_call(
        self, Session session, uint32_t xid, uint8_t message, const uint8_t* body, uint32_t size
    ) except? -1
    cdef int drop_overdue(self) except -1
    cdef int submit(self) except -1
    cdef int reply(self, Session session, uint32_t xid, uint8_t message, int status, int64_t value) except -1
    cdef int audit_tokens(self) except -1
    cdef int audit_owners(self) except -1
    cdef uint32_t audit_values(self) except? 0xffffffff
