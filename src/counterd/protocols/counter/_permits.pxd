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
from counterd.protocols.counter._asks cimport ITEMS_MAX
from counterd.protocols.counter._counters cimport Counter, Counters, counter_at, counter_grant, counter_has
from counterd.protocols.counter._messages cimport HEADER_SIZE, KEY_MAX, PERMIT, PERMIT_HEAD, TAKE_HEAD
from counterd.protocols.counter._rates cimport FLAG_AWAITED
from counterd.protocols.counter._shares cimport FLAG_SHARED
from counterd.protocols.counter._takes cimport Takes, takes_fit


cdef struct Want:           # 32 bytes, of each item
    const uint8_t* name
    uint32_t name_size
    uint32_t tag
    uint32_t amount
    uint32_t maximum
    uint32_t record
    uint32_t holding        # what the connection holds already; 0: nothing


cdef inline int wants_read(const Table* table, const Frame* frame, Want* wants) noexcept nogil:
    """Decodes a Take. Returns the number of its items, or 0 if it is invalid or contains a rate.

    The processor fetches the cache lines of the index while it hashes the next names.
    """
    cdef const uint8_t* item = frame.data + HEADER_SIZE
    cdef uint32_t rest = frame.size - HEADER_SIZE - TAKE_HEAD     # bytes that follow
    cdef uint32_t size = load_be16(item + 8)
    cdef int i, count = item[0]
    if not 1 < count <= ITEMS_MAX or load_be16(item + 2) > WEIGHT_MAX or size > min(<uint32_t>KEY_MAX, rest):
        return 0
    item += TAKE_HEAD + size
    rest -= size
    for i in range(count):
        if rest < PERMIT_HEAD or load_le16(item) != PERMIT:     # with on_death 0
            return 0
        size = load_be16(item + 2)
        wants[i].amount = load_be32(item + 4)
        wants[i].maximum = load_be32(item + 8)
        item += PERMIT_HEAD
        rest -= PERMIT_HEAD
        if <uint32_t>(size - 1) >= rest or <uint32_t>(wants[i].amount - 1) >= wants[i].maximum:  # or 0
            return 0
        wants[i].name = item
        wants[i].name_size = size
        wants[i].tag = name_tag(table, item, size)
        prefetch(table.index.entries + index_home(&table.index, wants[i].tag))
        item += size
        rest -= size
    return count if rest == 0 else 0


cdef inline bint wants_are_there(Takes* takes, uint32_t connection, Want* wants, int count) noexcept nogil:
    """Finds records and holdings. Returns False if an item is new, short, shared or repeated, or there is no room."""
    cdef const Permits* permits = &takes.counters.permits
    cdef const Counter* counter
    cdef uint32_t number, holdings = 0
    cdef uint64_t seen = 0      # a bit for the record of each item before: only records with equal bits are compared
    cdef int i, j
    for i in range(count):
        number = table_find(&permits.table, wants[i].tag, wants[i].name, wants[i].name_size)
        if number == 0:
            return False
        counter = counter_at(takes.counters, number)
        if counter.permit.consumption > wants[i].maximum - wants[i].amount:
            return False
        if counter.permit.record.flags & (FLAG_AWAITED | FLAG_SHARED):
            return False
        debug_check(counter_has(takes.counters, number, wants[i].amount, wants[i].maximum))
        if seen >> (number & 63) & 1:
            for j in range(i):
                if wants[j].record == number:
                    return False
        seen |= <uint64_t>1 << (number & 63)
        wants[i].record = number
        wants[i].holding = ledger_find(permits, connection, number, wants[i].tag)
        holdings += wants[i].holding == 0
    return takes_fit(takes, connection, holdings, 0)


cdef inline void wants_grant(
    Takes* takes, uint32_t connection, const Want* wants, int count, int64_t now_ns, uint8_t* left
) noexcept nogil:
    """Grants all items, and writes how much is left of each."""
    cdef Counters* counters = takes.counters
    cdef uint32_t consumption
    cdef int i
    takes.state.grant += 1
    for i in range(count):
        counter_grant(
            counters, connection, wants[i].record, wants[i].holding, wants[i].amount, wants[i].maximum, now_ns
        )
        consumption = counter_at(counters, wants[i].record).permit.consumption
        store_be32(left + 4 * i, wants[i].maximum - consumption)
