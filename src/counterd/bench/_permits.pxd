# What the connections of a load process hold, and what each of them asks next.
#
# A side. Between Task, which knows neither connections nor answers, and Jobs, which is about a work queue.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.bench._board cimport Board, Sheet
from counterd.bench._memory cimport Heap, Permit
from counterd.bench._task cimport Task
from counterd.bench._words cimport Op, Reply

cdef enum Turn:             # of acquire and release in turn, where a release needs nothing of what was answered
    TO_ACQUIRE
    ASKED                   # the acquire has been sent, and is not answered
    HOLDING                 # it was granted; its release comes next
    MISSED                  # it was refused; there is nothing to release


cdef struct Request:        # under way
    int64_t intended_ns
    int64_t sent_ns
    Permit permit
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
    Permit* held            # a queue; or names of what was inserted and is to be purged
    uint32_t held_mask
    uint32_t held_head
    uint32_t held_count
    uint32_t turn_name
    uint8_t turn
    bint raised             # its last update was one up, or its last turn an acquire: the opposite comes next
    bint marked             # its marker is granted
    bint dirty              # it has something unwritten, and is in the list of those
    bint turned_away        # the server's queue was full, and it is to be opened again
    bint waiting            # it is in the queue of those that can take a request
    uint32_t slots          # permits that are asked for, held or being released, when they are held for a time
    uint32_t marker         # number of the name that only this connection holds
    uint32_t told           # accounting messages that it has sent, where a control message follows each
    int64_t opened_ns       # when it was last opened, or tried to be


cdef class Permits(Task):
    cdef Board board
    cdef Sheet* sheet
    cdef Heap heap          # permits that end

    cdef int choose(self, Link* link, Op* op, Permit* permit) except -1
    cdef int choose_turn(self, Link* link, Op* op, Permit* permit) except -1
    cdef int choose_drawn(self, Link* link, Op* op, Permit* permit) except -1
    cdef int granted(self, Link* link, const Permit* permit, int64_t now) except -1
    cdef int let_go(self, Link* link) except -1
    cdef int hold(self, uint32_t name, int64_t permits) except -1
    cdef int tell_once(self, uint64_t token) except -1
    cdef int exceeded(self, str text) except -1
    cdef Permit held_pop(self, Link* link) noexcept
    cdef int held_push(self, Link* link, Permit permit) except -1
