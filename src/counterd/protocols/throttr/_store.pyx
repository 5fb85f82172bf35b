"""The throttr room's store: keys, channels, who is subscribed, and the event that is under way.

Floor 2. Channels are the counters of the region, and a subscription is a holding of one: the ledger says who is
subscribed to what, and a connection that has gone gives its subscriptions back.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawFree, PyMem_RawRealloc
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from counterd._audit cimport audit_index, audit_name, audit_region, audit_timers, chain_ends
from counterd._core cimport (
    DONE, GRANTED, LATER, SLICE_STEPS, Frame, Header, Holding, Region, Session, Store,
    counter_acquire, counter_at, counter_restore, give_back, ledger_find, ledger_remove,
)
from counterd._table cimport (
    BLOCK_SIZE, RECORD_USED, IndexEntry, index_map, name_tag, pool_left, table_find,
)
from counterd._wheel cimport timer_is_armed, timers_next_ns, timers_take
from counterd.byteorder cimport store_le32
from counterd.debug cimport debug_check
from counterd.protocols.throttr._keys cimport (
    KEY_BUFFER, KEY_INLINE, Key, Keys, KeysState, key_at, key_expire, value_blocks, value_length,
)
from counterd.siphash cimport siphash13

KEY_BYTES = KEY_COST

cdef enum:
    FULL = 2                # what find_room() says besides DONE and LATER
    CATCH_UP_STEPS = 64     # of the ticks' work that a request does
    EVENT_STEPS = 256       # subscribers that a tick serves at least, however much is given back or expires
    KEY_COST = 112          # bytes: a record, and two slots of the index
    SUBSCRIBED_MAX = 16     # times that a connection can be subscribed to one channel

cdef int64_t MINUTE_NS = 60000000000

COMMAND_NAMES = {
    INSERT: "insert", QUERY: "query", UPDATE: "update", PURGE: "purge", SET: "set", GET: "get", LIST: "list",
    INFO: "info", STAT: "stat", STATS: "stats", SUBSCRIBE: "subscribe", UNSUBSCRIBE: "unsubscribe", PUBLISH: "publish",
    CONNECTIONS: "connections", CONNECTION: "connection", CHANNELS: "channels", CHANNEL: "channel", WHOAMI: "whoami",
    EVENT: "event",
}
cdef bytes HEX = b"0123456789abcdef"


cdef inline void rate_turn(Rate* rate, bint adjacent) noexcept:
    rate.last = rate.total - rate.before if adjacent else 0
    rate.before = rate.total


cdef inline size_t round_up(size_t size) noexcept:
    """To whole cache lines."""
    return (size + 63) // 64 * 64


def region_extra(int bits, size_t channels, size_t subscriptions):
    """Bytes of the region for 2^bits slots of the keys' index, and so many channels and subscriptions."""
    cdef size_t slots = <size_t>1 << bits
    return (
        round_up(sizeof(KeysState)) + round_up(slots * sizeof(IndexEntry)) + round_up((slots // 2 + 1) * sizeof(Key))
        + round_up((channels + 1) * sizeof(Channel)) + round_up((subscriptions + 1) * sizeof(Subscription))
    )


cdef class ThrottrStore(Store):
    """The keys, the channels, and what INFO says of them. Made by open_store() in _room.pyx.

    make_session: called with the store for each connection. bits: of the keys' index.
    """

    def __cinit__(self, *, int value_size, uint64_t memory_limit, uint64_t max_message, int64_t expiry_grace_ns,
                  int bits, uint32_t buckets, make_session, **_):
        self.make_session = make_session
        self.width = value_size
        self.number_max = ~<uint64_t>0 >> (64 - 8 * value_size)
        self.message_max = max_message
        self.memory_max = memory_limit
        self.region.drops_idle = True
        self.scheduled_ns = INT64_MAX
        self.started_ns = -1
        self.keys.grace_ns = expiry_grace_ns
        self.map_keys(bits, buckets)
        self.set_layouts()

    def __dealloc__(self):
        PyMem_RawFree(self.members)

    cdef void map_keys(self, int bits, uint32_t channels) noexcept:
        """Lays out what the region has for this room, in the order in which region_extra() counts it."""
        cdef uint8_t* place = self.region.extra
        cdef Keys* keys = &self.keys
        cdef size_t slots = <size_t>1 << bits
        keys.state = <KeysState*>place
        place += round_up(sizeof(KeysState))
        index_map(&keys.table.index, &keys.state.index, place, bits)
        place += round_up(slots * sizeof(IndexEntry))
        keys.table.records = place
        place += round_up((slots // 2 + 1) * sizeof(Key))
        self.channels = <Channel*>place
        place += round_up((<size_t>channels + 1) * sizeof(Channel))
        self.subscriptions = <Subscription*>place
        keys.table.key = self.region.header.key
        keys.table.pool = &keys.state.pool
        keys.table.blocks = self.region.names.blocks
        keys.table.block_pool = self.region.names.block_pool
        keys.table.record_size = sizeof(Key)
        keys.table.name_inline = KEY_INLINE
        keys.state.pool.capacity = <uint32_t>(slots // 2)
        keys.timers.wheel = &keys.state.wheel
        keys.timers.base = <uint8_t*>&(<Key*>keys.table.records).timer
        keys.timers.stride = sizeof(Key)

    cdef void set_layouts(self) noexcept:
        """Section "Request types": the bytes before the name, and where in them the sizes of name and value are."""
        cdef uint8_t n = <uint8_t>self.width
        cdef Layout* layouts = self.layouts
        cdef int opcode
        for opcode in (QUERY, PURGE, GET, STAT, SUBSCRIBE, UNSUBSCRIBE, CHANNEL):
            layouts[opcode] = Layout(2, 1, 0)
        for opcode in (LIST, INFO, STATS, CONNECTIONS, CHANNELS, WHOAMI):
            layouts[opcode] = Layout(1, 0, 0)
        for opcode in (PUBLISH, EVENT):
            layouts[opcode] = Layout(2 + n, 1, 2)
        layouts[<int>INSERT] = Layout(3 + 2 * n, 2 + 2 * n, 0)
        layouts[<int>UPDATE] = Layout(4 + n, 3 + n, 0)
        layouts[<int>SET] = Layout(3 + 2 * n, 2 + n, 3 + n)
        layouts[<int>CONNECTION] = Layout(1 + ID_SIZE, 0, 0)

    cpdef Session session(self, int64_t now_ns=0):
        cdef Member member = self.make_session(self)
        member.greet(now_ns)
        return member

    # ---- time ----

    cpdef set_wall(self, int64_t unix_ns, int64_t now_ns):
        self.wall_ns = unix_ns - now_ns
        self.now_ns = now_ns
        if self.started_ns < 0:
            self.started_ns = now_ns

    cdef void turn_minute(self, int64_t now_ns) noexcept:
        """Per-minute figures are those of the last whole minute of the caller's clock."""
        cdef bint adjacent = now_ns < self.minute_end_ns + MINUTE_NS
        cdef int opcode
        self.minute = <uint32_t>(now_ns // MINUTE_NS)
        self.minute_end_ns = (<int64_t>self.minute + 1) * MINUTE_NS
        for opcode in range(OPCODES):
            rate_turn(&self.requests[opcode], adjacent)
        self.read_bytes.total = self.bytes_in
        self.write_bytes.total = self.bytes_out
        rate_turn(&self.read_bytes, adjacent)
        rate_turn(&self.write_bytes, adjacent)

    cpdef int64_t next_deadline(self):
        cdef int64_t due_ns
        if self.event is not None or Store.next_deadline(self) == 0:
            return 0
        due_ns = timers_next_ns(&self.keys.timers)
        self.scheduled_ns = due_ns if due_ns >= 0 else INT64_MAX
        return due_ns

    cpdef tick(self, int64_t now_ns):
        """Does due work: gives back what leavers were subscribed to, frees expired keys, goes on with an event."""
        cdef int steps = give_back(&self.region, SLICE_STEPS)
        self.now_ns = now_ns
        steps = self.expire(now_ns, steps)
        self.deliver(max(steps, <int>EVENT_STEPS))  # whoever publishes waits for it

    cdef int expire(self, int64_t now_ns, int steps) noexcept:
        """Frees keys whose time and grace are over; returns steps left, 0 if there may be more."""
        cdef uint32_t number = timers_take(&self.keys.timers, now_ns, &steps)
        while number:
            key_expire(&self.keys, number)
            number = timers_take(&self.keys.timers, now_ns, &steps)
        return steps

    cdef bint catch_up(self) noexcept:
        """Does what ticks have not done yet, for requests that tell how much there is; False if it was too much."""
        cdef int steps = self.expire(self.now_ns, give_back(&self.region, CATCH_UP_STEPS))
        self.region.budget -= CATCH_UP_STEPS - steps
        return steps > 0

    # ---- listings ----

    cdef uint32_t enter_epoch(self) noexcept:
        """For something that is being made."""
        self.epoch_used = True
        return self.epoch

    cdef uint32_t begin_listing(self) noexcept:
        """What was made until now is of an earlier epoch than the one that is returned."""
        self.epoch += self.epoch_used
        self.epoch_used = False
        return self.epoch

    # ---- memory ----

    cdef uint64_t memory_used(self) noexcept:
        """Bytes that count against the limit. The two channels that every connection is subscribed to are free."""
        cdef uint64_t subscriptions = self.region.header.holdings.used
        cdef uint64_t own = 2 * self.region.header.connections.used
        return (
            <uint64_t>self.keys.state.pool.used * KEY_COST + <uint64_t>self.region.header.blocks.used * BLOCK_SIZE
            + (subscriptions - own if subscriptions > own else 0) * SUBSCRIPTION_BLOCKS * BLOCK_SIZE
        )

    cdef bint has_room(self, uint32_t records, uint32_t blocks, uint32_t blocks_freed) noexcept:
        if records == 0 and 0 < blocks <= blocks_freed:
            return True  # wherever the limit is
        return (
            pool_left(&self.keys.state.pool) >= records
            and pool_left(&self.region.header.blocks) + <uint64_t>blocks_freed >= blocks
            and self.memory_used() + records * KEY_COST + <uint64_t>blocks * BLOCK_SIZE
            <= self.memory_max + <uint64_t>blocks_freed * BLOCK_SIZE
        )

    cdef int find_room(self, uint32_t records, uint32_t blocks, uint32_t blocks_freed) noexcept:
        """Whether so much fits: DONE, FULL, or LATER if what has expired, or was left, is yet to make room.

        blocks_freed: how many the request itself gives back before it needs others.
        """
        cdef bint is_all
        if self.has_room(records, blocks, blocks_freed):
            return DONE
        is_all = self.catch_up()
        if self.has_room(records, blocks, blocks_freed):
            return DONE
        return FULL if is_all else LATER

    cdef bint has_places(self, bint is_new) noexcept:
        """Whether there is a place for a subscription, to a new channel perhaps.

        Half of all places are for those that every connection has: whatever the others do, new ones can come.
        """
        cdef Header* header = self.region.header
        cdef int64_t connections = header.connections.used
        cdef int64_t channels = header.records.used - connections
        cdef int64_t subscriptions = header.holdings.used - 2 * connections
        return subscriptions < header.holdings.capacity // 2 and (
            not is_new or channels < header.records.capacity // 2
        )

    # ---- events ----

    cdef int publish(self, uint32_t channel, uint32_t publisher, const Frame* frame) except -1:
        """Makes the event, once, and begins to give it to the subscribers. Section "PUBLISH"."""
        cdef uint8_t* target
        debug_check(self.event is None)
        self.event = PyBytes_FromStringAndSize(NULL, frame.size)
        target = <uint8_t*>PyBytes_AS_STRING(self.event)
        memcpy(target, frame.data, frame.size)  # an event has the layout of the request
        target[0] = EVENT
        self.event_payload = frame.size - self.layouts[<int>EVENT].head - frame.key_size
        self.event_channel = channel
        self.publisher = publisher
        self.channels[channel].write_bytes += self.event_payload
        self.region.cursor = counter_at(&self.region, channel).holders
        return 0

    cdef int deliver(self, int steps) except? -1:
        """Goes on with the event under way; returns steps left."""
        cdef Region* region = &self.region
        cdef uint32_t entry
        while self.event is not None and steps > 0:
            steps -= 1
            entry = region.cursor
            if entry == 0:
                self.event = None
                break
            if not self.can_give(entry):
                # The caller has yet to fetch what this one was given before, or to say that it cannot.
                (<Member>self.members[region.holdings[entry].connection]).tell_dirty()
                break
            region.cursor = region.holdings[entry].next_of_record
            if region.holdings[entry].connection != self.publisher:
                self.give(entry)
        return steps

    cdef bint can_give(self, uint32_t entry) noexcept:
        cdef Holding* holding = self.region.holdings + entry
        cdef void* member = self.members[holding.connection]
        return member == NULL or (<Member>member).can_post(holding.amount * PyBytes_GET_SIZE(self.event))

    cdef int give(self, uint32_t entry) except -1:
        """Leaves the event with a subscriber, as often as it has subscribed. Its own is not among what it received."""
        cdef Holding* holding = self.region.holdings + entry
        cdef Member member
        cdef uint32_t _time
        if self.members[holding.connection] == NULL:
            return 0  # it has gone
        member = <Member>self.members[holding.connection]
        self.subscriptions[entry].read_bytes += self.event_payload  # is told once for each time
        for _time in range(holding.amount):
            if holding.connection != self.publisher:
                member.received_bytes += self.event_payload
            self.channels[self.event_channel].read_bytes += self.event_payload
            member.post(self.event)
        return 0

    # ---- for people ----

    cpdef dict snapshot(self):
        cdef KeysState* state = self.keys.state
        figures = {
            "keys": state.counters + state.buffers,
            "counters": state.counters,
            "buffers": state.buffers,
            "buffer_bytes": state.buffer_bytes,
            "expired": state.expired,
            "used_memory": self.memory_used(),
            "memory_limit": self.memory_max,
            "keys_max": state.pool.capacity,
            "channels": self.region.header.busy,
            "subscriptions": self.region.header.holdings.used + self.repeated,
            "dropped_subscribers": self.sessions_dropped,
            "curr_connections": self.sessions_open,
            "total_connections": self.sessions_total,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "longest_probe": state.index.longest,
            "region": self.region.size,
        }
        for opcode, name in COMMAND_NAMES.items():
            figures[f"command:{name}"] = self.requests[<int>opcode].total
        return figures

    def outcomes(self):
        """As Store.outcomes: a request is answered 01, "ok", or 00, "refused"; or framing is lost with it."""
        cdef int opcode
        found = [("unknown", "framing_lost", self.broken)]
        for opcode, name in COMMAND_NAMES.items():
            found.append((name, "ok", self.requests[opcode].total - self.refusals[opcode]))
            found.append((name, "refused", self.refusals[opcode]))
        return [outcome for outcome in found if outcome[2]]

    def held(self):
        """As Store.held: nothing. A subscription keeps nobody from anything."""
        return 0

    def holdings_of(self, uint32_t _connection):
        return 0

    def leases(self, size_t _limit):
        return []

    def audit(self):
        """As Store.audit: AssertionError at the first broken invariant, of the keys too."""
        cdef Keys* keys = &self.keys
        cdef KeysState* state = keys.state
        cdef uint32_t number, blocks = 0, value
        cdef uint64_t counters = 0, buffers = 0, size = 0
        cdef Key* key
        audit_index(&keys.table.index, &state.pool, "key index")
        for number in range(1, state.pool.fresh + 1):
            key = key_at(keys, number)
            if timer_is_armed(&key.timer) != (key.record.flags & RECORD_USED != 0):
                raise AssertionError(f"key {number} is armed wrongly")
            if not key.record.flags & RECORD_USED:
                continue
            blocks += audit_name(&keys.table, &key.record, number)
            counters += not key.record.flags & KEY_BUFFER
            if key.record.flags & KEY_BUFFER:
                buffers += 1
                size += value_length(keys, key)
                value = value_blocks(value_length(keys, key))
                if not chain_ends(&keys.table, &key.content.value, value):
                    raise AssertionError(f"the value of key {number} ends in the wrong block")
                blocks += value
        if counters != state.counters or buffers != state.buffers or size != state.buffer_bytes:
            raise AssertionError(
                f"{counters} counters, {buffers} buffers of {size} bytes, {state.counters}, {state.buffers} and "
                f"{state.buffer_bytes} counted"
            )
        audit_timers(&keys.timers, state.pool.fresh)
        audit_region(&self.region, blocks)


cdef class Member(Session):
    """A connection among others: it has an id, is subscribed to channels, and keeps the books of what it does."""

    def __cinit__(self, ThrottrStore store not None):
        pass  # its type is what matters: the methods below cast

    cdef int greet(self, int64_t now_ns) except -1:
        """Gives the connection its id, and subscribes it to what every connection is subscribed to."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint8_t[2 * ID_SIZE] name
        cdef uint64_t[2] seed
        cdef uint64_t[2] words
        cdef uint32_t size = store.members_size
        cdef void** members
        cdef int i
        if self.connection >= size:
            size = max(2 * size, self.connection + 1, 64)
            members = <void**>PyMem_RawRealloc(store.members, size * sizeof(void*))
            if members == NULL:
                raise MemoryError(f"no room for {size} connections")
            store.members = members
            memset(store.members + store.members_size, 0, (size - store.members_size) * sizeof(void*))
            store.members_size = size
        store.serial += 1
        seed[0] = store.serial
        for i in range(2):
            seed[1] = i
            words[i] = siphash13(store.region.header.key, <const uint8_t*>seed, sizeof(seed))
        memcpy(self.id, words, ID_SIZE)
        store_le32(self.id, self.connection)  # so that it can be found
        self.id[6] = self.id[6] & 0x0f | 0x40  # a random UUID, to those who look
        self.id[8] = self.id[8] & 0x3f | 0x80
        for i in range(ID_SIZE):
            name[2 * i] = <uint8_t>HEX[self.id[i] >> 4]
            name[2 * i + 1] = <uint8_t>HEX[self.id[i] & 15]
        self.connected_ns = now_ns + store.wall_ns
        self.epoch = store.enter_epoch()
        store.now_ns = now_ns
        if not self.enter_channel(name_tag(&store.region.names, b"*", 1), b"*", 1) or not self.enter_channel(
            name_tag(&store.region.names, name, 2 * ID_SIZE), name, 2 * ID_SIZE
        ):
            raise MemoryError("no room for another connection's subscriptions")
        store.members[self.connection] = <void*>self
        return 0

    cdef void leave(self) noexcept:
        cdef ThrottrStore store = <ThrottrStore>self.store
        if self.connection and self.connection < store.members_size:
            store.members[self.connection] = NULL
        store.repeated -= self.repeated
        self.repeated = 0
        Session.leave(self)

    cdef int begin_call(self, int64_t now_ns) except -1:
        cdef ThrottrStore store = <ThrottrStore>self.store
        Session.begin_call(self, now_ns)
        store.now_ns = now_ns
        if now_ns >= store.minute_end_ns:
            store.turn_minute(now_ns)
        return 0

    cpdef bytes receive(self, bytes data, int64_t now_ns):
        cdef bytes output = Session.receive(self, data, now_ns)
        self.read_bytes += PyBytes_GET_SIZE(data)
        self.write_bytes += PyBytes_GET_SIZE(output)
        return output

    cpdef bytes take_output(self, int64_t now_ns):
        cdef bytes output = Session.take_output(self, now_ns)
        self.write_bytes += PyBytes_GET_SIZE(output)
        return output

    # ---- channels ----

    cdef bint enter_channel(self, uint32_t tag, const uint8_t* name, uint32_t size) noexcept:
        """Subscribes to a channel, once more if it is already; False if that is not possible."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef Region* region = &store.region
        cdef uint32_t number = table_find(&region.names, tag, name, size)
        cdef uint32_t entry = ledger_find(region, self.connection, number, tag) if number else 0
        cdef bint is_new = number == 0
        if entry:
            if region.holdings[entry].amount >= SUBSCRIBED_MAX:
                return False
            self.repeated += 1
            store.repeated += 1
        if counter_acquire(region, self.connection, tag, name, size, 1, 0xffffffff, self.since) != GRANTED:
            return False
        if entry:
            return True
        number = table_find(&region.names, tag, name, size)
        entry = ledger_find(region, self.connection, number, tag)
        if is_new:
            store.channels[number] = Channel(0, 0, store.enter_epoch())
        store.subscriptions[entry] = Subscription(store.now_ns + store.wall_ns, 0, 0, store.enter_epoch())
        return True

    cdef bint leave_channel(self, uint32_t tag, const uint8_t* name, uint32_t size) noexcept:
        """Ends every subscription to a channel; False if there is none."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef Region* region = &store.region
        cdef uint32_t number = table_find(&region.names, tag, name, size)
        cdef uint32_t entry = ledger_find(region, self.connection, number, tag) if number else 0
        cdef uint32_t amount
        if entry == 0:
            return False
        amount = region.holdings[entry].amount
        self.repeated -= amount - 1
        store.repeated -= amount - 1
        ledger_remove(region, entry)
        counter_restore(region, number, amount)
        return True
