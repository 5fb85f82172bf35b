"""The sentinel cluster protocol without I/O: decodes, decides and answers the requests of a connection.

Floor 2 (ARCHITECTURE.md). docs/protocols/sentinel.md describes every byte of the messages, and all differences from the
proposal and from Sentinel's own token server.

A frame is a length of two bytes, and as many bytes as the length says. Every length is valid, so framing is never lost.
_messages.pxd decodes and encodes. The engine decides immediately, or a token service decides later.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport DONE, Frame, Session
from counterd.engine.byteorder cimport load_be16, load_be32, prefetch
from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.permits cimport Permits, ledger_find, permit_at, permit_hold
from counterd.engine.pool cimport Pool, pool_left
from counterd.engine.table cimport index_peek, index_prefetch, name_blocks, name_tag, record_at, table_find
from counterd.protocols.sentinel._messages cimport (
    ACQUIRE, BODY_MIN, FAIL, FLOW, FRAME_MAX, HEAD_SIZE, ID_SIZE, KEEP, LENGTH_SIZE, NO_RULE, NOT_AVAILABLE, OK, PARAM,
    PING, RELEASE, REPLY_SIZE, STATUS_MIN, TYPES, Answer, Request, answer_of, namespace_decode,
    reply_encode, request_decode,
)
from counterd.protocols.sentinel._rates cimport ITEMS_MAX, Rates, flow_ask, param_ask
from counterd.protocols.sentinel._rules cimport flow_at, flow_is_for_rates
from counterd.protocols.sentinel._store cimport SentinelStore
from counterd.protocols.sentinel._tokens cimport (
    Tokens, client_enter, token_acquire, token_keep, token_release, tokens_foresee,
)

cdef enum:
    NAMESPACES_PER_CONNECTION = 64
    CONNECTED_NAMESPACES = 65536
    VALUE_BLOCKS = 4            # twice the blocks of a value with 10 samples and a short key
    POSTED_MAX = 65536          # bytes of later replies that may wait for a session
    NS_PER_TENTH = 100000000


def open_store(*, uint32_t max_tokens, uint32_t max_param_values, double max_allowed_qps, int64_t sweep_interval_ns,
               uint32_t sweep_max_tokens, int64_t sweep_max_duration_ns, bytes hash_key not None,
               bytes token_key not None, int64_t now_ns):
    """Makes a store without rules. hash_key, token_key: 16 random bytes each. now_ns: the caller's monotonic clock.

    Raises ValueError for impossible sizes, and MemoryError if the memory cannot be mapped.
    """
    cdef SentinelStore store = SentinelStore(
        reply_max=REPLY_SIZE,
        posted_max=POSTED_MAX,
        make_session=SentinelSession,
        namespaces=CONNECTED_NAMESPACES,
        holdings=CONNECTIONS_MAX,
        holdings_per_connection=NAMESPACES_PER_CONNECTION,
        name_memory=64 * VALUE_BLOCKS * (<uint64_t>max_param_values + ITEMS_MAX),
        hash_key=hash_key,
        token_key=token_key,
        tokens=max_tokens,
        param_values=max_param_values,
        now_ns=now_ns,
    )
    store.set_limits(
        max_allowed_qps=max_allowed_qps,
        sweep_interval_ns=sweep_interval_ns,
        sweep_max_tokens=sweep_max_tokens,
        sweep_max_duration_ns=sweep_max_duration_ns,
    )
    return store


# ---- decisions of the engine ---------------------------------------------------------------------------------------

cdef inline void namespace_enter(
    Permits* permits, uint32_t connection, const Request* request, int64_t now_ns, Answer* answer
) noexcept:
    """Registers a connection in a namespace, unless it is already registered, and sets the number of the namespace's
    connections."""
    cdef Pool* blocks = permits.table.chains.pool
    cdef uint32_t tag = name_tag(&permits.table, request.data, request.size)
    cdef uint32_t number = table_find(&permits.table, tag, request.data, request.size)
    cdef uint32_t entry
    if number == 0 and name_blocks(&permits.table, request.size) and pool_left(blocks) < blocks.capacity // 2:
        answer.status = FAIL  # the other half of the blocks is for values of parameters
        return
    if number == 0 or ledger_find(permits, connection, number, tag) == 0:
        entry = permit_hold(permits, connection, tag, request.data, request.size, <uint32_t>(now_ns // NS_PER_TENTH))
        if entry == 0:
            answer.status = FAIL
            return
        number = permits.holdings[entry].record
    answer.value = permit_at(permits, number).consumption


cdef inline void decide_flow(SentinelStore store, const Request* request, Answer* answer) noexcept:
    """Decides about a FLOW (section "FLOW")."""
    cdef Rates* rates = &store.rates
    cdef uint32_t number = table_find(&rates.rules.flows, request.tag, request.id, ID_SIZE)
    if number == 0 or not flow_is_for_rates(flow_at(rates.rules, number)):
        answer.status = NO_RULE
    else:
        flow_ask(rates, number, request.count, request.prioritized, store.now_ns, answer)


cdef inline void decide_param(SentinelStore store, const Request* request, Answer* answer) noexcept:
    """Decides about a PARAM (section "PARAM")."""
    cdef Rates* rates = &store.rates
    cdef uint32_t number = table_find(&rates.rules.params, request.tag, request.id, ID_SIZE)
    if number == 0:
        answer.status = NO_RULE
    else:
        param_ask(rates, number, request.count, request.values, request.data, store.now_ns, &store.budget, answer)


cdef inline void decide(
    SentinelStore store, uint32_t connection, const Request* request, Answer* answer
) noexcept:
    """Decides about a valid request."""
    cdef Tokens* tokens = &store.tokens
    cdef uint32_t number
    if request.kind == FLOW:
        decide_flow(store, request, answer)
    elif request.kind == PARAM:
        decide_param(store, request, answer)
    elif request.kind == ACQUIRE:
        number = table_find(&store.rules.flows, request.tag, request.id, ID_SIZE)
        token_acquire(tokens, number, request.count, connection, store.now_ns, answer)
    elif request.kind == RELEASE:
        answer.status = token_release(tokens, request.id, request.tag, store.now_ns)
    else:
        token_keep(tokens, request.id, request.tag, connection, store.now_ns, answer)


# ---- sessions --------------------------------------------------------------------------------------------------------

cdef class SentinelSession(Session):
    """One connection of the sentinel protocol."""

    def __cinit__(self, SentinelStore store not None):
        client_enter(&store.tokens, self.connection)

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        """Sets the frame's key to the body of the frame. parse_result: OK if the body is long enough for its type."""
        cdef Tokens* tokens = &(<SentinelStore>self.store).tokens
        cdef uint32_t total
        if size < LENGTH_SIZE:
            return 0
        total = LENGTH_SIZE + <uint32_t>load_be16(data)
        if size < total:
            return 0
        frame.data = data
        frame.size = total
        frame.key = data + HEAD_SIZE
        frame.key_size = 0
        frame.tag = 0
        frame.parse_result = 1
        if total < HEAD_SIZE or total > FRAME_MAX or data[6] >= TYPES:
            return total
        frame.key_size = total - HEAD_SIZE
        if frame.key_size < BODY_MIN[data[6]]:
            return total
        frame.parse_result = OK
        if data[6] == RELEASE or data[6] == KEEP:
            frame.tag = name_tag(&tokens.table, frame.key, ID_SIZE)
            index_prefetch(&tokens.table.index, frame.tag)
        elif data[6] != PING:
            frame.tag = name_tag(&tokens.table, frame.key, ID_SIZE)  # of a rule: all tables share the key
        return total

    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept:
        cdef Tokens* tokens = &(<SentinelStore>self.store).tokens
        cdef uint32_t number, acquires = 0
        cdef int i
        for i in range(count):
            acquires += frames[i].parse_result == OK and frames[i].data[6] == ACQUIRE
            if frames[i].parse_result == OK and (frames[i].data[6] == RELEASE or frames[i].data[6] == KEEP):
                number = index_peek(&tokens.table.index, frames[i].tag)
                if number:
                    prefetch(record_at(&tokens.table, number))
        if acquires:
            tokens_foresee(tokens, acquires)

    cdef int execute_frame(self, const Frame* frame) except -1:
        if frame.parse_result == OK and frame.data[6] == PING:
            return self.register(frame)
        return self.execute_request(frame)

    cdef int register(self, const Frame* frame) except -1:
        """Executes a PING (section "PING").

        Registers the connection in a namespace. The namespace is a permit, and the registration is a holding of this
        permit.
        """
        cdef SentinelStore store = <SentinelStore>self.store
        cdef Permits* permits = &store.permits
        cdef Request request
        cdef Answer answer = answer_of(namespace_decode(frame.key, frame.key_size, &request))
        if answer.status == OK:
            namespace_enter(permits, self.connection, &request, store.now_ns, &answer)
        store.answers[<int>PING][answer.status - STATUS_MIN] += 1
        store.out_size += reply_encode(
            store.out + store.out_size, load_be32(frame.data + LENGTH_SIZE), PING, &answer
        )
        return DONE

    cdef int execute_request(self, const Frame* frame) except -1:
        """Answers an invalid request immediately.

        Decides about a valid request now, or lets a token service decide later.
        """
        cdef SentinelStore store = <SentinelStore>self.store
        cdef Request request
        cdef Answer answer = answer_of(request_decode(frame, &request))
        if answer.status == OK:
            if request.type < ACQUIRE or store.submit_calls is None:
                decide(store, self.connection, &request, &answer)
            elif store.decide_later(self, &request):
                return DONE
            else:
                answer.status = NOT_AVAILABLE
        if answer.due_ns != INT64_MAX:
            store.expect(answer.due_ns)
        store.answers[request.kind][answer.status - STATUS_MIN] += 1
        store.out_size += reply_encode(store.out + store.out_size, request.xid, request.type, &answer)
        return DONE
