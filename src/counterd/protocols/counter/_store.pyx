"""The counter protocol's store: the counters, and statistics of requests.

Floor 2. The counters are in the region (_counters.pxd); the statistics of requests belong to this process.
"""

from collections import Counter as Tally

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd._core cimport SLICE_STEPS, Store
from counterd.engine.audit cimport audit_chains, audit_permits, audit_ring
from counterd.engine.chains cimport BLOCK_SIZE
from counterd.engine.idle_ring cimport FLAG_IN_RING
from counterd.engine.permits cimport PERMIT_CELL, Holding, Permits, permit_at, permits_leave
from counterd.engine.pool cimport Pool
from counterd.engine.table cimport RECORD_USED, name_bytes
from counterd.protocols.counter._counters cimport (
    Counter, Counters, CountersState, counter_at, counter_exists, counters_begin, counters_give_back, counters_reserve,
    sweep, sweep_begin,
)
from counterd.protocols.counter._messages cimport (
    ACQUIRE, DUMP, GET, INVALID_ARGUMENTS, NOOP, NOT_ACQUIRED, NOT_FOUND, OPCODES, OUT_OF_MEMORY, RELEASE,
    RESOURCE_NOT_AVAILABLE, STATS, UNKNOWN_COMMAND,
)

COMMAND_NAMES = {NOOP: "noop", GET: "get", ACQUIRE: "acquire", RELEASE: "release", STATS: "stats", DUMP: "dump"}
REFUSAL_NAMES = {
    NOT_FOUND: "not_found", INVALID_ARGUMENTS: "invalid_arguments", RESOURCE_NOT_AVAILABLE: "not_available",
    NOT_ACQUIRED: "not_acquired", UNKNOWN_COMMAND: "unknown_command", OUT_OF_MEMORY: "out_of_memory",
}
PARSED_REFUSALS = (NOT_FOUND, RESOURCE_NOT_AVAILABLE, NOT_ACQUIRED, OUT_OF_MEMORY)
# The names of the reference implementation, in its order. counterd's own names follow these.
REFERENCE_FIGURES = (
    "objects", "total_objects", "used_memory", "conflicts", "gc_count", "last_gc_elapsed", "total_gc_elapsed",
    "curr_connections", "total_connections",
)

assert sizeof(Counter) == PERMIT_CELL


cdef class CounterStore(Store):
    """The store; open_store() in _session.pyx makes it.

    buckets: the most counters. holdings: the most holdings, in all. holdings_per_connection: the most of one
    connection; 0 is no limit. name_memory: bytes for names that do not fit into their record. figures: called for each
    Stats, returns the figures of the floors above by name.

    Raises ValueError or OverflowError for impossible sizes, MemoryError if they cannot be mapped.
    """

    def __cinit__(self, *, uint32_t buckets, uint32_t holdings, uint32_t holdings_per_connection=0,
                  uint64_t name_memory, figures, bytes hash_key, **_):
        if buckets == 0:
            raise ValueError("buckets must be at least 1")
        counters_reserve(
            &self.counters, &self.region, &self.connections, buckets, holdings, name_memory // BLOCK_SIZE
        )
        self.map_region(hash_key)
        counters_begin(&self.counters, self.header.key)
        self.others = figures
        self.counters.permits.state.holdings_per_connection = holdings_per_connection or holdings

    def limit_holdings(self, uint32_t holdings_per_connection):
        """Sets how many holdings one connection may have from now on; 0 is no limit."""
        cdef Permits* permits = &self.counters.permits
        with self:
            permits.state.holdings_per_connection = holdings_per_connection or permits.state.holdings.capacity

    cdef void forget(self, uint32_t connection) noexcept:
        if permits_leave(&self.counters.permits, connection):
            self.stirred = True

    cdef int64_t due_ns(self) except? -2:
        return 0 if self.counters.permits.state.leaving_first or self.counters.ring.state.sweep_left else -1

    cdef int run_due(self) except -1:
        """Gives back holdings of ended connections, then sweeps idle counters."""
        cdef CountersState* state = self.counters.state
        cdef int steps = counters_give_back(&self.counters, SLICE_STEPS)
        if self.counters.ring.state.sweep_left == 0 or steps == 0:
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

    def begin_window(self, uint32_t number):
        """Begins a stats window. Ignores a number that is not higher than the last one.

        Touches no counter: idle counters of earlier windows no longer exist from now on, and the sweep frees their
        records.
        """
        cdef CountersState* state = self.counters.state
        with self:
            if number > state.window:
                state.window = number
                state.idle = 0
                sweep_begin(&self.counters)
                self.stirred = True

    def held(self):
        """As Store.held: holdings."""
        with self:
            return self.counters.permits.state.holdings.used

    def holdings_of(self, uint32_t connection):
        """As Store.holdings_of: holdings."""
        with self:
            if connection > self.connections.pool.fresh:
                return 0
            return self.counters.permits.holders[connection].holdings

    def leases(self, size_t limit):
        """As Store.leases: the first holdings, by connection.

        Includes holdings of ended connections, which net no longer knows. Checks every connection number ever used,
        which takes about 1 ns each.
        """
        cdef Permits* permits = &self.counters.permits
        cdef Holding* holding
        cdef uint32_t entry, connection
        cdef list found = []
        with self:
            for connection in range(1, self.connections.pool.fresh + 1):
                entry = permits.holders[connection].first
                while entry:
                    if <size_t>len(found) >= limit:
                        return found
                    holding = permits.holdings + entry
                    name = name_bytes(&permits.table, &permit_at(permits, holding.record).record)
                    found.append((connection, name, holding.amount, holding.since_tenths))
                    entry = holding.next_of_connection
        return found

    cdef int audit_parts(self) except -1:
        """As Store.audit_parts: checks the counters, their holdings and the ring of idle counters."""
        cdef Counters* counters = &self.counters
        cdef uint32_t number, busy = 0, idle = 0
        cdef Counter* counter
        audit_chains(&counters.chains, audit_permits(&counters.permits))
        audit_ring(&counters.ring, &counters.permits.table)
        for number in range(1, counters.permits.table.pool.fresh + 1):
            counter = counter_at(counters, number)
            if not counter.permit.record.flags & RECORD_USED:
                continue
            busy += counter.permit.consumption != 0
            idle += counter.permit.consumption == 0 and counter_exists(counters, counter)
            if counter.permit.consumption == 0 and not counter.permit.record.flags & FLAG_IN_RING:
                raise AssertionError(f"record {number} is idle, not in the ring")
        if busy != counters.state.busy or idle != counters.state.idle:
            raise AssertionError(
                f"{busy} busy and {idle} idle, {counters.state.busy} and {counters.state.idle} counted"
            )
        return 0

    cdef dict figures(self):
        cdef dict figures = Store.figures(self)
        cdef Permits* permits = &self.counters.permits
        cdef CountersState* state = self.counters.state
        cdef Pool* blocks = self.counters.chains.pool
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
        })
        for opcode, name in COMMAND_NAMES.items():
            figures[f"command:{name}"] = self.requests[<int>opcode]
        for status, name in REFUSAL_NAMES.items():
            figures[f"refused:{name}"] = sum([self.refusals[opcode][<int>status] for opcode in range(OPCODES + 1)])
        return figures

    def outcomes(self):
        """As Store.outcomes. "ok" is the number of valid requests minus their refusals."""
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
        self.draining = True

    cdef bytes stats_body(self):
        """Returns the body of a Stats: name length, value length, name, value for each figure. Section "Stats"."""
        cdef dict figures = self.figures()
        ordered = {name: figures.pop(name) for name in REFERENCE_FIGURES}
        ordered.update((f"command:{name}", figures.pop(f"command:{name}")) for name in COMMAND_NAMES.values())
        ordered.update(self.others())  # must not call the store, because a call is under way
        ordered.update(figures)
        pieces = []
        for name, value in ordered.items():
            name = name.encode("ascii")
            value = str(value).encode("ascii")
            pieces.append(len(name).to_bytes(2, "big") + len(value).to_bytes(2, "big") + name + value)
        return b"".join(pieces)
