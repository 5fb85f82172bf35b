# The gates of the beanstalk protocol: jobs that need a permit of another protocol to be reserved.
#
# Floor 2, header only. Such a job has a claim: the name of the permits and their maximum. A gate is a tube and a name,
# for the jobs of that tube with claims to that name. _queues.pxd moves its jobs, and the store takes the permits.
#
# Of a gate's ready jobs only the first is in the heap of the tube, as its head; the gate has its own heap for the
# others. If there is no permit for the head, the gate is shut: its ready jobs are all in its own heap, so nobody finds
# them, and the gate waits for a permit. Shutting and opening a gate costs the same however many jobs it has.
#
# Invariants (audit_gates checks them):
# - a gate exists while jobs of its tube have claims to its name;
# - each reserved job of a gate has one permit, and so has a gate with `has_permit`;
# - a gate that is shut waits, or its timer is armed.

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from counterd.engine.chains cimport Chains
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport (
    Record, Table, name_bytes, name_tag, record_at, table_begin, table_find, table_insert, table_remove, table_reserve,
)
from counterd.engine.wheel cimport Timer, Timers, timers_begin, timers_disarm, timers_reserve
from counterd.protocols.beanstalk._wire cimport NAME_MAX

cdef enum:
    GATE_NAME_INLINE = 40   # bytes of a gate's name that need no block
    GATE_COST = 120         # bytes of a gate besides its name's blocks: the record and two slots of the index
    CLAIM_COST = 8          # bytes
    GATE_HEAD = 4           # bytes of a gate's name before that of the permits: the number of the tube
    RETRY_NS = 100000000    # until a gate tries again that found no room to wait, at least
    RETRY_APART_NS = 1562500    # between two such gates: 64 in RETRY_NS, however many there are


cdef struct Claim:          # beside its Job
    uint32_t gate
    uint32_t maximum


cdef struct Gate:           # 104 bytes
    Record record
    uint8_t name[GATE_NAME_INLINE]
    uint32_t tube
    uint32_t jobs           # in any state
    uint32_t ready
    uint32_t reserved
    uint32_t head           # the first ready job, in the heap of the tube; 0: there is none, or the gate is shut
    uint32_t first          # of its own heap
    uint32_t asked          # the maximum for which it waits, or has got a permit
    uint32_t place          # where it waits, in the lender's words; 0: it does not
    Timer timer             # armed when it has got a permit, or is to try again
    uint8_t is_shut
    uint8_t has_permit      # it has waited for this permit, and no job has it yet
    uint8_t spare[6]


cdef struct GatesState:     # in the region
    uint64_t claims
    uint64_t bytes          # of gates and claims, without the blocks of names
    uint64_t reserved       # jobs with claims that are reserved
    uint64_t granted        # permits that came after a wait, in total
    int64_t retry_ns        # when the last gate that found no room to wait tries again


cdef struct Gates:          # this process's view
    GatesState* state
    Table table
    Timers timers
    Claim* claims           # by job


cdef inline int gates_reserve(Gates* gates, Region* region, uint32_t capacity, uint32_t jobs) except -1:
    region_reserve(region, b"gates", sizeof(GatesState), <void**>&gates.state)
    table_reserve(&gates.table, region, b"gates", capacity, sizeof(Gate), GATE_NAME_INLINE)
    timers_reserve(&gates.timers, region, b"gates")
    region_reserve(region, b"claims", (<size_t>jobs + 1) * sizeof(Claim), <void**>&gates.claims)
    return 0


cdef inline void gates_begin(
    Gates* gates, const uint64_t* hash_key, const Chains* chains, int64_t now_ns
) noexcept nogil:
    """Call this once, after the region was mapped. chains: the chains for the rest of long names."""
    table_begin(&gates.table, hash_key, chains)
    timers_begin(&gates.timers, &(<Gate*>gates.table.records).timer, sizeof(Gate), now_ns)


cdef inline Gate* gate_at(const Gates* gates, uint32_t number) noexcept nogil:
    return <Gate*>record_at(&gates.table, number)


cdef inline Gate* gate_of(const Gates* gates, uint32_t job) noexcept nogil:
    """Returns the gate of a job with a claim."""
    return gate_at(gates, gates.claims[job].gate)


cdef inline int64_t gates_retry_ns(Gates* gates, int64_t now_ns) noexcept nogil:
    """Returns when a gate that found no room to wait is to try again: after all others of these.

    But not later than if all gates were such, as those that have gone meanwhile had their times too.
    """
    cdef int64_t first_ns = now_ns + RETRY_NS
    cdef int64_t last_ns = first_ns + <int64_t>gates.table.pool.used * RETRY_APART_NS
    gates.state.retry_ns = min(max(gates.state.retry_ns + RETRY_APART_NS, first_ns), last_ns)
    return gates.state.retry_ns


cdef inline uint32_t gate_word(uint8_t* target, uint32_t tube, const uint8_t* name, uint32_t size) noexcept nogil:
    """Writes the name of a gate, at most GATE_HEAD + NAME_MAX bytes. Returns its size."""
    memcpy(target, &tube, GATE_HEAD)
    memcpy(target + GATE_HEAD, name, size)
    return GATE_HEAD + size


cdef inline uint32_t gate_find(const Gates* gates, uint32_t tube, const uint8_t* name, uint32_t size) noexcept nogil:
    """Returns the gate for a tube and a name of permits, or 0 if there is none."""
    cdef uint8_t[GATE_HEAD + NAME_MAX] word
    size = gate_word(word, tube, name, size)
    return table_find(&gates.table, name_tag(&gates.table, word, size), word, size)


cdef inline uint32_t gate_make(Gates* gates, uint32_t tube, const uint8_t* name, uint32_t size) noexcept nogil:
    """Makes a gate.

    The caller must have checked that the gate is new and that there is room, and immediately adds a claim.
    """
    cdef uint8_t[GATE_HEAD + NAME_MAX] word
    cdef uint32_t number
    cdef Gate* gate
    size = gate_word(word, tube, name, size)
    number = table_insert(&gates.table, name_tag(&gates.table, word, size), word, size)
    gate = gate_at(gates, number)
    memset(&gate.tube, 0, <uint8_t*>(gate + 1) - <uint8_t*>&gate.tube)
    gate.tube = tube
    gates.state.bytes += GATE_COST
    return number


cdef inline bytes permits_name(const Gates* gates, Gate* gate):
    """Returns the name of a gate's permits."""
    return name_bytes(&gates.table, &gate.record)[GATE_HEAD:]


cdef inline void gate_join(Gates* gates, uint32_t number, uint32_t job, uint32_t maximum) noexcept nogil:
    """Gives a claim to a job that is not in a queue. The caller marks the job."""
    gates.claims[job] = Claim(number, maximum)
    gate_at(gates, number).jobs += 1
    gates.state.claims += 1
    gates.state.bytes += CLAIM_COST


cdef inline bint gate_part(Gates* gates, uint32_t job) noexcept nogil:
    """Ends the claim of a job that is not in a queue. Returns whether the gate is no longer needed."""
    cdef Gate* gate = gate_of(gates, job)
    gate.jobs -= 1
    gates.state.claims -= 1
    gates.state.bytes -= CLAIM_COST
    return gate.jobs == 0


cdef inline void gate_free(Gates* gates, uint32_t number) noexcept nogil:
    """Frees a gate without jobs. The caller must have ended the gate's wait and given its permit back."""
    timers_disarm(&gates.timers, number)
    table_remove(&gates.table, number)
    gates.state.bytes -= GATE_COST
