# What the sentinel room keeps: rules, namespaces, values of parameters, tokens, and who owns those.
#
# Floor 2, header only. Everything is in the store's region and addressed by number; 0 is none.
#
# Invariants (SentinelStore.audit checks each):
# - a flow's now_calls is the sum of the counts of its tokens, and so is `tokens` their number;
# - a token is armed in the wheel, to go off when its lease is over, or sooner; it is in its owner's list if it has one;
# - an owner without a connection has tokens, and is in the queue of leavers until all of them are armed for its going;
# - a value of a parameter is armed for the end of its window, or is a hot item, which stays.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._table cimport IndexState, Pool, Record, Table, pool_put, record_at, table_remove
from counterd._wheel cimport Timer, Timers, Wheel, timers_arm, timers_disarm
from counterd.debug cimport debug_check
from counterd.protocols.sentinel._window cimport Samples, Tally, Window

cdef enum:
    ID_SIZE = 8                 # of a flow or a token, as they are on the wire: their names in the tables
    VALUE_INLINE = 24           # bytes of a value's key in its record
    SERIAL_SIZE = 4             # of the rule, in front of the value in its key
    NAMESPACE_MAX = 1013        # bytes: what fits into a PING of 1,024
    NAMESPACES_MAX = 1024
    RULES_MAX = 16384           # of flows; and of parameters
    FLOWS = 2                   # for each rule: there are some besides whose rule went before their tokens
    ITEMS_MAX = 65536           # hot items of all rules
    LIMITER_SAMPLES = 10        # of the limit of a namespace: a second
    CONCURRENCY = 0             # FlowRule.grade
    QPS = 1
    GLOBAL = 1                  # thresholdType; 0 is the average of the clients
    RELEASE_STRATEGY = 1        # resourceTimeoutStrategy; 0 is ignore
    KEEP_STRATEGY = 2
    RULED = 1                   # of Record.flags: the rule is there
    HOT = 1                     # of Record.flags: a hot item
    JUDGED = 1                  # of Record.flags: an ExpireStrategy was asked for this token


cdef struct Namespace:          # of rules
    uint32_t tag                # of its name among the counters, which are the namespaces that are connected to
    uint32_t name_size          # 0 = free
    uint8_t[NAMESPACE_MAX] name
    Window requests
    Samples samples


cdef struct Flow:
    Record record
    uint8_t[ID_SIZE] id
    double threshold            # `count` of the rule
    uint32_t namespace
    uint8_t grade
    uint8_t threshold_type
    uint8_t strategy
    uint8_t spare
    int64_t resource_ns
    int64_t offline_ns
    uint64_t now_calls
    uint64_t passed             # ever, in counts, as what follows
    uint64_t blocked
    uint64_t waiting
    uint64_t expired
    uint32_t tokens
    uint32_t spare2
    Window window
    Samples samples


cdef struct Param:
    Record record
    uint8_t[ID_SIZE] id
    double threshold
    uint32_t namespace
    uint32_t serial             # of the rule as long as its window stays: in the keys of its values
    uint8_t threshold_type
    uint64_t passed
    uint64_t blocked
    Window window


cdef struct Value:              # 96 bytes; its name is the rule's serial and the value as it is on the wire
    Record record
    uint8_t[VALUE_INLINE] key
    Timer timer
    Tally tally
    double threshold            # of a hot item
    uint32_t blocks             # of its samples
    uint32_t spare


cdef struct Token:              # 64 bytes, a cache line
    Record record
    uint8_t[ID_SIZE] id
    int64_t since_ns
    Timer timer
    uint32_t flow
    uint32_t count
    uint32_t owner              # 0 = nobody, who never goes
    uint32_t next_of_owner
    uint32_t prev_of_owner
    uint32_t kept               # times


cdef struct Owner:              # of tokens: a connection, or one that has gone
    uint32_t connection         # 0 = gone
    uint32_t tokens
    uint32_t first
    uint32_t next               # in the queue of leavers, or on the free list
    uint32_t cursor             # of a leaver: the next token to be armed
    uint32_t is_leaving         # in that queue
    int64_t gone_ns


cdef struct Client:             # by connection
    uint32_t owner              # 0 = it never had a token
    uint32_t serial             # of those who had this number


cdef struct State:              # in the region
    uint64_t serial             # of the last token
    uint64_t[2] token_key       # what makes their ids
    IndexState token_index
    IndexState flow_index
    IndexState param_index
    IndexState value_index
    Pool tokens
    Pool flows
    Pool params
    Pool values
    Pool owners
    Wheel token_wheel
    Wheel value_wheel
    uint32_t leaving_first      # owners whose tokens are yet to be armed for their going
    uint32_t leaving_last
    uint32_t rule_serial
    uint32_t hot                # items
    uint64_t granted            # tokens, ever
    uint64_t released
    uint64_t kept
    uint64_t late               # released or kept when their lease was over
    uint64_t expired_offline
    uint64_t expired_lease


cdef struct Records:            # this process's view
    State* state
    Table tokens
    Table flows
    Table params
    Table values
    Timers token_timers
    Timers value_timers
    Namespace* namespaces
    Owner* owners
    Client* clients


cdef inline Token* token_at(const Records* records, uint32_t number) noexcept nogil:
    return <Token*>record_at(&records.tokens, number)


cdef inline Flow* flow_at(const Records* records, uint32_t number) noexcept nogil:
    return <Flow*>record_at(&records.flows, number)


cdef inline Param* param_at(const Records* records, uint32_t number) noexcept nogil:
    return <Param*>record_at(&records.params, number)


cdef inline Value* value_at(const Records* records, uint32_t number) noexcept nogil:
    return <Value*>record_at(&records.values, number)


# ---- leases --------------------------------------------------------------------------------------------------------

cdef inline int64_t after(int64_t moment_ns, int64_t span_ns) noexcept nogil:
    return 0x7fffffffffffffff if moment_ns > <int64_t>0x7fffffffffffffff - span_ns else moment_ns + span_ns


cdef inline int64_t renewed(const Flow* flow, int64_t due_ns, int64_t moment_ns) noexcept nogil:
    """When a lease ends that the server has renewed by itself, again and again, up to that moment."""
    cdef int64_t span_ns = 2 * flow.resource_ns
    if due_ns > moment_ns:
        return due_ns
    return after(moment_ns, span_ns - (moment_ns - due_ns) % span_ns)


cdef inline int64_t lease_end(const Records* records, const Token* token, int64_t now_ns) noexcept nogil:
    """When it is over: by itself, or because its owner has gone."""
    cdef const Flow* flow = flow_at(records, token.flow)
    cdef const Owner* owner = records.owners + token.owner
    cdef bint is_gone = token.owner != 0 and owner.connection == 0
    cdef int64_t end_ns = token.timer.due_ns
    if flow.strategy == KEEP_STRATEGY:
        end_ns = renewed(flow, end_ns, owner.gone_ns if is_gone else now_ns)
    return min(end_ns, after(owner.gone_ns, flow.offline_ns)) if is_gone else end_ns


cdef inline int64_t lease_begun(const Flow* flow, const Token* token, int64_t now_ns) noexcept nogil:
    """When a lease ends that is taken, or renewed, now."""
    if flow.strategy == RELEASE_STRATEGY:
        return after(token.since_ns, flow.resource_ns)
    return after(now_ns, 2 * flow.resource_ns)


# ---- owners --------------------------------------------------------------------------------------------------------

cdef inline void owner_take(Records* records, uint32_t owner, uint32_t number) noexcept nogil:
    """Gives a token that is nobody's to an owner."""
    cdef Owner* taker = records.owners + owner
    cdef Token* token = token_at(records, number)
    token.owner = owner
    if owner == 0:
        return
    token.prev_of_owner = 0
    token.next_of_owner = taker.first
    if taker.first:
        token_at(records, taker.first).prev_of_owner = number
    taker.first = number
    taker.tokens += 1


cdef inline void owner_free(Records* records, uint32_t number) noexcept nogil:
    pool_put(&records.state.owners, &records.owners.next, sizeof(Owner), number)


cdef inline void owner_drop(Records* records, uint32_t number) noexcept nogil:
    """Takes a token from its owner, who is done with if he has gone and this was the last."""
    cdef Token* token = token_at(records, number)
    cdef Owner* owner = records.owners + token.owner
    if token.owner == 0:
        return
    debug_check(owner.tokens > 0)
    if token.prev_of_owner:
        token_at(records, token.prev_of_owner).next_of_owner = token.next_of_owner
    else:
        owner.first = token.next_of_owner
    if token.next_of_owner:
        token_at(records, token.next_of_owner).prev_of_owner = token.prev_of_owner
    if owner.cursor == number:
        owner.cursor = token.next_of_owner
    owner.tokens -= 1
    if owner.tokens == 0 and owner.connection == 0 and not owner.is_leaving:
        owner_free(records, token.owner)
    token.owner = 0


# ---- tokens --------------------------------------------------------------------------------------------------------

cdef inline void token_free(Records* records, uint32_t number) noexcept nogil:
    """Gives back what a token stands for. A flow without a rule goes with its last."""
    cdef Token* token = token_at(records, number)
    cdef Flow* flow = flow_at(records, token.flow)
    debug_check(flow.now_calls >= token.count and flow.tokens > 0)
    flow.now_calls -= token.count
    flow.tokens -= 1
    if flow.tokens == 0 and not flow.record.flags & RULED:
        table_remove(&records.flows, token.flow)
    timers_disarm(&records.token_timers, number)
    owner_drop(records, number)
    table_remove(&records.tokens, number)


cdef inline void token_arm(Records* records, uint32_t number, int64_t due_ns) noexcept nogil:
    timers_arm(&records.token_timers, number, due_ns)
