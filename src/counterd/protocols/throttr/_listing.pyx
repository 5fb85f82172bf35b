"""The listings of the throttr protocol, which are streamed, and the entries that other replies share with them.

Floor 2 (ARCHITECTURE.md). A listing goes through its objects twice, by number: first to count the fragments, because
the reply begins with their number, and then to write them. Numbers never change. Objects that were made later have a
later epoch, and are left out. So an object that exists during the whole listing appears exactly once. If objects are
removed meanwhile, some fragments have fewer entries, or none.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from counterd._core cimport OUTPUT_MAX, Session
from counterd.engine.byteorder cimport store_le16
from counterd.engine.debug cimport debug_check
from counterd.engine.permits cimport Holding, permit_at
from counterd.engine.table cimport RECORD_USED, Record, Table, name_read, record_at
from counterd.protocols.throttr._channels cimport Channel
from counterd.protocols.throttr._keys cimport KEY_BUFFER, Key, key_at, key_expires, key_lives, value_length
from counterd.protocols.throttr._members cimport Member, member_find
from counterd.protocols.throttr._store cimport ThrottrStore, append, reply
from counterd.protocols.throttr._wire cimport (
    CHANNEL, CHANNELS, CONNECTION, CONNECTIONS, GET, ID_SIZE, INFO, INSERT, LIST, PUBLISH, PURGE, QUERY, SET, STAT,
    STATS, SUBSCRIBE, UNSUBSCRIBE, UPDATE, WHOAMI, put,
)

cdef enum:
    PEER_STEPS = 50         # an entry of a connection asks for the peer's address, in Python: some 2 us

# The order of a connection's requests in its entry.
cdef uint8_t[18] CONNECTION_ORDER = [
    INSERT, SET, QUERY, GET, UPDATE, PURGE, LIST, INFO, STAT, STATS, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, CONNECTIONS,
    CONNECTION, CHANNELS, CHANNEL, WHOAMI,
]

assert LIST_SIZE == min(CONNECTION_SIZE, CHANNEL_SIZE, STATS_SIZE, LIST_SIZE)
assert FRAGMENT_ITEMS == FRAGMENT_MAX // LIST_SIZE


cdef inline uint64_t unix_ns(int64_t moment_ns, int64_t wall_ns) noexcept:
    """Converts a time on the caller's clock to Unix time. Returns INT64_MAX if the time is too late for an int64."""
    return INT64_MAX if wall_ns > 0 and moment_ns > INT64_MAX - wall_ns else <uint64_t>(moment_ns + wall_ns)


# ---- entries -------------------------------------------------------------------------------------------------------

cdef int write_connection(ThrottrStore store, uint32_t number, uint8_t* target) except -1:
    """Writes the entry of a connection. The peer's address comes from its session. See section "CONNECTIONS"."""
    cdef const Member* member = member_find(&store.members, number)
    cdef Session session = <Session>store.sessions[number] if store.sessions[number] != NULL else None
    cdef bint has_owner = session is not None and session.owner is not None
    cdef bytes address = b""
    cdef uint16_t port = 0
    cdef int opcode
    store.budget -= PEER_STEPS
    if has_owner:
        host, port = session.owner.peer()
        address = host.encode("ascii")[:16]
    memcpy(target, member.id, ID_SIZE)
    target[16] = 0  # a client; the reference has agents too
    target[17] = has_owner and not address
    target[18] = 6 if b":" in address else 4
    memset(target + 19, 0, 16)
    memcpy(target + 19, <const uint8_t*>address, len(address))
    store_le16(target + 35, port)
    target = put(target + 37, <uint64_t>member.connected_ns)
    target = put(put(target, member.read_bytes), member.write_bytes)
    target = put(put(target, member.published_bytes), member.received_bytes)
    target = put(put(target, member.allocated_bytes), member.consumed_bytes)
    for opcode in CONNECTION_ORDER:
        target = put(target, member.requests[opcode])
    return 0


cdef void write_subscriber(ThrottrStore store, uint32_t entry, uint8_t* target) noexcept:
    """Writes the entry of a subscription. The entry has no id if its connection is gone. See section "CHANNEL"."""
    cdef const Member* member = member_find(&store.members, store.channels.permits.holdings[entry].connection)
    if member == NULL:
        memset(target, 0, ID_SIZE)
    else:
        memcpy(target, member.id, ID_SIZE)
    target = put(target + ID_SIZE, <uint64_t>store.channels.subscriptions[entry].since_ns)
    put(put(target, store.channels.subscriptions[entry].read_bytes), store.channels.subscriptions[entry].write_bytes)


# ---- listings ------------------------------------------------------------------------------------------------------

cdef class Listing:
    """The reply to LIST, STATS, CONNECTIONS, CHANNELS, or to CHANNEL if it has many subscribers.

    opcode: the request. channel: for CHANNEL, the channel whose subscribers are listed.
    """

    def __cinit__(self, ThrottrStore store not None, uint8_t opcode, uint32_t channel):
        self.store = store
        self.opcode = opcode
        self.channel = channel
        self.epoch = store.begin_listing()
        self.next = 1
        if opcode == CONNECTIONS:
            self.end = store.connections.pool.fresh
        elif opcode == CHANNEL:
            self.end = store.channels.permits.state.holdings.fresh
        else:
            self.end = self.table().pool.fresh

    cdef bint go_on(self) except -1:
        """Appends the next piece of the reply, until the budget is used up.

        Returns True at the end of the reply.
        """
        if not self.counted:
            if not self.count_items():
                return False
            put(reply(self.store, 9), self.left)
            self.counted = True
            self.bytes = 0
            self.next = 1
        if self.opcode == CHANNEL:
            return self.write_subscribers()
        while self.left:
            if self.must_pause() or not self.fill_fragment():
                return False
            self.write_fragment()
        return True

    cdef bint must_pause(self) noexcept:
        return self.store.out_size >= OUTPUT_MAX or self.store.budget <= 0

    cdef bint count_items(self) noexcept:
        """The first pass: counts fragments, or subscriptions. Returns False if it has to continue later."""
        cdef uint32_t size
        while self.next <= self.end:
            if self.must_pause():
                return False
            self.store.budget -= 1
            size = self.item_size(self.next)
            self.next += 1
            if self.opcode == CHANNEL:
                self.left += size
            elif size:
                if self.bytes == 0 or self.bytes + size > FRAGMENT_MAX:
                    self.left += 1
                    self.bytes = 0
                self.bytes += size
        return True

    cdef uint32_t item_size(self, uint32_t number) noexcept:
        """Returns the size of an object's entry, or how often a subscriber is listed.

        Returns 0 if the object is not listed.
        """
        cdef ThrottrStore store = self.store
        cdef const Member* member
        cdef const Holding* holding
        cdef const Key* key
        if self.opcode == CONNECTIONS:
            member = member_find(&store.members, number)
            return CONNECTION_SIZE if member != NULL and member.epoch < self.epoch else 0
        if self.opcode == CHANNELS:
            if not self.record_of(number).flags & RECORD_USED:
                return 0
            return CHANNEL_SIZE if store.channels.channels[number].epoch < self.epoch else 0
        if self.opcode == CHANNEL:
            holding = store.channels.permits.holdings + number
            if holding.connection == 0 or holding.record != self.channel:
                return 0
            return holding.amount if store.channels.subscriptions[number].epoch < self.epoch else 0
        key = key_at(&store.keys, number)
        if not key.record.flags & RECORD_USED or key.epoch >= self.epoch:
            return 0
        if not key_lives(&store.keys, key, store.now_ns):
            return 0
        return (STATS_SIZE if self.opcode == STATS else LIST_SIZE - 1 + <uint32_t>store.width) + key.record.name_size

    cdef bint fill_fragment(self) noexcept:
        """Finds the objects of the next fragment. Returns False if it has to continue later."""
        cdef uint32_t size
        while self.next <= self.end:
            size = self.item_size(self.next)
            if size and self.bytes + size > FRAGMENT_MAX:
                return True
            if self.must_pause():
                return False
            self.store.budget -= 1
            if size:
                debug_check(self.count < FRAGMENT_ITEMS)
                self.numbers[self.count] = self.next
                self.count += 1
                self.bytes += size
            self.next += 1
        return True

    cdef int write_fragment(self) except -1:
        """Writes a fragment of the objects that still exist: its number, their count, the entries, then the names."""
        cdef ThrottrStore store = self.store
        cdef uint8_t* head = store.out + store.out_size
        cdef uint8_t* target = head + 16
        cdef uint32_t count = 0, i
        cdef Record* record
        for i in range(self.count):
            if self.item_size(self.numbers[i]):
                self.numbers[count] = self.numbers[i]
                count += 1
        self.fragment += 1
        put(put(head, self.fragment), count)
        for i in range(count):
            target = self.write_entry(self.numbers[i], target)
        if self.opcode != CONNECTIONS:
            for i in range(count):
                record = self.record_of(self.numbers[i])
                name_read(self.table(), record, target)
                target += record.name_size
        store.out_size += target - head
        self.left -= 1
        self.count = 0
        self.bytes = 0
        return 0

    cdef const Table* table(self) noexcept:
        """Returns the table whose records are listed, except for connections and subscribers."""
        return &self.store.channels.permits.table if self.opcode == CHANNELS else &self.store.keys.table

    cdef Record* record_of(self, uint32_t number) noexcept:
        return record_at(self.table(), number)

    cdef uint8_t* write_entry(self, uint32_t number, uint8_t* target) except NULL:
        """Writes an entry. Returns the end of the entry. See sections "LIST", "STATS", "CONNECTIONS" and "CHANNELS"."""
        cdef ThrottrStore store = self.store
        cdef const Channel* channel
        cdef const Key* key
        if self.opcode == CONNECTIONS:
            write_connection(store, number, target)
            return target + CONNECTION_SIZE
        target[0] = <uint8_t>self.record_of(number).name_size
        if self.opcode == CHANNELS:
            channel = store.channels.channels + number
            target = put(put(target + 1, channel.read_bytes), channel.write_bytes)
            return put(target, permit_at(&store.channels.permits, number).consumption)
        key = key_at(&store.keys, number)
        if self.opcode == STATS:
            return write_stat(key, store.state.minute, target + 1)
        target[1] = key.record.flags & KEY_BUFFER
        target[2] = key.record.note
        target = put(target + 3, unix_ns(key_expires(&store.keys, key), store.wall_ns))
        put(target, value_length(&store.keys, key) if key.record.flags & KEY_BUFFER else <uint32_t>store.width)
        return target + store.width

    cdef bint write_subscribers(self) noexcept:
        """The second pass of a CHANNEL, which lists each subscriber once, and a third pass for repeated subscriptions.

        If a subscription has ended since the first pass, an entry without an id is added at the end.
        """
        cdef uint32_t times, _time
        while self.left:
            if self.must_pause():
                return False
            self.store.budget -= 1
            if self.next <= self.end:
                times = self.item_size(self.next)
                times = times - 1 if times and self.repeating else min(<uint32_t>1, times)
                for _time in range(min(<uint64_t>times, self.left)):
                    write_subscriber(self.store, self.next, append(self.store, SUBSCRIBER_SIZE))
                    self.left -= 1
                self.next += 1
            elif not self.repeating:
                self.repeating = True
                self.next = 1
            else:
                memset(append(self.store, SUBSCRIBER_SIZE), 0, SUBSCRIBER_SIZE)
                self.left -= 1
        return True
