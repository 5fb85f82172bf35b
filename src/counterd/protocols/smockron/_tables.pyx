"""The smockron protocol's tables for people: the identifiers that have to wait, and the domains.

Floor 2. Walks in slices, see engine/walk.pyx. Waiting times refer to the store's last call.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.engine.table cimport Record, name_bytes
from counterd.engine.walk cimport RankedWalk
from counterd.protocols.smockron._store cimport SmockronStore
from counterd.protocols.smockron._throttles cimport DOMAIN_RULED, Domain, Identifier, domain_at

cdef double NS_PER_S = 1e9
DOMAIN_SORTS = ("told", "accepted", "delayed", "rejected", "identifiers")


cdef class ThrottledWalk(RankedWalk):
    """Lists identifiers that have `match` in their names and have to wait, the longest wait first."""

    def __cinit__(self, SmockronStore store not None, bytes match, uint32_t limit):
        self.table = &store.throttles.identifiers

    cdef bint rank(self, const Record* record, uint64_t* rank) noexcept:
        cdef int64_t wait_ns = (<const Identifier*>record).next_ns - self.store.now_ns
        rank[0] = <uint64_t>wait_ns
        return wait_ns > 0

    cdef tuple row(self, bytes name, const Record* record):
        cdef SmockronStore store = <SmockronStore>self.store
        cdef const Identifier* identifier = <const Identifier*>record
        cdef const Domain* domain = domain_at(&store.throttles, identifier.domain)
        return (
            name,
            name_bytes(&store.throttles.domains, <Record*>&domain.record),
            (identifier.next_ns - store.now_ns) / NS_PER_S,
        )


cdef class DomainsWalk(RankedWalk):
    """Lists domains that have `match` in their names, the largest figure of `sort` first."""

    cdef int key

    def __cinit__(self, SmockronStore store not None, bytes match, uint32_t limit, str sort):
        self.table = &store.throttles.domains
        self.key = DOMAIN_SORTS.index(sort)

    cdef bint rank(self, const Record* record, uint64_t* rank) noexcept:
        cdef const Domain* domain = <const Domain*>record
        cdef uint64_t[5] figures = [
            domain.told, domain.accepted, domain.delayed, domain.rejected, domain.identifiers
        ]
        rank[0] = figures[self.key]
        return True

    cdef tuple row(self, bytes name, const Record* record):
        cdef const Domain* domain = <const Domain*>record
        cdef bint is_ruled = record.flags & DOMAIN_RULED != 0
        return (
            name, is_ruled * domain.rate.interval.ns / NS_PER_S, is_ruled * domain.rate.burst.ns / NS_PER_S,
            domain.identifiers, domain.accepted, domain.delayed, domain.rejected, domain.told,
        )
