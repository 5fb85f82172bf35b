"""The beanstalk protocol without I/O: decodes, executes and answers the commands of a connection.

Floor 2 (ARCHITECTURE.md). Section names are those in docs/protocols/beanstalk.md, which describes all differences from
beanstalkd and the reasons.

A frame is a line. In a put and a search a body follows the line. _wire.pxd parses lines, and _replies.pxd writes
replies. The store decides which connection gets which job.
"""

from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memchr

from counterd._core cimport (
    DONE, FRAME_STEP_SHIFT, HALF_CLOSED, LATER, PARK, REPLY_ROOM, SKIP, Frame, Session, Why, held_size,
)
from counterd.engine.chains cimport chain_blocks
from counterd.engine.pool cimport pool_left
from counterd.engine.table cimport name_blocks, name_tag
from counterd.protocols.beanstalk._documents cimport job_document, stats_document, tube_document
from counterd.protocols.beanstalk._jobs cimport (
    BURIED, DELAYED, JOB_COST, READY, RESERVED, Job, Jobs, job_at, job_find, job_id, job_make,
)
from counterd.protocols.beanstalk._keys cimport KEY_COST, key_at, key_find, key_free, key_join, key_make
from counterd.protocols.beanstalk._listing cimport JobList, Listing, TubeList, WatchList
from counterd.protocols.beanstalk._queues cimport (
    Queues, job_touch, queues_next_ready, seconds_ns, tube_count, tube_expect, worker_is_pressed,
)
from counterd.protocols.beanstalk._replies cimport (
    BAD_FORMAT, BURIED_JOB, CLEARED, DEADLINE_SOON, DELETED, DRAINING, EXISTS, EXPECTED_CRLF, FOUND, GOOD, INSERTED,
    INTERNAL_ERROR, JOBS, JOB_HEAD_MAX, JOB_TOO_BIG, KICKED, KICKED_JOBS, LIMITED, NOT_ENABLED, NOT_FOUND, NOT_IGNORED,
    OUT_OF_MEMORY, PAUSED, RELEASED, RESERVED_JOB, TIMED_OUT, TOUCHED, UNKNOWN_COMMAND, USING, WATCHING, WRITTEN,
    Answer, Reply, write_reply,
)
from counterd.protocols.beanstalk._store cimport UNFINISHED, BeanstalkState, BeanstalkStore, append
from counterd.protocols.beanstalk._tubes cimport (
    TUBE_COST, Tube, Tubes, tube_at, tube_find, tube_settle, tubes_next_left,
)
from counterd.protocols.beanstalk._wire cimport (
    BATCH_MAX, BATCH_RESERVE, BURY, CLEAR_TUBE, COMMAND_WORDS, COMMANDS, CRLF_SIZE, DELETE, IGNORE, INSPECT_TUBE,
    KICK, KICK_JOB, LIMIT_RESERVES, LINE_MAX, LIST_JOBS, LIST_TUBE_USED, LIST_TUBES, LIST_TUBES_WATCHED, MALFORMED,
    NAME_MAX, NEEDLE_MAX, PAUSE_TUBE, PEEK, PEEK_BURIED, PEEK_DELAYED, PEEK_READY, PUT, PUT_LIMITED, PUT_UNIQUE,
    QUIT, RELEASE, RESERVE, RESERVE_JOB, RESERVE_WITH_TIMEOUT, SEARCH_JOBS, STATS, STATS_JOB, TOO_BIG, TOO_LONG,
    TOO_LONG_AT_CR, TOO_LONG_STILL, TOUCH, UNKNOWN, USE, WATCH, Command, Request, Word, line_command, line_decode,
    line_size,
)
from counterd.protocols.beanstalk._workers cimport (
    WATCH_COST, WATCHED_MAX, Worker, watch_add, watch_find, watch_remove, worker_enter, worker_use, worker_wait,
    worker_wake,
)

cdef enum:
    PUT_STEPS = 16          # of a put, some 0.6 us: records, cache lines and perhaps pages of memory that are new
    DELAY_STEPS = 8         # in addition, of the heap of delayed jobs
    LIMITED_STEPS = 12      # in addition, of a job that needs a permit
    TUBE_STEPS = 8          # of a limit, whose tube and group may have to be made
    SWEEP_STEPS = 8         # of reserving, kicking or deleting a job
    TEXT_STEPS = 300        # of statistics, which take some 10 us in Python
    LOOKUPS_MAX = 32768     # of a batch: to find each of its jobs, all watched tubes are looked at
    LIMITS_MAX = 4096       # limits of reserves that the journal was not given yet


cdef inline bint has_job_room(
    BeanstalkStore store, uint32_t tube, Command command, const Request* request, bint is_unique
) noexcept:
    """Returns whether there is room for a job in a tube, with its key and requirement."""
    cdef Queues* queues = &store.queues
    cdef uint64_t bytes = JOB_COST, blocks = chain_blocks(request.size)
    if is_unique:
        bytes += KEY_COST
        blocks += name_blocks(&queues.keys.table, request.other_size)
        if pool_left(queues.keys.table.pool) == 0:
            return False
    if tube_count(tube_at(&queues.tubes, tube)) >= store.tube_jobs_max or pool_left(queues.jobs.pool) == 0:
        return False
    if command == PUT_LIMITED:
        return store.has_requirement_room(tube, request.name, request.name_size, bytes, blocks)
    return store.has_room(bytes, blocks)


cdef bint has_tube_room(BeanstalkStore store) except -1:
    """Returns False if two tubes might find no room only because lists under way keep tubes that have ended.

    The command then is executed after a tick. If the tick can free nothing, the connection whose list began first is
    dropped.
    """
    cdef Tubes* tubes = &store.queues.tubes
    if tubes.state.ended == 0 or pool_left(tubes.table.pool) >= 2 and store.has_room(
        2 * TUBE_COST, 2 * name_blocks(&tubes.table, NAME_MAX)
    ):
        return True
    if tubes_next_left(tubes) == 0:
        store.sessions_dropped += 1
        (<Session>store.sessions[tubes.first_walk.connection]).drop()
    store.has_work = True
    return False


cdef class BeanstalkSession(Session):
    """One connection of the beanstalk protocol."""

    def __cinit__(self, BeanstalkStore store not None):
        worker_enter(&store.queues.workers, &store.queues.tubes, self.connection, store.state.default_tube)
        store.sessions[self.connection] = <void*>self

    def __dealloc__(self):
        self.is_listing = False  # the list ends by itself
        if self.connection and self.store is not None:  # the store must not answer it, even before forget()
            (<BeanstalkStore>self.store).sessions[self.connection] = NULL

    # ---- frames ----

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        cdef uint32_t line
        cdef Command command
        frame.data = data
        frame.key = NULL
        frame.key_size = frame.tag = 0
        if self.discarding:
            return self.parse_long(data, size, frame)
        line = line_size(data, min(size, <size_t>LINE_MAX))
        if line == 0:
            return 0 if size < LINE_MAX else self.parse_long(data, size, frame)
        command = line_command(data, line)
        frame.size = line
        frame.parse_result = command
        if command == PUT or command == PUT_UNIQUE or command == PUT_LIMITED or command == SEARCH_JOBS:
            return self.parse_body(data, size, line, frame)
        return -1 if command == QUIT and line == COMMAND_WORDS[<int>QUIT].size + CRLF_SIZE else line

    cdef Py_ssize_t parse_body(self, const uint8_t* data, size_t size, uint32_t line, Frame* frame) noexcept:
        """Parses a line with a body and its CRLF. See sections "put", "put-unique", "put-limited", "search-jobs"."""
        cdef const Word* word = COMMAND_WORDS + frame.parse_result
        cdef Request request
        cdef uint64_t whole
        cdef bint is_put = frame.parse_result != SEARCH_JOBS
        cdef uint32_t most = (<BeanstalkStore>self.store).job_size_max if is_put else <uint32_t>NEEDLE_MAX
        if not line_decode(data + word.size, data + line - CRLF_SIZE, word.arguments, &request):
            frame.parse_result = MALFORMED
            return line
        whole = line + <uint64_t>request.size + CRLF_SIZE
        if request.size > most:
            frame.parse_result = TOO_BIG if is_put else MALFORMED
            frame.skip = whole
            return SKIP
        if size < whole:
            return 0
        frame.key = data + line
        frame.key_size = request.size
        frame.size = <uint32_t>whole
        return frame.size

    cdef Py_ssize_t parse_long(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        """Discards a line that is too long, or a part of such a line, up to its end."""
        cdef uint32_t line = line_size(data, size)
        if self.discarding == TOO_LONG_AT_CR and data[0] == b"\n":
            line = 1
        frame.parse_result = TOO_LONG if line else TOO_LONG_AT_CR if data[size - 1] == b"\r" else TOO_LONG_STILL
        frame.skip = line if line else size
        return SKIP

    cdef int execute_frame(self, const Frame* frame) except -1:
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef BeanstalkState* state = store.state
        cdef Command command = <Command>frame.parse_result
        cdef Request request
        cdef Answer answer
        cdef const uint8_t* end
        cdef uint64_t edits
        cdef int done = DONE
        if command == TOO_LONG_STILL or command == TOO_LONG_AT_CR:
            self.discarding = command
            return DONE
        if command < COMMANDS:
            end = (frame.data + frame.size if frame.key == NULL else frame.key) - CRLF_SIZE
            if not line_decode(
                frame.data + COMMAND_WORDS[<int>command].size, end, COMMAND_WORDS[<int>command].arguments, &request
            ):
                command = MALFORMED
        if command < COMMANDS:
            state.requests[<int>command] += 1
            edits = store.queues.jobs.state.edits
            done = self.decide(command, &request, frame, &answer)
            if store.queues.jobs.state.edits != edits:
                self.edited(command)
            if done == LATER:
                state.requests[<int>command] -= 1
            if done != DONE:
                return done
        else:
            answer.reply = self.refuse_line(command, frame)
            command = PUT if command == TOO_BIG else command
        if answer.reply == WRITTEN:
            return DONE
        if answer.reply >= GOOD:
            state.refusals[min(<int>command, <int>COMMANDS)][<int>answer.reply] += 1
        store.out_size = write_reply(store.out + store.out_size, &store.queues, &answer) - store.out
        return DONE

    cdef Reply refuse_line(self, Command command, const Frame* frame) noexcept:
        """Returns the reply to a line that is not a valid command."""
        if command == TOO_BIG:
            (<BeanstalkStore>self.store).state.requests[<int>PUT] += 1
            return JOB_TOO_BIG
        if command == TOO_LONG:
            self.discarding = PUT
            return BAD_FORMAT
        if command == UNKNOWN and memchr(frame.data, 0, frame.size) == NULL:
            return UNKNOWN_COMMAND
        return BAD_FORMAT

    cdef void edited(self, Command command) noexcept:
        """Called when a command has changed jobs.

        Holds the reply of the command back for the journal. Replies to reserves are not held back, because they promise
        nothing about the disk.
        """
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        if RESERVE <= command <= RESERVE_JOB or command == BATCH_RESERVE:
            store.expect(store.journal_due_ns())
        else:
            store.promise(self)

    # ---- commands ----

    cdef int decide(self, Command command, const Request* request, const Frame* frame, Answer* answer) except -1:
        """Executes a command and sets its reply. Returns DONE, LATER or PARK."""
        if command == PUT or command == PUT_UNIQUE or command == PUT_LIMITED:
            answer.reply = self.put(command, request, frame, answer)
        elif (<BeanstalkStore>self.store).state.is_failing and is_lasting(command):
            answer.reply = INTERNAL_ERROR
        elif command == RESERVE or command == RESERVE_WITH_TIMEOUT or command == BATCH_RESERVE:
            return self.reserve(command, request, answer)
        elif is_long(command):
            answer.reply = self.answer_at_length(command, request, frame)
        elif USE <= command <= IGNORE or command == PAUSE_TUBE or command == LIMIT_RESERVES:
            if not has_tube_room(self.store):
                return LATER
            answer.reply = self.decide_on_tube(command, request, answer)
        elif command == LIST_TUBE_USED:
            answer.number = (<BeanstalkStore>self.store).queues.workers.records[self.connection].used
            answer.reply = USING
        elif command == PEEK_READY or command == PEEK_DELAYED or command == PEEK_BURIED:
            answer.reply = self.peek(command, answer)
        elif command == QUIT:
            answer.reply = WRITTEN
        else:
            answer.reply = self.decide_on_job(command, request, answer)
        return DONE

    cdef Reply put(self, Command command, const Request* request, const Frame* frame, Answer* answer) except *:
        """Executes a put: sections "put", "put-unique" and "put-limited"."""
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef Queues* queues = &store.queues
        cdef Worker* worker = queues.workers.records + self.connection
        cdef const uint8_t* end = frame.key + frame.key_size
        cdef uint32_t number, key, tag = 0
        cdef bint is_unique = command != PUT and request.other_size != 0
        queues.workers.state.producers += not worker.is_producer
        worker.is_producer = True
        if end[0] != b"\r" or end[1] != b"\n":
            return EXPECTED_CRLF
        if store.state.refuses_puts or store.state.draining:
            return DRAINING
        if store.state.is_failing or store.state.is_full or queues.jobs.state.last_id >= queues.jobs.state.id_limit:
            return INTERNAL_ERROR
        if command == PUT_LIMITED and store.lender is None:
            return NOT_ENABLED
        if is_unique:
            tag = name_tag(&queues.keys.table, request.other, request.other_size)
            key = key_find(&queues.keys, &queues.jobs, tag, request.other, request.other_size, store.now_ns)
            if key:
                answer.number = key_at(&queues.keys, key).id
                store.promise(self)  # the existing job may not be on disk yet
                return EXISTS
        if not has_job_room(store, worker.used, command, request, is_unique):
            return OUT_OF_MEMORY
        store.budget -= PUT_STEPS
        number = job_make(
            &queues.jobs, worker.used, request.priority, request.delay, request.ttr, frame.key, request.size,
            store.now_ns
        )
        answer.number = job_id(job_at(&queues.jobs, number))
        if is_unique:
            key = key_make(
                &queues.keys, tag, request.other, request.other_size, answer.number, request.timeout
            )
            key_join(&queues.keys, &queues.jobs, key, number)
        if command == PUT_LIMITED:
            store.budget -= LIMITED_STEPS
            store.add_requirement(number, request.name, request.name_size, request.count)
        tube_at(&queues.tubes, worker.used).total += 1
        if request.delay:
            store.budget -= DELAY_STEPS
            store.delay(number)
        else:
            store.make_ready(number)
        return INSERTED

    cdef void count_worker(self) noexcept:
        """Counts the connection as a worker, because it has sent a reserve."""
        cdef Worker* worker = (<BeanstalkStore>self.store).queues.workers.records + self.connection
        (<BeanstalkStore>self.store).queues.workers.state.workers += not worker.is_worker
        worker.is_worker = True

    cdef int reserve(self, Command command, const Request* request, Answer* answer) except -1:
        """Reserves a ready job, or waits. See sections "reserve", "reserve-with-timeout", "batch-reserve"."""
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef Queues* queues = &store.queues
        cdef Worker* worker = queues.workers.records + self.connection
        cdef int64_t until_ns = INT64_MAX
        cdef uint32_t number = 0
        self.count_worker()
        if command == BATCH_RESERVE and request.count == 0:
            answer.reply = BAD_FORMAT
            return DONE
        if not store.state.draining:
            number = queues_next_ready(queues, self.connection, store.now_ns, &store.budget)
        if number and job_at(&queues.jobs, number).is_limited:
            number = store.next_permitted(number, self.connection, INT64_MAX)
            if number == UNFINISHED:
                return LATER
        if number and command == BATCH_RESERVE:
            answer.reply = self.reserve_more(number, request.count)
            return DONE
        if number:
            store.budget -= SWEEP_STEPS
            store.reserve(number, self.connection)
            answer[0] = Answer(RESERVED_JOB, number)
            return DONE
        if worker_is_pressed(queues, self.connection, store.now_ns):
            answer.reply = DEADLINE_SOON
            return DONE
        if store.state.draining or command != RESERVE and request.timeout == 0:
            answer.reply = TIMED_OUT
            return DONE
        if command != RESERVE:
            until_ns = store.now_ns + seconds_ns(request.timeout)
        worker.command = command
        store.state.unanswered[<int>command] += 1
        worker_wait(&queues.workers, &queues.tubes, self.connection, until_ns)
        store.budget -= worker.watches
        store.expect_worker(self.connection)
        return PARK

    cdef Reply reserve_more(self, uint32_t number, uint32_t most) except *:
        """Reserves a job and the jobs after it, at most `most` in all, and writes the replies.

        See section "batch-reserve".
        """
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef Queues* queues = &store.queues
        cdef uint32_t[BATCH_MAX] numbers
        cdef uint32_t count = 0, i
        cdef int64_t room = REPLY_ROOM
        cdef Answer answer
        most = min(most, <uint32_t>BATCH_MAX, 1 + LOOKUPS_MAX // queues.workers.records[self.connection].watches)
        while number:
            room -= job_at(&queues.jobs, number).size + JOB_HEAD_MAX
            store.reserve(number, self.connection)
            store.budget -= 1 + (job_at(&queues.jobs, number).size >> FRAME_STEP_SHIFT)
            numbers[count] = number
            count += 1
            if count == most:
                break
            number = queues_next_ready(queues, self.connection, store.now_ns, &store.budget)
            if number == 0 or <int64_t>job_at(&queues.jobs, number).size + JOB_HEAD_MAX > room:
                break
            if job_at(&queues.jobs, number).is_limited:
                number = store.next_permitted(number, self.connection, room)
                if number == UNFINISHED:
                    break
        answer = Answer(JOBS, count)
        store.out_size = write_reply(store.out + store.out_size, queues, &answer) - store.out
        for i in range(count):
            answer = Answer(RESERVED_JOB, numbers[i])
            store.out_size = write_reply(store.out + store.out_size, queues, &answer) - store.out
        return WRITTEN

    cdef int end_wait(self, Why why) except -1:
        """Implements Session.end_wait: the peer sends nothing more, or is gone."""
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        if why == HALF_CLOSED:
            return store.end_waiting(self.connection, TIMED_OUT)
        if store.queues.workers.records[self.connection].is_waiting:
            worker_wake(&store.queues.workers, &store.queues.tubes, self.connection)
        return 0

    cdef Reply decide_on_job(self, Command command, const Request* request, Answer* answer) except *:
        """Executes a command on a job.

        The reply NOT_FOUND means that the job does not exist, or that its state does not fit.
        """
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef Queues* queues = &store.queues
        cdef uint32_t number = job_find(&queues.jobs, request.id)
        cdef Job* job
        cdef bint is_own
        if number == 0:
            return NOT_FOUND
        job = job_at(&queues.jobs, number)
        is_own = store.is_held_by(job, self.connection)
        answer.number = number
        if command == PEEK:
            return FOUND
        if command == DELETE and (is_own or job.state != RESERVED):
            tube_at(&queues.tubes, job.tube).deletes += 1
            store.end_job(number)
            return DELETED
        if command == RESERVE_JOB and job.state != RESERVED and not store.state.draining:
            self.count_worker()
            if job.is_limited and not store.take_permit_alone(number):
                return NOT_FOUND
            store.reserve(number, self.connection)
            if job.is_limited:
                store.first_changed(queues.groups.requirements[number].group)
            return RESERVED_JOB
        if command == KICK_JOB and (job.state == BURIED or job.state == DELAYED):
            job.kicks += 1
            store.take_back(number)
            return KICKED
        if not is_own or command == KICK_JOB or command == RESERVE_JOB:
            return NOT_FOUND
        if command == TOUCH:
            job_touch(queues, number, self.connection, store.now_ns)
            store.expect_worker(self.connection)
            return TOUCHED
        if command == BURY:
            job.priority = request.priority
            store.bury(number)
            return BURIED_JOB
        job.priority = request.priority
        job.delay = request.delay
        job.releases += 1
        store.come_back(number, request.delay != 0)
        return RELEASED

    cdef Reply peek(self, Command command, Answer* answer) except *:
        """Finds the next job of the used tube. See sections "peek-ready", "peek-delayed" and "peek-buried"."""
        cdef Queues* queues = &(<BeanstalkStore>self.store).queues
        cdef const Tube* tube = tube_at(&queues.tubes, queues.workers.records[self.connection].used)
        if command == PEEK_READY:
            answer.number = tube.ready
        elif command == PEEK_DELAYED:
            answer.number = tube.delayed
        else:
            answer.number = tube.buried_list.first
        return FOUND if answer.number else NOT_FOUND

    cdef Reply decide_on_tube(self, Command command, const Request* request, Answer* answer) except *:
        """Executes a command on a tube: sections "use", "watch", "ignore", "pause-tube" and "limit-reserves"."""
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef Queues* queues = &store.queues
        cdef Worker* worker = queues.workers.records + self.connection
        cdef uint32_t tag = name_tag(&queues.tubes.table, request.name, request.name_size)
        cdef uint32_t number, watch
        if command == LIMIT_RESERVES and (
            store.state.is_failing or store.state.is_full or len(store.limits) >= LIMITS_MAX
        ):
            return INTERNAL_ERROR
        if command == USE or command == WATCH or command == LIMIT_RESERVES:
            number = store.find_tube(tag, request.name, request.name_size)
            if number == 0:
                return OUT_OF_MEMORY
        else:
            number = tube_find(&queues.tubes, tag, request.name, request.name_size)
        if command == PAUSE_TUBE:
            return self.pause(number, request.delay)
        if command == LIMIT_RESERVES:
            store.budget -= TUBE_STEPS
            return self.limit_reserves(number, request)
        if command == USE:
            worker_use(&queues.workers, &queues.tubes, self.connection, number)
            answer.number = number
            return USING
        watch = watch_find(&queues.workers, self.connection, number, &store.budget) if number else 0
        if command == WATCH and watch == 0:
            if worker.watches == WATCHED_MAX or not store.has_room(WATCH_COST, 0):
                tube_settle(&queues.tubes, number)
                return OUT_OF_MEMORY
            watch_add(&queues.workers, &queues.tubes, self.connection, number)
        elif command == IGNORE and watch:
            if worker.watches == 1:
                return NOT_IGNORED
            watch_remove(&queues.workers, &queues.tubes, watch)
        answer.number = worker.watches
        return WATCHING

    cdef Reply pause(self, uint32_t number, uint32_t seconds) except *:
        """Pauses a tube: section "pause-tube". seconds: 0 ends a pause."""
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef int64_t due_ns
        cdef Tube* tube
        if number == 0:
            return NOT_FOUND
        tube = tube_at(&store.queues.tubes, number)
        tube.pause = seconds
        tube.pauses += 1
        tube.paused_until_ns = store.now_ns + seconds_ns(seconds)
        due_ns = tube.paused_until_ns if seconds else 0  # at once, not at the next tick of the wheel
        tube_expect(&store.queues, number, due_ns)
        store.expect(due_ns)
        return PAUSED

    cdef Reply limit_reserves(self, uint32_t number, const Request* request) except *:
        """Limits the reserves of a tube: section "limit-reserves"."""
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef Tubes* tubes = &store.queues.tubes
        cdef uint32_t target
        tube_at(tubes, number).walks += 1  # keeps the tube from ending, although nothing may need it yet
        target = store.find_tube(
            name_tag(&tubes.table, request.other, request.other_size), request.other, request.other_size
        )
        if target:
            tube_at(tubes, target).walks += 1
            store.limit_reserves(number, request.count, target)
            tube_at(tubes, target).walks -= 1
            tube_settle(tubes, target)
        tube_at(tubes, number).walks -= 1
        tube_settle(tubes, number)
        return LIMITED if target else OUT_OF_MEMORY

    # ---- long commands ----

    cdef Reply answer_at_length(self, Command command, const Request* request, const Frame* frame) except *:
        """Writes statistics, or begins a kick, a clear-tube or a list. produce() continues these."""
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef bytes text
        if command == KICK or command == CLEAR_TUBE:
            return self.begin_sweep(command, request)
        if command == LIST_TUBES or command == LIST_TUBES_WATCHED:
            return self.begin_list((TubeList if command == LIST_TUBES else WatchList)(store, self.connection))
        if command == LIST_JOBS or command == SEARCH_JOBS:
            return self.begin_jobs(request, frame)
        store.budget -= TEXT_STEPS
        if command == STATS:
            text = stats_document(store)
        elif command == STATS_JOB:
            text = job_document(store, job_find(&store.queues.jobs, request.id))
        else:
            text = tube_document(
                store, store.tube_named(request.name, request.name_size), command == INSPECT_TUBE
            )
        if text is None:
            return NOT_FOUND
        append(store, b"OK %d\r\n%b\r\n" % (len(text), text))
        return WRITTEN

    cdef Reply begin_jobs(self, const Request* request, const Frame* frame) except *:
        """Begins a list of jobs: sections "list-jobs" and "search-jobs"."""
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef uint32_t number = store.tube_named(request.name, request.name_size)
        cdef bytes needle = b""
        if frame.key != NULL:
            needle = frame.key[:frame.key_size]
            if frame.key[frame.key_size] != b"\r" or frame.key[frame.key_size + 1] != b"\n":
                return EXPECTED_CRLF
        if number == 0:
            return NOT_FOUND
        return self.begin_list(
            JobList(store, number, request.state, request.id, min(request.count, <uint32_t>BATCH_MAX), needle)
        )

    cdef Reply begin_list(self, Listing listing) except *:
        self.listing = listing
        self.is_listing = True
        return self.go_on_later()

    cdef Reply go_on_later(self) except *:
        """Begins a long command, after the replies that wait for the journal.

        While the command runs, the connection keeps its jobs, even if the peer has half-closed.
        """
        self.position = 1
        self.awaited += 1
        if self.barrier == 0 and held_size(self) == 0:
            self.produce()
        return WRITTEN

    cdef int produce(self) except -1:
        """Continues a list, a kick or a clear-tube."""
        cdef bytes reply
        if not (self.listing.go_on() if self.is_listing else self.sweep()):
            return 0
        reply = self.listing.reply() if self.is_listing else None
        self.let_go()
        self.position = 0
        self.awaited -= 1
        if reply is not None:
            self.post(reply)
        return 0

    cdef Reply begin_sweep(self, Command command, const Request* request) except *:
        """Begins to kick or clear jobs, at most as many as exist now."""
        cdef Queues* queues = &(<BeanstalkStore>self.store).queues
        cdef uint32_t number = queues.workers.records[self.connection].used
        cdef Tube* tube
        if command == CLEAR_TUBE and request.state == RESERVED:
            return BAD_FORMAT
        if command == CLEAR_TUBE:
            number = (<BeanstalkStore>self.store).tube_named(request.name, request.name_size)
            if number == 0:
                return NOT_FOUND
        tube = tube_at(&queues.tubes, number)
        tube.walks += 1
        self.sweeping = command
        self.sweep_tube = number
        self.swept = 0
        if command == KICK:
            self.sweep_state = BURIED if tube.jobs[<int>BURIED] else DELAYED
            self.sweep_left = min(request.count, tube.jobs[self.sweep_state])
        else:
            self.sweep_state = request.state
            self.sweep_left = tube.jobs[request.state] if request.state else (
                tube.jobs[<int>READY] + tube.jobs[<int>DELAYED] + tube.jobs[<int>BURIED]
            )
        return self.go_on_later()

    cdef bint sweep(self) except -1:
        """Kicks or clears jobs within the budget of this call.

        When all jobs are done, or the journal cannot be written, writes the reply and returns True.
        """
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef Queues* queues = &store.queues
        cdef Answer answer
        cdef uint32_t number
        while self.sweep_left and not store.state.is_failing:
            if store.budget <= 0:
                return False
            number = tube_next(tube_at(&queues.tubes, self.sweep_tube), self.sweep_state)
            if number == 0:
                break
            store.budget -= SWEEP_STEPS
            self.sweep_left -= 1
            self.swept += 1
            if self.sweeping == KICK:
                job_at(&queues.jobs, number).kicks += 1
                store.take_back(number)
            else:
                store.end_job(number)
        if store.state.is_failing:
            store.state.given_up[<int>self.sweeping] += 1
            answer = Answer(INTERNAL_ERROR, 0)
        else:
            if self.swept:
                store.promise(self)
            answer = Answer(KICKED_JOBS if self.sweeping == KICK else CLEARED, self.swept)
        store.out_size = write_reply(store.out + store.out_size, queues, &answer) - store.out
        return True

    cdef void let_go(self) noexcept:
        """Ends a list, a kick or a clear-tube, and allows tubes to end again."""
        cdef Queues* queues = &(<BeanstalkStore>self.store).queues
        if self.is_listing:
            self.is_listing = False
            self.listing = None
        if self.sweep_tube:
            tube_at(&queues.tubes, self.sweep_tube).walks -= 1
            tube_settle(&queues.tubes, self.sweep_tube)
            self.sweep_tube = 0

    cdef void give_back(self) noexcept:
        self.let_go()
        Session.give_back(self)

    cdef bytes give_up_on(self, bytes replies):
        """Deletes jobs that were put, unless a worker has got them. See section "The journal".

        If the journal has no room, changes only replies to puts; if it fails, all that promise that it has something.
        """
        cdef BeanstalkStore store = <BeanstalkStore>self.store
        cdef Jobs* jobs = &store.queues.jobs
        cdef list kept = []
        cdef Py_ssize_t at = 0, end
        cdef uint32_t number
        cdef Command command
        cdef bint is_refused
        while at < len(replies):
            end = replies.index(b"\r\n", at) + CRLF_SIZE
            words = replies[at:end].split()
            if words[0] in (b"RESERVED", b"FOUND", b"OK"):
                end += int(words[len(words) - 1]) + CRLF_SIZE
            number = job_find(jobs, int(words[1])) if words[0] == b"INSERTED" else 0
            is_refused = number or words[0] == b"EXISTS" or store.state.is_failing and words[0] in LASTING
            if is_refused:
                command = LASTING[words[0]] if words[0] in LASTING else PUT_UNIQUE if not number else PUT
                command = PUT_UNIQUE if number and job_at(jobs, number).key else command
                command = PUT_LIMITED if number and job_at(jobs, number).is_limited else command
                command = KICK if command == KICK_JOB and len(words) > 1 else command
                store.state.given_up[<int>command] += 1
            if number and job_at(jobs, number).reserves == 0:
                if job_at(jobs, number).key:  # free for a client that puts the job again
                    key_free(&store.queues.keys, jobs, job_at(jobs, number).key)
                store.end_job(number)
            kept.append(b"INTERNAL_ERROR\r\n" if is_refused else replies[at:end])
            at = end
        return b"".join(kept)


# Replies that say what the journal has, besides those to puts, and the commands that get them. TOUCHED is none of them:
# a time to run says little after a crash, because the worker is gone.
cdef dict LASTING = {
    b"DELETED": DELETE, b"RELEASED": RELEASE, b"BURIED": BURY, b"KICKED": KICK_JOB, b"CLEARED": CLEAR_TUBE,
    b"LIMITED": LIMIT_RESERVES,
}


cdef inline bint is_lasting(Command command) noexcept nogil:
    """Returns whether a command ends a job, or changes its state for longer than its connection."""
    return (
        command == DELETE or command == RELEASE or command == BURY or command == KICK or command == KICK_JOB
        or command == CLEAR_TUBE
    )


cdef inline bint is_long(Command command) noexcept nogil:
    """Returns whether a command makes its reply in Python, or piece by piece."""
    return (
        STATS <= command <= LIST_TUBES or command == LIST_TUBES_WATCHED or command == KICK
        or CLEAR_TUBE <= command <= INSPECT_TUBE
    )


cdef inline uint32_t tube_next(const Tube* tube, uint8_t state) noexcept nogil:
    """Returns the next job to kick or clear in a state, or 0 if there is none.

    State 0 means any state except RESERVED.
    """
    if state == READY or state == 0:
        if tube.ready:
            return tube.ready
        if tube.ready_list.first:   # all that are ready are blocked
            return tube.ready_list.first
    if tube.delayed and (state == DELAYED or state == 0):
        return tube.delayed
    return tube.buried_list.first if state == BURIED or state == 0 else 0


def open_store(*, job_size_max, **sizes):
    """Makes a store. sizes: the arguments of BeanstalkStore."""
    reply_max = max(<size_t>REPLY_ROOM, <size_t>job_size_max + JOB_HEAD_MAX)
    return BeanstalkStore(make_session=BeanstalkSession, job_size_max=job_size_max, reply_max=reply_max, **sizes)
