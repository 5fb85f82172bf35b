# The connections of the throttr protocol: an id and statistics for each.
#
# Floor 2, header only. A member is the record of a connection, by its number. Members are in the region, because any
# connection may ask for all of them.
#
# Invariants (ThrottrStore.audit checks the last):
# - a member is open from its first subscription until its connection ends. Its subscriptions exist a moment longer, and
#   are then listed without an id;
# - ids are public, so they have their own hash key. Under the key of the tables they would reveal hashes of names, with
#   which an attacker could choose many names for one run of slots;
# - a member's `repeated` is the sum of its subscriptions' amounts above 1.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from counterd.engine.byteorder cimport load_le32, store_le32
from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.debug cimport debug_check
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.siphash cimport siphash13
from counterd.protocols.throttr._wire cimport ID_SIZE, OPCODES

cdef enum:
    NAME_MAX = 255          # bytes of a key or a channel: their length is one byte


cdef struct Member:         # zeroed memory is a member that is not open
    uint8_t id[ID_SIZE]
    uint32_t is_open
    uint32_t epoch          # when it connected: listings that began earlier do not show it
    int64_t connected_ns    # Unix time
    uint64_t repeated       # its subscriptions beyond the first to each channel
    uint64_t read_bytes
    uint64_t write_bytes
    uint64_t published_bytes
    uint64_t received_bytes
    uint64_t allocated_bytes
    uint64_t consumed_bytes
    uint64_t requests[OPCODES]


cdef struct MembersState:   # in the region
    uint64_t serial         # of the last member
    uint64_t[2] id_key      # of SipHash, for ids


cdef struct Members:        # this process's view
    MembersState* state
    Member* records         # by connection
    uint32_t capacity       # the highest number of a connection that can be a member


cdef inline int members_reserve(Members* members, Region* region, uint32_t capacity) except -1:
    """Reserves memory for the connections up to this number. Raises ValueError if there can never be as many."""
    if capacity > CONNECTIONS_MAX:
        raise ValueError(f"at most {CONNECTIONS_MAX} members, not {capacity}")
    members.capacity = capacity
    region_reserve(region, b"members", sizeof(MembersState), <void**>&members.state)
    region_reserve(region, b"members", (<size_t>capacity + 1) * sizeof(Member), <void**>&members.records)
    return 0


cdef inline void members_begin(Members* members, const uint64_t* hash_key) noexcept nogil:
    """Call this once, after the region was mapped.

    The key for ids consists of hashes of messages that are too long for a name.
    """
    cdef uint8_t[NAME_MAX + 1] message
    cdef int i
    memset(message, 0, sizeof(message))
    for i in range(2):
        message[0] = <uint8_t>i
        members.state.id_key[i] = siphash13(hash_key, message, sizeof(message))


cdef inline Member* member_find(const Members* members, uint32_t connection) noexcept nogil:
    """Returns the open member with this number, or NULL. connection: any number."""
    if connection > members.capacity or not members.records[connection].is_open:
        return NULL
    return members.records + connection


cdef inline Member* member_find_id(const Members* members, const uint8_t* id) noexcept nogil:
    """Returns the member with this id, or NULL. An id begins with the connection's number."""
    cdef Member* member = member_find(members, load_le32(id))
    cdef int i
    if member != NULL:
        for i in range(ID_SIZE):
            if member.id[i] != id[i]:
                return NULL
    return member


cdef inline Member* member_enter(
    Members* members, uint32_t connection, int64_t connected_ns, uint32_t epoch
) noexcept nogil:
    """Makes a connection a member, with an id that cannot be guessed.

    Returns NULL if the number of the connection is too high.
    """
    cdef Member* member
    cdef uint64_t[2] seed
    cdef uint64_t[2] words
    cdef int i
    debug_check(connection != 0)
    if connection > members.capacity:
        return NULL
    members.state.serial += 1
    seed[0] = members.state.serial
    for i in range(2):
        seed[1] = i
        words[i] = siphash13(members.state.id_key, <const uint8_t*>seed, sizeof(seed))
    member = members.records + connection
    memset(member, 0, sizeof(Member))
    memcpy(member.id, words, ID_SIZE)
    store_le32(member.id, connection)  # for member_find_id()
    member.id[6] = member.id[6] & 0x0f | 0x40  # the form of a random UUID
    member.id[8] = member.id[8] & 0x3f | 0x80
    member.is_open = True
    member.epoch = epoch
    member.connected_ns = connected_ns
    return member
