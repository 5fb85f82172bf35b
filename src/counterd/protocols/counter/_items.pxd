# The items of a Take, as a request brings them, the limits that the server sets for them, and the decision about them.
#
# Floor 2, header only.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcmp

from counterd.engine.gcra cimport Span
from counterd.engine.permits cimport ABSENT, REFUSED, Outcome, Permits
from counterd.engine.table cimport name_tag
from counterd.protocols.counter._counters cimport Counters
from counterd.protocols.counter._limits cimport Limits, Rule, limits_find, limits_rule
from counterd.protocols.counter._rates cimport RATE_TAG, Pace

cdef enum:
    ITEMS_MAX = 16


cdef struct Item:           # an item of a request
    const uint8_t* name
    uint32_t name_size
    uint32_t tag            # of a rate: RATE_TAG is in it
    uint32_t amount
    uint32_t maximum        # of permits
    Pace pace               # of a rate; period_us is 0 for permits
    uint8_t on_death
    uint8_t is_named        # a rate whose numbers are the server's, see items_limit()
    uint8_t is_full         # of a rate, before it is granted
    uint32_t record         # 0: not found yet
    uint32_t holding        # of permits: what the connection holds already, see item_needs()
    uint32_t left           # after a grant
    Span after              # of a rate: `next` if it is granted


cdef struct Decision:       # about a Take
    Outcome outcome         # ABSENT: the server knows no numbers of a rate
    uint8_t item            # REFUSED, ABSENT: the first that was short, or that rate
    bint is_over            # REFUSED: the item is more than there ever is
    uint32_t queue          # likewise, of a waiting Take: the queue of that item
    int64_t due_ns          # likewise: when it will be there; INT64_MAX: nobody knows


# ---- items of a request --------------------------------------------------------------------------------------------

cdef inline uint32_t item_tag(const Permits* permits, const Item* item) noexcept nogil:
    return name_tag(&permits.table, item.name, item.name_size) ^ (RATE_TAG if item.pace.period_us else 0)


cdef inline bint items_repeat(const Item* items, int count) noexcept nogil:
    """Returns whether two items are the same counter, or the same rate."""
    cdef uint64_t seen = 0      # a bit for the tag of each item before: most repeated items are told from others by it
    cdef int i, j
    for i in range(count):
        if seen >> (items[i].tag & 63) & 1:
            for j in range(i):
                if items[i].tag == items[j].tag and items[i].name_size == items[j].name_size:
                    if memcmp(items[i].name, items[j].name, items[i].name_size) == 0:
                        return True
        seen |= <uint64_t>1 << (items[i].tag & 63)
    return False


# ---- limits of the server -----------------------------------------------------------------------------------------

cdef inline bint items_limit(Counters* counters, Item* items, int count, Decision* decision) noexcept nogil:
    """Applies the server's limits to items: the smaller maximum, and the server's own numbers of a rate.

    Returns False if the Take can never be granted: it asks for more than a limit, or the server has no numbers of a
    rate. The limits of items that have no record yet are looked up by name.
    """
    cdef Limits* limits = &counters.limits
    cdef const Rule* rule
    cdef uint32_t number
    cdef bint is_rate
    cdef int i
    for i in range(count):
        is_rate = items[i].pace.period_us != 0
        if items[i].record:
            rule = limits_rule(limits, &counters.permits, items[i].record, is_rate)
        else:
            number = limits_find(limits, is_rate, items[i].name, items[i].name_size)
            rule = limits.rules + number if number else NULL
        decision.item = <uint8_t>i
        if rule == NULL and items[i].is_named:
            decision.outcome = ABSENT
            return False
        if rule != NULL:
            if is_rate:
                items[i].pace = Pace(rule.period_us, rule.most, rule.burst)
            else:
                items[i].maximum = min(items[i].maximum, rule.most)
        if items[i].amount > (items[i].pace.burst if is_rate else items[i].maximum):
            decision.outcome = REFUSED
            decision.is_over = True
            return False
    return True
