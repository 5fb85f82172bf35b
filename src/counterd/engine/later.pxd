# Questions that are answered later, each with a ticket and a deadline.

from libc.stdint cimport int64_t, uint64_t


cdef class Question:
    cdef uint64_t ticket
    cdef int64_t deadline_ns
    cdef Py_ssize_t place           # in the heap
    cdef object context


cdef class Later:
    cdef object settle              # (context, outcome): the outcome came in time
    cdef object give_up             # (context): the deadline has passed; returns True if a late outcome matters
    cdef object recall              # (context, outcome): the outcome came late
    cdef readonly size_t capacity
    cdef readonly uint64_t overdue  # questions whose deadline has passed, in total
    cdef uint64_t last_ticket
    cdef dict questions             # {ticket: Question}
    cdef list heap                  # of all questions, by deadline and ticket
    cdef dict abandoned             # {ticket: context} of questions that were given up, oldest first

    cpdef bint is_full(self)
    cpdef uint64_t ask(self, object context, int64_t deadline_ns, bint is_owed=*) except? 0
    cpdef bint answer(self, uint64_t ticket, object outcome) except -1
    cpdef int expire(self, int64_t now_ns) except -1
    cpdef int64_t next_deadline(self)
    cdef int place_at(self, Question question, Py_ssize_t place) except -1
    cdef int rise(self, Question question, Py_ssize_t place) except -1
    cdef int sink(self, Question question, Py_ssize_t place) except -1
    cdef int remove(self, Question question) except -1
