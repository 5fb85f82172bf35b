# A hierarchical timing wheel, which finds the records that are due. Timers are embedded in records and addressed by
# number.
#
# Floor 1, header only; no clock, no allocation. The caller passes times in ns on a clock that never goes back. A tick
# is 2^20 ns. A record's tick is the first that begins at or after its due_ns, so a record is never taken early, and can
# be taken at most one tick late. Eight levels of 64 slots have a place for each tick of an int64.
#
# A slot is 64 times as wide as a slot of the level below. A record's level is that of the highest digit (of six bits)
# in which its tick differs from `elapsed`; that digit is its slot. So all slots in use of a level are later than
# `elapsed` and earlier than those of the next level, and the next slot is the lowest bit of the lowest level in use.
# When `elapsed` reaches the beginning of a slot, the slot's records agree with it in that digit, and they cascade: each
# moves to a lower level.
#
# A slot has eight lists (chains), and records are taken from each in turn. A single list can be followed only at the
# speed of memory latency; with eight lists, eight cache misses overlap.
#
# A record that is armed again for a later time stays where it is, and moves when its slot's time comes, because a lease
# is extended many times before it ends.
#
# Invariants (`audit_timers` checks each):
# - elapsed never passes the beginning of a slot in use, and reaches it only when nothing is due and nothing cascades;
# - the slot of level 0 at `elapsed` contains every record that is due by then, except those that have yet to cascade;
# - one slot of another level may be `cascading`: `elapsed` is at its beginning, and stays there until it is empty;
# - every other slot in use begins after `elapsed`, and not after the tick of any record in it;
# - a bit is set for each slot in use, and for no other;
# - prev of a timer is 0 if it is not armed, else a record's number, or CHAIN_FIRST | the chain that it is the first of.

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.debug cimport debug_check
from counterd.engine.region cimport Region, region_reserve

cdef enum:
    TICK_SHIFT = 20         # ns to ticks: 1.05 ms
    LEVEL_SHIFT = 6         # 64 slots in a level, so one word has a bit for each
    SLOT_MASK = 63
    LEVELS = 8              # of 6 bits, for ticks up to 2^(63 - 20)
    SLOTS = 512
    CHAINS = 8              # lists in a slot; a record is in list number % CHAINS

cdef extern from *:
    """
    #define COUNTERD_CHAIN_FIRST 0x80000000u
    """
    const uint32_t CHAIN_FIRST "COUNTERD_CHAIN_FIRST"   # marks a chain in Timer.prev; records' numbers are lower
    int trailing_zeros "__builtin_ctzll"(uint64_t value) noexcept nogil     # of 0 undefined
    int leading_zeros "__builtin_clzll"(uint64_t value) noexcept nogil      # of 0 undefined


cdef struct Timer:          # 16 bytes, at the same offset in each record. Zeroed memory is a timer that is not armed
    int64_t due_ns
    uint32_t next           # record in the same chain; 0 = this is the last
    uint32_t prev           # record in the same chain; for the first, CHAIN_FIRST | chain, so removal needs no search


cdef struct Wheel:          # in the region. Zeroed memory is an empty wheel at tick 0
    uint64_t elapsed        # every record due by this tick is in the slot it is taken from, or cascading
    uint32_t armed
    uint32_t cascading      # the slot whose records move down; 0 = none, because level 0 does not cascade
    uint64_t occupied[LEVELS]
    uint64_t turn           # chains that were looked at so far
    uint32_t heads[SLOTS * CHAINS]  # first record of each chain


cdef struct Timers:         # this process's view
    Wheel* wheel
    uint8_t* base           # where the timer of record 0 would be
    size_t stride           # bytes from a record to the next


cdef inline int timers_reserve(Timers* timers, Region* region, const char* name) except -1:
    region_reserve(region, name, sizeof(Wheel), <void**>&timers.wheel)
    return 0


cdef inline void timers_begin(Timers* timers, void* first, size_t stride, int64_t now_ns) noexcept nogil:
    """Call this once, after the region was mapped. first: the timer of record 0. stride: how many bytes after a timer
    the timer of the next record begins.

    The wheel starts at now_ns. If it started at 0, the first timers would cascade from the highest levels.
    """
    timers.base = <uint8_t*>first
    timers.stride = stride
    timers.wheel.elapsed = <uint64_t>now_ns >> TICK_SHIFT if now_ns > 0 else 0


cdef inline Timer* timer_at(const Timers* timers, uint32_t number) noexcept nogil:
    debug_check(0 < number < CHAIN_FIRST)
    return <Timer*>(timers.base + <size_t>number * timers.stride)


cdef inline bint timer_is_armed(const Timer* timer) noexcept nogil:
    return timer.prev != 0


cdef inline uint64_t tick_from_ns(int64_t due_ns) noexcept nogil:
    """Returns the first tick that begins at or after due_ns."""
    return 0 if due_ns <= 0 else <uint64_t>((due_ns - 1) >> TICK_SHIFT) + 1


cdef inline int64_t tick_to_ns(uint64_t tick) noexcept nogil:
    """Returns when a tick begins.

    The last tick begins at 2^63 ns, which does not fit into an int64, so its records are never due.
    """
    return INT64_MAX if tick > <uint64_t>INT64_MAX >> TICK_SHIFT else <int64_t>(tick << TICK_SHIFT)


cdef inline uint32_t wheel_slot(const Wheel* wheel, uint64_t tick) noexcept nogil:
    """Returns the slot of a tick: the level, and six bits for the slot within the level."""
    cdef uint32_t level
    if tick <= wheel.elapsed:
        return wheel.elapsed & SLOT_MASK
    level = <uint32_t>(63 - leading_zeros(tick ^ wheel.elapsed)) // LEVEL_SHIFT
    debug_check(level < LEVELS)
    return level << LEVEL_SHIFT | <uint32_t>(tick >> (level * LEVEL_SHIFT)) & SLOT_MASK


cdef inline uint64_t wheel_start(const Wheel* wheel, uint32_t slot) noexcept nogil:
    """Returns the tick at which a slot begins: `elapsed` with the slot's digit, and zeros in the lower digits."""
    cdef uint32_t shift = (slot >> LEVEL_SHIFT) * LEVEL_SHIFT
    return ((wheel.elapsed >> shift) & ~<uint64_t>SLOT_MASK | slot & SLOT_MASK) << shift


cdef inline uint32_t wheel_next(const Wheel* wheel) noexcept nogil:
    """Returns the slot in use that begins first. There must be such a slot, and nothing may be due or cascading."""
    cdef int level
    for level in range(LEVELS):
        if wheel.occupied[level]:
            return <uint32_t>level << LEVEL_SHIFT | <uint32_t>trailing_zeros(wheel.occupied[level])
    debug_check(False)
    return 0


cdef inline bint wheel_advance(Wheel* wheel, uint64_t now) noexcept nogil:
    """If the next slot in use begins by tick `now`, advances to this slot and returns True. Otherwise advances to
    `now`.

    Nothing may be due or cascading. `elapsed` never goes back.
    """
    cdef uint32_t slot
    cdef uint64_t start
    if wheel.armed:
        slot = wheel_next(wheel)
        start = wheel_start(wheel, slot)
        debug_check(start > wheel.elapsed)
        if start <= now:
            wheel.elapsed = start
            wheel.cascading = slot if slot > SLOT_MASK else 0
            return True
    if wheel.elapsed < now:
        wheel.elapsed = now
    return False


cdef inline bint slot_is_used(const Wheel* wheel, uint32_t slot) noexcept nogil:
    return wheel.occupied[slot >> LEVEL_SHIFT] >> (slot & SLOT_MASK) & 1


cdef inline uint32_t slot_first(Wheel* wheel, uint32_t slot) noexcept nogil:
    """Returns a record of a slot in use, from the chain that is next.

    Earlier calls have fetched the cache line of this record.
    """
    cdef const uint32_t* heads = wheel.heads + slot * CHAINS
    cdef uint32_t number
    cdef int _chain
    debug_check(slot_is_used(wheel, slot))
    for _chain in range(CHAINS):
        number = heads[wheel.turn % CHAINS]
        wheel.turn += 1
        if number:
            return number
    debug_check(False)
    return 0


cdef inline void slot_push(Timers* timers, uint32_t slot, uint32_t number) noexcept nogil:
    cdef Wheel* wheel = timers.wheel
    cdef Timer* timer = timer_at(timers, number)
    cdef uint32_t chain = slot * CHAINS + number % CHAINS
    cdef uint32_t head = wheel.heads[chain]
    timer.next = head
    timer.prev = CHAIN_FIRST | chain
    if head:
        timer_at(timers, head).prev = number
    wheel.heads[chain] = number
    wheel.occupied[slot >> LEVEL_SHIFT] |= <uint64_t>1 << (slot & SLOT_MASK)


cdef inline void slot_remove(Timers* timers, Timer* timer) noexcept nogil:
    """Removes an armed timer from its slot."""
    cdef Wheel* wheel = timers.wheel
    cdef uint32_t chain
    debug_check(timer_is_armed(timer))
    if timer.next:
        timer_at(timers, timer.next).prev = timer.prev
    if timer.prev & CHAIN_FIRST:
        chain = timer.prev & ~CHAIN_FIRST
        wheel.heads[chain] = timer.next
        if timer.next == 0:
            slot_vacate(wheel, chain // CHAINS)
    else:
        timer_at(timers, timer.prev).next = timer.next
    timer.prev = 0


cdef inline void slot_vacate(Wheel* wheel, uint32_t slot) noexcept nogil:
    """Called when a chain has become empty. Clears the bit of the slot if all its chains are empty."""
    cdef const uint32_t* heads = wheel.heads + slot * CHAINS
    cdef uint32_t some = 0
    cdef int chain
    for chain in range(CHAINS):
        some |= heads[chain]
    if some == 0:
        wheel.occupied[slot >> LEVEL_SHIFT] &= ~(<uint64_t>1 << (slot & SLOT_MASK))


cdef inline void timers_arm(Timers* timers, uint32_t number, int64_t due_ns) noexcept nogil:
    """Makes the record due at due_ns.

    An earlier due time of the record is replaced. A record with a past due_ns can be taken at once.
    """
    cdef Wheel* wheel = timers.wheel
    cdef Timer* timer = timer_at(timers, number)
    if timer_is_armed(timer):
        if due_ns >= timer.due_ns:  # it moves when its slot's time comes; until then no neighbour is touched
            timer.due_ns = due_ns
            return
        slot_remove(timers, timer)
    else:
        wheel.armed += 1
    timer.due_ns = due_ns
    slot_push(timers, wheel_slot(wheel, tick_from_ns(due_ns)), number)


cdef inline void timers_disarm(Timers* timers, uint32_t number) noexcept nogil:
    """Disarms a record's timer if it is armed."""
    cdef Timer* timer = timer_at(timers, number)
    if timer_is_armed(timer):
        slot_remove(timers, timer)
        timers.wheel.armed -= 1


cdef inline int64_t timers_next_ns(const Timers* timers) noexcept nogil:
    """Returns when timers_take() has work, which can be in the past. Returns -1 if no timer is armed.

    At that time there may be no record that is due, only slots to cascade or records that were extended.
    """
    cdef const Wheel* wheel = timers.wheel
    if wheel.armed == 0:
        return -1
    if slot_is_used(wheel, wheel.elapsed & SLOT_MASK) or wheel.cascading and slot_is_used(wheel, wheel.cascading):
        return tick_to_ns(wheel.elapsed)
    return tick_to_ns(wheel_start(wheel, wheel_next(wheel)))


cdef inline uint32_t timers_take(Timers* timers, int64_t now_ns, int* steps) noexcept nogil:
    """Disarms a due record and returns it. Returns 0 if nothing is due (*steps is then not 0) or if the caller has to
    call again (*steps is 0).

    A step is one record that is taken, or moved down a level, or moved to a later slot because it was extended. A
    record is moved at most eight times each time that its timer is armed. The order of due records is undefined. If
    now_ns is earlier than in a previous call, the previous time is used.
    """
    cdef Wheel* wheel = timers.wheel
    cdef uint64_t now = <uint64_t>now_ns >> TICK_SHIFT if now_ns > 0 else 0
    cdef uint64_t tick
    cdef uint32_t slot, number
    cdef Timer* timer
    while steps[0] > 0:     # each time round costs one
        slot = wheel.elapsed & SLOT_MASK
        if not slot_is_used(wheel, slot):
            if wheel.cascading and not slot_is_used(wheel, wheel.cascading):
                wheel.cascading = 0
            if wheel.cascading == 0 and not wheel_advance(wheel, now):
                return 0
            slot = wheel.cascading if wheel.cascading else wheel.elapsed & SLOT_MASK
        steps[0] -= 1
        number = slot_first(wheel, slot)
        timer = timer_at(timers, number)
        slot_remove(timers, timer)
        tick = tick_from_ns(timer.due_ns)
        if tick <= wheel.elapsed or tick <= now:  # if called late, the record need not cascade to level 0
            wheel.armed -= 1
            return number
        slot_push(timers, wheel_slot(wheel, tick), number)
    return 0
