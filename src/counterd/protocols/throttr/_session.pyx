"""The throttr protocol without I/O: parses, executes and answers requests.

Floor 2 (ARCHITECTURE.md). Section names are those of the protocol's document. docs/protocols/throttr.md describes the
real bytes, all differences from the original Throttr server, and the reasons.

A request is an opcode, then fixed bytes, which include the sizes of the name and the value, then the name and the
value. Framing is lost if the opcode is unknown, or the request has more than max_message bytes.
"""

from cpython.bytes cimport PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from counterd._core cimport DONE, FRAME_STEP_SHIFT, FRAMES_AHEAD, LATER, Frame, Session
from counterd.engine.byteorder cimport prefetch
from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.debug cimport debug_check
from counterd.engine.permits cimport ledger_find, permit_at
from counterd.engine.table cimport index_peek, index_prefetch, name_blocks, name_tag, table_find
from counterd.protocols.throttr._channels cimport Channels, channel_enter, channel_find, channel_leave
from counterd.protocols.throttr._keys cimport (
    KEY_BUFFER, Key, Keys, key_at, key_count_read, key_count_write, key_create, key_expire, key_expire_at, key_expires,
    key_lives, key_make_buffer, key_remove, key_ttl, moment_after, moment_before, value_blocks, value_free,
    value_length, value_prefetch, value_replace, value_write,
)
from counterd.protocols.throttr._listing cimport (
    CONNECTION_SIZE, SUBSCRIBER_SIZE, Listing, write_connection, write_stat, write_subscriber,
)
from counterd.protocols.throttr._members cimport Member, member_enter, member_find_id
from counterd.protocols.throttr._store cimport (
    SUBSCRIPTION_BLOCKS, Rate, ThrottrState, ThrottrStore, append, reply,
)
from counterd.protocols.throttr._wire cimport (
    CHANNEL, CHANNELS, CONNECTION, CONNECTIONS, DECREASE, EVENT, GET, ID_SIZE, INCREASE, INFO, INSERT, LIST, OPCODES,
    PATCH, PUBLISH, PURGE, QUERY, QUOTA, REPLY_BESIDE, REPLY_MIN, SET, STAT, STATS, SUBSCRIBE, TTL, UNSUBSCRIBE, UPDATE,
    WHOAMI, Answer, Layout, Request, load_number, put, reply_encode, request_decode,
)

from counterd.protocols.throttr._store import KEY_BYTES

from counterd.version import __version__

cdef enum:
    BROKEN = 1              # a frame's parse_result: framing is lost
    PUBLISH_STEPS = 64      # subscribers that a PUBLISH serves at once; ticks serve the rest
    EVENTS_DEEP = 16        # nested EVENTs; each is answered 01 before the reply to the request in it
    CHANNEL_STEPS = 1024    # subscribers that one reply lists: less than REPLY_MIN bytes
    INFO_SIZE = 433
    NS_PER_TENTH = 100000000

# The order of requests in INFO.
cdef uint8_t[18] INFO_ORDER = [
    INSERT, QUERY, UPDATE, PURGE, GET, SET, LIST, INFO, STATS, STAT, SUBSCRIBE, UNSUBSCRIBE, PUBLISH, CHANNEL, CHANNELS,
    WHOAMI, CONNECTION, CONNECTIONS,
]
cdef bytes VERSION = __version__.encode("ascii")[:16]
cdef bytes HEX = b"0123456789abcdef"

CHANNELS_MIN = 65536


def power_of_two(number):
    """Returns the largest power of two that is not above a number."""
    return 1 << number.bit_length() - 1


def open_store(*, int value_size, uint64_t memory_limit, uint64_t max_message, uint64_t max_queued,
               int64_t expiry_grace_ns, bytes hash_key not None, int64_t now_ns):
    """Makes a store. value_size: the bytes of a number: 1, 2, 4 or 8. hash_key: 16 random bytes. now_ns: the caller's
    clock.

    Raises ValueError for impossible sizes, and MemoryError if the memory cannot be mapped.
    """
    # The number of slots is a power of two, so that none are wasted. When all are used, keys take half of the limit.
    slots = power_of_two(max(4, memory_limit // KEY_BYTES))
    channels = min(CONNECTIONS_MAX, max(CHANNELS_MIN, power_of_two(memory_limit // 2048 + 1)))
    return ThrottrStore(
        value_size=value_size,
        memory_limit=memory_limit,
        max_message=max_message,
        expiry_grace_ns=expiry_grace_ns,
        keys=slots // 2,
        channels=2 * channels,  # SUBSCRIBE gets half of these and of the subscriptions: see has_places()
        subscriptions=4 * channels,
        make_session=ThrottrSession,
        hash_key=hash_key,
        reply_max=max(REPLY_MIN, max_message + REPLY_BESIDE),
        posted_max=max_queued,
        now_ns=now_ns,
    )


cdef inline uint8_t* put_rate(uint8_t* target, const Rate* rate) noexcept:
    return put(put(target, rate.total), rate.last)


cdef inline int refuse(ThrottrStore store, const Frame* frame) noexcept:
    store.state.refusals[frame.data[0]] += 1
    append(store, 1)[0] = 0
    return DONE


cdef inline void count_bytes(ThrottrSession session, size_t sent) noexcept:
    """Adds executed input and sent output to the member's bytes.

    Called within a call of the store, because other connections read these numbers.
    """
    if session.member != NULL:
        session.member.read_bytes += session.arrived
        session.member.write_bytes += sent
    session.arrived = 0


# ---- decisions: DONE with an answer, or LATER ----------------------------------------------------------------------

cdef inline int unless_later(int room) noexcept:
    """Converts a result of find_room() other than DONE: FULL means that the request is refused, so it becomes DONE."""
    return LATER if room == LATER else DONE


cdef inline int decide_new(ThrottrStore store, Member* member, const Request* request, Answer* answer) noexcept:
    """Decides about an INSERT or a SET of a new key (sections "INSERT" and "SET")."""
    cdef Keys* keys = &store.keys
    cdef bint is_buffer = request.opcode == SET
    cdef uint32_t number = table_find(&keys.table, request.tag, request.name, request.name_size)
    cdef uint32_t blocks = name_blocks(&keys.table, request.name_size)
    cdef int64_t expires_ns = moment_after(store.now_ns, request.ttl_type, request.ttl)
    cdef int room
    if number:
        if key_at(keys, number).timer.due_ns > store.now_ns:
            return decide_overwrite(store, member, number, expires_ns, request, answer) if is_buffer else DONE
        key_expire(keys, number)  # the next tick would have found it
    room = store.find_room(1, blocks + value_blocks(request.value_size) if is_buffer else blocks, 0)
    if room != DONE:
        return unless_later(room)
    number = key_create(
        keys, request.tag, request.name, request.name_size, request.ttl_type, expires_ns, store.enter_epoch()
    )
    if is_buffer:
        key_make_buffer(keys, number, request.name + request.name_size, request.value_size)
        member.allocated_bytes += request.value_size
    else:
        key_at(keys, number).content.quota = request.number
        member.allocated_bytes += store.width
    store.expect(key_at(keys, number).timer.due_ns)
    answer.accepted = True
    return DONE


cdef inline int decide_overwrite(
    ThrottrStore store, Member* member, uint32_t number, int64_t expires_ns, const Request* request, Answer* answer
) noexcept:
    """Decides about a SET of an existing key. For a key in its grace the reply is success, but nothing is stored."""
    cdef Keys* keys = &store.keys
    cdef Key* key = key_at(keys, number)
    cdef const uint8_t* value = request.name + request.name_size
    cdef int room
    answer.accepted = key.record.flags & KEY_BUFFER != 0
    if not answer.accepted or not key_lives(keys, key, store.now_ns):
        return DONE
    if value_blocks(request.value_size) == value_blocks(value_length(keys, key)):
        value_replace(keys, key, value, request.value_size)
    else:
        room = store.find_room(0, value_blocks(request.value_size), value_blocks(value_length(keys, key)))
        if room != DONE:
            answer.accepted = False
            return unless_later(room)
        value_free(keys, key)
        value_write(keys, key, value, request.value_size)
    key.record.note = request.ttl_type
    key_expire_at(keys, number, expires_ns)
    key_count_write(key, store.state.minute)
    member.allocated_bytes += request.value_size
    store.expect(key.timer.due_ns)
    return DONE


cdef inline bint change_quota(Key* key, const Request* request, uint64_t number_max) noexcept:
    """Changes a quota. An unknown change does nothing and gets the reply success."""
    cdef uint64_t quota = key.content.quota
    if request.change == PATCH:
        quota = request.number
    elif request.change == INCREASE:
        if request.number > number_max - quota:
            return False
        quota += request.number
    elif request.change == DECREASE:
        if request.number > quota:
            return False
        quota -= request.number
    key.content.quota = quota
    return True


cdef inline void change_ttl(ThrottrStore store, uint32_t number, const Request* request) noexcept:
    cdef Keys* keys = &store.keys
    cdef Key* key = key_at(keys, number)
    cdef int64_t expires_ns = key_expires(keys, key)
    if request.change == PATCH:
        expires_ns = moment_after(store.now_ns, key.record.note, request.number)
    elif request.change == INCREASE:
        expires_ns = moment_after(expires_ns, key.record.note, request.number)
    elif request.change == DECREASE:
        expires_ns = moment_before(expires_ns, key.record.note, request.number)
    key_expire_at(keys, number, expires_ns)
    store.expect(key.timer.due_ns)


cdef inline void decide_update(ThrottrStore store, uint32_t number, const Request* request, Answer* answer) noexcept:
    """Executes an UPDATE (section "UPDATE")."""
    cdef Key* key = key_at(&store.keys, number)
    if request.attribute == QUOTA and not key.record.flags & KEY_BUFFER:
        answer.accepted = change_quota(key, request, store.number_max)
    elif request.attribute == TTL:
        change_ttl(store, number, request)
        answer.accepted = True
    if answer.accepted:
        key_count_write(key, store.state.minute)


cdef inline void decide_read(ThrottrStore store, Member* member, const Key* key, bint is_get, Answer* answer) noexcept:
    """Executes a QUERY, where a buffer has the quota 0, or a GET, where a quota has an empty value."""
    cdef bint is_buffer = key.record.flags & KEY_BUFFER
    answer.key = key
    answer.quota = 0 if is_buffer else key.content.quota
    answer.size = value_length(&store.keys, key) if is_get and is_buffer else 0
    answer.ttl_type = key.record.note
    answer.ttl = key_ttl(&store.keys, key, store.now_ns)
    member.consumed_bytes += answer.size if is_get else <uint32_t>store.width


cdef inline int decide_key(ThrottrStore store, Member* member, const Request* request, Answer* answer) noexcept:
    """Decides about requests for an existing key.

    All requests except PURGE count as a read of the key, after a STAT has taken its figures.
    """
    cdef uint32_t number = table_find(&store.keys.table, request.tag, request.name, request.name_size)
    cdef Key* key
    if number == 0 or not key_lives(&store.keys, key_at(&store.keys, number), store.now_ns):
        return DONE
    key = key_at(&store.keys, number)
    answer.accepted = request.opcode != UPDATE
    if request.opcode == PURGE:
        key_remove(&store.keys, number)
        return DONE
    if request.opcode == STAT:
        write_stat(key, store.state.minute, answer.stat)
    key_count_read(key, store.state.minute)
    if request.opcode == UPDATE:
        decide_update(store, number, request, answer)
    elif request.opcode != STAT:
        decide_read(store, member, key, request.opcode == GET, answer)
    return DONE


cdef inline int decide_subscription(
    ThrottrStore store, ThrottrSession session, const Request* request, Answer* answer
) noexcept:
    """Executes a SUBSCRIBE or an UNSUBSCRIBE (sections "SUBSCRIBE" and "UNSUBSCRIBE")."""
    cdef Channels* channels = &store.channels
    cdef uint32_t blocks, times
    cdef int room
    if request.opcode == UNSUBSCRIBE:
        times = channel_leave(channels, session.connection, request.tag, request.name, request.name_size)
        if times:
            session.member.repeated -= times - 1
            store.state.repeated -= times - 1
        answer.accepted = times != 0
        return DONE
    blocks = SUBSCRIPTION_BLOCKS + name_blocks(&channels.permits.table, request.name_size)
    room = store.find_room(0, blocks, 0)
    if room != DONE:
        return unless_later(room)
    if store.has_places(channel_find(channels, request.tag, request.name, request.name_size) == 0):
        answer.accepted = session.enter_channel(request.tag, request.name, request.name_size)
    return DONE


cdef inline int decide(
    ThrottrStore store, ThrottrSession session, const Request* request, Answer* answer
) noexcept:
    if request.opcode == INSERT or request.opcode == SET:
        return decide_new(store, session.member, request, answer)
    if request.opcode == SUBSCRIBE or request.opcode == UNSUBSCRIBE:
        return decide_subscription(store, session, request, answer)
    return decide_key(store, session.member, request, answer)


# ---- sessions -------------------------------------------------------------------------------------------------------

cdef class ThrottrSession(Session):
    """One connection of the throttr protocol.

    Other connections can read the session's data in the region: its member and its subscriptions.
    """

    cdef Member* member         # of its connection, in the region; NULL after give_back()
    cdef Listing listing        # the long reply under way, or None
    cdef size_t arrived         # bytes of the current call that its member has not counted yet

    def __cinit__(self, ThrottrStore store not None):
        """Gives the connection its id, and subscribes it to the channel * and to its own channel, which has the id as
        its name.

        Raises MemoryError if there is no room for the connection.
        """
        cdef uint8_t[2 * ID_SIZE] name
        cdef int i
        self.member = member_enter(
            &store.members, self.connection, store.now_ns + store.wall_ns, store.enter_epoch()
        )
        if self.member == NULL:
            raise MemoryError(
                f"no room for another connection: {store.members.capacity} connections can have a channel")
        store.sessions[self.connection] = <void*>self
        for i in range(ID_SIZE):
            name[2 * i] = <uint8_t>HEX[self.member.id[i] >> 4]
            name[2 * i + 1] = <uint8_t>HEX[self.member.id[i] & 15]
        if not self.enter_channel(name_tag(&store.channels.permits.table, b"*", 1), b"*", 1) or not self.enter_channel(
            name_tag(&store.channels.permits.table, name, 2 * ID_SIZE), name, 2 * ID_SIZE
        ):
            raise MemoryError("no room for another connection's subscriptions")

    def __dealloc__(self):
        if self.member != NULL:  # the store must not post to it, even before forget()
            (<ThrottrStore>self.store).sessions[self.connection] = NULL

    cdef void give_back(self) noexcept:
        self.member = NULL
        Session.give_back(self)

    cdef int begin_call(self, int64_t now_ns) except -1:
        cdef ThrottrStore store = <ThrottrStore>self.store
        Session.begin_call(self, now_ns)
        if now_ns >= store.state.minute_end_ns:
            store.turn_minute(now_ns)
        return 0

    cpdef bytes receive(self, bytes data, int64_t now_ns):
        cdef bytes output
        self.arrived = 0 if data is None else PyBytes_GET_SIZE(data)
        output = Session.receive(self, data, now_ns)
        if self.arrived:  # nothing was executed: the input was kept or discarded
            self.store.begin_call(now_ns)
            count_bytes(self, 0)
            self.store.end_call()
        return output

    cdef bytes end_call(self):
        count_bytes(self, self.store.out_size)
        return Session.end_call(self)

    cdef bytes take_posted(self):
        cdef bytes output = Session.take_posted(self)
        count_bytes(self, PyBytes_GET_SIZE(output))
        return output

    # ---- requests ----

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef const Layout* layout
        cdef uint64_t total
        cdef uint64_t value = 0
        frame.data = data
        frame.size = 1
        frame.key_size = 0
        frame.parse_result = BROKEN
        if data[0] >= OPCODES or store.layouts[data[0]].head == 0:
            return -1
        layout = &store.layouts[data[0]]
        if size < layout.head:
            return 0
        frame.key = data + layout.head
        if layout.name_at:
            frame.key_size = data[layout.name_at]
        total = layout.head + frame.key_size
        if layout.value_at:
            value = load_number(data + layout.value_at, store.width)
        if total > store.message_max or value > store.message_max - total:
            return -1
        total += value
        if size < total:
            return 0
        frame.size = <uint32_t>total
        frame.parse_result = 0
        if layout.name_at and data[0] < SUBSCRIBE:
            frame.tag = name_tag(&store.keys.table, frame.key, frame.key_size)
            index_prefetch(&store.keys.table.index, frame.tag)
        elif layout.name_at and data[0] != EVENT:
            frame.tag = name_tag(&store.channels.permits.table, frame.key, frame.key_size)
        return frame.size

    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept:
        cdef Keys* keys = &(<ThrottrStore>self.store).keys
        cdef uint32_t[FRAMES_AHEAD] buffers
        cdef uint32_t number
        cdef uint8_t opcode
        cdef const uint8_t* record
        cdef int i, buffer_count = 0
        for i in range(count):
            opcode = frames[i].data[0]
            if frames[i].parse_result == 0 and frames[i].key_size and opcode <= STAT:
                number = index_peek(&keys.table.index, frames[i].tag)
                if number:
                    record = <const uint8_t*>key_at(keys, number)
                    prefetch(record)
                    prefetch(record + 64)
                    if opcode == GET or opcode == SET:
                        buffers[buffer_count] = number
                        buffer_count += 1
        for i in range(buffer_count):  # by now the first records are in the cache, and locate the values
            value_prefetch(keys, key_at(keys, buffers[i]))

    cdef int execute_frame(self, const Frame* frame) except -1:
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint8_t opcode = frame.data[0]
        cdef int done
        if frame.parse_result != 0:
            store.state.broken += 1
            append(store, 1)[0] = 0
            return DONE
        debug_check(self.member != NULL)
        store.state.requests[opcode].total += 1
        self.member.requests[opcode] += 1
        done = self.execute(frame)
        if done == LATER:
            store.state.requests[opcode].total -= 1
            self.member.requests[opcode] -= 1
        return done

    cdef int execute(self, const Frame* frame) except -1:
        """Decodes, decides and answers requests for one key or one subscription."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef Request request
        cdef Answer answer
        cdef uint8_t opcode = frame.data[0]
        if opcode > UNSUBSCRIBE or opcode == LIST or opcode == INFO or opcode == STATS:
            return self.execute_other(opcode, frame)
        request_decode(frame, &store.layouts[opcode], store.width, &request)
        answer.accepted = False
        if decide(store, self, &request, &answer) == LATER:
            return LATER
        if not answer.accepted:
            store.state.refusals[opcode] += 1
        store.out_size += reply_encode(store.out + store.out_size, opcode, store.width, &store.keys, &answer)
        return DONE

    cdef int execute_other(self, uint8_t opcode, const Frame* frame) except -1:
        """Executes all other requests, which write their replies themselves."""
        if opcode == PUBLISH:
            return self.publish(frame)
        if opcode == EVENT:
            return self.event(frame)
        if opcode == WHOAMI:
            memcpy(reply(<ThrottrStore>self.store, 1 + ID_SIZE), self.member.id, ID_SIZE)
            return DONE
        if opcode == INFO:
            return self.info()
        if opcode == CONNECTION:
            return self.tell_connection(frame)
        if opcode == CHANNEL:
            return self.list_subscribers(frame)
        if opcode == CHANNELS and not (<ThrottrStore>self.store).catch_up():
            return LATER  # gone connections must not be counted as subscribers
        return self.list_all(opcode, 0)

    cdef bint enter_channel(self, uint32_t tag, const uint8_t* name, uint32_t size) noexcept:
        """Subscribes to a channel once more. Returns False if the subscription is not possible."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint32_t times = channel_enter(
            &store.channels, self.connection, tag, name, size, store.now_ns + store.wall_ns,
            <uint32_t>(store.now_ns // NS_PER_TENTH), store.enter_epoch()
        )
        if times > 1:
            self.member.repeated += 1
            store.state.repeated += 1
        return times != 0

    cdef int publish(self, const Frame* frame) except -1:
        """Executes a PUBLISH (section "PUBLISH").

        A publisher that is subscribed gets the event first, and then the reply.
        """
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef ThrottrState* state = store.state
        cdef uint32_t number, entry
        if state.event.channel:
            return LATER
        if store.channels.permits.state.leaving_first and not store.catch_up():
            return LATER  # gone connections must not be served as subscribers
        number = channel_find(&store.channels, frame.tag, frame.key, frame.key_size)
        if number == 0:
            return refuse(store, frame)
        store.publish(number, self.connection, frame)
        self.member.published_bytes += state.event.payload
        entry = ledger_find(&store.channels.permits, self.connection, number, frame.tag)
        if entry:
            store.channels.subscriptions[entry].write_bytes += state.event.payload
            store.give(entry)
            self.post(b"\x01")
        else:
            append(store, 1)[0] = 1
        store.budget -= PUBLISH_STEPS - store.deliver(PUBLISH_STEPS)
        if state.event.channel:
            store.has_work = True
        return DONE

    cdef int event(self, const Frame* frame) except -1:
        """Executes EVENT as a request: executes its payload, which is a request.

        At most EVENTS_DEEP EVENTs can contain each other.
        """
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint32_t depth = 0
        cdef size_t start = store.out_size
        cdef Frame inner
        cdef const uint8_t* payload = frame.key + frame.key_size
        cdef size_t size = frame.data + frame.size - payload
        while size and depth < EVENTS_DEEP and self.parse_frame(payload, size, &inner) > 0:
            depth += 1
            reply(store, 1)
            if inner.data[0] != EVENT:
                # Charge only the inner request: a long EVENT around it would use up every budget, and never run.
                store.budget += (frame.size - inner.size) >> FRAME_STEP_SHIFT
                return self.execute_nested(&inner, start, depth)
            store.state.requests[<int>EVENT].total += 1
            self.member.requests[<int>EVENT] += 1
            payload = inner.key + inner.key_size
            size = inner.data + inner.size - payload
        return refuse(store, frame)

    cdef int execute_nested(self, const Frame* frame, size_t start, uint32_t depth) except -1:
        """Executes a request that is inside `depth` EVENTs.

        The statuses of these EVENTs are at `start` of the output.
        """
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef int done = self.execute_frame(frame)
        if done == LATER:
            store.out_size = start
            store.state.requests[<int>EVENT].total -= depth - 1
            self.member.requests[<int>EVENT] -= depth - 1
        elif self.posted_size:  # its own event, which must be sent before the whole reply
            store.out_size = start
            self.post(b"\x01" * depth)
        return done

    # ---- listings and INFO ----

    cdef int info(self) except -1:
        """Executes an INFO (section "INFO")."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef ThrottrState* state = store.state
        cdef const Keys* keys = &store.keys
        cdef Rate total = Rate(0, 0, 0)
        cdef uint8_t* target
        cdef int opcode
        if not store.catch_up():
            return LATER
        for opcode in range(OPCODES):
            total.total += state.requests[opcode].total
            total.last += state.requests[opcode].last
        state.read_bytes.total = store.bytes_in
        state.write_bytes.total = store.bytes_out
        target = put(reply(store, INFO_SIZE), <uint64_t>((store.now_ns + store.wall_ns) // 1000000000))
        target = put_rate(target, &total)
        for opcode in INFO_ORDER:
            target = put_rate(target, &state.requests[opcode])
        target = put_rate(put_rate(target, &state.read_bytes), &state.write_bytes)
        target = put(target, keys.state.counters + keys.state.buffers)
        target = put(put(target, keys.state.counters), keys.state.buffers)
        target = put(put(target, keys.state.counters * store.width), keys.state.buffer_bytes)
        target = put(target, store.channels.permits.state.holdings.used + state.repeated)
        target = put(target, store.channels.permits.table.pool.used)
        target = put(target, <uint64_t>(state.started_ns + store.wall_ns))
        target = put(target, store.sessions_open)
        memset(target, 0, 16)
        memcpy(target, <const uint8_t*>VERSION, len(VERSION))
        return DONE

    cdef int tell_connection(self, const Frame* frame) except -1:
        """Executes a CONNECTION (section "CONNECTION"): replies with one connection, by its id."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef const Member* member = member_find_id(&store.members, frame.data + 1)
        if member == NULL:
            return refuse(store, frame)
        write_connection(store, <uint32_t>(member - store.members.records), reply(store, 1 + CONNECTION_SIZE))
        return DONE

    cdef int list_subscribers(self, const Frame* frame) except -1:
        """Executes a CHANNEL (section "CHANNEL")."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint32_t number, entry, count, _time
        cdef uint8_t* target
        if not store.catch_up():
            return LATER
        number = channel_find(&store.channels, frame.tag, frame.key, frame.key_size)
        if number == 0:
            return refuse(store, frame)
        count = permit_at(&store.channels.permits, number).consumption
        if count > CHANNEL_STEPS:
            return self.list_all(CHANNEL, number)
        store.budget -= count
        target = put(reply(store, 9 + count * SUBSCRIBER_SIZE), count)
        entry = permit_at(&store.channels.permits, number).holders
        while entry:
            for _time in range(store.channels.permits.holdings[entry].amount):
                write_subscriber(store, entry, target)
                target += SUBSCRIBER_SIZE
            entry = store.channels.permits.holdings[entry].of_record.next
        return DONE

    cdef int list_all(self, uint8_t opcode, uint32_t channel) except -1:
        """Begins a listing. channel: for CHANNEL, the channel whose subscribers are listed."""
        self.listing = Listing(<ThrottrStore>self.store, opcode, channel)
        self.position = 1
        self.produce()
        return DONE

    cdef int produce(self) except -1:
        if self.listing.go_on():
            self.listing = None
            self.position = 0
        return 0
