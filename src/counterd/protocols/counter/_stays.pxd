# Stays: what a connection holds after its end, for a grace time, so that another connection can go on with it.
#
# Floor 2, header only; no clock, no source of random numbers. If a connection ends that has a token, its number stays
# taken, and its holdings and charges stay under that number until its timer is due. A connection that presents the
# token gets the number, so nothing of what is held is touched. The other connection, if it is still open, gets the
# number of the one that presented the token, under which nothing is held.
#
# A token is the number and a keyed hash of a counter. A Resume whose reply was lost can be repeated: the token that was
# presented last, `former`, is accepted again with a later number of the attempt: not from a request that was overtaken.
#
# Invariants (audit_stays checks each):
# - exactly the connections that are kept have an armed timer; they have a token, and no session;
# - a connection is leaving only while it is kept and in the queue of takes_leave();
# - nothing is noted of a number that is free.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from counterd.engine.byteorder cimport load_be32, load_be64, store_be32, store_be64, store_le64
from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.debug cimport debug_check
from counterd.engine.permits cimport Permits
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.siphash cimport siphash13
from counterd.engine.wheel cimport Timer, Timers, timers_arm, timers_begin, timers_disarm, timers_reserve
from counterd.protocols.counter._peers cimport STAYS, Peers, peer_give_back, peer_take

cdef enum:
    TOKEN_SIZE = 12         # bytes: the number, 4, and the secret, 8
    ATTEMPTS = 65536        # numbers of one client's attempts: they differ in their low 16 bits only
    TITLE_MAX = 64          # bytes of the name that a connection states
    KEPT_MAX = 524288       # connections, half of CONNECTIONS_MAX: the other numbers are for those that are open


cdef struct Stay:           # 112 bytes, of each connection
    Timer timer             # armed while it is kept
    uint64_t secret         # of its token; 0: it has none
    uint64_t former         # of the token that was presented for it last; 0: none
    uint32_t attempt        # the number that was presented with it
    uint32_t grace_ms
    uint8_t is_kept         # it has ended, and what it holds stays
    uint8_t is_leaving      # likewise, and its waiting Takes are yet to be removed
    uint8_t title_size
    uint8_t title[TITLE_MAX]
    uint8_t spare[5]


cdef struct StaysState:     # in the region
    uint64_t tokens         # made so far
    uint32_t max_ms         # the longest grace time; 0: no tokens are given
    uint32_t kept           # connections in their grace time
    uint32_t kept_holdings  # their holdings
    uint64_t resumed        # connections that were taken over, in total
    uint64_t expired        # grace times that were over, in total


cdef struct Stays:          # this process's view
    StaysState* state
    Stay* stays             # by connection
    Timers timers
    Permits* permits
    Peers* peers
    const uint64_t* key


cdef inline uint32_t stays_holdings(uint32_t holdings) noexcept nogil:
    """Returns how many holdings, of this many in all, can be in their grace time."""
    return (holdings + 1) // 2


cdef inline uint32_t stays_max(uint32_t holdings) noexcept nogil:
    """Returns how many connections can be in their grace time. Each has had a holding or a charge."""
    return min(<uint32_t>KEPT_MAX, 2 * holdings)


cdef inline int stays_reserve(Stays* stays, Region* region, Permits* permits, Peers* peers) except -1:
    stays.permits = permits
    stays.peers = peers
    region_reserve(region, b"stays", sizeof(StaysState), <void**>&stays.state)
    region_reserve(region, b"stays", (CONNECTIONS_MAX + 1) * sizeof(Stay), <void**>&stays.stays)
    timers_reserve(&stays.timers, region, b"stays")
    return 0


cdef inline void stays_begin(Stays* stays, const uint64_t* key, int64_t now_ns) noexcept nogil:
    """Call this once, after the region was mapped. key: the SipHash key."""
    debug_check(sizeof(Stay) == 112)
    stays.key = key
    timers_begin(&stays.timers, &stays.stays.timer, sizeof(Stay), now_ns)


# ---- tokens --------------------------------------------------------------------------------------------------------

cdef inline uint64_t stay_secret(Stays* stays, uint32_t connection) noexcept nogil:
    """Returns a secret that nobody can guess without the key. No reply shows the hash of anything else."""
    cdef uint8_t[12] data
    stays.state.tokens += 1
    store_le64(data, stays.state.tokens)
    store_be32(data + 8, connection)
    return siphash13(stays.key, data, sizeof(data)) or 1


cdef inline void stay_ask(
    Stays* stays, uint32_t connection, uint32_t grace_ms, uint64_t former, uint32_t attempt
) noexcept nogil:
    """Gives a connection a new token, and a grace time that is at most the allowed one.

    former, attempt: the secret that was presented, and the number of the attempt; both are 0 if none was presented.
    """
    cdef Stay* stay = stays.stays + connection
    stay.secret = stay_secret(stays, connection)
    stay.former = former
    stay.attempt = attempt
    stay.grace_ms = min(grace_ms, stays.state.max_ms)


cdef inline void stay_discard(Stays* stays, uint32_t connection) noexcept nogil:
    """Makes the token of a connection invalid."""
    stays.stays[connection].secret = stays.stays[connection].former = 0


cdef inline uint64_t token_secret(const uint8_t* token) noexcept nogil:
    return load_be64(token + 4)


cdef inline bint attempt_follows(uint32_t attempt, uint32_t last) noexcept nogil:
    """Returns True if the same client made the attempt after the last one."""
    return attempt > last and attempt // ATTEMPTS == last // ATTEMPTS


cdef inline uint32_t stay_find(const Stays* stays, const uint8_t* token, uint32_t attempt) noexcept nogil:
    """Returns the connection of a token.

    Returns 0 if the token is unknown, over, or was presented by another client or in a later attempt.
    """
    cdef uint32_t connection = load_be32(token)
    cdef uint64_t secret = token_secret(token)
    cdef const Stay* stay
    if secret == 0 or not 0 < connection <= stays.permits.connections.pool.fresh:
        return 0
    stay = stays.stays + connection
    if stay.secret == 0 or secret != stay.secret and (
        secret != stay.former or not attempt_follows(attempt, stay.attempt)
    ):
        return 0
    return connection


cdef inline void token_write(const Stays* stays, uint32_t connection, uint8_t* target) noexcept nogil:
    store_be32(target, connection)
    store_be64(target + 4, stays.stays[connection].secret)


# ---- the grace time ------------------------------------------------------------------------------------------------

cdef inline void stay_forget(Stays* stays, uint32_t connection) noexcept nogil:
    """Forgets the token and the name of a connection that is not kept. Writes nothing if the connection has neither."""
    cdef Stay* stay = stays.stays + connection
    debug_check(not stay.is_kept)
    if stay.secret or stay.title_size:
        memset(stay, 0, sizeof(Stay))


cdef inline bint stay_keep(Stays* stays, uint32_t connection, int64_t now_ns) noexcept nogil:
    """Keeps what an ended connection holds. Returns False if the connection has no token, or if too much is kept
    already, in all or of its peer.

    At most half of all connection numbers and of all holdings are kept, so that the rest is free for open connections.
    """
    cdef StaysState* state = stays.state
    cdef Stay* stay = stays.stays + connection
    cdef uint32_t holdings = stays.permits.holders[connection].holdings
    if stay.secret == 0 or state.max_ms == 0 or state.kept >= stays.peers.most[<int>STAYS]:
        return False
    if holdings > stays.peers.most[STAYS + 1] - state.kept_holdings:
        return False
    if not peer_take(stays.peers, connection, STAYS, holdings):
        return False
    stay.is_kept = True
    state.kept += 1
    state.kept_holdings += holdings
    timers_arm(&stays.timers, connection, now_ns + min(stay.grace_ms, state.max_ms) * <int64_t>1000000)
    return True


cdef inline void stay_end(Stays* stays, uint32_t connection) noexcept nogil:
    """Ends the grace time of a connection, because another connection has resumed it or its holdings will be given
    back."""
    cdef Stay* stay = stays.stays + connection
    cdef uint32_t holdings = stays.permits.holders[connection].holdings
    debug_check(stay.is_kept)
    timers_disarm(&stays.timers, connection)
    stay.is_kept = False
    stays.state.kept -= 1
    stays.state.kept_holdings -= holdings
    peer_give_back(stays.peers, connection, STAYS, holdings)


# ---- what people are shown -----------------------------------------------------------------------------------------

cdef inline void title_copy(Stay* target, const Stay* source) noexcept nogil:
    target.title_size = source.title_size
    memcpy(target.title, source.title, TITLE_MAX)


cdef inline tuple stay_about(const Stays* stays, uint32_t connection):
    """Returns the name that a connection has stated, or "", and the end of its grace time in 1/10 s, or None."""
    cdef const Stay* stay = stays.stays + connection
    ends = stay.timer.due_ns // 100000000 if stay.is_kept else None
    return (<const char*>stay.title)[:stay.title_size].decode("utf-8"), ends
