"""Rules, and the rates that they allow: the half of the sentinel room's store that FLOW and PARAM are about.

Floor 2. A namespace that somebody is connected to is a counter of the region, and each connection's PING a holding of
it: the ledger says how many there are, and a connection that has gone is counted no more. The windows are of the
caller's monotonic clock.
"""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._core cimport CONNECTIONS_MAX, Store, counter_get
from counterd._table cimport (
    BLOCK_PAYLOAD, RECORD_USED, IndexEntry, Pool, Table, chain_free, chain_write, index_map, name_blocks, name_tag,
    pool_left, table_find, table_insert, table_remove,
)
from counterd._wheel cimport timers_arm, timers_disarm, timers_take
from counterd.byteorder cimport load_be32, load_be64, store_be64, store_le32
from counterd.debug cimport debug_check
from counterd.protocols.sentinel._records cimport (
    FLOWS, GLOBAL, HOT, ID_SIZE, ITEMS_MAX, LIMITER_SAMPLES, NAMESPACES_MAX, RULED, RULES_MAX, SERIAL_SIZE,
    VALUE_INLINE, Client, Flow, Namespace, Owner, Param, Records, State, Token, Value, after, flow_at, param_at,
    value_at,
)
from counterd.protocols.sentinel._window cimport (
    Window, rate, tally_add, tally_blocks, tally_ends, tally_enter, window_begin, window_borrow, window_enter,
    window_pass,
)

cdef enum:
    VALUE_SIZE_MAX = 1024       # of a value on the wire: less than a frame
    SAMPLE_BLOCKS_MAX = 19      # of SAMPLES_MAX samples
    CATCH_UP_STEPS = 64         # values that a request looks at which have gone by, to make room for another

# Tags of values; docs/protocols/sentinel.md, "PARAM".
cdef enum:
    FLOAT64 = 3
    FLOAT32 = 4
    BOOLEAN = 6
    STRING = 7
    TAGS = 8

cdef uint8_t[TAGS] VALUE_SIZES = [5, 9, 2, 9, 5, 3, 2, 5]   # with their tags; of a string, without its bytes
cdef uint8_t[SAMPLE_BLOCKS_MAX * BLOCK_PAYLOAD] ZEROS


cdef inline size_t round_up(size_t size) noexcept:
    """To whole cache lines."""
    return (size + 63) // 64 * 64


cdef int bits_for(uint32_t records) noexcept:
    """Of an index with two slots for each."""
    cdef int bits = 1
    while (<uint64_t>1 << bits) < 2 * <uint64_t>records:
        bits += 1
    return bits


cdef size_t table_bytes(uint32_t records, size_t record_size) noexcept:
    return round_up(sizeof(IndexEntry) << bits_for(records)) + round_up((<size_t>records + 1) * record_size)


def region_extra(uint32_t tokens, uint32_t values, uint32_t rules=RULES_MAX, uint32_t items=ITEMS_MAX):
    """Bytes of the region for so many tokens, values of parameters but for hot items, rules of each kind, hot items."""
    return (
        round_up(sizeof(State)) + table_bytes(tokens, sizeof(Token)) + table_bytes(FLOWS * rules, sizeof(Flow))
        + table_bytes(rules, sizeof(Param)) + table_bytes(values + items, sizeof(Value))
        + round_up((NAMESPACES_MAX + 1) * sizeof(Namespace))
        + round_up((<size_t>tokens + CONNECTIONS_MAX + 1) * sizeof(Owner))
        + round_up((<size_t>CONNECTIONS_MAX + 1) * sizeof(Client))
    )


cdef uint32_t value_size(const uint8_t* data, uint32_t left) noexcept:
    """Bytes of the value that begins there, with its tag; 0 if that is none."""
    cdef uint32_t size
    if left == 0 or data[0] >= TAGS:
        return 0
    size = VALUE_SIZES[data[0]]
    if left < size:
        return 0
    if data[0] == STRING:
        if load_be32(data + 1) > left - size:
            return 0
        size += load_be32(data + 1)
    return size


cdef void value_key(uint8_t* target, const Param* param, const uint8_t* data, uint32_t size) noexcept:
    """Of a value in the table. What Java takes for equal is made the same: all that is true, and each NaN."""
    cdef uint8_t* value = target + SERIAL_SIZE
    store_le32(target, param.serial)
    memcpy(value, data, size)
    if value[0] == BOOLEAN:
        value[1] = value[1] != 0
    elif value[0] == FLOAT64 and (value[1] & 0x7f) == 0x7f and (value[2] & 0xf0) == 0xf0:
        if value[2] & 0x0f or value[3] or value[4] or value[5] or value[6] or value[7] or value[8]:
            memcpy(value + 1, b"\x7f\xf8\0\0\0\0\0\0", 8)
    elif value[0] == FLOAT32 and (value[1] & 0x7f) == 0x7f and value[2] & 0x80:
        if value[2] & 0x7f or value[3] or value[4]:
            memcpy(value + 1, b"\x7f\xc0\0\0", 4)


cdef inline int32_t clamp(double number) noexcept:
    """Cut down to a whole number, as Java casts."""
    return INT32_MAX if number >= INT32_MAX else <int32_t>number


cdef inline bint window_is(const Window* window, uint32_t size, int64_t interval_ns) noexcept:
    """Whether it is as fine and as long."""
    return window.size == size and window.length_ns * size == interval_ns


cdef class RateStore(Store):
    """The rules, and what has passed. tokens, param_values, rules of each kind, items: how many there can be."""

    def __cinit__(
        self, *, uint32_t tokens, uint32_t param_values, uint32_t rules=RULES_MAX, uint32_t items=ITEMS_MAX, **_
    ):
        self.region.drops_idle = True
        self.values_max = param_values
        self.rules_max = rules
        self.items_max = items
        self.namespaces = {}
        self.resources = {}
        self.hot = {}
        self.map_records(tokens, param_values)

    cdef void map_records(self, uint32_t tokens, uint32_t values) noexcept:
        """Lays out what the region has for this room, in the order in which region_extra() counts it."""
        cdef Records* records = &self.records
        cdef uint32_t flows = FLOWS * self.rules_max, params = self.rules_max
        cdef uint8_t* place = self.region.extra
        cdef State* state = <State*>place
        values += self.items_max
        place += round_up(sizeof(State))
        records.state = state
        index_map(&records.tokens.index, &state.token_index, place, bits_for(tokens))
        place = self.map_table(&records.tokens, &state.tokens, place, tokens, sizeof(Token), ID_SIZE)
        index_map(&records.flows.index, &state.flow_index, place, bits_for(flows))
        place = self.map_table(&records.flows, &state.flows, place, flows, sizeof(Flow), ID_SIZE)
        index_map(&records.params.index, &state.param_index, place, bits_for(params))
        place = self.map_table(&records.params, &state.params, place, params, sizeof(Param), ID_SIZE)
        index_map(&records.values.index, &state.value_index, place, bits_for(values))
        place = self.map_table(&records.values, &state.values, place, values, sizeof(Value), VALUE_INLINE)
        records.namespaces = <Namespace*>place
        place += round_up((NAMESPACES_MAX + 1) * sizeof(Namespace))
        records.owners = <Owner*>place
        place += round_up((<size_t>tokens + CONNECTIONS_MAX + 1) * sizeof(Owner))
        records.clients = <Client*>place
        state.owners.capacity = tokens + CONNECTIONS_MAX
        records.token_timers.wheel = &state.token_wheel
        records.token_timers.base = <uint8_t*>&(<Token*>records.tokens.records).timer
        records.token_timers.stride = sizeof(Token)
        records.value_timers.wheel = &state.value_wheel
        records.value_timers.base = <uint8_t*>&(<Value*>records.values.records).timer
        records.value_timers.stride = sizeof(Value)

    cdef uint8_t* map_table(
        self, Table* table, Pool* pool, uint8_t* place, uint32_t capacity, size_t record_size, uint32_t name_inline
    ) noexcept:
        """Of so many records, behind the index that was mapped at that place; returns what is behind both."""
        pool.capacity = capacity
        table.key = self.region.header.key
        table.pool = pool
        table.records = place + round_up(sizeof(IndexEntry) * (<size_t>table.index.mask + 1))
        table.blocks = self.region.names.blocks
        table.block_pool = self.region.names.block_pool
        table.record_size = <uint32_t>record_size
        table.name_inline = name_inline
        return table.records + round_up((<size_t>capacity + 1) * record_size)

    # ---- FLOW and PARAM ----

    cdef uint32_t connected(self, uint32_t namespace) noexcept:
        """How many connections have told that they are of that namespace."""
        cdef Namespace* name = self.records.namespaces + namespace
        cdef uint32_t count = 0
        counter_get(&self.region, name.tag, name.name, name.name_size, &count)
        return count

    cdef double threshold(self, double count, uint8_t threshold_type, uint32_t namespace) noexcept:
        return count if threshold_type == GLOBAL else count * self.connected(namespace)

    cdef bint is_allowed(self, uint32_t namespace) noexcept:
        """Whether the namespace may ask once more; then it has."""
        cdef Namespace* asking = self.records.namespaces + namespace
        window_enter(&asking.requests, &asking.samples, self.now_ns)
        if rate(&asking.requests, asking.requests.passed) + 1 > self.qps_max:
            return False
        window_pass(&asking.requests, &asking.samples, 1)
        return True

    cdef Answer ask_flow(self, uint32_t number, uint32_t count, bint prioritized) noexcept:
        """Section "FLOW", of a rule that there is."""
        cdef Flow* flow = flow_at(&self.records, number)
        cdef double threshold, left
        if not self.is_allowed(flow.namespace):
            return Answer(TOO_MANY_REQUESTS, 0, 0)
        window_enter(&flow.window, &flow.samples, self.now_ns)
        threshold = self.threshold(flow.threshold, flow.threshold_type, flow.namespace)
        left = threshold - rate(&flow.window, flow.window.passed) - count
        if left >= 0:
            window_pass(&flow.window, &flow.samples, count)
            flow.passed += count
            return Answer(OK, clamp(left), 0)
        if prioritized and window_borrow(&flow.window, &flow.samples, count, threshold):
            flow.waiting += count
            return Answer(SHOULD_WAIT, 0, <int32_t>(flow.window.length_ns // 1000000))
        flow.blocked += count
        return Answer(BLOCKED, 0, 0)

    cdef Answer ask_param(self, uint32_t number, uint32_t count, uint32_t values, const uint8_t* data) noexcept:
        """Section "PARAM", of a rule that there is and of values that are sound. All pass, or none.

        Each is counted before the next is looked at, so that equal ones add up. Each is a lookup of its own, and as
        much work as it has samples: all of them may have gone by.
        """
        cdef Param* param = param_at(&self.records, number)
        cdef const uint8_t* place = data
        cdef double left = 0
        cdef int status = OK
        cdef uint32_t passed = 0, size, _value
        self.region.budget -= values * tally_blocks(param.window.size)
        if not self.is_allowed(param.namespace):
            return Answer(TOO_MANY_REQUESTS, 0, 0)
        while passed < values:
            size = value_size(place, VALUE_SIZE_MAX)
            status = self.ask_value(param, place, size, count, &left)
            if status != OK:
                break
            place += size
            passed += 1
        if status == OK:
            param.passed += count
            return Answer(OK, clamp(left) if values == 1 else -1, 0)
        place = data
        for _value in range(passed):
            size = value_size(place, VALUE_SIZE_MAX)
            number = self.value_find(param, place, size, False)
            tally_add(&self.records.values, &value_at(&self.records, number).tally, &param.window, -<int64_t>count)
            place += size
        param.blocked += count
        return Answer(status, 0, 0)

    cdef int ask_value(
        self, const Param* param, const uint8_t* data, uint32_t size, uint32_t count, double* left
    ) noexcept:
        """Counts one value, if that does not exceed its limit."""
        cdef const Table* table = &self.records.values
        cdef uint32_t number = self.value_find(param, data, size, True)
        cdef double threshold = param.threshold
        cdef Value* value
        if number == 0:
            return NOT_AVAILABLE
        value = value_at(&self.records, number)
        tally_enter(table, &value.tally, &param.window, self.now_ns)
        if value.record.flags & HOT:
            threshold = value.threshold
        threshold = self.threshold(threshold, param.threshold_type, param.namespace)
        left[0] = threshold - rate(&param.window, value.tally.passed) - count
        if left[0] < 0:
            return BLOCKED
        tally_add(table, &value.tally, &param.window, count)
        if not value.record.flags & HOT:
            timers_arm(&self.records.value_timers, number, tally_ends(&value.tally, &param.window))
            self.expect(value.timer.due_ns)
        return OK

    cdef uint32_t value_find(self, const Param* param, const uint8_t* data, uint32_t size, bint is_needed) noexcept:
        """The record of a value; 0 if there is none, and none is needed or there is no room for another."""
        cdef Table* table = &self.records.values
        cdef uint8_t[SERIAL_SIZE + VALUE_SIZE_MAX] key
        cdef uint32_t tag, number
        value_key(key, param, data, size)
        size += SERIAL_SIZE
        tag = name_tag(table, key, size)
        number = table_find(table, tag, key, size)
        if number or not is_needed:
            return number
        if not self.has_room_for_value():
            self.region.budget -= CATCH_UP_STEPS - self.expire_values(CATCH_UP_STEPS)
        if self.has_room_for_value():  # a step may only have moved a value on in the wheel
            number = self.value_create(tag, key, size, &param.window)
        if number:
            timers_arm(&self.records.value_timers, number, after(self.now_ns, param.window.length_ns))
            self.expect(value_at(&self.records, number).timer.due_ns)
        return number

    cdef bint has_room_for_value(self) noexcept:
        """Besides hot items, whose number is bounded elsewhere."""
        return self.records.state.values.used - self.records.state.hot < self.values_max

    cdef uint32_t value_create(self, uint32_t tag, const uint8_t* key, uint32_t size, const Window* window) noexcept:
        """A value of which nothing has passed, not armed; 0 if there is no room for it."""
        cdef Table* table = &self.records.values
        cdef uint32_t blocks = tally_blocks(window.size)
        cdef uint32_t number
        cdef Value* value
        if pool_left(table.pool) == 0 or pool_left(table.block_pool) < blocks + name_blocks(table, size):
            return 0
        number = table_insert(table, tag, key, size)
        value = value_at(&self.records, number)
        value.timer.prev = 0
        value.tally.number = 0
        value.tally.passed = 0
        value.blocks = blocks
        chain_write(table, &value.tally.samples, 0, ZEROS, blocks * BLOCK_PAYLOAD)
        return number

    cdef void value_remove(self, uint32_t number) noexcept:
        cdef Value* value = value_at(&self.records, number)
        timers_disarm(&self.records.value_timers, number)
        chain_free(&self.records.values, &value.tally.samples, value.blocks)
        table_remove(&self.records.values, number)

    cdef int expire_values(self, int steps) noexcept:
        """Forgets values of which nothing counts any more; returns the steps that are left."""
        cdef uint32_t number = timers_take(&self.records.value_timers, self.now_ns, &steps)
        while number:
            self.value_remove(number)
            number = timers_take(&self.records.value_timers, self.now_ns, &steps)
        return steps

    cdef void expect(self, int64_t due_ns) noexcept:
        """Something will be due then: if nothing was to come before it, the caller has to look at next_deadline()."""
        if due_ns < self.scheduled_ns:
            self.stirred = True

    # ---- rules ----

    def load_rules(self, rules):
        """Has these rules, a protocols.sentinel.rules.Rules, and no others. Raises ValueError, and has changed nothing.

        A flow keeps its tokens, and its window if that is as long and as fine as before; values keep theirs likewise.
        """
        cdef Records* records = &self.records
        cdef uint32_t number
        self.check_room(rules)
        flow_ids = {rule.flow_id for rule in rules.flows}
        for number in range(1, records.state.flows.fresh + 1):
            if flow_at(records, number).record.flags & RULED and self.flow_id(number) not in flow_ids:
                self.drop_flow(number)
        param_ids = {rule.flow_id for rule in rules.params}
        for number in range(1, records.state.params.fresh + 1):
            if param_at(records, number).record.flags & RECORD_USED and self.param_id(number) not in param_ids:
                self.load_items(number, {})
                table_remove(&records.params, number)
        self.load_namespaces({rule.namespace.encode() for rule in (*rules.flows, *rules.params)})
        for rule in rules.flows:
            self.load_flow(rule)
        for rule in rules.params:
            self.load_param(rule)
        known = self.resources
        self.resources = {rule.flow_id: rule.resource.encode() for rule in rules.flows}
        for number in range(1, records.state.flows.fresh + 1):
            if flow_at(records, number).record.flags & RECORD_USED:
                self.resources.setdefault(self.flow_id(number), known.get(self.flow_id(number), b""))

    def check_room(self, rules):
        """Raises ValueError if there is no room for these rules, beside flows that have gone and still have tokens."""
        cdef Records* records = &self.records
        cdef uint32_t number, gone = 0, blocks = 0, values = 0, flows_max = records.state.flows.capacity
        flow_ids = {rule.flow_id for rule in rules.flows}
        for number in range(1, records.state.flows.fresh + 1):
            if flow_at(records, number).record.flags & RECORD_USED:
                gone += flow_at(records, number).tokens and self.flow_id(number) not in flow_ids
        for rule in rules.params:
            number = self.find(&records.params, rule.flow_id)
            known = self.hot.get(number, {}) if number and self.keeps_window(number, rule) else {}
            for item in rule.items.keys() - known.keys():
                values += 1
                blocks += tally_blocks(rule.sample_count) + name_blocks(&records.values, SERIAL_SIZE + len(item))
        if max(len(rules.flows), len(rules.params)) > self.rules_max or gone + len(rules.flows) > flows_max:
            raise ValueError(
                f"{len(rules.flows)} flow rules and {len(rules.params)} of parameters, beside {gone} flows that have"
                f" tokens and no rule any more: each can be {self.rules_max}, all flows {flows_max}"
            )
        if sum(len(rule.items) for rule in rules.params) > self.items_max:
            raise ValueError(f"the rules have more than {self.items_max} paramFlowItemList entries")
        if values > pool_left(&records.state.values) or blocks > pool_left(&self.region.header.blocks):
            raise ValueError(f"no memory for {values} more paramFlowItemList entries: raise sentinel.max_param_values")
        if len({rule.namespace for rule in (*rules.flows, *rules.params)}) > NAMESPACES_MAX:
            raise ValueError(f"the rules have more than {NAMESPACES_MAX} namespaces")

    cdef uint32_t find(self, const Table* table, int64_t flow_id) noexcept:
        """The record of a rule."""
        cdef uint8_t[ID_SIZE] name
        store_be64(name, <uint64_t>flow_id)
        return table_find(table, name_tag(table, name, ID_SIZE), name, ID_SIZE)

    cdef uint32_t find_or_insert(self, Table* table, int64_t flow_id, bint* is_new) noexcept:
        cdef uint8_t[ID_SIZE] name
        cdef uint32_t number = self.find(table, flow_id)
        is_new[0] = number == 0
        if number:
            return number
        store_be64(name, <uint64_t>flow_id)
        return table_insert(table, name_tag(table, name, ID_SIZE), name, ID_SIZE)

    cdef int64_t flow_id(self, uint32_t number) noexcept:
        return <int64_t>load_be64(flow_at(&self.records, number).id)

    cdef int64_t param_id(self, uint32_t number) noexcept:
        return <int64_t>load_be64(param_at(&self.records, number).id)

    cdef int load_namespaces(self, names) except -1:
        """Has room for those of rules; each that stays goes on counting its requests."""
        cdef Namespace* namespace
        cdef uint32_t number
        for name in [name for name in self.namespaces if name not in names]:
            self.records.namespaces[<uint32_t>self.namespaces.pop(name)].name_size = 0
        for name in sorted(names - self.namespaces.keys()):
            number = 1
            while self.records.namespaces[number].name_size:
                number += 1
            namespace = self.records.namespaces + number
            namespace.name_size = <uint32_t>len(name)
            memcpy(namespace.name, PyBytes_AS_STRING(name), len(name))
            namespace.tag = name_tag(&self.region.names, namespace.name, namespace.name_size)
            window_begin(&namespace.requests, &namespace.samples, LIMITER_SAMPLES, 1000000000)
            self.namespaces[name] = number
        return 0

    cdef int drop_flow(self, uint32_t number) except -1:
        """Its rule has gone; it stays as long as there are tokens."""
        flow_at(&self.records, number).record.flags &= <uint8_t>~RULED
        if flow_at(&self.records, number).tokens == 0:
            table_remove(&self.records.flows, number)
        return 0

    cdef int load_flow(self, rule) except -1:
        cdef bint is_new
        cdef uint32_t number = self.find_or_insert(&self.records.flows, rule.flow_id, &is_new)
        cdef Flow* flow = flow_at(&self.records, number)
        cdef int64_t interval_ns = rule.window_ms * 1000000
        if is_new:
            flow.now_calls = flow.passed = flow.blocked = flow.waiting = flow.expired = flow.tokens = 0
            flow.window.size = 0
        flow.record.flags |= RULED
        flow.threshold = rule.count
        flow.namespace = self.namespaces[rule.namespace.encode()]
        flow.grade = rule.grade
        flow.threshold_type = rule.threshold_type
        flow.strategy = rule.resource_timeout_strategy
        flow.resource_ns = rule.resource_timeout_ms * 1000000
        flow.offline_ns = rule.client_offline_ms * 1000000
        if not window_is(&flow.window, rule.sample_count, interval_ns):
            window_begin(&flow.window, &flow.samples, rule.sample_count, interval_ns)
        return 0

    cdef bint keeps_window(self, uint32_t number, rule) except -1:
        return window_is(&param_at(&self.records, number).window, rule.sample_count, rule.window_ms * 1000000)

    cdef int load_param(self, rule) except -1:
        cdef bint is_new
        cdef uint32_t number = self.find_or_insert(&self.records.params, rule.flow_id, &is_new)
        cdef Param* param = param_at(&self.records, number)
        if is_new:
            param.passed = param.blocked = 0
        if is_new or not self.keeps_window(number, rule):
            if not is_new:
                self.load_items(number, {})
            self.records.state.rule_serial += 1
            param.serial = self.records.state.rule_serial
            window_begin(&param.window, NULL, rule.sample_count, rule.window_ms * 1000000)
        param.threshold = rule.count
        param.namespace = self.namespaces[rule.namespace.encode()]
        param.threshold_type = rule.threshold_type
        return self.load_items(number, rule.items)

    cdef int load_items(self, uint32_t number, items) except -1:
        """Has these hot items of a rule, {value on the wire: its limit}, and no others."""
        cdef Param* param = param_at(&self.records, number)
        cdef uint8_t[SERIAL_SIZE + VALUE_SIZE_MAX] key
        cdef Table* table = &self.records.values
        cdef uint32_t tag, size, found
        cdef Value* value
        known = self.hot.pop(number, {})
        for item in known.keys() - items.keys():
            self.cool(<uint32_t>known.pop(item), param)
        for item, limit in items.items():
            if item not in known:
                size = SERIAL_SIZE + <uint32_t>len(item)
                value_key(key, param, <const uint8_t*>PyBytes_AS_STRING(item), size - SERIAL_SIZE)
                tag = name_tag(table, key, size)
                found = table_find(table, tag, key, size)
                if found == 0:
                    found = self.value_create(tag, key, size, &param.window)
                debug_check(found != 0)  # check_room() has seen to it
                timers_disarm(&self.records.value_timers, found)
                value_at(&self.records, found).record.flags |= HOT
                self.records.state.hot += 1
                known[item] = found
            value = value_at(&self.records, <uint32_t>known[item])
            value.threshold = limit
        if known:
            self.hot[number] = known
        return 0

    cdef int cool(self, uint32_t number, const Param* param) except -1:
        """A hot item becomes a value as others are."""
        cdef Value* value = value_at(&self.records, number)
        value.record.flags &= <uint8_t>~HOT
        self.records.state.hot -= 1
        timers_arm(&self.records.value_timers, number, tally_ends(&value.tally, &param.window))
        self.stirred = True
        return 0
