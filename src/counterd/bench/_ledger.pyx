"""What is surely held, and what is seen that must not be, on a Board.

A side.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.bench._board cimport Board, text_write
from counterd.bench._codec cimport Codec
from counterd.bench._memory cimport atomic_add, atomic_swap
from counterd.bench._random cimport random_mixed


cdef class Ledger:
    """plan: a Plan; index: which of its processes this is; codec: what says names."""

    def __cinit__(self, plan, Board board not None, int index, Codec codec not None):
        self.board = board
        self.sheet = board.sheets + index
        self.codec = codec
        self.held = board.held
        self.resources = plan.resources
        self.maximum = plan.maximum

    cdef int hold(self, uint32_t name, int64_t permits) except -1:
        """Permits of that name that are surely held are so many more, or fewer."""
        cdef int64_t sum
        if self.held == NULL:
            return 0
        sum = atomic_add(self.held + name, permits * self.resources)
        if sum > self.maximum and permits > 0:
            self.exceeded(f"{self.codec.name_of(name)}: {sum} were held at once, with a maximum of {self.maximum}")
        return 0

    cdef int look(self, uint32_t name, int64_t used) except -1:
        """The server says that so much of that name is in use."""
        if used > self.maximum and self.held != NULL:
            self.exceeded(f"{self.codec.name_of(name)}: {used} were in use, with a maximum of {self.maximum}")
        return 0

    cdef int tell_once(self, uint64_t token) except -1:
        """Tokens that were told lately are in a table that all processes share, each in a place of its own mostly."""
        cdef uint64_t* tokens = self.board.tokens
        if tokens != NULL and (
            atomic_swap(tokens + (random_mixed(token) & (self.board.token_places - 1)), token) == token
        ):
            self.exceeded(f"token {<int64_t>token} was told twice")
        return 0

    cdef int exceeded(self, str text) except -1:
        self.sheet.violations += 1
        if self.sheet.violations == 1:
            text_write(self.sheet.violation, text)
        return 0
