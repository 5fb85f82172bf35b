"""One load process. It keeps connections busy according to a Plan, and writes its results to its sheet of the Board.

Floor 5 (ARCHITECTURE.md). It has one thread and one epoll set, and runs no Python for a request. All times are of
the monotonic clock.

A closed loop (without a rate) sends `depth` requests on a connection, waits for all replies, and sends `depth` requests
again. An open loop has an intended start time for each request. The next connection with fewer than `depth` requests in
flight sends the request, late if necessary. Latency counts from the intended start.

Invariants:
- `ring` has the requests in flight of a connection, with the oldest first; replies arrive in this order, except those
  to Takes that wait;
- `in_flight` is the sum of all links' `count`;
- `Board.held` has everything that was granted and not released yet: the server must count at least as much.
"""

import importlib
import os
import struct

from cpython.bytes cimport PyBytes_AS_STRING
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.errno cimport EAGAIN, EINPROGRESS, EINTR, ETIMEDOUT, errno
from libc.math cimport ceil
from libc.string cimport memcpy, memset
from posix.unistd cimport close as c_close

from counterd.bench._board cimport (
    CONNECTING, ERROR_REPLY, FILLING, GIVE_BACK, GONE, LATENCY, NETWORK, NOT_GIVEN_BACK, OVER, QUEUE, READY, RUNNING,
    SERVICE, UNANSWERED, WRONG_ANSWER, error_kind, histogram_record, text_write,
)
from counterd.bench._codec cimport ACQUIRE, CANCEL, CONTROL, COUNT, RELEASE
from counterd.bench._ledger cimport Ledger
from counterd.bench._link cimport (
    ENDER, FILLER, LOAD, MARKER, OPENER, TO_ACQUIRE, WATCH, Link, Purpose, Request, request_pull,
)
from counterd.bench._memory cimport Heap, Hold, Permit, allocate, heap_pop, ring_grow
from counterd.bench._random cimport random_exponential
from counterd.bench._task cimport Task
from counterd.bench._tls cimport Layer
from counterd.bench._words cimport (
    ABSENT, CANCELLED, DELAYED, FAILED, GRANTED, REPLY_MAX, RESERVED, TRAILER_MAX, Reply, Template,
)
from counterd.bench._system cimport (
    PR_SET_TIMERSLACK, c_connect, prctl, process_cpu_ns, reset_at_close, sleep_ns, sockaddr, stream_socket,
)
from counterd.net.clock cimport monotonic_ns
from counterd.net.kernel cimport (
    EPOLL_CLOEXEC, EPOLL_CTL_ADD, EPOLL_CTL_MOD, EPOLLIN, EPOLLOUT, MSG_DONTWAIT, MSG_NOSIGNAL, c_recv, c_send,
    epoll_create1, epoll_ctl, epoll_event, epoll_wait, os_error, socket_error,
)

from counterd.bench._jobs import Jobs
from counterd.bench._permits import Permits
from counterd.bench._work import Work

WORKS = {"permits": Permits, "jobs": Jobs, "messages": Work}

cdef enum:
    EVENTS = 256
    INBOX = 262144              # more than a Layer receives
    OUTBOX = 1048576            # many times the longest request
    FILL_DEPTH = 64             # requests at once, to make the names exist
    WATCHED_MAX = 1024          # and to see whether permits are back
    SPIN_NS = 50000             # what a sleep may overshoot: this much before something is due the process stays awake
    POLL_NS = 100000000         # how often it looks for orders at least
    RETRY_NS = 100000000        # before a connection that broke is opened again
    LATE_NS = 1000000           # after its intended start a request counts as late

SETTLE_S = 10.0     # that connecting may take, and each answer before the load begins
GRACE_S = 5.0       # that the last answers may take, and that a permit may take to be given back at the end
GIVE_BACK_S = 30.0  # that it may take before: longer is an error


cdef class Load:
    """plan: a Plan.

    index: the index of this load process. address: the server's address in the kernel's form.
    context: the ssl.SSLContext of the connections, or None.
    """

    def __cinit__(self, plan, Board board not None, int index, bytes address not None, context=None):
        cdef uint32_t i
        cdef size_t reply_max = REPLY_MAX + <size_t>plan.buffer_size
        dialect = plan.dialect
        self.codec = importlib.import_module(dialect.codec).LoadCodec(plan, index)
        self.task = Task(plan, index, self.codec.numbers)
        self.ledger = Ledger(plan, board, index, self.codec)
        self.work = WORKS[dialect.kind](plan, index, self.task, self.ledger)
        self.index, self.connections, self.depth = index, self.task.connections, plan.depth
        self.keep_alive, self.listens = plan.keep_alive, plan.listens()
        self.opening, self.greeting, self.fills = (
            tuple(map(self.codec.numbers.get, ops)) for ops in (dialect.opening, dialect.listening, plan.fills())
        )
        self.names = plan.names
        self.fill_next = index if plan.prefill and self.fills else self.names
        self.board = board
        self.sheet = board.sheets + index
        self.orders = board.orders
        self.address = address
        self.listening = address[:2] + struct.pack(">H", plan.control_port) + address[4:] if self.listens else address
        self.family = struct.unpack_from("=H", address)[0]
        self.poll = -1
        self.set_times(plan, index)
        self.grants = board.grants + self.task.first
        self.wanted = self.connections + (1 if self.kill_interval_ns or self.listens else 0)
        self.context, self.host, self.layers = context, plan.host, [None] * (self.connections + 1)
        self.links = <Link*>allocate(self.connections + 1, sizeof(Link))
        for i in range(self.connections + 1):
            self.links[i].fd, self.links[i].index, self.links[i].key = -1, i, self.task.key_of(i)
            self.links[i].tail = <uint8_t*>allocate(reply_max, 1)
        self.dirty = <uint32_t*>allocate(self.connections + 1, sizeof(uint32_t))
        self.queue = <uint32_t*>allocate(self.connections + 1, sizeof(uint32_t))
        self.inbox = <uint8_t*>allocate(reply_max + INBOX, 1)
        self.outbox = <uint8_t*>allocate(OUTBOX + TRAILER_MAX, 1)

    def __dealloc__(self):
        cdef uint32_t i
        if self.links != NULL:
            for i in range(self.connections + 1):
                if self.links[i].fd >= 0:
                    c_close(self.links[i].fd)
                PyMem_Free(self.links[i].ring)
                PyMem_Free(self.links[i].pending)
                PyMem_Free(self.links[i].tail)
                PyMem_Free(self.links[i].held)
        PyMem_Free(self.links)
        PyMem_Free(self.dirty)
        PyMem_Free(self.queue)
        PyMem_Free(self.inbox)
        PyMem_Free(self.outbox)
        PyMem_Free(self.killed)
        if self.poll >= 0:
            c_close(self.poll)

    cdef int set_times(self, plan, int index) except -1:
        self.fans, self.queues, self.delay_ns = plan.fans(), plan.waits(), plan.delay * 1000000000
        self.settle_max_ns, self.grace_max_ns = <int64_t>(SETTLE_S * 1e9), <int64_t>(GRACE_S * 1e9) + self.delay_ns
        self.give_back_max_ns = <int64_t>(GIVE_BACK_S * 1e9)
        self.limited = plan.requests is not None
        if self.limited:
            self.left = plan.requests // plan.processes + (index < plan.requests % plan.processes)
        self.open_loop = plan.rate is not None
        if self.open_loop:
            # With a hold each arrival is an acquire, and its release is the other half of the rate.
            self.interval_ns = 1e9 * plan.processes / plan.rate * (1 if plan.hold is None else 2)
            self.poisson = plan.arrivals == "poisson"
            self.arrival_ns = self.interval_ns * index / plan.processes  # the processes take turns
        if plan.churn:
            self.kill_interval_ns = 1e9 * plan.processes / plan.churn
            self.kill_ns = self.kill_interval_ns * (index + 1) / plan.processes
        return 0

    # ---- the run ----

    def run(self):
        """Runs the whole load in this process. The end of the process closes the connections."""
        cdef uint32_t i
        cdef int64_t now = monotonic_ns()
        prctl(PR_SET_TIMERSLACK, 1)
        self.grace_ns = now + self.settle_max_ns
        self.poll = epoll_create1(EPOLL_CLOEXEC)
        if self.poll < 0:
            raise os_error(errno)
        for i in range(self.wanted):
            self.open(self.links + i, now)
        while self.stage != GONE:
            now = self.wait(monotonic_ns())
            self.advance(now)
            if self.stage == RUNNING:
                self.arrive(now)
                self.release_due(now)
                self.kill_due(now)
            if self.shut:
                self.reopen(now)
            self.flush(now)
            self.sheet.stage = self.stage

    cdef int advance(self, int64_t now) except -1:
        """Goes from one stage to the next when it is time."""
        cdef uint32_t i
        cdef bint is_filled
        if self.stage == CONNECTING:
            if self.sheet.connected + self.shut - self.turned_away >= self.wanted or now > self.grace_ns:
                for i in range(self.wanted):
                    self.shut -= self.links[i].turned_away
                    if SHUT < self.links[i].phase < OPEN or self.links[i].turned_away:
                        self.broken(self.links + i, ETIMEDOUT, now)
                self.stage = FILLING
                self.grace_ns = now + self.settle_max_ns
                self.feed_all(now)
        elif self.stage == FILLING:
            # What is unanswered after that time will be at the end, and is counted there.
            if self.in_flight == 0 and self.shut >= self.connections and self.links[self.connections].phase == OPEN:
                self.close(self.links + self.connections)  # there is nothing to watch
                self.shut += 1
            is_filled = self.in_flight == 0 and (self.fill_next >= self.names or self.sheet.connected == 0)
            if is_filled or now > self.grace_ns:
                self.stage = READY
        elif self.stage == READY:
            if self.orders.start_ns and now >= self.orders.start_ns:
                self.stage = RUNNING
                self.arrival_ns += self.orders.start_ns
                self.kill_ns += self.orders.start_ns
                self.feed_all(now)
        elif self.stage == RUNNING:
            self.run_out(now)
        elif self.orders.leave:
            self.stage = GONE
        if self.orders.stop and self.stage < RUNNING:
            self.stage = OVER
        return 0

    cdef int run_out(self, int64_t now) except -1:
        """Runs the measured time, and waits for the last replies."""
        cdef uint32_t awaited
        if self.cpu_start_ns == 0 and now >= self.orders.measure_ns:
            self.cpu_start_ns = process_cpu_ns()
        if not self.ended:
            if self.orders.stop:
                self.arrive(now)
            if not (self.orders.stop or self.is_spent() or now >= self.orders.end_ns + self.grace_max_ns) and (
                now < self.orders.end_ns or self.has_backlog()
            ):
                return 0
            self.ended, self.grace_ns = True, now + self.grace_max_ns
            self.ended_ns = min(now, self.orders.end_ns)
            if self.queues:
                self.cancel_all(now)
        awaited = self.work.awaited(self.links, self.in_flight)
        if (awaited or self.killed_count) and now < self.grace_ns:
            return 0
        self.sheet.errors[<int>NOT_GIVEN_BACK] += self.killed_count
        self.sheet.errors[<int>UNANSWERED] += awaited - self.links[self.connections].count
        if self.open_loop and not self.is_spent():
            self.arrival_ns = max(self.arrival_ns, self.orders.measure_ns)
            self.sheet.unsent = max(0, <int64_t>ceil((self.ended_ns - self.arrival_ns) / self.interval_ns - 0.001))
        self.sheet.cpu_ns = process_cpu_ns() - self.cpu_start_ns
        self.stage = OVER
        return 0

    cdef int cancel_all(self, int64_t now) except -1:
        """Cancels waiting acquires, which would wait for permits that nobody releases any more."""
        cdef Request* request
        cdef uint32_t i, k
        for i in range(self.connections):
            for k in range(self.links[i].count):
                request = self.links[i].ring + ((self.links[i].head + k) & self.links[i].mask)
                if request.op == ACQUIRE and request.purpose == LOAD:
                    self.request(self.links + i, CANCEL, Permit(request.number, 0), now, ENDER)
        return 0

    cdef bint has_backlog(self) noexcept:
        """Returns whether an open loop has not sent all requests whose intended start was before the end."""
        return self.open_loop and self.arrival_ns < self.orders.end_ns and self.arrival_ns < monotonic_ns()

    cdef bint is_spent(self) noexcept:
        """Returns whether the intended number of requests was sent."""
        return self.limited and self.left <= 0

    cdef int64_t next_due(self, int64_t now) noexcept:
        """Returns when work is due that no event of a connection announces."""
        cdef int64_t due = now + POLL_NS
        if self.stage == READY:
            return min(due, self.orders.start_ns) if self.orders.start_ns else now + 1000000
        if self.stage != RUNNING:
            return now + 1000000
        if not self.ended:
            due = min(due, self.orders.end_ns)
            if self.queue_count and self.open_loop:
                due = min(due, <int64_t>self.arrival_ns)
            if self.work.heap.size:
                due = min(due, self.work.heap.cells[0].due_ns)
            if self.kill_interval_ns:
                due = min(due, <int64_t>self.kill_ns)
        return due

    cdef int64_t wait(self, int64_t now) except -1:
        """Sleeps until a connection has an event or a time has come. Handles the events. Returns the time."""
        cdef epoll_event[EVENTS] events
        cdef int64_t left = self.next_due(now) - now
        cdef int timeout = 0
        cdef int count, i
        if left >= 2000000:
            timeout = <int>(left // 1000000) - 1
        elif left > SPIN_NS:
            sleep_ns(self.poll, left - SPIN_NS)
        count = epoll_wait(self.poll, events, EVENTS, timeout)
        for i in range(count):
            self.hear(self.links + events[i].data.u64, events[i].events)
        return monotonic_ns()

    cdef int hear(self, Link* link, uint32_t events) except -1:
        cdef int error
        if link.phase == OPENING:
            error = socket_error(link.fd)
            return self.broken(link, error, monotonic_ns()) if error else self.opened(link, monotonic_ns())
        if link.phase == SECURING:
            return self.secure(link)
        if events & EPOLLOUT:
            self.write(link, monotonic_ns())
        return self.read(link) if link.phase == OPEN else 0

    # ---- connections ----

    cdef int open(self, Link* link, int64_t now) except -1:
        cdef bytes address = self.listening if link.index == self.connections else self.address
        link.opened_ns = now
        self.turned_away -= link.turned_away
        link.turned_away = False
        link.fd = stream_socket(self.family)
        if link.fd < 0:
            return self.broken(link, errno, now)
        link.phase = OPENING
        if c_connect(link.fd, <const sockaddr*>PyBytes_AS_STRING(address), len(address)) == 0:
            return self.opened(link, now)
        if errno == EAGAIN:  # the queue of a Unix socket is full: TCP would wait
            link.turned_away = True
            self.turned_away += 1
            self.shut += 1
            link.opened_ns -= RETRY_NS
            return self.close(link)
        if errno != EINPROGRESS:
            return self.broken(link, errno, now)
        return self.listen(link, EPOLLIN | EPOLLOUT)

    cdef int listen(self, Link* link, uint32_t events) except -1:
        """Makes the epoll set report these events."""
        cdef epoll_event event
        memset(&event, 0, sizeof(event))
        event.events = events
        event.data.u64 = link.index
        if epoll_ctl(self.poll, EPOLL_CTL_MOD if link.events else EPOLL_CTL_ADD, link.fd, &event) < 0:
            raise os_error(errno)
        link.events = events
        return 0

    cdef int opened(self, Link* link, int64_t now) except -1:
        self.listen(link, EPOLLIN)
        if self.context is not None and link.phase == OPENING:
            link.phase = SECURING
            self.layers[link.index] = Layer(self.context, self.host)
            return self.secure(link)
        link.phase = OPEN
        self.sheet.connected += 1
        if self.kill_interval_ns and link.index < self.connections:
            self.markers += 1
            link.marker = self.markers
            self.request(link, ACQUIRE, Permit(0, link.marker), now, MARKER)
        ops = self.opening if link.index < self.connections else self.greeting[: max(len(self.greeting), 1) - 1]
        self.request_all(link, ops, self.index, OPENER, now)
        self.feed(link, now)
        return self.write(link, now)

    cdef int secure(self, Link* link) except -1:
        """Does the next step of the TLS handshake, whose bytes always have room, because they are sent first."""
        cdef Layer layer = self.layers[link.index]
        cdef bytes reply
        try:
            reply = layer.shake_hands(link.fd)
        except OSError as error:
            return self.insecure(link, error)
        sent = not reply or self.send(link, <const uint8_t*>PyBytes_AS_STRING(reply), len(reply))
        return self.opened(link, monotonic_ns()) if sent and layer.agreed else 0

    cdef int insecure(self, Link* link, error) except -1:
        text_write(self.sheet.evidence, f"TLS: {error}")
        return self.fail(link, NETWORK)

    cdef int broken(self, Link* link, int error, int64_t now) except -1:
        """Called when a socket has failed, or when the server has closed it (error 0)."""
        if error_kind(error) == NETWORK:  # which has many causes
            text_write(self.sheet.evidence, f"network error: {os.strerror(error)}")
        return self.fail(link, error_kind(error))

    cdef int fail(self, Link* link, ErrorKind kind) except -1:
        """Counts an error and its consequences, and closes the connection, which is opened again later."""
        self.sheet.errors[<int>kind] += 1
        self.sheet.errors[<int>UNANSWERED] += link.count
        self.close(link)
        self.shut += 1
        return 0

    cdef int close(self, Link* link) except -1:
        """Closes the connection. The server has to take back everything that it holds."""
        self.work.let_go(link)
        link.generation += 1
        if link.fd >= 0:
            c_close(link.fd)
        if link.phase == OPEN:
            self.sheet.connected -= 1
        self.in_flight -= link.count
        link.fd = -1
        link.phase = SHUT
        link.events = 0
        link.count = link.unwritten = link.slots = link.next = 0
        link.pending_size = link.tail_size = 0
        link.turn = TO_ACQUIRE
        link.marked = link.raised = False
        return 0

    cdef int reopen(self, int64_t now) except -1:
        """Opens connections again that broke some time ago, but not before the load begins."""
        cdef uint32_t i
        if self.ended or self.stage == FILLING or self.stage == READY:
            return 0
        for i in range(self.wanted):
            if self.links[i].phase == SHUT and now - self.links[i].opened_ns >= RETRY_NS:
                self.shut -= 1
                self.open(self.links + i, now)
        return 0

    # ---- what to ask ----

    cdef int feed_all(self, int64_t now) except -1:
        cdef uint32_t i
        for i in range(self.connections):
            self.feed(self.links + i, now)
        return 0

    cdef int feed(self, Link* link, int64_t now) except -1:
        """Sends the requests that a connection may send now."""
        cdef uint32_t _i
        if link.phase != OPEN:
            return 0
        if link.index == self.connections:
            return self.watch(link, now)
        if self.stage == FILLING:
            return self.fill(link, now)
        if self.stage == RUNNING and self.work.waits(link):
            return self.turn(link, now) if link.count == 0 else 0
        if self.stage != RUNNING or self.ended:
            return 0
        if self.open_loop:
            if not link.waiting and link.count < self.depth:
                link.waiting = True
                self.queue[(self.queue_head + self.queue_count) % (self.connections + 1)] = link.index
                self.queue_count += 1
        else:
            for _i in range(self.work.room(link)):
                if not self.ask(link, now if self.keep_alive else max(link.opened_ns, self.orders.start_ns)):
                    break
        return 0

    cdef int fill(self, Link* link, int64_t now) except -1:
        """Creates the next names on the server."""
        cdef uint32_t _i
        if link.count:
            return 0
        for _i in range(FILL_DEPTH):
            if self.fill_next >= self.names:
                break
            self.request_all(link, self.fills, <uint32_t>self.fill_next, FILLER, now)
            self.fill_next += self.task.stride
            self.sheet.filled += 1
        return 0

    cdef int arrive(self, int64_t now) except -1:
        """Gives the requests that an open loop should start by now to connections that can send one."""
        cdef Link* link
        while self.open_loop and self.queue_count and self.arrival_ns <= now and not self.ended:
            link = self.links + self.queue[self.queue_head]
            self.queue_head = (self.queue_head + 1) % (self.connections + 1)
            self.queue_count -= 1
            link.waiting = False
            if link.phase != OPEN:
                continue
            if not self.ask(link, <int64_t>self.arrival_ns):
                break
            if now - self.arrival_ns > LATE_NS and self.arrival_ns >= self.orders.measure_ns:
                self.sheet.late += 1
            self.arrival_ns += self.interval_ns * (random_exponential(&self.task.random) if self.poisson else 1)
            self.feed(link, now)
        return 0

    cdef bint ask(self, Link* link, int64_t intended_ns) except -1:
        """Sends the next request of the load on a connection. Returns False if no request is left."""
        if intended_ns >= self.orders.end_ns or self.is_spent():
            return False
        if self.limited and intended_ns >= self.orders.measure_ns:
            self.left -= 1
        self.turn(link, intended_ns)
        return True

    cdef int turn(self, Link* link, int64_t intended_ns) except -1:
        cdef uint8_t op
        cdef Permit permit
        self.work.choose(link, intended_ns, &op, &permit)
        return self.request(link, op, permit, intended_ns, LOAD)

    cdef int request_all(self, Link* link, tuple ops, uint32_t name, Purpose purpose, int64_t now) except -1:
        cdef uint8_t op
        for op in ops:
            self.request(link, op, Permit(0, name), now, purpose)
        return 0

    cdef int request(self, Link* link, uint8_t op, Permit permit, int64_t intended_ns, Purpose purpose) except -1:
        cdef Request* request
        if link.count == 0 or link.count > link.mask:
            ring_grow(<void**>&link.ring, &link.mask, &link.head, link.count, sizeof(Request))
        request = link.ring + ((link.head + link.count) & link.mask)
        request.intended_ns, request.permit = intended_ns, permit
        request.op, request.purpose, request.number = op, purpose, link.next
        request.key, request.answered = link.key, 0
        link.next += 1
        link.count += 1
        link.unwritten += 1
        self.in_flight += 1
        if not link.dirty:
            link.dirty = True
            self.dirty[self.dirty_count] = link.index
            self.dirty_count += 1
        return 0

    cdef int release_due(self, int64_t now) except -1:
        """Releases the permits that have been held for their intended time."""
        cdef Hold ended
        cdef Link* link
        cdef Heap* heap = &self.work.heap
        while heap.size and heap.cells[0].due_ns <= now and not self.ended:
            ended = heap.cells[0]
            if ended.due_ns >= self.orders.end_ns or self.is_spent():
                return 0
            heap_pop(heap)
            link = self.links + ended.link
            if ended.generation == link.generation:
                self.left -= self.limited and ended.due_ns >= self.orders.measure_ns
                self.ledger.hold(ended.permit.name, -1)
                self.request(link, RELEASE, ended.permit, ended.due_ns, LOAD)
        return 0

    # ---- connections that are killed while they hold something ----

    cdef int kill_due(self, int64_t now) except -1:
        cdef Link* link
        cdef uint32_t _try
        while self.kill_interval_ns and self.kill_ns <= now and not self.ended:
            self.kill_ns += self.kill_interval_ns
            for _try in range(self.connections):
                link = self.links + self.kill_next
                self.kill_next = (self.kill_next + 1) % self.connections
                if link.phase == OPEN and link.marked:
                    self.kill(link, now)
                    break
        return self.watch(self.links + self.connections, now)

    cdef int kill(self, Link* link, int64_t now) except -1:
        """Closes a connection like a process that dies: without a message, and without reading replies."""
        cdef Request lost
        cdef uint32_t i
        for i in range(link.count):  # somebody else has to ask that again
            lost = link.ring[(link.head + i) & link.mask]
            self.left += lost.purpose == LOAD and lost.intended_ns >= self.orders.measure_ns
        reset_at_close(link.fd)
        self.close(link)
        if self.killed_count == 0 or self.killed_count > self.killed_mask:
            ring_grow(<void**>&self.killed, &self.killed_mask, &self.killed_head, self.killed_count, sizeof(Killed))
        self.killed[(self.killed_head + self.killed_count) & self.killed_mask] = Killed(monotonic_ns(), link.marker)
        self.killed_count += 1
        return self.open(link, now)

    cdef int watch(self, Link* link, int64_t now) except -1:
        """Checks all killed connections whose permits are not known to be given back, at the same time."""
        cdef uint32_t i, marker
        if self.kill_interval_ns and link.phase == OPEN and link.count == 0:
            for i in range(min(self.killed_count, WATCHED_MAX)):
                marker = self.killed[(self.killed_head + i) & self.killed_mask].marker
                self.request(link, COUNT, Permit(0, marker), now, WATCH)
        return 0

    cdef int watched(self, int outcome, int64_t value, int64_t now) except -1:
        cdef Killed killed = self.killed[self.killed_head]
        self.killed_head = (self.killed_head + 1) & self.killed_mask
        self.killed_count -= 1
        if outcome == ABSENT or value == 0:
            histogram_record(self.sheet.counts[<int>GIVE_BACK], now - killed.killed_ns)
        elif now - killed.killed_ns > self.give_back_max_ns:
            self.sheet.errors[<int>NOT_GIVEN_BACK] += 1
        else:
            self.killed[(self.killed_head + self.killed_count) & self.killed_mask] = killed
            self.killed_count += 1
        return 0

    # ---- bytes ----

    cdef int flush(self, int64_t now) except -1:
        cdef uint32_t i
        for i in range(self.dirty_count):
            self.links[self.dirty[i]].dirty = False
            self.write(self.links + self.dirty[i], now)
        self.dirty_count = 0
        return 0

    cdef int write(self, Link* link, int64_t now) except -1:
        """Sends as much of the waiting output as the kernel accepts."""
        cdef Request* request
        cdef const Template* template
        cdef size_t size
        if link.phase != OPEN:
            return 0
        if link.pending_size and not self.send(link, link.pending + link.pending_start, link.pending_size):
            return 0
        self.codec.begin(now)
        while link.unwritten:
            size = 0
            while link.unwritten:
                request = link.ring + ((link.head + link.count - link.unwritten) & link.mask)
                template = self.codec.template_of(request)
                if size + template.size > OUTBOX:
                    break
                request.sent_ns = now
                size += self.codec.write(template, request, self.outbox + size)
                link.unwritten -= 1
            size += self.codec.end(request, self.outbox + size)
            if not self.say(link, self.outbox, size):
                return 0
        return 0

    cdef bint say(self, Link* link, const uint8_t* data, size_t size) except -1:
        """Sends bytes as send() does, through TLS if the connection uses it."""
        cdef bytes sealed
        if self.context is None:
            return self.send(link, data, size)
        sealed = (<Layer>self.layers[link.index]).seal(data, size)
        return self.send(link, <const uint8_t*>PyBytes_AS_STRING(sealed), len(sealed))

    cdef bint send(self, Link* link, const uint8_t* data, size_t size) except -1:
        """Sends bytes. Returns False if some have to wait, or if the connection is broken."""
        cdef ssize_t sent = c_send(link.fd, data, size, MSG_DONTWAIT | MSG_NOSIGNAL)
        if sent < 0:
            if errno != EAGAIN and errno != EINTR:
                self.broken(link, errno, monotonic_ns())
                return False
            sent = 0
        if <size_t>sent == size:
            if link.pending_size:
                link.pending_size = 0
                self.listen(link, EPOLLIN)
            return True
        if link.pending_size:
            link.pending_start += sent
        else:
            PyMem_Free(link.pending)
            link.pending = <uint8_t*>PyMem_Malloc(size - sent)
            if link.pending == NULL:
                raise MemoryError(f"no room for {size - sent} bytes that have to be sent")
            memcpy(link.pending, data + sent, size - sent)
            link.pending_start = 0
            self.listen(link, EPOLLIN | EPOLLOUT)
        link.pending_size = size - sent
        return False

    cdef ssize_t receive(self, Link* link) except -2:
        """Reads bytes into the inbox, behind the unused ones. Returns how many there are, 0 if none have arrived."""
        cdef ssize_t size
        memcpy(self.inbox, link.tail, link.tail_size)
        try:
            if self.context is None:
                size = c_recv(link.fd, self.inbox + link.tail_size, INBOX, MSG_DONTWAIT)
            else:
                size = (<Layer>self.layers[link.index]).receive(link.fd, self.inbox + link.tail_size)
        except OSError as error:
            self.insecure(link, error)
            return 0
        if size > 0:
            size += link.tail_size
            link.tail_size = 0
            return size
        if size == 0 or (errno != EAGAIN and errno != EINTR):
            self.broken(link, errno if size else 0, monotonic_ns())
        return 0

    cdef int read(self, Link* link) except -1:
        """Reads what has arrived, reply by reply."""
        cdef Py_ssize_t taken = 1
        cdef const uint8_t* data = self.inbox
        cdef size_t left = self.receive(link)
        cdef int64_t now = monotonic_ns()
        cdef Request request
        cdef Reply reply
        if left == 0:
            return 0
        reply.goes_on = False
        while left and (taken or reply.goes_on):
            if link.count == link.unwritten:  # nothing was asked
                taken = self.hear_control(link, data, left, now)
                if taken < 0:
                    return self.wrong(link, data, left, NULL)
                data += taken
                left -= taken
                continue
            if self.queues:
                request_pull(link, self.codec.number_of(data, left))
            request = link.ring[link.head & link.mask]
            reply.token = request.permit.token
            reply.goes_on = reply.is_part = False
            taken = self.codec.read(&request, data, left, &reply)
            if taken < 0:
                return self.wrong(link, data, left, &request)
            if taken or reply.goes_on:
                data += taken
                left -= taken
                if reply.outcome == FAILED:
                    self.show("an error", data - taken, taken, &request)
                    if request.purpose == OPENER:
                        return self.fail(link, ERROR_REPLY)  # all that follows would mean something else
                    self.sheet.errors[<int>ERROR_REPLY] += 1
                if reply.is_part:
                    link.ring[link.head & link.mask].answered += 1
                else:
                    self.settle(link, &request, &reply, now)
        if self.ended and self.limited and not self.orders.stop:
            self.grace_ns = now + self.grace_max_ns  # all of a number of requests are waited for while answers come
        if left:
            memcpy(link.tail, data, left)
            link.tail_size = left
        if not self.keep_alive and link.count == 0 and self.stage == RUNNING and not self.ended:
            self.close(link)
            return self.open(link, now)
        self.feed(link, now)
        return self.write(link, now)

    cdef int settle(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -1:
        """Called when the oldest request of a connection has its reply."""
        link.head += 1
        link.count -= 1
        self.in_flight -= 1
        return self.answered(link, request, reply, now)

    cdef Py_ssize_t hear_control(self, Link* link, const uint8_t* data, size_t left, int64_t now) except -2:
        """Handles a control message, in the same way as a reply. Messages for other connections are ignored."""
        cdef int64_t number = -1
        cdef int64_t index
        cdef Py_ssize_t taken
        cdef Request request
        cdef Reply reply
        if not self.listens or link.index < self.connections:
            return -1
        taken = self.codec.hear(data, left, &number)
        index = self.task.link_of(number)
        if taken <= 0 or index < 0:
            return taken
        link = self.links + index
        while link.count > link.unwritten:
            request = link.ring[link.head & link.mask]
            if request.op != CONTROL or request.permit.name > number:
                break  # no more will be said of the messages before
            reply.outcome = DELAYED if request.permit.name == number else FAILED  # as what it would be told was lost
            self.sheet.errors[<int>UNANSWERED] += reply.outcome == FAILED
            self.settle(link, &request, &reply, now)
            self.feed(link, now)
        return taken

    cdef int answered(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -1:
        cdef int64_t other
        if request.purpose == WATCH:
            return self.watched(reply.outcome, reply.value, now)
        if request.purpose != LOAD:
            if request.purpose == MARKER:
                link.marked = reply.outcome == GRANTED
            elif request.purpose == OPENER and link.index == self.connections and link.count == 0:
                self.request_all(link, self.greeting[link.next :], self.index, OPENER, now)
            if self.stage < RUNNING:
                self.grace_ns = now + self.settle_max_ns
            return 0
        other = self.work.answered(link, request, reply, now)
        if other >= 0:
            self.feed(self.links + other, now)
        return self.measured(link, request, reply, now) if reply.outcome != FAILED else 0

    cdef int measured(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -1:
        """Counts a reply in the measured time. A fan measures how long jobs that are due wait for workers."""
        cdef bint delivered = self.fans and reply.outcome == RESERVED
        cdef int64_t intended_ns = self.work.intended_ns(request, reply)
        if intended_ns < self.orders.measure_ns or reply.outcome == CANCELLED:
            return 0
        self.sheet.outcomes[<int>reply.outcome] += 1
        self.sheet.last_ns = now
        if (reply.outcome == GRANTED or reply.outcome == RESERVED) and link.index < self.connections:
            self.grants[link.index] += 1
        if self.fans and not delivered:
            return 0
        self.sheet.requests += 1
        histogram_record(self.sheet.counts[<int>LATENCY], now - intended_ns - (self.delay_ns if delivered else 0))
        if self.queues and request.op == ACQUIRE:
            histogram_record(self.sheet.counts[<int>QUEUE], now - request.sent_ns)
        elif self.queues or self.open_loop and not self.fans:
            histogram_record(self.sheet.counts[<int>SERVICE], now - request.sent_ns)
        return 0

    cdef int wrong(self, Link* link, const uint8_t* data, size_t size, const Request* request) except -1:
        """Called for a wrong reply. Nothing that follows on this connection can be understood."""
        self.show("an impossible reply", data, size, request)
        return self.fail(link, WRONG_ANSWER)

    cdef int show(self, str what, const uint8_t* data, size_t size, const Request* request) except -1:
        names = {number: name for name, number in self.codec.numbers.items()}
        asked = names[request.op] if request != NULL else "a reply without a request"
        text_write(self.sheet.evidence, f"{what} to {asked}: {bytes(data[: min(size, 60)])!r}")
        return 0
