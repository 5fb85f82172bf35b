"""A load that acquires and releases, and that sends the other requests about names.

Floor 5 (ARCHITECTURE.md). If a permit has a token, its release names the token and not the name. Either the reply
to the acquire contains the token, or the load chooses it. A release that needs a token waits until its acquire is
answered, and so does the release of a Take that can wait. So acquires and releases alternate among the permits of a
connection.
"""

import os

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd.bench._codec cimport ACQUIRE, COUNT, CREATE, KEEP, LOWER, RAISE, RELEASE, REMOVE
from counterd.bench._link cimport ASKED, HOLDING, MISSED, TO_ACQUIRE, Link, Request, held_pop, held_push
from counterd.bench._memory cimport Hold, Permit, heap_push
from counterd.bench._random cimport random_exponential
from counterd.bench._work cimport Work
from counterd.bench._words cimport GRANTED, Reply


cdef class Permits(Work):
    cdef bint pairs                 # acquire and release in turn
    cdef bint in_turn               # likewise, of permits with tokens, or where an acquire waits for its grant
    cdef bint queues                # acquires wait: each answer makes room for another request
    cdef bint chooses_tokens        # an acquire says which token it wants
    cdef uint64_t token             # the next one without its number among those of this run
    cdef bint holds
    cdef bint hold_is_random
    cdef double hold_ns
    cdef bint track_held
    cdef bint track_created         # what a REMOVE takes back

    def __cinit__(self, plan, *_):
        weights, tokens = plan.work.weights, plan.dialect.tokens
        self.queues = plan.waits()
        self.in_turn = not weights and bool(tokens or self.queues)
        self.pairs = not weights and not self.in_turn
        self.chooses_tokens = tokens == "chosen"
        self.token = int.from_bytes(os.urandom(4), "big") << 32
        self.holds = plan.hold is not None
        if self.holds:
            self.hold_ns = plan.hold.mean * 1e9
            self.hold_is_random = plan.hold.kind == "exp"
        # Whose permits they are matters to what releases them, and to what a dying connection gives back.
        uses = plan.asks("release") or plan.asks("keep") or plan.verify
        self.track_held = self.in_turn or weights and plan.asks("acquire") and uses
        self.track_created = plan.asks("remove")

    # ---- what is asked ----

    cdef int choose(self, Link* link, int64_t intended_ns, uint8_t* op, Permit* permit) except -1:
        op[0] = ACQUIRE
        permit.token = 0
        if self.holds:
            link.slots += 1
            permit.name = self.task.next_name()
        elif self.pairs or self.in_turn:
            self.choose_turn(link, op, permit)
        else:
            op[0] = self.task.next_op()
            self.choose_drawn(link, op, permit)
        if op[0] == ACQUIRE and self.chooses_tokens:
            permit.token = self.token | self.task.next_fresh()
        return 0

    cdef int choose_turn(self, Link* link, uint8_t* op, Permit* permit) except -1:
        """Chooses acquire and release alternately."""
        if self.in_turn:
            link.raised = not (link.raised and link.held_count)
            if not link.raised:
                op[0] = RELEASE
                permit[0] = held_pop(link)
                return self.ledger.hold(permit.name, -1)
        elif link.turn == ASKED or link.turn == HOLDING:
            op[0] = RELEASE
            permit.name = link.turn_name
            if link.turn == HOLDING:
                self.ledger.hold(permit.name, -1)
            link.turn = TO_ACQUIRE
            return 0
        permit.name = link.turn_name = self.task.next_name()
        link.turn = ASKED
        return 0

    cdef int choose_drawn(self, Link* link, uint8_t* op, Permit* permit) except -1:
        """Chooses a request of a mix.

        If there is nothing to release, to keep or to remove, it chooses another request.
        """
        if op[0] == RAISE:  # up and down again, so that no number comes to its end
            link.raised = not link.raised
            if link.raised:
                link.turn_name = self.task.next_name()
            else:
                op[0] = LOWER
            permit.name = link.turn_name
            return 0
        if op[0] == REMOVE or (op[0] == RELEASE or op[0] == KEEP) and self.track_held:
            if link.held_count:
                permit[0] = held_pop(link)
                if op[0] == KEEP:
                    return held_push(link, permit[0])
                return 0 if op[0] == REMOVE else self.ledger.hold(permit.name, -1)
            op[0] = CREATE if op[0] == REMOVE else ACQUIRE
        permit.name = self.task.next_fresh() if op[0] == CREATE else self.task.next_name()
        return held_push(link, permit[0]) if op[0] == CREATE and self.track_created else 0

    cdef uint32_t room(self, const Link* link) noexcept:
        if self.holds:
            return self.task.depth - link.slots if link.slots < self.task.depth else 0
        if self.queues:
            return self.task.depth - link.count if link.count < self.task.depth else 0
        return Work.room(self, link)

    # ---- what is held ----

    cdef int64_t answered(self, Link* link, const Request* request, const Reply* reply, int64_t now) except -2:
        cdef Permit permit
        if request.op == ACQUIRE and reply.outcome == GRANTED:
            permit.token, permit.name = reply.token, request.permit.name
            self.granted(link, &permit, now)
            return -1
        if request.op == ACQUIRE and link.turn == ASKED and link.count == 0:
            link.turn = MISSED
        elif request.op == COUNT:
            self.ledger.look(request.permit.name, reply.value)
        link.slots -= self.holds
        return -1

    cdef int granted(self, Link* link, const Permit* permit, int64_t now) except -1:
        """Called when the load was granted a permit."""
        cdef Hold ending
        self.ledger.tell_once(permit.token)
        if self.holds:
            self.ledger.hold(permit.name, 1)
            ending.due_ns = now + <int64_t>(
                self.hold_ns * (random_exponential(&self.task.random) if self.hold_is_random else 1)
            )
            ending.link = link.index
            ending.generation = link.generation
            ending.permit = permit[0]
            return heap_push(&self.heap, ending)
        if self.pairs:
            if link.turn == ASKED and link.count == 0:
                link.turn = HOLDING
                self.ledger.hold(permit.name, 1)
            return 0  # its release is under way already
        self.ledger.hold(permit.name, 1)
        return held_push(link, permit[0]) if self.track_held else 0

    cdef int let_go(self, Link* link) except -1:
        """Called before a connection ends: as soon as the server notices, it may grant the permits to others."""
        cdef size_t i
        if link.turn == HOLDING:
            self.ledger.hold(link.turn_name, -1)
        while link.held_count:
            self.ledger.hold(held_pop(link).name, -1)
        for i in range(self.heap.size if link.slots and self.ledger.held != NULL else 0):
            if self.heap.cells[i].link == link.index and self.heap.cells[i].generation == link.generation:
                self.ledger.hold(self.heap.cells[i].permit.name, -1)
        return 0
