# The throttr room's store, and what its connections are to each other: for the modules that build sessions on it.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Frame, Session, Store
from counterd.protocols.throttr._keys cimport Keys

cdef enum Opcode:
    INSERT = 0x01
    QUERY = 0x02
    UPDATE = 0x03
    PURGE = 0x04
    SET = 0x05
    GET = 0x06
    LIST = 0x07
    INFO = 0x08
    STAT = 0x09
    STATS = 0x10
    SUBSCRIBE = 0x11
    UNSUBSCRIBE = 0x12
    PUBLISH = 0x13
    CONNECTIONS = 0x14
    CONNECTION = 0x15
    CHANNELS = 0x16
    CHANNEL = 0x17
    WHOAMI = 0x18
    EVENT = 0x19
    OPCODES = 0x1a

cdef enum:
    ID_SIZE = 16
    REPLY_MIN = 65536       # room for every reply whose size does not depend on max_message
    SUBSCRIPTION_BLOCKS = 3  # what one takes, in blocks: a holding and a counter, what is beside them, and their slots


cdef struct Layout:         # of a request: its bytes up to the name, and where sizes are; head 0 = there is none
    uint8_t head
    uint8_t name_at         # where the size of the name is, one byte; 0 = it has no name
    uint8_t value_at        # where the size of the value is, N bytes; 0 = it has no value


cdef struct Rate:           # something that is counted, and how much it was at the two last turns of the minute
    uint64_t total
    uint64_t before
    uint64_t last


cdef struct Channel:        # beside each counter of the region, which is the channel's record: held = subscribed
    uint64_t read_bytes
    uint64_t write_bytes
    uint32_t epoch


cdef struct Subscription:   # beside each holding of the region: of a connection on a channel, its amount = how often
    int64_t since_ns        # Unix time
    uint64_t read_bytes
    uint64_t write_bytes
    uint32_t epoch


cdef class ThrottrStore(Store):
    cdef Keys keys
    cdef Channel* channels      # by record
    cdef Subscription* subscriptions    # by holding
    cdef void** members         # by connection: a Member, or NULL
    cdef uint32_t members_size
    cdef object make_session
    cdef int width              # N: bytes of a number
    cdef uint64_t number_max    # the largest of N bytes
    cdef uint64_t message_max
    cdef uint64_t memory_max
    cdef Layout[OPCODES] layouts
    cdef int64_t now_ns         # of the call under way, or the last, set_wall() included
    cdef int64_t wall_ns        # from that clock to Unix time
    cdef int64_t started_ns     # on that clock; -1 = not known yet
    cdef int64_t minute_end_ns
    cdef int64_t scheduled_ns   # when tick() will be called
    cdef uint32_t minute
    cdef uint32_t epoch         # listings that something was made between
    cdef bint epoch_used        # something was made in it
    cdef uint64_t serial        # of the last session
    cdef uint64_t repeated      # subscriptions that a connection has to a channel besides the first
    cdef Rate[OPCODES] requests
    cdef uint64_t[OPCODES] refusals  # of those, answered 00
    cdef uint64_t broken        # frames that are not among them: framing was lost
    cdef Rate read_bytes
    cdef Rate write_bytes
    cdef bytes event            # being given to the subscribers, from region.cursor on; or None
    cdef uint64_t event_payload
    cdef uint32_t event_channel
    cdef uint32_t publisher     # its connection: had its own event at once

    cdef void turn_minute(self, int64_t now_ns) noexcept
    cdef bint has_room(self, uint32_t records, uint32_t blocks, uint32_t blocks_freed) noexcept
    cdef void map_keys(self, int bits, uint32_t channels) noexcept
    cdef void set_layouts(self) noexcept
    cdef uint32_t enter_epoch(self) noexcept
    cdef uint32_t begin_listing(self) noexcept
    cdef int expire(self, int64_t now_ns, int steps) noexcept
    cdef bint catch_up(self) noexcept
    cdef uint64_t memory_used(self) noexcept
    cdef int find_room(self, uint32_t records, uint32_t blocks, uint32_t blocks_freed) noexcept
    cdef bint has_places(self, bint is_new) noexcept
    cdef int publish(self, uint32_t channel, uint32_t publisher, const Frame* frame) except -1
    cdef int deliver(self, int steps) except? -1
    cdef bint can_give(self, uint32_t entry) noexcept
    cdef int give(self, uint32_t entry) except -1


cdef class Member(Session):
    cdef uint8_t[ID_SIZE] id
    cdef uint32_t epoch
    cdef int64_t connected_ns   # Unix time
    cdef uint64_t repeated      # its part of the store's
    cdef uint64_t read_bytes
    cdef uint64_t write_bytes
    cdef uint64_t published_bytes
    cdef uint64_t received_bytes
    cdef uint64_t allocated_bytes
    cdef uint64_t consumed_bytes
    cdef uint64_t[OPCODES] requests

    cdef int greet(self, int64_t now_ns) except -1
    cdef bint enter_channel(self, uint32_t tag, const uint8_t* name, uint32_t size) noexcept
    cdef bint leave_channel(self, uint32_t tag, const uint8_t* name, uint32_t size) noexcept
