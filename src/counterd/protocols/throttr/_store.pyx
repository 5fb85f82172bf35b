"""The throttr protocol's store: keys, channels, subscriptions, and the event that is being delivered.

Floor 2 (ARCHITECTURE.md). A store has keys (_keys.pxd), channels (_channels.pxd), members (_members.pxd) and counts
(ThrottrState). Each has its own memory in the region.

The sessions are not in the region, because they belong to this process. Sessions take posted messages and know their
peers.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._core cimport DONE, LATER, SLICE_STEPS, Frame, Session, Store
from counterd.engine.audit cimport audit_chains, audit_permits, audit_table, audit_timers, chain_ends
from counterd.engine.chains cimport BLOCK_SIZE, chains_begin, chains_reserve
from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.debug cimport debug_check
from counterd.engine.permits cimport Holding, Permits, permits_begin, permits_give_back, permits_leave, walk_begin
from counterd.engine.pool cimport pool_left
from counterd.engine.region cimport region_reserve
from counterd.engine.table cimport RECORD_USED, IndexEntry
from counterd.engine.wheel cimport timer_is_armed, timers_next_ns, timers_take
from counterd.protocols.throttr._channels cimport SUBSCRIBED_MAX, channels_reserve
from counterd.protocols.throttr._keys cimport (
    KEY_BUFFER, KEY_COST, Key, Keys, KeysState, key_at, key_expire, keys_begin, keys_reserve,
    value_blocks, value_length,
)
from counterd.protocols.throttr._members cimport Member, member_find, members_begin, members_reserve
from counterd.protocols.throttr._wire cimport (
    CHANNEL, CHANNELS, CONNECTION, CONNECTIONS, EVENT, GET, INFO, INSERT, LIST, MESSAGE_MAX, PUBLISH, PURGE, QUERY,
    REPLY_BESIDE, REPLY_MIN, SET, STAT, STATS, SUBSCRIBE, UNSUBSCRIBE, UPDATE, WHOAMI, layouts_set,
)

KEY_BYTES = KEY_COST

cdef enum:
    FULL = 2                # a result of find_room(), besides DONE and LATER
    CATCH_UP_STEPS = 64     # steps of the ticks' work that one request does
    EVENT_STEPS = 256       # subscribers that a tick always serves, however much is given back or expires

cdef int64_t MINUTE_NS = 60000000000
cdef int64_t WALL_STEP_NS = 10000000    # a smaller change of Unix time is ignored: see set_wall()

COMMAND_NAMES = {
    INSERT: "insert", QUERY: "query", UPDATE: "update", PURGE: "purge", SET: "set", GET: "get", LIST: "list",
    INFO: "info", STAT: "stat", STATS: "stats", SUBSCRIBE: "subscribe", UNSUBSCRIBE: "unsubscribe", PUBLISH: "publish",
    CONNECTIONS: "connections", CONNECTION: "connection", CHANNELS: "channels", CHANNEL: "channel", WHOAMI: "whoami",
    EVENT: "event",
}

assert KEY_COST == sizeof(Key) + 2 * sizeof(IndexEntry)


cdef inline void rate_turn(Rate* rate, bint adjacent) noexcept:
    rate.last = rate.total - rate.before if adjacent else 0
    rate.before = rate.total


cdef class ThrottrStore(Store):
    """The store of the protocol. open_store() in _session.pyx makes it.

    value_size: the width N of numbers, in bytes. memory_limit: bytes, as memory_used() counts them. max_message: bytes
    of a request. keys, channels, subscriptions: the most of each. The number of connections is limited by channels,
    because each connection has its own channel.

    Raises ValueError for impossible sizes, and MemoryError if the memory cannot be mapped.
    """

    def __cinit__(self, *, int value_size, uint64_t memory_limit, uint64_t max_message, int64_t expiry_grace_ns,
                  uint32_t keys, uint32_t channels, uint32_t subscriptions, bytes hash_key, size_t reply_max, **_):
        if value_size not in (1, 2, 4, 8):
            raise ValueError(f"value_size must be 1, 2, 4 or 8 bytes, not {value_size}")
        if max_message > MESSAGE_MAX:
            raise ValueError(f"max_message must be at most {MESSAGE_MAX} bytes, not {max_message}")
        if reply_max < max(<size_t>REPLY_MIN, max_message + REPLY_BESIDE):
            raise ValueError(f"with a max_message of {max_message}, the reply_max of {reply_max} is too small")
        self.width = value_size
        self.number_max = ~<uint64_t>0 >> (64 - 8 * value_size)
        self.message_max = max_message
        self.memory_max = memory_limit
        layouts_set(self.layouts, <uint8_t>value_size)
        region_reserve(&self.region, b"throttr", sizeof(ThrottrState), <void**>&self.state)
        chains_reserve(&self.chains, &self.region, memory_limit // BLOCK_SIZE)
        channels_reserve(&self.channels, &self.region, &self.connections, channels, subscriptions)
        keys_reserve(&self.keys, &self.region, keys, expiry_grace_ns)
        members_reserve(&self.members, &self.region, min(channels, <uint32_t>CONNECTIONS_MAX))
        self.sessions = <void**>PyMem_RawCalloc(<size_t>self.members.capacity + 1, sizeof(void*))
        if self.sessions == NULL:
            raise MemoryError(f"no room for {self.members.capacity} sessions")
        self.map_region(hash_key)
        chains_begin(&self.chains)
        permits_begin(&self.channels.permits, self.header.key, &self.chains)
        keys_begin(&self.keys, self.header.key, &self.chains, self.now_ns)
        members_begin(&self.members, self.header.key)
        self.state.started_ns = -1

    def __dealloc__(self):
        PyMem_RawFree(self.sessions)

    cdef void forget(self, uint32_t connection) noexcept:
        cdef Member* member = member_find(&self.members, connection)
        if member != NULL:
            self.state.repeated -= member.repeated
            member.is_open = False
            self.sessions[connection] = NULL
        if permits_leave(&self.channels.permits, connection):
            self.has_work = True

    # ---- time ----

    cpdef set_wall(self, int64_t unix_ns, int64_t now_ns):
        cdef int64_t wall_ns = unix_ns - now_ns
        with self.at(now_ns):
            # A small difference only comes from reading two clocks one after the other. Times once shown must not move.
            if not -WALL_STEP_NS < wall_ns - self.wall_ns < WALL_STEP_NS:
                self.wall_ns = wall_ns
            if self.state.started_ns < 0:
                self.state.started_ns = now_ns

    cdef void turn_minute(self, int64_t now_ns) noexcept:
        """Begins a minute. Figures per minute are those of the last whole minute of the caller's clock."""
        cdef ThrottrState* state = self.state
        cdef bint adjacent = now_ns < state.minute_end_ns + MINUTE_NS
        cdef int opcode
        state.minute = <uint32_t>(now_ns // MINUTE_NS)
        state.minute_end_ns = (<int64_t>state.minute + 1) * MINUTE_NS
        for opcode in range(OPCODES):
            rate_turn(&state.requests[opcode], adjacent)
        state.read_bytes.total = self.bytes_in
        state.write_bytes.total = self.bytes_out
        rate_turn(&state.read_bytes, adjacent)
        rate_turn(&state.write_bytes, adjacent)

    cdef int64_t due_ns(self) except? -2:
        if self.state.event.channel or self.channels.permits.state.leaving_first:
            return 0
        return timers_next_ns(&self.keys.timers)

    cdef int run_due(self) except -1:
        """Ends subscriptions of ended connections, frees expired keys, and continues to deliver an event."""
        cdef int steps = self.expire(permits_give_back(&self.channels.permits, SLICE_STEPS))
        self.deliver(max(steps, <int>EVENT_STEPS))  # other publishers wait for the end of the event
        return 0

    cdef int expire(self, int steps) noexcept:
        """Frees keys whose TTL and grace are over.

        Returns how many of the steps remain. Returns 0 if there may be more such keys.
        """
        cdef uint32_t number = timers_take(&self.keys.timers, self.now_ns, &steps)
        while number:
            key_expire(&self.keys, number)
            number = timers_take(&self.keys.timers, self.now_ns, &steps)
        return steps

    cdef bint catch_up(self) noexcept:
        """Does the pending work of ticks, for requests whose reply has counts.

        Returns False if the work was not completed.
        """
        cdef int steps = self.expire(permits_give_back(&self.channels.permits, CATCH_UP_STEPS))
        self.budget -= CATCH_UP_STEPS - steps
        return steps > 0

    # ---- listings ----

    cdef uint32_t enter_epoch(self) noexcept:
        """Returns the epoch for a new object."""
        self.state.epoch_used = True
        return self.state.epoch

    cdef uint32_t begin_listing(self) noexcept:
        """Returns the epoch of a new listing. All objects that exist now have an earlier epoch."""
        self.state.epoch += self.state.epoch_used
        self.state.epoch_used = False
        return self.state.epoch

    # ---- memory ----

    cdef uint64_t memory_used(self) noexcept:
        """Returns how many bytes count against the limit. The first two subscriptions of a connection do not count."""
        cdef uint64_t subscriptions = self.channels.permits.state.holdings.used
        cdef uint64_t own = 2 * <uint64_t>self.connections.pool.used
        return (
            <uint64_t>self.keys.table.pool.used * KEY_COST + <uint64_t>self.chains.pool.used * BLOCK_SIZE
            + (subscriptions - own if subscriptions > own else 0) * SUBSCRIPTION_BLOCKS * BLOCK_SIZE
        )

    cdef bint has_room(self, uint32_t records, uint32_t blocks, uint32_t blocks_freed) noexcept:
        if records == 0 and 0 < blocks <= blocks_freed:
            return True  # also above the limit
        return (
            pool_left(self.keys.table.pool) >= records
            and pool_left(self.chains.pool) + <uint64_t>blocks_freed >= blocks
            and self.memory_used() + records * KEY_COST + <uint64_t>blocks * BLOCK_SIZE
            <= self.memory_max + <uint64_t>blocks_freed * BLOCK_SIZE
        )

    cdef int find_room(self, uint32_t records, uint32_t blocks, uint32_t blocks_freed) noexcept:
        """Returns DONE if there is room, LATER if pending work of ticks may make room, or else FULL.

        blocks_freed: how many blocks the request frees before it needs new blocks.
        """
        cdef bint is_all
        if self.has_room(records, blocks, blocks_freed):
            return DONE
        is_all = self.catch_up()
        if self.has_room(records, blocks, blocks_freed):
            return DONE
        return FULL if is_all else LATER

    cdef bint has_places(self, bint is_new) noexcept:
        """Returns whether there is a place for a subscription. is_new: whether its channel does not exist yet.

        Half of all places are reserved for the two subscriptions that every connection has from the start, so that
        SUBSCRIBE can never keep new connections out.
        """
        cdef const Permits* permits = &self.channels.permits
        cdef int64_t connections = self.connections.pool.used
        cdef int64_t channels = permits.table.pool.used - connections
        cdef int64_t subscriptions = permits.state.holdings.used - 2 * connections
        return subscriptions < permits.state.holdings.capacity // 2 and (
            not is_new or channels < permits.table.pool.capacity // 2
        )

    # ---- events ----

    cdef int publish(self, uint32_t channel, uint32_t publisher, const Frame* frame) except -1:
        """Makes an event and begins to deliver it to the subscribers. See section "PUBLISH"."""
        cdef Event* event = &self.state.event
        cdef uint8_t* target
        debug_check(event.channel == 0 and self.event_bytes is None)
        self.event_bytes = PyBytes_FromStringAndSize(NULL, frame.size)
        target = <uint8_t*>PyBytes_AS_STRING(self.event_bytes)
        memcpy(target, frame.data, frame.size)  # an event has the layout of the request
        target[0] = EVENT
        event.channel = channel
        event.publisher = publisher
        event.payload = frame.size - self.layouts[<int>EVENT].head - frame.key_size
        self.channels.channels[channel].write_bytes += event.payload
        walk_begin(&self.channels.permits, channel)
        return 0

    cdef void end_event(self) noexcept:
        self.state.event.channel = 0
        self.event_bytes = None

    cdef int deliver(self, int steps) except? -1:
        """Continues to deliver the event. Returns how many of the steps remain."""
        cdef Permits* permits = &self.channels.permits
        cdef uint32_t entry
        while self.state.event.channel and steps > 0:
            steps -= 1
            entry = permits.state.cursor
            if entry == 0:
                self.end_event()
                break
            if not self.can_give(entry):
                # The caller has to fetch this session's earlier messages first, or call wait().
                (<Session>self.sessions[permits.holdings[entry].connection]).mark_dirty()
                break
            permits.state.cursor = permits.holdings[entry].of_record.next
            if permits.holdings[entry].connection != self.state.event.publisher:
                self.give(entry)
        return steps

    cdef bint can_give(self, uint32_t entry) noexcept:
        cdef const Holding* holding = self.channels.permits.holdings + entry
        cdef void* session = self.sessions[holding.connection]
        return session == NULL or (<Session>session).can_post(holding.amount * PyBytes_GET_SIZE(self.event_bytes))

    cdef int give(self, uint32_t entry) except -1:
        """Posts the event to a subscriber, once for each subscription.

        A publisher's own event does not count as "received".
        """
        cdef const Event* event = &self.state.event
        cdef const Holding* holding = self.channels.permits.holdings + entry
        cdef Member* member = self.members.records + holding.connection
        cdef Session session
        cdef uint32_t _time
        if self.sessions[holding.connection] == NULL:
            return 0  # the connection is gone
        session = <Session>self.sessions[holding.connection]
        self.channels.subscriptions[entry].read_bytes += event.payload  # listed once for each subscription
        for _time in range(holding.amount):
            if holding.connection != event.publisher:
                member.received_bytes += event.payload
            self.channels.channels[event.channel].read_bytes += event.payload
            session.post(self.event_bytes)
        return 0

    # ---- for people ----

    cdef dict figures(self):
        cdef dict figures = Store.figures(self)
        cdef const KeysState* state = self.keys.state
        figures.update({
            "keys": state.counters + state.buffers,
            "counters": state.counters,
            "buffers": state.buffers,
            "buffer_bytes": state.buffer_bytes,
            "expired": state.expired,
            "used_memory": self.memory_used(),
            "memory_limit": self.memory_max,
            "keys_max": self.keys.table.pool.capacity,
            "channels": self.channels.permits.table.pool.used,
            "subscriptions": self.channels.permits.state.holdings.used + self.state.repeated,
            "dropped_subscribers": self.sessions_dropped,
            "longest_probe": self.keys.table.index.state.longest,
        })
        for opcode, name in COMMAND_NAMES.items():
            figures[f"command:{name}"] = self.state.requests[<int>opcode].total
        return figures

    def outcomes(self):
        """Implements Store.outcomes: a request got the reply 01 ("ok") or 00 ("refused"), or framing was lost."""
        cdef const ThrottrState* state = self.state
        cdef int opcode
        with self:
            found = [("unknown", "framing_lost", state.broken)]
            for opcode, name in COMMAND_NAMES.items():
                found.append((name, "ok", state.requests[opcode].total - state.refusals[opcode]))
                found.append((name, "refused", state.refusals[opcode]))
        return [outcome for outcome in found if outcome[2]]

    cdef int audit_parts(self) except -1:
        """Implements Store.audit_parts: checks channels and subscriptions, keys, and members."""
        audit_chains(&self.chains, audit_permits(&self.channels.permits) + self.audit_keys())
        self.audit_members()
        if (self.state.event.channel == 0) != (self.event_bytes is None):
            raise AssertionError(
                f"an event of channel {self.state.event.channel} is being delivered, but the mark of the store is "
                "wrong")
        return 0

    cdef int64_t audit_keys(self) except -1:
        """Checks the keys. Returns how many blocks the names and values of the keys use."""
        cdef const Keys* keys = &self.keys
        cdef const KeysState* state = keys.state
        cdef uint32_t number, value, blocks = audit_table(&keys.table, "keys")
        cdef uint64_t counters = 0, buffers = 0, size = 0
        cdef const Key* key
        for number in range(1, keys.table.pool.fresh + 1):
            key = key_at(keys, number)
            if timer_is_armed(&key.timer) != (key.record.flags & RECORD_USED != 0):
                raise AssertionError(f"key {number}: its timer is wrong")
            if not key.record.flags & RECORD_USED:
                continue
            counters += not key.record.flags & KEY_BUFFER
            if key.record.flags & KEY_BUFFER:
                buffers += 1
                size += value_length(keys, key)
                value = value_blocks(value_length(keys, key))
                if not chain_ends(&keys.table.chains, &key.content.value, value):
                    raise AssertionError(f"the value of key {number} ends in the wrong block")
                blocks += value
        if counters != state.counters or buffers != state.buffers or size != state.buffer_bytes:
            raise AssertionError(
                f"{counters} counters, {buffers} buffers of {size} bytes, {state.counters}, {state.buffers} and "
                f"{state.buffer_bytes} counted"
            )
        audit_timers(&keys.timers, keys.table.pool.fresh)
        return blocks

    cdef int audit_members(self) except -1:
        """Checks that exactly the open members have a session, and their counts of repeated subscriptions."""
        cdef const Permits* permits = &self.channels.permits
        cdef const Member* member
        cdef uint64_t repeated = 0, own
        cdef uint32_t number, entry
        for number in range(1, min(self.connections.pool.fresh, self.members.capacity) + 1):
            member = member_find(&self.members, number)
            if (member == NULL) != (self.sessions[number] == NULL):
                raise AssertionError(f"connection {number} has a member or a session, but not both")
            if member == NULL:
                continue
            own = 0
            entry = permits.holders[number].first
            while entry:
                if permits.holdings[entry].amount > SUBSCRIBED_MAX:
                    raise AssertionError(f"connection {number} is subscribed {permits.holdings[entry].amount} times")
                own += permits.holdings[entry].amount - 1
                entry = permits.holdings[entry].of_connection.next
            if own != member.repeated:
                raise AssertionError(f"connection {number} has {own} repeated subscriptions, {member.repeated} counted")
            repeated += own
        if repeated != self.state.repeated:
            raise AssertionError(f"{repeated} subscriptions are repeated, {self.state.repeated} counted")
        return 0
