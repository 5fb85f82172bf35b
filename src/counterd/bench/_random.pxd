# Random numbers, and what is drawn from them: names, hold times, arrivals.
#
# Floor 5, header only. A stream is one 64-bit word (SplitMix64): good enough to choose names with, and a few
# nanoseconds a draw, so that the load process is not what is measured.

from libc.math cimport exp, expm1, log, log1p
from libc.stdint cimport uint32_t, uint64_t


cdef inline uint64_t random_next(uint64_t* state) noexcept nogil:
    state[0] += <uint64_t>0x9e3779b97f4a7c15
    return random_mixed(state[0])


cdef inline uint64_t random_mixed(uint64_t mixed) noexcept nogil:
    """Returns a mixed number. Each bit of the result depends on all bits of the argument."""
    mixed = (mixed ^ (mixed >> 30)) * <uint64_t>0xbf58476d1ce4e5b9
    mixed = (mixed ^ (mixed >> 27)) * <uint64_t>0x94d049bb133111eb
    return mixed ^ (mixed >> 31)


cdef inline uint32_t random_below(uint64_t* state, uint32_t bound) noexcept nogil:
    """Returns 0 to bound - 1. The probabilities differ by less than one in 2^32."""
    return <uint32_t>(((random_next(state) >> 32) * bound) >> 32)


cdef inline double random_unit(uint64_t* state) noexcept nogil:
    """Returns a number above 0 and at most 1."""
    return ((random_next(state) >> 11) + 1) * (1.0 / 9007199254740992.0)


cdef inline double random_exponential(uint64_t* state) noexcept nogil:
    """Returns an exponentially distributed number with the mean 1."""
    return -log(random_unit(state))


# Zipf's law over ranks 1 to n, weight rank^-exponent, by rejection-inversion: Hoermann and Derflinger, "Rejection-
# inversion to generate variates from monotone discrete distributions", 1996. Exact for any n, without a table.

cdef struct Zipf:
    double exponent
    double low              # integral(1.5) - 1
    double high             # integral(n + 0.5)
    double sure             # distance below which a rank is taken without looking further
    uint32_t ranks


cdef inline double zipf_integral(double exponent, double x) noexcept nogil:
    """Returns the integral of t^-exponent, up to a constant. The result is continuous at the exponent 1."""
    cdef double power = (1 - exponent) * log(x)
    return log(x) * (expm1(power) / power if power > 1e-8 or power < -1e-8 else 1 + power / 2)


cdef inline double zipf_inverse(double exponent, double area) noexcept nogil:
    cdef double power = area * (1 - exponent)
    if power < -1:
        power = -1
    return exp(area * (log1p(power) / power if power > 1e-8 or power < -1e-8 else 1 - power / 2))


cdef inline void zipf_begin(Zipf* zipf, double exponent, uint32_t ranks) noexcept nogil:
    zipf.exponent = exponent
    zipf.ranks = ranks
    zipf.low = zipf_integral(exponent, 1.5) - 1
    zipf.high = zipf_integral(exponent, ranks + 0.5)
    zipf.sure = 2 - zipf_inverse(exponent, zipf_integral(exponent, 2.5) - exp(-exponent * log(2)))


cdef inline uint32_t zipf_next(const Zipf* zipf, uint64_t* state) noexcept nogil:
    """Returns a rank minus 1: 0 is the most frequent rank."""
    cdef double area, x
    cdef uint32_t rank
    while True:
        area = zipf.high + random_unit(state) * (zipf.low - zipf.high)
        x = zipf_inverse(zipf.exponent, area)
        rank = 1 if x < 1.5 else <uint32_t>(x + 0.5)
        if rank > zipf.ranks:
            rank = zipf.ranks
        if rank - x <= zipf.sure:
            return rank - 1
        if area >= zipf_integral(zipf.exponent, rank + 0.5) - exp(-zipf.exponent * log(rank)):
            return rank - 1
