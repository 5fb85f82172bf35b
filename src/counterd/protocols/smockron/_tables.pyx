"""The smockron protocol's tables for people: the identifiers that have to wait, and the domains.

Floor 2 (ARCHITECTURE.md). The tables are walks in slices, see engine/walk.pyx. Waiting times refer to the store's last
call.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.engine.table cimport Record, name_bytes
from counterd.engine.walk cimport RankedWalk
from counterd.protocols.smockron._store cimport SmockronStore
from counterd.protocols.smockron._throttles cimport DOMAIN_RULED, Domain, Identifier, domain_at

from counterd.tables import Column, Figure, Table, name_of_bytes

cdef double NS_PER_S = 1e9


cdef class ThrottledWalk(RankedWalk):
    """Lists identifiers that have to wait and whose names contain `match`, with the longest wait first."""

    def __cinit__(self, SmockronStore store not None, *_, **_parameters):
        self.table = &store.throttles.identifiers

    cdef bint rank(self, uint32_t number, const Record* record, uint64_t* rank) noexcept:
        cdef int64_t wait_ns = (<const Identifier*>record).next_ns - self.store.now_ns
        rank[0] = <uint64_t>wait_ns
        return wait_ns > 0

    cdef tuple row(self, uint32_t number, const Record* record, bytes name):
        cdef SmockronStore store = <SmockronStore>self.store
        cdef const Identifier* identifier = <const Identifier*>record
        cdef const Domain* domain = domain_at(&store.throttles, identifier.domain)
        return (
            name,
            name_bytes(&store.throttles.domains, <Record*>&domain.record),
            (identifier.next_ns - store.now_ns) / NS_PER_S,
        )


cdef class DomainsWalk(RankedWalk):
    """Lists domains whose names contain `match`, with the largest figure of `sort` first."""

    def __cinit__(self, SmockronStore store not None, *_, **_parameters):
        self.table = &store.throttles.domains

    cdef bint rank(self, uint32_t number, const Record* record, uint64_t* rank) noexcept:
        cdef const Domain* domain = <const Domain*>record
        cdef uint64_t[5] figures = [
            domain.told, domain.accepted, domain.delayed, domain.rejected, domain.identifiers
        ]
        rank[0] = figures[self.sort]    # as in TABLES
        return True

    cdef tuple row(self, uint32_t number, const Record* record, bytes name):
        cdef const Domain* domain = <const Domain*>record
        cdef bint is_ruled = record.flags & DOMAIN_RULED != 0
        return (
            name, is_ruled * domain.rate.interval.ns / NS_PER_S, is_ruled * domain.rate.burst.ns / NS_PER_S,
            domain.identifiers, domain.accepted, domain.delayed, domain.rejected, domain.told,
        )


TABLES = (
    Table(
        "throttled",
        "The throttled identifiers. The longest wait comes first. `match`: list only names that contain this text.",
        (
            Column("identifier", "name", "the identifier"),
            Column("domain", "name", "the domain in which it is throttled"),
            Column("wait", "seconds", "how long until the identifier's next request passes without a delay"),
        ),
        (),
        ThrottledWalk,
        {"match": name_of_bytes},
    ),
    Table(
        "domains",
        "The domains. By default, those with the most control messages come first.",
        (
            Column("domain", "name", "the name of the domain"),
            Column("interval", "seconds", "the time between two requests at the domain's rate; 0 if its rule is gone"),
            Column("burst", "seconds", "how far requests can be ahead of the rate"),
            Column("identifiers", "integer", "identifiers in memory"),
            Column("accepted", "integer", "requests that passed without a delay"),
            Column("delayed", "integer", "requests that passed after a delay"),
            Column("rejected", "integer", "requests that were rejected, as reported by gatekeepers"),
            Column("told", "integer", "control messages that were sent (DELAY_UNTIL)"),
        ),
        ("told", "accepted", "delayed", "rejected", "identifiers"),
        DomainsWalk,
        metrics=(
            Figure("accepted", "smockron_domain_accepted_total", "counter", "Requests that passed without a delay."),
            Figure("delayed", "smockron_domain_delayed_total", "counter", "Requests that passed after a delay."),
            Figure("rejected", "smockron_domain_rejected_total", "counter", "Requests that were rejected."),
            Figure(
                "told", "smockron_domain_throttled_total", "counter", "Control messages that were sent (DELAY_UNTIL)."
            ),
        ),
    ),
)
