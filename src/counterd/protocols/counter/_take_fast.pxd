# Takes of several permits that are available, and that this daemon need not share. Three short loops decode, check and
# grant such a Take.
#
# Floor 2, header only. CounterSession.take executes all other Takes, and says what they lack.
#
# Invariants:
# - nothing is changed before all items of a Take are known to be available;
# - the decision is that of takes_decide(): counter_has() says the same of each item (the debug build checks it), and
#   both ask takes_fit() for room.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Frame
from counterd.engine.byteorder cimport load_be16, load_be32, load_le16, prefetch, store_be32
from counterd.engine.debug cimport debug_check
from counterd.engine.fair cimport WEIGHT_MAX
from counterd.engine.permits cimport Permits, ledger_find
from counterd.engine.table cimport Table, index_home, name_tag, table_find
from counterd.protocols.counter._counters cimport Counter, Counters, counter_at, counter_grant, counter_has
from counterd.protocols.counter._items cimport ITEMS_MAX
from counterd.protocols.counter._messages cimport HEADER_SIZE, KEY_MAX, PERMIT, PERMIT_HEAD, TAKE_HEAD
from counterd.protocols.counter._rates cimport FLAG_AWAITED
from counterd.protocols.counter._shares cimport FLAG_SHARED
from counterd.protocols.counter._takes cimport Takes, takes_fit


cdef struct FastItem:       # 32 bytes, of each item
    const uint8_t* name
    uint32_t name_size
    uint32_t tag
    uint32_t amount
    uint32_t maximum
    uint32_t record
    uint32_t holding        # what the connection holds already; 0: nothing


cdef inline int fast_take_read(const Table* table, const Frame* frame, FastItem* items) noexcept nogil:
    """Decodes a Take. Returns the number of its items, or 0 if it is invalid or contains a rate.

    The processor fetches the cache lines of the index while it hashes the next names.
    """
    cdef const uint8_t* data = frame.data + HEADER_SIZE
    cdef uint32_t rest = frame.size - HEADER_SIZE - TAKE_HEAD     # bytes that follow
    cdef uint32_t size = load_be16(data + 8)
    cdef int i, count = data[0]
    if not 1 < count <= ITEMS_MAX or load_be16(data + 2) > WEIGHT_MAX or size > min(<uint32_t>KEY_MAX, rest):
        return 0
    data += TAKE_HEAD + size
    rest -= size
    for i in range(count):
        if rest < PERMIT_HEAD or load_le16(data) != PERMIT:     # with on_death 0
            return 0
        size = load_be16(data + 2)
        items[i].amount = load_be32(data + 4)
        items[i].maximum = load_be32(data + 8)
        data += PERMIT_HEAD
        rest -= PERMIT_HEAD
        if <uint32_t>(size - 1) >= rest or <uint32_t>(items[i].amount - 1) >= items[i].maximum:     # or 0
            return 0
        items[i].name = data
        items[i].name_size = size
        items[i].tag = name_tag(table, data, size)
        prefetch(table.index.entries + index_home(&table.index, items[i].tag))
        data += size
        rest -= size
    return count if rest == 0 else 0


cdef inline bint fast_take_fits(Takes* takes, uint32_t connection, FastItem* items, int count) noexcept nogil:
    """Finds records and holdings. Returns False if an item is new, short, shared or repeated, or there is no room."""
    cdef const Permits* permits = &takes.counters.permits
    cdef const Counter* counter
    cdef uint32_t number, holdings = 0
    cdef uint64_t seen = 0      # a bit for the record of each item before: only records with equal bits are compared
    cdef int i, j
    for i in range(count):
        number = table_find(&permits.table, items[i].tag, items[i].name, items[i].name_size)
        if number == 0:
            return False
        counter = counter_at(takes.counters, number)
        if counter.permit.consumption > items[i].maximum - items[i].amount:
            return False
        if counter.permit.record.flags & (FLAG_AWAITED | FLAG_SHARED):
            return False
        debug_check(counter_has(takes.counters, number, items[i].amount, items[i].maximum))
        if seen >> (number & 63) & 1:
            for j in range(i):
                if items[j].record == number:
                    return False
        seen |= <uint64_t>1 << (number & 63)
        items[i].record = number
        items[i].holding = ledger_find(permits, connection, number, items[i].tag)
        holdings += items[i].holding == 0
    return takes_fit(takes, connection, holdings, 0)


cdef inline void fast_take_grant(
    Takes* takes, uint32_t connection, const FastItem* items, int count, int64_t now_ns, uint8_t* left
) noexcept nogil:
    """Grants all items, and writes how much is left of each."""
    cdef Counters* counters = takes.counters
    cdef uint32_t consumption
    cdef int i
    takes.state.grant += 1
    for i in range(count):
        counter_grant(
            counters, connection, items[i].record, items[i].holding, items[i].amount, items[i].maximum, now_ns
        )
        consumption = counter_at(counters, items[i].record).permit.consumption
        store_be32(left + 4 * i, items[i].maximum - consumption)
