# The sweep: what comes by again and again to end leases, within bounds of how often, how many and how long.
#
# Floor 2, header only. A sweep begins when a lease is due and the interval since the last one's beginning is over. It
# goes on from tick to tick until nothing is due, or one of its bounds is reached.

from libc.stdint cimport int64_t, uint32_t

from counterd.engine.region cimport Region, region_reserve
from counterd.engine.wheel cimport timers_next_ns, timers_take
from counterd.protocols.sentinel._tokens cimport Tokens


cdef struct SweepState:         # in the region
    int64_t next_ns             # before which no other begins
    int64_t began_ns
    uint32_t taken              # tokens of the sweep under way
    uint32_t is_under_way


cdef struct Sweep:              # this process's view
    SweepState* state
    int64_t interval_ns
    int64_t duration_ns
    uint32_t tokens_max         # 0 = no bound


cdef inline int sweep_reserve(Sweep* sweep, Region* region) except -1:
    region_reserve(region, b"sweep", sizeof(SweepState), <void**>&sweep.state)
    return 0


cdef inline int64_t sweep_due_ns(const Sweep* sweep, const Tokens* tokens) noexcept nogil:
    """When it has something to do, in the past perhaps; -1 if no lease is armed."""
    cdef int64_t due_ns = timers_next_ns(&tokens.timers)
    if due_ns < 0 or sweep.state.is_under_way:
        return due_ns
    return max(due_ns, sweep.state.next_ns)


cdef inline bint sweep_begin(Sweep* sweep, const Tokens* tokens, int64_t now_ns) noexcept nogil:
    """Whether one is under way; it begins if it is time and something is due."""
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
    """A token whose timer has gone off, for the caller to end its lease or arm it again; or 0, that is all for now."""
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
    """Ends it after a slice, of which so many steps were left, unless there is more to do and time for it."""
    if steps > 0 or now_ns - sweep.state.began_ns >= sweep.duration_ns:
        sweep_end(sweep)
