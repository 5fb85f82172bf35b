"""Answers that come later: what is asked of somebody else, under a ticket and with a deadline.

Floor 1. Without a clock: moments are the caller's. A request that the engine cannot decide now is a question: its
context, an object of the caller's that means nothing here, is kept until somebody answers the ticket or the deadline
passes. What follows from that (a reply that is posted, a request that is resumed) is the business of three functions
that the caller gives.

It lives in this process alone, as whoever answers does: tickets mean nothing to another one.

Invariants:
- each question is in `questions` and once in `heap`, or in neither; the heap's first has the earliest deadline;
- each question is settled or given up, and once; what was given up is recalled at most once;
- there are at most 2 * capacity questions, and at most `capacity` that were given up and may be recalled.
"""

from libc.stdint cimport int64_t, uint64_t


cdef inline bint is_before(Question one, Question other) noexcept:
    """Of equal deadlines, the one that was asked first."""
    if one.deadline_ns != other.deadline_ns:
        return one.deadline_ns < other.deadline_ns
    return one.ticket < other.ticket


cdef class Question:
    """What was asked, and until when it may be answered."""


cdef class Later:
    """Questions that wait for an answer. capacity: how many there may be.

    settle(context, outcome): the outcome came in time. give_up(context): it did not; returns whether an outcome that
    still comes matters. recall(context, outcome): such a one came; needed where one may matter. When one of them is
    called the question is gone, so they may ask others; what they raise is raised by answer() or expire().
    """

    def __cinit__(self, size_t capacity, *, settle, give_up, recall=None):
        self.capacity = capacity
        self.settle = settle
        self.give_up = give_up
        self.recall = recall
        self.questions = {}
        self.heap = []
        self.abandoned = {}

    def __len__(self):
        return len(self.questions)

    cpdef bint is_full(self):
        """Whether ask() has no room, but for what is owed."""
        return <size_t>len(self.questions) >= self.capacity

    cpdef uint64_t ask(self, object context, int64_t deadline_ns, bint is_owed=False) except? 0:
        """A ticket, from 1, by which the question can be answered; or 0 if there is no room for it.

        is_owed: it undoes what a late outcome did, and has room of its own, as much again.
        """
        cdef Question question
        if <size_t>len(self.questions) >= (2 * self.capacity if is_owed else self.capacity):
            return 0
        self.last_ticket += 1
        question = Question()
        question.ticket = self.last_ticket
        question.deadline_ns = deadline_ns
        question.context = context
        self.questions[question.ticket] = question
        self.heap.append(question)
        self.rise(question, len(self.heap) - 1)
        return question.ticket

    cpdef bint answer(self, uint64_t ticket, object outcome) except -1:
        """Settles a question, or recalls one that was given up; False if nobody waits for an answer to that ticket."""
        cdef Question question = self.questions.pop(ticket, None)
        if question is not None:
            self.remove(question)
            self.settle(question.context, outcome)
            return True
        if ticket not in self.abandoned:
            return False
        self.recall(self.abandoned.pop(ticket), outcome)
        return True

    cpdef int expire(self, int64_t now_ns) except -1:
        """Gives up the questions whose deadline has passed, the earliest first."""
        cdef Question question
        while self.heap:
            question = self.heap[0]
            if question.deadline_ns > now_ns:
                break
            del self.questions[question.ticket]
            self.remove(question)
            self.overdue += 1
            if self.give_up(question.context):
                self.abandoned[question.ticket] = question.context
                if <size_t>len(self.abandoned) > self.capacity:
                    del self.abandoned[next(iter(self.abandoned))]
        return 0

    cpdef int64_t next_deadline(self):
        """When expire() has something to do; -1 if nothing waits."""
        return (<Question>self.heap[0]).deadline_ns if self.heap else -1

    # ---- the heap: each question knows its place, so that one that is answered leaves nothing behind ----

    cdef int place_at(self, Question question, Py_ssize_t place) except -1:
        self.heap[place] = question
        question.place = place
        return 0

    cdef int rise(self, Question question, Py_ssize_t place) except -1:
        """Puts it there, or above."""
        cdef Question above
        while place:
            above = self.heap[(place - 1) // 2]
            if not is_before(question, above):
                break
            self.place_at(above, place)
            place = (place - 1) // 2
        return self.place_at(question, place)

    cdef int sink(self, Question question, Py_ssize_t place) except -1:
        """Puts it there, or below."""
        cdef Py_ssize_t child = 2 * place + 1, size = len(self.heap)
        cdef Question below
        while child < size:
            if child + 1 < size and is_before(<Question>self.heap[child + 1], <Question>self.heap[child]):
                child += 1
            below = self.heap[child]
            if not is_before(below, question):
                break
            self.place_at(below, place)
            place = child
            child = 2 * place + 1
        return self.place_at(question, place)

    cdef int remove(self, Question question) except -1:
        """The last takes its place, and from there its own."""
        cdef Py_ssize_t place = question.place
        cdef Question last = self.heap.pop()
        if last is question:
            return 0
        if place and is_before(last, <Question>self.heap[(place - 1) // 2]):
            return self.rise(last, place)
        return self.sink(last, place)
