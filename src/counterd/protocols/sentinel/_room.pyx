"""The sentinel cluster protocol, sans-I/O: what a request is, what it does, and the replies.

Floor 2. docs/protocols/sentinel.md has the messages byte for byte, and says where this differs from the proposal and
from Sentinel's own token server.

A frame is a length of two bytes and so many more. Its parser answers with the bytes it takes, or 0 for "more are
needed": every length has a frame, so framing is never lost.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from counterd._core cimport (
    CONNECTIONS_MAX, DONE, GRANTED, Frame, Region, Session, counter_acquire, counter_at, ledger_find,
)
from counterd._table cimport (
    index_peek, index_prefetch, name_blocks, name_tag, pool_left, record_at, table_find,
)
from counterd.byteorder cimport load_be16, load_be32, load_be64, prefetch, store_be32
from counterd.protocols.sentinel._rates cimport BAD_REQUEST, FAIL, NO_RULE, OK, Answer, value_size
from counterd.protocols.sentinel._records cimport ID_SIZE, ITEMS_MAX, QPS, RULED, Records, flow_at
from counterd.protocols.sentinel._replies cimport (
    ACQUIRE, FLOW, KEEP, PARAM, PING, RELEASE, REPLY_HEAD, REPLY_SIZE, TYPES, reply_begin, reply_call, reply_numbers,
)
from counterd.protocols.sentinel._store cimport STATUS_MIN, SentinelStore

from counterd.protocols.sentinel._rates import region_extra

cdef enum:
    LENGTH_SIZE = 2
    HEAD_SIZE = 7               # length, xid, type
    FRAME_MAX = 1024            # of a request, with its length
    NAMESPACES_PER_CONNECTION = 64
    CONNECTED_NAMESPACES = 65536
    VALUE_BLOCKS = 4            # of a value with 10 samples and a key that fits its record, and as many again
    POSTED_MAX = 65536          # bytes of replies that came later and are not taken
    VALUES_MIN = 2              # bytes of a value

# Bytes of each body, up to what may be missing.
cdef uint8_t[TYPES] BODY_MIN = [0, 12, 16, 12, 8, 8]


def open_store(*, uint32_t max_tokens, uint32_t max_param_values, double max_allowed_qps, int64_t sweep_interval_ns,
               uint32_t sweep_max_tokens, int64_t sweep_max_duration_ns, bytes hash_key not None,
               bytes token_key not None):
    """A store without rules. hash_key and token_key have 16 random bytes each.

    Raises ValueError for impossible sizes, MemoryError if they cannot be mapped.
    """
    cdef SentinelStore store = SentinelStore(
        buckets=CONNECTED_NAMESPACES,
        holdings=CONNECTIONS_MAX,
        holdings_per_connection=NAMESPACES_PER_CONNECTION,
        name_memory=64 * VALUE_BLOCKS * (max_param_values + ITEMS_MAX),
        hash_key=hash_key,
        extra=region_extra(max_tokens, max_param_values),
        reply_max=REPLY_SIZE,
        posted_max=POSTED_MAX,
        tokens=max_tokens,
        param_values=max_param_values,
        token_key=token_key,
        make_session=SentinelSession,
    )
    store.set_limits(
        max_allowed_qps=max_allowed_qps,
        sweep_interval_ns=sweep_interval_ns,
        sweep_max_tokens=sweep_max_tokens,
        sweep_max_duration_ns=sweep_max_duration_ns,
    )
    return store


cdef bint is_blank(const uint8_t* data, uint32_t size) noexcept:
    """Whether Java takes it for blank: nothing but ASCII's white space."""
    cdef uint32_t i
    for i in range(size):
        if not (data[i] == 0x20 or 0x09 <= data[i] <= 0x0d or 0x1c <= data[i] <= 0x1f):
            return False
    return True


cdef class SentinelSession(Session):
    """One connection of the sentinel protocol."""

    def __cinit__(self, SentinelStore store not None):
        store.client_enter(self.connection)

    cdef void leave(self) noexcept:
        if self.connection:
            (<SentinelStore>self.store).client_leave(self.connection)
        Session.leave(self)

    cpdef closed(self, int64_t now_ns):
        (<SentinelStore>self.store).now_ns = now_ns
        Session.closed(self, now_ns)

    cdef int begin_call(self, int64_t now_ns) except -1:
        Session.begin_call(self, now_ns)
        (<SentinelStore>self.store).now_ns = now_ns
        return 0

    # ---- requests ----

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        """The key of a frame is its body; verdict OK says that it is long enough for its type."""
        cdef Records* records = &(<SentinelStore>self.store).records
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
        frame.verdict = 1
        if total < HEAD_SIZE or total > FRAME_MAX or data[6] >= TYPES:
            return total
        frame.key_size = total - HEAD_SIZE
        if frame.key_size < BODY_MIN[data[6]]:
            return total
        frame.verdict = OK
        if data[6] == RELEASE or data[6] == KEEP:
            frame.tag = name_tag(&records.tokens, frame.key, ID_SIZE)
            index_prefetch(&records.tokens.index, frame.tag)
        elif data[6] != PING:
            frame.tag = name_tag(&records.flows, frame.key, ID_SIZE)  # the same among parameters: they share the key
        return total

    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept:
        cdef Records* records = &(<SentinelStore>self.store).records
        cdef uint32_t number, acquires = 0
        cdef int i
        for i in range(count):
            acquires += frames[i].verdict == OK and frames[i].data[6] == ACQUIRE
            if frames[i].verdict == OK and (frames[i].data[6] == RELEASE or frames[i].data[6] == KEEP):
                number = index_peek(&records.tokens.index, frames[i].tag)
                if number:
                    prefetch(record_at(&records.tokens, number))
        if acquires:
            (<SentinelStore>self.store).foresee(acquires)

    cdef int execute_frame(self, const Frame* frame) except -1:
        cdef uint8_t message = frame.data[6] if frame.size >= HEAD_SIZE else <uint8_t>PING
        if frame.verdict != OK:
            return self.refuse(frame, BAD_REQUEST)
        if message == FLOW:
            return self.flow(frame)
        if message == PARAM:
            return self.param(frame)
        if message == PING:
            return self.ping(frame)
        return self.call(frame)

    cdef int refuse(self, const Frame* frame, int status) except -1:
        """Without what the message would tell; a body that is none is answered as far as its head can be read."""
        cdef SentinelStore store = <SentinelStore>self.store
        cdef uint8_t* target = store.out + store.out_size
        cdef bint has_head = frame.size >= HEAD_SIZE
        cdef uint8_t message = frame.data[6] if has_head else <uint8_t>PING
        cdef uint32_t xid = load_be32(frame.data + LENGTH_SIZE) if has_head else 0
        if message == FLOW or message == PARAM:
            store.out_size += reply_numbers(target, xid, message, status, 0, 0)
        else:  # for one that is none, as for PING and RELEASE: no body
            store.out_size += reply_call(target, xid, message, status, 0)
        store.answers[message if message < TYPES and has_head else <int>TYPES][status - STATUS_MIN] += 1
        return DONE

    cdef int ping(self, const Frame* frame) except -1:
        """Section "PING". A namespace is a counter, and to be connected to it a holding."""
        cdef SentinelStore store = <SentinelStore>self.store
        cdef Region* region = &store.region
        cdef const uint8_t* name = frame.key + 4
        cdef uint32_t size, tag, number
        if frame.key_size < 4:
            return self.refuse(frame, FAIL if frame.key_size == 0 else BAD_REQUEST)
        size = load_be32(frame.key)
        if size > frame.key_size - 4:
            return self.refuse(frame, BAD_REQUEST)
        if is_blank(name, size):
            return self.refuse(frame, FAIL)
        tag = name_tag(&region.names, name, size)
        number = table_find(&region.names, tag, name, size)
        if number == 0 and name_blocks(&region.names, size):
            if pool_left(&region.header.blocks) < region.header.blocks.capacity // 2:
                return self.refuse(frame, FAIL)  # the other half is for values of parameters
        if number == 0 or ledger_find(region, self.connection, number, tag) == 0:
            if counter_acquire(region, self.connection, tag, name, size, 1, 0xffffffff, self.since) != GRANTED:
                return self.refuse(frame, FAIL)
            number = table_find(&region.names, tag, name, size)
        store_be32(
            reply_begin(store.out + store.out_size, load_be32(frame.data + LENGTH_SIZE), PING, OK, 4),
            counter_at(region, number).consumption,
        )
        store.out_size += REPLY_HEAD + 4
        store.answers[<int>PING][OK - STATUS_MIN] += 1
        return DONE

    cdef int flow(self, const Frame* frame) except -1:
        """Section "FLOW"."""
        cdef SentinelStore store = <SentinelStore>self.store
        cdef Records* records = &store.records
        cdef uint32_t count = load_be32(frame.key + ID_SIZE)
        cdef uint32_t number
        if <int64_t>load_be64(frame.key) <= 0 or <int32_t>count <= 0:
            return self.refuse(frame, BAD_REQUEST)
        number = table_find(&records.flows, frame.tag, frame.key, ID_SIZE)
        if number == 0 or not flow_at(records, number).record.flags & RULED or flow_at(records, number).grade != QPS:
            return self.refuse(frame, NO_RULE)
        return self.tell(frame, store.ask_flow(number, count, frame.key_size > 12 and frame.key[12] != 0))

    cdef int param(self, const Frame* frame) except -1:
        """Section "PARAM"."""
        cdef SentinelStore store = <SentinelStore>self.store
        cdef uint32_t count = load_be32(frame.key + ID_SIZE)
        cdef uint32_t values = load_be32(frame.key + 12)
        cdef uint32_t place = 16, size, number, _value
        if <int64_t>load_be64(frame.key) <= 0 or <int32_t>count <= 0 or <int32_t>values <= 0:
            return self.refuse(frame, BAD_REQUEST)
        if values > frame.key_size // VALUES_MIN:
            return self.refuse(frame, BAD_REQUEST)
        for _value in range(values):
            size = value_size(frame.key + place, frame.key_size - place)
            if size == 0:
                return self.refuse(frame, BAD_REQUEST)
            place += size
        number = table_find(&store.records.params, frame.tag, frame.key, ID_SIZE)
        if number == 0:
            return self.refuse(frame, NO_RULE)
        return self.tell(frame, store.ask_param(number, count, values, frame.key + 16))

    cdef int tell(self, const Frame* frame, Answer answer) except -1:
        """Replies to a FLOW or PARAM."""
        cdef SentinelStore store = <SentinelStore>self.store
        cdef uint8_t message = frame.data[6]
        store.out_size += reply_numbers(
            store.out + store.out_size, load_be32(frame.data + LENGTH_SIZE), message, answer.status, answer.remaining,
            answer.wait_ms,
        )
        store.answers[message][answer.status - STATUS_MIN] += 1
        return DONE

    cdef int call(self, const Frame* frame) except -1:
        """Sections "ACQUIRE", "RELEASE" and "KEEP"; or has a token service answer them."""
        cdef SentinelStore store = <SentinelStore>self.store
        cdef uint8_t message = frame.data[6]
        cdef uint32_t xid = load_be32(frame.data + LENGTH_SIZE)
        cdef uint8_t[ID_SIZE] id
        cdef int32_t left_ms = 0
        cdef int64_t value = 0
        cdef int status
        if message == ACQUIRE and (<int64_t>load_be64(frame.key) <= 0 or <int32_t>load_be32(frame.key + ID_SIZE) <= 0):
            return self.refuse(frame, BAD_REQUEST)
        if store.submit_calls is not None:
            status = store.delegate_call(self, xid, message, frame.key, frame.key_size)
            return DONE if status == OK else self.refuse(frame, status)
        if message == ACQUIRE:
            status = self.acquire(frame, id)
            if status == OK:
                value = <int64_t>load_be64(id)
        elif message == RELEASE:
            status = store.release(frame.key, frame.tag)
        else:
            status = store.keep(frame.key, frame.tag, self.connection, &left_ms)
            value = left_ms
        store.out_size += reply_call(store.out + store.out_size, xid, message, status, value)
        store.answers[message][status - STATUS_MIN] += 1
        return DONE

    cdef int acquire(self, const Frame* frame, uint8_t* id) noexcept:
        cdef SentinelStore store = <SentinelStore>self.store
        cdef uint32_t number = table_find(&store.records.flows, frame.tag, frame.key, ID_SIZE)
        if number == 0 or not store.is_ruled(number):
            return NO_RULE
        return store.acquire(number, load_be32(frame.key + ID_SIZE), self.connection, id)
