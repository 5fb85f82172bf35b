# The sentinel protocol's store, for the modules with its sessions and tables.

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd._core cimport Session, Store
from counterd.engine.chains cimport Chains
from counterd.engine.later cimport Later
from counterd.engine.permits cimport Permits
from counterd.protocols.sentinel._messages cimport STATUSES, TYPES, Request
from counterd.protocols.sentinel._rates cimport Rates
from counterd.protocols.sentinel._rules cimport Rules
from counterd.protocols.sentinel._sweep cimport Sweep
from counterd.protocols.sentinel._tokens cimport Tokens


cdef class SentinelStore(Store):
    cdef Chains chains              # of long names, and of the samples of values
    cdef Permits permits            # namespaces with connections
    cdef Rules rules
    cdef Rates rates
    cdef Tokens tokens
    cdef Sweep sweep
    cdef uint64_t[TYPES + 1][STATUSES] answers  # by type (TYPES: unknown) and by status from STATUS_MIN on

    # Not in the region, because extensions run in this process:
    cdef object submit_calls        # of a token service, or None
    cdef object submit_leases       # of an expire strategy, or None
    cdef int64_t calls_timeout_ns
    cdef int64_t leases_timeout_ns
    cdef Later calls                # calls that a token service has not answered yet
    cdef Later batches              # batches of leases that an expire strategy has not judged yet
    cdef list noted_calls           # calls that tick() will submit
    cdef list noted_leases          # leases that tick() will submit, as one batch

    cdef int sweep_leases(self, int steps) except? -1
    cdef int end_lease(self, uint32_t number) except -1
    cdef bint decide_later(self, Session session, const Request* request) except -1
    cdef int note_release(self, int64_t token_id) except -1
    cdef int reply_later(self, Session session, uint32_t xid, int type, int status, int64_t value) except -1
    cdef int end_batch(self, list token_ids, int64_t deadline_ns, set going) except -1
    cdef int submit(self) except -1


cdef class Asked:                   # a request that a token service has to answer
    cdef SentinelStore store
    cdef Session session            # None: the answer is no longer waited for
    cdef uint32_t xid
    cdef int type


cdef class Batch:                   # leases that an expire strategy has to judge
    cdef SentinelStore store
    cdef int64_t deadline_ns
    cdef list token_ids
