# Checks for SentinelStore.audit: each walks through a part of this protocol and raises AssertionError at the first
# broken invariant.
#
# Floor 2, inlined into the store. engine/audit.pxd checks the engine's parts.

from libc.stdint cimport uint32_t, uint64_t

from counterd.engine.audit cimport audit_chains, audit_list, audit_pool, audit_table, audit_timers, chain_ends
from counterd.engine.chains cimport chain_blocks
from counterd.engine.table cimport RECORD_USED
from counterd.engine.wheel cimport timer_is_armed
from counterd.protocols.sentinel._rates cimport HOT, Rates, Value, value_at
from counterd.protocols.sentinel._rules cimport RULED, Flow, Rules, flow_at, param_at
from counterd.protocols.sentinel._tokens cimport Owner, Token, Tokens, token_at, tokens_by_owner
from counterd.protocols.sentinel._window cimport Samples, Window


cdef inline int audit_window(const Window* window, const Samples* samples, uint32_t number) except -1:
    """Checks that the sums of a window are the sums of its samples."""
    cdef uint64_t passed = 0, waiting = 0
    cdef uint32_t slot
    for slot in range(window.size):
        passed += samples.passed[slot]
        waiting += samples.waiting[slot]
    if passed != window.passed or waiting != window.waiting:
        raise AssertionError(f"the window of flow {number}: {passed}, {waiting}, not {window.passed}, {window.waiting}")
    return 0


cdef inline int audit_flows(const Rules* rules) except -1:
    """Checks that each flow has a rule or tokens, and that the flows' names use all blocks in use for resources."""
    cdef uint32_t number, blocks = 0
    cdef const Flow* flow
    for number in range(1, rules.flows.pool.fresh + 1):
        flow = flow_at(rules, number)
        if not flow.record.flags & RECORD_USED:
            continue
        if flow.tokens == 0 and not flow.record.flags & RULED:
            raise AssertionError(f"flow {number} has neither a rule nor tokens")
        audit_window(&flow.window, &flow.samples, number)
        if flow.resource_size:
            blocks += chain_blocks(flow.resource_size)
            if not chain_ends(&rules.resources, &flow.resource, chain_blocks(flow.resource_size)):
                raise AssertionError(f"the resource of flow {number} ends in the wrong block")
    return audit_chains(&rules.resources, blocks)


cdef inline uint32_t audit_rules(const Rules* rules) except? 0xffffffff:
    """Checks flows and parameters. Returns how many blocks the names of flows and parameters use."""
    audit_flows(rules)
    return audit_table(&rules.flows, "flows") + audit_table(&rules.params, "params")


cdef inline int audit_items(const Rates* rates) except -1:
    """Checks that the lists of the rules contain exactly the hot items."""
    cdef uint32_t number, entry, listed = 0
    for number in range(1, rates.rules.params.pool.fresh + 1):
        if not param_at(rates.rules, number).record.flags & RECORD_USED:
            continue
        entry = param_at(rates.rules, number).items
        while entry:
            listed += 1
            if listed > rates.state.hot or not value_at(rates, entry).record.flags & HOT:
                raise AssertionError(f"value {entry} is listed as a hot item of rule {number}, but is not one")
            entry = value_at(rates, entry).next_item
    if listed != rates.state.hot or listed > rates.items_max:
        raise AssertionError(f"{listed} hot items listed, {rates.state.hot} counted, of {rates.items_max}")
    return 0


cdef inline uint32_t audit_values(const Rates* rates) except? 0xffffffff:
    """Checks the values of parameters. Returns how many blocks the values use."""
    cdef uint32_t number, blocks = audit_table(&rates.values, "values"), hot = 0
    cdef const Value* value
    audit_timers(&rates.timers, rates.values.pool.fresh)
    for number in range(1, rates.values.pool.fresh + 1):
        value = value_at(rates, number)
        if not value.record.flags & RECORD_USED:
            continue
        if timer_is_armed(&value.timer) == (value.record.flags & HOT != 0):
            raise AssertionError(f"value {number}: its timer is wrong")
        hot += value.record.flags & HOT
        blocks += value.blocks
        if not chain_ends(&rates.values.chains, &value.tally.samples, value.blocks):
            raise AssertionError(f"the samples of value {number} end in the wrong block")
    if hot != rates.state.hot:
        raise AssertionError(f"{hot} hot items, {rates.state.hot} counted")
    audit_items(rates)
    return blocks


cdef inline uint32_t audit_tokens(const Tokens* tokens) except? 0xffffffff:
    """Checks that the timer of each token is armed, and checks the counts of the flows.

    Returns how many blocks the names use.
    """
    cdef uint32_t number, blocks = audit_table(&tokens.table, "tokens")
    cdef const Token* token
    cdef const Flow* flow
    sums = {}
    audit_timers(&tokens.timers, tokens.table.pool.fresh)
    for number in range(1, tokens.table.pool.fresh + 1):
        token = token_at(tokens, number)
        if timer_is_armed(&token.timer) != (token.record.flags & RECORD_USED != 0):
            raise AssertionError(f"token {number}: its timer is wrong")
        if token.record.flags & RECORD_USED:
            count, calls = sums.get(token.flow, (0, 0))
            sums[token.flow] = count + 1, calls + token.count
    for number in range(1, tokens.rules.flows.pool.fresh + 1):
        flow = flow_at(tokens.rules, number)
        if flow.record.flags & RECORD_USED:
            if (flow.tokens, flow.now_calls) != sums.pop(number, (0, 0)):
                raise AssertionError(f"flow {number} counts {flow.tokens} tokens of {flow.now_calls}")
    if sums:
        raise AssertionError(f"there are tokens of flows {list(sums)}, which do not exist")
    audit_owners(tokens)
    return blocks


cdef inline uint32_t audit_owner(const Tokens* tokens, uint32_t number, bint is_queued) except? 0xffffffff:
    """Checks the list of an owner's tokens. Returns how many tokens the list has."""
    cdef const Owner* owner = tokens.owners + number
    cdef uint32_t entry = owner.first
    cdef uint32_t count = audit_list(tokens_by_owner(tokens), entry, NULL, tokens.table.pool.fresh)
    while entry:
        if token_at(tokens, entry).owner != number:
            raise AssertionError(f"token {entry} is listed under owner {number}")
        entry = token_at(tokens, entry).of_owner.next
    if count != owner.tokens:
        raise AssertionError(f"owner {number} has {count} tokens, {owner.tokens} counted")
    if owner.connection and tokens.clients[owner.connection].owner != number:
        raise AssertionError(f"owner {number} is not the owner of connection {owner.connection}")
    if owner.connection == 0 and owner.tokens == 0 and not is_queued:
        raise AssertionError(f"owner {number}: its connection is gone and it has no tokens")
    if owner.is_leaving != is_queued:
        raise AssertionError(f"owner {number}: its mark and the queue of ended owners do not agree")
    return count


cdef inline int audit_owners(const Tokens* tokens) except -1:
    """Checks that each token is in its owner's list, and that ended owners with tokens to arm are in the queue."""
    cdef uint32_t number, listed = 0, owned = 0
    audit_pool(&tokens.state.owners, &tokens.owners.next, sizeof(Owner), "owners")
    queued = set()
    number = tokens.state.leaving_first
    while number and number not in queued:
        queued.add(number)
        if not tokens.owners[number].is_leaving or tokens.owners[number].connection:
            raise AssertionError(f"owner {number} is in the queue of ended owners, but has not ended")
        number = tokens.owners[number].next
    for number in range(1, tokens.table.pool.fresh + 1):
        owned += token_at(tokens, number).record.flags & RECORD_USED and token_at(tokens, number).owner != 0
    free = set()
    number = tokens.state.owners.free
    while number:
        free.add(number)
        number = tokens.owners[number].next
    for number in range(1, tokens.state.owners.fresh + 1):
        if number not in free:
            listed += audit_owner(tokens, number, number in queued)
    if listed != owned:
        raise AssertionError(f"{owned} tokens have owners, but the owners list {listed}")
    return 0
