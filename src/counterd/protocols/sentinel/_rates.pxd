# The rates that rules allow, for FLOW and PARAM. Each value of a parameter has its own window.
#
# Floor 2, header only. The windows use the caller's monotonic clock. A hot item is a value with its own limit, which is
# kept as long as its rule lists it.
#
# Invariants (audit_values checks each):
# - a value is armed for the end of its window, or it is a hot item and in the list of its rule;
# - there are at most `items_max` hot items, and at most `values_max` other values.

from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd.engine.byteorder cimport store_le32
from counterd.engine.chains cimport BLOCK_PAYLOAD, Chains, chain_free, chain_write
from counterd.engine.debug cimport debug_check
from counterd.engine.pool cimport pool_left
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport (
    Record, Table, name_blocks, name_tag, record_at, table_begin, table_find, table_insert, table_remove, table_reserve,
)
from counterd.engine.wheel cimport (
    Timer, Timers, timers_arm, timers_begin, timers_disarm, timers_reserve, timers_take,
)
from counterd.protocols.sentinel._messages cimport (
    BLOCKED, NOT_AVAILABLE, OK, SHOULD_WAIT, TOO_MANY_REQUESTS, VALUE_SIZE_MAX, Answer, value_size, value_unify,
)
from counterd.protocols.sentinel._rules cimport (
    Flow, Param, Rules, after, flow_at, namespace_ask, param_at, rule_threshold,
)
from counterd.protocols.sentinel._window cimport (
    SAMPLES_MAX, Tally, Window, rate, tally_add, tally_blocks, tally_ends, tally_enter, window_borrow, window_enter,
    window_pass,
)

cdef enum:
    VALUE_INLINE = 24           # bytes of a value's key in its record
    SERIAL_SIZE = 4             # bytes of the rule's serial, before the value in its key
    KEY_MAX = 1028              # SERIAL_SIZE + VALUE_SIZE_MAX
    ITEMS_MAX = 65536           # hot items of all rules
    HOT = 1                     # in Record.flags: the value is a hot item
    SAMPLE_BLOCKS_MAX = 19      # blocks for SAMPLES_MAX samples
    CATCH_UP_STEPS = 64         # expired values that a request removes, to make room for another

cdef extern from *:
    """
    static const unsigned char counterd_no_samples[19 * 60];
    """
    const uint8_t* NO_SAMPLES "counterd_no_samples"     # SAMPLE_BLOCKS_MAX * BLOCK_PAYLOAD


cdef struct Value:              # 88 bytes; its name is the rule's serial and the value as on the wire
    Record record
    uint8_t[VALUE_INLINE] key
    Timer timer
    Tally tally
    double threshold            # of a hot item
    uint32_t blocks             # of its samples
    uint32_t next_item          # of a hot item: the next one of the same rule


cdef struct RatesState:         # in the region
    uint32_t serial             # of the last rule of parameters
    uint32_t hot                # hot items


cdef struct Rates:              # this process's view
    RatesState* state
    Rules* rules
    Table values
    Timers timers
    double qps_max              # of FLOW and PARAM in each namespace
    uint32_t values_max         # without hot items
    uint32_t items_max          # hot items of all rules


# ---- region --------------------------------------------------------------------------------------------------------

cdef inline int rates_reserve(
    Rates* rates, Region* region, Rules* rules, uint32_t values_max, uint32_t items_max
) except -1:
    """Reserves memory for `values_max` values and `items_max` hot items. Raises ValueError if these are too many."""
    if items_max > ITEMS_MAX or values_max > <uint32_t>0xffffffff - items_max:
        raise ValueError(f"there can be {ITEMS_MAX} hot items, not {items_max}; and {values_max} values")
    rates.rules = rules
    rates.values_max = values_max
    rates.items_max = items_max
    region_reserve(region, b"rates", sizeof(RatesState), <void**>&rates.state)
    table_reserve(&rates.values, region, b"values", values_max + items_max, sizeof(Value), VALUE_INLINE)
    timers_reserve(&rates.timers, region, b"values' wheel")
    return 0


cdef inline void rates_begin(Rates* rates, const uint64_t* key, const Chains* chains, int64_t now_ns) noexcept nogil:
    """Call this once, after the region was mapped."""
    debug_check(SAMPLE_BLOCKS_MAX == tally_blocks(SAMPLES_MAX) and sizeof(Value) == 88)
    table_begin(&rates.values, key, chains)
    timers_begin(&rates.timers, &(<Value*>rates.values.records).timer, sizeof(Value), now_ns)


cdef inline Value* value_at(const Rates* rates, uint32_t number) noexcept nogil:
    return <Value*>record_at(&rates.values, number)


# ---- values --------------------------------------------------------------------------------------------------------

cdef inline uint32_t value_key(uint8_t* target, const Param* param, const uint8_t* data, uint32_t size) noexcept nogil:
    """Writes the table's key for a value of a rule, at most KEY_MAX bytes. Returns the size of the key."""
    store_le32(target, param.serial)
    memcpy(target + SERIAL_SIZE, data, size)
    value_unify(target + SERIAL_SIZE)
    return SERIAL_SIZE + size


cdef inline bint values_have_room(const Rates* rates) noexcept nogil:
    """Returns whether there may be another value that is not a hot item."""
    return rates.values.pool.used - rates.state.hot < rates.values_max


cdef inline uint32_t value_create(
    Rates* rates, uint32_t tag, const uint8_t* key, uint32_t size, const Window* window
) noexcept nogil:
    """Makes a value with an empty window.

    The value's timer is not armed. Returns 0 if there is no memory for the value.
    """
    cdef Table* table = &rates.values
    cdef uint32_t blocks = tally_blocks(window.size)
    cdef uint32_t number
    cdef Value* value
    if pool_left(table.pool) == 0 or pool_left(table.chains.pool) < blocks + name_blocks(table, size):
        return 0
    number = table_insert(table, tag, key, size)
    value = value_at(rates, number)
    value.timer.prev = 0
    value.tally.number = 0
    value.tally.passed = 0
    value.blocks = blocks
    chain_write(&table.chains, &value.tally.samples, 0, NO_SAMPLES, blocks * BLOCK_PAYLOAD)
    return number


cdef inline void value_remove(Rates* rates, uint32_t number) noexcept nogil:
    cdef Value* value = value_at(rates, number)
    timers_disarm(&rates.timers, number)
    chain_free(&rates.values.chains, &value.tally.samples, value.blocks)
    table_remove(&rates.values, number)


cdef inline int values_expire(Rates* rates, int64_t now_ns, int steps) noexcept nogil:
    """Removes values whose windows have ended. Returns how many of the steps remain."""
    cdef uint32_t number = timers_take(&rates.timers, now_ns, &steps)
    while number:
        value_remove(rates, number)
        number = timers_take(&rates.timers, now_ns, &steps)
    return steps


cdef inline uint32_t value_find(
    const Rates* rates, const Param* param, const uint8_t* data, uint32_t size
) noexcept nogil:
    """Returns the record of a value, or 0 if there is none."""
    cdef uint8_t[KEY_MAX] key
    size = value_key(key, param, data, size)
    return table_find(&rates.values, name_tag(&rates.values, key, size), key, size)


cdef inline void value_arm(Rates* rates, uint32_t number, int64_t due_ns, Answer* answer) noexcept nogil:
    timers_arm(&rates.timers, number, due_ns)
    answer.due_ns = min(answer.due_ns, due_ns)


cdef inline uint32_t value_enter(
    Rates* rates, const Param* param, const uint8_t* data, uint32_t size, int64_t now_ns, int64_t* budget,
    Answer* answer
) noexcept nogil:
    """Returns the record of a value, or makes it. Returns 0 if there is no room for another value."""
    cdef uint8_t[KEY_MAX] key
    cdef uint32_t tag, number
    size = value_key(key, param, data, size)
    tag = name_tag(&rates.values, key, size)
    number = table_find(&rates.values, tag, key, size)
    if number:
        return number
    if not values_have_room(rates):
        budget[0] -= CATCH_UP_STEPS - values_expire(rates, now_ns, CATCH_UP_STEPS)
        if not values_have_room(rates):  # the steps may only have moved values in the wheel
            return 0
    number = value_create(rates, tag, key, size, &param.window)
    if number:
        value_arm(rates, number, after(now_ns, param.window.length_ns), answer)
    return number


# ---- hot items -----------------------------------------------------------------------------------------------------

cdef inline int value_check(const uint8_t* data, size_t size) except -1:
    """Raises ValueError if the bytes are not a valid value in the form of the wire."""
    if not 0 < size <= VALUE_SIZE_MAX or size != value_size(data, <uint32_t>size):
        raise ValueError(f"a value of {size} bytes is invalid: its tag tells the size, 1 to {VALUE_SIZE_MAX}")
    return 0


cdef inline int item_heat(Rates* rates, Param* param, const uint8_t* data, uint32_t size, double limit) except -1:
    """Makes a value a hot item of its rule, or changes the limit of a hot item.

    Raises ValueError if there is no room.
    """
    cdef uint8_t[KEY_MAX] key
    cdef uint32_t tag, number
    cdef Value* value
    value_check(data, size)
    size = value_key(key, param, data, size)
    tag = name_tag(&rates.values, key, size)
    number = table_find(&rates.values, tag, key, size)
    if number == 0 or not value_at(rates, number).record.flags & HOT:
        if rates.state.hot >= rates.items_max:
            raise ValueError(f"there are {rates.items_max} hot items already")
        if number == 0:
            number = value_create(rates, tag, key, size, &param.window)
        if number == 0:
            raise ValueError("there is no memory for a hot item")
        timers_disarm(&rates.timers, number)
        value = value_at(rates, number)
        value.record.flags |= HOT
        value.next_item = param.items
        param.items = number
        rates.state.hot += 1
    value_at(rates, number).threshold = limit
    return 0


cdef inline int64_t item_cool(Rates* rates, const Param* param, uint32_t number) noexcept nogil:
    """Makes a hot item an ordinary value.

    Returns when the value expires. The caller removes the value from its rule's list.
    """
    cdef Value* value = value_at(rates, number)
    value.record.flags &= <uint8_t>~HOT
    value.next_item = 0
    rates.state.hot -= 1
    timers_arm(&rates.timers, number, tally_ends(&value.tally, &param.window))
    return value.timer.due_ns


# ---- FLOW and PARAM ------------------------------------------------------------------------------------------------

cdef inline int32_t clamp(double number) noexcept nogil:
    """Converts a number to an integer, as a cast in Java does."""
    return INT32_MAX if number >= INT32_MAX else <int32_t>number


cdef inline void flow_ask(
    Rates* rates, uint32_t number, uint32_t count, bint prioritized, int64_t now_ns, Answer* answer
) noexcept nogil:
    """Decides about a FLOW for an existing rule. See section "FLOW"."""
    cdef Flow* flow = flow_at(rates.rules, number)
    cdef double threshold, left
    if not namespace_ask(rates.rules, flow.namespace, rates.qps_max, now_ns):
        answer.status = TOO_MANY_REQUESTS
        return
    window_enter(&flow.window, &flow.samples, now_ns)
    threshold = rule_threshold(rates.rules, flow.threshold, flow.threshold_type, flow.namespace)
    left = threshold - rate(&flow.window, flow.window.passed) - count
    if left >= 0:
        window_pass(&flow.window, &flow.samples, count)
        flow.passed += count
        answer.remaining = clamp(left)
    elif prioritized and window_borrow(&flow.window, &flow.samples, count, threshold):
        flow.waiting += count
        answer.status = SHOULD_WAIT
        answer.wait_ms = <int32_t>(flow.window.length_ns // 1000000)
    else:
        flow.blocked += count
        answer.status = BLOCKED


cdef inline int value_ask(
    Rates* rates, const Param* param, const uint8_t* data, uint32_t size, uint32_t count, int64_t now_ns,
    int64_t* budget, Answer* answer
) noexcept nogil:
    """Counts one value if its limit allows it. Returns a status, and writes into the answer how much remains."""
    cdef const Chains* chains = &rates.values.chains
    cdef uint32_t number = value_enter(rates, param, data, size, now_ns, budget, answer)
    cdef double threshold, left
    cdef Value* value
    cdef bint is_hot
    if number == 0:
        return NOT_AVAILABLE
    value = value_at(rates, number)
    is_hot = value.record.flags & HOT != 0
    tally_enter(chains, &value.tally, &param.window, now_ns)
    threshold = value.threshold if is_hot else param.threshold
    threshold = rule_threshold(rates.rules, threshold, param.threshold_type, param.namespace)
    left = threshold - rate(&param.window, value.tally.passed) - count
    if left < 0:
        return BLOCKED
    tally_add(chains, &value.tally, &param.window, count)
    answer.remaining = clamp(left)
    if not is_hot:
        value_arm(rates, number, tally_ends(&value.tally, &param.window), answer)
    return OK


cdef inline void param_ask(
    Rates* rates, uint32_t number, uint32_t count, uint32_t values, const uint8_t* data, int64_t now_ns,
    int64_t* budget, Answer* answer
) noexcept nogil:
    """Decides about a PARAM for an existing rule and valid values: all values pass, or none. See section "PARAM".

    Each value is counted before the next value is checked, so that equal values add up. Each value is charged to the
    budget: a lookup, and its samples, all of which may have to be cleared.
    """
    cdef Param* param = param_at(rates.rules, number)
    cdef const uint8_t* place = data
    cdef uint32_t passed = 0, size, _value
    budget[0] -= <int64_t>values * tally_blocks(param.window.size)
    if not namespace_ask(rates.rules, param.namespace, rates.qps_max, now_ns):
        answer.status = TOO_MANY_REQUESTS
        return
    while passed < values:
        size = value_size(place, VALUE_SIZE_MAX)
        answer.status = value_ask(rates, param, place, size, count, now_ns, budget, answer)
        if answer.status != OK:
            break
        place += size
        passed += 1
    if answer.status == OK:
        param.passed += count
        if values > 1:
            answer.remaining = -1
        return
    answer.remaining = 0
    place = data
    for _value in range(passed):
        size = value_size(place, VALUE_SIZE_MAX)
        number = value_find(rates, param, place, size)
        tally_add(&rates.values.chains, &value_at(rates, number).tally, &param.window, -<int64_t>count)
        place += size
    param.blocked += count
