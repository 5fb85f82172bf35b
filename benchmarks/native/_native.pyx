"""Variants of the engine that the benchmarks compare it with. Built by benchmarks/native/__init__.py.

NoPrefetchSession: the counter protocol's session without its prefetching pass.
NoLedgerSession: the same frame loop, table and arithmetic without the ledger, to measure the ledger's cost.
Direct:      calls counter_acquire and counter_release without frames.
serve_raw:   an epoll loop around the same session, to measure the least cost of a server's system calls.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memset
from posix.unistd cimport close as c_close

from counterd._core cimport Frame, Session, is_streaming
from counterd.engine.byteorder cimport prefetch
from counterd.engine.permits cimport GRANTED, Permits, permit_at
from counterd.engine.table cimport index_peek, name_tag, table_find
from counterd.net.clock cimport monotonic_ns
from counterd.net.kernel cimport (
    EPOLL_CTL_ADD, EPOLLIN, MSG_DONTWAIT, MSG_NOSIGNAL, SOCK_NONBLOCK, accept4, c_recv, c_send, epoll_create1,
    epoll_ctl, epoll_event, epoll_wait,
)
from counterd.protocols.counter._counters cimport (
    Counters, counter_acquire, counter_at, counter_consume, counter_create, counter_release, counter_restore,
)
from counterd.protocols.counter._messages cimport (
    ACQUIRE, NO_ERROR, NOT_ACQUIRED, RELEASE, RESOURCE_NOT_AVAILABLE, Answer, Request, reply_encode, request_decode,
)
from counterd.protocols.counter._session cimport CounterSession
from counterd.protocols.counter._store cimport CounterStore


cdef class NoPrefetchSession(CounterSession):
    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept:
        pass


cdef class NoLedgerSession(CounterSession):
    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept:
        cdef Permits* permits = &(<CounterStore>self.store).counters.permits
        cdef uint32_t number
        cdef int i
        for i in range(count):
            if frames[i].key_size:
                number = index_peek(&permits.table.index, frames[i].tag)
                if number:
                    prefetch(permit_at(permits, number))

    cdef int execute_frame(self, const Frame* frame) except -1:
        cdef CounterStore store = <CounterStore>self.store
        cdef Counters* counters = &store.counters
        cdef uint32_t number = table_find(&counters.permits.table, frame.tag, frame.key, frame.key_size)
        cdef Request request = request_decode(frame)
        cdef Answer answer = Answer(NO_ERROR, request.resources, NULL)
        store.requests[request.opcode] += 1
        if request.opcode == ACQUIRE:
            if number == 0:
                number = counter_create(counters, frame.tag, frame.key, frame.key_size, &store.budget)
            if counter_at(counters, number).permit.consumption > request.maximum - request.resources:
                answer.status = RESOURCE_NOT_AVAILABLE
            else:
                counter_consume(counters, counter_at(counters, number), request.resources)
        elif request.opcode == RELEASE:
            if number == 0 or counter_at(counters, number).permit.consumption < request.resources:
                answer.status = NOT_ACQUIRED
            else:
                counter_restore(counters, number, request.resources)
        if answer.status != NO_ERROR:
            store.refusals[request.opcode][answer.status] += 1
        store.out_size += reply_encode(store.out + store.out_size, frame, &answer)
        return 0


cdef class Direct:
    """Calls the engine's two operations for one connection and names of one size, whose hashes are known."""

    cdef Session session
    cdef Counters* counters     # belong to the session's store
    cdef bytes names
    cdef uint32_t[4096] tags
    cdef uint32_t name_size
    cdef uint32_t count

    def __init__(self, Session session not None, list names not None):
        cdef uint32_t i
        if not 0 < len(names) <= 4096:
            raise ValueError(f"1 to 4096 names, not {len(names)}")
        self.session = session
        self.counters = &(<CounterStore?>session.store).counters
        self.names = b"".join(names)
        self.name_size = len(names[0])
        self.count = len(names)
        with session.store:
            for i in range(self.count):
                self.tags[i] = name_tag(&self.counters.permits.table, self.name(i), self.name_size)

    cdef inline const uint8_t* name(self, uint32_t i) noexcept:
        return <const uint8_t*>PyBytes_AS_STRING(self.names) + <size_t>i * self.name_size

    def acquire(self):
        """Acquires one permit of each name. The session must hold none."""
        cdef Session session = self.session
        cdef uint32_t i, _consumption, granted = 0
        with session.store:
            for i in range(self.count):
                granted += counter_acquire(
                    self.counters, session.connection, self.tags[i], self.name(i), self.name_size, 1, 1, 0,
                    &session.store.budget, &_consumption
                ) == GRANTED
        self.check(granted)

    def release(self):
        """Releases what acquire() acquired."""
        cdef Session session = self.session
        cdef uint32_t i, granted = 0
        with session.store:
            for i in range(self.count):
                granted += counter_release(
                    self.counters, session.connection, self.tags[i], self.name(i), self.name_size, 1
                ) == GRANTED
        self.check(granted)

    cdef int check(self, uint32_t granted) except -1:
        if granted != self.count:
            raise ValueError(f"{granted} of {self.count} calls were granted")
        return 0


def count_instructions(player):
    """Calls the player. callgrind finds this function by its name and counts the instructions in it."""
    player()


def serve_raw(int listening, store):
    """Serves until it is killed. Ignores all errors, because it serves benchmarks only."""
    cdef epoll_event event
    cdef epoll_event[64] events
    cdef int poll = epoll_create1(0)
    cdef int count, i, fd
    cdef ssize_t size
    cdef Session session
    cdef bytes output
    cdef uint8_t[65536] buffer
    memset(&event, 0, sizeof(event))
    event.events = EPOLLIN
    event.data.u64 = <uint64_t>listening
    epoll_ctl(poll, EPOLL_CTL_ADD, listening, &event)
    table = [None] * 65536
    while True:
        with nogil:
            count = epoll_wait(poll, events, 64, -1)
        for i in range(count):
            fd = <int>events[i].data.u64
            if fd == listening:
                fd = accept4(listening, NULL, NULL, SOCK_NONBLOCK)
                event.data.u64 = <uint64_t>fd
                table[fd] = store.session()
                epoll_ctl(poll, EPOLL_CTL_ADD, fd, &event)
                continue
            session = <Session>table[fd]
            size = c_recv(fd, buffer, sizeof(buffer), MSG_DONTWAIT)
            if size <= 0:
                session.closed(monotonic_ns())
                table[fd] = None
                c_close(fd)
                continue
            output = session.receive(PyBytes_FromStringAndSize(<char*>buffer, size), monotonic_ns())
            c_send(fd, PyBytes_AS_STRING(output), PyBytes_GET_SIZE(output), MSG_DONTWAIT | MSG_NOSIGNAL)
            while is_streaming(session):
                output = session.take_output(monotonic_ns())
                c_send(fd, PyBytes_AS_STRING(output), PyBytes_GET_SIZE(output), MSG_DONTWAIT | MSG_NOSIGNAL)
