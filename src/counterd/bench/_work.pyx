"""The contract of a load: which requests a load process sends on a connection, and what it does with the replies. Also
a load that needs no memory of its requests, such as one of messages.

Floor 5 (ARCHITECTURE.md).
"""

from cpython.mem cimport PyMem_Free
from libc.stdint cimport int64_t, uint8_t, uint32_t

from counterd.bench._codec cimport CONTROL
from counterd.bench._ledger cimport Ledger
from counterd.bench._link cimport Link, Request
from counterd.bench._memory cimport Permit
from counterd.bench._task cimport Task
from counterd.bench._words cimport Reply


cdef class Work:
    """plan: a Plan. index: the index of this load process."""

    def __cinit__(self, plan, int index, Task task not None, Ledger ledger not None):
        self.task, self.ledger = task, ledger

    def __dealloc__(self):
        PyMem_Free(self.heap.cells)

    cdef int choose(self, Link* link, int64_t intended_ns, uint8_t* op, Permit* permit) except -1:
        """Chooses the next request on a connection."""
        op[0] = self.task.next_op()
        permit.token = 0
        permit.name = self.task.next_told(link) if op[0] == CONTROL else self.task.next_name()
        return 0

    cdef uint32_t room(self, const Link* link) noexcept:
        """Returns how many requests a closed loop sends on this connection now."""
        return self.task.depth if link.count == 0 else 0

    cdef bint waits(self, const Link* link) noexcept:
        """Returns whether the connection always has one request in flight, which waits for actions of others."""
        return False

    cdef int64_t answered(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -2:
        """Called when a request has its reply and is no longer in flight.

        Returns the index of another connection that may now send a request, or -1.
        """
        return -1

    cdef int64_t intended_ns(self, const Request* request, const Reply* reply) noexcept:
        """Returns from when the latency of a reply counts."""
        return request.intended_ns

    cdef uint32_t awaited(self, const Link* links, uint32_t in_flight) noexcept:
        """Returns how many replies will still arrive when no more requests are sent.

        in_flight: how many requests are in flight.
        """
        return in_flight

    cdef int let_go(self, Link* link) except -1:
        """Called when the connection was closed, before the server can know.

        Gives up everything that the connection held.
        """
        return 0
