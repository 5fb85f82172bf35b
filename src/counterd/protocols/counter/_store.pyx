"""The counter protocol's store: the counters, and statistics of requests.

Floor 2 (ARCHITECTURE.md). The counters are in the region (_counters.pxd). The statistics of requests belong to this
process.
"""

from collections import Counter as Tally

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._core cimport OUTPUT_MAX, SLICE_STEPS, Frame, Session, Store
from counterd.engine.audit cimport audit_chains, audit_permits, audit_ring
from counterd.engine.byteorder cimport store_be32
from counterd.engine.chains cimport BLOCK_SIZE
from counterd.engine.connections cimport CONNECTIONS_MAX, connections_put
from counterd.engine.fair cimport (
    Fair, FairState, Queue, fair_serve, flows_tidy, queue_next_ready, queue_settle, queue_wake, waiter_label,
)
from counterd.engine.permits cimport (
    ABSENT, FULL, GRANTED, PERMIT_CELL, REFUSED, Holding, Permits, permit_at, permits_leave,
)
from counterd.engine.pool cimport Pool
from counterd.engine.siphash cimport siphash13
from counterd.engine.table cimport name_bytes
from counterd.engine.wheel cimport timers_arm, timers_next_ns, timers_take
from counterd.protocols.counter._audits cimport audit_counters, audit_peers, audit_resumed, audit_shares, audit_takes
from counterd.protocols.counter._charges cimport charge_leave, charges_expire, takes_leave, takes_left
from counterd.protocols.counter._counters cimport (
    NS_PER_TENTH, Counter, Counters, CountersState, counters_begin, counters_give_back, counters_reserve,
    holding_give_back, sweep, sweep_begin,
)
from counterd.protocols.counter._items cimport ITEMS_MAX, Decision, Item, items_limit
from counterd.protocols.counter._leases cimport leases_end, session_unblock
from counterd.protocols.counter._limits cimport Limits, limits_free, limits_make
from counterd.protocols.counter._messages cimport (
    ACQUIRE, CANCEL, CANCELLED, DUMP, GET, GOODBYE, HEADER_SIZE, HELD, INVALID_ARGUMENTS, NO_TIME, NOOP, NOT_ACQUIRED,
    NOT_FOUND, OPCODES, OUT_OF_MEMORY, RELEASE, RESOURCE_NOT_AVAILABLE, RESUME, SETTLE, STATS, TAKE, TAKE_REPLY_MAX,
    UNKNOWN_COMMAND, WHO, TakeHead, absence_encode, error_text, frame_opaque, grant_encode, head_decode, item_decode,
    refusal_encode, retry_ms, shortage_encode,
)
from counterd.protocols.counter._peers cimport GRACES, WAITS, peer_is_known, peer_meet, peers_begin, peers_reserve
from counterd.protocols.counter._resumptions cimport (
    Resumption, connection_about, grace_begin, grace_end, graces_holdings, graces_max, name_copy, resumption_forget,
    resumptions_begin, resumptions_reserve, token_revoke,
)
from counterd.protocols.counter._shares cimport shares_due_ns
from counterd.protocols.counter._takes cimport (
    TakesState, item_left, rate_end, rates_max, take_end, take_find, take_items, take_look, take_move, take_try,
    take_wait, takes_begin, takes_epoch, takes_reserve,
)
from counterd.protocols.counter.wire import is_legible

# Those of the reference implementation, in the order in which its Stats has them.
REFERENCE_COMMANDS = {
    NOOP: "noop", GET: "get", ACQUIRE: "acquire", RELEASE: "release", STATS: "stats", DUMP: "dump",
}
COMMAND_NAMES = {
    **REFERENCE_COMMANDS, TAKE: "take", CANCEL: "cancel", SETTLE: "settle", RESUME: "resume", GOODBYE: "goodbye",
    WHO: "who", HELD: "held",
}
REFUSAL_NAMES = {
    NOT_FOUND: "not_found", INVALID_ARGUMENTS: "invalid_arguments", RESOURCE_NOT_AVAILABLE: "not_available",
    NOT_ACQUIRED: "not_acquired", CANCELLED: "cancelled", UNKNOWN_COMMAND: "unknown_command",
    OUT_OF_MEMORY: "out_of_memory",
}
PARSED_REFUSALS = (NOT_FOUND, RESOURCE_NOT_AVAILABLE, NOT_ACQUIRED, CANCELLED, OUT_OF_MEMORY)
# The names of the reference implementation, in its order. counterd's own names follow these.
REFERENCE_FIGURES = (
    "objects", "total_objects", "used_memory", "conflicts", "gc_count", "last_gc_elapsed", "total_gc_elapsed",
    "curr_connections", "total_connections",
)

assert sizeof(Counter) == PERMIT_CELL

cdef enum:
    WAIT_STEPS = 4          # of an item of a Take that begins to wait: its place in a queue
    REPLY_STEPS = 8         # steps of granting or refusing a Take that waits
    NS_PER_MS = 1000000
    NS_PER_S = 1000000000
    MS_PER_S = 1000


cdef inline int64_t earlier(int64_t one, int64_t other) noexcept:
    """Returns the earlier of two times, where -1 means never."""
    if one < 0 or other < 0:
        return max(one, other)
    return min(one, other)


cdef class CounterStore(Store):
    """The store of the protocol. open_store() in _session.pyx makes it.

    buckets: the most counters. holdings: the most holdings, in all. holdings_per_connection: the most holdings of one
    connection; 0 means no limit. name_memory: bytes for names that do not fit into their record. figures: called for
    each Stats; returns figures of the daemon by name.

    Raises ValueError or OverflowError for impossible sizes, and MemoryError if the memory cannot be mapped.
    """

    def __cinit__(self, *, uint32_t buckets, uint32_t holdings, uint32_t holdings_per_connection=0,
                  uint32_t waiters=0, uint64_t name_memory, figures, bytes hash_key, int64_t now_ns=0, **_):
        if buckets == 0:
            raise ValueError("buckets must be at least 1")
        self.sessions = <void**>PyMem_RawCalloc(CONNECTIONS_MAX + 1, sizeof(void*))
        if self.sessions == NULL:
            raise MemoryError(f"no room for {CONNECTIONS_MAX} sessions")
        counters_reserve(
            &self.counters, &self.region, &self.connections, buckets, holdings, name_memory // BLOCK_SIZE, waiters
        )
        peers_reserve(&self.peers, &self.region, waiters, graces_max(holdings), graces_holdings(holdings))
        takes_reserve(&self.takes, &self.region, &self.counters, &self.peers, holdings)
        resumptions_reserve(&self.resumptions, &self.region, &self.counters.permits, &self.peers)
        self.map_region(hash_key)
        counters_begin(&self.counters, self.header.key, now_ns)
        peers_begin(&self.peers, self.header.key)
        takes_begin(&self.takes, now_ns)
        resumptions_begin(&self.resumptions, self.header.key, now_ns)
        self.counters.shares.now_ns = &self.now_ns
        self.takes.state.waiters_per_connection = waiters
        self.takes.state.settle_ns = <int64_t>3600 * NS_PER_S
        self.others = figures
        self.lendings = []
        self.counters.permits.state.holdings_per_connection = holdings_per_connection or holdings

    def __dealloc__(self):
        PyMem_RawFree(self.sessions)
        limits_free(&self.counters.limits)

    def limit_takes(self, uint32_t waiters_per_connection, uint32_t settle_time):
        """Sets how many Takes of one connection may wait (0: no limit), and for how many seconds Takes can be
        settled."""
        with self:
            self.takes.state.waiters_per_connection = waiters_per_connection or self.counters.fair.capacity
            self.takes.state.settle_ns = <int64_t>settle_time * NS_PER_S

    def limit_resumptions(self, uint32_t resume_max):
        """Sets the longest grace time in seconds. 0 means that connections get no tokens any more."""
        with self:
            self.resumptions.state.max_ms = resume_max * MS_PER_S

    def limit_shares(self, uint32_t remote, uint32_t local):
        """Sets how much of the places for waiting Takes and for grace times one peer can have, in percent."""
        with self:
            self.peers.state.shares = [remote, local]

    def load_limits(self, limits not None):
        """Replaces the limits of the server.

        limits: limits.Limits. Waiting Takes are soon checked against the new limits.
        """
        cdef Limits* here = &self.counters.limits
        cdef Limits made = here[0]
        if here.generation == 0 and not limits.permits and not limits.rates:
            return
        with self:
            limits_make(&made, limits.permits, limits.rates)
            limits_free(here)
            made.generation += 1
            here[0] = made
            self.to_limit = self.counters.fair.state.waiters.fresh
            self.has_work = True

    def limit_holdings(self, uint32_t holdings_per_connection):
        """Sets how many holdings one connection may have from now on. 0 means no limit."""
        cdef Permits* permits = &self.counters.permits
        with self:
            permits.state.holdings_per_connection = holdings_per_connection or permits.state.holdings.capacity

    cdef void forget(self, uint32_t connection) noexcept:
        cdef bint holds = self.counters.permits.holders[connection].first != 0
        holds |= self.takes.takers[connection].charged.first != 0
        self.sessions[connection] = NULL
        if holds and not self.draining and grace_begin(&self.resumptions, connection, self.now_ns):
            if self.counters.fair.askers[connection].first:
                self.resumptions.records[connection].is_leaving = True
                takes_leave(&self.takes, connection)
            self.has_work = True
            return
        resumption_forget(&self.resumptions, connection)
        if takes_leave(&self.takes, connection) or permits_leave(&self.counters.permits, connection):
            self.has_work = True

    cpdef set_wall(self, int64_t unix_ns, int64_t now_ns):
        """Implements Store.set_wall: the numbers of grants follow the wall clock, and tables show current times."""
        with self.at(now_ns):
            takes_epoch(&self.takes, unix_ns)

    cdef void end_call(self) noexcept:
        if self.counters.shares.has_work:
            self.counters.shares.has_work = False
            self.has_work = True
        Store.end_call(self)

    # ---- work that is due ----

    cdef int64_t due_ns(self) except? -2:
        cdef Counters* counters = &self.counters
        cdef TakesState* takes = self.takes.state
        cdef uint32_t since
        cdef int64_t due
        if (
            counters.permits.state.leaving_first or counters.ring.state.sweep_left or takes.leaving_first
            or counters.fair.state.ready_first or self.to_drain or self.to_limit
            or self.draining and self.resumptions.state.graces
        ):
            return 0
        due = earlier(timers_next_ns(&self.takes.deadlines), timers_next_ns(&counters.fair.timers))
        due = earlier(due, timers_next_ns(&counters.fulls))
        due = earlier(due, timers_next_ns(&self.resumptions.timers))
        if counters.shares.is_on:
            due = earlier(due, shares_due_ns(&counters.shares))
        if takes.charged.first:
            since = self.takes.charges[takes.charged.first].since_tenths
            due = earlier(due, <int64_t>(since + 1) * NS_PER_TENTH + takes.settle_ns)
        return due

    cdef void look_again(self) noexcept:
        """Called when something may have become due."""
        cdef int64_t due = self.due_ns()
        if due >= 0:
            self.expect(due)

    cdef int run_due(self) except -1:
        """Ends what is over, gives back holdings, serves waiting Takes, and sweeps idle counters."""
        cdef CountersState* state = self.counters.state
        cdef int steps = SLICE_STEPS
        if self.counters.shares.is_on:
            steps = leases_end(&self.counters, &self.resumptions, self.sessions, self.now_ns, steps)
        steps = self.leave(self.end_graces(steps))
        steps = counters_give_back(&self.counters, steps)
        steps = self.expire(steps)
        steps = self.serve(steps)
        self.counters.shares.missing = 0    # what waits in a queue is asked for without it
        if self.counters.ring.state.sweep_left == 0 or steps <= 0:
            return 0
        if state.sweep_started_ns == 0:
            state.sweep_started_ns = self.now_ns
        sweep(&self.counters, steps)
        if self.counters.ring.state.sweep_left == 0:
            state.sweeps += 1
            state.last_sweep_us = <uint64_t>(self.now_ns - state.sweep_started_ns) // 1000
            state.total_sweep_us += state.last_sweep_us
            state.sweep_started_ns = 0
        return 0

    cdef int end_graces(self, int steps) except -1:
        """Gives back the holdings of connections whose grace time is over.

        In a drain, gives back the holdings of all ended connections, because nobody can reconnect.
        """
        cdef int64_t until_ns = INT64_MAX if self.draining else self.now_ns
        cdef uint32_t connection
        cdef bint is_leaving
        while steps > 0:
            connection = timers_take(&self.resumptions.timers, until_ns, &steps)
            if connection == 0:
                break
            is_leaving = self.resumptions.records[connection].is_leaving
            grace_end(&self.resumptions, connection)
            resumption_forget(&self.resumptions, connection)
            self.resumptions.state.expired += 1
            if not is_leaving and not takes_leave(&self.takes, connection):
                permits_leave(&self.counters.permits, connection)
        return steps

    cdef int leave(self, int steps) except -1:
        """Removes the waits and charges of ended connections, then queues their holdings.

        For a connection in its grace time, removes only its waits.
        """
        cdef uint32_t connection
        cdef bint is_in_grace
        while steps > 0 and self.takes.state.leaving_first:
            is_in_grace = self.resumptions.records[self.takes.state.leaving_first].is_in_grace
            connection = takes_left(&self.takes, is_in_grace, self.now_ns, &steps)
            if connection == 0:
                break
            if is_in_grace:
                self.resumptions.records[connection].is_leaving = False
            else:
                permits_leave(&self.counters.permits, connection)
        return steps

    cdef int expire(self, int steps) except -1:
        """Refuses Takes that have waited long enough, and at a stop all Takes. Also frees rates that are full."""
        cdef Counters* counters = &self.counters
        cdef Decision decision = Decision(REFUSED, 0, False, 0, INT64_MAX)
        cdef Item[ITEMS_MAX] items
        cdef uint32_t number
        while self.to_drain and steps > 0:
            steps -= 1
            number = self.to_drain
            self.to_drain -= 1
            if counters.fair.waiters[number].connection:
                steps -= REPLY_STEPS
                take_look(&self.takes, number, items, self.now_ns, &decision)
                self.refuse(number, RESOURCE_NOT_AVAILABLE, &decision, items)
        while self.to_limit and steps > 0:
            steps -= 1
            number = self.to_limit
            self.to_limit -= 1
            if counters.fair.waiters[number].connection:
                steps -= REPLY_STEPS
                self.limit_waiter(number)
        while steps > 0:
            number = timers_take(&self.takes.deadlines, self.now_ns, &steps)
            if number == 0:
                break
            steps -= REPLY_STEPS
            decision = Decision(REFUSED, 0, False, 0, INT64_MAX)
            take_look(&self.takes, number, items, self.now_ns, &decision)
            self.timed_out += 1
            self.refuse_by(number, &decision, items)
        while steps > 0:
            number = timers_take(&counters.fair.timers, self.now_ns, &steps)
            if number == 0:
                break
            queue_wake(&counters.fair, number)
        while steps > 0:
            number = timers_take(&counters.fulls, self.now_ns, &steps)
            if number == 0:
                break
            rate_end(&self.takes, number, self.now_ns)
        return charges_expire(&self.takes, self.now_ns, steps)

    # ---- Takes that wait ----

    cdef bint wait_for(
        self, Session session, const Frame* frame, const TakeHead* head, const Item* items, const Decision* decision
    ) except -1:
        """Lets a Take wait. Returns False if there is no room."""
        cdef uint64_t key = <uint64_t>1 << 63 | session.connection
        cdef uint32_t number
        cdef TakeHead again
        cdef Item[ITEMS_MAX] stated
        cdef const uint8_t* data
        cdef int i
        self.meet(session)
        if head.key_size:
            key = siphash13(self.header.key, head.key, head.key_size)
        if self.counters.limits.generation:     # it remembers its own numbers, as the limits may change
            data = head_decode(frame.data + HEADER_SIZE, frame.size - HEADER_SIZE, &again)
            for i in range(head.count):
                data = item_decode(data, frame.data + frame.size, &again, &stated[i])
                stated[i].record = items[i].record
                stated[i].tag = items[i].tag
            items = stated
        number = take_wait(
            &self.takes, session.connection, items, head.count, decision, frame_opaque(frame), key,
            max(<uint16_t>1, head.weight), head.priority, self.now_ns, self.now_ns + <int64_t>head.wait_ms * NS_PER_MS
        )
        if number == 0:
            self.not_queued += 1
            return False
        self.budget -= WAIT_STEPS * head.count
        waiter_label(&self.counters.fair, number, head.key, head.key_size)
        session.awaited += 1
        self.look_again()
        return True

    cdef void meet(self, Session session) except *:
        """Notes who the peer is. Not inlined into sessions, where a second SipHash would make the first a call."""
        if session.owner is not None and not peer_is_known(&self.peers, session.connection):
            name, is_local = session.owner.whom()
            peer_meet(&self.peers, session.connection, name, is_local)

    cdef bint cancel(self, Session session, uint32_t opaque) except -1:
        """Ends the wait of a Take, and appends its reply. Returns False if the Take does not wait."""
        cdef uint32_t number = take_find(&self.takes, session.connection, opaque, &self.budget)
        if number == 0:
            return False
        self.cancel_one(session, number)
        self.look_again()
        return True

    cdef void cancel_one(self, Session session, uint32_t number) noexcept:
        cdef uint32_t opaque = self.takes.waiting[number].opaque
        take_end(&self.takes, number)
        if session.awaited:     # else eof() has set it to 0, as nobody waits for the reply any more
            session.awaited -= 1
        self.refusals[<int>TAKE][<int>CANCELLED] += 1
        self.out_size += refusal_encode(self.out + self.out_size, TAKE, CANCELLED, opaque, error_text(CANCELLED))

    cdef int serve(self, int steps) except -1:
        """Serves queues, as far as there is something for their waiters."""
        cdef uint32_t queue
        while steps > 0:
            queue = queue_next_ready(&self.counters.fair)
            if queue == 0:
                break
            steps = self.serve_queue(queue, steps - 1)
        return steps

    cdef int serve_queue(self, uint32_t number, int steps) except -1:
        cdef Fair* fair = &self.counters.fair
        cdef Queue* queue = fair.queues + number
        cdef Decision decision
        cdef Item[ITEMS_MAX] items
        cdef uint32_t first
        queue.is_ready = True   # as it is being served: what ends here need not wake it
        while queue.first:
            if steps <= 0:
                queue.is_ready = False
                queue_wake(fair, number)
                return 0
            steps -= REPLY_STEPS
            first = queue.first
            if self.sessions[fair.waiters[first].connection] == NULL:
                take_end(&self.takes, first)
                continue
            decision = take_try(&self.takes, first, items, self.now_ns)
            if decision.outcome == GRANTED:
                self.grant(first, items)
            elif decision.outcome != REFUSED or decision.is_over and not self.is_lent(first):
                self.refuse_by(first, &decision, items)
            elif decision.queue != number and not decision.is_over:
                take_move(&self.takes, first, &decision, items)
            else:
                if decision.due_ns != INT64_MAX:
                    timers_arm(&fair.timers, number, decision.due_ns)
                queue.is_ready = False
                return steps
        queue.is_ready = False
        while queue.flows:
            if steps <= 0:
                queue_wake(fair, number)
                return 0
            steps -= 1
            flows_tidy(fair, number, 1)
        queue_settle(fair, number)
        return steps

    cdef int grant(self, uint32_t number, const Item* items) except -1:
        """Answers a Take that was granted, and ends its wait."""
        cdef uint8_t[TAKE_REPLY_MAX] reply
        cdef int i, count = self.takes.waiting[number].items
        cdef uint8_t* left = grant_encode(reply, self.takes.waiting[number].opaque, self.takes.state.grant, count)
        for i in range(count):
            store_be32(left + 4 * i, items[i].left)
        self.granted_later += 1
        self.waited_us += <uint64_t>(self.now_ns - self.takes.waiting[number].since_ns) // 1000
        fair_serve(&self.counters.fair, number)
        return self.post_to(number, reply, <uint32_t>(left + 4 * count - reply))

    cdef int limit_waiter(self, uint32_t number) except -1:
        """Refuses a waiting Take that new limits make impossible.

        Otherwise lets its queue be served, because the limits may be higher now. A wait of another store goes on: it is
        for one permit, so the limit is 0 then, and nobody behind it could be granted anything.
        """
        cdef Decision decision = Decision(REFUSED, 0, False, 0, INT64_MAX)
        cdef Item[ITEMS_MAX] items
        take_items(&self.takes, number, items)
        if items_limit(&self.counters, items, self.takes.waiting[number].items, &decision):
            queue_wake(&self.counters.fair, self.counters.fair.waiters[number].queue)
            return 0
        return 0 if self.is_lent(number) else self.refuse_by(number, &decision, items)

    cdef bint is_lent(self, uint32_t number) noexcept:
        """Returns True if it is another store that waits, see _lending.pyx."""
        return self.counters.permits.holders[self.counters.fair.waiters[number].connection].is_exempt

    cdef int refuse_by(self, uint32_t number, const Decision* decision, const Item* items) except -1:
        """Answers a Take that is refused for this reason, and ends its wait."""
        cdef uint8_t status = RESOURCE_NOT_AVAILABLE
        if decision.outcome == FULL:
            status = OUT_OF_MEMORY
        elif decision.outcome == ABSENT:
            status = NOT_FOUND
        return self.refuse(number, status, decision, items)

    cdef uint32_t write_shortage(
        self, uint8_t* target, uint32_t opaque, const Decision* decision, const Item* items
    ) noexcept:
        """Writes the reply to a Take that is refused because too little of an item is available, or at a stop.

        Returns the size of the reply.
        """
        cdef const Item* item = items + decision.item
        cdef uint32_t most = item.pace.burst if item.pace.period_us else item.maximum
        cdef uint32_t left = most   # of an item without a record
        cdef const char* text = error_text(RESOURCE_NOT_AVAILABLE)
        if item.record:
            left = item_left(&self.takes, item, self.now_ns)
        if self.parting:
            text = b"Draining"
        elif decision.is_over:
            text = b"More than the limit of the server"
        return shortage_encode(
            target, opaque, decision.item, left, most,
            <uint32_t>NO_TIME if self.parting else retry_ms(decision.due_ns, self.now_ns), text
        )

    cdef int refuse(self, uint32_t number, uint8_t status, const Decision* decision, const Item* items) except -1:
        """Answers a Take that is refused, and ends its wait."""
        cdef uint8_t[TAKE_REPLY_MAX] reply
        cdef uint32_t opaque = self.takes.waiting[number].opaque
        cdef uint32_t size
        self.refusals[<int>TAKE][status] += 1
        if status == RESOURCE_NOT_AVAILABLE:
            size = self.write_shortage(reply, opaque, decision, items)
        elif status == NOT_FOUND:
            size = absence_encode(reply, opaque, decision.item)
        else:
            size = refusal_encode(reply, TAKE, status, opaque, error_text(status))
        return self.post_to(number, reply, size)

    cdef int post_to(self, uint32_t number, const uint8_t* data, uint32_t size) except -1:
        """Ends the wait of a Take with a reply."""
        cdef uint32_t connection = self.counters.fair.waiters[number].connection
        cdef Session session
        take_end(&self.takes, number)
        if self.sessions[connection] == NULL:
            return 0
        session = <Session>self.sessions[connection]
        if session.awaited:
            session.awaited -= 1
        return session.post(PyBytes_FromStringAndSize(<const char*>data, size))

    # ---- connections that are resumed ----

    cdef bint give_back(self, Session session) except -1:
        """Gives back everything that a connection holds, and cancels its waits.

        Returns False if the work has to continue later.
        """
        cdef uint32_t connection = session.connection, number
        cdef uint32_t* holding = &self.counters.permits.holders[connection].first
        token_revoke(&self.resumptions, connection)
        while self.budget > 0 and self.out_size < OUTPUT_MAX:
            self.budget -= REPLY_STEPS
            number = self.counters.fair.askers[connection].first
            if number:
                self.cancel_one(session, number)
            elif self.takes.takers[connection].charged.first:
                charge_leave(&self.takes, self.takes.takers[connection].charged.first, self.now_ns)
            elif holding[0]:
                holding_give_back(&self.counters, holding[0])
            else:
                break
        self.look_again()
        return self.holds_nothing(connection)

    cdef bint name_connection(self, uint32_t connection, const uint8_t* name, uint32_t size) except -1:
        """Stores the name of a connection. Returns False if the name is not UTF-8 that people can see."""
        cdef Resumption* resumption = self.resumptions.records + connection
        try:
            if not is_legible((<const char*>name)[:size].decode("utf-8")):
                return False
        except UnicodeDecodeError:
            return False
        memcpy(resumption.name, name, size)
        resumption.name_size = <uint8_t>size
        return True

    cdef bint holds_nothing(self, uint32_t connection) noexcept:
        """Returns whether a connection has no holdings, no charges and no waiting Takes."""
        return (
            self.counters.permits.holders[connection].first == 0 and self.takes.takers[connection].charged.first == 0
            and self.counters.fair.askers[connection].first == 0
        )

    cdef bint wait_of_ends(self, uint32_t connection) except -1:
        """Cancels the waits of another connection.

        Returns True when nothing waits any more, and the store has noticed the end of that connection.
        """
        cdef Resumption* resumption = self.resumptions.records + connection
        cdef Decision decision = Decision(REFUSED, 0, False, 0, INT64_MAX)
        cdef uint32_t number = self.counters.fair.askers[connection].first
        if self.sessions[connection] == NULL and (resumption.is_leaving or not resumption.is_in_grace):
            return False
        if self.counters.shares.blocked[connection].record:
            # Its request is then executed under its new number.
            session_unblock(&self.counters.shares, self.sessions, connection)
        if number == 0:
            return True
        while number and self.budget > 0 and self.sessions[connection] != NULL:  # a reply can drop the session
            self.budget -= REPLY_STEPS
            self.refuse(number, CANCELLED, &decision, NULL)
            number = self.counters.fair.askers[connection].first
        return False

    cdef int exchange(self, Session session, uint32_t number) except -1:
        """Gives a session the number of another connection, and everything that is held under that number.

        If the other connection is open, it gets the session's number; otherwise this number becomes free. Each
        connection keeps its name; a session without a name gets the other's.
        """
        cdef uint32_t own = session.connection
        cdef Resumption* resumption = self.resumptions.records + number
        cdef Resumption given = self.resumptions.records[own]
        self.resumptions.state.resumed += 1
        if resumption.is_in_grace:
            grace_end(&self.resumptions, number)
        resumption_forget(&self.resumptions, own)
        self.peers.keys[own], self.peers.keys[number] = self.peers.keys[number], self.peers.keys[own]
        self.sessions[own] = self.sessions[number]
        self.sessions[number] = <void*>session
        session.connection = number
        if self.sessions[own] == NULL:
            connections_put(&self.connections, own)
        else:
            (<Session>self.sessions[own]).connection = own
            (<Session>self.sessions[own]).mark_dirty()  # so that net looks at its number
            name_copy(self.resumptions.records + own, resumption)
        if given.name_size:
            name_copy(resumption, &given)
        self.has_work = True
        return 0

    def evict(self, uint32_t connection, int64_t now_ns):
        """Implements Store.evict: the connection's token becomes invalid, and its grace time ends."""
        with self.at(now_ns):
            if not 0 < connection <= self.connections.pool.fresh:
                return False
            if self.resumptions.records[connection].is_in_grace:
                timers_arm(&self.resumptions.timers, connection, self.now_ns)
                self.has_work = True
                return True
            token_revoke(&self.resumptions, connection)
            return False

    def about(self, uint32_t connection):
        """Implements Store.about: the name that the connection stated with Who, and its grace time."""
        with self:
            if connection > self.connections.pool.fresh:
                return "", None
            return connection_about(&self.resumptions, connection)

    def begin_window(self, uint32_t number):
        """Begins a stats window. Ignores a number that is not higher than the last number.

        Changes no counter: idle counters of earlier windows count as gone from now on, and the sweep frees their
        records.
        """
        cdef CountersState* state = self.counters.state
        with self:
            if number > state.window:
                state.window = number
                state.idle = 0
                sweep_begin(&self.counters)
                self.has_work = True

    def held(self):
        """Implements Store.held: holdings, except lent permits, because a drain waits for the borrower's own
        holdings."""
        cdef Permits* permits = &self.counters.permits
        with self:
            lent = sum([permits.holders[<uint32_t>connection].holdings for connection in self.lendings])
            return permits.state.holdings.used - lent

    def holdings_of(self, uint32_t connection):
        """Implements Store.holdings_of: holdings."""
        with self:
            if connection > self.connections.pool.fresh:
                return 0
            return self.counters.permits.holders[connection].holdings

    def leases(self, size_t limit):
        """Implements Store.leases: the first holdings, by connection.

        Includes holdings of ended connections, which `net` no longer knows. Checks every connection number ever used,
        which takes about 1 ns for each.
        """
        cdef Permits* permits = &self.counters.permits
        cdef Holding* holding
        cdef uint32_t entry, connection
        cdef list found = []
        with self:
            for connection in range(1, self.connections.pool.fresh + 1):
                if connection in self.lendings:  # held() leaves them out, too
                    continue
                entry = permits.holders[connection].first
                while entry:
                    if <size_t>len(found) >= limit:
                        return found
                    holding = permits.holdings + entry
                    name = name_bytes(&permits.table, &permit_at(permits, holding.record).record)
                    found.append((connection, name, holding.amount, holding.since_tenths))
                    entry = holding.of_connection.next
        return found

    cdef int audit_parts(self) except -1:
        """Implements Store.audit_parts: checks the counters, their holdings and the ring of idle counters."""
        cdef Counters* counters = &self.counters
        audit_chains(&counters.chains, audit_permits(&counters.permits))
        audit_ring(&counters.ring, &counters.permits.table)
        audit_takes(&self.takes)
        audit_shares(&counters.shares, &counters.permits)
        audit_resumed(&self.resumptions, self.sessions)
        audit_peers(&self.peers, &self.takes, &self.resumptions)
        return audit_counters(counters)

    cdef dict figures(self):
        cdef dict figures = Store.figures(self)
        cdef Permits* permits = &self.counters.permits
        cdef CountersState* state = self.counters.state
        cdef Pool* blocks = self.counters.chains.pool
        cdef FairState* fair = self.counters.fair.state
        figures.update({
            "objects": state.busy + state.idle,
            "total_objects": state.created,
            "used_memory": (
                permits.table.pool.used * sizeof(Counter)
                + permits.state.holdings.used * sizeof(Holding)
                + <uint64_t>blocks.used * BLOCK_SIZE
            ),
            "conflicts": permits.table.index.state.displaced,
            "gc_count": state.sweeps,
            "last_gc_elapsed": state.last_sweep_us,
            "total_gc_elapsed": state.total_sweep_us,
            "buckets": permits.table.pool.capacity,
            "records": permits.table.pool.used,
            "busy": state.busy,
            "idle": state.idle,
            "reclaimed": state.reclaimed,
            "expired": state.expired,
            "longest_probe": permits.table.index.state.longest,
            "holdings": permits.state.holdings.used,
            "holdings_max": permits.state.holdings.capacity,
            "holdings_leaving": permits.state.leaving_holdings,
            "given_back": permits.state.given_back,
            "name_memory": <uint64_t>blocks.used * BLOCK_SIZE,
            "name_memory_max": <uint64_t>blocks.capacity * BLOCK_SIZE,
            "window": state.window,
            "waiters": fair.waiters.used,
            "waiters_max": fair.waiters.capacity,
            "waits": fair.serial,
            "granted_later": self.granted_later,
            "granted_later_seconds": self.waited_us // 1000 / 1e3,
            "timed_out": self.timed_out,
            "not_queued": self.not_queued,
            "waits_over_share": self.peers.state.refused[<int>WAITS],
            "rates": self.takes.state.rates,
            "rates_max": rates_max(&self.takes),
            "charges": self.takes.state.charges.used,
            "kept": self.resumptions.state.graces,
            "kept_holdings": self.resumptions.state.grace_holdings,
            "resumed": self.resumptions.state.resumed,
            "expired_stays": self.resumptions.state.expired,
            "stays_over_share": self.peers.state.refused[<int>GRACES],
            "charges_max": self.takes.state.charges.capacity,
            "charges_dropped": self.takes.state.charges_dropped,
        })
        for opcode, name in COMMAND_NAMES.items():
            figures[f"command:{name}"] = self.requests[<int>opcode]
        for status, name in REFUSAL_NAMES.items():
            figures[f"refused:{name}"] = sum([self.refusals[opcode][<int>status] for opcode in range(OPCODES + 1)])
        return figures

    def outcomes(self):
        """Implements Store.outcomes. "ok" is the number of valid requests minus their refusals."""
        cdef int opcode, status
        found = Tally()
        for opcode in range(OPCODES + 1):
            name = COMMAND_NAMES.get(opcode, "unknown")
            for status, text in REFUSAL_NAMES.items():
                found[name, text] += self.refusals[opcode][status]
        for opcode, name in COMMAND_NAMES.items():
            refused = sum([self.refusals[opcode][<int>status] for status in PARSED_REFUSALS])
            found[name, "ok"] = self.requests[opcode] - refused
        return [(name, text, count) for (name, text), count in found.items() if count]

    def begin_drain(self):
        """Implements Store.begin_drain."""
        cdef uint32_t connection
        self.draining = True
        self.part()
        with self:
            for connection in range(1, self.connections.pool.fresh + 1):
                if self.counters.shares.blocked[connection].record:
                    session_unblock(&self.counters.shares, self.sessions, connection)  # executed again, and refused

    def part(self):
        """Implements Store.part. Waiting Takes are refused in the next ticks."""
        with self:
            self.parting = True
            self.to_drain = self.counters.fair.state.waiters.fresh
            self.has_work = True

    cdef bytes stats_body(self):
        """Returns the body of a Stats reply.

        The body has name length, value length, name and value for each figure. See section "Stats".
        """
        cdef dict figures = self.figures()
        ordered = {name: figures.pop(name) for name in REFERENCE_FIGURES}
        ordered.update((f"command:{name}", figures.pop(f"command:{name}")) for name in REFERENCE_COMMANDS.values())
        ordered.update(self.others())  # must not call the store, because a call is under way
        ordered.update(figures)
        pieces = []
        for name, value in ordered.items():
            name = name.encode("ascii")
            value = str(value).encode("ascii")
            pieces.append(len(name).to_bytes(2, "big") + len(value).to_bytes(2, "big") + name + value)
        return b"".join(pieces)
