# The generic cell rate algorithm: when the next request is on time, exactly.
#
# Floor 1, header only; no clock, no state of its own. A time is a number of nanoseconds and a number of parts of one,
# of which a rate says how many there are, so that 7 requests a second are 7 million in a million seconds.
#
# Each request moves `next` on by the interval. As long as it is not ahead of now, requests are let through at once; how
# far behind now it can be is the burst. What nothing was heard of for long enough is as if it had never been there.

from libc.stdint cimport int64_t, uint32_t

cdef extern from *:
    """
    #define COUNTERD_SPAN_MAX_NS INT64_C(316224000000000000)
    """
    # Ten years: of an interval, of a burst, and what `next` can be ahead of now.
    const int64_t SPAN_MAX_NS "COUNTERD_SPAN_MAX_NS"

cdef enum:
    PARTS_MAX = 2147483647  # so that two times can be added


cdef struct Span:           # part: less than the rate's parts
    int64_t ns
    uint32_t part


cdef struct Rate:
    Span interval
    Span burst
    uint32_t parts          # of a nanosecond


cdef inline Span span_plus(Span one, Span other, uint32_t parts) noexcept nogil:
    one.ns += other.ns
    one.part += other.part
    if one.part >= parts:
        one.part -= parts
        one.ns += 1
    return one


cdef inline Span span_minus(Span one, Span other, uint32_t parts) noexcept nogil:
    one.ns -= other.ns
    if one.part < other.part:
        one.part += parts
        one.ns -= 1
    one.part -= other.part
    return one


cdef inline bint span_is_before(Span one, Span other) noexcept nogil:
    return one.ns < other.ns or (one.ns == other.ns and one.part < other.part)


cdef inline Span gcra_first(const Rate* rate, int64_t now_ns) noexcept nogil:
    """When the next request is on time, of what nothing has been heard of."""
    return span_minus(Span(now_ns, 0), rate.burst, rate.parts)


cdef inline Span gcra_next(const Rate* rate, Span stored, int64_t now_ns) noexcept nogil:
    """The same after a request at that moment. stored: what it was before, at most ten years ahead of now."""
    cdef Span first = gcra_first(rate, now_ns)
    cdef Span found = span_plus(first if span_is_before(stored, first) else stored, rate.interval, rate.parts)
    if found.ns - now_ns >= SPAN_MAX_NS:
        found.ns = now_ns + SPAN_MAX_NS
        found.part = 0
    return found
