# Tokens: calls in progress, their leases and their owners.
#
# Floor 2, header only. A token counts until it is given back: by a release, by the sweep after its lease is over, or by
# a release or keep that comes too late.
#
# Invariants (audit_tokens and audit_owners check each):
# - a flow's now_calls is the sum of the counts of its tokens, and `tokens` is their number;
# - a token is armed for the end of its lease or earlier; it is in the list of its owner, if it has one;
# - an owner whose connection is gone has tokens; it is in the queue of leavers until all of them are armed for its end.

from libc.stdint cimport INT32_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.byteorder cimport store_be64
from counterd.engine.chains cimport Chains
from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.debug cimport debug_check
from counterd.engine.list cimport Links, List, list_push, list_remove
from counterd.engine.pool cimport Pool, pool_left, pool_put, pool_take
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.siphash cimport siphash13
from counterd.engine.table cimport (
    Record, Table, index_prefetch, name_tag, record_at, table_begin, table_find, table_insert, table_remove,
    table_reserve,
)
from counterd.engine.wheel cimport Timer, Timers, timers_arm, timers_begin, timers_disarm, timers_reserve
from counterd.protocols.sentinel._messages cimport (
    ALREADY_RELEASED, BLOCKED, ID_SIZE, NO_RULE, NOT_AVAILABLE, RELEASE_OK, Answer,
)
from counterd.protocols.sentinel._rules cimport (
    KEEP_STRATEGY, RELEASE_STRATEGY, RULED, Flow, Rules, after, flow_at, flow_free, flow_is_for_calls, rule_threshold,
)

cdef enum:
    JUDGED = 1                  # in Record.flags: an expire strategy was asked about the token
    FORESEEN = 64               # ids that are made in advance: a power of two, at least a batch of frames


cdef struct Token:              # 64 bytes, a cache line
    Record record
    uint8_t[ID_SIZE] id
    int64_t since_ns
    Timer timer
    uint32_t flow
    uint32_t count
    uint32_t owner              # 0 = none: the token ends by its lease only
    Links of_owner
    uint32_t kept               # how often a KEEP renewed it


cdef struct Owner:              # of tokens: an open or gone connection; 32 bytes
    uint32_t connection         # 0 = gone
    uint32_t tokens
    uint32_t first
    uint32_t next               # in the queue of leavers, or on the free list
    uint32_t cursor             # of a leaver: the next token to arm
    uint32_t is_leaving         # it is in the queue of leavers
    int64_t gone_ns


cdef struct Client:             # by connection
    uint32_t owner              # 0 = it never had a token
    uint32_t serial             # rises with each connection that gets or leaves this number


cdef struct TokensState:        # in the region
    uint64_t serial             # of the last token
    uint64_t[2] id_key          # of SipHash, for tokens' ids
    Pool owners
    uint32_t leaving_first      # the queue of gone owners whose tokens are not all armed for their end
    uint32_t leaving_last
    uint64_t granted            # tokens, in total
    uint64_t released
    uint64_t kept
    uint64_t late               # released or kept after the end of their lease
    uint64_t expired_offline
    uint64_t expired_lease


cdef struct Foreseen:           # an id for a token to come
    uint64_t word
    uint32_t tag


cdef struct Tokens:             # this process's view
    TokensState* state
    Rules* rules
    Table table
    Timers timers
    Owner* owners
    Client* clients
    Foreseen[FORESEEN] foreseen     # by serial
    uint64_t foreseen_serial    # of the last id made in advance
    bint draining               # no tokens are given out any more
    bint are_judged             # a lease is over only when an expire strategy says so


# ---- region --------------------------------------------------------------------------------------------------------

cdef inline int tokens_reserve(Tokens* tokens, Region* region, Rules* rules, uint32_t capacity) except -1:
    """Reserves memory for `capacity` tokens, and for owners: one for each connection, and one for each token."""
    tokens.rules = rules
    region_reserve(region, b"tokens", sizeof(TokensState), <void**>&tokens.state)
    table_reserve(&tokens.table, region, b"tokens", capacity, sizeof(Token), ID_SIZE)
    timers_reserve(&tokens.timers, region, b"tokens' wheel")
    region_reserve(
        region, b"owners", (<size_t>capacity + CONNECTIONS_MAX + 1) * sizeof(Owner), <void**>&tokens.owners
    )
    region_reserve(region, b"clients", (<size_t>CONNECTIONS_MAX + 1) * sizeof(Client), <void**>&tokens.clients)
    return 0


cdef inline void tokens_begin(
    Tokens* tokens, const uint64_t* key, const uint64_t* id_key, const Chains* chains, int64_t now_ns
) noexcept nogil:
    """Call this once, after the region was mapped.

    key: the key of the tables. id_key: the key for the ids of tokens.
    """
    debug_check(sizeof(Token) == 64 and sizeof(Owner) == 32)
    table_begin(&tokens.table, key, chains)
    timers_begin(&tokens.timers, &(<Token*>tokens.table.records).timer, sizeof(Token), now_ns)
    tokens.state.id_key[0] = id_key[0]
    tokens.state.id_key[1] = id_key[1]
    tokens.state.owners.capacity = tokens.table.capacity + CONNECTIONS_MAX


cdef inline Token* token_at(const Tokens* tokens, uint32_t number) noexcept nogil:
    return <Token*>record_at(&tokens.table, number)


cdef inline List tokens_by_owner(const Tokens* tokens) noexcept nogil:
    cdef Token* first = <Token*>tokens.table.records
    return List(first, sizeof(Token), &first.of_owner)


# ---- leases --------------------------------------------------------------------------------------------------------

cdef inline int64_t renewed(const Flow* flow, int64_t due_ns, int64_t moment_ns) noexcept nogil:
    """Returns the end of a lease that was due at due_ns and that the server has renewed up to moment_ns."""
    cdef int64_t span_ns = 2 * flow.resource_ns
    if due_ns > moment_ns:
        return due_ns
    return after(moment_ns, span_ns - (moment_ns - due_ns) % span_ns)


cdef inline bint token_is_online(const Tokens* tokens, const Token* token) noexcept nogil:
    """Returns whether the token's owner is connected, or the token has no owner."""
    return token.owner == 0 or tokens.owners[token.owner].connection != 0


cdef inline int64_t lease_end(const Tokens* tokens, const Token* token, int64_t now_ns) noexcept nogil:
    """Returns when a token's lease ends, by itself or because its owner is gone."""
    cdef const Flow* flow = flow_at(tokens.rules, token.flow)
    cdef const Owner* owner = tokens.owners + token.owner
    cdef bint is_gone = not token_is_online(tokens, token)
    cdef int64_t end_ns = token.timer.due_ns
    if flow.strategy == KEEP_STRATEGY:
        end_ns = renewed(flow, end_ns, owner.gone_ns if is_gone else now_ns)
    return min(end_ns, after(owner.gone_ns, flow.offline_ns)) if is_gone else end_ns


cdef inline int64_t lease_begun(const Flow* flow, const Token* token, int64_t now_ns) noexcept nogil:
    """Returns the end of a lease that begins or is renewed now."""
    if flow.strategy == RELEASE_STRATEGY:
        return after(token.since_ns, flow.resource_ns)
    return after(now_ns, 2 * flow.resource_ns)


# ---- owners --------------------------------------------------------------------------------------------------------

cdef inline uint32_t owner_of(Tokens* tokens, uint32_t connection) noexcept nogil:
    """Returns the owner of a connection. Makes the owner for the first token."""
    cdef uint32_t number = tokens.clients[connection].owner
    cdef Owner* owner
    if number:
        return number
    number = pool_take(&tokens.state.owners, &tokens.owners.next, sizeof(Owner))
    debug_check(number != 0)
    owner = tokens.owners + number
    owner.connection = connection
    owner.tokens = 0
    owner.first = 0
    owner.cursor = 0
    owner.is_leaving = False
    owner.gone_ns = 0
    tokens.clients[connection].owner = number
    return number


cdef inline void owner_take(Tokens* tokens, uint32_t owner, uint32_t number) noexcept nogil:
    """Gives a token without an owner to an owner."""
    cdef Owner* taker = tokens.owners + owner
    cdef Token* token = token_at(tokens, number)
    token.owner = owner
    if owner == 0:
        return
    list_push(tokens_by_owner(tokens), &taker.first, number)
    taker.tokens += 1


cdef inline void owner_free(Tokens* tokens, uint32_t number) noexcept nogil:
    pool_put(&tokens.state.owners, &tokens.owners.next, sizeof(Owner), number)


cdef inline void owner_drop(Tokens* tokens, uint32_t number) noexcept nogil:
    """Detaches a token from its owner. Frees the owner if its connection is gone and it has no tokens left."""
    cdef Token* token = token_at(tokens, number)
    cdef Owner* owner = tokens.owners + token.owner
    if token.owner == 0:
        return
    debug_check(owner.tokens > 0)
    list_remove(tokens_by_owner(tokens), &owner.first, number)
    if owner.cursor == number:
        owner.cursor = token.of_owner.next
    owner.tokens -= 1
    if owner.tokens == 0 and owner.connection == 0 and not owner.is_leaving:
        owner_free(tokens, token.owner)
    token.owner = 0


# ---- clients -------------------------------------------------------------------------------------------------------

cdef inline uint64_t client_handle(const Tokens* tokens, uint32_t connection) noexcept nogil:
    """Returns a handle of a connection, for extensions. A handle is never reused, unlike the number of a connection."""
    return <uint64_t>tokens.clients[connection].serial << 32 | connection


cdef inline uint32_t client_find(const Tokens* tokens, uint64_t handle) noexcept nogil:
    """Returns the connection with this handle, or 0 if the connection is gone."""
    cdef uint32_t connection = <uint32_t>handle
    if connection > CONNECTIONS_MAX or client_handle(tokens, connection) != handle:
        return 0
    return connection


cdef inline void client_enter(Tokens* tokens, uint32_t connection) noexcept nogil:
    tokens.clients[connection].owner = 0
    tokens.clients[connection].serial += 1


cdef inline void client_leave(Tokens* tokens, uint32_t connection, int64_t now_ns) noexcept nogil:
    """Called when a connection ends.

    The connection's tokens last for clientOfflineTime from now on; ticks arm their timers for that time.
    """
    cdef TokensState* state = tokens.state
    cdef uint32_t number = tokens.clients[connection].owner
    cdef Owner* owner = tokens.owners + number
    tokens.clients[connection].owner = 0
    tokens.clients[connection].serial += 1
    if number == 0:
        return
    owner.connection = 0
    owner.gone_ns = now_ns
    if owner.tokens == 0:
        owner_free(tokens, number)
        return
    owner.is_leaving = True
    owner.cursor = owner.first
    owner.next = 0
    if state.leaving_last:
        tokens.owners[state.leaving_last].next = number
    else:
        state.leaving_first = number
    state.leaving_last = number


cdef inline int leavers_arm(Tokens* tokens, int steps) noexcept nogil:
    """Arms the timers of tokens whose owners are gone, for the end of clientOfflineTime.

    Returns how many of the steps remain.
    """
    cdef TokensState* state = tokens.state
    cdef uint32_t number, entry
    cdef Owner* owner
    cdef Token* token
    while steps > 0 and state.leaving_first:
        steps -= 1
        number = state.leaving_first
        owner = tokens.owners + number
        entry = owner.cursor
        if entry:
            token = token_at(tokens, entry)
            owner.cursor = token.of_owner.next
            if not token.record.flags & JUDGED:
                timers_arm(&tokens.timers, entry, lease_end(tokens, token, owner.gone_ns))
            continue
        state.leaving_first = owner.next
        if state.leaving_first == 0:
            state.leaving_last = 0
        owner.is_leaving = False
        if owner.tokens == 0:
            owner_free(tokens, number)
    return steps


# ---- tokens --------------------------------------------------------------------------------------------------------

cdef inline void tokens_foresee(Tokens* tokens, uint32_t count) noexcept nogil:
    """Makes ids for the next `count` tokens, and prefetches their slots, because a large index is not in the cache.

    The ids cannot be guessed: they are hashes of a rising number under a secret key.
    """
    cdef TokensState* state = tokens.state
    cdef uint8_t[ID_SIZE] id
    cdef Foreseen* coming
    while tokens.foreseen_serial < state.serial + min(count, <uint32_t>FORESEEN):
        tokens.foreseen_serial += 1
        coming = tokens.foreseen + (tokens.foreseen_serial & (FORESEEN - 1))
        coming.word = siphash13(state.id_key, <const uint8_t*>&tokens.foreseen_serial, sizeof(uint64_t))
        store_be64(id, coming.word)
        coming.tag = name_tag(&tokens.table, id, ID_SIZE)
        index_prefetch(&tokens.table.index, coming.tag)


cdef inline uint32_t token_create(Tokens* tokens) noexcept nogil:
    """Makes the record of a token with a new id."""
    cdef TokensState* state = tokens.state
    cdef uint8_t[ID_SIZE] id
    cdef Foreseen* next
    while True:
        tokens_foresee(tokens, 1)
        state.serial += 1
        next = tokens.foreseen + (state.serial & (FORESEEN - 1))
        store_be64(id, next.word)
        if next.word and table_find(&tokens.table, next.tag, id, ID_SIZE) == 0:
            state.granted += 1
            return table_insert(&tokens.table, next.tag, id, ID_SIZE)


cdef inline void token_free(Tokens* tokens, uint32_t number) noexcept nogil:
    """Ends a token and subtracts it from its flow. A flow without a rule ends with its last token."""
    cdef Token* token = token_at(tokens, number)
    cdef Flow* flow = flow_at(tokens.rules, token.flow)
    debug_check(flow.now_calls >= token.count and flow.tokens > 0)
    flow.now_calls -= token.count
    flow.tokens -= 1
    if flow.tokens == 0 and not flow.record.flags & RULED:
        flow_free(tokens.rules, token.flow)
    timers_disarm(&tokens.timers, number)
    owner_drop(tokens, number)
    table_remove(&tokens.table, number)


cdef inline void token_expire(Tokens* tokens, uint32_t number) noexcept nogil:
    """Ends a token whose lease is over."""
    cdef Token* token = token_at(tokens, number)
    if token_is_online(tokens, token):
        tokens.state.expired_lease += 1
    else:
        tokens.state.expired_offline += 1
    flow_at(tokens.rules, token.flow).expired += token.count
    token_free(tokens, number)


cdef inline void token_arm(Tokens* tokens, uint32_t number, int64_t due_ns) noexcept nogil:
    """Arms a token for due_ns.

    When the timer runs out, an expire strategy, if there is one, is asked about the token.
    """
    token_at(tokens, number).record.flags &= <uint8_t>~JUDGED
    timers_arm(&tokens.timers, number, due_ns)


cdef inline bint token_is_late(const Tokens* tokens, uint32_t number, int64_t now_ns) noexcept nogil:
    """Returns whether a token's lease is over, unless an expire strategy decides about leases."""
    return not tokens.are_judged and lease_end(tokens, token_at(tokens, number), now_ns) <= now_ns


# ---- ACQUIRE, RELEASE and KEEP -------------------------------------------------------------------------------------

cdef inline void token_acquire(
    Tokens* tokens, uint32_t number, uint32_t count, uint32_t connection, int64_t now_ns, Answer* answer
) noexcept nogil:
    """Executes an ACQUIRE (section "ACQUIRE").

    number: the number of the flow, 0 if it does not exist. connection: 0 for a token without an owner.
    """
    cdef Flow* flow
    cdef Token* token
    cdef uint32_t owner = 0, entry
    if number == 0 or not flow_is_for_calls(flow_at(tokens.rules, number)):
        answer.status = NO_RULE
        return
    flow = flow_at(tokens.rules, number)
    if <double>(flow.now_calls + count) > rule_threshold(
        tokens.rules, flow.threshold, flow.threshold_type, flow.namespace
    ):
        flow.blocked += count
        answer.status = BLOCKED
        return
    if tokens.draining or pool_left(tokens.table.pool) == 0:
        answer.status = NOT_AVAILABLE
        return
    if connection:
        owner = owner_of(tokens, connection)
    entry = token_create(tokens)
    token = token_at(tokens, entry)
    token.since_ns = now_ns
    token.timer.prev = 0
    token.flow = number
    token.count = count
    token.kept = 0
    owner_take(tokens, owner, entry)
    flow.now_calls += count
    flow.tokens += 1
    flow.passed += count
    answer.due_ns = lease_begun(flow, token, now_ns)
    timers_arm(&tokens.timers, entry, answer.due_ns)
    answer.value = <int64_t>tokens.foreseen[tokens.state.serial & (FORESEEN - 1)].word


cdef inline int token_release(Tokens* tokens, const uint8_t* id, uint32_t tag, int64_t now_ns) noexcept nogil:
    """Executes a RELEASE (section "RELEASE"). Returns the status."""
    cdef uint32_t number = table_find(&tokens.table, tag, id, ID_SIZE)
    cdef bint is_ruled
    if number == 0:
        return ALREADY_RELEASED
    if token_is_late(tokens, number, now_ns):
        tokens.state.late += 1
        token_expire(tokens, number)
        return ALREADY_RELEASED
    is_ruled = flow_is_for_calls(flow_at(tokens.rules, token_at(tokens, number).flow))
    tokens.state.released += 1
    token_free(tokens, number)
    return RELEASE_OK if is_ruled else NO_RULE


cdef inline void token_keep(
    Tokens* tokens, const uint8_t* id, uint32_t tag, uint32_t connection, int64_t now_ns, Answer* answer
) noexcept nogil:
    """Executes a KEEP (section "KEEP")."""
    cdef uint32_t number = table_find(&tokens.table, tag, id, ID_SIZE)
    cdef uint32_t owner
    cdef Token* token
    cdef int64_t due_ns
    if number == 0:
        answer.status = ALREADY_RELEASED
        return
    if token_is_late(tokens, number, now_ns):
        tokens.state.late += 1
        token_expire(tokens, number)
        answer.status = ALREADY_RELEASED
        return
    token = token_at(tokens, number)
    if not flow_is_for_calls(flow_at(tokens.rules, token.flow)):
        answer.status = NO_RULE
        return
    owner = owner_of(tokens, connection) if connection else 0
    if token.owner != owner:
        owner_drop(tokens, number)
        owner_take(tokens, owner, number)
    token.kept += 1
    tokens.state.kept += 1
    due_ns = lease_begun(flow_at(tokens.rules, token.flow), token, now_ns)
    if due_ns > now_ns or not token.record.flags & JUDGED:  # else the lease stays over, and is being judged already
        token_arm(tokens, number, due_ns)
        answer.due_ns = due_ns
    answer.value = min(max(due_ns - now_ns, <int64_t>0) // 1000000, <int64_t>INT32_MAX)
