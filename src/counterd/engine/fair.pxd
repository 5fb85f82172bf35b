# Queues of waiters: start-time fair queueing between keys, first come, first served within a key.
#
# Floor 1, header only; no clock. A thing that can be taken is known here by the number and tag of its record. It has a
# queue from the first waiter on until nothing refers to the queue. A waiter is in one queue.
#
# Each queue has a virtual time. A waiter of cost c and weight w starts at the later of the queue's virtual time and the
# end of the last served waiter with the same key, and ends c / w later. The waiter that starts first is served first,
# and the virtual time becomes its start. So while keys compete, each is served in proportion to its weight, and a key
# that was away has no claim to what others got meanwhile. (Goyal, Vin and Cheng, "Start-time Fair Queueing", 1996.) A
# higher priority goes before all weights. The waiter that is first stays first until it is served: smaller ones behind
# it do not pass.
#
# Only the first waiter of a key, its head, has a start and is in the heap of the queue. The others are in a heap of
# their key. If a head ends without being served, the next one gets its start: a key does not pay for what it did not
# get.
#
# Invariants (audit_fair checks each):
# - exactly the waiters in use are in the heap of their queue or of their flow, and in the list of their connection;
# - a flow with waiters has a head, which is before its other waiters;
# - a queue exists while it has waiters, pins or flows; a flow exists while it has waiters, or may count later;
# - a flow without waiters is in the idle list of its queue, and so may be one that has waiters again.

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.debug cimport debug_check
from counterd.engine.heap cimport Heap, Node, heap_insert, heap_remove
from counterd.engine.list cimport Links, List, list_push, list_remove
from counterd.engine.pool cimport Pool, pool_put, pool_take
from counterd.engine.region cimport Region, region_reserve
from counterd.engine.table cimport Index, index_home, index_insert, index_remove, index_reserve
from counterd.engine.wheel cimport Timer, Timers, timers_begin, timers_disarm, timers_reserve

cdef enum:
    WEIGHT_MAX = 1000
    COST_MAX = 1 << 24      # a higher cost counts as this one
    COST_SHIFT = 12         # virtual time of a cost of 1 at weight 1, as a power of two
    START_BITS = 56         # of a waiter's key in the heap; the priority is above
    SERVED = 255            # in Waiter.moves
    MOVES_MAX = 4           # moves of a waiter after which nobody goes before it in another queue
    LABEL_MAX = 31          # bytes of a key that people see
    IDLE_LOOKS = 2          # idle flows that each arrival and each service looks at: more than either can add

cdef extern from *:
    """
    #define COUNTERD_START_MAX ((UINT64_C(1) << 56) - 1)
    """
    # Later starts count as this one: then waiters are served in the order of their arrival until the queue is empty.
    const uint64_t START_MAX "COUNTERD_START_MAX"


cdef struct Waiter:         # 64 bytes
    Node node               # key: priority and start; of those behind a head, see waiter_rank()
    uint32_t connection     # 0: free
    uint32_t queue
    uint32_t flow
    Links of_connection     # its `next` also links the free list
    uint32_t cost
    uint16_t weight
    uint8_t priority        # the higher one is served first
    uint8_t moves           # from one queue to another; or SERVED


cdef struct Queue:          # 64 bytes
    uint64_t virtual        # start of the last waiter that was served
    uint64_t ends           # the last end of a head, or of a waiter without a flow
    uint32_t record         # 0: free; then idle_first links the free list
    uint32_t tag
    uint32_t first          # of the heap
    uint32_t waiters
    uint32_t pins           # references besides its waiters and flows
    uint32_t idle_first     # flows without waiters, in the order in which they are looked at
    uint32_t idle_last
    uint32_t flows
    uint32_t next_ready
    uint8_t is_ready        # in the list of queues that are to be served
    uint8_t spare[11]


cdef struct Flow:           # 40 bytes: a key in a queue
    uint64_t key
    uint64_t start          # of its head, or at least of its next one if it has none
    uint32_t queue          # 0: free
    uint32_t waiters
    uint32_t head           # the waiter in the heap of the queue
    uint32_t first          # of the heap of its other waiters
    uint32_t next_idle      # also links the free list
    uint8_t is_listed       # in the idle list: also with waiters, until that is looked at
    uint8_t spare[3]


cdef struct Label:          # 32 bytes, beside its Flow: the beginning of the key, for people
    uint8_t size
    uint8_t text[LABEL_MAX]


cdef struct Asker:          # of each connection
    uint32_t first          # its first waiter
    uint32_t waiters


cdef struct FairState:      # in the region
    Pool waiters
    Pool queues
    Pool flows
    uint64_t serial         # waiters so far
    uint32_t ready_first    # queues that are to be served
    uint32_t ready_last


cdef struct Fair:           # this process's view
    FairState* state
    Waiter* waiters
    Queue* queues
    Flow* flows
    Label* labels           # by flow
    Asker* askers           # by connection
    Index by_record         # queues
    Index by_key            # flows
    Heap heap
    Timers timers           # of queues: when the first waiter can be served
    Timer* wakes
    uint32_t capacity       # waiters


# ---- region --------------------------------------------------------------------------------------------------------

cdef inline uint32_t fair_others(uint32_t capacity) noexcept nogil:
    """Returns the largest possible number of queues and of flows: some of them exist longer than their waiters."""
    return 2 * capacity + 64


cdef inline int fair_reserve(Fair* fair, Region* region, uint32_t capacity) except -1:
    """Reserves memory for `capacity` waiters."""
    cdef size_t others = <size_t>fair_others(capacity) + 1
    fair.capacity = capacity
    region_reserve(region, b"waiters", sizeof(FairState), <void**>&fair.state)
    region_reserve(region, b"waiters", (<size_t>capacity + 1) * sizeof(Waiter), <void**>&fair.waiters)
    region_reserve(region, b"queues", others * sizeof(Queue), <void**>&fair.queues)
    region_reserve(region, b"flows", others * sizeof(Flow), <void**>&fair.flows)
    region_reserve(region, b"flows", others * sizeof(Label), <void**>&fair.labels)
    region_reserve(region, b"queues", others * sizeof(Timer), <void**>&fair.wakes)
    region_reserve(region, b"askers", (CONNECTIONS_MAX + 1) * sizeof(Asker), <void**>&fair.askers)
    index_reserve(&fair.by_record, region, b"queues", fair_others(capacity))
    index_reserve(&fair.by_key, region, b"flows", fair_others(capacity))
    timers_reserve(&fair.timers, region, b"queues")
    return 0


cdef inline void fair_begin(Fair* fair, int64_t now_ns) noexcept nogil:
    """Call this once, after the region was mapped."""
    debug_check(sizeof(Waiter) == 64 and sizeof(Queue) == 64 and sizeof(Flow) == 40)
    fair.state.waiters.capacity = fair.capacity
    fair.state.queues.capacity = fair.state.flows.capacity = fair_others(fair.capacity)
    fair.heap.base = <uint8_t*>&fair.waiters.node
    fair.heap.stride = sizeof(Waiter)
    timers_begin(&fair.timers, fair.wakes, sizeof(Timer), now_ns)


# ---- queues --------------------------------------------------------------------------------------------------------

cdef inline uint32_t queue_find(const Fair* fair, uint32_t record, uint32_t tag) noexcept nogil:
    """Returns the queue of a record, or 0."""
    cdef const Index* index = &fair.by_record
    cdef uint32_t slot = index_home(index, tag)
    cdef uint32_t number, _step
    for _step in range(index.mask + 1):
        number = index.entries[slot].number
        if number == 0:
            return 0
        if index.entries[slot].tag == tag and fair.queues[number].record == record:
            return number
        slot = (slot + index.step) & index.mask
    return 0


cdef inline uint32_t queue_pin(Fair* fair, uint32_t record, uint32_t tag) noexcept nogil:
    """Returns the queue of a record, and pins it once more.

    Makes a new queue if the record has none. Returns 0 if there is no room for a new queue.
    """
    cdef uint32_t number = queue_find(fair, record, tag)
    cdef Queue* queue
    if number == 0:
        number = pool_take(&fair.state.queues, &fair.queues.idle_first, sizeof(Queue))
        if number == 0:
            return 0
        queue = fair.queues + number
        memset(queue, 0, sizeof(Queue))
        queue.record = record
        queue.tag = tag
        index_insert(&fair.by_record, tag, number)
    fair.queues[number].pins += 1
    return number


cdef inline bint queue_is_over(const Queue* queue) noexcept nogil:
    return queue.waiters == 0 and queue.pins == 0 and queue.flows == 0 and not queue.is_ready


cdef inline void queue_settle(Fair* fair, uint32_t number) noexcept nogil:
    """Frees a queue that nothing refers to."""
    cdef Queue* queue = fair.queues + number
    if queue_is_over(queue):
        timers_disarm(&fair.timers, number)
        index_remove(&fair.by_record, queue.tag, number)
        queue.record = 0
        pool_put(&fair.state.queues, &fair.queues.idle_first, sizeof(Queue), number)


cdef inline void queue_unpin(Fair* fair, uint32_t number) noexcept nogil:
    debug_check(fair.queues[number].pins > 0)
    fair.queues[number].pins -= 1
    queue_settle(fair, number)


cdef inline void queue_wake(Fair* fair, uint32_t number) noexcept nogil:
    """Lets a queue be served soon, because its first waiter may get something, or because the queue has to be tidied
    up."""
    cdef Queue* queue = fair.queues + number
    if queue.is_ready:
        return
    queue.is_ready = True
    queue.next_ready = 0
    if fair.state.ready_last:
        fair.queues[fair.state.ready_last].next_ready = number
    else:
        fair.state.ready_first = number
    fair.state.ready_last = number


cdef inline uint32_t queue_next_ready(Fair* fair) noexcept nogil:
    """Takes the first queue that has to be served.

    Returns 0 if there is none. The caller then calls queue_settle() for this queue.
    """
    cdef uint32_t number = fair.state.ready_first
    if number:
        fair.queues[number].is_ready = False
        fair.state.ready_first = fair.queues[number].next_ready
        if fair.state.ready_first == 0:
            fair.state.ready_last = 0
    return number


# ---- flows ---------------------------------------------------------------------------------------------------------

cdef inline uint32_t flow_tag(uint32_t queue, uint64_t key) noexcept nogil:
    return <uint32_t>(((key ^ <uint64_t>queue << 32) * <uint64_t>0x9e3779b97f4a7c15) >> 32)


cdef inline uint32_t flow_find(const Fair* fair, uint32_t queue, uint64_t key) noexcept nogil:
    cdef const Index* index = &fair.by_key
    cdef uint32_t tag = flow_tag(queue, key)
    cdef uint32_t slot = index_home(index, tag)
    cdef uint32_t number, _step
    for _step in range(index.mask + 1):
        number = index.entries[slot].number
        if number == 0:
            return 0
        if index.entries[slot].tag == tag and fair.flows[number].key == key and fair.flows[number].queue == queue:
            return number
        slot = (slot + index.step) & index.mask
    return 0


cdef inline void flow_idle(Fair* fair, uint32_t number) noexcept nogil:
    """Adds a flow to the idle list of its queue, unless the list already has it."""
    cdef Queue* queue = fair.queues + fair.flows[number].queue
    if fair.flows[number].is_listed:
        return
    fair.flows[number].is_listed = True
    fair.flows[number].next_idle = 0
    if queue.idle_last:
        fair.flows[queue.idle_last].next_idle = number
    else:
        queue.idle_first = number
    queue.idle_last = number


cdef inline void flows_tidy(Fair* fair, uint32_t number, int looks) noexcept nogil:
    """Looks at some flows at the beginning of the idle list. Frees the flows that have ended by now, and moves the
    others to the end.

    A flow that has waiters again leaves the list in this step.
    """
    cdef Queue* queue = fair.queues + number
    cdef uint32_t idle
    cdef Flow* flow
    while looks > 0 and queue.idle_first:
        looks -= 1
        idle = queue.idle_first
        flow = fair.flows + idle
        queue.idle_first = flow.next_idle
        if queue.idle_first == 0:
            queue.idle_last = 0
        flow.is_listed = False
        if flow.waiters:
            continue
        if flow.start <= queue.virtual:
            index_remove(&fair.by_key, flow_tag(number, flow.key), idle)
            flow.queue = 0
            queue.flows -= 1
            pool_put(&fair.state.flows, &fair.flows.next_idle, sizeof(Flow), idle)
        else:
            flow_idle(fair, idle)


cdef inline uint32_t flow_join(Fair* fair, uint32_t queue, uint64_t key) noexcept nogil:
    """Returns the flow of a key, with one more waiter. Makes a new flow if the key has none.

    Returns 0 if there is no room for a new flow; then the waiter starts after all heads.
    """
    cdef uint32_t number = flow_find(fair, queue, key)
    if number == 0:
        number = pool_take(&fair.state.flows, &fair.flows.next_idle, sizeof(Flow))
        if number == 0:
            return 0
        memset(fair.flows + number, 0, sizeof(Flow))
        fair.flows[number].key = key
        fair.flows[number].queue = queue
        fair.queues[queue].flows += 1
        index_insert(&fair.by_key, flow_tag(queue, key), number)
    fair.flows[number].waiters += 1
    return number


cdef inline void flow_leave(Fair* fair, uint32_t number) noexcept nogil:
    """Called when a waiter of the flow is gone."""
    cdef Flow* flow = fair.flows + number
    if number == 0:
        return
    flow.waiters -= 1
    if flow.waiters == 0:
        flow_idle(fair, number)


# ---- waiters -------------------------------------------------------------------------------------------------------

cdef inline Waiter* waiter_at(const Fair* fair, uint32_t number) noexcept nogil:
    debug_check(0 < number <= fair.state.waiters.fresh)
    return fair.waiters + number


cdef inline List waiters_by_connection(const Fair* fair) noexcept nogil:
    return List(fair.waiters, sizeof(Waiter), &fair.waiters.of_connection)


cdef inline uint64_t waiter_span(const Waiter* waiter) noexcept nogil:
    """Returns how long after its start a waiter ends, in virtual time."""
    return (<uint64_t>min(waiter.cost, <uint32_t>COST_MAX) << COST_SHIFT) // waiter.weight


cdef inline uint64_t waiter_key(const Waiter* waiter, uint64_t start) noexcept nogil:
    return <uint64_t>(255 - waiter.priority) << START_BITS | min(start, START_MAX)


cdef inline uint64_t waiter_rank(const Waiter* waiter) noexcept nogil:
    """Returns the place of a waiter among those with the same key, of which the earlier goes first."""
    return <uint64_t>(255 - waiter.priority) << START_BITS | (waiter.moves < MOVES_MAX)


cdef inline bint waiter_goes_before(const Waiter* waiter, const Waiter* other) noexcept nogil:
    """Returns True if a waiter goes before another one with the same key."""
    cdef uint64_t rank = waiter_rank(waiter), least = waiter_rank(other)
    return rank < least or rank == least and waiter.node.serial < other.node.serial


cdef inline void waiter_lead(Fair* fair, uint32_t number, uint64_t start) noexcept nogil:
    """Puts a waiter into the heap of its queue, at its start or, if it was moved often enough, at the front."""
    cdef Waiter* waiter = fair.waiters + number
    cdef Queue* queue = fair.queues + waiter.queue
    queue.ends = max(queue.ends, start + waiter_span(waiter))
    waiter.node.key = waiter_key(waiter, start if waiter.moves < MOVES_MAX else queue.virtual)
    heap_insert(&fair.heap, &queue.first, number)


cdef inline void flow_lead(Fair* fair, uint32_t flow_number, uint32_t number) noexcept nogil:
    """Makes a waiter the head of its flow, which has none, at the start of the flow."""
    fair.flows[flow_number].head = number
    waiter_lead(fair, number, fair.flows[flow_number].start)


cdef inline void flow_push(Fair* fair, uint32_t flow_number, uint32_t number) noexcept nogil:
    """Puts a waiter behind the head of its flow."""
    fair.waiters[number].node.key = waiter_rank(fair.waiters + number)
    heap_insert(&fair.heap, &fair.flows[flow_number].first, number)


cdef inline void waiter_insert(Fair* fair, uint32_t number) noexcept nogil:
    """Puts a waiter into its queue. Its flow has counted it already."""
    cdef Waiter* waiter = fair.waiters + number
    cdef Queue* queue = fair.queues + waiter.queue
    cdef Flow* flow = fair.flows + waiter.flow
    cdef uint32_t head = flow.head
    queue.waiters += 1
    if waiter.flow == 0:
        waiter_lead(fair, number, max(queue.virtual, queue.ends))
    elif head and not waiter_goes_before(waiter, fair.waiters + head):
        flow_push(fair, waiter.flow, number)
    else:
        if head:    # its start is now that of the new one, and again its own if the new one ends without being served
            heap_remove(&fair.heap, &queue.first, head)
            flow_push(fair, waiter.flow, head)
        else:
            flow.start = max(flow.start, queue.virtual)
        flow_lead(fair, waiter.flow, number)


cdef inline void waiter_extract(Fair* fair, uint32_t number) noexcept nogil:
    """Takes a waiter out of its queue. The waiter behind it may be served now."""
    cdef Waiter* waiter = fair.waiters + number
    cdef Queue* queue = fair.queues + waiter.queue
    cdef Flow* flow = fair.flows + waiter.flow
    cdef uint32_t first = queue.first, head
    if waiter.flow and flow.head != number:
        heap_remove(&fair.heap, &flow.first, number)
    else:
        heap_remove(&fair.heap, &queue.first, number)
    if waiter.flow and flow.head == number:
        flow.head = 0
        if waiter.moves == SERVED:
            flow.start = max(flow.start + waiter_span(waiter), queue.virtual)
        head = flow.first
        if head:
            heap_remove(&fair.heap, &flow.first, head)
            flow_lead(fair, waiter.flow, head)
    queue.waiters -= 1
    flow_leave(fair, waiter.flow)
    if queue.waiters == 0:
        queue.virtual = queue.ends  # nobody competes: all flows begin anew
    if queue.first != first or queue.waiters == 0:
        queue_wake(fair, waiter.queue)


cdef inline uint32_t fair_enter(
    Fair* fair, uint32_t connection, uint32_t queue, uint64_t key, uint16_t weight, uint8_t priority, uint32_t cost
) noexcept nogil:
    """Adds a waiter behind the other waiters of its key. Returns the number of the waiter. There must be room for the
    waiter.

    weight: 1 to WEIGHT_MAX. cost: how many units or permits the waiter wants.
    """
    cdef uint32_t number = pool_take(&fair.state.waiters, &fair.waiters.of_connection, sizeof(Waiter))
    cdef Waiter* waiter = fair.waiters + number
    cdef Asker* asker = fair.askers + connection
    debug_check(number != 0 and connection != 0 and 1 <= weight <= WEIGHT_MAX)
    flows_tidy(fair, queue, IDLE_LOOKS)
    waiter.connection = connection
    waiter.queue = queue
    waiter.flow = flow_join(fair, queue, key)
    waiter.cost = cost
    waiter.weight = weight
    waiter.priority = priority
    waiter.moves = 0
    fair.state.serial += 1
    waiter.node.serial = fair.state.serial
    list_push(waiters_by_connection(fair), &asker.first, number)
    asker.waiters += 1
    waiter_insert(fair, number)
    return number


cdef inline void waiter_label(Fair* fair, uint32_t number, const uint8_t* key, uint32_t size) noexcept nogil:
    """Stores the beginning of a waiter's key, for people."""
    cdef Label* label = fair.labels + fair.waiters[number].flow
    label.size = <uint8_t>min(size, <uint32_t>LABEL_MAX)
    memcpy(label.text, key, label.size)


cdef inline uint64_t waiter_flow_key(const Fair* fair, const Waiter* waiter) noexcept nogil:
    return fair.flows[waiter.flow].key if waiter.flow else 0


cdef inline bint fair_is_behind(const Fair* fair, uint32_t number, uint32_t queue) noexcept nogil:
    """Returns whether a waiter, if it were in another queue, would not be the first there."""
    cdef const Waiter* waiter = fair.waiters + number
    cdef const Queue* other = fair.queues + queue
    cdef const Waiter* first = fair.waiters + other.first
    cdef const Flow* flow
    cdef uint64_t key
    if other.first == 0 or waiter.queue == queue or waiter.moves >= MOVES_MAX:
        return False
    flow = fair.flows + flow_find(fair, queue, waiter_flow_key(fair, waiter))
    if flow.head and not waiter_goes_before(waiter, fair.waiters + flow.head):
        return True
    key = waiter_key(waiter, flow.start if flow.head else max(other.virtual, flow.start))   # the start of flow 0 is 0
    return first.node.key < key or first.node.key == key and first.node.serial < waiter.node.serial


cdef inline void fair_move(Fair* fair, uint32_t number, uint32_t queue, uint32_t cost) noexcept nogil:
    """Moves a waiter into another queue: to its place in the order of its key there.

    A waiter that was moved often enough goes to the front.
    """
    cdef Waiter* waiter = fair.waiters + number
    cdef uint64_t key = waiter_flow_key(fair, waiter)
    cdef Label label = fair.labels[waiter.flow]
    waiter_extract(fair, number)
    waiter.queue = queue
    waiter.cost = cost
    waiter.flow = flow_join(fair, queue, key)
    fair.labels[waiter.flow] = label
    waiter.moves = min(<uint8_t>(waiter.moves + 1), <uint8_t>MOVES_MAX)
    waiter_insert(fair, number)


cdef inline void fair_serve(Fair* fair, uint32_t number) noexcept nogil:
    """Advances the virtual time of a queue when a waiter of this queue is served.

    The caller then removes the waiter.
    """
    cdef Waiter* waiter = fair.waiters + number
    cdef Queue* queue = fair.queues + waiter.queue
    waiter.moves = SERVED
    queue.virtual = max(queue.virtual, waiter.node.key & START_MAX)
    flows_tidy(fair, waiter.queue, IDLE_LOOKS)


cdef inline void fair_remove(Fair* fair, uint32_t number) noexcept nogil:
    """Removes a waiter, whether it was served or not."""
    cdef Waiter* waiter = fair.waiters + number
    cdef Asker* asker = fair.askers + waiter.connection
    waiter_extract(fair, number)
    list_remove(waiters_by_connection(fair), &asker.first, number)
    asker.waiters -= 1
    waiter.connection = 0
    pool_put(&fair.state.waiters, &fair.waiters.of_connection, sizeof(Waiter), number)
