"""Lists of tubes, gathered in slices: list-tubes and list-tubes-watched.

Floor 2. A reply begins with its length, so all of it is gathered before it is sent. Between two slices tubes come and
go: the one that is next is kept by the list, and what is there throughout is listed once.
"""

from libc.stdint cimport int64_t, uint32_t

from counterd.engine.table cimport name_bytes
from counterd.protocols.beanstalk._store cimport BeanstalkStore
from counterd.protocols.beanstalk._tubes cimport Tubes, tube_at, tube_settle

cdef enum:
    TUBE_STEPS = 8          # a name becomes an object: some 0.3 us


cdef inline void tube_keep(Tubes* tubes, uint32_t number) noexcept:
    """Has a tube stay until it is let go; 0: none."""
    if number:
        tube_at(tubes, number).walks += 1


cdef inline void tube_let_go(Tubes* tubes, uint32_t number) noexcept:
    if number:
        tube_at(tubes, number).walks -= 1
        tube_settle(tubes, number)


cdef class TubeList:
    """The tubes that there are, the oldest first; or those that a connection watches, which does nothing meanwhile.

    connection: the engine's number, 0 for all tubes. A call of the store is under way here, and in go_on().
    """

    def __cinit__(self, BeanstalkStore store not None, uint32_t connection):
        self.store = store
        self.pieces = [b"---\n"]
        self.size = 4
        if connection:
            self.watch = store.queues.workers.records[connection].watch_first
        else:
            self.tube = store.queues.tubes.state.first
            tube_keep(&store.queues.tubes, self.tube)

    def __dealloc__(self):
        if self.store is None or self.tube == 0:
            return
        if self.store.entered:
            tube_let_go(&self.store.queues.tubes, self.tube)
            return
        self.store.begin_call(self.store.now_ns)
        tube_let_go(&self.store.queues.tubes, self.tube)
        self.store.end_call()

    cdef bint go_on(self, int64_t budget_floor) except -1:
        """Gathers more; True once it has all."""
        cdef Tubes* tubes = &self.store.queues.tubes
        cdef uint32_t number
        while self.tube or self.watch:
            if self.store.budget <= budget_floor:
                return False
            self.store.budget -= TUBE_STEPS
            if self.watch:
                number = self.store.queues.workers.watches[self.watch].tube
                self.watch = self.store.queues.workers.watches[self.watch].next
            else:
                number = self.tube
            name = b"- %b\n" % name_bytes(&tubes.table, &tube_at(tubes, number).record)
            self.pieces.append(name)
            self.size += len(name)
            if self.tube:
                self.tube = tube_at(tubes, number).next
                tube_keep(tubes, self.tube)
                tube_let_go(tubes, number)
        return True

    cdef bytes reply(self):
        """The whole reply."""
        return b"OK %d\r\n%b\r\n" % (self.size, b"".join(self.pieces))
