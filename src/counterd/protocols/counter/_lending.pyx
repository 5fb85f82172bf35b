"""Lets another protocol's store take permits of these counters, as if that store were a connection.

Floor 2 (ARCHITECTURE.md). A Lending is a session without a peer. A Lending holds permits and waits for permits under
the number of a connection, so dumps, tables, the maximum of each name and the fair queues treat it like any other
connection. The reply to a waiting Take becomes the end of a wait. The limits of one connection do not apply to a
Lending, because it stands for all connections of the borrower.

The borrower calls a Lending while the borrower's own store is in a call. So the borrower is not notified within these
calls, only in ticks of this store.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Session
from counterd.engine.byteorder cimport load_le32
from counterd.engine.debug cimport debug_check
from counterd.engine.fair cimport queue_wake
from counterd.engine.permits cimport GRANTED, REFUSED, Outcome, permit_at
from counterd.engine.table cimport Record
from counterd.protocols.counter._counters cimport counter_release
from counterd.protocols.counter._items cimport Decision, Item, item_tag
from counterd.protocols.counter._messages cimport NO_ERROR
from counterd.protocols.counter._rates cimport Pace
from counterd.protocols.counter._shares cimport FLAG_SHARED, share_call_later
from counterd.protocols.counter._store cimport CounterStore
from counterd.protocols.counter._takes cimport (
    items_resolve, take_end, take_wait, takes_decide, takes_grant, takes_have_room,
)


cdef class Lending(Session):
    """Implements contract.Lender. Lending.of() makes it. Keep it as long as something is lent."""

    cdef object settled     # called with a ticket, and whether a permit was granted
    cdef object wake        # called when the store has something to do

    @staticmethod
    def of(CounterStore store not None, settled, wake):
        """Makes the lender of a store. settled, wake: see contract.ProtocolSpec. Raises MemoryError."""
        cdef Lending lending
        with store:
            lending = Lending(store)
        lending.settled = settled
        lending.wake = wake
        return lending

    def __cinit__(self, CounterStore store not None):
        store.sessions[self.connection] = <void*>self
        store.counters.permits.holders[self.connection].is_exempt = True
        store.peers.keys[self.connection] = 0
        store.lendings.append(self.connection)
        store.sessions_open -= 1    # it is nobody's connection
        store.sessions_total -= 1
        self.open = False

    def __dealloc__(self):
        if self.store is not None:
            (<CounterStore>self.store).sessions[self.connection] = NULL

    cdef Item item(self, bytes name, uint32_t maximum):
        """Makes the item of a Take of one permit. The item refers to `name`, and does not copy it."""
        cdef Item item
        item.name = <const uint8_t*>PyBytes_AS_STRING(name)
        item.name_size = <uint32_t>PyBytes_GET_SIZE(name)
        item.pace = Pace(0, 0, 0)
        item.tag = item_tag(&(<CounterStore>self.store).counters.permits, &item)
        item.amount = 1
        item.maximum = maximum
        item.on_death = 0
        item.is_named = False
        item.record = 0
        return item

    cdef CounterStore enter(self, int64_t now_ns):
        self.store.begin_call(max(now_ns, self.store.now_ns))
        return <CounterStore>self.store

    cdef int leave_call(self) except -1:
        """Ends a call. Wakes the store if it now has something to do."""
        cdef CounterStore store = <CounterStore>self.store
        cdef bint is_due = store.counters.fair.state.ready_first != 0 or store.counters.ring.state.sweep_left != 0
        is_due |= store.counters.shares.missing != 0
        store.counters.shares.missing = 0   # the borrower waits in the queue
        store.end_call()
        if is_due:
            self.wake()
        return 0

    def acquire(self, bytes name not None, uint32_t maximum, int64_t now_ns):
        """Implements contract.Lender.acquire."""
        cdef CounterStore store = self.enter(now_ns)
        cdef Item item = self.item(name, maximum)
        cdef Outcome outcome = REFUSED
        try:
            if not store.draining:
                outcome = takes_decide(
                    &store.takes, self.connection, &item, 1, store.counters.limits.generation != 0, store.now_ns,
                    &store.budget
                ).outcome
        finally:
            self.leave_call()
        return outcome == GRANTED

    def retake(self, bytes name not None, uint32_t maximum, int64_t now_ns):
        """Implements contract.Lender.retake."""
        cdef CounterStore store = self.enter(now_ns)
        cdef Item item = self.item(name, maximum)
        cdef Record* record
        try:
            if not items_resolve(&store.takes, &item, 1, store.now_ns, &store.budget):
                return False
            if not takes_have_room(&store.takes, self.connection, &item, 1):
                return False
            takes_grant(&store.takes, self.connection, &item, 1, store.now_ns)
            record = &permit_at(&store.counters.permits, item.record).record
            if record.flags & FLAG_SHARED:
                share_call_later(&store.counters.shares, item.record, &record.flags)
            return True
        finally:
            self.leave_call()

    def release(self, bytes name not None, int64_t now_ns):
        """Implements contract.Lender.release."""
        cdef CounterStore store = self.enter(now_ns)
        cdef Item item = self.item(name, 1)
        cdef Outcome outcome
        try:
            outcome = counter_release(&store.counters, self.connection, item.tag, item.name, item.name_size, 1)
            debug_check(outcome == GRANTED)
        finally:
            self.leave_call()

    def enqueue(self, bytes name not None, uint32_t maximum, uint32_t ticket, int64_t now_ns):
        """Implements contract.Lender.enqueue."""
        cdef CounterStore store = self.enter(now_ns)
        cdef Decision decision = Decision(REFUSED, 0, False, 0, INT64_MAX)
        cdef Item item = self.item(name, maximum)
        cdef uint32_t place = 0
        try:
            if not store.parting and items_resolve(&store.takes, &item, 1, store.now_ns, &store.budget):
                place = take_wait(
                    &store.takes, self.connection, &item, 1, &decision, ticket, <uint64_t>1 << 63 | self.connection, 1,
                    0, store.now_ns, INT64_MAX
                )
            return place
        finally:
            self.leave_call()

    def amend(self, uint32_t place, uint32_t maximum, int64_t now_ns):
        """Implements contract.Lender.amend."""
        cdef CounterStore store = self.enter(now_ns)
        debug_check(store.counters.fair.waiters[place].connection == self.connection)
        store.takes.waiting[place].first.most = maximum
        queue_wake(&store.counters.fair, store.counters.fair.waiters[place].queue)
        self.leave_call()

    def cancel(self, uint32_t place, int64_t now_ns):
        """Implements contract.Lender.cancel."""
        cdef CounterStore store = self.enter(now_ns)
        debug_check(store.counters.fair.waiters[place].connection == self.connection)
        take_end(&store.takes, place)
        self.leave_call()

    cdef int post(self, bytes message) except -1:
        """Called with the reply to a Take that has waited. The opaque of the reply is the ticket."""
        cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(message)
        self.settled(load_le32(data + 8), data[2] == NO_ERROR)
        return 0
