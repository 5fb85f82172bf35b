"""Counts on a Board what is certainly held, and notes what must not happen.

Floor 5 (ARCHITECTURE.md).
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.bench._board cimport Board, text_write
from counterd.bench._codec cimport Codec
from counterd.bench._memory cimport atomic_add, atomic_swap
from counterd.bench._random cimport random_mixed


cdef class Ledger:
    """plan: a Plan. index: the index of this load process. codec: names things for messages."""

    def __cinit__(self, plan, Board board not None, int index, Codec codec not None):
        self.board = board
        self.sheet = board.sheets + index
        self.codec = codec
        self.held = board.held
        self.resources = plan.resources
        self.maximum = plan.maximum

    cdef int hold(self, uint32_t name, int64_t permits) except -1:
        """Adds permits to the number that is certainly held of a name, or subtracts them."""
        cdef int64_t sum
        if self.held == NULL:
            return 0
        sum = atomic_add(self.held + name, permits * self.resources)
        if sum > self.maximum and permits > 0:
            self.exceeded(
                f"{self.codec.name_of(name)}: {sum} were held at the same time, with a maximum of {self.maximum}")
        return 0

    cdef int look(self, uint32_t name, int64_t used) except -1:
        """Checks the number of permits of a name that are in use according to the server."""
        if used > self.maximum and self.held != NULL:
            self.exceeded(f"{self.codec.name_of(name)}: {used} were in use, with a maximum of {self.maximum}")
        return 0

    cdef int tell_once(self, uint64_t token) except -1:
        """Checks that a token is granted only once.

        Recent tokens are in a table that all processes share; most tokens have a place of their own.
        """
        cdef uint64_t* tokens = self.board.tokens
        if tokens != NULL and (
            atomic_swap(tokens + (random_mixed(token) & (self.board.token_places - 1)), token) == token
        ):
            self.exceeded(f"token {<int64_t>token} was granted twice")
        return 0

    cdef int exceeded(self, str text) except -1:
        self.sheet.violations += 1
        if self.sheet.violations == 1:
            text_write(self.sheet.violation, text)
        return 0
