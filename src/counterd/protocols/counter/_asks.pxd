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


cdef struct Ask:            # an item of a request
    const uint8_t* name
    uint32_t name_size
    uint32_t tag            # of a rate: RATE_TAG is in it
    uint32_t amount
    uint32_t maximum        # of permits
    Pace pace               # of a rate; period_us is 0 for permits
    uint8_t on_death
    uint8_t is_named        # a rate whose numbers are the server's, see asks_limit()
    uint8_t is_full         # of a rate, before it is granted
    uint32_t record         # 0: not found yet
    uint32_t holding        # of permits: what the connection holds already, see ask_needs()
    uint32_t left           # after a grant
    Span after              # of a rate: `next` if it is granted


cdef struct Verdict:        # about a Take
    Outcome outcome         # ABSENT: the server knows no numbers of a rate
    uint8_t item            # REFUSED, ABSENT: the first that was short, or that rate
    bint is_over            # REFUSED: the item is more than there ever is
    uint32_t queue          # likewise, of a waiting Take: the queue of that item
    int64_t due_ns          # likewise: when it will be there; INT64_MAX: nobody knows


# ---- items of a request --------------------------------------------------------------------------------------------

cdef inline uint32_t ask_tag(const Permits* permits, const Ask* ask) noexcept nogil:
    return name_tag(&permits.table, ask.name, ask.name_size) ^ (RATE_TAG if ask.pace.period_us else 0)


cdef inline bint asks_repeat(const Ask* asks, int count) noexcept nogil:
    """Returns whether two items are the same counter, or the same rate."""
    cdef uint64_t seen = 0      # a bit for the tag of each item before: most repeated items are told from others by it
    cdef int i, j
    for i in range(count):
        if seen >> (asks[i].tag & 63) & 1:
            for j in range(i):
                if asks[i].tag == asks[j].tag and asks[i].name_size == asks[j].name_size:
                    if memcmp(asks[i].name, asks[j].name, asks[i].name_size) == 0:
                        return True
        seen |= <uint64_t>1 << (asks[i].tag & 63)
    return False


# ---- limits of the server -----------------------------------------------------------------------------------------

cdef inline bint asks_limit(Counters* counters, Ask* asks, int count, Verdict* verdict) noexcept nogil:
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
        is_rate = asks[i].pace.period_us != 0
        if asks[i].record:
            rule = limits_rule(limits, &counters.permits, asks[i].record, is_rate)
        else:
            number = limits_find(limits, is_rate, asks[i].name, asks[i].name_size)
            rule = limits.rules + number if number else NULL
        verdict.item = <uint8_t>i
        if rule == NULL and asks[i].is_named:
            verdict.outcome = ABSENT
            return False
        if rule != NULL:
            if is_rate:
                asks[i].pace = Pace(rule.period_us, rule.most, rule.burst)
            else:
                asks[i].maximum = min(asks[i].maximum, rule.most)
        if asks[i].amount > (asks[i].pace.burst if is_rate else asks[i].maximum):
            verdict.outcome = REFUSED
            verdict.is_over = True
            return False
    return True
