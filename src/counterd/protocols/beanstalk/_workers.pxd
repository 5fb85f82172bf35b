# The connections of the beanstalk protocol: the tubes that each uses and watches, its reserved jobs, and its wait.
#
# Floor 2, header only. A worker is the record of a connection, by its number. A watch is a pair of connection and tube.
#
# Invariants (audit_workers checks them):
# - a worker is open from worker_enter() until worker_leave(). After that it has no watches and does not wait; it is in
#   the queue of leavers until its last job was given back;
# - exactly the watches of waiting workers are in the wait queues of their tubes. A watch enters at the end of a queue,
#   so the first one has waited longest.

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.connections cimport CONNECTIONS_MAX, Connections, connections_put
from counterd.engine.debug cimport debug_check
from counterd.engine.list cimport Ends, Links, List, ends_append, ends_remove
from counterd.engine.pool cimport Pool, pool_put, pool_take
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.wheel cimport (
    Timer, Timers, timer_is_armed, timers_arm, timers_begin, timers_disarm, timers_reserve,
)
from counterd.protocols.beanstalk._tubes cimport LINE_MARKS, Tube, Tubes, tube_at, tube_settle

cdef enum:
    WATCHED_MAX = 4096      # tubes that a connection may watch: a reserve looks at each of them
    WATCH_COST = 32         # bytes


cdef struct Watch:
    uint32_t connection
    uint32_t tube
    Links of_connection     # in the order of the watch commands; its `next` also links the free list
    Links of_tube           # in the tube's wait queue
    uint32_t spare[2]


cdef struct Worker:
    uint32_t used           # the tube that it uses; 0: the connection is not open
    Ends watched            # its watches
    uint32_t watches
    uint32_t reserved       # first of the heap of its jobs, by the end of their time to run
    uint32_t jobs
    uint32_t next_leaving   # connection
    uint32_t text           # bytes of the lines that name the tubes that it watches
    uint8_t is_waiting
    uint8_t is_producer     # has sent a put
    uint8_t is_worker       # has sent a reserve
    uint8_t command         # the reserve command that waits, or was the last to wait
    int64_t wait_until_ns   # if it waits; INT64_MAX: for ever
    Timer timer             # armed for its next deadline or earlier


cdef struct WorkersState:   # in the region
    uint32_t leaving_first  # connections
    uint32_t leaving_last
    uint32_t waiting
    uint32_t producers
    uint32_t workers
    uint64_t given_back     # jobs of ended connections that were given back, in total


cdef struct Workers:        # this process's view
    WorkersState* state
    Pool* pool              # of watches
    Watch* watches
    Worker* records         # by connection
    Timers timers
    Connections* connections
    uint32_t capacity       # watches


cdef inline int workers_reserve(Workers* workers, Region* region, Connections* connections, uint32_t watches) except -1:
    """Reserves memory for CONNECTIONS_MAX connections and `watches` watches."""
    workers.connections = connections
    workers.capacity = watches
    region_reserve(region, b"workers", sizeof(WorkersState), <void**>&workers.state)
    region_reserve(region, b"watches", sizeof(Pool), <void**>&workers.pool)
    region_reserve(region, b"watches", (<size_t>watches + 1) * sizeof(Watch), <void**>&workers.watches)
    region_reserve(region, b"workers", (CONNECTIONS_MAX + 1) * sizeof(Worker), <void**>&workers.records)
    timers_reserve(&workers.timers, region, b"workers")
    return 0


cdef inline void workers_begin(Workers* workers, int64_t now_ns) noexcept nogil:
    """Call this once, after the region was mapped."""
    workers.pool.capacity = workers.capacity
    timers_begin(&workers.timers, &workers.records.timer, sizeof(Worker), now_ns)


# ---- watches -------------------------------------------------------------------------------------------------------

cdef inline List watches_by_connection(const Workers* workers) noexcept nogil:
    return List(workers.watches, sizeof(Watch), &workers.watches.of_connection)


cdef inline List watches_by_tube(const Workers* workers) noexcept nogil:
    return List(workers.watches, sizeof(Watch), &workers.watches.of_tube)


cdef inline uint32_t watch_find(
    const Workers* workers, uint32_t connection, uint32_t tube, int64_t* budget
) noexcept nogil:
    """Returns the connection's watch of a tube, or 0 if there is none.

    Charges a step to the budget for each watch that it checks.
    """
    cdef uint32_t number = workers.records[connection].watched.first
    while number and workers.watches[number].tube != tube:
        budget[0] -= 1
        number = workers.watches[number].of_connection.next
    return number


cdef inline void watch_add(Workers* workers, Tubes* tubes, uint32_t connection, uint32_t tube) noexcept nogil:
    """Adds a watch to a connection that does not wait.

    The caller must have checked that there is room for the watch.
    """
    cdef Worker* worker = workers.records + connection
    cdef uint32_t number = pool_take(workers.pool, &workers.watches.of_connection, sizeof(Watch))
    cdef Watch* watch = workers.watches + number
    debug_check(number != 0)
    watch.connection = connection
    watch.tube = tube
    ends_append(watches_by_connection(workers), &worker.watched, number)
    worker.watches += 1
    worker.text += tube_at(tubes, tube).record.name_size + LINE_MARKS
    tube_at(tubes, tube).watching += 1


cdef inline void watch_remove(Workers* workers, Tubes* tubes, uint32_t number) noexcept nogil:
    """Ends a watch of a connection that does not wait. The tube ends if nothing else needs it."""
    cdef Watch* watch = workers.watches + number
    cdef Worker* worker = workers.records + watch.connection
    debug_check(not worker.is_waiting)
    ends_remove(watches_by_connection(workers), &worker.watched, number)
    worker.watches -= 1
    worker.text -= tube_at(tubes, watch.tube).record.name_size + LINE_MARKS
    tube_at(tubes, watch.tube).watching -= 1
    tube_settle(tubes, watch.tube)
    watch.connection = 0
    pool_put(workers.pool, &workers.watches.of_connection, sizeof(Watch), number)


# ---- waiting -------------------------------------------------------------------------------------------------------

cdef inline void worker_expect(Workers* workers, uint32_t connection, int64_t due_ns) noexcept nogil:
    """Arms the connection's timer for due_ns, unless it is armed for an earlier time."""
    cdef const Timer* timer = &workers.records[connection].timer
    if not timer_is_armed(timer) or due_ns < timer.due_ns:
        timers_arm(&workers.timers, connection, due_ns)


cdef inline void worker_wait(Workers* workers, Tubes* tubes, uint32_t connection, int64_t until_ns) noexcept nogil:
    """Adds a connection to the wait queues of all tubes that it watches, at the end."""
    cdef Worker* worker = workers.records + connection
    cdef uint32_t number = worker.watched.first
    cdef Tube* tube
    debug_check(not worker.is_waiting)
    worker.is_waiting = True
    worker.wait_until_ns = until_ns
    workers.state.waiting += 1
    while number:
        tube = tube_at(tubes, workers.watches[number].tube)
        ends_append(watches_by_tube(workers), &tube.queue, number)
        tube.waiting += 1
        number = workers.watches[number].of_connection.next
    if until_ns != INT64_MAX:
        worker_expect(workers, connection, until_ns)


cdef inline void worker_wake(Workers* workers, Tubes* tubes, uint32_t connection) noexcept nogil:
    """Ends the wait of a connection: removes it from all wait queues."""
    cdef Worker* worker = workers.records + connection
    cdef uint32_t number = worker.watched.first
    cdef Tube* tube
    debug_check(worker.is_waiting)
    worker.is_waiting = False
    workers.state.waiting -= 1
    while number:
        tube = tube_at(tubes, workers.watches[number].tube)
        ends_remove(watches_by_tube(workers), &tube.queue, number)
        tube.waiting -= 1
        number = workers.watches[number].of_connection.next


# ---- begin and end of a connection ---------------------------------------------------------------------------------

cdef inline void worker_enter(Workers* workers, Tubes* tubes, uint32_t connection, uint32_t tube) noexcept nogil:
    """Begins a connection, which uses and watches `tube`.

    The caller must have checked that there is room for a watch.
    """
    cdef Worker* worker = workers.records + connection
    debug_check(worker.used == 0 and worker.watches == 0 and worker.reserved == 0)
    worker.used = tube
    worker.is_waiting = worker.is_producer = worker.is_worker = False
    tube_at(tubes, tube).using += 1
    watch_add(workers, tubes, connection, tube)


cdef inline void worker_use(Workers* workers, Tubes* tubes, uint32_t connection, uint32_t tube) noexcept nogil:
    """Makes a connection use another tube. 0 means no tube, because the connection ends."""
    cdef Worker* worker = workers.records + connection
    cdef uint32_t before = worker.used
    if tube:
        tube_at(tubes, tube).using += 1
    worker.used = tube
    tube_at(tubes, before).using -= 1
    tube_settle(tubes, before)


cdef inline void worker_leave(Workers* workers, Tubes* tubes, uint32_t connection) noexcept nogil:
    """Ends a connection: ends its wait, its use and its watches, and queues its jobs so that they are given back."""
    cdef Worker* worker = workers.records + connection
    cdef WorkersState* state = workers.state
    if worker.is_waiting:
        worker_wake(workers, tubes, connection)
    state.producers -= worker.is_producer
    state.workers -= worker.is_worker
    worker_use(workers, tubes, connection, 0)
    while worker.watched.first:
        watch_remove(workers, tubes, worker.watched.first)
    worker.next_leaving = 0
    if state.leaving_last:
        workers.records[state.leaving_last].next_leaving = connection
    else:
        state.leaving_first = connection
    state.leaving_last = connection


cdef inline uint32_t workers_next_left(Workers* workers) noexcept nogil:
    """Returns a job of the first connection in the queue of ended connections, which the caller must give back.

    Returns 0 if none remain.
    """
    cdef WorkersState* state = workers.state
    cdef uint32_t connection = state.leaving_first
    while connection and workers.records[connection].reserved == 0:
        state.leaving_first = workers.records[connection].next_leaving
        if state.leaving_first == 0:
            state.leaving_last = 0
        timers_disarm(&workers.timers, connection)
        connections_put(workers.connections, connection)
        connection = state.leaving_first
    if connection == 0:
        return 0
    state.given_back += 1
    return workers.records[connection].reserved
