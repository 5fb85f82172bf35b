# The generic cell rate algorithm (GCRA) with exact arithmetic.
#
# Floor 1 (ARCHITECTURE.md), header only. No function here reads a clock or keeps state. A time is a number of
# nanoseconds plus a number of fractional parts. The rate defines how many parts a nanosecond has, so 7 requests per
# second are exactly 7 million in a million seconds.
#
# Each request advances `next` by the interval. While `next` is not later than now, requests pass at once. It is never
# more than the burst behind now, so a key that was idle for long enough is like a new one.

from libc.stdint cimport int64_t, uint32_t

cdef extern from *:
    """
    #define COUNTERD_SPAN_MAX_NS INT64_C(316224000000000000)
    """
    # Ten years: the longest interval and burst, and the furthest that `next` can be ahead of now.
    const int64_t SPAN_MAX_NS "COUNTERD_SPAN_MAX_NS"

cdef enum:
    PARTS_MAX = 2147483647  # the sum of two numbers of parts fits into 32 bits


cdef struct Span:
    int64_t ns
    uint32_t part           # below Rate.parts


cdef struct Rate:
    Span interval
    Span burst
    uint32_t parts          # in a nanosecond


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
    """Returns `next` for a new key: now minus the burst."""
    return span_minus(Span(now_ns, 0), rate.burst, rate.parts)


cdef inline Span gcra_next(const Rate* rate, Span stored, int64_t now_ns) noexcept nogil:
    """Returns `next` after a request at now_ns, limited to ten years ahead. stored: `next` before the request."""
    cdef Span first = gcra_first(rate, now_ns)
    cdef Span found = span_plus(first if span_is_before(stored, first) else stored, rate.interval, rate.parts)
    if found.ns - now_ns >= SPAN_MAX_NS:
        found.ns = now_ns + SPAN_MAX_NS
        found.part = 0
    return found
