"""What the throttr room tells of itself: INFO, CONNECTION, and the listings, which are streamed.

Floor 2. A listing walks the numbers of what it tells of twice: to count the fragments, which the reply begins with, and
to tell them. Numbers never change, and what was made after it began is left out, by its epoch: so what exists
throughout appears exactly once, and what goes in between leaves fragments less full, the last of them empty.
"""

from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

from counterd._core cimport DONE, LATER, OUTPUT_MAX, Frame, Holding, Region, counter_at
from counterd._table cimport RECORD_USED, Record, name_read, record_at, table_find
from counterd.byteorder cimport load_le32, store_le16, store_le64
from counterd.protocols.throttr._keys cimport (
    KEY_BUFFER, Key, key_at, key_expires, key_lives, key_reads_per_minute, key_writes_per_minute, value_length,
)
from counterd.protocols.throttr._store cimport (
    CHANNEL, CHANNELS, CONNECTION, CONNECTIONS, GET, ID_SIZE, INFO, INSERT, LIST, OPCODES, PUBLISH, PURGE, QUERY, SET,
    STAT, STATS, SUBSCRIBE, UNSUBSCRIBE, UPDATE, WHOAMI, Member, Rate, ThrottrStore,
)

from counterd.version import __version__

cdef enum:
    FRAGMENT_MAX = 2048     # bytes of a fragment's entries, with the keys of LIST and STATS
    CHANNEL_STEPS = 1024    # subscribers that are told of at once: less than REPLY_MIN
    PEER_STEPS = 50         # telling of a connection asks the socket who its peer is, in Python: some 2 us
    INFO_SIZE = 433
    CONNECTION_SIZE = 237
    CHANNEL_SIZE = 25
    STATS_SIZE = 33
    SUBSCRIBER_SIZE = 40

# The order in which INFO tells of them, and that of a connection.
cdef uint8_t[18] INFO_ORDER = [
    INSERT, QUERY, UPDATE, PURGE, GET, SET, LIST, INFO, STATS, STAT, SUBSCRIBE, UNSUBSCRIBE, PUBLISH, CHANNEL, CHANNELS,
    WHOAMI, CONNECTION, CONNECTIONS,
]
cdef uint8_t[18] CONNECTION_ORDER = [
    INSERT, SET, QUERY, GET, UPDATE, PURGE, LIST, INFO, STAT, STATS, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, CONNECTIONS,
    CONNECTION, CHANNELS, CHANNEL, WHOAMI,
]
cdef bytes VERSION = __version__.encode("ascii")[:16]


cdef inline uint8_t* put(uint8_t* target, uint64_t number) noexcept:
    """Eight bytes of a reply; returns where the next go."""
    store_le64(target, number)
    return target + 8


cdef inline uint8_t* put_rate(uint8_t* target, const Rate* rate) noexcept:
    return put(put(target, rate.total), rate.last)


cdef inline uint64_t unix_ns(int64_t moment_ns, int64_t wall_ns) noexcept:
    """Of a moment on the caller's clock; the last one that an int64 can say for those beyond it."""
    return INT64_MAX if wall_ns > 0 and moment_ns > INT64_MAX - wall_ns else <uint64_t>(moment_ns + wall_ns)


cdef class Lister(Member):
    """A connection that can ask for all of that."""

    def __dealloc__(self):
        self.drop_listing()

    cdef uint8_t* append(self, uint32_t size) noexcept:
        """So many bytes more of output, which are to be written there. Eight bytes behind them are free too."""
        cdef uint8_t* target = self.store.out + self.store.out_size
        self.store.out_size += size
        return target

    cdef uint8_t* reply(self, uint32_t size) noexcept:
        """Appends a reply that begins with 01, and returns where the rest goes."""
        cdef uint8_t* target = self.append(size)
        target[0] = 1
        return target + 1

    cdef int reply_success(self) noexcept:
        self.append(1)[0] = 1
        return DONE

    cdef int refuse(self, const Frame* frame) noexcept:
        (<ThrottrStore>self.store).refusals[frame.data[0]] += 1
        self.append(1)[0] = 0
        return DONE

    # ---- at once ----

    cdef int info(self) except -1:
        """Section "INFO"."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef Rate total = Rate(0, 0, 0)
        cdef uint8_t* target
        cdef int opcode
        if not store.catch_up():
            return LATER
        for opcode in range(OPCODES):
            total.total += store.requests[opcode].total
            total.last += store.requests[opcode].last
        store.read_bytes.total = store.bytes_in
        store.write_bytes.total = store.bytes_out
        target = put(self.reply(INFO_SIZE), <uint64_t>((store.now_ns + store.wall_ns) // 1000000000))
        target = put_rate(target, &total)
        for opcode in INFO_ORDER:
            target = put_rate(target, &store.requests[opcode])
        target = put_rate(put_rate(target, &store.read_bytes), &store.write_bytes)
        target = put(target, store.keys.state.counters + store.keys.state.buffers)
        target = put(put(target, store.keys.state.counters), store.keys.state.buffers)
        target = put(put(target, store.keys.state.counters * store.width), store.keys.state.buffer_bytes)
        target = put(target, store.region.header.holdings.used + store.repeated)
        target = put(target, store.region.header.busy)
        target = put(target, <uint64_t>(store.started_ns + store.wall_ns))
        target = put(target, store.sessions_open)
        memset(target, 0, 16)
        memcpy(target, <const uint8_t*>VERSION, len(VERSION))
        return DONE

    cdef int tell_connection(self, const Frame* frame) except -1:
        """Section "CONNECTION", which the clients ask for by its id. That begins with the connection's number."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef const uint8_t* wanted = frame.data + 1
        cdef uint32_t number = load_le32(wanted)
        cdef Member member
        if number >= store.members_size or store.members[number] == NULL:
            return self.refuse(frame)
        member = <Member>store.members[number]
        if memcmp(member.id, wanted, ID_SIZE) != 0:
            return self.refuse(frame)
        self.write_connection(member, self.reply(1 + CONNECTION_SIZE))
        return DONE

    cdef int write_connection(self, Member member, uint8_t* target) except -1:
        """Section "CONNECTIONS": one connection, as the clients read it."""
        cdef bytes address = b""
        cdef uint16_t port = 0
        cdef int opcode
        self.store.region.budget -= PEER_STEPS
        if member.owner is not None:
            self.store.calling_out = True
            try:
                host, port = member.owner.peer()
                address = host.encode("ascii")[:16]
            finally:
                self.store.calling_out = False
        memcpy(target, member.id, ID_SIZE)
        target[16] = 0  # a client; the reference has agents too
        target[17] = member.owner is not None and not address
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

    cdef int list_subscribers(self, const Frame* frame) except -1:
        """Section "CHANNEL"."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef Region* region = &store.region
        cdef uint32_t number, entry, count, _time
        cdef uint8_t* target
        if not store.catch_up():
            return LATER
        number = table_find(&region.names, frame.tag, frame.key, frame.key_size)
        if number == 0:
            return self.refuse(frame)
        count = counter_at(region, number).consumption
        if count > CHANNEL_STEPS:
            return self.list_all(CHANNEL, number)
        region.budget -= count
        target = put(self.reply(9 + count * SUBSCRIBER_SIZE), count)
        entry = counter_at(region, number).holders
        while entry:
            for _time in range(region.holdings[entry].amount):
                self.write_subscriber(entry, target)
                target += SUBSCRIBER_SIZE
            entry = region.holdings[entry].next_of_record
        return DONE

    cdef void write_subscriber(self, uint32_t entry, uint8_t* target) noexcept:
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint32_t connection = store.region.holdings[entry].connection
        memset(target, 0, ID_SIZE)
        if store.members[connection] != NULL:
            memcpy(target, (<Member>store.members[connection]).id, ID_SIZE)
        target = put(target + ID_SIZE, <uint64_t>store.subscriptions[entry].since_ns)
        put(put(target, store.subscriptions[entry].read_bytes), store.subscriptions[entry].write_bytes)

    # ---- in pieces ----

    cdef int list_all(self, uint8_t opcode, uint32_t channel) except -1:
        """Begins a listing, of the subscribers of a channel or of whatever the opcode lists."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef Listing* listing = <Listing*>PyMem_RawCalloc(1, sizeof(Listing))
        if listing == NULL:
            raise MemoryError("no room for a listing")
        self.drop_listing()
        self.listing = listing
        listing.opcode = opcode
        listing.channel = channel
        listing.epoch = store.begin_listing()
        if opcode == CONNECTIONS:
            listing.end = store.region.header.connections.fresh
        elif opcode == CHANNELS:
            listing.end = store.region.header.records.fresh
        elif opcode == CHANNEL:
            listing.end = store.region.header.holdings.fresh
        else:
            listing.end = store.keys.state.pool.fresh
        self.position = 1
        self.produce()
        return DONE

    cdef int produce(self) except -1:
        cdef Listing* listing = self.listing
        if not listing.counted:
            if not self.count_items():
                return 0
            put(self.reply(9), listing.left)
            listing.counted = True
            listing.bytes = 0
            self.position = 1
        if listing.opcode == CHANNEL:
            if not self.write_subscribers():
                return 0
        while listing.left:
            if self.must_pause() or not self.fill_fragment():
                return 0
            self.write_fragment()
        self.position = 0
        self.drop_listing()
        return 0

    cdef void drop_listing(self) noexcept:
        PyMem_RawFree(self.listing)
        self.listing = NULL

    cdef bint must_pause(self) noexcept:
        return self.store.out_size >= OUTPUT_MAX or self.store.region.budget <= self.budget_floor

    cdef bint count_items(self) noexcept:
        """The first walk: how many fragments, or subscriptions, there will be. False if it has to go on later."""
        cdef Listing* listing = self.listing
        cdef uint32_t size
        while self.position <= listing.end:
            if self.must_pause():
                return False
            self.store.region.budget -= 1
            size = self.item_size(self.position)
            self.position += 1
            if listing.opcode == CHANNEL:
                listing.left += size
            elif size:
                if listing.bytes == 0 or listing.bytes + size > FRAGMENT_MAX:
                    listing.left += 1
                    listing.bytes = 0
                listing.bytes += size
        return True

    cdef uint32_t item_size(self, uint32_t number) noexcept:
        """What an item takes of its fragment, or how often a subscriber is told; 0 = it is none, or has come since."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef Listing* listing = self.listing
        cdef Region* region = &store.region
        cdef Holding* holding
        cdef Key* key
        if listing.opcode == CONNECTIONS:
            if number >= store.members_size or store.members[number] == NULL:
                return 0
            return CONNECTION_SIZE if (<Member>store.members[number]).epoch < listing.epoch else 0
        if listing.opcode == CHANNELS:
            if not counter_at(region, number).record.flags & RECORD_USED:
                return 0
            return CHANNEL_SIZE if store.channels[number].epoch < listing.epoch else 0
        if listing.opcode == CHANNEL:
            holding = region.holdings + number
            if holding.connection == 0 or holding.record != listing.channel:
                return 0
            return holding.amount if store.subscriptions[number].epoch < listing.epoch else 0
        key = key_at(&store.keys, number)
        if not key.record.flags & RECORD_USED or key.epoch >= listing.epoch:
            return 0
        if not key_lives(&store.keys, key, store.now_ns):
            return 0
        return (STATS_SIZE if listing.opcode == STATS else 11 + <uint32_t>store.width) + key.record.name_size

    cdef bint fill_fragment(self) noexcept:
        """Finds what belongs to the next fragment. False if it has to go on later."""
        cdef Listing* listing = self.listing
        cdef uint32_t size
        while self.position <= listing.end:
            size = self.item_size(self.position)
            if size and listing.bytes + size > FRAGMENT_MAX:
                return True
            if self.must_pause():
                return False
            self.store.region.budget -= 1
            if size:
                listing.numbers[listing.count] = self.position
                listing.count += 1
                listing.bytes += size
            self.position += 1
        return True

    cdef int write_fragment(self) except -1:
        """A fragment of what was found for it and is still there: its number, how many, the entries, then the names."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef Listing* listing = self.listing
        cdef uint8_t* head = store.out + store.out_size
        cdef uint8_t* target = head + 16
        cdef uint32_t count = 0, i
        cdef Record* record
        for i in range(listing.count):
            if self.item_size(listing.numbers[i]):
                listing.numbers[count] = listing.numbers[i]
                count += 1
        listing.fragment += 1
        put(put(head, listing.fragment), count)
        for i in range(count):
            target = self.write_entry(listing.numbers[i], target)
        if listing.opcode != CONNECTIONS:
            for i in range(count):
                record = self.record_of(listing.numbers[i])
                if listing.opcode == CHANNELS:
                    name_read(&store.region.names, record, target)
                else:
                    name_read(&store.keys.table, record, target)
                target += record.name_size
        store.out_size += target - head
        listing.left -= 1
        listing.count = 0
        listing.bytes = 0
        return 0

    cdef Record* record_of(self, uint32_t number) noexcept:
        cdef ThrottrStore store = <ThrottrStore>self.store
        return record_at(&store.region.names if self.listing.opcode == CHANNELS else &store.keys.table, number)

    cdef uint8_t* write_entry(self, uint32_t number, uint8_t* target) except NULL:
        """Sections "LIST", "STATS", "CONNECTIONS" and "CHANNELS"; returns where the next goes."""
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef uint8_t opcode = self.listing.opcode
        cdef Key* key
        if opcode == CONNECTIONS:
            self.write_connection(<Member>store.members[number], target)
            return target + CONNECTION_SIZE
        target[0] = <uint8_t>self.record_of(number).name_size
        if opcode == CHANNELS:
            target = put(put(target + 1, store.channels[number].read_bytes), store.channels[number].write_bytes)
            return put(target, counter_at(&store.region, number).consumption)
        key = key_at(&store.keys, number)
        if opcode == STATS:
            return self.write_stat(key, target + 1)
        target[1] = key.record.flags & KEY_BUFFER
        target[2] = key.record.note
        target = put(target + 3, unix_ns(key_expires(&store.keys, key), store.wall_ns))
        put(target, value_length(&store.keys, key) if key.record.flags & KEY_BUFFER else <uint32_t>store.width)
        return target + store.width

    cdef uint8_t* write_stat(self, const Key* key, uint8_t* target) noexcept:
        """Section "STAT": what is counted of a key."""
        cdef uint32_t minute = (<ThrottrStore>self.store).minute
        target = put(put(target, key_reads_per_minute(key, minute)), key_writes_per_minute(key, minute))
        return put(put(target, key.reads), key.writes)

    cdef bint write_subscribers(self) noexcept:
        """The second walk of a CHANNEL, in which each is told of once, and a third for who has subscribed repeatedly.

        For whoever has gone since the first, there is one without an id at the end.
        """
        cdef Listing* listing = self.listing
        cdef uint32_t times, _time
        while listing.left:
            if self.must_pause():
                return False
            self.store.region.budget -= 1
            if self.position <= listing.end:
                times = self.item_size(self.position)
                times = times - 1 if times and listing.repeating else min(<uint32_t>1, times)
                for _time in range(min(<uint64_t>times, listing.left)):
                    self.write_subscriber(self.position, self.append(SUBSCRIBER_SIZE))
                    listing.left -= 1
                self.position += 1
            elif not listing.repeating:
                listing.repeating = True
                self.position = 1
            else:
                memset(self.append(SUBSCRIBER_SIZE), 0, SUBSCRIBER_SIZE)
                listing.left -= 1
        return True
