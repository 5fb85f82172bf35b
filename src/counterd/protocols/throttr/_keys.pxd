# The keys of the throttr protocol: counters and buffers in one table, which expire, and the statistics of each.
#
# Floor 2, header only. Everything except the sizes is in the store's region and addressed by number.
#
# Invariants (ThrottrStore.audit checks each):
# - each key in use has an armed timer for the end of its grace, which begins when the key expires;
# - a key is alive until `timer.due_ns - grace_ns`; from then on replies do not show it, even if it is not freed yet;
# - the value of a buffer is a chain of blocks whose first VALUE_LEAD bytes are its size.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.byteorder cimport load_le32, prefetch, store_le32
from counterd.engine.chains cimport (
    Chain, Chains, chain_blocks, chain_free, chain_read, chain_replace, chain_write,
)
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport (
    Record, Table, record_at, table_begin, table_insert, table_remove, table_reserve,
)
from counterd.engine.wheel cimport Timer, Timers, timers_arm, timers_begin, timers_disarm, timers_reserve

cdef enum:
    KEY_INLINE = 24         # bytes of a key in its record: 96 - 8 (head) - 64 (the rest)
    KEY_BUFFER = 1          # in Record.flags: the key is a buffer, not a counter
    KEY_COST = 112          # bytes that a key counts against the limit: its record and two slots of the index
    VALUE_LEAD = 4

cdef extern from *:
    """
    #define COUNTERD_GRACE_MAX_NS INT64_C(3600000000000)
    #define COUNTERD_FOREVER (INT64_MAX - COUNTERD_GRACE_MAX_NS)
    """
    const int64_t GRACE_MAX_NS "COUNTERD_GRACE_MAX_NS"
    # 292 years on the caller's clock: the latest end of a TTL, which leaves room for the longest grace.
    const int64_t FOREVER "COUNTERD_FOREVER"


cdef union Content:
    uint64_t quota          # of a counter
    Chain value             # of a buffer


cdef struct Key:            # 96 bytes. Record.note is the TTL type of the request
    Record record
    uint8_t name[KEY_INLINE]
    Timer timer
    Content content
    uint64_t reads
    uint64_t writes
    uint32_t minute         # of the last read or write; *_now count in this minute, *_last in the one before
    uint32_t reads_now
    uint32_t writes_now
    uint32_t reads_last
    uint32_t writes_last
    uint32_t epoch          # when it was made: listings that began earlier do not show it


cdef struct KeysState:      # in the region
    uint64_t counters
    uint64_t buffers
    uint64_t buffer_bytes
    uint64_t expired        # in total


cdef struct Keys:           # this process's view
    KeysState* state
    Table table
    Timers timers
    int64_t grace_ns


cdef inline int keys_reserve(Keys* keys, Region* region, uint32_t capacity, int64_t grace_ns) except -1:
    """Reserves memory for `capacity` keys.

    grace_ns: how long expired keys are kept. Raises ValueError if these are too many.
    """
    if not 0 <= grace_ns <= GRACE_MAX_NS:
        raise ValueError(f"the grace must be 0 to {GRACE_MAX_NS} ns, not {grace_ns}")
    keys.grace_ns = grace_ns
    region_reserve(region, b"keys", sizeof(KeysState), <void**>&keys.state)
    table_reserve(&keys.table, region, b"keys", capacity, sizeof(Key), KEY_INLINE)
    timers_reserve(&keys.timers, region, b"keys")
    return 0


cdef inline void keys_begin(Keys* keys, const uint64_t* hash_key, const Chains* chains, int64_t now_ns) noexcept nogil:
    """Call this once, after the region was mapped. chains: the chains for long names and for values."""
    table_begin(&keys.table, hash_key, chains)
    timers_begin(&keys.timers, &(<Key*>keys.table.records).timer, sizeof(Key), now_ns)


cdef inline Key* key_at(const Keys* keys, uint32_t number) noexcept nogil:
    return <Key*>record_at(&keys.table, number)


# ---- time ----------------------------------------------------------------------------------------------------------

cdef inline uint64_t unit_ns(uint8_t ttl_type) noexcept nogil:
    """Returns the unit of a TTL type.

    Unknown types count as seconds, as in the original Throttr server. See section "TTL Types".
    """
    if ttl_type == 1:
        return 1
    if ttl_type == 2:
        return 1000
    if ttl_type == 3:
        return 1000000
    if ttl_type == 5:
        return 60000000000
    if ttl_type == 6:
        return 3600000000000
    return 1000000000


cdef inline int64_t moment_after(int64_t moment_ns, uint8_t ttl_type, uint64_t ttl) noexcept nogil:
    cdef uint64_t unit = unit_ns(ttl_type)
    if moment_ns >= FOREVER or ttl > <uint64_t>(FOREVER - moment_ns) // unit:
        return FOREVER
    return moment_ns + <int64_t>(ttl * unit)


cdef inline int64_t moment_before(int64_t moment_ns, uint8_t ttl_type, uint64_t ttl) noexcept nogil:
    cdef uint64_t unit = unit_ns(ttl_type)
    return 0 if ttl > <uint64_t>moment_ns // unit else moment_ns - <int64_t>(ttl * unit)


cdef inline int64_t key_expires(const Keys* keys, const Key* key) noexcept nogil:
    return key.timer.due_ns - keys.grace_ns


cdef inline bint key_lives(const Keys* keys, const Key* key, int64_t now_ns) noexcept nogil:
    return key_expires(keys, key) > now_ns


cdef inline uint64_t key_ttl(const Keys* keys, const Key* key, int64_t now_ns) noexcept nogil:
    """Returns the remaining TTL of a living key, in whole units of its type, rounded down.

    1 ns is subtracted, because all requests of one read have the same time, but clients expect the clock to advance.
    """
    return <uint64_t>(key_expires(keys, key) - now_ns - 1) // unit_ns(key.record.note)


cdef inline void key_expire_at(Keys* keys, uint32_t number, int64_t expires_ns) noexcept nogil:
    timers_arm(&keys.timers, number, expires_ns + keys.grace_ns)


# ---- values --------------------------------------------------------------------------------------------------------

cdef inline uint32_t value_blocks(uint32_t size) noexcept nogil:
    return chain_blocks(VALUE_LEAD + size)


cdef inline uint32_t value_length(const Keys* keys, const Key* key) noexcept nogil:
    return load_le32(keys.table.chains.blocks[key.content.value.first].payload)


cdef inline void value_prefetch(const Keys* keys, const Key* key) noexcept nogil:
    """Prefetches the first and the last block of a buffer's value."""
    if key.record.flags & KEY_BUFFER:
        prefetch(keys.table.chains.blocks + key.content.value.first)
        prefetch(keys.table.chains.blocks + key.content.value.last)


cdef inline void value_write(Keys* keys, Key* key, const uint8_t* data, uint32_t size) noexcept nogil:
    """Writes the value of a new buffer. The caller must have checked that enough blocks are free."""
    chain_write(&keys.table.chains, &key.content.value, VALUE_LEAD, data, size)
    store_le32(keys.table.chains.blocks[key.content.value.first].payload, size)
    keys.state.buffer_bytes += size


cdef inline void value_replace(Keys* keys, Key* key, const uint8_t* data, uint32_t size) noexcept nogil:
    """Overwrites the value of a buffer with a value that needs as many blocks."""
    keys.state.buffer_bytes += size - <uint64_t>value_length(keys, key)
    chain_replace(&keys.table.chains, &key.content.value, VALUE_LEAD, data, size)
    store_le32(keys.table.chains.blocks[key.content.value.first].payload, size)


cdef inline void value_read(const Keys* keys, const Key* key, uint8_t* target) noexcept nogil:
    chain_read(&keys.table.chains, &key.content.value, VALUE_LEAD, target, value_length(keys, key))


cdef inline void value_free(Keys* keys, Key* key) noexcept nogil:
    cdef uint32_t size = value_length(keys, key)
    chain_free(&keys.table.chains, &key.content.value, value_blocks(size))
    keys.state.buffer_bytes -= size


# ---- keys ----------------------------------------------------------------------------------------------------------

cdef inline uint32_t key_create(
    Keys* keys, uint32_t tag, const uint8_t* name, uint32_t size, uint8_t ttl_type, int64_t expires_ns, uint32_t epoch
) noexcept nogil:
    """Makes a key with the quota 0. The caller must have checked that a record and enough blocks are free."""
    cdef uint32_t number = table_insert(&keys.table, tag, name, size)
    cdef Key* key = key_at(keys, number)
    key.record.note = ttl_type
    key.content.quota = 0
    key.reads = 0
    key.writes = 0
    key.minute = 0
    key.reads_now = 0
    key.writes_now = 0
    key.reads_last = 0
    key.writes_last = 0
    key.epoch = epoch
    keys.state.counters += 1
    key.timer.prev = 0
    key_expire_at(keys, number, expires_ns)
    return number


cdef inline void key_make_buffer(Keys* keys, uint32_t number, const uint8_t* data, uint32_t size) noexcept nogil:
    """Turns a new key with a quota into a buffer."""
    cdef Key* key = key_at(keys, number)
    key.record.flags |= KEY_BUFFER
    keys.state.counters -= 1
    keys.state.buffers += 1
    value_write(keys, key, data, size)


cdef inline void key_remove(Keys* keys, uint32_t number) noexcept nogil:
    cdef Key* key = key_at(keys, number)
    timers_disarm(&keys.timers, number)
    if key.record.flags & KEY_BUFFER:
        value_free(keys, key)
        keys.state.buffers -= 1
    else:
        keys.state.counters -= 1
    table_remove(&keys.table, number)


cdef inline void key_expire(Keys* keys, uint32_t number) noexcept nogil:
    """Removes a key whose TTL and grace are over."""
    key_remove(keys, number)
    keys.state.expired += 1


# ---- metrics -------------------------------------------------------------------------------------------------------

cdef inline void key_enter_minute(Key* key, uint32_t minute) noexcept nogil:
    cdef bint adjacent = key.minute + 1 == minute
    key.reads_last = key.reads_now if adjacent else 0
    key.writes_last = key.writes_now if adjacent else 0
    key.reads_now = 0
    key.writes_now = 0
    key.minute = minute


cdef inline void key_count_read(Key* key, uint32_t minute) noexcept nogil:
    if key.minute != minute:
        key_enter_minute(key, minute)
    key.reads += 1
    key.reads_now += 1


cdef inline void key_count_write(Key* key, uint32_t minute) noexcept nogil:
    if key.minute != minute:
        key_enter_minute(key, minute)
    key.writes += 1
    key.writes_now += 1


cdef inline uint32_t key_reads_per_minute(const Key* key, uint32_t minute) noexcept nogil:
    """Returns how many reads the key had in the last whole minute."""
    return key.reads_last if key.minute == minute else key.reads_now if key.minute + 1 == minute else 0


cdef inline uint32_t key_writes_per_minute(const Key* key, uint32_t minute) noexcept nogil:
    return key.writes_last if key.minute == minute else key.writes_now if key.minute + 1 == minute else 0
