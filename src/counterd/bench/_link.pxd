# A connection of the load, and what is under way on it.
#
# Floor 5, header only.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from counterd.bench._memory cimport Permit, ring_grow

cdef enum Turn:             # of acquire and release in turn, where a release needs nothing of what was answered
    TO_ACQUIRE
    ASKED                   # the acquire has been sent, and is not answered
    HOLDING                 # it was granted; its release comes next
    MISSED                  # it was refused; there is nothing to release

cdef enum Purpose:
    LOAD                    # part of the load
    OPENER                  # what a connection has to ask before anything else
    FILLER                  # makes names exist
    ENDER                   # ends what waits when the load ends
    MARKER                  # a connection's own permit, by which its give-back is seen
    WATCH                   # looks whether a marker is back


cdef struct Request:        # under way
    int64_t intended_ns
    int64_t sent_ns
    Permit permit
    uint32_t number         # among those of its connection
    uint16_t key            # for whom it is
    uint8_t answered        # parts of it
    uint8_t op
    uint8_t purpose


cdef struct Link:           # a connection
    int fd
    int phase
    uint32_t events         # that it is registered for, 0 = it is not
    uint32_t index
    uint16_t key            # for whom it asks
    uint32_t generation     # how often it was closed: permits of an earlier one are gone
    Request* ring           # what is under way, in the order of the replies
    uint32_t mask           # of the ring: its size less 1
    uint32_t head
    uint32_t count
    uint32_t unwritten      # of those: not encoded yet
    uint32_t next           # number of the next request
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


cdef inline Permit held_pop(Link* link) noexcept:
    cdef Permit permit = link.held[link.held_head]
    link.held_head = (link.held_head + 1) & link.held_mask
    link.held_count -= 1
    return permit


cdef inline void request_pull(Link* link, int64_t number) noexcept:
    """Makes the request with this number the oldest request in flight. Does nothing if the request is not in flight."""
    cdef Request found
    cdef uint32_t at
    for at in range(link.count - link.unwritten):
        found = link.ring[(link.head + at) & link.mask]
        if found.number == number:
            while at:
                link.ring[(link.head + at) & link.mask] = link.ring[(link.head + at - 1) & link.mask]
                at -= 1
            link.ring[link.head & link.mask] = found
            return


cdef inline int held_push(Link* link, Permit permit) except -1:
    if link.held_count == 0 or link.held_count > link.held_mask:
        ring_grow(<void**>&link.held, &link.held_mask, &link.held_head, link.held_count, sizeof(Permit))
    link.held[(link.held_head + link.held_count) & link.held_mask] = permit
    link.held_count += 1
    return 0
