# The session machine: bytes in, bytes out, for every protocol; and the store that its sessions share.
#
# Floor 1. No asyncio, no clock, no file, no logger, and no protocol. What a store keeps in the region is the business
# of the parts that it has (engine/); what requests mean is its protocol's.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.connections cimport Connections
from counterd.engine.region cimport Header, Region

cdef enum:
    FRAMES_AHEAD = 64       # frames parsed ahead: their cache lines arrive while the rest is parsed
    OUTPUT_MAX = 262144     # replies gathered in one piece before the rest of the input has to wait, plus one reply
    REPLY_ROOM = 65600      # bytes of the longest reply, unless a store says otherwise: a name of 65,535, and a head
    SLICE_STEPS = 2048      # holdings given back, records expired or swept per tick; at most 250 ns each
    TURN_STEPS = 4096       # work of all sessions together before one has to wait for its turn; a step is some 40 ns
    TURN_NS = 1000000       # after which they have that many again, turn or not
    GRACE_STEPS = 128       # of one call when all are used up, so that only long replies and much input ever wait
    FRAME_STEP_SHIFT = 6    # a frame is a step, and one more for each 64 bytes that have to be hashed and copied
    DONE = 0                # what execute_frame returns
    LATER = 1               # nothing was done: too much for this call
    PARK = 2                # the request waits, and what follows it too, until resume() is called
    SKIP = -2               # what parse_frame returns: frame.skip bytes are to be discarded, and then answered

cdef enum State:
    READING = 0             # what arrives is executed; the start of an unfinished frame is kept
    STREAMING = 1           # the caller calls take_output() when what it was given has gone out, and reads no further
    PARKED = 2              # as STREAMING, but there is nothing to take before the session is dirty
    ENDED = 3               # as STREAMING, and the peer has sent its last byte
    CLOSING = 4             # write what you were given, then close; nothing is read any more
    STATES = 5

cdef enum Why:              # a wait ends without its event
    HALF_CLOSED = 0         # the peer will send nothing more, and may still read a reply
    GONE = 1                # nobody will read a reply


cdef struct Frame:          # one parsed request
    const uint8_t* data     # its first byte; valid until the call that parsed it returns
    const uint8_t* key
    uint32_t size           # of the whole frame
    uint32_t key_size       # 0 = this request names nothing
    uint32_t tag            # of the key
    uint8_t verdict         # the protocol's: what parsing already decided
    uint64_t skip           # bytes to be discarded from `data` on, where parse_frame returned SKIP


cdef class Store:
    cdef Region region
    cdef Header* header         # of the region
    cdef Connections connections
    cdef int64_t budget         # steps that remain until the next turn; may fall below 0
    cdef int64_t now_ns         # of the call under way, or the last
    cdef int64_t scheduled_ns   # when tick() will be called, as far as the caller was told
    cdef uint8_t* out           # replies of the call under way: OUTPUT_MAX + reply_max bytes, shared by all sessions
    cdef size_t out_size
    cdef bint entered           # a call is under way, and so the region is this process's alone
    cdef bint stirred           # tick() or take_dirty() may have become due: look at next_deadline()
    cdef object make_session
    cdef list dirty             # sessions, each once
    cdef list orphans           # connections whose sessions were collected during a call: tick() forgets them
    cdef readonly uint64_t durable  # position up to which the journal is on disk
    cdef list behind            # sessions with replies that wait for a later one, each once
    cdef int64_t budgeted_ns    # when the budget was last filled
    cdef readonly uint64_t sessions_open
    cdef readonly uint64_t sessions_total
    cdef readonly uint64_t bytes_in
    cdef readonly uint64_t bytes_out
    cdef size_t posted_max
    cdef readonly uint64_t sessions_dropped

    cpdef Session session(self, int64_t now_ns=*, int port=*)
    cpdef int64_t next_deadline(self)
    cpdef tick(self, int64_t now_ns)
    cpdef set_wall(self, int64_t unix_ns, int64_t now_ns)
    cdef int map_region(self, bytes hash_key) except -1
    cdef int begin_call(self, int64_t now_ns) except -1
    cdef void end_call(self) noexcept
    cdef Store at(self, int64_t now_ns)
    cdef int run_due(self) except -1
    cdef int64_t due_ns(self) except? -2
    cdef void expect(self, int64_t due_ns) noexcept
    cdef void forget(self, uint32_t connection) noexcept
    cdef void fill_budget(self, int64_t now_ns) noexcept
    cpdef list take_dirty(self)
    cdef dict figures(self)
    cdef int audit_parts(self) except -1


cdef class Session:
    cdef readonly Store store
    cdef public object owner    # whoever made the session may leave a mark here
    cdef readonly int port      # of its protocol's, that its connection came by
    cdef uint8_t* kept          # input that could not be used up yet: kept_size bytes at kept_start
    cdef size_t kept_start
    cdef size_t kept_size
    cdef size_t kept_capacity
    cdef uint32_t connection    # in the region; 0 once what it held was queued to be given back
    cdef readonly uint64_t requests     # frames executed so far
    cdef readonly State state   # which settle() changes, and detach() ends
    cdef uint32_t position      # of the long reply under way: the next record; 0 = none is
    cdef int64_t budget_floor   # at which this call stops; INT64_MAX: before the next frame, and the state is settled
    cdef bint unfinished        # requests are kept that can be executed in the next call
    cdef bint waiting           # for resume(): a request is parked
    cdef bint input_over        # the peer has sent its last byte, or framing is lost
    cdef bint hung_up           # the peer will send nothing more; not all of it has been received perhaps
    cdef bint broken            # framing is lost
    cdef readonly uint32_t awaited      # answers that are to be posted later: until then the session does not end
    cdef bint open              # closed() has not been called
    cdef list posted            # messages that wait for take_output(), posted_size bytes; or None
    cdef size_t posted_size
    cdef list held              # (position, replies) that wait for the journal, in order, held_size bytes; or None
    cdef size_t held_size
    cdef uint64_t barrier       # position that replies of this call wait for, from out[barrier_at] on; 0 = none
    cdef size_t barrier_at
    cdef uint64_t skipping      # bytes that are to be discarded before `skipped` is executed
    cdef Frame skipped
    cdef readonly bint dropped
    cdef bint is_dirty          # in the store's list
    cdef bint is_behind         # likewise
    cdef bint blocked           # the caller waits for the peer to read

    cpdef bytes receive(self, bytes data, int64_t now_ns)
    cpdef bytes take_output(self, int64_t now_ns)
    cpdef bytes eof(self, int64_t now_ns)
    cpdef hang_up(self, int64_t now_ns)
    cpdef closed(self, int64_t now_ns)
    cpdef wait(self)

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept
    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept
    cdef int execute_frame(self, const Frame* frame) except -1
    cdef int produce(self) except -1
    cdef int end_wait(self, Why why) except -1

    cdef int resume(self, bytes reply) except -1
    cdef void hold_back(self, uint64_t position) noexcept
    cdef void break_off(self) noexcept
    cdef void settle(self) noexcept
    cdef bint can_post(self, size_t size) noexcept
    cdef int post(self, bytes message) except -1
    cdef int drop_overdue(self) except -1
    cdef int tell_dirty(self) except -1
    cdef bytes take_posted(self)
    cdef uint64_t last_held(self) except? 0
    cdef bytes take_held(self)
    cdef bint has_due(self) noexcept
    cdef bytes give_up_on(self, bytes replies)
    cdef bytes hold_replies(self)
    cdef size_t skip(self, const Frame* frame, size_t size) except? 0
    cdef size_t discard(self, size_t size) except? 0
    cdef int park(self) except -1
    cdef int begin_call(self, int64_t now_ns) except -1
    cdef bytes end_call(self)
    cdef size_t run(self, const uint8_t* data, size_t size) except? 0
    cdef size_t complete_kept(self, const uint8_t* data, size_t size) except? 0
    cdef int run_kept(self) except -1
    cdef int keep(self, const uint8_t* data, size_t size) except -1
    cdef bint has_request(self) noexcept
    cdef void leave(self) noexcept
    cdef void drop_kept(self) noexcept
    cdef void detach(self) noexcept


cdef inline bint is_owed(Session session) noexcept:
    """Whether replies to it are yet to come: from somebody else, or once the journal is on disk."""
    return session.awaited != 0 or session.held_size != 0


cdef inline bint is_streaming(Session session) noexcept:
    """Whether take_output() is due as soon as what it gave last has gone out."""
    return session.state == STREAMING or session.state == ENDED
