# The beanstalk protocol's store, for the modules with its sessions, listings and tables.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._core cimport OUTPUT_MAX, REPLY_ROOM, Session, Store
from counterd.engine.chains cimport Chains
from counterd.engine.debug cimport debug_check
from counterd.protocols.beanstalk._jobs cimport JOB_STATES, Job
from counterd.protocols.beanstalk._queues cimport Queues
from counterd.protocols.beanstalk._replies cimport REPLIES, Reply
from counterd.protocols.beanstalk._tubes cimport Tube
from counterd.protocols.beanstalk._wire cimport COMMANDS


cdef enum:
    UNFINISHED = 0xffffffff     # of next_permitted(): the budget is used up
    PIECE_SIZE = 1 << 18        # bytes of a piece for the journal, plus one row: some 0.3 ms
    ID_BLOCK = 1 << 20          # ids that the journal reserves at a time; after a crash none of them is used again
    PIECE_NS = 20000000         # for a piece, as long as none was measured: a slow disk
    AVERAGED = 4                # pieces
    GIVEN_UP = 512              # steps per call for replies that are given up: some 0.3 ms
    REPLY_SHIFT = 4             # a step for each 16 bytes of them


cdef struct BeanstalkState:     # in the region
    uint64_t counts[JOB_STATES]     # jobs by state, and BLOCKED
    uint64_t urgent
    uint64_t timeouts           # how often the time to run of a job ended
    uint64_t retired            # jobs that were reserved too often
    uint64_t requests[COMMANDS]     # well-formed ones
    uint64_t unanswered[COMMANDS]   # of these: requests that wait, or waited until their connection was gone
    uint64_t refusals[COMMANDS + 1][REPLIES]    # by command, the last for lines that are not a command
    uint64_t given_up[COMMANDS + 1]             # refused because the journal failed, after they were counted as ok
    uint32_t default_tube
    uint32_t ending             # the drain has ended waits up to this connection
    uint64_t changes_taken      # the changes up to this position were given to the journal
    uint64_t id_limit_asked     # the id limit that the journal was last asked to reserve
    uint64_t records_written
    int64_t taken_ns            # when the journal was last given all changes
    int64_t behind_ns           # since when changes are not on disk; 0: all are
    int64_t sent_ns             # when the journal was given the piece that it has now
    uint64_t sent_size          # bytes of that piece
    int64_t piece_ns            # how long the journal needs for PIECE_SIZE bytes: an average
    uint32_t lost_worker        # a connection number for jobs that workers of the previous process hold; 0: none
    uint8_t refuses_puts        # in the protocol's drain mode
    uint8_t draining            # the daemon is about to stop
    uint8_t is_failing          # the journal cannot be written
    uint8_t is_full             # the journal has no room for more
    uint32_t refusing           # while is_full: the sessions of `awaiting_journal` up to this one were told so
    uint32_t refused            # and of the next one, so many of the held replies that are not due


cdef class BeanstalkStore(Store):
    cdef BeanstalkState* state
    cdef Chains chains          # of long names and of bodies
    cdef Queues queues
    # Not in the region:
    cdef void** sessions        # by connection: a Session of this process, or NULL
    cdef uint32_t job_size_max
    cdef uint32_t tube_jobs_max
    cdef uint64_t memory_max
    cdef int64_t journal_period_ns  # from one piece for the journal to the next; 0: as soon as possible
    cdef int64_t journal_lag_ns     # replies wait if the journal is behind for longer; -1: always
    cdef int steps              # that remain for the current part of a tick
    cdef int64_t wall_ns        # Unix time when the monotonic clock was 0
    cdef list limits            # (position, tube, reserves_max, target) that the journal was not given yet
    cdef object others          # returns the figures of the floors above
    cdef object lender          # a contract.Lender, or None
    cdef dict host              # the figures of the machine, for stats

    cdef uint64_t memory_used(self) noexcept
    cdef void promise(self, Session session) noexcept
    cdef bint is_held_by(self, const Job* job, uint32_t connection) noexcept
    cdef int64_t journal_due_ns(self) noexcept
    cdef bint has_room(self, uint64_t bytes, uint64_t blocks) noexcept
    cdef uint32_t find_tube(self, uint32_t tag, const uint8_t* name, uint32_t size) noexcept
    cdef int reserve(self, uint32_t number, uint32_t connection) except -1
    cdef int make_ready(self, uint32_t number) except -1
    cdef int delay(self, uint32_t number) except -1
    cdef uint32_t first_waiting(self, const Tube* tube) noexcept
    cdef void wake(self, uint32_t connection) noexcept
    cdef int hand_over(self, uint32_t number, uint32_t connection) except -1
    cdef int end_waiting(self, uint32_t connection, Reply reply) except -1
    cdef int give_back(self) except -1
    cdef int serve_workers(self) except -1
    cdef int come_back(self, uint32_t number, bint is_delayed) except -1
    cdef int limit_reserves(self, uint32_t number, uint32_t reserves_max, uint32_t target) except -1
    cdef int64_t oldest_ready_ns(self, const Tube* tube) noexcept
    cdef int end_job(self, uint32_t number) except -1
    cdef int take_back(self, uint32_t number) except -1
    cdef void expect_worker(self, uint32_t connection) noexcept
    cdef int serve_worker(self, uint32_t connection) except -1
    cdef int serve_keys(self) except -1
    cdef int serve_tubes(self) except -1
    cdef int serve_tube(self, uint32_t number) except -1
    cdef int end_waits(self) except -1
    cdef uint32_t tube_named(self, const uint8_t* name, uint32_t size) noexcept
    cdef uint32_t next_permitted(self, uint32_t number, uint32_t connection, int64_t room) except? 0xffffffff
    cdef int take_permit(self, uint32_t job) except -1
    cdef int take_permit_alone(self, uint32_t job) except -1
    cdef int wait_for_permit(self, uint32_t number) except -1
    cdef int first_changed(self, uint32_t number) except -1
    cdef int release_permit(self, uint32_t job) except -1
    cdef void charge_permit(self) noexcept
    cdef int serve_groups(self) except -1
    cdef int serve_group(self, uint32_t number) except -1
    cdef void expect_group(self, uint32_t number, int64_t due_ns) noexcept
    cdef bint has_requirement_room(
        self, uint32_t tube, const uint8_t* name, uint32_t size, uint64_t bytes, uint64_t blocks
    ) noexcept
    cdef void add_requirement(self, uint32_t number, const uint8_t* name, uint32_t size, uint32_t maximum) noexcept
    cdef int end_requirement(self, uint32_t job) except -1
    cdef int move_requirement(self, uint32_t job, uint32_t tube) except -1
    cdef int bury(self, uint32_t number) except -1


cdef inline void append(Store store, bytes text) noexcept:
    """Appends less than REPLY_ROOM bytes to the output."""
    debug_check(store.out_size + PyBytes_GET_SIZE(text) <= OUTPUT_MAX + REPLY_ROOM)
    memcpy(store.out + store.out_size, PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
    store.out_size += PyBytes_GET_SIZE(text)


# What the journal does not have yet: how long it takes to write, and replies that must no longer say that it has it.

cdef inline void journal_measure(BeanstalkStore store) noexcept:
    """Called when the last piece is on disk: adds its time to the average. A short piece says little, unless it
    took longer than a whole one should."""
    cdef int64_t took_ns = store.now_ns - store.state.sent_ns
    if store.state.sent_size > PIECE_SIZE // 4:
        took_ns = <int64_t>(took_ns * (<double>PIECE_SIZE / store.state.sent_size))
    elif took_ns < store.state.piece_ns:
        return
    store.state.piece_ns += (took_ns - store.state.piece_ns) // AVERAGED


cdef inline int64_t journal_backlog_ns(BeanstalkStore store) noexcept:
    """Returns how long the journal will need to write what it does not have yet, about."""
    cdef uint64_t size = store.queues.jobs.state.changes_size
    if store.durable < store.state.changes_taken:
        size += store.state.sent_size
    return <int64_t>(store.state.piece_ns * (<double>size / PIECE_SIZE))


cdef inline int journal_fill(BeanstalkStore store) except -1:
    """The journal has no room: changes a slice of the held replies as give_up_on() says. They are still held."""
    cdef Session session
    cdef uint32_t count
    store.steps = GIVEN_UP
    while store.state.refusing < <size_t>len(store.awaiting_journal):
        session = store.awaiting_journal[store.state.refusing]
        count = 0
        for at, (position, replies) in enumerate([] if session.held is None else session.held.pieces):
            count += <uint64_t>position > store.durable  # the others can be sent meanwhile
            if count > store.state.refused:
                if store.steps <= 0:
                    return 0
                store.state.refused = count
                if b"INSERTED" in replies or b"EXISTS" in replies:
                    store.steps -= 1 + (<int>PyBytes_GET_SIZE(replies) >> REPLY_SHIFT)
                    session.held.replace(at, position, session.give_up_on(replies))
        store.steps -= 1
        store.state.refusing += 1
        store.state.refused = 0
    return 0


cdef inline int journal_fail(BeanstalkStore store) except -1:
    """The journal cannot be written: sends a slice of the held replies, as give_up_on() changes them."""
    cdef Session session
    store.steps = GIVEN_UP
    while store.awaiting_journal and store.steps > 0:
        session = store.awaiting_journal[len(store.awaiting_journal) - 1]
        for at, (position, replies) in enumerate([] if session.held is None else session.held.pieces):
            if <uint64_t>position > store.durable and store.steps > 0:
                store.steps -= 1 + (<int>PyBytes_GET_SIZE(replies) >> REPLY_SHIFT)
                session.held.replace(at, 0, session.give_up_on(replies))
        session.update_held()
        if not session.awaits_journal:
            store.awaiting_journal.pop()
    return 0
