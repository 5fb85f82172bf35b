"""The counter protocol's tables for people: the counters and rates, their holders and their waiters.

Floor 2 (ARCHITECTURE.md). All tables are walks in slices, see engine/walk.pyx. The walk through the holders of a
counter uses the cursor in the region. When the holding at the cursor ends, the ledger moves the cursor to the next
holding. Times refer to the store's last call, which is at most a second ago.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.fair cimport MOVES_MAX, START_MAX, Fair, Label, Waiter, queue_find, waiter_key, waiter_span
from counterd.engine.heap cimport Heap, Node, heap_insert, heap_remove
from counterd.engine.permits cimport Holding, Permits, permit_at, walk_begin
from counterd.engine.table cimport Record, name_bytes, name_tag, table_find
from counterd.engine.walk cimport BLOCK_WORK, HoldingsWalk, NotedWalk, RankedWalk, Walk
from counterd.protocols.counter._counters cimport (
    NS_PER_TENTH, Counter, Counters, counter_at, counter_everywhere, counter_exists,
)
from counterd.protocols.counter._limits cimport Limits, Rule, limits_find
from counterd.protocols.counter._messages cimport NO_TIME
from counterd.protocols.counter._rates cimport (
    FLAG_AWAITED, FLAG_RATE, RATE_TAG, Pace, Rate, rate_full_ns, rate_left,
)
from counterd.protocols.counter._resumptions cimport connection_about
from counterd.protocols.counter._shares cimport FLAG_SHARED
from counterd.protocols.counter._store cimport CounterStore
from counterd.protocols.counter._takes cimport Take, rate_at

from counterd.tables import CONNECTION, Column, Table, name_of_bytes

cdef enum:
    HOLDER_WORK = 12        # work of counting a holding, in a cache line from anywhere
    RULE_WORK = 62          # of reading a rule of the file
    WAIT_WORK = 83          # of a row about a Take, with a few such cache lines

cdef enum:                  # the orders, as in TABLES
    COUNTERS_BY_CONSUMPTION = 0
    COUNTERS_BY_USAGE
    COUNTERS_BY_PEAK
    COUNTERS_BY_LIMIT
    COUNTERS_BY_WAITERS
    RATES_BY_USAGE = 0
    RATES_BY_LIMIT
    RATES_BY_WAITERS
    WAITERS_BY_AGE = 0
    WAITERS_BY_AMOUNT

cdef double NS_PER_S = 1e9
cdef int64_t LONGEST_NS = <int64_t>NO_TIME * 1000000    # a wait by which clients say: without end
cdef double US_PER_S = 1e6


cdef inline uint32_t peak_of(const Counters* counters, const Counter* counter) noexcept:
    """Returns the peak of the current window, as in a Dump.

    If the window had no request yet, returns the consumption.
    """
    return counter.peak if counter.window == counters.state.window else counter.permit.consumption


cdef inline uint32_t named(const Counters* counters, bytes name, bint is_rate) noexcept:
    """Returns the number of the counter or the rate with this name, or 0."""
    cdef const uint8_t* text = <const uint8_t*>PyBytes_AS_STRING(name)
    cdef uint32_t size = <uint32_t>len(name)
    cdef uint32_t tag = name_tag(&counters.permits.table, text, size) ^ (RATE_TAG if is_rate else 0)
    return table_find(&counters.permits.table, tag, text, size)


cdef inline uint32_t queue_of(const Counters* counters, uint32_t number) noexcept:
    """Returns the queue of a counter or a rate, or 0 if nobody waits for it."""
    if number == 0 or not permit_at(&counters.permits, number).record.flags & FLAG_AWAITED:
        return 0
    return queue_find(&counters.fair, number, permit_at(&counters.permits, number).record.tag)


cdef inline uint32_t waiters_of(const Counters* counters, uint32_t number) noexcept:
    """Returns how many Takes wait for a counter or a rate."""
    cdef uint32_t queue = queue_of(counters, number)
    return counters.fair.queues[queue].waiters if queue else 0


cdef class RecordsWalk(RankedWalk):
    """Walks through the records of counters and rates, or through what waits for them."""

    cdef Counters* counters

    def __cinit__(self, CounterStore store not None, *_, **_parameters):
        self.counters = &store.counters
        self.table = &store.counters.permits.table


cdef class CountersWalk(RecordsWalk):
    """Lists counters whose names contain `match`, with the largest by `sort` first."""

    cdef bint rank(self, uint32_t number, const Record* record, uint64_t* rank) noexcept:
        cdef const Counter* counter = <const Counter*>record
        if record.flags & FLAG_RATE or not counter_exists(self.counters, counter):
            return False
        if self.sort == COUNTERS_BY_CONSUMPTION:
            rank[0] = counter.permit.consumption
        elif self.sort == COUNTERS_BY_USAGE:
            rank[0] = (<uint64_t>counter.permit.consumption << 32) // max(<uint32_t>1, counter.limit)
        elif self.sort == COUNTERS_BY_PEAK:
            rank[0] = peak_of(self.counters, counter)
        elif self.sort == COUNTERS_BY_LIMIT:
            rank[0] = counter.limit
        else:
            rank[0] = waiters_of(self.counters, number)
            self.work -= BLOCK_WORK if rank[0] else 0
        return True

    cdef tuple row(self, uint32_t number, const Record* record, bytes name):
        cdef const Counter* counter = <const Counter*>record
        return (
            name, counter.permit.consumption, counter.limit, peak_of(self.counters, counter),
            waiters_of(self.counters, number),
            counter_everywhere(self.counters, number) if record.flags & FLAG_SHARED else None,
        )


cdef class RatesWalk(RecordsWalk):
    """Lists rates whose names contain `match`, with the largest by `sort` first.

    The numbers of a rate are those of the last request.
    """

    cdef Pace read(self, uint32_t number, Rate* rate) noexcept:
        """Returns the numbers of a rate, and sets *rate."""
        rate[0] = rate_at(self.counters, number)
        self.work -= BLOCK_WORK
        return Pace(rate.state.period_us, rate.state.limit, rate.state.burst)

    cdef bint rank(self, uint32_t number, const Record* record, uint64_t* rank) noexcept:
        cdef Rate rate
        cdef Pace pace
        if not record.flags & FLAG_RATE:
            return False
        if self.sort == RATES_BY_WAITERS:
            rank[0] = waiters_of(self.counters, number)
            return True
        pace = self.read(number, &rate)
        if self.sort == RATES_BY_LIMIT:
            rank[0] = pace.limit
        else:
            rank[0] = <uint64_t>(pace.burst - rate_left(&rate, &pace, self.store.now_ns)) << 32
            rank[0] //= max(pace.burst, <uint32_t>1)
        return True

    cdef tuple row(self, uint32_t number, const Record* record, bytes name):
        cdef Rate rate
        cdef Pace pace = self.read(number, &rate)
        cdef int64_t full_ns = rate_full_ns(&rate, &pace)
        return (
            name, rate_left(&rate, &pace, self.store.now_ns), pace.burst, pace.limit, pace.period_us / US_PER_S,
            max(full_ns - self.store.now_ns, 0) / NS_PER_S, waiters_of(self.counters, number),
        )


cdef class HoldersWalk(Walk):
    """Counts the holders of a counter, and lists the latest `limit` holders, beginning with the latest.

    A new walk takes the store's cursor over; an earlier walk then stops counting.
    """

    cdef Counters* counters
    cdef uint64_t ticket    # from walk_begin(); 0 = the walk has not begun
    cdef bint is_counted

    def __cinit__(self, CounterStore store not None, *_, **_parameters):
        self.counters = &store.counters

    cdef bint go_on(self) except -1:
        cdef Permits* permits = &self.counters.permits
        if self.is_counted:
            self.collect()
            return True
        if self.ticket == 0:
            self.ticket = walk_begin(permits, named(self.counters, self.name, False))
        while self.ticket == permits.state.walks and permits.state.cursor:
            if self.work <= 0:
                return False
            self.work -= HOLDER_WORK
            self.total += 1
            permits.state.cursor = permits.holdings[permits.state.cursor].of_record.next
        self.is_counted = True
        return False

    cdef int collect(self) except -1:
        """Collects all rows together at the end, so that their connection numbers are current."""
        cdef uint32_t number = named(self.counters, self.name, False)
        cdef uint32_t entry = permit_at(&self.counters.permits, number).holders if number else 0
        cdef Holding* holding
        while entry and <size_t>len(self.found) < self.limit:
            holding = self.counters.permits.holdings + entry
            about = connection_about(&(<CounterStore>self.store).resumptions, holding.connection)
            self.found.append((holding.connection, holding.amount, holding.since_tenths, *about))
            entry = holding.of_record.next
        self.total = max(self.total, <uint64_t>len(self.found))
        return 0


cdef class HeldWalk(HoldingsWalk):
    """Lists the holdings of a connection, beginning with the latest."""

    def __cinit__(self, CounterStore store not None, *_, **_parameters):
        self.permits = &store.counters.permits


# ---- who waits -----------------------------------------------------------------------------------------------------

cdef inline Record* awaited(const Counters* counters, uint32_t number) noexcept:
    """Returns the counter or rate for which a Take waits."""
    return &permit_at(&counters.permits, counters.fair.queues[counters.fair.waiters[number].queue].record).record


cdef tuple wait_cells(CounterStore store, uint32_t number, bint says_who):
    """Returns the cells of a waiting Take: those of WAIT, of WHO if `says_who`, and of PLACE."""
    cdef const Waiter* waiter = store.counters.fair.waiters + number
    cdef const Take* take = store.takes.waiting + number
    cdef const Label* label = store.counters.fair.labels + waiter.flow
    cdef int64_t due_ns = take.timer.due_ns
    key = PyBytes_FromStringAndSize(<const char*>label.text, label.size) if waiter.flow else b""
    cdef bint is_endless = due_ns == INT64_MAX or due_ns - take.since_ns >= LONGEST_NS
    left = None if is_endless else max(due_ns - store.now_ns, 0) / NS_PER_S
    kind = "rate" if awaited(&store.counters, number).flags & FLAG_RATE else "permits"
    who = (waiter.connection, connection_about(&store.resumptions, waiter.connection)[0]) if says_who else ()
    since = take.since_ns // <int64_t>NS_PER_TENTH
    return (waiter.cost, since, left, *who, key, waiter.priority, waiter.weight, kind, take.items)


cdef class WaitersWalk(RecordsWalk):
    """Lists Takes that wait for names that contain `match`, with the largest by `sort` first."""

    cdef uint32_t last(self) noexcept:
        return self.counters.fair.state.waiters.fresh

    cdef Record* find(self, uint32_t number, uint64_t* rank) noexcept:
        cdef const Waiter* waiter = self.counters.fair.waiters + number
        cdef Record* record
        if waiter.connection == 0:
            return NULL
        self.work -= BLOCK_WORK
        record = awaited(self.counters, number)
        rank[0] = waiter.cost if self.sort == WAITERS_BY_AMOUNT else <uint64_t>0xffffffffffffffff - waiter.node.serial
        return record if self.matches(record) else NULL

    cdef tuple row(self, uint32_t number, const Record* record, bytes name):
        return (
            self.counters.fair.waiters[number].node.serial, name, *wait_cells(<CounterStore>self.store, number, True)
        )


cdef class TakesWalk(NotedWalk):
    """Lists the Takes of a list. An entry is (number, serial, position), and position is 0 if the list is not a queue.

    A row begins with the position, or else with the name for which the Take waits.
    """

    cdef Counters* counters

    def __cinit__(self, CounterStore store not None, *_, **_parameters):
        self.counters = &store.counters

    cdef tuple row(self, object entry):
        cdef uint32_t number = entry[0]
        cdef const Waiter* waiter = self.counters.fair.waiters + number
        if waiter.connection == 0 or waiter.node.serial != entry[1]:
            return None
        self.work -= WAIT_WORK
        if entry[2]:
            return (entry[2], *wait_cells(<CounterStore>self.store, number, True))
        if not self.room_for(&self.counters.permits.table, awaited(self.counters, number)):
            return None
        name = name_bytes(&self.counters.permits.table, awaited(self.counters, number))
        return (name, *wait_cells(<CounterStore>self.store, number, False))


cdef struct Place:          # of a waiter in the order in which a queue is served
    Node node
    uint32_t number


cdef class QueueWalk(TakesWalk):
    """Lists Takes that wait for a name, in the order in which they are served: the counter's, then the rate's."""

    cdef Place* places          # from 1 on
    cdef uint32_t used
    cdef Heap heap              # heaps of places: of those that may be next, and of those behind the one of a flow

    def __cinit__(self, CounterStore store not None, uint32_t limit, **_parameters):
        # Each waiter that is noted brings in its two children, the first one behind it, and that one's two children.
        self.places = <Place*>PyMem_RawMalloc((5 * <size_t>limit + 2) * sizeof(Place))
        if self.places == NULL:
            raise MemoryError("no room for a walk")
        self.heap.base, self.heap.stride = <uint8_t*>self.places, sizeof(Place)

    def __dealloc__(self):
        PyMem_RawFree(self.places)

    cdef void push(self, uint32_t* first, uint32_t number) noexcept:
        """Adds a waiter, if there is one, to the heap of places that begins at *first."""
        cdef const Waiter* waiter = self.counters.fair.waiters + number
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
        for is_rate in (False, True):
            self.note_queue(queue_of(self.counters, named(self.counters, self.name, is_rate)))
        return 0

    cdef uint64_t count(self) noexcept:
        cdef uint64_t counter = waiters_of(self.counters, named(self.counters, self.name, False))
        return counter + waiters_of(self.counters, named(self.counters, self.name, True))

    cdef int note_queue(self, uint32_t queue) except -1:
        cdef const Fair* fair = &self.counters.fair
        cdef size_t start = len(self.entries)
        cdef dict behind = {}   # by flow: the first place of the heap of those behind its one that may be next
        cdef const Waiter* waiter
        cdef uint64_t begun, ends, virtual = fair.queues[queue].virtual
        cdef uint32_t first = 0, others, number, place
        if queue == 0:
            return 0
        self.used = 0
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


cdef class WaitsWalk(TakesWalk):
    """Lists the waits of a connection, beginning with the latest."""

    cdef int note(self) except -1:
        cdef const Fair* fair = &self.counters.fair
        cdef uint32_t number = fair.askers[self.connection].first
        while number and <size_t>len(self.entries) < self.limit:
            self.entries.append((number, fair.waiters[number].node.serial, 0))
            number = fair.waiters[number].of_connection.next
        return 0

    cdef uint64_t count(self) noexcept:
        return self.counters.fair.askers[self.connection].waiters


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


cdef class LimitsWalk(Walk):
    """Lists the loaded limits whose names contain `match`: of counters, then of rates, both by name."""

    cdef uint32_t number        # of the last rule that was looked at
    cdef uint32_t generation

    cdef bint go_on(self) except -1:
        cdef const Limits* limits = &(<CounterStore?>self.store).counters.limits
        if self.generation != limits.generation:    # other limits were loaded meanwhile
            self.generation, self.number, self.total, self.found = limits.generation, 0, 0, []
        while self.number < limits.count:
            if self.work <= 0:
                return False
            self.work -= RULE_WORK
            self.number += 1
            cells = rule_cells(limits, self.number)
            if self.match in cells[0]:
                self.total += 1
                if <size_t>len(self.found) < self.limit:
                    self.found.append(cells)
        return True


cdef class LimitWalk(Walk):
    """Finds the limits that apply to a name, as a counter and as a rate, and how much of it is in use, all at once."""

    cdef bint go_on(self) except -1:
        for is_rate in (False, True):
            self.add(is_rate)
        self.total = len(self.found)
        return True

    cdef int add(self, bint is_rate) except -1:
        cdef Counters* counters = &(<CounterStore?>self.store).counters
        cdef uint32_t number = limits_find(
            &counters.limits, is_rate, <const uint8_t*>PyBytes_AS_STRING(self.name), <uint32_t>len(self.name)
        )
        cdef const Rule* rule = counters.limits.rules + number
        cdef uint32_t record = named(counters, self.name, is_rate), used = 0
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
        self.found.append((kind, found, most, period, burst, used, waiters_of(counters, record)))
        return 0


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
        ("consumption", "usage", "peak", "limit", "waiters"),
        CountersWalk,
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
        ("usage", "limit", "waiters"),
        RatesWalk,
    ),
    Table(
        "waiters",
        "The Takes that wait. The longest wait comes first. `match`: list only names that contain this text.",
        (
            Column("number", "integer", "number of the wait, which rises", detail=True),
            AWAITED, *WAIT, *WHO, *PLACE,
        ),
        ("age", "amount"),
        WaitersWalk,
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
        LimitsWalk,
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
        HoldersWalk,
        {"name": name_of_bytes},
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
        HeldWalk,
        {"connection": CONNECTION},
    ),
    Table(
        "queue",
        "The Takes that wait for the counter or rate `name`, in the order in which they are served.",
        (Column("position", "integer", "the place in the queue; 1 is served next"), *WAIT, *WHO, *PLACE),
        (),
        QueueWalk,
        {"name": name_of_bytes},
    ),
    Table(
        "waits",
        "What the connection `connection` waits for, beginning with the latest.",
        (AWAITED, *WAIT, *PLACE),
        (),
        WaitsWalk,
        {"connection": CONNECTION},
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
        LimitWalk,
        {"name": name_of_bytes},
    ),
)
