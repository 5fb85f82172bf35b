"""The memory that load processes write while they run, and that their parent reads. See _board.pxd.

Floor 5 (ARCHITECTURE.md).
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
    """connections: of all processes.

    names: for how many names held permits are counted, 0 for none. tokens: whether it is an error if the server grants
    a token twice.
    """

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
        """Lets the processes begin. Call it when all processes are ready."""
        self.orders.measure_ns = measure_ns
        self.orders.end_ns = end_ns
        self.orders.start_ns = start_ns

    def stop(self):
        """Makes the processes send no more requests."""
        if not self.orders.stop:
            self.orders.stop = monotonic_ns()

    def stopped_ns(self):
        """Returns when the run was ended early, or 0 if nobody ended it early."""
        return self.orders.stop

    def leave(self):
        """Makes the processes close their connections."""
        self.orders.leave = 1

    def stages(self):
        """Returns the names of the stages of all processes."""
        return [STAGE_NAMES[self.sheets[i].stage] for i in range(self.processes)]

    def totals(self):
        """Returns the sums of the numbers of all sheets, by name."""
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
        """Returns how often each connection was granted something in the measured time."""
        cdef uint32_t i
        return [self.grants[i] for i in range(self.connections)]

    def last_ns(self):
        """Returns when the last reply arrived, or 0 if none has arrived."""
        return max(self.sheets[i].last_ns for i in range(self.processes))

    def outcomes(self):
        """Returns {name: replies} for the measured time, without names that have no replies."""
        totals = [sum(self.sheets[i].outcomes[k] for i in range(self.processes)) for k in range(<int>OUTCOMES)]
        return {name: total for name, total in zip(OUTCOME_NAMES, totals) if total}

    def errors(self):
        """Returns {name: number of errors} for the whole run."""
        totals = [sum(self.sheets[i].errors[k] for i in range(self.processes)) for k in range(<int>ERROR_KINDS)]
        return {name: total for name, total in zip(ERROR_NAMES, totals) if total}

    def evidence(self):
        """Returns what was wrong about the first wrong reply of each process."""
        return [text for i in range(self.processes) if (text := self.sheets[i].evidence.decode("utf-8", "replace"))]

    def violations(self):
        """Returns how often too much was held or a token was granted twice, and the first case of each process."""
        found = [text for i in range(self.processes) if (text := self.sheets[i].violation.decode("utf-8", "replace"))]
        return sum(self.sheets[i].violations for i in range(self.processes)), found

    def record(self, str kind not None, int64_t value):
        """Records values as the first process would. Only tests of the layout call this method."""
        histogram_record(self.sheets[0].counts[KIND_NAMES.index(kind)], value)

    def take(self, str kind not None):
        """Returns [(nanoseconds, count)]: what was counted since the previous call."""
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
        """Returns {number of a name: permits that are held}, without names of which nothing is held."""
        cdef uint32_t i
        return {i: self.held[i] for i in range(self.names) if self.held[i]}

    def jobs(self):
        """Returns the numbers of the jobs that must exist, and of the jobs that may exist."""
        known = self.all_held()
        stored = {number for number, flags in known.items() if flags & STORED and not flags & ENDING}
        return stored, known.keys() - stored
