# Peers: no peer gets more than its share of the places in which Takes wait, or in which holdings stay for a grace
# time.
#
# Floor 2, header only; no socket. A peer is an address, a network or a user, see contract.Peer.whom(). It is known by a
# keyed hash, its key, which is noted for each of its connections when they first need one. A peer has a record while
# it has a place. There are as many records as places of the first kinds, so a new peer
# always finds a free record.
#
# Invariants (audit_peers checks each):
# - a peer has as many places as its connections have waiting Takes, items of these, grace times, and holdings in these;
# - exactly the peers that have a place have a record, and it is in the index.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.debug cimport debug_check
from counterd.engine.pool cimport Pool, pool_put, pool_take
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.siphash cimport siphash13
from counterd.engine.table cimport Index, index_home, index_insert, index_remove, index_reserve

cdef enum Places:           # each with a second kind, of which some are needed for one of the first
    WAITS = 0               # Takes that wait; the items of these after the first
    GRACES = 2              # connections in their grace time; their holdings
    PLACES = 4

cdef enum:
    IS_LOCAL = 1            # bit of a key: the peer is on this machine
    IS_KNOWN = 2            # bit of each key


cdef struct Peer:           # 32 bytes
    uint64_t key            # 0: free
    uint32_t[PLACES] used
    uint32_t next           # links the free list
    uint32_t spare


cdef struct PeersState:     # in the region
    Pool peers
    uint32_t[2] shares      # in percent: of a peer elsewhere, and on this machine
    uint64_t[PLACES] refused    # because the peer had its share, in total; only of the first kinds


cdef struct Peers:          # this process's view
    PeersState* state
    Peer* peers
    uint64_t* keys          # by connection; 0: no share applies
    Index index
    uint32_t[PLACES] most   # places, of all peers
    const uint64_t* key     # of SipHash


cdef inline int peers_reserve(
    Peers* peers, Region* region, uint32_t waits, uint32_t graces, uint32_t holdings
) except -1:
    """Reserves memory for the peers of so many waiting Takes and grace times. holdings: the most in grace times."""
    cdef uint32_t capacity = waits + graces
    peers.most = [waits, waits, graces, holdings]
    region_reserve(region, b"peers", sizeof(PeersState), <void**>&peers.state)
    region_reserve(region, b"peers", (<size_t>capacity + 1) * sizeof(Peer), <void**>&peers.peers)
    region_reserve(region, b"peers", (CONNECTIONS_MAX + 1) * sizeof(uint64_t), <void**>&peers.keys)
    index_reserve(&peers.index, region, b"peers", capacity)
    return 0


cdef inline void peers_begin(Peers* peers, const uint64_t* key) noexcept nogil:
    """Call this once, after the region was mapped. key: the SipHash key."""
    debug_check(sizeof(Peer) == 32)
    peers.key = key
    peers.state.peers.capacity = peers.most[<int>WAITS] + peers.most[<int>GRACES]
    peers.state.shares = [100, 100]


cdef inline bint peer_is_known(const Peers* peers, uint32_t connection) noexcept nogil:
    return peers.keys[connection] != 0


cdef inline void peer_meet(Peers* peers, uint32_t connection, bytes name, bint is_local) noexcept:
    """Notes who the peer of a connection is, as contract.Peer.whom says. Before the connection needs a place."""
    cdef uint64_t key = siphash13(
        peers.key, <const uint8_t*>PyBytes_AS_STRING(name), <uint32_t>PyBytes_GET_SIZE(name)
    )
    peers.keys[connection] = key & ~<uint64_t>IS_LOCAL | IS_KNOWN | (<uint64_t>IS_LOCAL if is_local else 0)


cdef inline uint32_t peer_tag(uint64_t key) noexcept nogil:
    return <uint32_t>(key >> 32)


cdef inline uint32_t peer_find(const Peers* peers, uint64_t key) noexcept nogil:
    """Returns the record of a peer, or 0 if it has none."""
    cdef const Index* index = &peers.index
    cdef uint32_t slot = index_home(index, peer_tag(key))
    while index.entries[slot].number:
        if peers.peers[index.entries[slot].number].key == key:
            return index.entries[slot].number
        slot = (slot + index.step) & index.mask
    return 0


cdef inline uint32_t peer_share(const Peers* peers, uint64_t key, int kind) noexcept nogil:
    """Returns how many places of a kind a peer can have."""
    return max(<uint32_t>1, <uint32_t>(<uint64_t>peers.most[kind] * peers.state.shares[key & IS_LOCAL] // 100))


cdef inline bint peer_take(Peers* peers, uint32_t connection, Places kind, uint32_t more) noexcept nogil:
    """Takes a place for the peer of a connection, and `more` places of the second kind.

    Returns False if the peer would have more than its share then.
    """
    cdef uint64_t key = peers.keys[connection]
    cdef uint32_t number, share
    cdef Peer* peer
    if key == 0:
        return True
    number = peer_find(peers, key)
    peer = peers.peers + number     # record 0 has no places
    share = peer_share(peers, key, kind + 1)
    if peer.used[<int>kind] >= peer_share(peers, key, kind) or more and (
        more > share or peer.used[kind + 1] > share - more
    ):
        peers.state.refused[<int>kind] += 1
        return False
    if number == 0:
        number = pool_take(&peers.state.peers, &peers.peers.next, sizeof(Peer))
        debug_check(number != 0)
        peer = peers.peers + number
        memset(peer, 0, sizeof(Peer))
        peer.key = key
        index_insert(&peers.index, peer_tag(key), number)
    peer.used[<int>kind] += 1
    peer.used[kind + 1] += more
    return True


cdef inline void peer_give_back(Peers* peers, uint32_t connection, Places kind, uint32_t more) noexcept nogil:
    """Gives back the places that peer_take() has taken."""
    cdef uint64_t key = peers.keys[connection]
    cdef uint32_t number
    cdef Peer* peer
    if key == 0:
        return
    number = peer_find(peers, key)
    peer = peers.peers + number
    debug_check(number != 0 and peer.used[<int>kind] > 0 and peer.used[kind + 1] >= more)
    peer.used[<int>kind] -= 1
    peer.used[kind + 1] -= more
    if peer.used[<int>WAITS] == 0 and peer.used[<int>GRACES] == 0:
        index_remove(&peers.index, peer_tag(key), number)
        peer.key = 0
        pool_put(&peers.state.peers, &peers.peers.next, sizeof(Peer), number)
