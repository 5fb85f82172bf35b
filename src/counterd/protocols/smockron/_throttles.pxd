# Domains with their rules, and the identifiers that differ from new ones.
#
# Floor 2, header only. Everything except the sizes is in the store's region and addressed by number. Times are on the
# monotonic clock, so setting the wall clock makes no identifier wait.
#
# Invariants (SmockronStore.audit checks each):
# - an identifier belongs to one domain, which counts it; a domain stays until its last identifier is gone;
# - an identifier has an armed timer for the time when it no longer differs from a new one;
# - it is in one of two lists by recency, once. Names with blocks have their own list, so that evicting for blocks needs
#   no search;
# - its tag is that of its name combined with its domain's salt, so the same name has another slot in each domain.

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.chains cimport Chains
from counterd.engine.gcra cimport Rate, Span, gcra_first, gcra_next, span_plus
from counterd.engine.list cimport Ends, Links, List, ends_push, ends_remove
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.siphash cimport siphash13
from counterd.engine.table cimport (
    RECORD_USED, Record, Table, index_home, name_equals, record_at, table_begin, table_find, table_insert, table_remove,
    table_reserve,
)
from counterd.engine.wheel cimport Timer, Timers, timers_arm, timers_begin, timers_disarm, timers_reserve

cdef enum:
    DOMAINS_MAX = 4096      # as in rules.py
    DOMAIN_INLINE = 40      # bytes of a name in its record
    DOMAIN_RULED = 1        # in Record.flags: the domain has a rule
    IDENTIFIER_INLINE = 24
    IDENTIFIER_MAX = 4096   # bytes of an identifier


cdef struct Domain:
    Record record
    uint8_t name[DOMAIN_INLINE]
    Rate rate
    uint32_t salt
    uint32_t identifiers
    uint32_t asked          # requests that Redis has not decided yet
    uint64_t accepted       # in total, as the next three
    uint64_t delayed
    uint64_t rejected
    uint64_t told           # DELAY_UNTIL messages


cdef struct Identifier:     # 80 bytes
    Record record
    uint8_t name[IDENTIFIER_INLINE]
    Timer timer
    int64_t next_ns         # when the next request is on time; see gcra.pxd
    uint32_t part
    uint32_t domain
    Links links
    uint64_t used           # number of its last use


cdef struct ThrottlesState:  # in the region
    uint64_t uses           # in total, as the next two
    uint64_t expired
    uint64_t evicted
    Ends inlined            # identifiers whose names fit into their records, the most recently used one first
    Ends chained            # likewise those whose names have blocks


cdef struct Throttles:      # this process's view
    ThrottlesState* state
    Table domains
    Table identifiers
    Timers timers
    const uint64_t* hash_key


cdef inline int throttles_reserve(Throttles* throttles, Region* region, uint32_t capacity) except -1:
    """Reserves memory for `capacity` identifiers."""
    region_reserve(region, b"throttles", sizeof(ThrottlesState), <void**>&throttles.state)
    table_reserve(&throttles.domains, region, b"domains", DOMAINS_MAX, sizeof(Domain), DOMAIN_INLINE)
    table_reserve(&throttles.identifiers, region, b"identifiers", capacity, sizeof(Identifier), IDENTIFIER_INLINE)
    timers_reserve(&throttles.timers, region, b"identifiers")
    return 0


cdef inline void throttles_begin(
    Throttles* throttles, const uint64_t* hash_key, const Chains* domains, const Chains* identifiers, int64_t now_ns
) noexcept nogil:
    """Call this once, after the region was mapped. domains, identifiers: the chains for the long names of each."""
    throttles.hash_key = hash_key
    table_begin(&throttles.domains, hash_key, domains)
    table_begin(&throttles.identifiers, hash_key, identifiers)
    timers_begin(&throttles.timers, &(<Identifier*>throttles.identifiers.records).timer, sizeof(Identifier), now_ns)


cdef inline Domain* domain_at(const Throttles* throttles, uint32_t number) noexcept nogil:
    return <Domain*>record_at(&throttles.domains, number)


cdef inline Identifier* identifier_at(const Throttles* throttles, uint32_t number) noexcept nogil:
    return <Identifier*>record_at(&throttles.identifiers, number)


# ---- domains ---------------------------------------------------------------------------------------------------------

cdef inline uint64_t domain_hash(const Throttles* throttles, const uint8_t* name, uint32_t size) noexcept nogil:
    """Returns the hash of a domain's name. The upper half is its tag, the lower half its salt."""
    return siphash13(throttles.hash_key, name, size)


cdef inline uint32_t domain_find(const Throttles* throttles, const uint8_t* name, uint32_t size) noexcept nogil:
    """Returns the number of the domain with this name, or 0 if there is none."""
    return table_find(&throttles.domains, <uint32_t>(domain_hash(throttles, name, size) >> 32), name, size)


cdef inline bint domain_is(
    const Throttles* throttles, uint32_t number, const uint8_t* name, uint32_t size
) noexcept nogil:
    """Returns whether the record is in use for a domain with this name."""
    cdef Record* record = record_at(&throttles.domains, number)
    return record.flags & RECORD_USED and name_equals(&throttles.domains, record, name, size)


cdef inline uint32_t domain_make(Throttles* throttles, const uint8_t* name, uint32_t size) noexcept nogil:
    """Makes a domain without a rule. The caller must have checked that a record and enough blocks are free."""
    cdef uint64_t hashed = domain_hash(throttles, name, size)
    cdef uint32_t number = table_insert(&throttles.domains, <uint32_t>(hashed >> 32), name, size)
    cdef Domain* domain = domain_at(throttles, number)
    domain.salt = <uint32_t>hashed
    domain.identifiers = 0
    domain.asked = 0
    domain.accepted = 0
    domain.delayed = 0
    domain.rejected = 0
    domain.told = 0
    return number


cdef inline bint domain_is_used(const Domain* domain) noexcept nogil:
    """Returns whether the domain has to stay even without a rule."""
    return domain.identifiers != 0 or domain.asked != 0


cdef inline void domain_settle(Throttles* throttles, uint32_t number) noexcept nogil:
    """Ends a domain that has neither a rule nor identifiers."""
    cdef const Domain* domain = domain_at(throttles, number)
    if not domain_is_used(domain) and not domain.record.flags & DOMAIN_RULED:
        table_remove(&throttles.domains, number)


cdef inline void domain_unask(Throttles* throttles, uint32_t number, uint32_t count) noexcept nogil:
    """Called when Redis has decided `count` requests of a domain."""
    domain_at(throttles, number).asked -= count
    domain_settle(throttles, number)


# ---- identifiers -----------------------------------------------------------------------------------------------------

cdef inline uint32_t identifier_tag(
    const Throttles* throttles, const Domain* domain, const uint8_t* name, uint32_t size
) noexcept nogil:
    return <uint32_t>(siphash13(throttles.hash_key, name, size) >> 32) ^ domain.salt


cdef inline uint32_t identifier_find(
    const Throttles* throttles, uint32_t domain, uint32_t tag, const uint8_t* name, uint32_t size
) noexcept nogil:
    """Returns the number of the identifier with this name in the domain, or 0 if there is none."""
    cdef const Table* table = &throttles.identifiers
    cdef uint32_t slot = index_home(&table.index, tag)
    cdef uint32_t number, _step
    for _step in range(table.index.mask + 1):
        number = table.index.entries[slot].number
        if number == 0:
            return 0
        if table.index.entries[slot].tag == tag and identifier_at(throttles, number).domain == domain:
            if name_equals(table, record_at(table, number), name, size):
                return number
        slot = (slot + table.index.step) & table.index.mask
    return 0


cdef inline List identifiers_by_use(const Throttles* throttles) noexcept nogil:
    cdef Identifier* first = <Identifier*>throttles.identifiers.records
    return List(first, sizeof(Identifier), &first.links)


cdef inline Ends* recency_of(const Throttles* throttles, uint32_t number) noexcept nogil:
    """Returns the list by recency to which an identifier belongs."""
    cdef bint is_inlined = identifier_at(throttles, number).record.name_size <= IDENTIFIER_INLINE
    return &throttles.state.inlined if is_inlined else &throttles.state.chained


cdef inline void identifier_touch(Throttles* throttles, uint32_t number) noexcept nogil:
    """Makes an identifier the most recently used one."""
    cdef Ends* recency = recency_of(throttles, number)
    throttles.state.uses += 1
    identifier_at(throttles, number).used = throttles.state.uses
    if recency.first != number:
        ends_remove(identifiers_by_use(throttles), recency, number)
        ends_push(identifiers_by_use(throttles), recency, number)


cdef inline uint32_t identifier_oldest(const Throttles* throttles) noexcept nogil:
    """Returns the identifier that was used the longest time ago, or 0 if there is none."""
    cdef uint32_t inlined = throttles.state.inlined.last, chained = throttles.state.chained.last
    if inlined == 0 or chained == 0:
        return inlined + chained
    return inlined if identifier_at(throttles, inlined).used < identifier_at(throttles, chained).used else chained


cdef inline uint32_t identifier_make(
    Throttles* throttles, uint32_t domain, uint32_t tag, const uint8_t* name, uint32_t size
) noexcept nogil:
    """Makes an identifier. The caller sets its time, and must have checked that a record and enough blocks are free."""
    cdef uint32_t number = table_insert(&throttles.identifiers, tag, name, size)
    cdef Identifier* identifier = identifier_at(throttles, number)
    identifier.domain = domain
    identifier.timer.prev = 0
    domain_at(throttles, domain).identifiers += 1
    ends_push(identifiers_by_use(throttles), recency_of(throttles, number), number)
    return number


cdef inline void identifier_remove(Throttles* throttles, uint32_t number) noexcept nogil:
    cdef uint32_t domain = identifier_at(throttles, number).domain
    timers_disarm(&throttles.timers, number)
    ends_remove(identifiers_by_use(throttles), recency_of(throttles, number), number)
    table_remove(&throttles.identifiers, number)
    domain_at(throttles, domain).identifiers -= 1
    domain_settle(throttles, domain)


cdef inline Span identifier_next(const Identifier* identifier) noexcept nogil:
    return Span(identifier.next_ns, identifier.part)


cdef inline void identifier_set(
    Throttles* throttles, uint32_t number, const Rate* rate, int64_t next_ns
) noexcept nogil:
    """Sets when the next request is on time, as Redis has decided."""
    cdef Identifier* identifier = identifier_at(throttles, number)
    identifier.next_ns = next_ns
    identifier.part = 0
    identifier_touch(throttles, number)
    timers_arm(&throttles.timers, number, next_ns + rate.burst.ns + 2)


cdef inline Span identifier_count(
    Throttles* throttles, uint32_t number, bint is_new, const Rate* rate, int64_t moment_ns
) noexcept nogil:
    """Counts a request at moment_ns. Returns when the next request is on time. See section "Throttle".

    The identifier is kept until one burst after that time. Then it no longer differs from a new identifier.
    """
    cdef Identifier* identifier = identifier_at(throttles, number)
    cdef Span stored = gcra_first(rate, moment_ns) if is_new else identifier_next(identifier)
    cdef Span found
    if stored.part >= rate.parts:  # the rule has changed since
        stored.part = 0
    found = gcra_next(rate, stored, moment_ns)
    identifier.next_ns = found.ns
    identifier.part = found.part
    identifier_touch(throttles, number)
    timers_arm(&throttles.timers, number, span_plus(found, rate.burst, rate.parts).ns + 1)
    return found
