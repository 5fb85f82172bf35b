# The sweep: ends leases periodically, with limits on its frequency, its number of tokens and its duration.
#
# Floor 2, header only. A sweep begins when a lease is due and the interval since the last sweep began is over. It
# continues from tick to tick until nothing is due or a limit is reached.

from libc.stdint cimport int64_t, uint32_t

from counterd.engine.region cimport Region, region_reserve
from counterd.engine.wheel cimport timers_next_ns, timers_take
from counterd.protocols.sentinel._tokens cimport Tokens


cdef struct SweepState:         # in the region
    int64_t next_ns             # no sweep begins earlier
    int64_t began_ns
    uint32_t taken              # tokens that the current sweep has taken
    uint32_t is_under_way


cdef struct Sweep:              # this process's view
    SweepState* state
    int64_t interval_ns
    int64_t duration_ns
    uint32_t tokens_max         # 0 = no limit


cdef inline int sweep_reserve(Sweep* sweep, Region* region) except -1:
    region_reserve(region, b"sweep", sizeof(SweepState), <void**>&sweep.state)
    return 0


cdef inline int64_t sweep_due_ns(const Sweep* sweep, const Tokens* tokens) noexcept nogil:
    """Returns when the sweep has work, which can be in the past. Returns -1 if no lease is armed."""
    cdef int64_t due_ns = timers_next_ns(&tokens.timers)
    if due_ns < 0 or sweep.state.is_under_way:
        return due_ns
    return max(due_ns, sweep.state.next_ns)


cdef inline bint sweep_begin(Sweep* sweep, const Tokens* tokens, int64_t now_ns) noexcept nogil:
    """Begins a sweep if it is time and a lease is due. Returns whether a sweep is in progress."""
    cdef SweepState* state = sweep.state
    cdef int64_t due_ns
    if state.is_under_way:
        return True
    due_ns = sweep_due_ns(sweep, tokens)
    if due_ns < 0 or due_ns > now_ns:
        return False
    state.is_under_way = True
    state.began_ns = now_ns
    state.taken = 0
    return True


cdef inline uint32_t sweep_take(Sweep* sweep, Tokens* tokens, int64_t now_ns, int* steps) noexcept nogil:
    """Returns a token that is due.

    The caller ends its lease or arms its timer again. Returns 0 if there is no more for now.
    """
    cdef uint32_t number
    if steps[0] <= 0 or sweep.tokens_max and sweep.state.taken >= sweep.tokens_max:
        return 0
    number = timers_take(&tokens.timers, now_ns, steps)
    sweep.state.taken += number != 0
    return number


cdef inline void sweep_end(Sweep* sweep) noexcept nogil:
    sweep.state.next_ns = sweep.state.began_ns + sweep.interval_ns
    sweep.state.is_under_way = False


cdef inline void sweep_pause(Sweep* sweep, int64_t now_ns, int steps) noexcept nogil:
    """Called after each slice. Ends the sweep if steps remain, because nothing more is due, or if its time is over."""
    if steps > 0 or now_ns - sweep.state.began_ns >= sweep.duration_ns:
        sweep_end(sweep)
