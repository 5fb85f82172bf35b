"""The session machine and the region: the base of every protocol's sessions and stores.

Floor 1 (ARCHITECTURE.md). This file does no I/O: it gets bytes and the time, and returns bytes. A peer can cause
replies and closes, never an exception. An exception raised here is a bug in counterd.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_SetSlice
from cpython.mem cimport PyMem_RawFree, PyMem_RawMalloc, PyMem_RawRealloc
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memmove
from posix.mman cimport munmap

from counterd.engine.byteorder cimport load_le64
from counterd.engine.connections cimport (
    CONNECTIONS_MAX, connections_begin, connections_put, connections_reserve, connections_take,
)
from counterd.engine.debug cimport COUNTERD_DEBUG_BUILD, debug_check
from counterd.engine.held cimport HeldReplies
from counterd.engine.region cimport LAYOUT_VERSION, region_close, region_map, region_open, region_reserve
from counterd.engine.siphash cimport siphash13

DEBUG = bool(COUNTERD_DEBUG_BUILD)
LIMIT_CONNECTIONS = CONNECTIONS_MAX

cdef enum:
    KEPT_MIN = 64               # bytes: the smallest buffer for kept input, and the smallest piece added before a retry


# ---- store ---------------------------------------------------------------------------------------------------------

cdef class Store:
    """The state that all sessions of one protocol share. A subclass adds the parts that it needs.

    hash_key: 16 random bytes.
    make_session: called for each connection with the store, and with the port if the port is not 0.
    reply_max: bytes of the longest reply.
    posted_max: bytes of posted messages that may wait for a session that does not take them.
    now_ns: the time on the caller's monotonic clock.

    A subclass reserves the memory of its parts in __cinit__, maps the region (`map_region`) and begins the parts. This
    is the first call of the store. All code that touches the region runs between `begin_call` and `end_call`, or in
    `with store:`, which is a call at the time of the last call. A debug build protects the region outside of calls.
    """

    def __cinit__(self, *, bytes hash_key not None, make_session, size_t reply_max=REPLY_ROOM, size_t posted_max=0,
                  int64_t now_ns=0, **_):
        if len(hash_key) != 16:
            raise ValueError(f"hash_key must have 16 bytes, not {len(hash_key)}")
        self.make_session = make_session
        self.posted_max = posted_max
        self.now_ns = now_ns
        self.scheduled_ns = INT64_MAX
        self.dirty, self.awaiting_journal, self.collected = [], [], []
        self.out = <uint8_t*>PyMem_RawMalloc(OUTPUT_MAX + reply_max)
        if self.out == NULL:
            raise MemoryError("no room for the replies of one call")
        region_reserve(&self.region, b"header", sizeof(Header), <void**>&self.header)
        connections_reserve(&self.connections, &self.region)

    def __init__(self, *, bytes hash_key, **_):
        if self.region.memory == NULL:  # a store without parts of its own
            self.map_region(hash_key)
        self.end_call()

    def __dealloc__(self):
        PyMem_RawFree(self.out)
        if self.region.memory != NULL:
            munmap(self.region.memory, self.region.size)

    cdef int map_region(self, bytes hash_key) except -1:
        """Maps the reserved memory. Called once. Raises MemoryError if the system has too little memory."""
        region_map(&self.region)
        self.entered = True
        self.header.version = LAYOUT_VERSION
        self.header.key[0] = load_le64(<const uint8_t*>PyBytes_AS_STRING(hash_key))
        self.header.key[1] = load_le64(<const uint8_t*>PyBytes_AS_STRING(hash_key) + 8)
        connections_begin(&self.connections)
        return 0

    cdef int begin_call(self, int64_t now_ns) except -1:
        """Opens the region until end_call(). Calls do not nest: raises RuntimeError during another call."""
        if self.entered:
            raise RuntimeError("a call is in progress")
        self.entered = True
        self.now_ns = now_ns
        self.budget = CALL_STEPS
        region_open(&self.region)
        return 0

    cdef void end_call(self) noexcept:
        region_close(&self.region)
        self.entered = False

    cdef Store at(self, int64_t now_ns):
        """Sets the time of the next call: `with self.at(now_ns):`."""
        if not self.entered:
            self.now_ns = now_ns
        return self

    def __enter__(self):
        self.begin_call(self.now_ns)

    def __exit__(self, *_):
        self.end_call()

    def limit_posted(self, size_t posted_max):
        """Sets how many bytes of posted messages may wait for one session."""
        self.posted_max = posted_max

    cpdef Session session(self, int64_t now_ns=0, int port=0):
        """Makes the session of a new connection to `port`. Raises MemoryError if there is no room for the session."""
        self.begin_call(max(now_ns, self.now_ns))
        try:
            return self.make_session(self) if port == 0 else self.make_session(self, port)
        finally:
            collected_forget(self)  # such as the session that was just made, if its subclass found no room
            self.end_call()

    cdef void forget(self, uint32_t connection) noexcept:
        """Ends a connection. The number of the connection is free again when nothing in the region refers to it."""
        connections_put(&self.connections, connection)

    cpdef int64_t next_deadline(self):
        """Returns when tick() or take_dirty() is due, in ns on the caller's clock, or 0 for now, or -1 for never."""
        cdef int64_t due_ns = 0
        if not self.dirty and not self.collected:
            self.begin_call(self.now_ns)
            try:
                due_ns = self.due_ns()
            finally:
                self.end_call()
        self.scheduled_ns = due_ns if due_ns >= 0 else INT64_MAX
        return due_ns

    cdef int64_t due_ns(self) except? -2:
        """Returns when run_due() has work. 0 means now, -1 means never, as in next_deadline()."""
        return -1

    cdef void expect(self, int64_t due_ns) noexcept:
        """Makes the caller look at next_deadline() again if due_ns is earlier than the scheduled tick()."""
        if due_ns < self.scheduled_ns:
            self.has_work = True

    cpdef tick(self, int64_t now_ns):
        """Does the work that is due, for at most half a millisecond."""
        self.begin_call(now_ns)
        try:
            collected_forget(self)
            self.run_due()
        finally:
            self.end_call()

    cdef int run_due(self) except -1:
        """Does one slice of the work of a tick."""
        return 0

    cpdef set_wall(self, int64_t unix_ns, int64_t now_ns):
        """Gets the time of both clocks at one instant, for protocols that show Unix time."""

    cpdef list take_dirty(self):
        """Returns the sessions that got output from another session or tick(), or were dropped, since the last call."""
        cdef list dirty = self.dirty
        cdef Session session
        if dirty:
            self.dirty = []
            for session in dirty:
                session.is_dirty = False
        return dirty

    def reach(self, uint64_t position, int64_t now_ns):
        """Releases the replies that waited for the journal, which is now on disk up to `position`."""
        cdef list awaiting_journal = self.awaiting_journal
        cdef Session session
        self.durable = max(self.durable, position)
        self.awaiting_journal = []
        with self.at(now_ns):
            for session in awaiting_journal:
                session.update_held()
                if session.awaits_journal:
                    self.awaiting_journal.append(session)

    def snapshot(self):
        """Returns the store's current figures by name."""
        with self:
            return self.figures()

    cdef dict figures(self):
        """Returns the figures for snapshot(). Runs within a call."""
        return {
            "curr_connections": self.sessions_open,
            "total_connections": self.sessions_total,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "region": self.region.size,
        }

    def outcomes(self):
        """Returns (operation, status, count) for each combination of operation and status that has occurred."""
        return []

    def begin_drain(self):
        """Stops granting anything, for good, and ends all waits. All other requests are still served."""

    def part(self):
        """Called before all connections end. Posts the replies that wait for events; no request waits any more."""

    def held(self):
        """Returns how many holdings a drain waits for, including those that ended connections have left behind."""
        return 0

    def holdings_of(self, uint32_t connection):
        """Returns how many holdings a connection has. connection: its Session.number. Unknown numbers have 0."""
        return 0

    def about(self, uint32_t connection):
        """Returns the name that a connection has stated, or "", and the end of its grace time in 1/10 s, or None."""
        return "", None

    def evict(self, uint32_t connection, int64_t now_ns):
        """Gives back everything that a connection leaves behind. If there is anything, returns True: tick() does it."""
        return False

    def leases(self, size_t limit):
        """Returns at most `limit` of the holdings that held() counts, as (connection, name, amount, since in s/10)."""
        return []

    def audit(self):
        """Checks the whole region. Raises AssertionError at the first broken invariant. Only tests call this method."""
        with self:
            self.audit_parts()

    cdef int audit_parts(self) except -1:
        """Checks the parts of the store for audit(). Runs within a call."""
        return 0


cdef int collected_forget(Store store) except -1:
    """Forgets the connections whose sessions were garbage-collected during a call."""
    while store.collected:
        store.forget(store.collected.pop())
    return 0


def siphash(bytes key not None, bytes data not None):
    """Returns the SipHash-1-3 of data under a key of 16 bytes, as the table uses it."""
    cdef uint64_t[2] words
    if len(key) != 16:
        raise ValueError(f"the key must have 16 bytes, not {len(key)}")
    words[0] = load_le64(<const uint8_t*>PyBytes_AS_STRING(key))
    words[1] = load_le64(<const uint8_t*>PyBytes_AS_STRING(key) + 8)
    return siphash13(words, <const uint8_t*>PyBytes_AS_STRING(data), len(data))


# ---- session -------------------------------------------------------------------------------------------------------

STATE_NAMES = ("reading", "streaming", "parked", "ended", "closing")

# The states that can follow each state; FOLLOWERS: as bit masks.
TRANSITIONS = {
    "reading": ("streaming", "parked", "ended", "closing"),
    "streaming": ("reading", "parked", "ended", "closing"),
    "parked": ("reading", "streaming", "ended", "closing"),
    "ended": ("parked", "closing"),
    "closing": (),
}

cdef uint8_t[STATES] FOLLOWERS
for _state, _followers in TRANSITIONS.items():
    FOLLOWERS[<int>STATE_NAMES.index(_state)] = sum([1 << STATE_NAMES.index(name) for name in _followers])


cdef inline bint is_stopped(Session session) noexcept:
    """Returns whether the rest of the input has to wait for the next call."""
    return session.stops or session.position != 0 or session.store.budget <= 0 or session.store.out_size >= OUTPUT_MAX


@cython.no_gc_clear  # a collected session gives back its holdings, and needs its store for that
cdef class Session:
    """The state machine of one connection: gets bytes, returns bytes.

    A subclass defines what a frame is (`parse_frame`), what it does (`execute_frame`), how a long reply continues
    (`produce`) and what happens to a parked request whose event will not come (`end_wait`). After each call,
    `update_state` chooses the next `State` from the work that remains. `detach` sets the last state.
    """

    def __cinit__(self, Store store not None, int port=0):
        if not store.entered:
            raise RuntimeError("sessions are made by Store.session()")
        self.store = store
        self.port = port
        self.connection = connections_take(&store.connections)
        if self.connection == 0:
            raise MemoryError(f"{CONNECTIONS_MAX} connections are open or ending")
        self.open = True
        store.sessions_open += 1
        store.sessions_total += 1

    def __dealloc__(self):
        cdef Store store = self.store
        if store is None or not self.open:
            return
        if not store.entered:
            with store:
                self.detach()
            return
        if self.connection:  # collected during another session's call, which must not be disturbed
            store.collected.append(self.connection)
            store.has_work = True
            self.connection = 0
        self.detach()

    @property
    def number(self):
        """The number of the session's connection in the region, 0 after its end. A resumed session has a new number."""
        return self.connection

    @property
    def more(self):
        """Whether the caller has to call take_output() when the last output was sent."""
        return is_streaming(self)

    @property
    def closing(self):
        """Whether the caller has to close the connection when the last output was sent."""
        return self.state == CLOSING

    cpdef bytes receive(self, bytes data, int64_t now_ns):
        """Executes input that arrived at now_ns, and returns the replies: OUTPUT_MAX bytes and a reply at most."""
        cdef const uint8_t* start
        cdef size_t size, used = 0
        if data is None:
            raise TypeError("data must be bytes, not None")
        start = <const uint8_t*>PyBytes_AS_STRING(data)
        size = PyBytes_GET_SIZE(data)
        self.store.bytes_in += size
        if self.state != READING:
            if self.state != CLOSING and not self.input_over:
                self.keep(start, size)
                self.unfinished = True
            return b""
        self.begin_call(now_ns)
        try:
            if self.kept_size:
                used = self.complete_kept(start, size)
            if self.kept_size == 0:
                used += self.run(start + used, size - used)
            if used < size and not self.broken:
                self.keep(start + used, size - used)
            return self.end_call()
        finally:
            self.store.end_call()

    cpdef bytes take_output(self, int64_t now_ns):
        """Returns the next piece of output: of a long reply, then posted messages, then replies to kept requests.

        The piece can be empty although more output follows, because the work of one call is bounded. The caller serves
        other connections between two calls.
        """
        cdef bytes output
        if not is_streaming(self):
            return b""
        self.blocked = False
        self.begin_call(now_ns)
        try:
            if self.has_due():
                output = self.held.take(self.store.durable, OUTPUT_MAX)
                self.store.bytes_out += PyBytes_GET_SIZE(output)
                self.unfinished = self.kept_size != 0
                self.update_state()
                return output
            if self.position:
                self.produce()
            elif self.posted_size and not held_size(self):
                return self.take_posted()
            if not self.position and not self.posted_size and self.kept_size:
                self.run_kept()
            return self.end_call()
        finally:
            self.store.end_call()

    cpdef bytes eof(self, int64_t now_ns):
        """Tells the session that the peer sent its last byte.

        Earlier requests are still answered; `end_wait` ends a parked request. Then the holdings are given back, and the
        state becomes CLOSING.
        """
        if self.state == CLOSING or self.input_over:
            return b""
        self.begin_call(now_ns)
        try:
            self.input_over = True
            self.hung_up = True
            self.stops = True
            if self.waiting:
                self.end_wait(HALF_CLOSED)
            return self.end_call()
        finally:
            self.store.end_call()

    cpdef hang_up(self, int64_t now_ns):
        """Called before the connection ends. Ends the wait of a parked request, and lets no later request wait."""
        self.hung_up = True
        if self.waiting:
            with self.store.at(now_ns):
                self.end_wait(HALF_CLOSED)
                self.update_state()

    cdef int resume(self, bytes reply) except -1:
        """Ends the wait of the parked request, with or without a reply. take_output() executes input that was kept."""
        self.waiting = False
        self.unfinished = self.kept_size != 0
        if reply is not None:
            return self.post(reply)
        self.update_state()
        return self.mark_dirty()

    cdef int end_wait(self, Why why) except -1:
        """Called when a parked request can no longer be granted. Removes it from its queue, and calls resume().

        If the peer is GONE, resume() is not called, because nobody would read the reply.
        """
        return 0

    cdef void hold_back(self, uint64_t position) noexcept:
        """Makes all following replies of this call wait until the journal is on disk up to `position`."""
        if self.barrier == 0:
            self.barrier_at = self.store.out_size
        self.barrier = max(self.barrier, position)

    cdef bytes give_up_on(self, bytes replies):
        """Returns the bytes, at least one, to send in place of held replies when the journal cannot be written."""
        return replies

    cdef bint has_due(self) noexcept:
        """Returns whether there are held replies that may be sent now."""
        return self.held is not None and self.held.is_due(self.store.durable)

    cdef int update_held(self) except -1:
        """Called when held replies may have become due. Sets awaits_journal, but leaves store.awaiting_journal to the
        caller."""
        self.awaits_journal = held_size(self) != 0 and self.held.last_position() > self.store.durable
        if self.has_due():
            self.update_state()
            self.mark_dirty()
        return 0

    cdef bytes hold_replies(self):
        """Returns the replies that can be sent now, and holds the others back. Held replies stop all later replies."""
        cdef Store store = self.store
        cdef size_t free = 0 if held_size(self) else self.barrier_at
        cdef size_t size = store.out_size - free
        if size:
            if self.held is None:
                self.held = HeldReplies()
            if self.held.size:
                self.barrier = max(self.barrier, self.held.last_position())
            if not self.awaits_journal:
                self.awaits_journal = True
                store.awaiting_journal.append(self)
            self.held.add(self.barrier, PyBytes_FromStringAndSize(<const char*>store.out + free, size))
            self.stops = True
        self.barrier = 0
        store.bytes_out += free
        return PyBytes_FromStringAndSize(<const char*>store.out, free)

    cdef bint can_post(self, size_t size) noexcept:
        """Returns False if the sender of `size` bytes should wait, because posted_max bytes already wait.

        A single message of any length is always accepted. Also returns True for a session whose peer does not read, or
        that sends a long reply: such a session is dropped when the message does not fit.
        """
        cdef bint fits = self.posted_size == 0 or self.posted_size + size <= self.store.posted_max
        return fits or self.blocked or self.position or held_size(self)

    cdef int post(self, bytes message) except -1:
        """Queues a message, which is sent after the current long reply and after replies held for the journal."""
        if self.state == CLOSING:
            return 0
        if self.posted is None:
            self.posted = []
        self.posted.append(message)
        self.posted_size += PyBytes_GET_SIZE(message)
        self.stops = True
        self.update_state()
        if self.blocked or self.position or held_size(self):
            self.drop_overdue()
        if not self.blocked and not self.position:
            self.mark_dirty()
        return 0

    cpdef wait(self):
        """Called in place of take_output() if the last output was not sent yet. From now on posted_max is enforced.

        Without pending output the session stays unblocked, and the next post() marks it dirty.
        """
        self.blocked = is_streaming(self)
        with self.store:
            self.drop_overdue()

    cdef int drop(self) except -1:
        """Ends the session at once. The caller closes the connection and discards pending output."""
        if self.waiting:
            self.end_wait(GONE)
        self.dropped = True
        self.detach()
        return self.mark_dirty()

    cdef int drop_overdue(self) except -1:
        if self.posted_size > self.store.posted_max and len(self.posted) > 1:
            self.store.sessions_dropped += 1
            self.drop()
        return 0

    cdef int mark_dirty(self) except -1:
        if not self.is_dirty:
            self.is_dirty = True
            self.store.dirty.append(self)
            self.store.has_work = True
        return 0

    cdef bytes take_posted(self):
        """Returns posted messages: at most OUTPUT_MAX bytes and one more message. A single message is not copied."""
        cdef list posted = self.posted
        cdef Py_ssize_t count = 0, size = 0
        while count < len(posted) and size < OUTPUT_MAX:
            size += PyBytes_GET_SIZE(<bytes>posted[count])
            count += 1
        cdef bytes output = posted[0] if count == 1 else b"".join(posted[:count])
        PyList_SetSlice(posted, 0, count, ())  # `del` creates a slice object and its integers: 300 instructions
        self.posted_size -= size
        self.store.bytes_out += size
        self.update_state()
        return output

    cpdef closed(self, int64_t now_ns):
        """Ends the session when its connection is gone. A second call does nothing. tick() gives the holdings back."""
        self.store.begin_call(now_ns)
        try:
            if self.waiting:
                self.end_wait(GONE)
        finally:
            self.detach()
            self.store.end_call()

    cdef void detach(self) noexcept:
        self.state = CLOSING
        self.waiting = False
        self.give_back()
        self.drop_kept()
        self.posted = None
        self.posted_size = 0
        self.held = None
        if self.open:
            self.open = False
            self.store.sessions_open -= 1

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        """Returns the frame's size. 0: more bytes are needed. -1: framing is lost; frame.parse_result says why.

        SKIP: the machine discards frame.skip bytes from `data` on as they arrive, and then executes the frame without
        data. frame.parse_result says which reply to send.
        """
        return -1

    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept:
        """Prefetches the cache lines that the frames need, after parsing has prefetched the lines of the indexes."""

    cdef int execute_frame(self, const Frame* frame) except -1:
        """Executes a frame and appends its reply to store.out. Returns DONE. Returns LATER if it did nothing yet.

        Returns PARK if the request waits for an event. All input after this request then waits until resume().
        """
        return DONE

    cdef int produce(self) except -1:
        """Appends the next piece of the long reply, beginning at self.position. At the end, sets self.position to 0."""
        return 0

    cdef int begin_call(self, int64_t now_ns) except -1:
        cdef Store store = self.store
        store.begin_call(now_ns)
        store.out_size = 0
        self.stops = False
        return 0

    cdef void break_off(self) noexcept:
        """Stops reading input. The connection ends when its output was sent."""
        self.broken = self.input_over = True
        self.stops = True

    cdef void update_state(self) noexcept:
        """Sets the state from the work that remains."""
        cdef State state
        if self.state == CLOSING:
            return
        if self.broken and not held_size(self):
            state = CLOSING
        elif self.has_due() or self.posted_size and not held_size(self):
            state = ENDED if self.input_over else STREAMING
        elif self.waiting or self.posted_size or held_size(self) and (self.position or held_size(self) >= OUTPUT_MAX):
            state = PARKED
        elif self.position or self.unfinished and self.kept_size:
            state = ENDED if self.input_over else STREAMING
        elif not self.input_over:
            state = READING
        elif is_owed(self):
            state = PARKED
        else:
            state = CLOSING
        if state == CLOSING:
            self.give_back()
        debug_check(state == self.state or FOLLOWERS[<int>self.state] >> <int>state & 1)
        self.state = state

    cdef bytes end_call(self):
        """Updates the state and returns a copy of the output."""
        cdef Store store = self.store
        cdef bytes output
        if self.barrier or held_size(self):
            output = self.hold_replies()
        else:
            output = PyBytes_FromStringAndSize(<const char*>store.out, store.out_size)
            store.bytes_out += store.out_size
        if self.input_over and not self.awaited and not self.waiting and not (self.kept_size and self.has_request()):
            self.give_back()    # no request remains, and pending output needs no holdings
        if self.state != READING or self.unfinished or self.position or self.stops:
            self.update_state()
        if self.kept != NULL and (self.kept_size == 0 or self.state == CLOSING):
            self.drop_kept()
        return output

    cdef size_t run(self, const uint8_t* data, size_t size) except? 0:
        """Executes complete frames: parses and prefetches up to FRAMES_AHEAD frames, executes them, and repeats this.

        Returns how many bytes of the input were used.
        """
        cdef Frame[FRAMES_AHEAD] frames
        cdef size_t position = 0, ahead
        cdef Py_ssize_t taken = 1
        cdef int count, complete, i, done
        self.unfinished = False
        if self.skipping:
            position = self.discard(size)
        while taken != 0 and position < size:
            if is_stopped(self):
                self.unfinished = True
                break
            count = 0
            ahead = position
            while count < FRAMES_AHEAD and ahead < size:
                taken = self.parse_frame(data + ahead, size - ahead, &frames[count])
                if taken == 0:
                    break
                count += 1
                if taken < 0:
                    break
                ahead += taken
            if count > 1:
                self.prefetch_frames(frames, count)
            complete = count - 1 if taken == SKIP else count
            i = 0
            while i < complete:
                self.store.budget -= 1 + (frames[i].size >> FRAME_STEP_SHIFT)
                done = self.execute_frame(&frames[i])
                if done != DONE:
                    if done == LATER:
                        self.unfinished = True
                        self.requests += i
                        return position
                    self.park()
                position += frames[i].size
                i += 1
                if is_stopped(self):
                    self.unfinished = True
                    break
            self.requests += i
            if i == count:
                if taken < 0:
                    self.break_off()
                    return size
            elif not self.unfinished:
                position += self.skip(&frames[i], size - position)
                self.requests += 1
        return position

    cdef size_t complete_kept(self, const uint8_t* data, size_t size) except? 0:
        """Completes the kept frame from new input. Copies at most about twice as many bytes as the frame lacks.

        Returns how many bytes of the input were used: all of them if the frame is still unfinished. kept_size is 0 if
        the frame was executed.
        """
        cdef Frame frame
        cdef Py_ssize_t taken = 0
        cdef size_t used = 0, step
        while taken == 0 and used < size:
            step = min(size - used, max(KEPT_MIN, self.kept_size))
            self.keep(data + used, step)
            used += step
            taken = self.parse_frame(self.kept + self.kept_start, self.kept_size, &frame)
        if taken == SKIP:
            taken = min(<uint64_t>self.kept_size, frame.skip)
        if taken > 0:
            used -= self.kept_size - taken
            self.kept_size = taken
        if taken != 0:
            self.run_kept()
        return used

    cdef size_t skip(self, const Frame* frame, size_t size) except? 0:
        """Begins to discard the bytes of a frame. Returns how many bytes of the input were discarded."""
        self.skipping = frame.skip
        self.skipped.data = self.skipped.key = NULL
        self.skipped.size = self.skipped.key_size = self.skipped.tag = 0
        self.skipped.parse_result = frame.parse_result
        return self.discard(size)

    cdef size_t discard(self, size_t size) except? 0:
        """Discards more bytes. After the last one, executes the frame, for which execute_frame must return DONE."""
        cdef size_t used = <size_t>min(<uint64_t>size, self.skipping)
        cdef int done
        self.skipping -= used
        if self.skipping == 0:
            done = self.execute_frame(&self.skipped)
            debug_check(done == DONE)
        return used

    cdef int park(self) except -1:
        """Lets the last executed request wait, or ends its wait immediately if the peer has hung up."""
        self.waiting = True
        self.stops = True
        return self.end_wait(HALF_CLOSED) if self.hung_up else 0

    cdef int run_kept(self) except -1:
        cdef size_t used = self.run(self.kept + self.kept_start, self.kept_size)
        if self.state == CLOSING:  # a message that it posted to itself dropped it
            return 0
        self.kept_start += used
        self.kept_size -= used
        return 0

    cdef int keep(self, const uint8_t* data, size_t size) except -1:
        cdef size_t needed = self.kept_size + size
        cdef uint8_t* kept
        if size == 0:
            return 0
        if self.kept_start:
            memmove(self.kept, self.kept + self.kept_start, self.kept_size)
            self.kept_start = 0
        if needed > self.kept_capacity:
            needed = max(needed, 2 * self.kept_capacity, KEPT_MIN)
            kept = <uint8_t*>PyMem_RawRealloc(self.kept, needed)
            if kept == NULL:
                raise MemoryError(f"no room for {needed} bytes of unfinished input")
            self.kept = kept
            self.kept_capacity = needed
        memcpy(self.kept + self.kept_size, data, size)
        self.kept_size += size
        return 0

    cdef bint has_request(self) noexcept:
        """Returns whether the kept input contains a complete frame, or the end of a frame that is being skipped."""
        cdef Frame frame
        if self.skipping:
            return self.skipping <= self.kept_size
        return self.parse_frame(self.kept + self.kept_start, self.kept_size, &frame) != 0

    cdef void give_back(self) noexcept:
        if self.connection:
            self.store.forget(self.connection)
            self.connection = 0
            self.store.has_work = True

    cdef void drop_kept(self) noexcept:
        PyMem_RawFree(self.kept)
        self.kept = NULL
        self.kept_start = 0
        self.kept_size = 0
        self.kept_capacity = 0
