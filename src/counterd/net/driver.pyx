"""Gives a store its turns: calls tick() when it is due, and sends output that is not the reply to a read. Then the
store's background tasks get a turn.

Floor 3 (ARCHITECTURE.md). A turn is a piece of work that takes well below a millisecond. The event loop serves requests
between two turns. So a request waits for at most one turn, even if many connections receive a Dump or published
messages.

This file is Cython because each connection that ends causes a wake() and a turn.
"""

from collections import deque

from libc.stdint cimport int64_t

from counterd._core cimport Session, Store

# A turn ends after the connection that exceeds it. Short, because each turn of the loop accepts only a few connections.
SLICE_NS = 250_000

cdef int64_t MS = 1000000
cdef int64_t RETRY_NS = 1000000000   # from a failed tick to the next


cdef class Driver:
    """Runs the turns of one store on one event loop. clock: returns nanoseconds on the monotonic clock."""

    def __cinit__(self, loop, Store store not None, clock):
        self.loop = loop
        self.store = store
        self.clock = clock
        self.due_ns = -1
        self.waiting = deque()
        self.tasks = []

    cpdef enqueue(self, connection):
        """Schedules connection.pull() for one of the next turns."""
        self.waiting.append(connection)
        self.wake()

    cpdef wake(self):
        """Schedules the next turn if there is work, now or later. Called after everything that may have created work.

        Background tasks get a turn soon, even if the store has no work.
        """
        self.schedule(0 if self.tasks or self.waiting else self.next_deadline())

    cdef int64_t next_deadline(self) except? -2:
        """Returns when the store has work, as Store.next_deadline() does. Not before a failed tick is tried again."""
        cdef int64_t due_ns = self.store.next_deadline()
        return due_ns if due_ns < 0 else max(due_ns, self.rest_until_ns)

    cdef int schedule(self, int64_t due_ns) except -1:
        """Sets the time of the next turn, unless an earlier one is scheduled. due_ns: 0 means now, -1 means never."""
        cdef int64_t wait_ns = 0
        if due_ns < 0 or (self.handle is not None and self.due_ns <= due_ns):
            return 0
        if self.handle is not None:
            self.handle.cancel()
        self.due_ns = due_ns
        if due_ns > 0:
            wait_ns = due_ns - <int64_t>self.clock()
        if wait_ns <= 0:
            self.handle = self.loop.call_soon(self.turn)
        else:
            # Rounded up to the loop's milliseconds, because an early timer would find nothing due, again and again.
            self.handle = self.loop.call_later((wait_ns + MS - 1) // MS / 1e3, self.turn)
        return 0

    @property
    def is_busy(self):
        """Whether connections wait for a turn."""
        return len(self.waiting) > 0

    def turn(self):
        cdef int64_t now_ns
        cdef Session session
        self.handle = None
        now_ns = self.clock()
        try:
            if self.store.next_deadline() >= 0 and now_ns >= self.rest_until_ns:
                self.store.tick(now_ns)
        except Exception as error:  # a bug in counterd; the work is still due, and would fail again at once
            self.rest_until_ns = now_ns + RETRY_NS
            self.loop.call_exception_handler({"message": "a tick of the store failed", "exception": error})
        for session in self.store.take_dirty():
            if session.owner is not None:  # else its connection is gone
                self.waiting.append(session.owner)
        while self.waiting:
            self.waiting.popleft().pull()
            if self.clock() - now_ns >= SLICE_NS:
                break
        for task in self.tasks:
            task.turn(self.clock())
        self.schedule(0 if self.waiting else self.next_deadline())
