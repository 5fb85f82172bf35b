"""Questions whose answers arrive later. Each question has a ticket and a deadline.

Floor 1 (ARCHITECTURE.md). This file has no clock: the caller passes times. A request that the engine cannot decide now
becomes a question. The context of a question, an object of the caller, is kept until the ticket is answered or the
deadline passes. Three functions of the caller then do the rest, such as posting a reply or resuming a request.

Questions and tickets are not in the region. Questions and tickets are valid only in this process, as is the code that
answers them.

Invariants:
- each question is either in `questions` and once in `heap`, or in neither; the first question of the heap has the
  earliest deadline;
- each question is either settled or given up, exactly once; a question that was given up is recalled at most once;
- there are at most 2 * capacity questions, and at most `capacity` of them were given up and may be recalled.
"""

from libc.stdint cimport int64_t, uint64_t


cdef inline bint is_before(Question one, Question other) noexcept:
    """Returns whether `one` has the earlier deadline.

    If the deadlines are equal, returns whether `one` was asked first.
    """
    if one.deadline_ns != other.deadline_ns:
        return one.deadline_ns < other.deadline_ns
    return one.ticket < other.ticket


cdef class Question:
    """An open question and its deadline."""


cdef class Later:
    """The open questions. capacity: the largest number of them.

    settle(context, outcome): called when the outcome arrived in time. give_up(context): called when the deadline has
    passed; returns True if a late outcome matters. recall(context, outcome): called when a late outcome that matters
    arrived; None if late outcomes never matter.

    The question is removed before one of these functions is called, so the functions may ask other questions. answer()
    and expire() pass on their exceptions.
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
        """Whether ask() accepts only questions with is_owed."""
        return <size_t>len(self.questions) >= self.capacity

    cpdef uint64_t ask(self, object context, int64_t deadline_ns, bint is_owed=False) except? 0:
        """Adds a question. Returns the ticket of the question, from 1, or 0 if there is no room.

        is_owed: whether the question undoes a late outcome; `capacity` more places are reserved for such questions.
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
        """Settles a question, or recalls a question that was given up. Returns False if the ticket is unknown."""
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
        """Gives up the questions whose deadlines have passed, beginning with the earliest."""
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
        """Returns the earliest deadline in ns, or -1 if there is no question."""
        return (<Question>self.heap[0]).deadline_ns if self.heap else -1

    # ---- the heap: each question stores its place, so that an answered one is removed without a search ----

    cdef int place_at(self, Question question, Py_ssize_t place) except -1:
        self.heap[place] = question
        question.place = place
        return 0

    cdef int rise(self, Question question, Py_ssize_t place) except -1:
        """Moves a question from `place` up to where it belongs in the heap."""
        cdef Question above
        while place:
            above = self.heap[(place - 1) // 2]
            if not is_before(question, above):
                break
            self.place_at(above, place)
            place = (place - 1) // 2
        return self.place_at(question, place)

    cdef int sink(self, Question question, Py_ssize_t place) except -1:
        """Moves a question from `place` down to where it belongs in the heap."""
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
        """Removes a question. The last question takes its place, and then rises or sinks."""
        cdef Py_ssize_t place = question.place
        cdef Question last = self.heap.pop()
        if last is question:
            return 0
        if place and is_before(last, <Question>self.heap[(place - 1) // 2]):
            return self.rise(last, place)
        return self.sink(last, place)
