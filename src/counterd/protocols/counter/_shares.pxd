# Shared counters: their limit holds for several daemons together. Each daemon has rights, a part of the maximum.
#
# Floor 2, header only. The policy in counterd.cluster decides who gets how many rights. Here requests are granted from
# rights, which are valid until the lease of their partition ends, and for requests whose maximum is at least that for
# which the rights were given. If rights are missing, the authority is asked; meanwhile the request waits in its queue,
# or blocks its connection.
#
# A rate can be shared too. Then each daemon has units, which the authority has taken from the rate for it. A request is
# granted if the daemon has enough units, and if the rate would allow it without the other daemons.
#
# Invariants (audit_shares checks each):
# - a share that is in a list, or asked for, or for which a connection is blocked, belongs to a record with FLAG_KEPT;
#   a counter with rights or use is in the background list, unless it is asked for;
# - each blocked connection is in the list of its share, and `blocked` is the sum of the permits for which they ask.

from libc.stdint cimport UINT32_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memset

from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.debug cimport debug_check
from counterd.engine.list cimport Ends, Links, List, ends_append, ends_remove
from counterd.engine.region cimport Region, region_reserve
from counterd.protocols.counter._rates cimport FLAG_RATE

cdef enum:
    PARTITIONS = 16         # as in cluster/lease_protocol.py
    PREFIX_MAX = 255        # bytes
    FLAG_SHARED = 16        # in Record.flags: the counter or rate is shared
    FLAG_KEPT = 32          # its share is in use, so the record is not freed
    KINDS = 2               # of shares: counters, and rates

cdef extern from *:
    """
    #define COUNTERD_FNV_BASIS 2166136261u
    #define COUNTERD_FNV_PRIME 16777619u
    """
    const uint32_t FNV_BASIS "COUNTERD_FNV_BASIS"
    const uint32_t FNV_PRIME "COUNTERD_FNV_PRIME"

cdef enum Unreachable:      # what is granted without rights while the authority cannot be reached
    CLOSED = 0              # nothing
    SHARE = 1               # the maximum divided by the number of daemons
    OPEN = 2                # the maximum


cdef struct Share:          # 64 bytes, of each record, in an array of its own
    uint64_t blocked        # permits or units for which connections are blocked
    int64_t units           # of a rate: those that may be taken; negative: more was used than was taken
    int64_t due_ns          # of a rate: before this, so many units cannot be had as were last refused
    uint32_t epoch          # of its partition, when the rights were given
    uint32_t rights         # permits that may be in use here
    uint32_t maximum        # of all daemons' rights, when these were given; of a rate: the units that were last refused
    uint32_t peak           # most use since the last call; of a rate: the units taken since then
    uint32_t reported       # use, in the last call
    uint32_t others         # use of the other daemons, as of the last answer
    Ends line               # blocked connections, in the order in which they were blocked
    uint16_t calls          # so far; wraps
    uint8_t partition
    uint8_t is_asked        # a call is under way
    uint8_t yields          # others wait: what becomes free here is theirs
    uint8_t is_refused      # by the last answer
    uint8_t is_uncertain    # a call had no answer: the authority may have given rights


cdef struct Link:           # 12 bytes, of each record in each list
    Links links
    uint32_t is_listed


cdef struct Blocked:        # 40 bytes, of each connection: the request that blocks it until the authority answers
    uint64_t period_us      # 0: it asks for permits
    uint32_t record         # 0: the connection is not blocked
    uint32_t amount
    uint32_t most           # the maximum, or the limit
    uint32_t burst
    Links links             # in the line of its share
    uint16_t calls          # of the share, when it was blocked


cdef struct Partition:      # of lists, one is for counters and one for rates
    int64_t until_ns        # end of the lease; 0: there is none
    Ends[KINDS] blocking    # shares for which requests wait, or with idle rights for which others wait
    Ends[KINDS] background  # shares with rights, units or use; some may have none any more
    uint32_t[KINDS] cursor  # next blocking share to be woken, as the authority cannot be reached any more
    uint32_t report_last    # of the counters in the background, the last one that a full report has yet to tell; or 0
    uint32_t epoch          # leases that have ended
    uint32_t ended_tenths   # when the last one did; of the caller's monotonic clock
    uint8_t is_urgent       # a blocking share is not only one whose request was refused before
    uint8_t is_away         # the authority cannot be reached


cdef struct SharesState:    # in the region
    Partition[PARTITIONS] partitions
    uint32_t daemons        # that share; UINT32_MAX: nobody knows, so a share of these is nothing
    uint32_t to_drop        # holdings up to this number are still to be looked at, as they may be others' now
    uint32_t dropping       # the partitions whose holdings these are, as bits
    uint64_t dropped        # such connections, in total
    uint8_t unreachable     # Unreachable
    uint8_t drops           # whether connections are dropped


cdef struct Shares:         # this process's view
    SharesState* state
    Share* records          # by record
    Link* blocking          # likewise
    Link* background        # likewise
    Blocked* blocked        # by connection
    const int64_t* now_ns   # of the current call
    uint32_t missing        # the record to which the current request has too few rights, or 0
    bint has_work           # a call should be made soon, since the end of the last call of the store
    bint is_on
    uint32_t prefix_size
    uint8_t[PREFIX_MAX] prefix


# ---- region --------------------------------------------------------------------------------------------------------

cdef inline int shares_reserve(Shares* shares, Region* region, uint32_t buckets) except -1:
    region_reserve(region, b"shares", sizeof(SharesState), <void**>&shares.state)
    region_reserve(region, b"shares", (<size_t>buckets + 1) * sizeof(Share), <void**>&shares.records)
    region_reserve(region, b"shares", (<size_t>buckets + 1) * sizeof(Link), <void**>&shares.blocking)
    region_reserve(region, b"shares", (<size_t>buckets + 1) * sizeof(Link), <void**>&shares.background)
    region_reserve(region, b"blocked", (CONNECTIONS_MAX + 1) * sizeof(Blocked), <void**>&shares.blocked)
    return 0


cdef inline uint8_t share_begin(Shares* shares, uint32_t number, const uint8_t* name, uint32_t size) noexcept nogil:
    """Called for a new record. Returns FLAG_SHARED if its name is shared, or else 0."""
    cdef uint32_t hashed = FNV_BASIS, i
    if not shares.is_on or size < shares.prefix_size or memcmp(name, shares.prefix, shares.prefix_size) != 0:
        return 0
    for i in range(size):
        hashed = (hashed ^ name[i]) * FNV_PRIME
    memset(shares.records + number, 0, sizeof(Share))
    shares.records[number].partition = <uint8_t>(hashed % PARTITIONS)
    return FLAG_SHARED


# ---- lists ---------------------------------------------------------------------------------------------------------

cdef inline List links_listed(Link* links) noexcept nogil:
    """links: `blocking` or `background` of Shares."""
    return List(links, sizeof(Link), &links.links)


cdef inline void link_push(Link* links, Ends* ends, uint32_t number) noexcept nogil:
    """Puts a record at the end of a list, unless the list already has it."""
    if not links[number].is_listed:
        links[number].is_listed = True
        ends_append(links_listed(links), ends, number)


cdef inline void link_remove(Link* links, Ends* ends, uint32_t number) noexcept nogil:
    """Removes a record from a list, if the list has it."""
    if links[number].is_listed:
        links[number].is_listed = False
        ends_remove(links_listed(links), ends, number)


cdef inline Partition* share_partition(const Shares* shares, const Share* share) noexcept nogil:
    return shares.state.partitions + share.partition


cdef inline int share_kind(uint8_t flags) noexcept nogil:
    return flags & FLAG_RATE != 0


cdef inline void share_call_soon(Shares* shares, uint32_t number, uint8_t* flags, bint is_urgent) noexcept nogil:
    """Lets the next call be about this share too, and be made soon if is_urgent."""
    cdef Partition* partition = share_partition(shares, shares.records + number)
    partition.is_urgent |= is_urgent
    shares.has_work |= is_urgent
    flags[0] |= FLAG_KEPT
    link_push(shares.blocking, &partition.blocking[share_kind(flags[0])], number)


cdef inline void share_call_later(Shares* shares, uint32_t number, uint8_t* flags) noexcept nogil:
    """Lets one of the next calls be about this share too."""
    flags[0] |= FLAG_KEPT
    link_push(
        shares.background, &share_partition(shares, shares.records + number).background[share_kind(flags[0])], number
    )


cdef inline void background_remove(Shares* shares, Partition* partition, uint32_t number, int kind) noexcept nogil:
    """Removes a share from the list of the background, if the list has it."""
    if partition.report_last == number:
        partition.report_last = shares.background[number].links.prev
    link_remove(shares.background, &partition.background[kind], number)


cdef inline void share_unlist(Shares* shares, Partition* partition, uint32_t number, int kind) noexcept nogil:
    """Removes a share from the lists that have it."""
    if partition.cursor[kind] == number:
        partition.cursor[kind] = shares.blocking[number].links.next
    link_remove(shares.blocking, &partition.blocking[kind], number)
    background_remove(shares, partition, number, kind)


cdef inline uint32_t share_rights(const Shares* shares, const Share* share) noexcept nogil:
    """Returns how many permits may be in use here, if the lease has not ended meanwhile."""
    return share.rights if share.epoch == share_partition(shares, share).epoch else 0


cdef inline bint share_can_go(const Shares* shares, uint32_t number) noexcept nogil:
    """Returns whether the record of an idle counter, or of a full rate, may be freed as far as its share is concerned.
    """
    cdef const Share* share = shares.records + number
    if share.is_asked or share.line.first or share.units:
        return False
    if share.epoch != share_partition(shares, share).epoch:
        return True
    return share.rights == 0 and share.reported == 0 and not share.is_uncertain


cdef inline void share_end(Shares* shares, uint32_t number, uint8_t* flags) noexcept nogil:
    """Called before a record with FLAG_KEPT is freed, or when nothing has to be said about its share any more."""
    share_unlist(shares, share_partition(shares, shares.records + number), number, share_kind(flags[0]))
    flags[0] &= <uint8_t>~FLAG_KEPT


# ---- deciding ------------------------------------------------------------------------------------------------------

cdef inline bint share_allows(
    Shares* shares, uint32_t number, uint8_t* flags, uint32_t after, uint32_t maximum
) noexcept nogil:
    """Returns whether a request may be granted, after which `after` permits are in use here. `after` is at most
    `maximum`.

    If rights are missing, asks for them.
    """
    cdef Share* share = shares.records + number
    cdef Partition* partition = share_partition(shares, share)
    if (
        after <= share.rights and maximum >= share.maximum and share.epoch == partition.epoch
        and shares.now_ns[0] < partition.until_ns
    ):
        share.peak = max(share.peak, after)
        return True
    if not partition.is_away:
        share_call_soon(shares, number, flags, not share.is_refused)
        shares.missing = number
        return False
    if shares.state.unreachable == CLOSED:
        return False
    if shares.state.unreachable == SHARE and after > maximum // shares.state.daemons:
        return False
    share_call_later(shares, number, flags)
    return True


cdef inline bint share_has_units(
    Shares* shares, uint32_t number, uint8_t* flags, uint32_t units, int64_t* due_ns
) noexcept nogil:
    """Returns whether so many units of a rate may be taken, as far as other daemons are concerned.

    If units are missing, asks for them, unless it is known that they are not there before due_ns.
    """
    cdef Share* share = shares.records + number
    if share.units >= <int64_t>units:
        return True
    if share_partition(shares, share).is_away:
        return shares.state.unreachable != CLOSED
    if units >= share.maximum and shares.now_ns[0] < share.due_ns:
        due_ns[0] = share.due_ns
        return False
    share_call_soon(shares, number, flags, True)
    shares.missing = number
    return False


cdef inline uint32_t share_units(const Shares* shares, uint32_t number, uint32_t units) noexcept nogil:
    """Returns as how many units of a rate a request counts.

    Normally as many as it is for; but while nobody can be asked, this daemon may have only its share of the rate.
    """
    cdef const Share* share = shares.records + number
    if share_partition(shares, share).is_away and shares.state.unreachable == SHARE and share.units < <int64_t>units:
        return <uint32_t>min(<uint64_t>units * shares.state.daemons, <uint64_t>UINT32_MAX)
    return units


cdef inline bint share_take(Shares* shares, uint32_t number, uint8_t* flags, int64_t units, bint is_use) noexcept nogil:
    """Takes units of a rate, or gives units back if there are fewer than 0. Returns whether they were the authority's:
    those beyond these are not, while nobody can be asked. is_use: more will be needed soon."""
    cdef Share* share = shares.records + number
    cdef bint is_given = units <= max(share.units, 0) or not share_partition(shares, share).is_away
    if is_given:
        share.units -= units
    if is_use:
        share.peak = <uint32_t>min(<int64_t>share.peak + units, <int64_t>UINT32_MAX)
    share_call_later(shares, number, flags)
    return is_given


cdef inline void share_restored(Shares* shares, uint32_t number, uint8_t* flags, uint32_t consumption) noexcept nogil:
    """Called when permits were given back. If others wait for them, they are theirs."""
    cdef Share* share = shares.records + number
    if share.yields and share.rights > consumption:
        share.rights = consumption
        share_call_soon(shares, number, flags, True)


# ---- connections that are blocked ----------------------------------------------------------------------------------

cdef inline List blocked_by_share(const Shares* shares) noexcept nogil:
    return List(shares.blocked, sizeof(Blocked), &shares.blocked.links)


cdef inline void blocked_add(Shares* shares, uint32_t connection, uint8_t* flags, const Blocked* asked) noexcept nogil:
    """Blocks a connection until the authority was asked about a share after this moment.

    asked: its record and the request. flags: of the record.
    """
    cdef Share* share = shares.records + asked.record
    cdef Blocked* blocked = shares.blocked + connection
    debug_check(blocked.record == 0)
    blocked[0] = asked[0]
    blocked.calls = share.calls
    ends_append(blocked_by_share(shares), &share.line, connection)
    share.blocked += blocked.amount
    share_call_soon(shares, blocked.record, flags, True)


cdef inline void blocked_remove(Shares* shares, uint32_t connection) noexcept nogil:
    cdef Blocked* blocked = shares.blocked + connection
    cdef Share* share = shares.records + blocked.record
    ends_remove(blocked_by_share(shares), &share.line, connection)
    share.blocked -= blocked.amount
    blocked.record = 0


# ---- leases --------------------------------------------------------------------------------------------------------

cdef inline int64_t shares_due_ns(const Shares* shares) noexcept nogil:
    """Returns when leases_end() has work: at the end of the next lease, or 0 if it has some now, or -1."""
    cdef int64_t due = -1, until
    cdef int i, kind
    if shares.state.to_drop:
        return 0
    for i in range(PARTITIONS):
        for kind in range(KINDS):
            if shares.state.partitions[i].cursor[kind]:
                return 0
        until = shares.state.partitions[i].until_ns
        if until and (due < 0 or until < due):
            due = until
    return due


cdef inline void shares_lose(Shares* shares, int partition, uint32_t now_tenths) noexcept nogil:
    """Ends all rights of a partition. Permits in use stay in use, unless their connections are dropped."""
    cdef Partition* ended = shares.state.partitions + partition
    ended.until_ns = 0
    ended.epoch += 1
    ended.ended_tenths = now_tenths
