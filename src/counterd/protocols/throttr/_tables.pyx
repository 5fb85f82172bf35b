"""The throttr protocol's tables for people: its keys, and the subscriptions of a connection.

Floor 2 (ARCHITECTURE.md). The tables are walks in slices, see engine/walk.pyx. Keys that had expired at the time of the
store's last call are left out.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.engine.permits cimport Holding
from counterd.engine.table cimport Record
from counterd.engine.walk cimport BLOCK_WORK, HoldingsWalk, RankedWalk
from counterd.protocols.throttr._keys cimport KEY_BUFFER, Key, key_expires, key_lives, value_length
from counterd.protocols.throttr._store cimport ThrottrStore

from counterd.listing import CONNECTION, ROWS_MAX, Column, Table, ranked_parameters, read_parameters
from counterd.settings import integer

cdef double NS_PER_S = 1e9
SORTS = ("value", "ttl")


cdef class KeysWalk(RankedWalk):
    """Lists keys whose names contain `match`. The largest quotas and values come first, or the longest TTL."""

    cdef bint by_ttl

    def __cinit__(self, ThrottrStore store not None, bytes match, uint32_t limit, str sort):
        self.table = &store.keys.table
        self.by_ttl = sort == "ttl"

    cdef inline uint64_t value(self, const Key* key) noexcept:
        """Returns a quota, or the size of a buffer."""
        if not key.record.flags & KEY_BUFFER:
            return key.content.quota
        self.work -= BLOCK_WORK
        return value_length(&(<ThrottrStore>self.store).keys, key)

    cdef bint rank(self, const Record* record, uint64_t* rank) noexcept:
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef const Key* key = <const Key*>record
        if not key_lives(&store.keys, key, store.now_ns):
            return False
        rank[0] = <uint64_t>key_expires(&store.keys, key) if self.by_ttl else self.value(key)
        return True

    cdef tuple row(self, bytes name, const Record* record):
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef const Key* key = <const Key*>record
        cdef int64_t left_ns = key_expires(&store.keys, key) - store.now_ns
        kind = "buffer" if key.record.flags & KEY_BUFFER else "quota"
        return (name, kind, self.value(key), left_ns / NS_PER_S)


cdef class SubscriptionsWalk(HoldingsWalk):
    """Lists the subscriptions of a connection, beginning with the latest."""

    def __cinit__(self, ThrottrStore store not None, uint32_t connection, uint32_t limit):
        self.permits = &store.channels.permits

    cdef tuple row(self, bytes name, const Holding* holding):
        return (name, holding.amount, holding.since_tenths)


def open_keys(ThrottrStore store, parameters):
    """Begins a walk through the keys."""
    match, sort, limit = ranked_parameters(parameters, SORTS)
    return KeysWalk(store, match, limit, sort)


def open_subscriptions(ThrottrStore store, parameters):
    """Begins a walk through the subscriptions of one connection."""
    readers = {"connection": CONNECTION, "limit": integer(1, ROWS_MAX)}
    return SubscriptionsWalk(store, **read_parameters(parameters, readers, {"limit": ROWS_MAX}))


TABLES = (
    Table(
        "keys",
        "The keys. The keys with the largest quota or value come first, or those with the longest TTL. `match`: "
        "list only names that contain this text.",
        (
            Column("name", "name", "the key"),
            Column("type", "text", "quota or buffer"),
            Column("value", "integer", "the quota, or the size of the buffer in bytes"),
            Column("ttl", "seconds", "how long until the key expires"),
        ),
        SORTS,
        open_keys,
    ),
    Table(
        "subscriptions",
        "The channels that the connection `connection` is subscribed to, beginning with the latest.",
        (
            Column("channel", "name", "the name of the channel"),
            Column("times", "integer", "how often the connection is subscribed to the channel"),
            Column("since", "since", "when the connection first subscribed"),
        ),
        (),
        open_subscriptions,
        ("connection",),
    ),
)
