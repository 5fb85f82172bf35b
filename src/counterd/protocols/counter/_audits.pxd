# Checks for CounterStore.audit: counters, those that wait, their queues, what may be settled, what stays for a grace
# time, and the places of peers.
#
# Floor 2, header only; see engine/audit.pxd.

from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd.engine.audit cimport audit_heap, audit_index, audit_list, audit_pool, audit_timers
from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.fair cimport Fair, Flow, Queue, Waiter, waiter_goes_before, waiters_by_connection
from counterd.engine.idle_ring cimport FLAG_IN_RING
from counterd.engine.list cimport Ends
from counterd.engine.permits cimport Permit, Permits, permit_at
from counterd.engine.table cimport RECORD_USED
from counterd.engine.wheel cimport timer_at, timer_is_armed
from counterd.protocols.counter._counters cimport Counter, Counters, counter_at, counter_exists
from counterd.protocols.counter._peers cimport GRACES, PLACES, WAITS, Peer, Peers
from counterd.protocols.counter._rates cimport FLAG_AWAITED, FLAG_PINNED, FLAG_RATE
from counterd.protocols.counter._resumptions cimport CONNECTION_NAME_MAX, Resumption, Resumptions
from counterd.protocols.counter._shares cimport (
    FLAG_KEPT, FLAG_SHARED, KINDS, PARTITIONS, Link, Share, Shares, links_listed, blocked_by_share, share_rights,
)
from counterd.protocols.counter._takes cimport Charge, QueuedItem, Taker, Takes, charges_by_connection, charges_by_grant


cdef inline uint32_t audit_flow(const Fair* fair, uint32_t number) except? 0xffffffff:
    """Checks the head of a flow. Returns how many waiters are behind it."""
    cdef const Flow* flow = fair.flows + number
    if (flow.head != 0) != (flow.waiters != 0) or flow.head and fair.waiters[flow.head].flow != number:
        raise AssertionError(f"flow {number}: {flow.waiters} waiters, the head is {flow.head}")
    if flow.first and not waiter_goes_before(fair.waiters + flow.head, fair.waiters + flow.first):
        raise AssertionError(f"flow {number}: {flow.first} goes before its head {flow.head}")
    return audit_heap(&fair.heap, flow.first, fair.state.waiters.fresh)


cdef inline int audit_queue(const Fair* fair, uint32_t number) except -1:
    """Checks a queue: its heaps, and that its flows without waiters are in its idle list."""
    cdef const Queue* queue = fair.queues + number
    cdef uint32_t idle = queue.idle_first, listed = 0, flow, flows = 0, unused = 0
    cdef uint32_t waiters = audit_heap(&fair.heap, queue.first, fair.state.waiters.fresh)
    while idle:
        if fair.flows[idle].queue != number or not fair.flows[idle].is_listed:
            raise AssertionError(f"queue {number}: flow {idle} is in its idle list")
        listed += 1
        idle = fair.flows[idle].next_idle
    for flow in range(1, fair.state.flows.fresh + 1):
        if fair.flows[flow].queue == number:
            flows += 1
            unused += fair.flows[flow].is_listed
            if fair.flows[flow].waiters == 0 and not fair.flows[flow].is_listed:
                raise AssertionError(f"queue {number}: flow {flow} has no waiters, but is not in the idle list")
            if fair.flows[flow].start > queue.ends:
                raise AssertionError(f"queue {number}: flow {flow} starts after the last end")
            waiters += audit_flow(fair, flow)
    if waiters != queue.waiters:
        raise AssertionError(f"queue {number}: {waiters} in its heaps, {queue.waiters} waiters counted")
    if flows != queue.flows or listed != unused:
        raise AssertionError(f"queue {number}: {flows} flows, {unused} of them listed; {queue.flows}, {listed} counted")
    return 0


cdef inline int audit_fair(const Fair* fair) except -1:
    """Checks the waiters, the queues and the flows."""
    cdef uint32_t number, waiting = 0, used = 0, ready = fair.state.ready_first
    cdef const Waiter* waiter
    cdef dict by_queue = {}, by_flow = {}, by_connection = {}
    for number in range(1, fair.state.waiters.fresh + 1):
        waiter = fair.waiters + number
        if waiter.connection:
            waiting += 1
            by_queue[waiter.queue] = by_queue.get(waiter.queue, 0) + 1
            by_flow[waiter.flow] = by_flow.get(waiter.flow, 0) + 1
            by_connection[waiter.connection] = by_connection.get(waiter.connection, 0) + 1
    if waiting != fair.state.waiters.used:
        raise AssertionError(f"{waiting} wait, {fair.state.waiters.used} counted")
    for number in range(1, fair.state.queues.fresh + 1):
        if fair.queues[number].record:
            used += 1
            audit_queue(fair, number)
            if fair.queues[number].waiters != by_queue.get(number, 0):
                raise AssertionError(
                    f"queue {number}: {by_queue.get(number, 0)} wait, {fair.queues[number].waiters} counted"
                )
    for number in range(1, fair.state.flows.fresh + 1):
        if fair.flows[number].queue and fair.flows[number].waiters != by_flow.get(number, 0):
            raise AssertionError(f"flow {number}: {by_flow.get(number, 0)} wait, {fair.flows[number].waiters} counted")
    if used != fair.state.queues.used:
        raise AssertionError(f"{used} queues, {fair.state.queues.used} counted")
    for connection, count in by_connection.items():
        number = fair.askers[<uint32_t>connection].first
        used = audit_list(waiters_by_connection(fair), number, NULL, fair.state.waiters.fresh)
        while number:
            if fair.waiters[number].connection != connection:
                raise AssertionError(f"waiter {number} is listed under connection {connection}")
            number = fair.waiters[number].of_connection.next
        if not (used == count == fair.askers[<uint32_t>connection].waiters):
            raise AssertionError(f"connection {connection}: {count} wait, {used} listed")
    while ready:
        if not fair.queues[ready].is_ready or not fair.queues[ready].record:
            raise AssertionError(f"queue {ready} is in the list of queues to serve, but not marked")
        ready = fair.queues[ready].next_ready
    audit_index(&fair.by_record, &fair.state.queues, "queues")
    audit_index(&fair.by_key, &fair.state.flows, "flows")
    audit_pool(&fair.state.waiters, &fair.waiters.of_connection, sizeof(Waiter), "waiters")
    audit_pool(&fair.state.queues, &fair.queues.idle_first, sizeof(Queue), "queues")
    audit_pool(&fair.state.flows, &fair.flows.next_idle, sizeof(Flow), "flows")
    audit_timers(&fair.timers, fair.state.queues.fresh)
    return 0


cdef inline int audit_pins(const Takes* takes) except -1:
    """Checks the items of waiting Takes, and what the records say about these items."""
    cdef const Fair* fair = &takes.counters.fair
    cdef uint32_t number, items = 0, rates = 0, i
    cdef const QueuedItem* item
    cdef const Permit* permit
    cdef dict pins = {}, pinned = {}, awaited = {}
    cdef bint waits, is_rate, is_armed
    for number in range(1, fair.state.waiters.fresh + 1):
        if fair.waiters[number].connection == 0:
            continue
        item = &takes.waiting[number].first
        waits = False
        for i in range(takes.waiting[number].items):
            pins[item.queue] = pins.get(item.queue, 0) + 1
            waits |= item.queue == fair.waiters[number].queue
            items += i != 0
            item = takes.items + item.next
        if not waits:
            raise AssertionError(f"Take {number} waits for something that is not one of its items")
    for number in range(1, fair.state.queues.fresh + 1):
        if fair.queues[number].record:
            if fair.queues[number].pins != pins.get(number, 0):
                raise AssertionError(f"queue {number}: {pins.get(number, 0)} pins, {fair.queues[number].pins} counted")
            if fair.queues[number].pins:
                pinned[fair.queues[number].record] = fair.queues[number].tag
            if fair.queues[number].waiters:
                awaited[fair.queues[number].record] = True
    for number in range(1, takes.counters.permits.table.pool.fresh + 1):
        permit = permit_at(&takes.counters.permits, number)
        if not permit.record.flags & RECORD_USED:
            continue
        rates += permit.record.flags & FLAG_RATE != 0
        if bool(permit.record.flags & FLAG_PINNED) != (pinned.pop(number, None) == permit.record.tag):
            raise AssertionError(f"record {number}: its pin is wrong")
        if bool(permit.record.flags & FLAG_AWAITED) != awaited.get(number, False):
            raise AssertionError(f"record {number}: the mark that somebody waits for it is wrong")
        is_rate = permit.record.flags & FLAG_RATE != 0
        is_armed = timer_is_armed(timer_at(&takes.counters.fulls, number))
        if is_armed > is_rate or is_rate > is_armed and not permit.record.flags & FLAG_PINNED:
            raise AssertionError(f"record {number}: its timer is wrong for a rate, or for a counter")
    if pinned:
        raise AssertionError(f"records {list(pinned)} are free, but somebody waits for them")
    if items != takes.state.items.used or rates != takes.state.rates:
        raise AssertionError(
            f"{items} items and {rates} rates, {takes.state.items.used} and {takes.state.rates} counted"
        )
    audit_pool(&takes.state.items, &takes.items.next, sizeof(QueuedItem), "items")
    audit_timers(&takes.deadlines, fair.state.waiters.fresh)
    audit_timers(&takes.counters.fulls, takes.counters.permits.table.pool.fresh)
    return 0


cdef inline int audit_charges(const Takes* takes) except -1:
    """Checks that each charge is in the list of its connection and in the list of all charges."""
    cdef uint32_t number = takes.state.charged.first, highest = takes.state.charges.fresh
    cdef uint32_t count = audit_list(charges_by_grant(takes), number, &takes.state.charged.last, highest)
    cdef const Taker* taker
    cdef dict by_connection = {}
    if count != takes.state.charges.used:
        raise AssertionError(f"{count} charges, {takes.state.charges.used} counted")
    while number:
        by_connection[takes.charges[number].connection] = by_connection.get(takes.charges[number].connection, 0) + 1
        number = takes.charges[number].of_all.next
    for connection, expected in by_connection.items():
        taker = takes.takers + <uint32_t>connection
        number = taker.charged.first
        count = audit_list(charges_by_connection(takes), number, &taker.charged.last, highest)
        while number:
            if takes.charges[number].connection != connection:
                raise AssertionError(f"charge {number} is listed under connection {connection}")
            number = takes.charges[number].of_connection.next
        if not (count == expected == taker.charges):
            raise AssertionError(f"connection {connection}: {expected} charges, {count} listed")
    audit_pool(&takes.state.charges, &takes.charges.of_all, sizeof(Charge), "charges")
    return 0


cdef inline int audit_takes(const Takes* takes) except -1:
    audit_fair(&takes.counters.fair)
    audit_pins(takes)
    return audit_charges(takes)


cdef inline int audit_resumed(const Resumptions* resumptions, void** sessions) except -1:
    """Checks which connections are in their grace time. sessions: the sessions of the open connections."""
    cdef uint32_t number, kept = 0, holdings = 0, last = resumptions.permits.connections.pool.fresh
    cdef const Resumption* resumption
    for number in range(1, last + 1):
        resumption = resumptions.records + number
        if bool(resumption.is_in_grace) != timer_is_armed(timer_at(&resumptions.timers, number)):
            raise AssertionError(f"connection {number}: its timer is wrong")
        if resumption.is_in_grace and (resumption.secret == 0 or sessions[number] != NULL):
            raise AssertionError(f"connection {number} is kept, but open or without a token")
        if resumption.is_leaving and not resumption.is_in_grace or resumption.name_size > CONNECTION_NAME_MAX:
            raise AssertionError(f"connection {number}: the data about its grace time is wrong")
        kept += resumption.is_in_grace
        holdings += resumptions.permits.holders[number].holdings if resumption.is_in_grace else 0
    if kept != resumptions.state.graces or holdings != resumptions.state.grace_holdings:
        raise AssertionError(
            f"{kept} kept with {holdings}; {resumptions.state.graces} and {resumptions.state.grace_holdings} counted"
        )
    number = resumptions.permits.connections.pool.free
    while number:
        if resumptions.records[number].secret or resumptions.records[number].name_size:
            raise AssertionError(f"connection {number} is free, but has data about a grace time")
        number = resumptions.permits.connections.links[number]
    audit_timers(&resumptions.timers, last)
    return 0


cdef inline int audit_counters(const Counters* counters) except -1:
    """Checks how many counters are busy and idle, and that all idle ones are in the ring."""
    cdef uint32_t number, busy = 0, idle = 0
    cdef Counter* counter
    for number in range(1, counters.permits.table.pool.fresh + 1):
        counter = counter_at(counters, number)
        if counter.permit.record.flags & (RECORD_USED | FLAG_RATE) != RECORD_USED:
            continue
        busy += counter.permit.consumption != 0
        idle += counter.permit.consumption == 0 and counter_exists(counters, counter)
        if counter.permit.consumption == 0 and not counter.permit.record.flags & (
            FLAG_IN_RING | FLAG_PINNED | FLAG_KEPT
        ):
            raise AssertionError(f"record {number} is idle, but not in the ring")
    if busy != counters.state.busy or idle != counters.state.idle:
        raise AssertionError(f"{busy} busy and {idle} idle, {counters.state.busy} and {counters.state.idle} counted")
    return 0


cdef inline int audit_peers(const Peers* peers, const Takes* takes, const Resumptions* resumptions) except -1:
    """Checks the places of each peer."""
    cdef const Fair* fair = &takes.counters.fair
    cdef uint32_t number, connection
    cdef int kind
    cdef dict found = {}
    for number in range(1, fair.state.waiters.fresh + 1):
        connection = fair.waiters[number].connection
        if connection and peers.keys[connection]:
            places = found.setdefault(peers.keys[connection], [0] * PLACES)
            places[<int>WAITS] += 1
            places[WAITS + 1] += takes.waiting[number].items - 1
    for connection in range(1, resumptions.permits.connections.pool.fresh + 1):
        if resumptions.records[connection].is_in_grace and peers.keys[connection]:
            places = found.setdefault(peers.keys[connection], [0] * PLACES)
            places[<int>GRACES] += 1
            places[GRACES + 1] += resumptions.permits.holders[connection].holdings
    for number in range(1, peers.state.peers.fresh + 1):
        if peers.peers[number].key:
            places = [peers.peers[number].used[kind] for kind in range(PLACES)]
            if found.pop(peers.peers[number].key, None) != places:
                raise AssertionError(f"peer {number}: {places} places are counted wrongly")
    if found:
        raise AssertionError(f"{len(found)} peers with places have no record")
    audit_index(&peers.index, &peers.state.peers, "peers")
    audit_pool(&peers.state.peers, &peers.peers.next, sizeof(Peer), "peers")
    return 0


cdef inline uint32_t audit_listed(
    const Shares* shares, const Permits* permits, Link* links, const Ends* ends
) except? 0xffffffff:
    """Checks a list of shares of one partition. Returns how many it has."""
    cdef uint32_t number = ends.first
    cdef uint32_t count = audit_list(links_listed(links), number, &ends.last, permits.table.pool.fresh)
    cdef uint8_t flags
    while number:
        flags = permit_at(permits, number).record.flags
        if not links[number].is_listed:
            raise AssertionError(f"share {number} is in a list, but not marked")
        if flags & (RECORD_USED | FLAG_SHARED | FLAG_KEPT) != RECORD_USED | FLAG_SHARED | FLAG_KEPT:
            raise AssertionError(f"share {number} is listed, but its record has flags {flags}")
        if shares.records[number].partition != shares.records[ends.first].partition:
            raise AssertionError(f"share {number} is in the list of another partition")
        number = links[number].links.next
    return count


cdef inline int audit_blocked(const Shares* shares, uint32_t number) except -1:
    """Checks the connections that are blocked for a share."""
    cdef const Ends* line = &shares.records[number].line
    cdef uint32_t connection = line.first
    cdef uint64_t amount = 0
    audit_list(blocked_by_share(shares), connection, &line.last, CONNECTIONS_MAX)
    while connection:
        if shares.blocked[connection].record != number:
            raise AssertionError(f"connection {connection} is in the list of share {number}")
        amount += shares.blocked[connection].amount
        connection = shares.blocked[connection].links.next
    if amount != shares.records[number].blocked:
        raise AssertionError(f"share {number}: {amount} permits asked for, {shares.records[number].blocked} counted")
    return 0


cdef inline int audit_shares(const Shares* shares, const Permits* permits) except -1:
    cdef uint32_t number, listed = 0, found = 0
    cdef const Permit* permit
    cdef const Share* share
    cdef int i, kind
    for i in range(PARTITIONS):
        number = shares.state.partitions[i].report_last
        if number and not shares.background[number].is_listed:
            raise AssertionError(f"share {number} is the last one of a report, and not listed")
        for kind in range(KINDS):
            listed += audit_listed(shares, permits, shares.blocking, &shares.state.partitions[i].blocking[kind])
            listed += audit_listed(shares, permits, shares.background, &shares.state.partitions[i].background[kind])
    for number in range(1, permits.table.pool.fresh + 1):
        permit = permit_at(permits, number)
        share = shares.records + number
        found += (shares.blocking[number].is_listed != 0) + (shares.background[number].is_listed != 0)
        if not permit.record.flags & RECORD_USED or not permit.record.flags & FLAG_SHARED:
            continue
        audit_blocked(shares, number)
        if permit.consumption or share_rights(shares, share) or share.units:
            if not shares.background[number].is_listed and not share.is_asked:
                raise AssertionError(f"share {number}: {share.rights} rights, {permit.consumption} in use, no list")
        if (share.line.first or share.is_asked) and not permit.record.flags & FLAG_KEPT:
            raise AssertionError(f"share {number} is needed, but its record is not kept")
    if found != listed:
        raise AssertionError(f"{found} shares are listed, {listed} are in the lists")
    return 0
