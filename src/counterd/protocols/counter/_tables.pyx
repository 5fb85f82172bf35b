"""The counter protocol's tables for people: the counters, the holders of a counter, and the holdings of a connection.

Floor 2. All are walks in slices, see engine/walk.pyx. The walk along the holders of a counter uses the cursor in the
region. When the holding at the cursor ends, the ledger moves the cursor to the next one.
"""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport uint8_t, uint32_t, uint64_t

from counterd.engine.permits cimport Holding, Permits, permit_at, walk_begin
from counterd.engine.table cimport Record, Table as NameTable, name_tag, table_find
from counterd.engine.walk cimport HoldingsWalk, RankedWalk
from counterd.protocols.counter._counters cimport Counter, Counters, counter_exists
from counterd.protocols.counter._rates cimport FLAG_RATE
from counterd.protocols.counter._stays cimport stay_about
from counterd.protocols.counter._store cimport CounterStore

from counterd.listing import CONNECTION, ROWS_MAX, Column, Table, name_of_bytes, ranked_parameters, read_parameters
from counterd.settings import integer

cdef enum:
    HOLDERS_STEP = 1024     # holdings that a step counts, each in a cache line from anywhere: 0.1 ms

cdef enum Order:
    CONSUMPTION
    USAGE
    PEAK
    LIMIT

cdef dict ORDERS = {"consumption": CONSUMPTION, "usage": USAGE, "peak": PEAK, "limit": LIMIT}


cdef inline uint32_t peak_of(const Counters* counters, const Counter* counter) noexcept:
    """Returns the peak of the current window, as in a Dump; the consumption if the window had no request yet."""
    return counter.peak if counter.window == counters.state.window else counter.permit.consumption


cdef class CountersWalk(RankedWalk):
    """Lists counters that have `match` in their names, the largest by `sort` first."""

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
        else:
            rank[0] = counter.limit
        return True

    cdef tuple row(self, bytes name, const Record* record):
        cdef const Counter* counter = <const Counter*>record
        return (name, counter.permit.consumption, counter.limit, peak_of(self.counters, counter))


cdef class HoldersWalk:
    """Counts the holders of a counter, and lists the latest `limit`, the latest first.

    A new walk takes the store's cursor over, and an earlier one then stops counting.
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
        """Returns the number of the counter's record, or 0."""
        cdef const NameTable* table = &self.store.counters.permits.table
        cdef const uint8_t* name = <const uint8_t*>PyBytes_AS_STRING(self.name)
        cdef uint32_t size = <uint32_t>len(self.name)
        return table_find(table, name_tag(table, name, size), name, size)

    def step(self):
        """Continues for 250 us at most, in a call of the store. Returns True when the rows are ready."""
        with self.store:
            if self.counted:
                self.collect()
                return True
            self.counted = self.count()
            return False

    cdef bint count(self) noexcept:
        """Counts more holders. Returns True when all are counted."""
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
            permits.state.cursor = permits.holdings[permits.state.cursor].next_of_record
        return False

    cdef int collect(self) except -1:
        """Collects the rows, in one go at the end, so that their connection numbers are current."""
        cdef uint32_t number = self.number()
        cdef uint32_t entry = permit_at(&self.store.counters.permits, number).holders if number else 0
        cdef Holding* holding
        self.found = []
        while entry and <size_t>len(self.found) < self.limit:
            holding = self.store.counters.permits.holdings + entry
            about = stay_about(&self.store.stays, holding.connection)
            self.found.append((holding.connection, holding.amount, holding.since_tenths, *about))
            entry = holding.next_of_record
        self.total = max(self.total, <uint64_t>len(self.found))
        return 0

    def rows(self):
        """Returns rows of (connection, amount, since, name, until).

        The last two are those of the connection: the name that it stated, and the end of its grace time, or None. Times
        are in tenths of a second on the caller's clock.
        """
        return self.found


cdef class HeldWalk(HoldingsWalk):
    """Lists the holdings of a connection, the latest first."""

    def __cinit__(self, CounterStore store not None, uint32_t connection, uint32_t limit):
        self.permits = &store.counters.permits

    cdef tuple row(self, bytes name, const Holding* holding):
        return (name, holding.amount, holding.since_tenths)


def open_counters(CounterStore store, parameters):
    """Begins a walk through the counters."""
    match, sort, limit = ranked_parameters(parameters, tuple(ORDERS))
    return CountersWalk(store, match, limit, sort)


def open_holders(CounterStore store, parameters):
    """Begins a walk along the holders of one counter."""
    values = read_parameters(parameters, {"name": name_of_bytes, "limit": integer(1, ROWS_MAX)}, {"limit": ROWS_MAX})
    return HoldersWalk(store, values["name"], values["limit"])


def open_holdings(CounterStore store, parameters):
    """Begins a walk along what one connection holds."""
    readers = {"connection": CONNECTION, "limit": integer(1, ROWS_MAX)}
    return HeldWalk(store, **read_parameters(parameters, readers, {"limit": ROWS_MAX}))


TABLES = (
    Table(
        "counters",
        "The counters, those with the largest value of `sort` first. `match`: only names that contain it.",
        (
            Column("name", "name", "the counter's name"),
            Column("consumption", "integer", "permits in use now"),
            Column("limit", "integer", "the maximum of the last Acquire"),
            Column("peak", "integer", "the largest consumption in the statistics window"),
        ),
        tuple(ORDERS),
        open_counters,
    ),
    Table(
        "holders",
        "The connections that hold permits of the counter `name`, the latest first.",
        (
            Column("connection", "connection", "the connection that holds them"),
            Column("amount", "integer", "number of permits"),
            Column("since", "since", "when the connection first acquired some"),
            Column("name", "text", "the name that the connection has stated"),
            Column("grace", "until", "the connection has ended; for so long it can still be resumed"),
        ),
        (),
        open_holders,
        ("name",),
    ),
    Table(
        "holdings",
        "The permits that the connection `connection` holds, the latest first.",
        (
            Column("name", "name", "the counter's name"),
            Column("amount", "integer", "number of permits"),
            Column("since", "since", "when the connection first acquired some"),
        ),
        (),
        open_holdings,
        ("connection",),
    ),
)
