"""Loads the rules that rules.py has read into the records of the region.

Floor 2 (ARCHITECTURE.md). All rules are checked before any record is changed. The functions that fill the records also
check their own arguments. The region is the only place where the rules are kept.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.chains cimport chain_blocks
from counterd.engine.pool cimport pool_left
from counterd.engine.table cimport RECORD_USED, name_blocks, name_bytes, table_remove
from counterd.protocols.sentinel._rates cimport (
    KEY_MAX, SERIAL_SIZE, Rates, item_cool, item_heat, value_at, value_check, value_key,
)
from counterd.protocols.sentinel._rules cimport (
    NAMESPACES_MAX, RULED, Flow, Param, Rules, flow_at, flow_free, flow_id, id_find, id_insert, namespace_begin,
    namespace_check, param_at, param_id, resource_free, resource_set,
)
from counterd.protocols.sentinel._window cimport tally_blocks, window_begin, window_check, window_is

cdef int64_t NS_PER_MS = 1000000


cdef bint rules_load(Rates* rates, rules) except -1:
    """Replaces all rules. rules: a protocols.sentinel.rules.Rules. Returns whether the timer of a value was armed.

    A flow keeps its tokens. Flows and values keep their windows if the length and the number of samples stay the same.
    If it raises ValueError, nothing has changed.
    """
    cdef bint armed
    check_rules(rates, rules)
    drop_flows(rates.rules, {rule.flow_id for rule in rules.flows})
    armed = drop_items(rates, {rule.flow_id: rule for rule in rules.params})
    namespaces = load_namespaces(rates.rules, {rule.namespace.encode() for rule in (*rules.flows, *rules.params)})
    for rule in rules.flows:
        load_flow(rates.rules, rule, namespaces[rule.namespace.encode()])
    for rule in rules.params:
        load_param(rates, rule, namespaces[rule.namespace.encode()])
    return armed


# ---- checks --------------------------------------------------------------------------------------------------------

cdef int check_rules(const Rates* rates, rules) except -1:
    """Raises ValueError if there is no room for the rules together with flows that have tokens but no longer a rule."""
    cdef const Rules* there = rates.rules
    cdef const Flow* flow
    cdef uint32_t number, gone = 0
    cdef uint64_t blocks = 0
    flow_ids = {rule.flow_id for rule in rules.flows}
    for number in range(1, there.flows.pool.fresh + 1):
        flow = flow_at(there, number)
        if flow.record.flags & RECORD_USED and flow.tokens and flow_id(there, number) not in flow_ids:
            gone += 1
            blocks += chain_blocks(flow.resource_size)
    if max(len(rules.flows), len(rules.params)) > there.rules_max or gone + len(rules.flows) > there.flows.capacity:
        raise ValueError(
            f"there are {len(rules.flows)} flow rules and {len(rules.params)} parameter rules, and {gone} flows "
            f"that have tokens but no longer a rule: at most {there.rules_max} rules of a kind and "
            f"{there.flows.capacity} flows are possible"
        )
    for rule in (*rules.flows, *rules.params):
        namespace_check(len(rule.namespace.encode()))
        window_check(rule.sample_count, rule.window_ms * NS_PER_MS)
    if len({rule.namespace for rule in (*rules.flows, *rules.params)}) > NAMESPACES_MAX:
        raise ValueError(f"the rules have more than {NAMESPACES_MAX} namespaces")
    for rule in rules.flows:
        blocks += chain_blocks(<uint32_t>len(rule.resource.encode()))
    if blocks > there.resources.capacity:
        raise ValueError(
            f"the names of the resources take {blocks} blocks of memory, but there are only "
            f"{there.resources.capacity}")
    return check_items(rates, rules.params)


cdef int check_items(const Rates* rates, params) except -1:
    """Raises ValueError if there is no memory for the hot items of the rules, together with the existing values."""
    cdef const Param* param
    cdef uint32_t number
    cdef uint64_t values = 0, blocks = 0
    if sum(len(rule.items) for rule in params) > rates.items_max:
        raise ValueError(f"the rules have more than {rates.items_max} paramFlowItemList entries")
    for rule in params:
        number = id_find(&rates.rules.params, rule.flow_id)
        param = param_at(rates.rules, number) if number else NULL
        known = hot_keys(rates, param) if number and keeps_window(param, rule) else set()
        for item in rule.items:
            value_check(<const uint8_t*>PyBytes_AS_STRING(item), len(item))
            if not known or item_key(param, item) not in known:
                values += 1
                blocks += tally_blocks(rule.sample_count) + name_blocks(&rates.values, SERIAL_SIZE + len(item))
    if values > pool_left(rates.values.pool) or blocks > pool_left(rates.values.chains.pool):
        raise ValueError(f"no memory for {values} more paramFlowItemList entries: raise sentinel.max_param_values")
    return 0


cdef bint keeps_window(const Param* param, rule) except -1:
    return window_is(&param.window, rule.sample_count, rule.window_ms * NS_PER_MS)


# ---- hot items -----------------------------------------------------------------------------------------------------

cdef bytes item_key(const Param* param, bytes item):
    """Returns the key in the table of values for an item. The item is a value in the form of the wire."""
    cdef uint8_t[KEY_MAX] key
    cdef uint32_t size
    size = value_key(key, param, <const uint8_t*>PyBytes_AS_STRING(item), <uint32_t>len(item))
    return PyBytes_FromStringAndSize(<const char*>key, size)


cdef set hot_keys(const Rates* rates, const Param* param):
    """Returns the keys of the hot items of a rule."""
    cdef uint32_t number = param.items
    found = set()
    while number:
        found.add(name_bytes(&rates.values, &value_at(rates, number).record))
        number = value_at(rates, number).next_item
    return found


cdef bint drop_items(Rates* rates, dict by_id) except -1:
    """Removes parameter rules and hot items that are not in the new rules. Returns whether a timer was armed.

    Rules are removed before any rules are added, so that the limits are never exceeded.
    """
    cdef Rules* rules = rates.rules
    cdef Param* param
    cdef uint32_t number
    cdef bint armed = False
    for number in range(1, rules.params.pool.fresh + 1):
        param = param_at(rules, number)
        if not param.record.flags & RECORD_USED:
            continue
        rule = by_id.get(param_id(rules, number))
        if rule is not None and keeps_window(param, rule):
            armed |= cool_items(rates, param, {item_key(param, item) for item in rule.items})
            continue
        armed |= cool_items(rates, param, set())
        if rule is None:
            table_remove(&rules.params, number)
    return armed


cdef bint cool_items(Rates* rates, Param* param, set kept) except -1:
    """Removes hot items that are not in `kept` from a rule's list. Returns whether there were any."""
    cdef uint32_t number, before = 0, next_item
    cdef bint armed = False
    number = param.items
    while number:
        next_item = value_at(rates, number).next_item
        if name_bytes(&rates.values, &value_at(rates, number).record) in kept:
            before = number
        else:
            if before:
                value_at(rates, before).next_item = next_item
            else:
                param.items = next_item
            item_cool(rates, param, number)
            armed = True
        number = next_item
    return armed


# ---- rules ---------------------------------------------------------------------------------------------------------

cdef dict load_namespaces(Rules* rules, set names):
    """Sets the namespaces of the rules.

    Returns {name: number}. A namespace that existed before keeps its request count.
    """
    cdef uint32_t number
    there = {}
    for number in range(1, NAMESPACES_MAX + 1):
        if rules.namespaces[number].name_size == 0:
            continue
        name = PyBytes_FromStringAndSize(<const char*>rules.namespaces[number].name, rules.namespaces[number].name_size)
        if name in names:
            there[name] = number
        else:
            rules.namespaces[number].name_size = 0
    number = 1
    for name in sorted(names - there.keys()):
        while number <= NAMESPACES_MAX and rules.namespaces[number].name_size:
            number += 1
        namespace_begin(rules, number, name)
        there[name] = number
    return there


cdef int drop_flows(Rules* rules, set ids) except -1:
    """Removes flow rules that are not in the new rules. A flow without a rule stays as long as it has tokens.

    Also frees the resources' names of the other flows, which are written again, so that the memory always suffices.
    """
    cdef uint32_t number
    cdef Flow* flow
    for number in range(1, rules.flows.pool.fresh + 1):
        flow = flow_at(rules, number)
        if not flow.record.flags & RECORD_USED:
            continue
        if flow_id(rules, number) in ids:
            resource_free(rules, flow)
        elif flow.tokens == 0:
            flow_free(rules, number)
        else:
            flow.record.flags &= <uint8_t>~RULED
    return 0


cdef int load_flow(Rules* rules, rule, uint32_t namespace) except -1:
    cdef uint32_t number = id_find(&rules.flows, rule.flow_id)
    cdef int64_t interval_ns = rule.window_ms * NS_PER_MS
    cdef Flow* flow
    if number:
        flow = flow_at(rules, number)
    else:
        number = id_insert(&rules.flows, rule.flow_id)
        flow = flow_at(rules, number)
        flow.now_calls = flow.passed = flow.blocked = flow.waiting = flow.expired = flow.tokens = 0
        flow.resource_size = 0
        flow.window.size = 0
    resource_free(rules, flow)
    resource_set(rules, flow, rule.resource.encode())
    flow.record.flags |= RULED
    flow.threshold = rule.count
    flow.namespace = namespace
    flow.grade = rule.grade
    flow.threshold_type = rule.threshold_type
    flow.strategy = rule.resource_timeout_strategy
    flow.resource_ns = rule.resource_timeout_ms * NS_PER_MS
    flow.offline_ns = rule.client_offline_ms * NS_PER_MS
    if not window_is(&flow.window, rule.sample_count, interval_ns):
        window_begin(&flow.window, &flow.samples, rule.sample_count, interval_ns)
    return 0


cdef int load_param(Rates* rates, rule, uint32_t namespace) except -1:
    """Loads a parameter rule. The rule's old hot items must have been removed."""
    cdef Rules* rules = rates.rules
    cdef uint32_t number = id_find(&rules.params, rule.flow_id)
    cdef bint is_new = number == 0
    cdef Param* param
    if is_new:
        number = id_insert(&rules.params, rule.flow_id)
    param = param_at(rules, number)
    if is_new:
        param.passed = param.blocked = 0
        param.items = 0
    if is_new or not keeps_window(param, rule):
        window_begin(&param.window, NULL, rule.sample_count, rule.window_ms * NS_PER_MS)
        rates.state.serial += 1
        param.serial = rates.state.serial
    param.threshold = rule.count
    param.namespace = namespace
    param.threshold_type = rule.threshold_type
    for item, limit in rule.items.items():
        item_heat(rates, param, <const uint8_t*>PyBytes_AS_STRING(item), <uint32_t>len(item), limit)
    return 0
