"""What load processes write while they run and their parent reads. See _board.pxd.

A side.
"""

from posix.mman cimport MAP_ANONYMOUS, MAP_FAILED, MAP_NORESERVE, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap

from cpython.mem cimport PyMem_Calloc, PyMem_Free

from counterd.net.clock cimport monotonic_ns

OUTCOME_NAMES = (
    "answered", "read", "no such name", "granted", "released", "refused", "not held", "updated", "written", "purged",
    "too many requests", "inserted", "reserved", "deleted", "taken",
    "delayed", "cancelled", "failed",
)
ERROR_NAMES = (
    "connection refused", "connection reset", "closed by the server", "too many open files", "network error",
    "wrong answer", "error reply", "unanswered", "not given back",
)
STAGE_NAMES = ("connecting", "filling", "ready", "running", "over", "gone")
KIND_NAMES = ("latency", "service", "give_back", "queue")


cdef class Board:
    """connections: of all processes; names: how many have their held permits counted, 0 = none; tokens: whether one
    may not be told twice."""

    def __cinit__(self, int processes, uint32_t connections, uint32_t names, bint tokens=False):
        cdef void* memory
        cdef size_t cells
        self.names, self.token_places = names, TOKEN_PLACES if tokens else 0
        self.connections = connections
        cells = <size_t>connections + names + self.token_places
        self.size = sizeof(Orders) + processes * sizeof(Sheet) + cells * sizeof(int64_t)
        memory = mmap(NULL, self.size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if memory == MAP_FAILED:
            raise MemoryError(f"no room for {self.size} bytes that the load processes share")
        self.orders = <Orders*>memory
        self.sheets = <Sheet*>(self.orders + 1)
        self.grants = <uint64_t*>(self.sheets + processes)
        self.held = <int64_t*>(self.grants + connections) if names else NULL
        self.tokens = self.grants + connections + names if tokens else NULL
        self.processes = processes
        self.taken = <uint64_t*>PyMem_Calloc(processes * KINDS * COUNTS, sizeof(uint64_t))
        if self.taken == NULL:
            raise MemoryError("no room for histograms")

    def __dealloc__(self):
        if self.orders != NULL:
            munmap(self.orders, self.size)
        PyMem_Free(self.taken)

    def begin(self, int64_t start_ns, int64_t measure_ns, int64_t end_ns):
        """Lets the processes begin, once all are ready."""
        self.orders.measure_ns = measure_ns
        self.orders.end_ns = end_ns
        self.orders.start_ns = start_ns

    def stop(self):
        """No more requests."""
        if not self.orders.stop:
            self.orders.stop = monotonic_ns()

    def stopped_ns(self):
        """When somebody ended it early, 0 = nobody did."""
        return self.orders.stop

    def leave(self):
        """Close the connections."""
        self.orders.leave = 1

    def stages(self):
        """Of each process, by name."""
        return [STAGE_NAMES[self.sheets[i].stage] for i in range(self.processes)]

    def totals(self):
        """The numbers of all sheets together, by name."""
        cdef int i
        fields = dict.fromkeys(("connected", "filled", "requests", "late", "unsent", "cpu_ns", "errors"), 0)
        for i in range(self.processes):
            fields["connected"] += self.sheets[i].connected
            fields["filled"] += self.sheets[i].filled
            fields["requests"] += self.sheets[i].requests
            fields["late"] += self.sheets[i].late
            fields["unsent"] += self.sheets[i].unsent
            fields["cpu_ns"] += self.sheets[i].cpu_ns
            fields["errors"] += sum(self.sheets[i].errors[k] for k in range(<int>ERROR_KINDS))
        return fields

    def granted(self):
        """How often each connection was granted something in the measured time."""
        cdef uint32_t i
        return [self.grants[i] for i in range(self.connections)]

    def last_ns(self):
        """When the last answer came, 0 = none has."""
        return max(self.sheets[i].last_ns for i in range(self.processes))

    def outcomes(self):
        """{name: answers} of the measured time, those that there were."""
        totals = [sum(self.sheets[i].outcomes[k] for i in range(self.processes)) for k in range(<int>OUTCOMES)]
        return {name: total for name, total in zip(OUTCOME_NAMES, totals) if total}

    def errors(self):
        """{name: how many}, of the whole run."""
        totals = [sum(self.sheets[i].errors[k] for i in range(self.processes)) for k in range(<int>ERROR_KINDS)]
        return {name: total for name, total in zip(ERROR_NAMES, totals) if total}

    def evidence(self):
        """What was wrong about the first wrong answer of each process."""
        return [text for i in range(self.processes) if (text := self.sheets[i].evidence.decode("utf-8", "replace"))]

    def violations(self):
        """(how many times there was more than there may be, or a token twice, the first of each process)"""
        found = [text for i in range(self.processes) if (text := self.sheets[i].violation.decode("utf-8", "replace"))]
        return sum(self.sheets[i].violations for i in range(self.processes)), found

    def record(self, str kind not None, int64_t value):
        """As the first process would: for tests of the layout."""
        histogram_record(self.sheets[0].counts[KIND_NAMES.index(kind)], value)

    def take(self, str kind not None):
        """[(nanoseconds, how many)]: what was counted since this was last asked."""
        cdef int which = KIND_NAMES.index(kind)
        cdef uint64_t* counts
        cdef uint64_t* taken
        cdef uint64_t fresh, now
        cdef int i, k, bucket
        found = []
        for k in range(COUNTS):
            fresh = 0
            for i in range(self.processes):
                counts = self.sheets[i].counts[which]
                taken = self.taken + (i * KINDS + which) * COUNTS
                now = counts[k]
                fresh += now - taken[k]
                taken[k] = now
            if fresh:
                bucket = 0 if k < SUB_BUCKETS else k // (SUB_BUCKETS // 2) - 1
                found.append((<int64_t>(k - bucket * (SUB_BUCKETS // 2)) << bucket, fresh))
        return found

    def all_held(self):
        """{number of a name: resources that are held of it}, those that are."""
        cdef uint32_t i
        return {i: self.held[i] for i in range(self.names) if self.held[i]}

    def jobs(self):
        """(numbers of the jobs that have to be there, of those that may be)"""
        known = self.all_held()
        stored = {number for number, flags in known.items() if flags & STORED and not flags & ENDING}
        return stored, known.keys() - stored
