# A hierarchical timing wheel: when which record is due. Its nodes are embedded in records and addressed by number.
#
# Floor 1, header only; no clock, no allocation. The moments are the caller's, in ns on a clock that does not run back.
# A tick is 2^20 ns, and a record's is the first that begins at or after its due_ns: it is never taken early, and can be
# taken at most a tick after. Eight levels of 64 slots have a place for each tick of an int64.
#
# A level's slot is 64 times as wide as one of the level below. A record is on the level of the highest digit (of six
# bits) in which its tick differs from `elapsed`, in the slot which that digit numbers. So the slots of a level lie all
# ahead of `elapsed` and before the next level's, and what is next is the lowest bit of the lowest level in use. When
# `elapsed` comes to the beginning of a slot, it shares that digit with all that is in it, and they cascade: each goes
# to a level below.
#
# A slot is not one list but eight, and what is taken from it comes from each in turn: a list can only be followed as
# fast as memory answers, and eight are followed at a time.
#
# What is armed for later than before stays where it is, and is put in its place when the slot's time comes: a lease is
# extended many times for each time that it would have ended.
#
# Invariants (`audit_timers` checks each):
# - elapsed never passes the beginning of a slot in use, and only comes to it when nothing is due and nothing cascades;
# - the slot of level 0 where `elapsed` is has everything that is due by then, but for what has yet to cascade;
# - one slot of another level may be `cascading`: `elapsed` is at its beginning, and stays there until it is empty;
# - every other slot in use begins after `elapsed`, and not after the tick of anything in it;
# - a bit is set for each slot in use, and for no other;
# - a timer that is not armed has prev 0; of one that is, prev is a number, or says which chain it is the first of.

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.debug cimport debug_check
from counterd.engine.region cimport Region, region_reserve

cdef enum:
    TICK_SHIFT = 20         # ns to ticks: 1.05 ms
    LEVEL_SHIFT = 6         # 64 slots a level, so that one word says which are in use
    SLOT_MASK = 63
    LEVELS = 8              # of 6 bits, for ticks up to 2^(63 - 20)
    SLOTS = 512
    CHAINS = 8              # lists a slot has, by the records' numbers, to be walked in turn

cdef extern from *:
    """
    #define COUNTERD_CHAIN_FIRST 0x80000000u
    """
    const uint32_t CHAIN_FIRST "COUNTERD_CHAIN_FIRST"   # in Timer.prev, before a chain; records' numbers are below
    int trailing_zeros "__builtin_ctzll"(uint64_t value) noexcept nogil     # of 0 undefined
    int leading_zeros "__builtin_clzll"(uint64_t value) noexcept nogil      # of 0 undefined


cdef struct Timer:          # 16 bytes, in each record at the same place. Zeroed memory is one that is not armed
    int64_t due_ns
    uint32_t next           # record in the same chain; 0 = the last
    uint32_t prev           # or, of the first, CHAIN_FIRST | chain: taking one out needs no search


cdef struct Wheel:          # in shared memory, plain numbers only. Zeroed memory is an empty one at tick 0
    uint64_t elapsed        # tick up to which everything due is in its place to be taken
    uint32_t armed
    uint32_t cascading      # slot whose nodes are going down; 0 = none, for there is nothing below level 0
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
    """To be called once, when the region is mapped. first: the timer of record 0; stride: bytes to the next.

    The wheel starts at now_ns: one that started at 0 would have everything that is armed cascade down from there.
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
    """The first tick that begins at or after it."""
    return 0 if due_ns <= 0 else <uint64_t>((due_ns - 1) >> TICK_SHIFT) + 1


cdef inline int64_t tick_to_ns(uint64_t tick) noexcept nogil:
    """When it begins. The last one begins at 2^63 ns, when no int64 can say so: what is due in it never is."""
    return INT64_MAX if tick > <uint64_t>INT64_MAX >> TICK_SHIFT else <int64_t>(tick << TICK_SHIFT)


cdef inline uint32_t wheel_slot(const Wheel* wheel, uint64_t tick) noexcept nogil:
    """Where it belongs: the level, then six bits for the slot of that level."""
    cdef uint32_t level
    if tick <= wheel.elapsed:
        return wheel.elapsed & SLOT_MASK
    level = <uint32_t>(63 - leading_zeros(tick ^ wheel.elapsed)) // LEVEL_SHIFT
    debug_check(level < LEVELS)
    return level << LEVEL_SHIFT | <uint32_t>(tick >> (level * LEVEL_SHIFT)) & SLOT_MASK


cdef inline uint64_t wheel_start(const Wheel* wheel, uint32_t slot) noexcept nogil:
    """The tick at which a slot begins: `elapsed` with that digit, above which they agree, and zeros below."""
    cdef uint32_t shift = (slot >> LEVEL_SHIFT) * LEVEL_SHIFT
    return ((wheel.elapsed >> shift) & ~<uint64_t>SLOT_MASK | slot & SLOT_MASK) << shift


cdef inline uint32_t wheel_next(const Wheel* wheel) noexcept nogil:
    """The slot in use that begins first; something is in one, and nothing is due or cascades."""
    cdef int level
    for level in range(LEVELS):
        if wheel.occupied[level]:
            return <uint32_t>level << LEVEL_SHIFT | <uint32_t>trailing_zeros(wheel.occupied[level])
    debug_check(False)
    return 0


cdef inline bint wheel_advance(Wheel* wheel, uint64_t now) noexcept nogil:
    """Moves on to the next slot that begins up to tick `now`, or, there being none, to `now`; whether there was one.

    Nothing is due or cascades. If the last time was later than `now`, it stays there.
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
    """A record of a slot in use, from the chain whose turn it is. The line of the one behind it is on its way since."""
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
    """Takes it out of whatever slot it is in."""
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
    """One of its chains has become empty: if all are, it is not in use."""
    cdef const uint32_t* heads = wheel.heads + slot * CHAINS
    cdef uint32_t some = 0
    cdef int chain
    for chain in range(CHAINS):
        some |= heads[chain]
    if some == 0:
        wheel.occupied[slot >> LEVEL_SHIFT] &= ~(<uint64_t>1 << (slot & SLOT_MASK))


cdef inline void timers_arm(Timers* timers, uint32_t number, int64_t due_ns) noexcept nogil:
    """The record will be due then, instead of when it was before. What is due already can be taken at once."""
    cdef Wheel* wheel = timers.wheel
    cdef Timer* timer = timer_at(timers, number)
    if timer_is_armed(timer):
        if due_ns >= timer.due_ns:  # it moves on when it is come across; no neighbour is touched until then
            timer.due_ns = due_ns
            return
        slot_remove(timers, timer)
    else:
        wheel.armed += 1
    timer.due_ns = due_ns
    slot_push(timers, wheel_slot(wheel, tick_from_ns(due_ns)), number)


cdef inline void timers_disarm(Timers* timers, uint32_t number) noexcept nogil:
    """Whether it is armed or not."""
    cdef Timer* timer = timer_at(timers, number)
    if timer_is_armed(timer):
        slot_remove(timers, timer)
        timers.wheel.armed -= 1


cdef inline int64_t timers_next_ns(const Timers* timers) noexcept nogil:
    """The first moment at which take() has something to do, in the past perhaps; -1 if nothing is armed.

    It may find nothing due then, only slots that have to cascade, or what was extended.
    """
    cdef const Wheel* wheel = timers.wheel
    if wheel.armed == 0:
        return -1
    if slot_is_used(wheel, wheel.elapsed & SLOT_MASK) or wheel.cascading and slot_is_used(wheel, wheel.cascading):
        return tick_to_ns(wheel.elapsed)
    return tick_to_ns(wheel_start(wheel, wheel_next(wheel)))


cdef inline uint32_t timers_take(Timers* timers, int64_t now_ns, int* steps) noexcept nogil:
    """A record that is due, no longer armed; or 0: if steps are left then nothing is due, otherwise ask again.

    A step is one record taken, or moved: down a level, or on if it was extended, so at most eight times for each arm.
    In which order records that are due come is left open. A moment before one that was given earlier counts as that.
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
        if tick <= wheel.elapsed or tick <= now:  # if this comes late, it need not go all the way down
            wheel.armed -= 1
            return number
        slot_push(timers, wheel_slot(wheel, tick), number)
    return 0
