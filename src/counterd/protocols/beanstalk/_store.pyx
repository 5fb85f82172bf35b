"""The beanstalk protocol's store: jobs, tubes, and the connections that wait for jobs.

Floor 2 (ARCHITECTURE.md). The store's parts (see _queues.pxd) and counts (BeanstalkState) are in the region. The
sessions, which answer waiting connections, are not in the region, because they belong to this process.

Every job that becomes ready goes through make_ready(), which immediately gives it to a waiting connection. So no tube
has both ready jobs and waiting connections, unless it is paused or its pause has just ended.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._core cimport FRAME_STEP_SHIFT, Session, Store
from counterd.engine.chains cimport BLOCK_SIZE, chains_begin, chains_reserve
from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.heap cimport heap_after
from counterd.engine.pool cimport pool_left
from counterd.engine.region cimport region_reserve
from counterd.engine.table cimport IndexEntry, name_blocks, name_bytes, name_tag
from counterd.engine.wheel cimport timers_arm, timers_next_ns, timers_take
from counterd.protocols.beanstalk._audits cimport audit_queues
from counterd.protocols.beanstalk._groups cimport (
    GROUP_COST, GROUP_HEAD, REQUIREMENT_COST, Group, Groups, Requirement, group_at, group_find, group_join, group_make,
    group_of, groups_begin, groups_reserve, groups_retry_ns, permits_name,
)
from counterd.protocols.beanstalk._jobs cimport (
    BLOCKED, BURIED, DELAYED, JOB_COST, READY, RESERVED, Job, JobsState, job_at, jobs_begin, jobs_reserve,
)
from counterd.protocols.beanstalk._keys cimport KEY_COST, Key, key_free, keys_begin, keys_reserve
from counterd.protocols.beanstalk._permits cimport permit_await, permit_release, permit_take, requirement_end
from counterd.protocols.beanstalk._queues cimport (
    MARGIN_NS, group_block, group_unblock, job_bury, job_delay, job_delete, job_enter_limited, job_is_blocked,
    job_leave, job_leave_limited, job_move, job_ready, job_reserve, queues_next_ready, tube_count, tube_expect,
    tube_limit, worker_is_pressed,
)
from counterd.protocols.beanstalk._replies cimport (
    DEADLINE_SOON, GOOD, INTERNAL_ERROR, JOB_HEAD_MAX, REPLIES, REPLY_WORDS, TIMED_OUT, Reply, write_body, write_end,
    write_given_line, write_word,
)
from counterd.protocols.beanstalk._tubes cimport (
    TUBE_COST, Tube, Tubes, tube_at, tube_find, tube_is_paused, tube_make, tubes_begin, tubes_count, tubes_free_ended,
    tubes_have_room, tubes_next_left, tubes_reserve,
)
from counterd.protocols.beanstalk._wire cimport BODY_MAX, COMMAND_WORDS, COMMANDS, CRLF_SIZE
from counterd.protocols.beanstalk._workers cimport (
    WATCH_COST, Worker, worker_expect, worker_leave, worker_wake, workers_begin, workers_next_left, workers_reserve,
)

cdef enum:
    SLICE = 512             # steps per tick for each kind of work (jobs given back, jobs due, ...): some 0.3 ms
    BODY_SHIFT = 11         # a step for each 2 KiB of a body
    WATCH_SHIFT = 4         # a step for each 16 watches of a connection whose wait ends
    PERMIT_STEPS = 2        # of a slice, for a call of the lender: some 1 us
    PERMIT_BUDGET = 25      # likewise, of a turn's steps

assert JOB_COST == sizeof(Job) + 2 * sizeof(IndexEntry), sizeof(Job)
assert KEY_COST == sizeof(Key) + 2 * sizeof(IndexEntry), sizeof(Key)
assert GROUP_COST == sizeof(Group) + 2 * sizeof(IndexEntry), sizeof(Group)
assert REQUIREMENT_COST == sizeof(Requirement)
assert TUBE_COST == sizeof(Tube) + 2 * sizeof(IndexEntry), sizeof(Tube)


cdef class BeanstalkStore(Store):
    """The store of the protocol. open_store() in _session.pyx makes it.

    memory_limit: bytes, as memory_used() counts them. job_size_max: bytes of a body. tubes: the most tubes.
    tube_jobs_max: the most jobs in a tube. journal_period_ns: the time from one piece for the journal to the next.
    journal_lag_ns: replies wait for the journal if it is behind for longer; -1 means always. figures: returns figures
    of the daemon. host: figures of the machine, for stats.

    Raises ValueError for impossible sizes, and MemoryError if the memory cannot be mapped.
    """

    def __cinit__(self, *, uint64_t memory_limit, uint32_t job_size_max, uint32_t tubes, uint32_t tube_jobs_max,
                  figures, dict host, int64_t journal_period_ns, int64_t journal_lag_ns, bytes hash_key,
                  size_t reply_max, **_):
        cdef uint64_t connections = CONNECTIONS_MAX
        if job_size_max > BODY_MAX:
            raise ValueError(f"job_size_max must be at most {BODY_MAX} bytes, not {job_size_max}")
        if reply_max < <size_t>job_size_max + JOB_HEAD_MAX:
            raise ValueError(f"with a job_size_max of {job_size_max}, the reply_max of {reply_max} is too small")
        self.job_size_max = job_size_max
        self.tube_jobs_max = tube_jobs_max
        self.memory_max = memory_limit
        self.journal_period_ns = journal_period_ns
        self.journal_lag_ns = journal_lag_ns
        self.limits = []
        self.others = figures
        self.host = host
        region_reserve(&self.region, b"beanstalk", sizeof(BeanstalkState), <void**>&self.state)
        chains_reserve(&self.chains, &self.region, memory_limit // BLOCK_SIZE)
        jobs_reserve(&self.queues.jobs, &self.region, <uint32_t>min(memory_limit // JOB_COST, <uint64_t>1 << 29))
        tubes_reserve(&self.queues.tubes, &self.region, tubes)
        keys_reserve(&self.queues.keys, &self.region, <uint32_t>min(memory_limit // KEY_COST, <uint64_t>1 << 29))
        groups_reserve(
            &self.queues.groups, &self.region, <uint32_t>min(memory_limit // GROUP_COST, <uint64_t>1 << 29),
            self.queues.jobs.capacity
        )
        workers_reserve(
            &self.queues.workers, &self.region, &self.connections,
            <uint32_t>min(connections + memory_limit // WATCH_COST, <uint64_t>1 << 31)
        )
        self.sessions = <void**>PyMem_RawCalloc(CONNECTIONS_MAX + 1, sizeof(void*))
        if self.sessions == NULL:
            raise MemoryError(f"no room for {CONNECTIONS_MAX} sessions")
        self.map_region(hash_key)
        chains_begin(&self.chains)
        jobs_begin(&self.queues.jobs, self.header.key, &self.chains)
        tubes_begin(&self.queues.tubes, self.header.key, &self.chains, self.now_ns)
        workers_begin(&self.queues.workers, self.now_ns)
        keys_begin(&self.queues.keys, self.header.key, &self.chains, self.now_ns)
        groups_begin(&self.queues.groups, self.header.key, &self.chains, self.now_ns)
        self.queues.counts = self.state.counts
        self.queues.enter_limited, self.queues.leave_limited = job_enter_limited, job_leave_limited
        self.queues.urgent = &self.state.urgent
        name = b"default"
        self.state.piece_ns = PIECE_NS
        self.state.default_tube = self.find_tube(
            name_tag(&self.queues.tubes.table, name, 7), name, 7
        )
        tube_at(&self.queues.tubes, self.state.default_tube).walks = 1  # so that it never ends

    def __dealloc__(self):
        PyMem_RawFree(self.sessions)

    # ---- room ----

    cdef uint64_t memory_used(self) noexcept:
        """Returns how many bytes count against the limit. The first watch of each connection does not count."""
        cdef uint64_t watches = self.queues.workers.pool.used
        return (
            <uint64_t>self.queues.jobs.pool.used * JOB_COST + <uint64_t>self.chains.pool.used * BLOCK_SIZE
            + <uint64_t>self.queues.tubes.table.pool.used * TUBE_COST
            + <uint64_t>self.queues.keys.table.pool.used * KEY_COST
            + self.queues.groups.state.bytes
            + (watches - self.sessions_open if watches > self.sessions_open else 0) * WATCH_COST
        )

    cdef bint has_room(self, uint64_t bytes, uint64_t blocks) noexcept:
        """Returns whether the limit leaves room for `bytes` bytes of records and `blocks` more blocks."""
        return (
            pool_left(self.chains.pool) >= blocks
            and self.memory_used() + bytes + blocks * BLOCK_SIZE <= self.memory_max
        )

    cdef uint32_t find_tube(self, uint32_t tag, const uint8_t* name, uint32_t size) noexcept:
        """Returns the tube with this name, or makes it. Returns 0 if there is no room for it."""
        cdef uint32_t number = tube_find(&self.queues.tubes, tag, name, size)
        if number:
            return number
        if not tubes_have_room(&self.queues.tubes, size):
            return 0
        if not self.has_room(TUBE_COST, name_blocks(&self.queues.tubes.table, size)):
            return 0
        return tube_make(&self.queues.tubes, tag, name, size)

    # ---- the journal; _journal.pyx makes its pieces ----

    def reach(self, uint64_t position, int64_t now_ns):
        """Implements Store.reach. The journal works again."""
        with self.at(now_ns):
            self.state.is_failing = False
            if position >= self.state.changes_taken:
                self.queues.jobs.state.id_limit = self.state.id_limit_asked
                journal_measure(self)
            if max(position, self.durable) >= self.queues.jobs.state.changes:
                self.state.behind_ns = 0
            else:
                self.state.behind_ns = max(self.state.behind_ns, self.state.taken_ns)
        Store.reach(self, position, now_ns)

    cdef void promise(self, Session session) noexcept:
        """Called when a request has changed jobs. Holds the reply back if the journal is behind for too long, or will
        need too long for what it does not have yet."""
        if self.state.is_failing or self.durable >= self.queues.jobs.state.changes:
            return
        if self.state.behind_ns == 0:
            self.state.behind_ns = self.now_ns
        if (
            self.now_ns - self.state.behind_ns > self.journal_lag_ns
            or self.journal_period_ns and journal_backlog_ns(self) > self.journal_period_ns
        ):
            session.hold_back(self.queues.jobs.state.changes)
        self.expect(self.journal_due_ns())

    cdef int64_t journal_due_ns(self) noexcept:
        """Returns when the next piece for the journal is due. INT64_MAX means that no piece is due."""
        if self.queues.jobs.state.changed_first == 0 and not self.limits or self.durable < self.state.changes_taken:
            return INT64_MAX
        if self.queues.jobs.state.id_limit - self.queues.jobs.state.last_id < ID_BLOCK // 2:
            return 0  # the piece asks for more ids before the reserved ones are used up
        if self.journal_period_ns == 0 or journal_backlog_ns(self) > self.journal_period_ns // 2:
            return 0
        return self.state.taken_ns + self.journal_period_ns

    cdef int limit_reserves(self, uint32_t number, uint32_t reserves_max, uint32_t target) except -1:
        """Implements section "limit-reserves". target: the tube of retired jobs; 0 or the same tube buries them."""
        cdef JobsState* jobs = self.queues.jobs.state
        cdef Tubes* tubes = &self.queues.tubes
        if target == number or reserves_max == 0:
            target = 0
        jobs.edits += 1  # also if nothing changes, because the same limit may not be on disk yet
        if tube_at(tubes, number).reserves_max == reserves_max and tube_at(tubes, number).retire_to == target:
            return 0
        if jobs.is_journaled:
            jobs.changes += 1
            self.limits.append((
                jobs.changes, name_bytes(&tubes.table, &tube_at(tubes, number).record), reserves_max,
                name_bytes(&tubes.table, &tube_at(tubes, target).record) if target else b"",
            ))
        tube_limit(&self.queues, number, reserves_max, target)
        return 0

    cdef bint is_held_by(self, const Job* job, uint32_t connection) noexcept:
        """Returns whether a connection may end a job. Any may, if its worker belonged to the previous process."""
        return job.state == RESERVED and (job.holder == connection or job.holder == self.state.lost_worker)

    # ---- jobs ----

    cdef int reserve(self, uint32_t number, uint32_t connection) except -1:
        """Gives a job to a connection. The caller sends the reply."""
        job_reserve(&self.queues, number, connection, self.now_ns)
        self.expect(<int64_t>job_at(&self.queues.jobs, number).node.key)
        return 0

    cdef int make_ready(self, uint32_t number) except -1:
        """Makes a job ready. The job must not be in a queue. The connection that has waited the longest gets it."""
        cdef const Tube* tube = tube_at(&self.queues.tubes, job_at(&self.queues.jobs, number).tube)
        job_ready(&self.queues, number, self.now_ns)  # it stays ready if there is no memory for the reply
        if job_is_blocked(&self.queues, number):
            return self.first_changed(self.queues.groups.requirements[number].group)
        if self.first_waiting(tube) and not tube_is_paused(tube, self.now_ns):
            self.hand_over(number, self.first_waiting(tube))
        return 0

    cdef uint32_t first_waiting(self, const Tube* tube) noexcept:
        """Returns the connection that has waited the longest for a job of a tube, or 0 if none waits."""
        cdef uint32_t connection
        while tube.queue.first:
            connection = self.queues.workers.watches[tube.queue.first].connection
            if self.sessions[connection] != NULL:
                return connection
            self.wake(connection)  # its session was collected during a call
        return 0

    cdef void wake(self, uint32_t connection) noexcept:
        """Ends the wait of a connection, and charges the work to the budget."""
        cdef uint32_t watches = self.queues.workers.records[connection].watches
        self.steps -= <int>(watches >> WATCH_SHIFT)
        self.budget -= watches
        worker_wake(&self.queues.workers, &self.queues.tubes, connection)

    cdef int delay(self, uint32_t number) except -1:
        """Delays a job that is not in a queue."""
        job_delay(&self.queues, number, self.now_ns)
        self.expect(<int64_t>job_at(&self.queues.jobs, number).node.key)
        return 0

    cdef int hand_over(self, uint32_t number, uint32_t connection) except -1:
        """Gives a ready job to a waiting connection, and replies. Returns 0 if the job gets no permit."""
        cdef const Job* job = job_at(&self.queues.jobs, number)
        cdef Session session = <Session>self.sessions[connection]
        cdef uint8_t[JOB_HEAD_MAX] line
        cdef size_t line_size = write_given_line(line, job, self.queues.workers.records[connection].command) - line
        cdef bytes message = PyBytes_FromStringAndSize(NULL, line_size + job.size + CRLF_SIZE)
        cdef uint8_t* target = <uint8_t*>PyBytes_AS_STRING(message)
        if job.is_limited and not self.take_permit(number):
            return 0
        memcpy(target, line, line_size)
        write_body(target + line_size, &self.queues, job)
        self.wake(connection)
        self.reserve(number, connection)
        self.steps -= <int>(job.size >> BODY_SHIFT)
        self.budget -= 1 + (job.size >> FRAME_STEP_SHIFT)
        self.state.unanswered[self.queues.workers.records[connection].command] -= 1
        session.resume(message)
        return 1

    cdef int end_waiting(self, uint32_t connection, Reply reply) except -1:
        """Ends a wait without a job. reply: the reason."""
        cdef Session session
        cdef uint8_t[JOB_HEAD_MAX] line
        cdef uint8_t* end = write_end(write_word(line, reply))
        self.wake(connection)
        if self.sessions[connection] == NULL:
            return 0
        session = <Session>self.sessions[connection]
        self.state.unanswered[self.queues.workers.records[connection].command] -= 1
        self.state.refusals[self.queues.workers.records[connection].command][<int>reply] += 1
        session.resume(PyBytes_FromStringAndSize(<const char*>line, end - line))
        return 0

    # ---- permits: see _groups.pxd ----

    def borrow(self, lender):
        """Implements BorrowingStore.borrow."""
        self.lender = lender

    def settled(self, uint32_t ticket, bint granted):
        """Implements BorrowingStore.settled. A ticket is the number of a group."""
        cdef Group* group
        with self:
            group = group_at(&self.queues.groups, ticket)
            group.place = 0
            group.has_permit = granted
            self.queues.groups.state.granted += granted
            self.expect_group(ticket, 0 if granted else groups_retry_ns(&self.queues.groups, self.now_ns))

    cdef void expect_group(self, uint32_t number, int64_t due_ns) noexcept:
        """Serves a group at due_ns. 0 means immediately, not at the next tick of the wheel."""
        timers_arm(&self.queues.groups.timers, number, due_ns)
        self.expect(due_ns)

    cdef bint has_requirement_room(
        self, uint32_t tube, const uint8_t* name, uint32_t size, uint64_t bytes, uint64_t blocks
    ) noexcept:
        """Returns whether there is room for a requirement, and for `bytes` and `blocks` as in has_room()."""
        cdef const Groups* groups = &self.queues.groups
        if group_find(groups, tube, name, size):
            return self.has_room(bytes + REQUIREMENT_COST, blocks)
        return pool_left(groups.table.pool) != 0 and self.has_room(
            bytes + REQUIREMENT_COST + GROUP_COST, blocks + name_blocks(&groups.table, GROUP_HEAD + size)
        )

    cdef void add_requirement(self, uint32_t number, const uint8_t* name, uint32_t size, uint32_t maximum) noexcept:
        """Gives a requirement to a job that is not in a queue. There must be room for the requirement."""
        cdef Job* job = job_at(&self.queues.jobs, number)
        cdef uint32_t group = group_find(&self.queues.groups, job.tube, name, size)
        if group == 0:
            group = group_make(&self.queues.groups, job.tube, name, size)
        group_join(&self.queues.groups, group, number, maximum)
        job.is_limited = True

    cdef int end_requirement(self, uint32_t job) except -1:
        """Ends the requirement of a job that has no permit and is not in a queue."""
        cdef uint32_t number = self.queues.groups.requirements[job].group
        return 0 if requirement_end(&self.queues, self.lender, job, self.now_ns) else self.first_changed(number)

    cdef int move_requirement(self, uint32_t job, uint32_t tube) except -1:
        """Gives a job that will move to another tube the same requirement there. Returns 0 if there is no room."""
        cdef bytes name = permits_name(&self.queues.groups, group_of(&self.queues.groups, job))
        cdef uint32_t maximum = self.queues.groups.requirements[job].maximum
        cdef uint32_t before = job_at(&self.queues.jobs, job).tube
        if not self.has_requirement_room(tube, name, <uint32_t>len(name), 0, 0):
            return 0
        self.end_requirement(job)
        job_at(&self.queues.jobs, job).tube = tube
        self.add_requirement(job, name, <uint32_t>len(name), maximum)
        job_at(&self.queues.jobs, job).tube = before
        return 1

    cdef int take_permit(self, uint32_t job) except -1:
        """Takes the permit of a ready job that will be reserved, and returns 1.

        If no permit is available, blocks the job's group, which then waits for one, and returns 0.
        """
        cdef uint32_t number = self.queues.groups.requirements[job].group
        if self.take_permit_alone(job):
            return 1
        if not group_at(&self.queues.groups, number).is_blocked:
            group_block(&self.queues, number)
        self.wait_for_permit(number)
        return 0

    cdef int take_permit_alone(self, uint32_t job) except -1:
        """Takes the permit of a job, and returns 1. Returns 0 if no permit is available."""
        self.charge_permit()
        return permit_take(&self.queues, self.lender, job, self.now_ns)

    cdef int release_permit(self, uint32_t job) except -1:
        """Gives back the permit of a job that was reserved."""
        self.charge_permit()
        return permit_release(&self.queues, self.lender, group_of(&self.queues.groups, job), self.now_ns)

    cdef int wait_for_permit(self, uint32_t number) except -1:
        """Makes a blocked group wait for a permit for its first job, unless it already waits."""
        self.charge_permit()
        if not permit_await(&self.queues, self.lender, number, self.now_ns):
            self.expect_group(number, groups_retry_ns(&self.queues.groups, self.now_ns))
        return 0

    cdef void charge_permit(self) noexcept:
        self.steps -= PERMIT_STEPS
        self.budget -= PERMIT_BUDGET

    cdef int first_changed(self, uint32_t number) except -1:
        """Called when the first job of a group may have changed. A waiting group then waits for that job's maximum."""
        return self.wait_for_permit(number) if group_at(&self.queues.groups, number).place else 0

    cdef int serve_groups(self) except -1:
        """Serves groups that have got a permit, or that have to try again."""
        cdef uint32_t number
        while self.steps > 0:
            number = timers_take(&self.queues.groups.timers, self.now_ns, &self.steps)
            if number == 0:
                break
            self.serve_group(number)
        return 0

    cdef int serve_group(self, uint32_t number) except -1:
        """Gives jobs of a blocked group to waiting connections while there are permits, then unblocks the group."""
        cdef Group* group = group_at(&self.queues.groups, number)
        cdef const Tube* tube = tube_at(&self.queues.tubes, group.tube)
        if group.place:
            return 0
        while group.is_blocked and group.first and self.first_waiting(tube) and not tube_is_paused(tube, self.now_ns):
            if self.steps <= 0:
                self.expect_group(number, 0)
                return 0
            self.steps -= 1
            if not self.hand_over(group.first, self.first_waiting(tube)):
                return 0
        if group.is_blocked:
            group_unblock(&self.queues, number)
        if group.has_permit:
            group.has_permit = False
            permit_release(&self.queues, self.lender, group, self.now_ns)
        return 0

    cdef uint32_t next_permitted(self, uint32_t number, uint32_t connection, int64_t room) except? 0xffffffff:
        """Takes the permit of the job that a connection reserves next, if that job needs a permit, and returns the job.

        number: the next ready job, which needs a permit. If no permit is available, the search continues with the next
        job. Returns 0 if there is no job, or if its reply takes more than `room` bytes. Returns UNFINISHED if the
        budget is used up.
        """
        while not self.take_permit(number):
            if self.budget <= 0:
                return UNFINISHED
            number = queues_next_ready(&self.queues, connection, self.now_ns, &self.budget)
            if number == 0 or <int64_t>job_at(&self.queues.jobs, number).size + JOB_HEAD_MAX > room:
                return 0
            if not job_at(&self.queues.jobs, number).is_limited:
                break
        return number

    # ---- time ----

    cdef void forget(self, uint32_t connection) noexcept:
        self.sessions[connection] = NULL
        worker_leave(&self.queues.workers, &self.queues.tubes, connection)
        self.has_work = True

    cpdef set_wall(self, int64_t unix_ns, int64_t now_ns):
        """Implements Store.set_wall. set_wall() also keeps now_ns current without requests, because tables show
        ages."""
        with self.at(now_ns):
            self.wall_ns = unix_ns - now_ns

    cdef int64_t due_ns(self) except? -2:
        cdef int64_t of_workers = timers_next_ns(&self.queues.workers.timers)
        cdef int64_t of_tubes = timers_next_ns(&self.queues.tubes.timers)
        cdef int64_t of_keys = timers_next_ns(&self.queues.keys.timers)
        cdef int64_t of_groups = timers_next_ns(&self.queues.groups.timers)
        cdef int64_t due_ns = self.journal_due_ns()
        if self.queues.workers.state.leaving_first or self.state.draining and self.queues.workers.state.waiting:
            return 0
        if tubes_next_left(&self.queues.tubes):
            return 0
        if self.awaiting_journal and (
            self.state.is_failing or self.state.is_full and self.state.refusing < <size_t>len(self.awaiting_journal)
        ):
            return 0
        if of_workers >= 0:
            due_ns = min(due_ns, of_workers)
        if of_tubes >= 0:
            due_ns = min(due_ns, of_tubes)
        if of_keys >= 0:
            due_ns = min(due_ns, of_keys)
        if of_groups >= 0:
            due_ns = min(due_ns, of_groups)
        return -1 if due_ns == INT64_MAX else due_ns

    cdef int run_due(self) except -1:
        """Gives back jobs of ended connections, then does other due work. Each kind of work has its own slice."""
        self.steps = SLICE
        self.give_back()
        self.steps = SLICE
        self.serve_tubes()  # before waits end, because a job that becomes ready in the same tick still ends a wait
        self.steps = SLICE
        self.serve_workers()
        self.steps = SLICE
        self.serve_keys()
        self.steps = SLICE
        self.serve_groups()
        self.steps = SLICE
        tubes_free_ended(&self.queues.tubes, &self.steps)
        if self.state.draining:
            self.steps = SLICE
            self.end_waits()
        if self.state.is_failing:
            journal_fail(self)
        elif self.state.is_full:
            journal_fill(self)
        return 0

    cdef int give_back(self) except -1:
        """Makes a job ready when its worker is gone."""
        cdef uint32_t number
        while self.steps > 0:
            number = workers_next_left(&self.queues.workers)
            if number == 0:
                break
            self.steps -= 1
            self.come_back(number, False)
        return 0

    cdef int serve_workers(self) except -1:
        cdef uint32_t connection
        while self.steps > 0:
            connection = timers_take(&self.queues.workers.timers, self.now_ns, &self.steps)
            if connection == 0:
                break
            self.serve_worker(connection)
        return 0

    cdef int serve_worker(self, uint32_t connection) except -1:
        """Takes back jobs that a connection has held for too long, and ends its wait when the time is over."""
        cdef Worker* worker = self.queues.workers.records + connection
        cdef int64_t due_ns = INT64_MAX
        cdef Job* job
        while worker.reserved:
            job = job_at(&self.queues.jobs, worker.reserved)
            due_ns = <int64_t>job.node.key
            if due_ns > self.now_ns:
                break
            if self.steps <= 0:
                timers_arm(&self.queues.workers.timers, connection, due_ns)
                return 0
            self.steps -= 1
            job.timeouts += 1
            self.state.timeouts += 1
            self.come_back(worker.reserved, False)
        if worker.is_waiting:
            if worker_is_pressed(&self.queues, connection, self.now_ns):
                self.end_waiting(connection, DEADLINE_SOON)
            elif worker.wait_until_ns <= self.now_ns:
                self.end_waiting(connection, TIMED_OUT)
        self.expect_worker(connection)
        return 0

    cdef int end_job(self, uint32_t number) except -1:
        """Ends a job. The key of the job may stay taken for some time."""
        cdef Job* job = job_at(&self.queues.jobs, number)
        cdef bint is_limited = job.is_limited, had_permit = job.state == RESERVED
        cdef int64_t due_ns
        job_delete(&self.queues, number, self.now_ns)
        if is_limited:
            if had_permit:
                self.release_permit(number)
            self.end_requirement(number)
        due_ns = timers_next_ns(&self.queues.keys.timers)
        if due_ns >= 0:
            self.expect(due_ns)
        return 0

    cdef int take_back(self, uint32_t number) except -1:
        """Makes a delayed or buried job ready."""
        job_leave(&self.queues, number)
        return self.make_ready(number)

    cdef int come_back(self, uint32_t number, bint is_delayed) except -1:
        """Makes a reserved job ready, or delays it. Retires a job that has been reserved too often instead."""
        cdef const Job* job = job_at(&self.queues.jobs, number)
        cdef const Tube* tube = tube_at(&self.queues.tubes, job.tube)
        cdef uint32_t target = tube.retire_to
        job_leave(&self.queues, number)
        if job.is_limited:
            self.release_permit(number)
        if tube.reserves_max == 0 or job.reserves < tube.reserves_max:
            return self.delay(number) if is_delayed else self.make_ready(number)
        self.state.retired += 1
        if target == 0 or tube_count(tube_at(&self.queues.tubes, target)) >= self.tube_jobs_max:
            job_bury(&self.queues, number, self.now_ns)
            return 0
        if job.is_limited and not self.move_requirement(number, target):
            job_bury(&self.queues, number, self.now_ns)
            return 0
        job_move(&self.queues, number, target)
        return self.make_ready(number)

    cdef int bury(self, uint32_t number) except -1:
        """Buries a reserved job."""
        job_leave(&self.queues, number)
        if job_at(&self.queues.jobs, number).is_limited:
            self.release_permit(number)
        job_bury(&self.queues, number, self.now_ns)
        return 0

    cdef void expect_worker(self, uint32_t connection) noexcept:
        """Arms a connection's timer for its next deadline."""
        cdef const Worker* worker = self.queues.workers.records + connection
        cdef int64_t due_ns = INT64_MAX
        if worker.is_waiting:
            due_ns = worker.wait_until_ns
        if worker.reserved:
            due_ns = min(
                due_ns, <int64_t>job_at(&self.queues.jobs, worker.reserved).node.key - worker.is_waiting * MARGIN_NS
            )
        if due_ns != INT64_MAX:
            worker_expect(&self.queues.workers, connection, due_ns)
            self.expect(due_ns)

    cdef int serve_keys(self) except -1:
        """Frees keys of ended jobs when their time is over."""
        cdef uint32_t number
        while self.steps > 0:
            number = timers_take(&self.queues.keys.timers, self.now_ns, &self.steps)
            if number == 0:
                break
            self.steps -= 1
            key_free(&self.queues.keys, &self.queues.jobs, number)
        return 0

    cdef int serve_tubes(self) except -1:
        cdef uint32_t number
        while self.steps > 0:
            number = timers_take(&self.queues.tubes.timers, self.now_ns, &self.steps)
            if number == 0:
                break
            self.serve_tube(number)
        return 0

    cdef int serve_tube(self, uint32_t number) except -1:
        """Makes a job ready when its delay is over. After a pause, gives ready jobs to waiting connections."""
        cdef Tube* tube = tube_at(&self.queues.tubes, number)
        cdef int64_t due_ns = INT64_MAX
        while tube.delayed:
            due_ns = <int64_t>job_at(&self.queues.jobs, tube.delayed).node.key
            if due_ns > self.now_ns:
                break
            if self.steps <= 0:
                timers_arm(&self.queues.tubes.timers, number, due_ns)
                return 0
            self.steps -= 1
            self.take_back(tube.delayed)
            due_ns = INT64_MAX
        if tube_is_paused(tube, self.now_ns):
            due_ns = min(due_ns, tube.paused_until_ns)
        else:
            tube.pause = 0
            while tube.ready and self.first_waiting(tube):
                if self.steps <= 0:
                    due_ns = 0  # at once, not at the next tick of the wheel
                    break
                self.steps -= 1
                self.hand_over(tube.ready, self.first_waiting(tube))
        if due_ns != INT64_MAX:
            tube_expect(&self.queues, number, due_ns)
        return 0

    # ---- drains ----

    def begin_drain(self):
        """Implements Store.begin_drain: ends waits, and refuses puts and reserves."""
        with self:
            self.state.draining = True
            self.state.ending = 0
            self.has_work = True

    cdef int end_waits(self) except -1:
        """Ends the waits of a slice of the connections."""
        if self.queues.workers.state.waiting == 0:
            return 0
        if self.state.ending >= self.connections.pool.fresh:
            self.state.ending = 0
        while self.steps > 0 and self.state.ending < self.connections.pool.fresh:
            self.state.ending += 1
            self.steps -= 1
            if self.queues.workers.records[self.state.ending].is_waiting:
                self.end_waiting(self.state.ending, TIMED_OUT)
        return 0

    def refuse_puts(self, bint refused):
        """Sets the protocol's drain mode: puts get the reply DRAINING, all other requests are served."""
        with self:
            self.state.refuses_puts = refused

    def held(self):
        """Implements Store.held: reserved jobs, except those of workers of the previous process."""
        with self:
            return self.state.counts[<int>RESERVED] - self.queues.workers.records[self.state.lost_worker].jobs

    def holdings_of(self, uint32_t connection):
        """Implements Store.holdings_of: reserved jobs."""
        with self:
            if connection > self.connections.pool.fresh:
                return 0
            return self.queues.workers.records[connection].jobs

    def leases(self, size_t limit):
        """Implements Store.leases: the first reserved jobs, by connection. The names are those of the jobs' tubes."""
        cdef const Job* job
        cdef uint32_t connection, number
        cdef list found = []
        with self:
            for connection in range(1, self.connections.pool.fresh + 1):
                if connection == self.state.lost_worker:  # held() leaves its jobs out, too
                    continue
                number = self.queues.workers.records[connection].reserved
                while number:
                    if <size_t>len(found) >= limit:
                        return found
                    job = job_at(&self.queues.jobs, number)
                    name = name_bytes(&self.queues.tubes.table, &tube_at(&self.queues.tubes, job.tube).record)
                    found.append((connection, name, 1, job.since_ns // 100000000))
                    number = heap_after(&self.queues.jobs.heap, number)
        return found

    # ---- statistics ----

    cdef uint32_t tube_named(self, const uint8_t* name, uint32_t size) noexcept:
        """Returns the tube with this name, or 0 if there is none."""
        cdef Tubes* tubes = &self.queues.tubes
        return tube_find(tubes, name_tag(&tubes.table, name, size), name, size)

    cdef int64_t oldest_ready_ns(self, const Tube* tube) noexcept:
        """Returns how long a tube's oldest ready job has been ready."""
        if tube.ready_list.first == 0:
            return 0
        return self.now_ns - job_at(&self.queues.jobs, tube.ready_list.first).since_ns

    cdef dict figures(self):
        cdef dict figures = Store.figures(self)
        cdef BeanstalkState* state = self.state
        figures.update({
            "jobs:ready": state.counts[<int>READY],
            "jobs:reserved": state.counts[<int>RESERVED],
            "jobs:delayed": state.counts[<int>DELAYED],
            "jobs:buried": state.counts[<int>BURIED],
            "blocked": state.counts[<int>BLOCKED],
            "gates": self.queues.groups.table.pool.used,
            "permits": self.queues.groups.state.reserved,
            "granted_later": self.queues.groups.state.granted,
            "urgent": state.urgent,
            "jobs": self.queues.jobs.pool.used - self.queues.jobs.state.ended,
            "jobs_max": self.queues.jobs.pool.capacity,
            "total_jobs": self.queues.jobs.state.total,
            "timeouts": state.timeouts,
            "retired": state.retired,
            "given_back": self.queues.workers.state.given_back,
            "waiting": self.queues.workers.state.waiting,
            "producers": self.queues.workers.state.producers,
            "workers": self.queues.workers.state.workers,
            "keys": self.queues.keys.table.pool.used,
            "tubes": tubes_count(&self.queues.tubes),
            "tubes_max": self.queues.tubes.table.pool.capacity,
            "used_memory": self.memory_used(),
            "memory_limit": self.memory_max,
            "longest_probe": self.queues.jobs.index.state.longest,
            "refuses_puts": state.refuses_puts,
            "journal_failing": state.is_failing,
            "journal_full": state.is_full,
            "journal_behind": self.queues.jobs.state.changes - self.durable,
            "journal_records": state.records_written,
        })
        return figures

    def outcomes(self):
        """Implements Store.outcomes.

        Refusals are counted, and all other requests count as "ok". If the reply had been held back before the refusal,
        the request counts as both, because a count must not decrease.
        """
        cdef BeanstalkState* state = self.state
        cdef int command, reply
        cdef uint64_t refused, count
        found = []
        with self:
            for command in range(COMMANDS + 1):
                name = COMMAND_WORDS[command].text.decode() if command < COMMANDS else "unknown"
                refused = 0
                for reply in range(<int>GOOD, REPLIES):
                    refused += state.refusals[command][reply]
                    count = state.refusals[command][reply]
                    count += state.given_up[command] if reply == <int>INTERNAL_ERROR else 0
                    found.append((name, REPLY_WORDS[reply].decode().lower(), count))
                if command < COMMANDS:
                    found.append((name, "ok", state.requests[command] - refused - state.unanswered[command]))
        return [each for each in found if each[2]]

    cdef int audit_parts(self) except -1:
        """Implements Store.audit_parts: checks jobs, keys, tubes and workers, and that each is in the right queues."""
        audit_queues(&self.queues)
        return 0
