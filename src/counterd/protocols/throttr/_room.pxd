# The throttr room's session and store, for whoever subclasses them in Cython (the benchmarks do).

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Frame, Session, Store
from counterd.protocols.throttr._keys cimport Key, Keys

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
    FRAGMENT_ITEMS = 170    # the most that a fragment has: 2,048 bytes of entries of at least 12


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


cdef struct Listing:        # a reply under way that tells of everything there is of a kind, in two walks along its numbers
    uint8_t opcode
    bint counted            # the first walk is over: `left` is known, and was told
    uint32_t end            # the last number that there was when it began
    uint32_t epoch          # what was made since is not told
    uint32_t channel        # whose subscribers are told
    uint64_t left           # fragments, or subscriptions, that are still owed
    uint64_t fragment       # number of the last one that was begun
    uint32_t bytes          # of the entries of the fragment that is being filled
    uint32_t count
    uint32_t numbers[FRAGMENT_ITEMS]


cdef class ThrottrStore(Store):
    cdef Keys keys
    cdef Channel* channels      # by record
    cdef Subscription* subscriptions    # by holding
    cdef void** sessions        # by connection: a ThrottrSession, or NULL
    cdef uint32_t sessions_size
    cdef int width              # N: bytes of a number
    cdef uint64_t number_max    # the largest of N bytes
    cdef uint64_t message_max
    cdef uint64_t memory_max
    cdef Layout[OPCODES] layouts
    cdef int64_t now_ns         # of the call under way, or the last
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
    cdef Rate read_bytes
    cdef Rate write_bytes
    cdef bytes event            # being given to the subscribers, from region.cursor on; or None
    cdef uint64_t event_payload
    cdef uint32_t event_channel
    cdef uint32_t publisher     # its connection: had its own event at once

    cdef void turn_minute(self, int64_t now_ns) noexcept
    cdef uint32_t enter_epoch(self) noexcept
    cdef uint32_t begin_listing(self) noexcept
    cdef int expire(self, int64_t now_ns, int steps) noexcept
    cdef bint catch_up(self) noexcept
    cdef uint64_t memory_used(self) noexcept
    cdef int find_room(self, uint32_t records, uint32_t blocks, uint32_t blocks_freed) noexcept
    cdef int publish(self, uint32_t channel, uint32_t publisher, const Frame* frame) except -1
    cdef int deliver(self, int steps) except -1
    cdef int give(self, uint32_t entry) except -1


cdef class ThrottrSession(Session):
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
    cdef Listing* listing       # the long reply under way, or NULL

    cdef int greet(self, int64_t now_ns) except -1
    cdef int reply_status(self, bint success) noexcept
    cdef Key* find_living(self, const Frame* frame) noexcept
    cdef int insert(self, const Frame* frame) except -1
    cdef int query(self, const Frame* frame) except -1
    cdef int update(self, const Frame* frame) except -1
    cdef int update_quota(self, Key* key, uint8_t change, uint64_t value) noexcept
    cdef int purge(self, const Frame* frame) except -1
    cdef int set(self, const Frame* frame) except -1
    cdef int overwrite(self, uint32_t number, const Frame* frame, int64_t expires_ns) except -1
    cdef int get(self, const Frame* frame) except -1
    cdef int stat(self, const Frame* frame) except -1
    cdef int info(self) except -1
    cdef int subscribe(self, const Frame* frame) except -1
    cdef bint enter_channel(self, uint32_t tag, const uint8_t* name, uint32_t size) noexcept
    cdef int unsubscribe(self, const Frame* frame) except -1
    cdef int publish(self, const Frame* frame) except -1
    cdef int connection_of(self, const Frame* frame) except -1
    cdef int whoami(self) except -1
    cdef int event(self, const Frame* frame) except -1
    cdef int list_all(self, uint8_t opcode, uint32_t channel) except -1
    cdef int list_subscribers(self, const Frame* frame) except -1
    cdef bint must_pause(self) noexcept
    cdef bint count_items(self) noexcept
    cdef uint32_t item_size(self, uint32_t number) noexcept
    cdef bint fill_fragment(self) noexcept
    cdef int write_fragment(self) except -1
    cdef int write_subscribers(self) noexcept
    cdef void drop_listing(self) noexcept
