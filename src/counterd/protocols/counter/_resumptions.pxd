# Resumptions: what a connection holds after its end, for a grace time, so that another connection can go on with it.
#
# Floor 2, header only; no clock, no source of random numbers. If a connection ends that has a token, its number stays
# taken, and its holdings and charges stay under that number until its timer is due. A connection that presents the
# token gets the number, so nothing of what is held is touched. The other connection, if it is still open, gets the
# number of the one that presented the token, under which nothing is held.
#
# A token is the number and a keyed hash of a counter. A Resume whose reply was lost can be repeated: the token that was
# presented last, `former`, is accepted again with a later number of the attempt: not from a request that was overtaken.
#
# Invariants (audit_resumed checks each):
# - exactly the connections in their grace time have an armed timer; they have a token, and no session;
# - a connection is leaving only while it is in its grace time and in the queue of takes_leave();
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
from counterd.protocols.counter._peers cimport GRACES, Peers, peer_give_back, peer_take

cdef enum:
    TOKEN_SIZE = 12         # bytes: the number, 4, and the secret, 8
    ATTEMPTS = 65536        # numbers of one client's attempts: they differ in their low 16 bits only
    CONNECTION_NAME_MAX = 64    # bytes of the name that a connection states
    GRACES_MAX = 524288     # connections, half of CONNECTIONS_MAX: the other numbers are for those that are open


cdef struct Resumption:     # 112 bytes, of each connection
    Timer timer             # armed while it is in its grace time
    uint64_t secret         # of its token; 0: it has none
    uint64_t former         # of the token that was presented for it last; 0: none
    uint32_t attempt        # the number that was presented with it
    uint32_t grace_ms
    uint8_t is_in_grace     # it has ended, and what it holds stays
    uint8_t is_leaving      # likewise, and its waiting Takes are yet to be removed
    uint8_t name_size
    uint8_t name[CONNECTION_NAME_MAX]
    uint8_t spare[5]


cdef struct ResumptionsState:   # in the region
    uint64_t tokens         # made so far
    uint32_t max_ms         # the longest grace time; 0: no tokens are given
    uint32_t graces         # connections in their grace time
    uint32_t grace_holdings     # their holdings
    uint64_t resumed        # connections that were taken over, in total
    uint64_t expired        # grace times that were over, in total


cdef struct Resumptions:    # this process's view
    ResumptionsState* state
    Resumption* records     # by connection
    Timers timers
    Permits* permits
    Peers* peers
    const uint64_t* key


cdef inline uint32_t graces_holdings(uint32_t holdings) noexcept nogil:
    """Returns how many holdings, of this many in all, can be in their grace time."""
    return (holdings + 1) // 2


cdef inline uint32_t graces_max(uint32_t holdings) noexcept nogil:
    """Returns how many connections can be in their grace time. Each has had a holding or a charge."""
    return min(<uint32_t>GRACES_MAX, 2 * holdings)


cdef inline int resumptions_reserve(Resumptions* resumptions, Region* region, Permits* permits, Peers* peers) except -1:
    resumptions.permits = permits
    resumptions.peers = peers
    region_reserve(region, b"resumptions", sizeof(ResumptionsState), <void**>&resumptions.state)
    region_reserve(region, b"resumptions", (CONNECTIONS_MAX + 1) * sizeof(Resumption), <void**>&resumptions.records)
    timers_reserve(&resumptions.timers, region, b"resumptions")
    return 0


cdef inline void resumptions_begin(Resumptions* resumptions, const uint64_t* key, int64_t now_ns) noexcept nogil:
    """Call this once, after the region was mapped. key: the SipHash key."""
    debug_check(sizeof(Resumption) == 112)
    resumptions.key = key
    timers_begin(&resumptions.timers, &resumptions.records.timer, sizeof(Resumption), now_ns)


# ---- tokens --------------------------------------------------------------------------------------------------------

cdef inline uint64_t secret_make(Resumptions* resumptions, uint32_t connection) noexcept nogil:
    """Returns a secret that nobody can guess without the key. No reply shows the hash of anything else."""
    cdef uint8_t[12] data
    resumptions.state.tokens += 1
    store_le64(data, resumptions.state.tokens)
    store_be32(data + 8, connection)
    return siphash13(resumptions.key, data, sizeof(data)) or 1


cdef inline void token_issue(
    Resumptions* resumptions, uint32_t connection, uint32_t grace_ms, uint64_t former, uint32_t attempt
) noexcept nogil:
    """Gives a connection a new token, and a grace time that is at most the allowed one.

    former, attempt: the secret that was presented, and the number of the attempt; both are 0 if none was presented.
    """
    cdef Resumption* resumption = resumptions.records + connection
    resumption.secret = secret_make(resumptions, connection)
    resumption.former = former
    resumption.attempt = attempt
    resumption.grace_ms = min(grace_ms, resumptions.state.max_ms)


cdef inline void token_revoke(Resumptions* resumptions, uint32_t connection) noexcept nogil:
    """Makes the token of a connection invalid."""
    resumptions.records[connection].secret = resumptions.records[connection].former = 0


cdef inline uint64_t token_secret(const uint8_t* token) noexcept nogil:
    return load_be64(token + 4)


cdef inline bint attempt_follows(uint32_t attempt, uint32_t last) noexcept nogil:
    """Returns True if the same client made the attempt after the last one."""
    return attempt > last and attempt // ATTEMPTS == last // ATTEMPTS


cdef inline uint32_t token_find(const Resumptions* resumptions, const uint8_t* token, uint32_t attempt) noexcept nogil:
    """Returns the connection of a token.

    Returns 0 if the token is unknown, over, or was presented by another client or in a later attempt.
    """
    cdef uint32_t connection = load_be32(token)
    cdef uint64_t secret = token_secret(token)
    cdef const Resumption* resumption
    if secret == 0 or not 0 < connection <= resumptions.permits.connections.pool.fresh:
        return 0
    resumption = resumptions.records + connection
    if resumption.secret == 0 or secret != resumption.secret and (
        secret != resumption.former or not attempt_follows(attempt, resumption.attempt)
    ):
        return 0
    return connection


cdef inline void token_write(const Resumptions* resumptions, uint32_t connection, uint8_t* target) noexcept nogil:
    store_be32(target, connection)
    store_be64(target + 4, resumptions.records[connection].secret)


# ---- the grace time ------------------------------------------------------------------------------------------------

cdef inline void resumption_forget(Resumptions* resumptions, uint32_t connection) noexcept nogil:
    """Forgets the token and the name of a connection that is not in its grace time. Writes nothing if the connection
    has neither."""
    cdef Resumption* resumption = resumptions.records + connection
    debug_check(not resumption.is_in_grace)
    if resumption.secret or resumption.name_size:
        memset(resumption, 0, sizeof(Resumption))


cdef inline bint grace_begin(Resumptions* resumptions, uint32_t connection, int64_t now_ns) noexcept nogil:
    """Keeps what an ended connection holds. Returns False if the connection has no token, or if too much is kept
    already, in all or of its peer.

    At most half of all connection numbers and of all holdings are kept, so that the rest is free for open connections.
    """
    cdef ResumptionsState* state = resumptions.state
    cdef Resumption* resumption = resumptions.records + connection
    cdef uint32_t holdings = resumptions.permits.holders[connection].holdings
    if resumption.secret == 0 or state.max_ms == 0 or state.graces >= resumptions.peers.most[<int>GRACES]:
        return False
    if holdings > resumptions.peers.most[GRACES + 1] - state.grace_holdings:
        return False
    if not peer_take(resumptions.peers, connection, GRACES, holdings):
        return False
    resumption.is_in_grace = True
    state.graces += 1
    state.grace_holdings += holdings
    timers_arm(&resumptions.timers, connection, now_ns + min(resumption.grace_ms, state.max_ms) * <int64_t>1000000)
    return True


cdef inline void grace_end(Resumptions* resumptions, uint32_t connection) noexcept nogil:
    """Ends the grace time of a connection, because another connection has resumed it or its holdings will be given
    back."""
    cdef Resumption* resumption = resumptions.records + connection
    cdef uint32_t holdings = resumptions.permits.holders[connection].holdings
    debug_check(resumption.is_in_grace)
    timers_disarm(&resumptions.timers, connection)
    resumption.is_in_grace = False
    resumptions.state.graces -= 1
    resumptions.state.grace_holdings -= holdings
    peer_give_back(resumptions.peers, connection, GRACES, holdings)


# ---- what people are shown -----------------------------------------------------------------------------------------

cdef inline void name_copy(Resumption* target, const Resumption* source) noexcept nogil:
    target.name_size = source.name_size
    memcpy(target.name, source.name, CONNECTION_NAME_MAX)


cdef inline tuple connection_about(const Resumptions* resumptions, uint32_t connection):
    """Returns the name that a connection has stated, or "", and the end of its grace time in 1/10 s, or None."""
    cdef const Resumption* resumption = resumptions.records + connection
    ends = resumption.timer.due_ns // 100000000 if resumption.is_in_grace else None
    return (<const char*>resumption.name)[:resumption.name_size].decode("utf-8"), ends
