"""What a load process asks for on a connection, and what it makes of the answers: the contract, and a work that knows
nothing of what it has asked, such as one of messages.

A side.
"""

from cpython.mem cimport PyMem_Free
from libc.stdint cimport int64_t, uint32_t

from counterd.bench._ledger cimport Ledger
from counterd.bench._link cimport Link, Request
from counterd.bench._memory cimport Permit
from counterd.bench._task cimport Task
from counterd.bench._words cimport CONTROL, Op, Reply


cdef class Work:
    """plan: a Plan; index: which of its processes this is."""

    def __cinit__(self, plan, int index, Task task not None, Ledger ledger not None):
        self.task, self.ledger = task, ledger

    def __dealloc__(self):
        PyMem_Free(self.heap.cells)

    cdef int choose(self, Link* link, int64_t intended_ns, Op* op, Permit* permit) except -1:
        """The next request of the load on that connection."""
        op[0] = self.task.next_op()
        permit.token = 0
        permit.name = self.task.next_told(link) if op[0] == CONTROL else self.task.next_name()
        return 0

    cdef uint32_t room(self, const Link* link) noexcept:
        """How many requests a closed loop asks on that connection now."""
        return self.task.depth if link.count == 0 else 0

    cdef bint waits(self, const Link* link) noexcept:
        """Whether the connection always has one request under way, which waits for what others do."""
        return False

    cdef int64_t answered(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -2:
        """A request, which is no longer under way. Returns the index of another connection that may ask because of
        that, or -1."""
        return -1

    cdef int64_t intended_ns(self, const Request* request, const Reply* reply) noexcept:
        """From when the latency of that answer counts."""
        return request.intended_ns

    cdef uint32_t awaited(self, const Link* links, uint32_t in_flight) noexcept:
        """Answers that are to come once nothing more is asked. in_flight: requests that are under way."""
        return in_flight

    cdef int let_go(self, Link* link) except -1:
        """The connection is closed: all that it holds, before the server can know."""
        return 0
