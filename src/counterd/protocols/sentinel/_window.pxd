# The sliding windows of the sentinel protocol: counts per sample of time, and counts borrowed from the next sample.
#
# Floor 2, header only. A window is `size` samples of `length_ns` each, numbered by the caller's clock. Sample n is in
# slot n % size. The window stores the sums, so a request costs only the samples that have passed since the last one, at
# most `size`.
#
# Invariants (SentinelStore.audit checks them):
# - passed and waiting are the sums of the samples with numbers above `number - size`, and the others are 0;
# - borrowed is the initial count of the sample after `number`.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.byteorder cimport load_le64, store_le64
from counterd.engine.chains cimport Chain, Chains
from counterd.engine.debug cimport debug_check

cdef enum:
    SAMPLES_MAX = 128           # samples of a window
    SAMPLES_IN_BLOCK = 7        # samples of 8 bytes in BLOCK_PAYLOAD


cdef struct Window:
    int64_t length_ns           # of a sample
    double interval_s           # of all samples
    uint64_t number             # of the current sample, as of window_enter()
    uint64_t passed
    uint64_t waiting            # counts that were told to wait, in the sample of the request
    uint64_t borrowed
    uint32_t size               # samples


cdef struct Samples:            # of a flow
    uint64_t[SAMPLES_MAX] passed
    uint64_t[SAMPLES_MAX] waiting


cdef inline double rate(const Window* window, uint64_t sum) noexcept nogil:
    """Returns the rate per second, averaged over the window."""
    return <double>sum / window.interval_s


# ---- windows with an array of samples -------------------------------------------------------------------------------

cdef inline int window_check(uint32_t size, int64_t interval_ns) except -1:
    """Raises ValueError if a window cannot have `size` samples, at most SAMPLES_MAX, in the interval."""
    if not 0 < size <= SAMPLES_MAX:
        raise ValueError(f"a window has 1 to {SAMPLES_MAX} samples, not {size}")
    if interval_ns < size:
        raise ValueError(f"a window of {size} samples takes at least {size} ns, not {interval_ns}")
    return 0


cdef inline int window_begin(Window* window, Samples* samples, uint32_t size, int64_t interval_ns) except -1:
    """Makes an empty window.

    samples: NULL for a parameter rule, whose values have the samples. Raises the same as window_check().
    """
    cdef uint32_t slot
    window_check(size, interval_ns)
    window.length_ns = interval_ns // size
    window.interval_s = <double>(interval_ns // 1000000) / 1000.0
    window.number = 0
    window.passed = 0
    window.waiting = 0
    window.borrowed = 0
    window.size = size
    if samples != NULL:
        for slot in range(size):
            samples.passed[slot] = 0
            samples.waiting[slot] = 0
    return 0


cdef inline bint window_is(const Window* window, uint32_t size, int64_t interval_ns) noexcept nogil:
    """Returns whether a window has this size and interval."""
    return window.size == size and window.length_ns * size == interval_ns


cdef inline void window_enter(Window* window, Samples* samples, int64_t now_ns) noexcept nogil:
    """Clears the samples that have passed.

    Adds the borrowed count to the sample after the last one, if this sample is in range.
    """
    cdef uint64_t number = <uint64_t>now_ns // window.length_ns
    cdef uint64_t passed, step
    cdef uint32_t slot
    if number <= window.number:
        return
    passed = number - window.number
    for step in range(min(passed, <uint64_t>window.size)):
        slot = <uint32_t>((window.number + 1 + step) % window.size)
        window.passed -= samples.passed[slot]
        window.waiting -= samples.waiting[slot]
        samples.passed[slot] = 0
        samples.waiting[slot] = 0
    if passed <= window.size:
        samples.passed[(window.number + 1) % window.size] = window.borrowed
        window.passed += window.borrowed
    window.borrowed = 0
    window.number = number


cdef inline void window_pass(Window* window, Samples* samples, uint64_t count) noexcept nogil:
    """Adds to the current sample, after window_enter()."""
    samples.passed[window.number % window.size] += count
    window.passed += count


cdef inline bint window_borrow(Window* window, Samples* samples, uint64_t count, double threshold) noexcept nogil:
    """Borrows from the next sample, when the oldest sample will be cleared.

    Returns False if the next sample has too little.
    """
    cdef uint64_t oldest = samples.passed[(window.number + 1) % window.size]
    if rate(window, window.waiting) > threshold:
        return False
    if rate(window, window.passed) + <double>(count + window.borrowed) - <double>oldest > threshold:
        return False
    window.borrowed += count
    samples.waiting[window.number % window.size] += count
    window.waiting += count
    return True


# ---- tallies: windows with samples in blocks ------------------------------------------------------------------------

cdef struct Tally:              # of one value of a parameter
    Chain samples
    uint64_t number             # of the current sample, as of tally_enter()
    uint64_t passed


cdef inline uint32_t tally_blocks(uint32_t size) noexcept nogil:
    return (size + SAMPLES_IN_BLOCK - 1) // SAMPLES_IN_BLOCK


cdef inline uint8_t* tally_sample(const Chains* chains, const Tally* tally, uint32_t slot) noexcept nogil:
    """Returns where the sample in a slot is stored: eight bytes, little-endian."""
    cdef uint32_t block = tally.samples.first, _step
    for _step in range(slot // SAMPLES_IN_BLOCK):
        block = chains.blocks[block].next
    debug_check(block != 0)
    return chains.blocks[block].payload + 8 * (slot % SAMPLES_IN_BLOCK)


cdef inline void tally_enter(
    const Chains* chains, Tally* tally, const Window* window, int64_t now_ns
) noexcept nogil:
    """Clears the samples that have passed. window: the window of the rule, for its lengths."""
    cdef uint64_t number = <uint64_t>now_ns // window.length_ns
    cdef uint64_t step
    cdef uint8_t* sample
    if number <= tally.number:
        return
    for step in range(min(number - tally.number, <uint64_t>window.size)):
        if tally.passed == 0:
            break
        sample = tally_sample(chains, tally, <uint32_t>((tally.number + 1 + step) % window.size))
        tally.passed -= load_le64(sample)
        store_le64(sample, 0)
    tally.number = number


cdef inline void tally_add(const Chains* chains, Tally* tally, const Window* window, int64_t count) noexcept nogil:
    """Adds to the current sample, after tally_enter(). A negative count undoes an addition in the same sample."""
    cdef uint8_t* sample = tally_sample(chains, tally, <uint32_t>(tally.number % window.size))
    store_le64(sample, load_le64(sample) + <uint64_t>count)
    tally.passed += <uint64_t>count


cdef inline int64_t tally_ends(const Tally* tally, const Window* window) noexcept nogil:
    """Returns when all samples will have passed."""
    return <int64_t>(tally.number + window.size) * window.length_ns
