"""The throttr protocol, sans-I/O: what a request is, what it does, and the replies.

Floor 2. Section names here are those of the protocol's document; docs/protocols/throttr.md has the wire as it really
is, and says where and why this differs from the reference implementation.

A request is its opcode and what its layout says: fixed bytes, with the sizes of a name and a value among them, then
both. Its parser answers with the bytes it takes, 0 for "more are needed", or -1 when framing is lost: an unknown
opcode, or more than max_message bytes.
"""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._core cimport (
    CONNECTIONS_MAX, DONE, FRAME_STEP_SHIFT, FRAMES_AHEAD, LATER, Frame, Region, ledger_find,
)
from counterd._table cimport index_peek, index_prefetch, name_blocks, name_tag, table_find
from counterd.byteorder cimport load_le16, load_le32, load_le64, prefetch, store_le64
from counterd.protocols.throttr._keys cimport (
    KEY_BUFFER, Key, Keys, key_at, key_count_read, key_count_write, key_create, key_expire, key_expire_at, key_expires,
    key_lives, key_make_buffer, key_remove, key_ttl, moment_after, moment_before, value_blocks, value_free,
    value_prefetch, value_length, value_read, value_replace, value_write,
)
from counterd.protocols.throttr._store cimport (
    CHANNEL, CHANNELS, CONNECTION, EVENT, GET, ID_SIZE, INFO, INSERT, OPCODES, PUBLISH, PURGE, QUERY, REPLY_MIN, SET,
    STAT, SUBSCRIBE, SUBSCRIPTION_BLOCKS, UNSUBSCRIBE, UPDATE, WHOAMI, Layout, ThrottrStore,
)

from counterd.protocols.throttr._store import KEY_BYTES, region_extra

cdef enum:
    BROKEN = 1              # a frame's verdict: framing is lost
    PUBLISH_STEPS = 64      # subscribers that a PUBLISH serves at once; the rest have their turn
    EVENTS_DEEP = 16        # each is answered 01 before the reply to what is in it

# Section "UPDATE".
cdef enum:
    QUOTA = 0
    TTL = 1
    PATCH = 0
    INCREASE = 1
    DECREASE = 2

CHANNELS_MIN = 65536


cdef inline uint64_t load_number(const uint8_t* source, int width) noexcept:
    """N bytes. Section "Dynamic Value Size"."""
    if width == 2:
        return load_le16(source)
    if width == 1:
        return source[0]
    if width == 4:
        return load_le32(source)
    return load_le64(source)


def power_of_two(number):
    """The largest that is not above it."""
    return 1 << number.bit_length() - 1


def open_store(*, int value_size, uint64_t memory_limit, uint64_t max_message, uint64_t max_queued,
               int64_t expiry_grace_ns, bytes hash_key not None):
    """A store for numbers of value_size bytes: 1, 2, 4 or 8. The others are bytes and ns; hash_key has 16 random bytes.

    Raises ValueError for impossible sizes, MemoryError if they cannot be mapped.
    """
    if value_size not in (1, 2, 4, 8):
        raise ValueError(f"value_size must be 1, 2, 4 or 8 bytes, not {value_size}")
    # A power of two slots, so that none are idle: with all of them used, keys take half of the limit.
    slots = power_of_two(max(4, memory_limit // KEY_BYTES))
    channels = min(CONNECTIONS_MAX, max(CHANNELS_MIN, power_of_two(memory_limit // 2048 + 1)))
    bits = slots.bit_length() - 1
    return ThrottrStore(
        buckets=2 * channels,  # SUBSCRIBE gets half of these and of the holdings: see has_places()
        holdings=4 * channels,
        name_memory=memory_limit,
        hash_key=hash_key,
        extra=region_extra(bits, 2 * channels, 4 * channels),
        reply_max=max(REPLY_MIN, max_message + 64),  # a GET of the longest value, or an EVENT with it
        posted_max=max_queued,
        bits=bits,
        value_size=value_size,
        memory_limit=memory_limit,
        max_message=max_message,
        expiry_grace_ns=expiry_grace_ns,
        make_session=ThrottrSession,
    )


cdef class ThrottrSession(Lister):
    """One connection of the throttr protocol."""

    # ---- requests ----

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef const Layout* layout
        cdef uint64_t total
        cdef uint64_t value = 0
        frame.data = data
        frame.size = 1
        frame.key_size = 0
        frame.verdict = BROKEN
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
        frame.verdict = 0
        if layout.name_at and data[0] < SUBSCRIBE:
            frame.tag = name_tag(&store.keys.table, frame.key, frame.key_size)
            index_prefetch(&store.keys.table.index, frame.tag)
        elif layout.name_at and data[0] != EVENT:
            frame.tag = name_tag(&store.region.names, frame.key, frame.key_size)
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
            if frames[i].verdict == 0 and frames[i].key_size and opcode <= STAT:
                number = index_peek(&keys.table.index, frames[i].tag)
                if number:
                    record = <const uint8_t*>key_at(keys, number)
                    prefetch(record)
                    prefetch(record + 64)
                    if opcode == GET or opcode == SET:
                        buffers[buffer_count] = number
                        buffer_count += 1
        for i in range(buffer_count):  # by now the first records are there, and say where the values are
            value_prefetch(keys, key_at(keys, buffers[i]))

    cdef int execute_frame(self, const Frame* frame) except -1:
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint8_t opcode = frame.data[0]
        cdef int done
        if frame.verdict != 0:
            store.broken += 1
            self.append(1)[0] = 0
            return DONE
        store.requests[opcode].total += 1
        self.requests[opcode] += 1
        done = self.execute(opcode, frame)
        if done == LATER:
            store.requests[opcode].total -= 1
            self.requests[opcode] -= 1
        return done

    cdef int execute(self, uint8_t opcode, const Frame* frame) except -1:
        if opcode == QUERY:
            return self.query(frame)
        if opcode == UPDATE:
            return self.update(frame)
        if opcode == INSERT:
            return self.insert(frame)
        if opcode == GET:
            return self.get(frame)
        if opcode == SET:
            return self.set(frame)
        if opcode == PURGE:
            return self.purge(frame)
        if opcode == STAT:
            return self.stat(frame)
        if opcode == PUBLISH:
            return self.publish(frame)
        if opcode == SUBSCRIBE:
            return self.subscribe(frame)
        if opcode == UNSUBSCRIBE:
            return self.unsubscribe(frame)
        if opcode == EVENT:
            return self.event(frame)
        if opcode == WHOAMI:
            memcpy(self.reply(1 + ID_SIZE), self.id, ID_SIZE)
            return DONE
        if self.store.region.budget <= 0:
            return LATER
        if opcode == INFO:
            return self.info()
        if opcode == CONNECTION:
            return self.tell_connection(frame)
        if opcode == CHANNEL:
            return self.list_subscribers(frame)
        if opcode == CHANNELS and not (<ThrottrStore>self.store).catch_up():
            return LATER  # whoever has gone is no subscriber
        return self.list_all(opcode, 0)

    cdef uint32_t find_living(self, const Frame* frame) noexcept:
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint32_t number = table_find(&store.keys.table, frame.tag, frame.key, frame.key_size)
        return number if number and key_lives(&store.keys, key_at(&store.keys, number), store.now_ns) else 0

    cdef int without_room(self, const Frame* frame, int room) noexcept:
        """What a request comes to that find_room() had no room for."""
        return LATER if room == LATER else self.refuse(frame)

    cdef int insert(self, const Frame* frame) except -1:
        """Section "INSERT"."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef int n = store.width
        cdef uint8_t ttl_type = frame.data[1 + n]
        cdef uint64_t ttl = load_number(frame.data + 2 + n, n)
        cdef uint32_t number = table_find(&store.keys.table, frame.tag, frame.key, frame.key_size)
        cdef int64_t expires_ns = moment_after(store.now_ns, ttl_type, ttl)
        cdef int room
        if number:
            if key_at(&store.keys, number).timer.due_ns > store.now_ns:
                return self.refuse(frame)
            key_expire(&store.keys, number)  # the next tick would have found it
        room = store.find_room(1, name_blocks(&store.keys.table, frame.key_size), 0)
        if room != DONE:
            return self.without_room(frame, room)
        number = key_create(
            &store.keys, frame.tag, frame.key, frame.key_size, ttl_type, expires_ns, store.enter_epoch()
        )
        key_at(&store.keys, number).content.quota = load_number(frame.data + 1, n)
        self.allocated_bytes += n
        self.expect(number)
        return self.reply_success()

    cdef void expect(self, uint32_t number) noexcept:
        """A key's moment was set: if nothing was to come before it, the caller has to look at next_deadline()."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        if key_at(&store.keys, number).timer.due_ns < store.scheduled_ns:
            store.stirred = True

    cdef int query(self, const Frame* frame) except -1:
        """Section "QUERY". A buffer has quota 0."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef int n = store.width
        cdef uint32_t number = self.find_living(frame)
        cdef Key* key
        cdef uint8_t* target
        if number == 0:
            return self.refuse(frame)
        key = key_at(&store.keys, number)
        key_count_read(key, store.minute)
        self.consumed_bytes += n
        target = self.reply(2 + 2 * n)
        store_le64(target, 0 if key.record.flags & KEY_BUFFER else key.content.quota)
        target[n] = key.record.note
        store_le64(target + n + 1, key_ttl(&store.keys, key, store.now_ns))
        return DONE

    cdef int update(self, const Frame* frame) except -1:
        """Section "UPDATE". An unknown change changes nothing, and is answered as the others are."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint8_t change = frame.data[2]
        cdef uint64_t value = load_number(frame.data + 3, store.width)
        cdef uint32_t number = self.find_living(frame)
        cdef bint changed = False
        cdef Key* key
        if number == 0:
            return self.refuse(frame)
        key = key_at(&store.keys, number)
        key_count_read(key, store.minute)
        if frame.data[1] == QUOTA and not key.record.flags & KEY_BUFFER:
            changed = self.update_quota(key, change, value)
        elif frame.data[1] == TTL:
            changed = True
            self.update_ttl(number, change, value)
        if not changed:
            return self.refuse(frame)
        key_count_write(key, store.minute)
        return self.reply_success()

    cdef bint update_quota(self, Key* key, uint8_t change, uint64_t value) noexcept:
        cdef uint64_t quota = key.content.quota
        if change == PATCH:
            quota = value
        elif change == INCREASE:
            if value > (<ThrottrStore>self.store).number_max - quota:
                return False
            quota += value
        elif change == DECREASE:
            if value > quota:
                return False
            quota -= value
        key.content.quota = quota
        return True

    cdef void update_ttl(self, uint32_t number, uint8_t change, uint64_t value) noexcept:
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef Key* key = key_at(&store.keys, number)
        cdef uint8_t ttl_type = key.record.note
        cdef int64_t expires_ns = key_expires(&store.keys, key)
        if change == PATCH:
            expires_ns = moment_after(store.now_ns, ttl_type, value)
        elif change == INCREASE:
            expires_ns = moment_after(expires_ns, ttl_type, value)
        elif change == DECREASE:
            expires_ns = moment_before(expires_ns, ttl_type, value)
        key_expire_at(&store.keys, number, expires_ns)
        self.expect(number)

    cdef int purge(self, const Frame* frame) except -1:
        """Section "PURGE"."""
        cdef uint32_t number = self.find_living(frame)
        if number == 0:
            return self.refuse(frame)
        key_remove(&(<ThrottrStore>self.store).keys, number)
        return self.reply_success()

    cdef int set(self, const Frame* frame) except -1:
        """Section "SET"."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef int n = store.width
        cdef uint32_t size = frame.size - store.layouts[<int>SET].head - frame.key_size
        cdef uint32_t number = table_find(&store.keys.table, frame.tag, frame.key, frame.key_size)
        cdef uint8_t ttl_type = frame.data[1]
        cdef int64_t expires_ns = moment_after(store.now_ns, ttl_type, load_number(frame.data + 2, n))
        cdef int room
        if number and key_at(&store.keys, number).timer.due_ns > store.now_ns:
            return self.overwrite(number, frame, expires_ns)
        if number:
            key_expire(&store.keys, number)
        room = store.find_room(1, name_blocks(&store.keys.table, frame.key_size) + value_blocks(size), 0)
        if room != DONE:
            return self.without_room(frame, room)
        number = key_create(
            &store.keys, frame.tag, frame.key, frame.key_size, ttl_type, expires_ns, store.enter_epoch()
        )
        key_make_buffer(&store.keys, number, frame.key + frame.key_size, size)
        self.allocated_bytes += size
        self.expect(number)
        return self.reply_success()

    cdef int overwrite(self, uint32_t number, const Frame* frame, int64_t expires_ns) except -1:
        """SET of a key that exists, or of one in its grace: that is told of success, and lost."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef Key* key = key_at(&store.keys, number)
        cdef uint32_t size = frame.size - store.layouts[<int>SET].head - frame.key_size
        cdef int room
        if not key.record.flags & KEY_BUFFER:
            return self.refuse(frame)
        if not key_lives(&store.keys, key, store.now_ns):
            return self.reply_success()
        if value_blocks(size) == value_blocks(value_length(&store.keys, key)):
            value_replace(&store.keys, key, frame.key + frame.key_size, size)
        else:
            room = store.find_room(0, value_blocks(size), value_blocks(value_length(&store.keys, key)))
            if room != DONE:
                return self.without_room(frame, room)
            value_free(&store.keys, key)
            value_write(&store.keys, key, frame.key + frame.key_size, size)
        key.record.note = frame.data[1]
        key_expire_at(&store.keys, number, expires_ns)
        key_count_write(key, store.minute)
        self.allocated_bytes += size
        self.expect(number)
        return self.reply_success()

    cdef int get(self, const Frame* frame) except -1:
        """Section "GET". A counter has an empty value."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef int n = store.width
        cdef uint32_t number = self.find_living(frame)
        cdef uint32_t size = 0
        cdef Key* key
        cdef uint8_t* target
        if number == 0:
            return self.refuse(frame)
        key = key_at(&store.keys, number)
        key_count_read(key, store.minute)
        if key.record.flags & KEY_BUFFER:
            size = value_length(&store.keys, key)
        self.consumed_bytes += size
        target = self.reply(2 + 2 * n + size)
        target[0] = key.record.note
        store_le64(target + 1, key_ttl(&store.keys, key, store.now_ns))
        store_le64(target + 1 + n, size)
        if size:
            value_read(&store.keys, key, target + 1 + 2 * n)
        return DONE

    cdef int stat(self, const Frame* frame) except -1:
        """Section "STAT". It counts as a read, which its own reply does not show."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint32_t number = self.find_living(frame)
        cdef Key* key
        if number == 0:
            return self.refuse(frame)
        key = key_at(&store.keys, number)
        self.write_stat(key, self.reply(33))
        key_count_read(key, store.minute)
        return DONE

    cdef int subscribe(self, const Frame* frame) except -1:
        """Section "SUBSCRIBE"."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint32_t blocks = SUBSCRIPTION_BLOCKS + name_blocks(&store.region.names, frame.key_size)
        cdef int room = store.find_room(0, blocks, 0)
        if room != DONE:
            return self.without_room(frame, room)
        if not store.has_places(table_find(&store.region.names, frame.tag, frame.key, frame.key_size) == 0):
            return self.refuse(frame)
        if not self.enter_channel(frame.tag, frame.key, frame.key_size):
            return self.refuse(frame)
        return self.reply_success()

    cdef int unsubscribe(self, const Frame* frame) except -1:
        """Section "UNSUBSCRIBE"."""
        if not self.leave_channel(frame.tag, frame.key, frame.key_size):
            return self.refuse(frame)
        return self.reply_success()

    cdef int publish(self, const Frame* frame) except -1:
        """Section "PUBLISH". Whoever publishes and is subscribed has the event first, then the reply."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef Region* region = &store.region
        cdef uint32_t number, entry
        if store.event is not None:
            return LATER
        if region.header.leaving_first and not store.catch_up():
            return LATER  # nobody is there who has gone
        number = table_find(&region.names, frame.tag, frame.key, frame.key_size)
        if number == 0:
            return self.refuse(frame)
        store.publish(number, self.connection, frame)
        self.published_bytes += store.event_payload
        entry = ledger_find(region, self.connection, number, frame.tag)
        if entry:
            store.subscriptions[entry].write_bytes += store.event_payload
            store.give(entry)
            self.post(b"\x01")
        else:
            self.reply_success()
        region.budget -= PUBLISH_STEPS - store.deliver(PUBLISH_STEPS)
        if store.event is not None:
            store.stirred = True
        return DONE

    cdef int event(self, const Frame* frame) except -1:
        """EVENT as a request: its payload is a request, and may be another EVENT, EVENTS_DEEP of them at most."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint32_t depth = 0
        cdef size_t start = store.out_size
        cdef Frame inner
        cdef const uint8_t* payload = frame.key + frame.key_size
        cdef size_t size = frame.data + frame.size - payload
        while size and depth < EVENTS_DEEP and self.parse_frame(payload, size, &inner) > 0:
            depth += 1
            self.reply(1)
            if inner.data[0] != EVENT:
                # What is around it, and behind it, is no work: a long one would leave no turn enough for what is in it.
                store.region.budget += (frame.size - inner.size) >> FRAME_STEP_SHIFT
                return self.execute_nested(&inner, start, depth)
            store.requests[<int>EVENT].total += 1
            self.requests[<int>EVENT] += 1
            payload = inner.key + inner.key_size
            size = inner.data + inner.size - payload
        return self.refuse(frame)

    cdef int execute_nested(self, const Frame* frame, size_t start, uint32_t depth) except -1:
        """What was `depth` EVENTs deep, whose statuses are at `start` of the output."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef int done = self.execute_frame(frame)
        if done == LATER:
            store.out_size = start
            store.requests[<int>EVENT].total -= depth - 1
            self.requests[<int>EVENT] -= depth - 1
        elif self.posted_size:  # its own event, which goes ahead of the reply: of all of it
            store.out_size = start
            self.post(b"\x01" * depth)
        return done
