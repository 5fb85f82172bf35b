"""The throttr protocol's tables for people: its keys, and the subscriptions of a connection.

Floor 2 (ARCHITECTURE.md). The tables are walks in slices, see engine/walk.pyx. Keys that had expired at the time of the
store's last call are left out.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.engine.table cimport Record
from counterd.engine.walk cimport BLOCK_WORK, HoldingsWalk, RankedWalk
from counterd.protocols.throttr._keys cimport KEY_BUFFER, Key, key_expires, key_lives, value_length
from counterd.protocols.throttr._store cimport ThrottrStore

from counterd.tables import CONNECTION, Column, Table

cdef double NS_PER_S = 1e9

cdef enum:
    BY_TTL = 1              # the second of the orders of keys


cdef class KeysWalk(RankedWalk):
    """Lists keys whose names contain `match`. The largest quotas and values come first, or the longest TTL."""

    def __cinit__(self, ThrottrStore store not None, *_, **_parameters):
        self.table = &store.keys.table

    cdef inline uint64_t value(self, const Key* key) noexcept:
        """Returns a quota, or the size of a buffer."""
        if not key.record.flags & KEY_BUFFER:
            return key.content.quota
        self.work -= BLOCK_WORK
        return value_length(&(<ThrottrStore>self.store).keys, key)

    cdef bint rank(self, uint32_t number, const Record* record, uint64_t* rank) noexcept:
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef const Key* key = <const Key*>record
        if not key_lives(&store.keys, key, store.now_ns):
            return False
        rank[0] = <uint64_t>key_expires(&store.keys, key) if self.sort == BY_TTL else self.value(key)
        return True

    cdef tuple row(self, uint32_t number, const Record* record, bytes name):
        cdef ThrottrStore store = <ThrottrStore>self.store
        cdef const Key* key = <const Key*>record
        cdef int64_t left_ns = key_expires(&store.keys, key) - store.now_ns
        kind = "buffer" if key.record.flags & KEY_BUFFER else "quota"
        return (name, kind, self.value(key), left_ns / NS_PER_S)


cdef class SubscriptionsWalk(HoldingsWalk):
    """Lists the subscriptions of a connection, beginning with the latest."""

    def __cinit__(self, ThrottrStore store not None, *_, **_parameters):
        self.permits = &store.channels.permits


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
        ("value", "ttl"),
        KeysWalk,
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
        SubscriptionsWalk,
        {"connection": CONNECTION},
    ),
)
