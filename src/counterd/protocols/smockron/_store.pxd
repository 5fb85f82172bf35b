# The smockron protocol's store, for the modules with its sessions and tables.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport Store
from counterd.engine.chains cimport Chains
from counterd.engine.list cimport Ends
from counterd.engine.wheel cimport Timer, Timers
from counterd.protocols.smockron._throttles cimport Domain, Throttles
from counterd.protocols.smockron._wire cimport PARSE_RESULTS

cdef enum Operation:        # the outcomes are counted for each
    ACCEPTED = 0            # to FORGET: statuses of accounting messages
    DELAYED = 1
    REJECTED = 2
    FORGET = 3
    ACCOUNTING = 4          # an accounting message without a valid status or domain
    SUBSCRIBE = 5
    CANCEL = 6
    PING = 7
    HANDSHAKE = 8
    OPERATIONS = 9

cdef enum Outcome:
    OK = 0
    THROTTLED = 1           # DELAY_UNTIL was published
    UNKNOWN_DOMAIN = 2
    MALFORMED = 3
    REFUSED = 4             # a bad handshake or one subscription too many: the connection ends
    TIMED_OUT = 5
    OUTCOMES = 6


cdef struct Link:           # in the region, by connection
    Timer silence           # the connection ends then, unless it sends something
    int64_t patience_ns     # how long it may be silent; 0 = for ever
    uint32_t is_ready       # its handshake is complete


cdef struct SmockronState:  # in the region
    uint64_t outcomes[OPERATIONS][OUTCOMES]
    uint64_t broken[PARSE_RESULTS]
    uint64_t published      # control messages
    uint64_t delivered      # deliveries of control messages, one for each subscriber
    uint64_t lost           # deliveries for which a subscriber had no room
    uint64_t silent         # connections that were silent for longer than the TTL of their PING
    uint32_t subscriptions


cdef class SmockronStore(Store):
    cdef SmockronState* state
    cdef Chains domain_chains
    cdef Chains chains          # of identifiers
    cdef Throttles throttles
    cdef Timers silences        # of connections
    cdef Link* links            # by connection
    cdef size_t message_max     # bytes of a message
    cdef int64_t wall_ns        # Unix time minus the caller's clock
    cdef void** sessions        # by connection; NULL = it is gone
    cdef dict subscribers       # {prefix: {connection: number of its subscriptions to the prefix}}
    cdef dict prefixes          # {connection: {prefix}}
    cdef dict listeners         # {domain: (topic, connections)}, a cache for domains with control messages
    cdef list leaving           # gone connections whose subscriptions have not been removed yet
    cdef dict parked            # {connection: None} of sessions that are parked until there is room for questions
    cdef size_t listed          # connections in `listeners`, in all
    cdef dict rounded_ms        # {domain: (interval, burst)}, rounded as by the real master
    cdef bint is_shared         # Redis decides
    cdef bint is_alone          # Redis should decide, but is unavailable
    cdef dict questions         # {domain: [Question]} that Redis was not asked yet
    cdef list asked             # [(domain, [Question])] that Redis was asked
    cdef uint32_t asking        # the number of questions in both
    cdef uint32_t crowded       # a subscriber that has to fetch its messages before others come; 0 = none

    cdef int64_t now_ms(self) noexcept
    cdef bint can_publish(self) except -1
    cdef int account(
        self, uint32_t domain, Operation operation, uint32_t tag, const uint8_t* name, uint32_t size, int64_t moment_ms
    ) except -1
    cdef int decide(
        self, uint32_t domain, Operation operation, uint32_t tag, const uint8_t* name, uint32_t size,
        int64_t moment_ms, int64_t now_ms,
    ) except -1
    cdef uint32_t enter(self, uint32_t domain, uint32_t tag, const uint8_t* name, uint32_t size) except 0
    cdef int tell(
        self, uint32_t domain, Operation operation, const uint8_t* name, uint32_t size, int64_t now_ms,
        int64_t until_ms,
    ) except -1
    cdef int ask(self, uint32_t domain, question) except -1
    cdef bint is_full(self) noexcept
    cdef int park(self, uint32_t connection) except -1
    cdef int unpark(self) except -1
    cdef int forget_now(self, uint32_t domain, uint32_t tag, const uint8_t* name, uint32_t size) except -1
    cdef int take_leave(self, int* steps) except -1
    cdef int reject(self, uint32_t domain, uint32_t tag, const uint8_t* name, uint32_t size) except -1
    cdef int decide_late(self, uint32_t domain, question) except -1
    cdef int settle_question(self, uint32_t domain, question, int64_t until_ms) except -1
    cdef int forget_identifier(self, uint32_t domain, uint32_t tag, const uint8_t* name, uint32_t size) except -1
    cdef int subscribe(self, uint32_t connection, bytes prefix) except -1
    cdef int cancel(self, uint32_t connection, bytes prefix) except -1
    cdef void await_handshake(self, uint32_t connection, int64_t limit_ns) noexcept
    cdef void heard(self, uint32_t connection) noexcept
    cdef void count(self, Operation operation, Outcome outcome) noexcept
    cdef list used_domains(self)
    cdef bytes domain_name(self, uint32_t number)
    cdef int set_rule(self, bytes name, rule) except -1
    cdef int cut_off(self, uint32_t connection) except -1
    cdef int make_room(self, uint32_t blocks) except -1
    cdef void evict(self, uint32_t number) noexcept
    cdef uint32_t audit_recency(self, const Ends* recency, bint chained) except? 0
    cdef int publish(
        self, uint32_t domain, const char* command, const uint8_t* name, uint32_t size, int64_t moment_ms
    ) except -1
    cdef tuple find_listeners(self, uint32_t domain)
    cdef void forget_listeners(self) noexcept
    cdef int give(self, uint32_t connection, bytes message) except -1
    cdef void leave(self, uint32_t connection, bytes prefix) noexcept
    cdef int audit_subscribers(self) except -1
