# The rules: flows, parameters, and their namespaces. They are records in the region, which _loading.pyx fills.
#
# Floor 2, header only. A namespace with connections is a permit, and a connection's PING makes a holding of it. So the
# ledger has the number of connections, and a gone connection no longer counts.
#
# Invariants (audit_flows checks them):
# - a flow exists as long as it has a rule (RULED) or tokens;
# - the name of its resource is a chain of blocks from the resources' own pool.

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd.engine.byteorder cimport load_be64, store_be64
from counterd.engine.chains cimport (
    BLOCK_PAYLOAD, Chain, Chains, chain_blocks, chain_free, chain_read, chain_write, chains_begin, chains_reserve,
)
from counterd.engine.permits cimport Permits, permit_consumption
from counterd.engine.pool cimport pool_left
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport (
    Record, Table, name_tag, record_at, table_begin, table_find, table_insert, table_remove, table_reserve,
)
from counterd.protocols.sentinel._messages cimport ID_SIZE, NAMESPACE_MAX
from counterd.protocols.sentinel._window cimport (
    Samples, Window, rate, window_begin, window_enter, window_pass,
)

cdef enum:
    NAMESPACES_MAX = 1024       # of rules
    RULES_MAX = 16384           # rules of flows; likewise of parameters
    FLOWS = 2                   # records of flows per rule, because a flow without a rule may still have tokens
    RESOURCE_BLOCKS = 4         # per flow: 240 bytes of its resource's name on average
    LIMITER_SAMPLES = 10        # of the window of a namespace's requests, one second
    LIMITER_NS = 1000000000
    CONCURRENCY = 0             # FlowRule.grade
    QPS = 1
    GLOBAL = 1                  # thresholdType; 0 is per client
    RELEASE_STRATEGY = 1        # resourceTimeoutStrategy; 0 is ignore
    KEEP_STRATEGY = 2
    RULED = 1                   # in Record.flags: the flow has a rule


cdef struct Namespace:          # of rules
    uint32_t tag                # of its name among the permits
    uint32_t name_size          # 0 = free
    uint8_t[NAMESPACE_MAX] name
    Window requests
    Samples samples


cdef struct Flow:
    Record record
    uint8_t[ID_SIZE] id
    double threshold            # `count` of the rule
    uint32_t namespace
    uint8_t grade
    uint8_t threshold_type
    uint8_t strategy
    uint8_t spare
    int64_t resource_ns
    int64_t offline_ns
    uint64_t now_calls
    uint64_t passed             # this and the next three: sums of counts, in total
    uint64_t blocked
    uint64_t waiting
    uint64_t expired
    uint32_t tokens
    uint32_t resource_size      # bytes
    Chain resource              # the name of its resource, from its current or last rule
    Window window
    Samples samples


cdef struct Param:
    Record record
    uint8_t[ID_SIZE] id
    double threshold
    uint32_t namespace
    uint32_t serial             # in the keys of its values; changes with its window
    uint32_t items              # its first hot item, a value; or 0
    uint8_t threshold_type
    uint64_t passed
    uint64_t blocked
    Window window


cdef struct Rules:              # this process's view
    const Permits* permits      # the namespaces with connections
    Table flows
    Table params
    Chains resources
    Namespace* namespaces
    uint32_t rules_max          # rules of flows; likewise of parameters


# ---- region --------------------------------------------------------------------------------------------------------

cdef inline int rules_reserve(Rules* rules, Region* region, const Permits* permits, uint32_t rules_max) except -1:
    """Reserves memory for `rules_max` rules of each kind. Raises ValueError for more than RULES_MAX."""
    cdef uint32_t flows = FLOWS * rules_max
    if not 0 < rules_max <= RULES_MAX:
        raise ValueError(f"there can be 1 to {RULES_MAX} rules of a kind, not {rules_max}")
    rules.permits = permits
    rules.rules_max = rules_max
    table_reserve(&rules.flows, region, b"flows", flows, sizeof(Flow), ID_SIZE)
    table_reserve(&rules.params, region, b"params", rules_max, sizeof(Param), ID_SIZE)
    chains_reserve(&rules.resources, region, <uint64_t>flows * RESOURCE_BLOCKS)
    region_reserve(
        region, b"namespaces", (NAMESPACES_MAX + 1) * sizeof(Namespace), <void**>&rules.namespaces
    )
    return 0


cdef inline void rules_begin(Rules* rules, const uint64_t* key, const Chains* chains) noexcept nogil:
    """Call this once, after the region was mapped."""
    chains_begin(&rules.resources)
    table_begin(&rules.flows, key, chains)
    table_begin(&rules.params, key, chains)


cdef inline int64_t after(int64_t moment_ns, int64_t span_ns) noexcept nogil:
    """Returns the sum of a time and a duration, at most INT64_MAX."""
    return 0x7fffffffffffffff if moment_ns > <int64_t>0x7fffffffffffffff - span_ns else moment_ns + span_ns


cdef inline Flow* flow_at(const Rules* rules, uint32_t number) noexcept nogil:
    return <Flow*>record_at(&rules.flows, number)


cdef inline Param* param_at(const Rules* rules, uint32_t number) noexcept nogil:
    return <Param*>record_at(&rules.params, number)


cdef inline int64_t flow_id(const Rules* rules, uint32_t number) noexcept nogil:
    return <int64_t>load_be64(flow_at(rules, number).id)


cdef inline int64_t param_id(const Rules* rules, uint32_t number) noexcept nogil:
    return <int64_t>load_be64(param_at(rules, number).id)


cdef inline uint32_t id_find(const Table* table, int64_t id) noexcept nogil:
    """Returns the record with this id, or 0 if there is none."""
    cdef uint8_t[ID_SIZE] name
    store_be64(name, <uint64_t>id)
    return table_find(table, name_tag(table, name, ID_SIZE), name, ID_SIZE)


cdef inline uint32_t id_insert(Table* table, int64_t id) except 0:
    """Makes a record for a new id. Raises ValueError if there is no room for the record."""
    cdef uint8_t[ID_SIZE] name
    if pool_left(table.pool) == 0:
        raise ValueError(f"there are {table.capacity} rules already, and there is no room for {id}")
    store_be64(name, <uint64_t>id)
    return table_insert(table, name_tag(table, name, ID_SIZE), name, ID_SIZE)


cdef inline bint flow_is_for_calls(const Flow* flow) noexcept nogil:
    """Returns whether the flow has a rule by concurrency."""
    return flow.record.flags & RULED and flow.grade == CONCURRENCY


cdef inline bint flow_is_for_rates(const Flow* flow) noexcept nogil:
    return flow.record.flags & RULED and flow.grade == QPS


# ---- names of resources --------------------------------------------------------------------------------------------

cdef inline void resource_free(Rules* rules, Flow* flow) noexcept nogil:
    if flow.resource_size:
        chain_free(&rules.resources, &flow.resource, chain_blocks(flow.resource_size))
    flow.resource_size = 0


cdef inline int resource_set(Rules* rules, Flow* flow, bytes name) except -1:
    """Sets the resource name of a flow that has none. Raises ValueError if there is no memory for the name."""
    cdef uint64_t size = PyBytes_GET_SIZE(name)
    if size > <uint64_t>pool_left(rules.resources.pool) * BLOCK_PAYLOAD:
        raise ValueError(f"there is no memory for a resource's name of {size} bytes")
    chain_write(&rules.resources, &flow.resource, 0, <const uint8_t*>PyBytes_AS_STRING(name), <uint32_t>size)
    flow.resource_size = <uint32_t>size
    return 0


cdef inline bytes resource_bytes(const Rules* rules, const Flow* flow):
    cdef bytes name = PyBytes_FromStringAndSize(NULL, flow.resource_size)
    chain_read(&rules.resources, &flow.resource, 0, <uint8_t*>PyBytes_AS_STRING(name), flow.resource_size)
    return name


cdef inline void flow_free(Rules* rules, uint32_t number) noexcept nogil:
    """Frees a flow that has neither a rule nor tokens."""
    resource_free(rules, flow_at(rules, number))
    table_remove(&rules.flows, number)


# ---- namespaces ----------------------------------------------------------------------------------------------------

cdef inline int namespace_check(size_t size) except -1:
    """Raises ValueError if a namespace cannot have `size` bytes."""
    if not 0 < size <= NAMESPACE_MAX:
        raise ValueError(f"a namespace has 1 to {NAMESPACE_MAX} bytes, not {size}")
    return 0


cdef inline int namespace_begin(Rules* rules, uint32_t number, bytes name) except -1:
    """Begins to count the requests of a namespace.

    number: the place of the namespace. Raises ValueError if the name does not fit.
    """
    cdef Namespace* namespace = rules.namespaces + number
    cdef size_t size = PyBytes_GET_SIZE(name)
    if not 0 < number <= NAMESPACES_MAX:
        raise ValueError(f"the rules have more than {NAMESPACES_MAX} namespaces")
    namespace_check(size)
    memcpy(namespace.name, PyBytes_AS_STRING(name), size)
    namespace.name_size = <uint32_t>size
    namespace.tag = name_tag(&rules.permits.table, namespace.name, namespace.name_size)
    return window_begin(&namespace.requests, &namespace.samples, LIMITER_SAMPLES, LIMITER_NS)


cdef inline double rule_threshold(
    const Rules* rules, double count, uint8_t threshold_type, uint32_t namespace
) noexcept nogil:
    """Returns the threshold of a rule: `count`, or `count` times the number of connections of its namespace."""
    cdef const Namespace* counted = rules.namespaces + namespace
    if threshold_type == GLOBAL:
        return count
    return count * permit_consumption(rules.permits, counted.tag, counted.name, counted.name_size)


cdef inline bint namespace_ask(Rules* rules, uint32_t namespace, double qps_max, int64_t now_ns) noexcept nogil:
    """Counts a request of a namespace, if its limit allows it. Returns False if the limit does not allow it."""
    cdef Namespace* asking = rules.namespaces + namespace
    window_enter(&asking.requests, &asking.samples, now_ns)
    if rate(&asking.requests, asking.requests.passed) + 1 > qps_max:
        return False
    window_pass(&asking.requests, &asking.samples, 1)
    return True
