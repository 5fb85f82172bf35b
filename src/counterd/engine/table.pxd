# Named records in the region: an open-addressed index, names, and records of a fixed size.
#
# Floor 1, header only. Records are cells of a pool. If a name is too long for its record, the rest is in a chain of
# blocks. The region contains no pointers, so zeroed pages are an empty table. A Table is a process's view of a table.
#
# Invariants:
# - an index has at least two slots for each entry, so a probe always ends; also where it has come round to its home;
# - a probe moves by an odd step, so it visits every slot;
# - a record is in use (RECORD_USED) or on the free list; it never moves while it is in use.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from counterd.engine.byteorder cimport expected, load_le64, prefetch
from counterd.engine.chains cimport (
    Chain, Chains, chain_blocks, chain_equals, chain_free, chain_read, chain_write,
)
from counterd.engine.debug cimport debug_check
from counterd.engine.pool cimport Pool, pool_put, pool_take
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.siphash cimport SipState, sip_begin, sip_hash

cdef enum:
    INDEX_BITS_MAX = 31     # a slot number is the top bits of a 32-bit tag; one bit is left to tell names apart
    RECORD_USED = 0x80      # in Record.flags; the other bits belong to the table's owner
    RECORD_HEAD = 8         # bytes of a Record before its name
    CHAIN_SIZE = 8          # bytes of a Chain, in the last bytes of the field for the name


cdef struct IndexEntry:
    uint32_t tag            # its top bits are the home slot
    uint32_t number         # of the record or holding; 0 = empty slot


cdef struct IndexState:     # in the mapping
    uint32_t used
    uint32_t displaced      # entries that are not in their home slot
    uint32_t longest        # most steps that an insertion ever took


cdef struct Index:          # this process's view
    IndexEntry* entries
    IndexState* state
    uint32_t mask
    uint32_t step           # slots from one to the next in a probe
    uint32_t inverse        # of the step: a distance in slots times this is a distance in steps
    int shift


cdef struct Record:         # the head of each record; name_inline bytes of the name follow, then the owner's fields
    uint32_t tag
    uint16_t name_size
    uint8_t flags
    uint8_t note            # belongs to the table's owner


cdef struct Table:          # this process's view
    Index index
    SipState begin          # of SipHash, for the key
    uint8_t* records
    Pool* pool              # of the records
    Chains chains           # of names longer than name_inline; shared with other parts of the store
    uint32_t capacity       # records
    uint32_t record_size
    uint32_t name_inline    # of a longer name, a record has name_inline - CHAIN_SIZE bytes and the chain of the rest


# ---- index ---------------------------------------------------------------------------------------------------------

cdef inline int index_reserve(
    Index* index, Region* region, const char* name, uint32_t capacity, uint32_t step=1
) except -1:
    """Reserves memory for an index of `capacity` entries: the next power of two from 2 * capacity, but at least 2
    slots.

    step: an odd number. step must not be 1 if the tags fill neighbouring slots one after the other. Raises ValueError
    for too many entries.
    """
    cdef int bits = 1, _digits
    while (<uint64_t>1 << bits) < 2 * <uint64_t>capacity:
        bits += 1
    if bits > INDEX_BITS_MAX:
        raise ValueError(f"at most {1 << (INDEX_BITS_MAX - 1)} {name.decode()}, not {capacity}")
    index.mask = <uint32_t>((<uint64_t>1 << bits) - 1)
    index.shift = 32 - bits
    index.step = index.inverse = step
    for _digits in range(4):    # Newton's method: 3 bits are right at first, then 6, 12, 24, 48
        index.inverse *= 2 - step * index.inverse
    region_reserve(region, name, sizeof(IndexState), <void**>&index.state)
    region_reserve(region, name, sizeof(IndexEntry) << bits, <void**>&index.entries)
    return 0


cdef inline uint32_t index_home(const Index* index, uint32_t tag) noexcept nogil:
    return tag >> index.shift


cdef inline void index_prefetch(const Index* index, uint32_t tag) noexcept nogil:
    """Prefetches the cache lines of the home slot and of the next slot of the probe, which a removal always reads."""
    cdef uint32_t home = index_home(index, tag)
    prefetch(index.entries + home)
    prefetch(index.entries + ((home + index.step) & index.mask))


cdef inline uint32_t index_peek(const Index* index, uint32_t tag) noexcept nogil:
    """Returns the number of the first entry with this tag, or 0 if there is none.

    The result is a guess for prefetching, because different names can have equal tags.
    """
    cdef uint32_t slot = index_home(index, tag)
    while index.entries[slot].number:
        if index.entries[slot].tag == tag:
            return index.entries[slot].number
        slot = (slot + index.step) & index.mask
        if slot == index_home(index, tag):
            break
    return 0


cdef inline void index_insert(Index* index, uint32_t tag, uint32_t number) noexcept nogil:
    cdef uint32_t slot = index_home(index, tag)
    cdef uint32_t probe = 0
    debug_check(index.state.used <= index.mask // 2)
    while probe <= index.mask and index.entries[slot].number != 0:
        slot = (slot + index.step) & index.mask
        probe += 1
    index.entries[slot].tag = tag
    index.entries[slot].number = number
    index.state.used += 1
    if probe:
        index.state.displaced += 1
        if probe > index.state.longest:
            index.state.longest = probe


cdef inline void index_remove(Index* index, uint32_t tag, uint32_t number) noexcept nogil:
    """Removes an entry, and moves later entries of the probe back into the hole, so that the index needs no
    tombstones."""
    cdef uint32_t hole = index_home(index, tag)
    cdef uint32_t slot, home, _step
    for _step in range(index.mask + 1):
        if index.entries[hole].number == number:
            break
        hole = (hole + index.step) & index.mask
    debug_check(index.entries[hole].number == number)
    if hole != index_home(index, tag):
        index.state.displaced -= 1
    slot = hole
    for _step in range(index.mask + 1):
        slot = (slot + index.step) & index.mask
        if index.entries[slot].number == 0:
            break
        home = index_home(index, index.entries[slot].tag)
        if (((slot - home) * index.inverse) & index.mask) < (((slot - hole) * index.inverse) & index.mask):
            continue  # its home is after the hole, so it would not be found in the hole
        if hole == home:
            index.state.displaced -= 1
        index.entries[hole] = index.entries[slot]
        hole = slot
    index.entries[hole].tag = 0
    index.entries[hole].number = 0
    index.state.used -= 1


# ---- names ---------------------------------------------------------------------------------------------------------

cdef inline uint32_t name_tag(const Table* table, const uint8_t* name, uint32_t size) noexcept nogil:
    return <uint32_t>(sip_hash(&table.begin, name, size) >> 32)


cdef inline uint8_t* record_name(Record* record) noexcept nogil:
    return <uint8_t*>record + RECORD_HEAD


cdef inline Chain* name_chain(const Table* table, Record* record) noexcept nogil:
    """Returns the chain for the rest of a long name.

    In a free record, chain.first is the link to the next free record.
    """
    return <Chain*>(record_name(record) + table.name_inline - CHAIN_SIZE)


cdef inline uint32_t name_prefix(const Table* table, uint32_t size) noexcept nogil:
    """Returns how many bytes of a name are in its record."""
    return size if size <= table.name_inline else table.name_inline - CHAIN_SIZE


cdef inline uint32_t name_blocks(const Table* table, uint32_t size) noexcept nogil:
    return chain_blocks(size - name_prefix(table, size))


cdef inline bint bytes_equal(const uint8_t* one, const uint8_t* other, uint32_t size) noexcept nogil:
    """As memcmp() == 0, but without a call, which takes longer than the comparison of a short name."""
    cdef uint32_t i
    if size < 8:
        for i in range(size):
            if one[i] != other[i]:
                return False
        return True
    for i in range(0, size - 8, 8):
        if load_le64(one + i) != load_le64(other + i):
            return False
    return load_le64(one + size - 8) == load_le64(other + size - 8)     # parts of it were compared before


cdef inline bint name_equals(const Table* table, Record* record, const uint8_t* name, uint32_t size) noexcept nogil:
    cdef uint32_t prefix
    if record.name_size != size:
        return False
    if expected(size <= table.name_inline, True):
        return bytes_equal(record_name(record), name, size)
    prefix = name_prefix(table, size)
    return memcmp(record_name(record), name, prefix) == 0 and chain_equals(
        &table.chains, name_chain(table, record), name + prefix, size - prefix
    )


cdef inline void name_read(const Table* table, Record* record, uint8_t* target) noexcept nogil:
    cdef uint32_t prefix = name_prefix(table, record.name_size)
    memcpy(target, record_name(record), prefix)
    if prefix < record.name_size:
        chain_read(&table.chains, name_chain(table, record), 0, target + prefix, record.name_size - prefix)


cdef inline void name_begin(const Table* table, Record* record, uint8_t* target, uint32_t most) noexcept nogil:
    """Reads the first `most` bytes of a name, or all bytes if the name is shorter."""
    cdef uint32_t prefix = min(name_prefix(table, record.name_size), most)
    memcpy(target, record_name(record), prefix)
    most = min(most, <uint32_t>record.name_size)
    if prefix < most:
        chain_read(&table.chains, name_chain(table, record), 0, target + prefix, most - prefix)


cdef inline bytes name_bytes(const Table* table, Record* record):
    cdef bytes name = PyBytes_FromStringAndSize(NULL, record.name_size)
    name_read(table, record, <uint8_t*>PyBytes_AS_STRING(name))
    return name


# ---- records -------------------------------------------------------------------------------------------------------

cdef inline int table_reserve(
    Table* table, Region* region, const char* name, uint32_t capacity, size_t record_size, uint32_t name_inline
) except -1:
    """Reserves memory for a table.

    record_size: bytes of a record. name_inline: how many of these bytes are for the name.
    """
    table.capacity = capacity
    table.record_size = <uint32_t>record_size
    table.name_inline = name_inline
    index_reserve(&table.index, region, name, capacity)
    region_reserve(region, name, sizeof(Pool), <void**>&table.pool)
    region_reserve(region, name, (<size_t>capacity + 1) * record_size, <void**>&table.records)
    return 0


cdef inline void table_begin(Table* table, const uint64_t* key, const Chains* chains) noexcept nogil:
    """Call this once, after the region was mapped.

    key: the SipHash key. chains: the chains for the rest of long names.
    """
    table.begin = sip_begin(key)
    table.chains = chains[0]
    table.pool.capacity = table.capacity


cdef inline Record* record_at(const Table* table, uint32_t number) noexcept nogil:
    debug_check(0 < number <= table.pool.fresh)
    return <Record*>(table.records + number * <size_t>table.record_size)


cdef inline uint32_t table_find(const Table* table, uint32_t tag, const uint8_t* name, uint32_t size) noexcept nogil:
    """Returns the number of the record with this name, or 0 if there is none."""
    cdef const Index* index = &table.index
    cdef uint32_t slot = index_home(index, tag)
    while index.entries[slot].number:
        if index.entries[slot].tag == tag:
            if name_equals(table, record_at(table, index.entries[slot].number), name, size):
                return index.entries[slot].number
        slot = (slot + index.step) & index.mask
        if slot == index_home(index, tag):
            break
    return 0


cdef inline uint32_t table_insert(Table* table, uint32_t tag, const uint8_t* name, uint32_t size) noexcept nogil:
    """Inserts a record for a new name, and does not change the owner's fields. Returns the number of the record.

    The caller must have checked that a record and enough blocks are free.
    """
    cdef uint32_t number = pool_take(
        table.pool, &name_chain(table, <Record*>table.records).first, table.record_size
    )
    cdef Record* record = record_at(table, number)
    cdef uint32_t prefix = name_prefix(table, size)
    debug_check(number != 0)
    record.tag = tag
    record.name_size = <uint16_t>size
    record.flags = RECORD_USED
    memcpy(record_name(record), name, prefix)
    if prefix < size:
        chain_write(&table.chains, name_chain(table, record), 0, name + prefix, size - prefix)
    index_insert(&table.index, tag, number)
    return number


cdef inline void table_unlist(Table* table, uint32_t number) noexcept nogil:
    """Makes a record unknown by its name. The record and its name stay until table_free()."""
    index_remove(&table.index, record_at(table, number).tag, number)


cdef inline void table_free(Table* table, uint32_t number) noexcept nogil:
    """Frees a record that is not in the index, and the blocks of its name."""
    cdef Record* record = record_at(table, number)
    if record.name_size > table.name_inline:
        chain_free(&table.chains, name_chain(table, record), name_blocks(table, record.name_size))
    record.flags = 0
    pool_put(table.pool, &name_chain(table, <Record*>table.records).first, table.record_size, number)


cdef inline void table_remove(Table* table, uint32_t number) noexcept nogil:
    table_unlist(table, number)
    table_free(table, number)
