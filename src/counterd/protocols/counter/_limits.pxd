# Limits that the server sets: a maximum for counters, and the numbers of rates, by name or by the beginning of a name.
#
# Floor 2, header only. limits.py reads them and explains which rule applies to a name. A record remembers its rule, so
# a name is looked up when its record is made, and once after each reload.
#
# The rules of a kind are sorted by name. If a beginning B applies to a name, all names between B and it in this order
# begin with B. So the search begins at the last rule that is not after the name, and goes on with its parents.

from cpython.bytes cimport PyBytes_AS_STRING
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from counterd.engine.permits cimport Permits, permit_at
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport Record, name_begin

cdef enum:
    LIMIT_NAME_MAX = 255    # bytes of a name in a rule, as in limits.py


cdef struct Rule:           # 32 bytes
    uint64_t period_us      # of a rate
    uint32_t text           # where its name begins in Limits.texts
    uint32_t parent         # number of the longest beginning of which it is a longer one; 0: none
    uint32_t most           # permits of a counter, or units of a rate in a period
    uint32_t burst          # of a rate
    uint16_t size           # bytes of its name
    uint8_t is_prefix
    uint8_t spare[5]


cdef struct Limited:        # 8 bytes, of each record, in an array of its own
    uint32_t rule           # 0: none applies
    uint32_t generation     # of the limits in which it was found; another one: it is to be found anew


cdef struct Limits:         # this process's view
    uint32_t generation     # how often limits were loaded; 0: never, so none applies
    uint32_t permits        # rules of counters: numbers 1 to this one; those of rates follow
    uint32_t count          # rules
    Rule* rules             # by number
    uint8_t* texts
    Limited* records        # by record


cdef inline int limits_reserve(Limits* limits, Region* region, uint32_t buckets) except -1:
    region_reserve(region, b"limits", (<size_t>buckets + 1) * sizeof(Limited), <void**>&limits.records)
    return 0


cdef inline bint rule_is_after(
    const Limits* limits, const Rule* rule, const uint8_t* name, uint32_t size
) noexcept nogil:
    cdef int order = memcmp(limits.texts + rule.text, name, min(<uint32_t>rule.size, size))
    return order > 0 or order == 0 and rule.size > size


cdef inline bint rule_applies(
    const Limits* limits, const Rule* rule, const uint8_t* name, uint32_t size
) noexcept nogil:
    if rule.size > size or not rule.is_prefix and rule.size != size:
        return False
    return memcmp(limits.texts + rule.text, name, rule.size) == 0


cdef inline uint32_t limits_find(
    const Limits* limits, bint is_rate, const uint8_t* name, uint32_t size
) noexcept nogil:
    """Returns the rule of a name, or 0 if there is none. name: at most its first LIMIT_NAME_MAX bytes are read."""
    cdef uint32_t low = limits.permits if is_rate else 0
    cdef uint32_t high = limits.count if is_rate else limits.permits
    cdef uint32_t first = low, middle
    while low < high:       # rules up to number `low` are not after the name, those after `high` are
        middle = low + (high - low + 1) // 2
        if rule_is_after(limits, limits.rules + middle, name, size):
            high = middle - 1
        else:
            low = middle
    if low == first:
        return 0
    while low and not rule_applies(limits, limits.rules + low, name, size):
        low = limits.rules[low].parent
    return low


cdef inline void limits_forget(Limits* limits, uint32_t number) noexcept nogil:
    """Called for a new record. Forgets the rule of the previous record with this number."""
    limits.records[number].generation = 0


cdef inline const Rule* limits_rule(
    Limits* limits, const Permits* permits, uint32_t number, bint is_rate
) noexcept nogil:
    """Returns the rule of a record, or NULL if no rule applies."""
    cdef Limited* limited = limits.records + number
    cdef Record* record
    cdef uint8_t[LIMIT_NAME_MAX] name
    if limited.generation != limits.generation:
        record = &permit_at(permits, number).record
        name_begin(&permits.table, record, name, LIMIT_NAME_MAX)
        limited.rule = limits_find(limits, is_rate, name, record.name_size)
        limited.generation = limits.generation
    return limits.rules + limited.rule if limited.rule else NULL


cdef inline void limits_free(Limits* limits) noexcept:
    PyMem_RawFree(limits.rules)
    PyMem_RawFree(limits.texts)


cdef inline int limits_make(Limits* limits, permits, rates) except -1:
    """Allocates the rules and fills them in. If it raises MemoryError, nothing is allocated."""
    cdef size_t size = sum([len(read.name) for read in (*permits, *rates)])
    cdef size_t count = len(permits) + len(rates)
    cdef uint32_t number = 0, text = 0, above
    cdef Rule* rule
    limits.rules = <Rule*>PyMem_RawCalloc(count + 1, sizeof(Rule))
    limits.texts = <uint8_t*>PyMem_RawCalloc(size + 1, 1)
    if limits.rules == NULL or limits.texts == NULL:
        limits_free(limits)
        raise MemoryError(f"no room for {count} limits")
    limits.permits = <uint32_t>len(permits)
    limits.count = <uint32_t>count
    for read in (*permits, *rates):
        number += 1
        above = 0 if number <= limits.permits else limits.permits
        rule = limits.rules + number
        rule.text, rule.size, rule.is_prefix = text, <uint16_t>len(read.name), read.is_prefix
        rule.parent = read.parent + above if read.parent else 0
        rule.most, rule.period_us, rule.burst = read.most, read.period_us, read.burst
        memcpy(limits.texts + text, PyBytes_AS_STRING(read.name), rule.size)
        text += rule.size
    return 0
