# The load process: connections, what is under way on each, and what has to be done when.
#
# Floor 5. The state of everything that _load.pyx moves.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.bench._board cimport Board, ErrorKind, Orders, Sheet, Stage
from counterd.bench._codec cimport Codec
from counterd.bench._ledger cimport Ledger
from counterd.bench._link cimport Link, Purpose, Request
from counterd.bench._memory cimport Permit
from counterd.bench._task cimport Task
from counterd.bench._work cimport Work
from counterd.bench._words cimport Reply

cdef enum Phase:
    SHUT                    # no socket
    OPENING                 # connect is under way
    SECURING                # TLS's handshake is
    OPEN

cdef struct Killed:         # a connection that was killed, and the name by which its give-back is seen
    int64_t killed_ns
    uint32_t marker


cdef class Load:
    cdef Task task
    cdef Codec codec
    cdef Ledger ledger
    cdef Work work
    cdef Board board
    cdef Sheet* sheet
    cdef Orders* orders
    cdef uint32_t index             # of this process
    cdef int poll

    # links
    cdef Link* links
    cdef uint32_t connections
    cdef uint32_t depth
    cdef bint keep_alive
    cdef bint listens               # there is one more connection, for control messages
    cdef tuple opening              # what each connection asks first,
    cdef tuple greeting             # and the one that listens; the last only when the others are answered
    cdef uint32_t wanted            # those, and one that listens, or looks whether markers are back
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
    cdef bytes listening            # the address by which control messages come
    cdef int family
    cdef object context             # of TLS, or None
    cdef str host                   # whose certificate the server has to have
    cdef list layers                # of the links

    # names that are to exist
    cdef tuple fills                # what makes one
    cdef uint32_t names
    cdef uint64_t fill_next

    # time
    cdef Stage stage
    cdef bint ended                 # nothing new is asked
    cdef int64_t ended_ns           # what was meant to start from then on never was
    cdef int64_t grace_ns           # until when answers are waited for, once that is so; before the load, the next
    cdef int64_t settle_max_ns
    cdef int64_t grace_max_ns
    cdef int64_t give_back_max_ns
    cdef bint open_loop
    cdef bint fans
    cdef bint queues                # acquires wait in the server's queue
    cdef int64_t delay_ns           # of jobs
    cdef bint poisson
    cdef double interval_ns
    cdef double arrival_ns          # when the next request is meant to start
    cdef int64_t left               # requests that may still be measured
    cdef bint limited               # by that
    cdef uint64_t* grants           # of its own connections, on the board
    cdef int64_t cpu_start_ns

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
    cdef int cancel_all(self, int64_t now) except -1
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
    cdef int arrive(self, int64_t now) except -1
    cdef bint ask(self, Link* link, int64_t intended_ns) except -1
    cdef int turn(self, Link* link, int64_t intended_ns) except -1
    cdef int request_all(self, Link* link, tuple ops, uint32_t name, Purpose purpose, int64_t now) except -1
    cdef int request(self, Link* link, uint8_t op, Permit permit, int64_t intended_ns, Purpose purpose) except -1
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
    cdef ssize_t receive(self, Link* link) except -2
    cdef Py_ssize_t hear_control(self, Link* link, const uint8_t* data, size_t left, int64_t now) except -2
    cdef int settle(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -1
    cdef int measured(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -1
    cdef int answered(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -1
    cdef int wrong(self, Link* link, const uint8_t* data, size_t size, const Request* request) except -1
    cdef int show(self, str what, const uint8_t* data, size_t size, const Request* request) except -1
