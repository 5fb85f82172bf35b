# The load process: connections, what is under way on each, and what has to be done when.
#
# A side. The state of everything that _load.pyx moves.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.bench._board cimport Board, ErrorKind, Orders, Sheet, Stage
from counterd.bench._memory cimport Heap
from counterd.bench._task cimport Task
from counterd.bench._words cimport Op, Reply, Template

cdef enum Phase:
    SHUT                    # no socket
    OPENING                 # connect is under way
    SECURING                # TLS's handshake is
    OPEN

cdef enum Purpose:
    LOAD                    # part of the load
    FILLER                  # makes names exist
    MARKER                  # a connection's own permit, by which its give-back is seen
    WATCH                   # looks whether a marker is back

cdef enum Turn:             # of acquire and release in turn
    TO_ACQUIRE
    ASKED                   # the acquire has been sent, and is not answered
    HOLDING                 # it was granted; its release comes next
    MISSED                  # it was refused; there is nothing to release


cdef struct Request:        # under way
    int64_t intended_ns
    int64_t sent_ns
    uint32_t name
    uint8_t op
    uint8_t purpose


cdef struct Link:           # a connection
    int fd
    int phase
    uint32_t events         # that it is registered for, 0 = it is not
    uint32_t index
    uint32_t generation     # how often it was closed: permits of an earlier one are gone
    Request* ring           # what is under way, in the order of the replies
    uint32_t mask           # of the ring: its size less 1
    uint32_t head
    uint32_t count
    uint32_t unwritten      # of those: not encoded yet
    uint32_t opaque         # of the next request that is encoded
    uint32_t expected       # of the next reply
    uint8_t* pending        # encoded, and not taken by the kernel
    size_t pending_size
    size_t pending_start
    uint8_t* tail           # of an unfinished reply
    size_t tail_size
    uint32_t* held          # names, each permit: a queue; or of what was inserted and is to be purged
    uint32_t held_mask
    uint32_t held_head
    uint32_t held_count
    uint32_t turn_name
    uint8_t turn
    bint raised             # its last update was one up: the next is one down
    bint marked             # its marker is granted
    bint dirty              # it has something unwritten, and is in the list of those
    bint turned_away        # the server's queue was full, and it is to be opened again
    bint waiting            # it is in the queue of those that can take a request
    uint32_t slots          # permits that are asked for, held or being released, when they are held for a time
    uint32_t marker         # number of the name that only this connection holds
    int64_t opened_ns       # when it was last opened, or tried to be


cdef struct Killed:         # a connection that was killed, and the name by which its give-back is seen
    int64_t killed_ns
    uint32_t marker


cdef class Load(Task):
    cdef Board board
    cdef Sheet* sheet
    cdef Orders* orders
    cdef int poll

    # links
    cdef Link* links
    cdef uint32_t connections
    cdef uint32_t wanted            # links that are kept open: those, and one that looks whether markers are back
    cdef uint32_t in_flight         # of all links
    cdef uint32_t* dirty
    cdef uint32_t dirty_count
    cdef uint32_t* queue            # of links that can take a request, in the order they became so
    cdef uint32_t queue_head
    cdef uint32_t queue_count
    cdef uint8_t* inbox
    cdef uint8_t* outbox
    cdef uint32_t shut              # links that broke, or were turned away, and are to be opened again
    cdef uint32_t turned_away
    cdef bytes address
    cdef int family
    cdef object context             # of TLS, or None
    cdef str host                   # whose certificate the server has to have
    cdef list layers                # of the links

    # time
    cdef Stage stage
    cdef bint ended                 # nothing new is asked
    cdef int64_t ended_ns           # what was meant to start from then on never was
    cdef int64_t grace_ns           # until when answers are waited for, once that is so; before the load, the next
    cdef int64_t settle_max_ns
    cdef int64_t grace_max_ns
    cdef int64_t give_back_max_ns
    cdef bint open_loop
    cdef bint poisson
    cdef double interval_ns
    cdef double arrival_ns          # when the next request is meant to start
    cdef int64_t left               # requests that may still be measured
    cdef bint limited               # by that
    cdef int64_t cpu_start_ns

    # permits that end
    cdef Heap heap

    # connections to kill
    cdef double kill_interval_ns
    cdef double kill_ns             # when the next dies
    cdef uint32_t kill_next
    cdef Killed* killed             # a ring
    cdef uint32_t killed_mask
    cdef uint32_t killed_head
    cdef uint32_t killed_count
    cdef uint32_t markers

    cdef int set_times(self, plan, int index) except -1
    cdef int advance(self, int64_t now) except -1
    cdef int run_out(self, int64_t now) except -1
    cdef bint has_backlog(self) noexcept
    cdef bint is_spent(self) noexcept
    cdef int64_t next_due(self, int64_t now) noexcept
    cdef int64_t wait(self, int64_t now) except -1
    cdef int hear(self, Link* link, uint32_t events) except -1
    cdef int open(self, Link* link, int64_t now) except -1
    cdef int listen(self, Link* link, uint32_t events) except -1
    cdef int opened(self, Link* link, int64_t now) except -1
    cdef int secure(self, Link* link) except -1
    cdef int insecure(self, Link* link, error) except -1
    cdef int broken(self, Link* link, int error, int64_t now) except -1
    cdef int fail(self, Link* link, ErrorKind kind) except -1
    cdef int close(self, Link* link) except -1
    cdef int reopen(self, int64_t now) except -1
    cdef int feed_all(self, int64_t now) except -1
    cdef int feed(self, Link* link, int64_t now) except -1
    cdef int fill(self, Link* link, int64_t now) except -1
    cdef int fill_name(self, Link* link, uint32_t name, int64_t now) except -1
    cdef int arrive(self, int64_t now) except -1
    cdef bint ask(self, Link* link, int64_t intended_ns) except -1
    cdef uint32_t name_for(self, Link* link, Op* op) except? 0xffffffff
    cdef int request(self, Link* link, Op op, uint32_t name, int64_t intended_ns, Purpose purpose) except -1
    cdef int hold(self, uint32_t name, int64_t permits) except -1
    cdef int exceeded(self, uint32_t name, int64_t sum, str how) except -1
    cdef uint32_t held_pop(self, Link* link) noexcept
    cdef int held_push(self, Link* link, uint32_t name) except -1
    cdef int granted(self, Link* link, uint32_t name, int64_t now) except -1
    cdef int release_due(self, int64_t now) except -1
    cdef int kill_due(self, int64_t now) except -1
    cdef int kill(self, Link* link, int64_t now) except -1
    cdef int watch(self, Link* link, int64_t now) except -1
    cdef int watched(self, int outcome, int64_t value, int64_t now) except -1
    cdef int flush(self, int64_t now) except -1
    cdef int write(self, Link* link, int64_t now) except -1
    cdef bint send(self, Link* link, const uint8_t* data, size_t size) except -1
    cdef bint say(self, Link* link, const uint8_t* data, size_t size) except -1
    cdef int read(self, Link* link) except -1
    cdef int answered(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -1
    cdef int wrong(self, Link* link, const uint8_t* data, size_t size, const Request* request) except -1
    cdef int show(self, str what, const uint8_t* data, size_t size, const Request* request) except -1
