# The session machine (bytes in, bytes out) of every protocol, and the store that its sessions share.
#
# Floor 1. No asyncio, no clock, no file, no logger, and no protocol. The parts of a store (engine/) define what it
# keeps in the region. The protocol defines what requests mean.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.engine.connections cimport Connections
from counterd.engine.held cimport HeldReplies
from counterd.engine.region cimport Header, Region

cdef enum:
    FRAMES_AHEAD = 64       # frames parsed ahead: their cache lines arrive while the rest is parsed
    OUTPUT_MAX = 262144     # bytes of replies in one piece, plus one reply; then the rest of the input waits
    REPLY_ROOM = 65600      # default bytes of the longest reply: a name of 65,535 bytes and a header
    SLICE_STEPS = 2048      # holdings given back, records expired or swept per tick; at most 250 ns each
    CALL_STEPS = 4096       # steps of work in one call; a step is some 40 ns, so a call takes some 0.2 ms
    FRAME_STEP_SHIFT = 6    # a frame costs one step, plus one for each 64 bytes to be hashed and copied
    DONE = 0                # execute_frame: executed
    LATER = 1               # execute_frame: nothing was done, because it is too much work for this call
    PARK = 2                # execute_frame: the request and all input after it wait until resume() is called
    SKIP = -2               # parse_frame: discard frame.skip bytes, then reply

cdef enum State:
    READING = 0             # input is executed when it arrives; the start of an unfinished frame is kept
    STREAMING = 1           # the caller stops reading, and calls take_output() when the last output has been sent
    PARKED = 2              # as STREAMING, but there is no output until the session is dirty
    ENDED = 3               # as STREAMING, and the peer has sent its last byte
    CLOSING = 4             # the caller sends the last output, then closes; it reads nothing more
    STATES = 5

cdef enum Why:              # why a wait ends without its event
    HALF_CLOSED = 0         # the peer will send nothing more, but may still read a reply
    GONE = 1                # nobody will read a reply


cdef struct Frame:          # one parsed request
    const uint8_t* data     # its first byte; valid until the call that parsed it returns
    const uint8_t* key
    uint32_t size           # bytes of the whole frame
    uint32_t key_size       # 0 = the request has no key
    uint32_t tag            # of the key
    uint8_t parse_result    # what the protocol decided while parsing
    uint64_t skip           # after SKIP: bytes to discard, from `data` on


cdef class Store:
    cdef Region region
    cdef Header* header         # of the region
    cdef Connections connections
    cdef readonly int64_t budget    # steps that remain to the current or last call; may fall below 0
    cdef int64_t now_ns         # time of the current or last call
    cdef int64_t scheduled_ns   # when the caller will call tick(): what next_deadline() last returned
    cdef uint8_t* out           # replies of the current call: OUTPUT_MAX + reply_max bytes, shared by all sessions
    cdef size_t out_size
    cdef bint entered           # a call is under way: only it may use the region
    cdef bint has_work          # tick() or take_dirty() may have become due: look at next_deadline()
    cdef object make_session
    cdef list dirty             # sessions for take_dirty(), each once
    cdef list collected         # connections whose sessions were collected during a call: tick() forgets them
    cdef readonly uint64_t durable  # the journal is on disk up to this position
    cdef list awaiting_journal  # sessions whose replies wait for a later position, each once
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
    cpdef list take_dirty(self)
    cdef dict figures(self)
    cdef int audit_parts(self) except -1


cdef class Session:
    cdef readonly Store store
    cdef public object owner    # set by the caller: its connection
    cdef readonly int port      # number of the protocol's port that the connection came by
    cdef uint8_t* kept          # input that was not executed yet: kept_size bytes at kept_start
    cdef size_t kept_start
    cdef size_t kept_size
    cdef size_t kept_capacity
    cdef uint32_t connection    # its number in the region; 0 once that has ended there
    cdef readonly uint64_t requests     # frames executed so far
    cdef readonly State state   # changed by update_state() and detach() only
    cdef uint32_t position      # next record of the long reply under way; 0 = there is none
    cdef bint stops             # the call stops before the next frame, and updates the state
    cdef bint unfinished        # kept requests can be executed in the next call
    cdef bint waiting           # a request is parked until resume()
    cdef bint input_over        # the peer has sent its last byte, or framing is lost
    cdef bint hung_up           # the peer will send nothing more, but its last bytes may not have been received yet
    cdef bint broken            # framing is lost
    cdef readonly uint32_t awaited      # replies that will be posted later; the session does not end before
    cdef bint open              # closed() has not been called
    cdef list posted            # messages that wait for take_output(), posted_size bytes; or None
    cdef size_t posted_size
    cdef HeldReplies held       # replies that wait for the journal; or None
    cdef uint64_t barrier       # position that this call's replies from out[barrier_at] on wait for; 0 = none
    cdef size_t barrier_at
    cdef uint64_t skipping      # bytes to discard before `skipped` is executed
    cdef Frame skipped
    cdef readonly bint dropped  # the caller closes at once and discards pending output
    cdef bint is_dirty          # in store.dirty
    cdef bint awaits_journal    # in store.awaiting_journal
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
    cdef void update_state(self) noexcept
    cdef bint can_post(self, size_t size) noexcept
    cdef int post(self, bytes message) except -1
    cdef int drop(self) except -1
    cdef int drop_overdue(self) except -1
    cdef int mark_dirty(self) except -1
    cdef bytes take_posted(self)
    cdef bint has_due(self) noexcept
    cdef int update_held(self) except -1
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
    cdef void give_back(self) noexcept
    cdef void drop_kept(self) noexcept
    cdef void detach(self) noexcept


cdef inline size_t held_size(Session session) noexcept:
    """Returns how many bytes of replies wait for the journal."""
    return 0 if session.held is None else session.held.size


cdef inline bint is_owed(Session session) noexcept:
    """Returns whether replies are pending: to be posted later, or held back until the journal is on disk."""
    return session.awaited != 0 or held_size(session) != 0


cdef inline bint is_streaming(Session session) noexcept:
    """Returns whether the caller has to call take_output() when the last output was sent."""
    return session.state == STREAMING or session.state == ENDED
