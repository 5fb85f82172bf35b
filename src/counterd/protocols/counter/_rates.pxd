# Rates: so many units in a period, by GCRA, exact to the microsecond. A rate's numbers are those of each request.
#
# Floor 2, header only. Rates are records of the counters' table, under tags of their own, so that a rate and a counter
# can have the same name. A record remembers when the next unit would be on time, `next`. Whoever takes n units moves it
# n intervals on, and may if it is not later than now then. It is never more than the burst behind now; a rate that is
# that far behind is full, as a new one is, and its record is freed.
#
# Invariant: the timer of every rate is armed, for when it is full, unless it is pinned.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.debug cimport debug_check
from counterd.engine.gcra cimport SPAN_MAX_NS, Span, span_is_before, span_minus, span_plus
from counterd.engine.permits cimport Permit
from counterd.engine.wheel cimport Timer

cdef extern from *:
    """
    typedef unsigned __int128 counterd_wide;
    #define COUNTERD_RATE_TAG 0x5bd1e995u
    """
    ctypedef unsigned long long wide "counterd_wide"    # 128 bits: a product of two numbers of 64
    const uint32_t RATE_TAG "COUNTERD_RATE_TAG"         # makes the tag of a rate from that of its name

cdef enum:
    FLAG_RATE = 2               # in Record.flags, beside FLAG_IN_RING
    FLAG_PINNED = 4             # the record has a queue, so it is not freed
    FLAG_AWAITED = 8            # somebody is in that queue
    NS_PER_US = 1000
    LIMIT_MAX = 2147483647      # units in a period: parts of a nanosecond, see gcra.pxd


cdef struct RateRecord:     # 64 bytes
    Permit permit           # of which nobody holds anything
    uint32_t part           # of `next`
    int64_t next_ns


cdef struct RateState:      # 40 bytes, of each record that is a rate, in an array of its own
    Timer timer             # armed for when it is full
    uint64_t full_since     # number of the last grant before which it was full
    uint64_t period_us      # of the last request
    uint32_t limit          # likewise; `next` has so many parts in a nanosecond
    uint32_t burst          # likewise


cdef struct Rate:           # this process's view
    RateRecord* record
    RateState* state


cdef struct Pace:           # the numbers of a request
    uint64_t period_us
    uint32_t limit          # units in a period
    uint32_t burst          # units that may be taken at once after a long rest


cdef inline Span pace_span(const Pace* pace, uint64_t units) noexcept nogil:
    """Returns in which time a number of units comes back, at most ten years."""
    cdef wide parts = <wide>units * (pace.period_us * NS_PER_US)
    cdef uint64_t few = <uint64_t>parts
    if few == parts and few // pace.limit < <uint64_t>SPAN_MAX_NS:  # as a rule: divisions of 128 bits take long
        return Span(<int64_t>(few // pace.limit), <uint32_t>(few % pace.limit))
    if parts // pace.limit >= <wide>SPAN_MAX_NS:
        return Span(SPAN_MAX_NS, 0)
    return Span(<int64_t>(parts // pace.limit), <uint32_t>(parts % pace.limit))


cdef inline Span pace_first(const Pace* pace, int64_t now_ns) noexcept nogil:
    """Returns `next` of a rate that is full."""
    return span_minus(Span(now_ns, 0), pace_span(pace, pace.burst), pace.limit)


cdef inline Span rate_next(const Rate* rate, const Pace* pace, int64_t now_ns) noexcept nogil:
    """Returns `next` before a request with these numbers. `next` is never further behind now than the burst."""
    cdef Span first = pace_first(pace, now_ns)
    cdef Span stored = Span(rate.record.next_ns, rate.record.part)
    if rate.state.limit != pace.limit:    # in the parts of this request, never earlier
        stored.part = <uint32_t>((<uint64_t>stored.part * pace.limit + rate.state.limit - 1) // rate.state.limit)
        if stored.part >= pace.limit:
            stored.part = 0
            stored.ns += 1
    return first if span_is_before(stored, first) else stored


cdef inline void rate_set(const Rate* rate, const Pace* pace, Span next) noexcept nogil:
    rate.record.next_ns = next.ns
    rate.record.part = next.part
    rate.state.period_us = pace.period_us
    rate.state.limit = pace.limit
    rate.state.burst = pace.burst


cdef inline bint rate_is_full(const Rate* rate, const Pace* pace, int64_t now_ns) noexcept nogil:
    cdef Span first = pace_first(pace, now_ns)
    cdef Span next = rate_next(rate, pace, now_ns)
    return next.ns == first.ns and next.part == first.part


cdef inline Span rate_after(const Rate* rate, const Pace* pace, uint32_t units, int64_t now_ns) noexcept nogil:
    """Returns `next` after a number of units was taken. The units are available from that time on, see span_ceil()."""
    return span_plus(rate_next(rate, pace, now_ns), pace_span(pace, units), pace.limit)


cdef inline int64_t span_ceil(Span span) noexcept nogil:
    """Returns the first nanosecond that is not earlier than a time."""
    return span.ns + (span.part != 0)


cdef inline uint32_t span_left(Span next, const Pace* pace, int64_t now_ns) noexcept nogil:
    """Returns how many units are available, if `next` is at most the burst behind now."""
    cdef uint64_t period_ns = pace.period_us * NS_PER_US
    cdef Span ahead
    cdef wide parts
    if span_is_before(Span(now_ns, 0), next):
        return 0
    ahead = span_minus(Span(now_ns, 0), next, pace.limit)
    parts = <wide>ahead.ns * pace.limit + ahead.part
    if <uint64_t>parts == parts:
        return <uint32_t>min(<uint64_t>pace.burst, <uint64_t>parts // period_ns)
    return <uint32_t>min(<wide>pace.burst, parts // period_ns)


cdef inline uint32_t rate_left(const Rate* rate, const Pace* pace, int64_t now_ns) noexcept nogil:
    """Returns how many units are available."""
    return span_left(rate_next(rate, pace, now_ns), pace, now_ns)


cdef inline void rate_adjust(
    const Rate* rate, const Pace* pace, uint32_t taken, uint32_t used, int64_t now_ns
) noexcept nogil:
    """Replaces the units that were taken by the units that were used, more or fewer.

    `next` is at most ten years ahead.
    """
    cdef Span next = rate_next(rate, pace, now_ns)
    cdef Span first = pace_first(pace, now_ns)
    if used >= taken:
        next = span_plus(next, pace_span(pace, used - taken), pace.limit)
        if next.ns - now_ns >= SPAN_MAX_NS:
            next = Span(now_ns + SPAN_MAX_NS, 0)
    else:
        next = span_minus(next, pace_span(pace, taken - used), pace.limit)
        if span_is_before(next, first):
            next = first
    rate_set(rate, pace, next)


cdef inline int64_t rate_full_ns(const Rate* rate, const Pace* pace) noexcept nogil:
    """Returns when the rate will be full if nobody takes anything."""
    return span_plus(Span(rate.record.next_ns, rate.record.part), pace_span(pace, pace.burst), pace.limit).ns + 1
