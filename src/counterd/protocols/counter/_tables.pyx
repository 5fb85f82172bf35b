"""The counter protocol's tables for people: the counters and rates, their holders and their waiters.

Floor 2 (ARCHITECTURE.md). All tables are walks in slices, see engine/walk.pyx. The walk through the holders of a
counter uses the cursor in the region. When the holding at the cursor ends, the ledger moves the cursor to the next
holding. Times refer to the store's last call, which is at most a second ago.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.connections cimport connection_check
from counterd.engine.fair cimport MOVES_MAX, START_MAX, Fair, Label, Waiter, queue_find, waiter_key, waiter_span
from counterd.engine.heap cimport Heap, Node, heap_insert, heap_remove
from counterd.engine.permits cimport Holding, Permits, permit_at, walk_begin
from counterd.engine.table cimport Record, Table as NameTable, name_bytes, name_tag, table_find
from counterd.engine.walk cimport BLOCK_WORK, NAMES_MAX, ROW_WORK, HoldingsWalk, RankedWalk
from counterd.protocols.counter._counters cimport (
    NS_PER_TENTH, Counter, Counters, counter_at, counter_everywhere, counter_exists,
)
from counterd.protocols.counter._limits cimport Limits, Rule, limits_find
from counterd.protocols.counter._messages cimport NO_TIME
from counterd.protocols.counter._rates cimport (
    FLAG_AWAITED, FLAG_RATE, RATE_TAG, Pace, Rate, RateRecord, rate_full_ns, rate_left,
)
from counterd.protocols.counter._shares cimport FLAG_SHARED
from counterd.protocols.counter._stays cimport stay_about
from counterd.protocols.counter._store cimport CounterStore
from counterd.protocols.counter._takes cimport Take, rate_at

from counterd.listing import CONNECTION, ROWS_MAX, Column, Table, name_of_bytes, ranked_parameters, read_parameters
from counterd.settings import integer

cdef enum:
    HOLDERS_STEP = 1024     # holdings that a step counts, each in a cache line from anywhere: 0.1 ms
    RULES_STEP = 200        # rules of a step: some 0.1 ms
    WAITERS_STEP = 100      # rows of a step, each with a few such cache lines: some 0.1 ms

cdef enum Order:
    CONSUMPTION
    USAGE
    PEAK
    LIMIT
    WAITERS

cdef dict ORDERS = {"consumption": CONSUMPTION, "usage": USAGE, "peak": PEAK, "limit": LIMIT, "waiters": WAITERS}
cdef dict RATE_ORDERS = {"usage": USAGE, "limit": LIMIT, "waiters": WAITERS}
WAITER_SORTS = ("age", "amount")
cdef double NS_PER_S = 1e9
cdef int64_t LONGEST_NS = <int64_t>NO_TIME * 1000000    # a wait by which clients say: without end
cdef double US_PER_S = 1e6


cdef inline uint32_t peak_of(const Counters* counters, const Counter* counter) noexcept:
    """Returns the peak of the current window, as in a Dump.

    If the window had no request yet, returns the consumption.
    """
    return counter.peak if counter.window == counters.state.window else counter.permit.consumption


cdef inline uint32_t waiters_of(const Counters* counters, uint32_t number, const Record* record) noexcept:
    """Returns how many Takes wait for a counter or a rate."""
    if not record.flags & FLAG_AWAITED:
        return 0
    return counters.fair.queues[queue_find(&counters.fair, number, record.tag)].waiters


cdef inline uint32_t number_of(const Counters* counters, const Record* record) noexcept:
    return <uint32_t>((<const uint8_t*>record - counters.permits.table.records) // counters.permits.table.record_size)


cdef class CountersWalk(RankedWalk):
    """Lists counters whose names contain `match`, with the largest by `sort` first."""

    cdef Counters* counters
    cdef Order order

    def __cinit__(self, CounterStore store not None, bytes match, uint32_t limit, str sort):
        self.counters = &store.counters
        self.table = &store.counters.permits.table
        self.order = <Order><int>ORDERS[sort]

    cdef bint rank(self, const Record* record, uint64_t* rank) noexcept:
        cdef const Counter* counter = <const Counter*>record
        if record.flags & FLAG_RATE or not counter_exists(self.counters, counter):
            return False
        if self.order == CONSUMPTION:
            rank[0] = counter.permit.consumption
        elif self.order == USAGE:
            rank[0] = (<uint64_t>counter.permit.consumption << 32) // max(<uint32_t>1, counter.limit)
        elif self.order == PEAK:
            rank[0] = peak_of(self.counters, counter)
        elif self.order == LIMIT:
            rank[0] = counter.limit
        else:
            rank[0] = waiters_of(self.counters, number_of(self.counters, record), record)
            self.work -= BLOCK_WORK if rank[0] else 0
        return True

    cdef tuple row(self, bytes name, const Record* record):
        cdef const Counter* counter = <const Counter*>record
        cdef uint32_t number = number_of(self.counters, record)
        return (
            name, counter.permit.consumption, counter.limit, peak_of(self.counters, counter),
            waiters_of(self.counters, number, record),
            counter_everywhere(self.counters, number) if record.flags & FLAG_SHARED else None,
        )


cdef class RatesWalk(RankedWalk):
    """Lists rates whose names contain `match`, with the largest by `sort` first.

    The numbers of a rate are those of the last request.
    """

    cdef Counters* counters
    cdef Order order

    def __cinit__(self, CounterStore store not None, bytes match, uint32_t limit, str sort):
        self.counters = &store.counters
        self.table = &store.counters.permits.table
        self.order = <Order><int>RATE_ORDERS[sort]

    cdef Pace read(self, const Record* record, Rate* rate) noexcept:
        """Returns the numbers of a rate, and sets *rate."""
        rate.record = <RateRecord*>record
        rate.state = self.counters.rates + number_of(self.counters, record)
        self.work -= BLOCK_WORK
        return Pace(rate.state.period_us, rate.state.limit, rate.state.burst)

    cdef bint rank(self, const Record* record, uint64_t* rank) noexcept:
        cdef Rate rate
        cdef Pace pace
        if not record.flags & FLAG_RATE:
            return False
        if self.order == WAITERS:
            rank[0] = waiters_of(self.counters, number_of(self.counters, record), record)
            return True
        pace = self.read(record, &rate)
        if self.order == LIMIT:
            rank[0] = pace.limit
        else:
            rank[0] = <uint64_t>(pace.burst - rate_left(&rate, &pace, self.store.now_ns)) << 32
            rank[0] //= max(pace.burst, <uint32_t>1)
        return True

    cdef tuple row(self, bytes name, const Record* record):
        cdef Rate rate
        cdef Pace pace = self.read(record, &rate)
        cdef int64_t full_ns = rate_full_ns(&rate, &pace)
        return (
            name, rate_left(&rate, &pace, self.store.now_ns), pace.burst, pace.limit, pace.period_us / US_PER_S,
            max(full_ns - self.store.now_ns, 0) / NS_PER_S,
            waiters_of(self.counters, number_of(self.counters, record), record),
        )


cdef class HoldersWalk:
    """Counts the holders of a counter, and lists the latest `limit` holders, beginning with the latest.

    A new walk takes the store's cursor over; an earlier walk then stops counting.
    """

    cdef CounterStore store
    cdef bytes name
    cdef size_t limit
    cdef uint64_t ticket    # from walk_begin(); 0 = the walk has not begun
    cdef bint counted
    cdef readonly uint64_t total
    cdef list found

    def __cinit__(self, CounterStore store not None, bytes name not None, size_t limit):
        self.store = store
        self.name = name
        self.limit = limit
        self.found = []

    cdef uint32_t number(self) noexcept:
        """Returns the number of the counter's record, or 0 if there is none."""
        cdef const NameTable* table = &self.store.counters.permits.table
        cdef const uint8_t* name = <const uint8_t*>PyBytes_AS_STRING(self.name)
        cdef uint32_t size = <uint32_t>len(self.name)
        return table_find(table, name_tag(table, name, size), name, size)

    def step(self):
        """Continues for at most 250 us, in a call of the store. Returns True when the rows are ready."""
        with self.store:
            if self.counted:
                self.collect()
                return True
            self.counted = self.count()
            return False

    cdef bint count(self) noexcept:
        """Counts more holders. Returns True when all holders are counted."""
        cdef Permits* permits = &self.store.counters.permits
        cdef uint32_t _step
        if self.ticket == 0:
            self.ticket = walk_begin(permits, self.number())
        if self.ticket != permits.state.walks:
            return True
        for _step in range(HOLDERS_STEP):
            if permits.state.cursor == 0:
                return True
            self.total += 1
            permits.state.cursor = permits.holdings[permits.state.cursor].of_record.next
        return False

    cdef int collect(self) except -1:
        """Collects all rows together at the end, so that their connection numbers are current."""
        cdef uint32_t number = self.number()
        cdef uint32_t entry = permit_at(&self.store.counters.permits, number).holders if number else 0
        cdef Holding* holding
        self.found = []
        while entry and <size_t>len(self.found) < self.limit:
            holding = self.store.counters.permits.holdings + entry
            about = stay_about(&self.store.stays, holding.connection)
            self.found.append((holding.connection, holding.amount, holding.since_tenths, *about))
            entry = holding.of_record.next
        self.total = max(self.total, <uint64_t>len(self.found))
        return 0

    def rows(self):
        """Returns rows of (connection, amount, since, name, until).

        The cells name and until are those of the connection: the name that it has stated, and the end of its grace
        time, or None. Times are in tenths of a second on the caller's clock.
        """
        return self.found


cdef class HeldWalk(HoldingsWalk):
    """Lists the holdings of a connection, beginning with the latest."""

    def __cinit__(self, CounterStore store not None, uint32_t connection, uint32_t limit):
        self.permits = &store.counters.permits

    cdef tuple row(self, bytes name, const Holding* holding):
        return (name, holding.amount, holding.since_tenths)


# ---- who waits -----------------------------------------------------------------------------------------------------

cdef tuple item_cells(CounterStore store, uint32_t number):
    """Returns the name, the kind and the amount of the item for which a Take waits."""
    cdef const Fair* fair = &store.counters.fair
    cdef const Waiter* waiter = fair.waiters + number
    cdef Record* record = &permit_at(&store.counters.permits, fair.queues[waiter.queue].record).record
    kind = "rate" if record.flags & FLAG_RATE else "permits"
    return (name_bytes(&store.counters.permits.table, record), kind, waiter.cost)


cdef tuple wait_cells(CounterStore store, uint32_t number, bint says_who):
    """Returns the cells of a waiting Take: those of WAIT, of WHO if `says_who`, and of PLACE."""
    cdef const Waiter* waiter = store.counters.fair.waiters + number
    cdef const Take* take = store.takes.waiting + number
    cdef const Label* label = store.counters.fair.labels + waiter.flow
    cdef int64_t due_ns = take.timer.due_ns
    key = PyBytes_FromStringAndSize(<const char*>label.text, label.size) if waiter.flow else b""
    cdef bint is_endless = due_ns == INT64_MAX or due_ns - take.since_ns >= LONGEST_NS
    left = None if is_endless else max(due_ns - store.now_ns, 0) / NS_PER_S
    _, kind, amount = item_cells(store, number)
    who = (waiter.connection, stay_about(&store.stays, waiter.connection)[0]) if says_who else ()
    since = take.since_ns // <int64_t>NS_PER_TENTH
    return (amount, since, left, *who, key, waiter.priority, waiter.weight, kind, take.items)


cdef class WaitersWalk(RankedWalk):
    """Lists Takes that wait for names that contain `match`, with the largest by `sort` first."""

    cdef Fair* fair
    cdef bint by_age

    def __cinit__(self, CounterStore store not None, bytes match, uint32_t limit, str sort):
        self.fair = &store.counters.fair
        self.table = &store.counters.permits.table
        self.by_age = sort == "age"

    cdef uint32_t last(self) noexcept:
        return self.fair.state.waiters.fresh

    cdef Record* record(self, uint32_t number, uint64_t* rank) noexcept:
        """Returns the record for which a waiter waits, and sets *rank.

        Returns NULL if the waiter must not be listed.
        """
        cdef const Waiter* waiter = self.fair.waiters + number
        cdef Record* record
        if waiter.connection == 0:
            return NULL
        self.work -= BLOCK_WORK
        record = &permit_at(&(<CounterStore>self.store).counters.permits, self.fair.queues[waiter.queue].record).record
        rank[0] = <uint64_t>0xffffffffffffffff - waiter.node.serial if self.by_age else waiter.cost
        return record if self.matches(record) else NULL

    cdef void visit(self, uint32_t number) noexcept:
        cdef uint64_t rank
        self.work -= 1
        if self.record(number, &rank):
            self.offer(number, rank)

    cdef int take(self, uint32_t number) except -1:
        cdef CounterStore store = <CounterStore>self.store
        cdef uint64_t rank
        cdef Record* record = self.record(number, &rank)
        self.work -= ROW_WORK
        if record == NULL or not self.room_for(record):
            return 0
        name, _, _ = item_cells(store, number)
        row = (self.fair.waiters[number].node.serial, name, *wait_cells(store, number, True))
        self.found.append((<uint64_t>0xffffffffffffffff - rank, number, row))
        return 0


cdef class NotedWalk:
    """Counts waiting Takes, and lists the first `limit` of them. A subclass notes the Takes, and makes the rows.

    The first step notes the numbers of the Takes. A Take that waits during the whole walk is listed exactly once, at
    the place that it had at the first step.
    """

    cdef CounterStore store
    cdef uint32_t limit
    cdef readonly uint64_t total
    cdef list entries       # (number, serial, place) of Takes that will become rows, the next one last
    cdef list found
    cdef int64_t names_left

    cdef int note(self) except -1:
        """Appends `entries`, and counts all entries in `total`."""
        return 0

    cdef tuple row(self, uint32_t number, uint32_t place):
        """Returns the row of a Take."""
        return ()

    def step(self):
        """Continues for at most 250 us, in a call of the store. Returns True when the rows are ready."""
        with self.store:
            if self.entries is None:
                self.entries, self.found, self.names_left = [], [], NAMES_MAX
                self.note()
                self.entries.reverse()
                return False
            self.collect()
            return not self.entries

    cdef int collect(self) except -1:
        cdef const Fair* fair = &self.store.counters.fair
        cdef uint32_t number
        cdef int rows = WAITERS_STEP
        while self.entries and rows:
            rows -= 1
            number, serial, place = self.entries.pop()
            if fair.waiters[number].connection == 0 or fair.waiters[number].node.serial != serial:
                continue
            row = self.row(number, place)
            self.names_left -= len(row[0]) if isinstance(row[0], bytes) else 0
            if self.names_left < 0:
                self.entries.clear()
                break
            self.found.append(row)
        return 0

    def rows(self):
        """Returns the rows.

        Each row shows its Take as it was when it was read. Call this after step() has returned True.
        """
        return self.found


cdef struct Place:          # of a waiter in the order in which a queue is served
    Node node
    uint32_t number


cdef class QueueWalk(NotedWalk):
    """Lists Takes that wait for a name, in the order in which they are served: the counter's, then the rate's."""

    cdef bytes name
    cdef Place* places          # from 1 on
    cdef uint32_t used
    cdef Heap heap              # heaps of places: of those that may be next, and of those behind the one of a flow

    def __cinit__(self, CounterStore store not None, bytes name not None, uint32_t limit):
        self.store = store
        self.limit = limit
        self.name = name
        # Each waiter that is noted brings in its two children, the first one behind it, and that one's two children.
        self.places = <Place*>PyMem_RawMalloc((5 * <size_t>limit + 2) * sizeof(Place))
        if self.places == NULL:
            raise MemoryError("no room for a walk")
        self.heap.base, self.heap.stride = <uint8_t*>self.places, sizeof(Place)

    def __dealloc__(self):
        PyMem_RawFree(self.places)

    cdef void push(self, uint32_t* first, uint32_t number) noexcept:
        """Adds a waiter, if there is one, to the heap of places that begins at *first."""
        cdef const Waiter* waiter = self.store.counters.fair.waiters + number
        if number:
            self.used += 1
            self.places[self.used].number = number
            self.places[self.used].node.key, self.places[self.used].node.serial = waiter.node.key, waiter.node.serial
            heap_insert(&self.heap, first, self.used)

    cdef uint32_t pop(self, uint32_t* first) noexcept:
        """Takes the first place out of a heap."""
        cdef uint32_t place = first[0]
        heap_remove(&self.heap, first, place)
        return place

    cdef int note(self) except -1:
        """Notes the waiting Takes. A thousand of them take 0.3 ms."""
        cdef Counters* counters = &self.store.counters
        cdef const uint8_t* name = <const uint8_t*>PyBytes_AS_STRING(self.name)
        cdef uint32_t size = <uint32_t>len(self.name)
        cdef uint32_t tag = name_tag(&counters.permits.table, name, size)
        for flip in (0, RATE_TAG):
            self.note_queue(table_find(&counters.permits.table, tag ^ <uint32_t>flip, name, size), tag ^ <uint32_t>flip)
        return 0

    cdef int note_queue(self, uint32_t record, uint32_t tag) except -1:
        cdef const Fair* fair = &self.store.counters.fair
        cdef uint32_t queue = queue_find(fair, record, tag) if record else 0
        cdef size_t start = len(self.entries)
        cdef dict behind = {}   # by flow: the first place of the heap of those behind its one that may be next
        cdef const Waiter* waiter
        cdef uint64_t begun, ends, virtual = fair.queues[queue].virtual
        cdef uint32_t first = 0, others, number, place
        if queue == 0:
            return 0
        self.used = 0
        self.total += fair.queues[queue].waiters
        self.push(&first, fair.queues[queue].first)
        while first and <size_t>len(self.entries) < self.limit:
            place = self.pop(&first)
            number, begun = self.places[place].number, self.places[place].node.key & START_MAX
            waiter = fair.waiters + number
            self.entries.append((number, waiter.node.serial, len(self.entries) + 1 - start))
            virtual = max(virtual, begun)
            if waiter.flow and fair.flows[waiter.flow].head != number:
                others = behind[waiter.flow]
            else:
                others = 0
                self.push(&first, waiter.node.left)
                self.push(&first, waiter.node.right)
                if waiter.flow:
                    self.push(&others, fair.flows[waiter.flow].first)
            if others:  # the first of them has its place when this one is served
                ends = max(begun + waiter_span(waiter), virtual)
                place = self.pop(&others)
                waiter = fair.waiters + self.places[place].number
                self.push(&others, waiter.node.left)
                self.push(&others, waiter.node.right)
                behind[waiter.flow] = others
                self.places[place].node.key = waiter_key(waiter, ends if waiter.moves < MOVES_MAX else virtual)
                heap_insert(&self.heap, &first, place)
        return 0

    cdef tuple row(self, uint32_t number, uint32_t place):
        return (place, *wait_cells(self.store, number, True))


cdef class WaitsWalk(NotedWalk):
    """Lists the waits of a connection, beginning with the latest. connection: the engine's number."""

    cdef uint32_t connection

    def __cinit__(self, CounterStore store not None, uint32_t connection, uint32_t limit):
        connection_check(connection)
        self.store = store
        self.limit = limit
        self.connection = connection

    cdef int note(self) except -1:
        """Notes the waits. Each is a cache line at another address: a thousand of them take 0.1 ms."""
        cdef const Fair* fair = &self.store.counters.fair
        cdef uint32_t number = fair.askers[self.connection].first
        self.total = fair.askers[self.connection].waiters
        while number and <size_t>len(self.entries) < self.limit:
            self.entries.append((number, fair.waiters[number].node.serial, 0))
            number = fair.waiters[number].of_connection.next
        return 0

    cdef tuple row(self, uint32_t number, uint32_t place):
        return (item_cells(self.store, number)[0], *wait_cells(self.store, number, False))


# ---- limits of the server ------------------------------------------------------------------------------------------

cdef tuple rule_cells(const Limits* limits, uint32_t number):
    """Returns the name, the kind, the maximum, the period and the burst of a rule.

    For permits, the period and the burst are None.
    """
    cdef const Rule* rule = limits.rules + number
    cdef bytes name = PyBytes_FromStringAndSize(<const char*>limits.texts + rule.text, rule.size)
    if rule.is_prefix:
        name += b"*"
    if number <= limits.permits:
        return (name, "permits", rule.most, None, None)
    return (name, "rate", rule.most, rule.period_us / US_PER_S, rule.burst)


cdef class LimitsWalk:
    """Lists the loaded limits whose names contain `match`: of counters, then of rates, both by name."""

    cdef CounterStore store
    cdef bytes needle
    cdef uint32_t limit
    cdef uint32_t number        # of the last rule that was looked at
    cdef uint32_t generation
    cdef readonly uint64_t total
    cdef list found

    def __cinit__(self, CounterStore store not None, bytes match, uint32_t limit, *_):
        self.store = store
        self.needle = match
        self.limit = limit
        self.found = []

    def step(self):
        """Continues for at most 250 us, in a call of the store. Returns True when the rows are ready."""
        cdef const Limits* limits = &self.store.counters.limits
        cdef int _step
        with self.store:
            if self.generation != limits.generation:    # other limits were loaded meanwhile
                self.generation, self.number, self.total, self.found = limits.generation, 0, 0, []
            for _step in range(RULES_STEP):
                if self.number >= limits.count:
                    return True
                self.number += 1
                cells = rule_cells(limits, self.number)
                if self.needle in cells[0]:
                    self.total += 1
                    if <size_t>len(self.found) < self.limit:
                        self.found.append(cells)
            return False

    def rows(self):
        """Returns the rows, in the order of the rules."""
        return self.found


cdef class LimitWalk:
    """Finds the limits that apply to a name, as a counter and as a rate, and how much of it is in use."""

    cdef CounterStore store
    cdef bytes name
    cdef readonly uint64_t total
    cdef list found

    def __cinit__(self, CounterStore store not None, bytes name not None, uint32_t _limit):
        self.store = store
        self.name = name
        self.found = []

    def step(self):
        """Does everything at once. Returns True."""
        with self.store:
            for is_rate in (False, True):
                self.add(is_rate)
        self.total = len(self.found)
        return True

    cdef int add(self, bint is_rate) except -1:
        cdef Counters* counters = &self.store.counters
        cdef const uint8_t* name = <const uint8_t*>PyBytes_AS_STRING(self.name)
        cdef uint32_t size = <uint32_t>len(self.name)
        cdef uint32_t number = limits_find(&counters.limits, is_rate, name, size)
        cdef const Rule* rule = counters.limits.rules + number
        cdef uint32_t tag = name_tag(&counters.permits.table, name, size) ^ (RATE_TAG if is_rate else 0)
        cdef uint32_t record = table_find(&counters.permits.table, tag, name, size), used = 0
        cdef Pace pace
        cdef Rate rate
        if number == 0:
            return 0
        if record and is_rate:
            rate, pace = rate_at(counters, record), Pace(rule.period_us, rule.most, rule.burst)
            used = rule.burst - rate_left(&rate, &pace, self.store.now_ns)
        elif record:
            used = counter_at(counters, record).permit.consumption
        found, kind, most, period, burst = rule_cells(&counters.limits, number)
        waiters = waiters_of(counters, record, &permit_at(&counters.permits, record).record) if record else 0
        self.found.append((kind, found, most, period, burst, used, waiters))
        return 0

    def rows(self):
        """Returns the rows: one for a counter and one for a rate, if a limit applies to it."""
        return self.found


cdef tuple name_and_limit(parameters):
    """Reads the parameters of a table about one name."""
    values = read_parameters(parameters, {"name": name_of_bytes, "limit": integer(1, ROWS_MAX)}, {"limit": ROWS_MAX})
    return values["name"], values["limit"]


cdef tuple connection_and_limit(parameters):
    """Reads the parameters of a table about one connection."""
    values = read_parameters(parameters, {"connection": CONNECTION, "limit": integer(1, ROWS_MAX)}, {"limit": ROWS_MAX})
    return values["connection"], values["limit"]


def open_counters(CounterStore store, parameters):
    """Begins a walk through the counters."""
    match, sort, limit = ranked_parameters(parameters, tuple(ORDERS))
    return CountersWalk(store, match, limit, sort)


def open_holders(CounterStore store, parameters):
    """Begins a walk through the holders of one counter."""
    return HoldersWalk(store, *name_and_limit(parameters))


def open_holdings(CounterStore store, parameters):
    """Begins a walk through the holdings of one connection."""
    return HeldWalk(store, *connection_and_limit(parameters))


def open_rates(CounterStore store, parameters):
    """Begins a walk through the rates."""
    match, sort, limit = ranked_parameters(parameters, tuple(RATE_ORDERS))
    return RatesWalk(store, match, limit, sort)


def open_waiters(CounterStore store, parameters):
    """Begins a walk through the Takes that wait."""
    match, sort, limit = ranked_parameters(parameters, WAITER_SORTS)
    return WaitersWalk(store, match, limit, sort)


def open_queue(CounterStore store, parameters):
    """Begins a walk through the Takes that wait for one name."""
    return QueueWalk(store, *name_and_limit(parameters))


def open_waits(CounterStore store, parameters):
    """Begins a walk through the waits of one connection."""
    return WaitsWalk(store, *connection_and_limit(parameters))


def open_limits(CounterStore store, parameters):
    """Begins a walk through the limits of the server."""
    return LimitsWalk(store, *ranked_parameters(parameters, ("name",))[::2])


def open_limit(CounterStore store, parameters):
    """Begins a search for the limits of one name."""
    return LimitWalk(store, *name_and_limit(parameters))


# The columns of a limit after its name and kind.
NUMBERS = (
    Column("maximum", "integer", "permits of a counter, or units of a rate in a period"),
    Column("period", "seconds", "the period of a rate"),
    Column("burst", "integer", "units of a rate that can be taken at once after a long pause"),
)
# The columns of each table with waiting Takes. The most important come first, because a narrow screen shows only those.
AWAITED = Column("name", "name", "the name of the counter or rate for which the Take waits")
WAIT = (
    Column("amount", "integer", "how many permits or units the Take asks for"),
    Column("since", "since", "when the Take began to wait"),
    Column("left", "seconds", "how long until the Take is refused"),
)
WHO = (
    Column("connection", "connection", "the connection that waits"),
    Column("client", "text", "the name that the connection has stated"),
)
PLACE = (
    Column("key", "name", "the first 31 bytes of the Take's key; if the key is empty, the connection is the key"),
    Column("priority", "integer", "Takes with a higher priority are served first"),
    Column("weight", "integer", "the share of the Take's key"),
    Column("kind", "text", "permits or rate"),
    Column("items", "integer", "how many counters and rates the Take asks for"),
)

TABLES = (
    Table(
        "counters",
        "The counters. The counters with the largest value of `sort` come first. `match`: list only names that "
        "contain this text.",
        (
            Column("name", "name", "the counter's name"),
            Column("consumption", "integer", "permits that clients of this daemon have now"),
            Column("limit", "integer", "the maximum of the last Acquire"),
            Column("peak", "integer", "the most permits in use in the statistics window"),
            Column("waiters", "integer", "how many Takes wait for the counter"),
            Column(
                "everywhere",
                "integer",
                "of a shared counter: permits in use at all daemons, as of the authority's last answer",
            ),
        ),
        tuple(ORDERS),
        open_counters,
    ),
    Table(
        "rates",
        "The rates that are not full. The rates with the largest share in use come first. `match`: list only "
        "names that contain this text.",
        (
            Column("name", "name", "the rate's name"),
            Column("left", "integer", "units that can be taken now"),
            Column("burst", "integer", "units that can be taken at once after a long pause"),
            Column("limit", "integer", "units in a period, as in the last request"),
            Column("period", "seconds", "the period of the rate"),
            Column("full", "seconds", "how long until the rate is full again if nobody takes any units"),
            Column("waiters", "integer", "how many Takes wait for the rate"),
        ),
        tuple(RATE_ORDERS),
        open_rates,
    ),
    Table(
        "waiters",
        "The Takes that wait. The longest wait comes first. `match`: list only names that contain this text.",
        (
            Column("number", "integer", "number of the wait, which rises", detail=True),
            AWAITED, *WAIT, *WHO, *PLACE,
        ),
        WAITER_SORTS,
        open_waiters,
    ),
    Table(
        "limits",
        "The limits in the file counter.limits: of counters, then of rates. `match`: list only names that contain "
        "this text.",
        (
            Column("name", "name", "the name, or with a * the beginning of names"),
            Column("kind", "text", "permits or rate"),
            *NUMBERS,
        ),
        ("name",),
        open_limits,
    ),
    Table(
        "holders",
        "The connections that hold permits of the counter `name`, beginning with the latest.",
        (
            Column("connection", "connection", "the connection that holds the permits"),
            Column("amount", "integer", "how many permits the connection holds"),
            Column("since", "since", "when the connection acquired the first of these permits"),
            Column("name", "text", "the name that the connection has stated"),
            Column("grace", "until", "how long the connection, which has ended, can still be resumed"),
        ),
        (),
        open_holders,
        ("name",),
    ),
    Table(
        "holdings",
        "The permits that the connection `connection` holds, beginning with the latest.",
        (
            Column("name", "name", "the counter's name"),
            Column("amount", "integer", "how many permits the connection holds"),
            Column("since", "since", "when the connection acquired the first of these permits"),
        ),
        (),
        open_holdings,
        ("connection",),
    ),
    Table(
        "queue",
        "The Takes that wait for the counter or rate `name`, in the order in which they are served.",
        (Column("position", "integer", "the place in the queue; 1 is served next"), *WAIT, *WHO, *PLACE),
        (),
        open_queue,
        ("name",),
    ),
    Table(
        "waits",
        "What the connection `connection` waits for, beginning with the latest.",
        (AWAITED, *WAIT, *PLACE),
        (),
        open_waits,
        ("connection",),
    ),
    Table(
        "limit",
        "The limits in the file counter.limits that apply to `name`, as a counter and as a rate.",
        (
            Column("kind", "text", "permits or rate"),
            Column("rule", "name", "the name of the limit in the file"),
            *NUMBERS,
            Column("used", "integer", "permits in use, or units of the burst that are not available"),
            Column("waiters", "integer", "how many Takes wait for this name"),
        ),
        (),
        open_limit,
        ("name",),
    ),
)
