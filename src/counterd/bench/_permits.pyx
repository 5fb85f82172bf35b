"""What the connections of a load process hold, and what each of them asks next. The base of Jobs.

A side. Where a permit has a token, a release names that and not the name: of a sentinel room the reply to the acquire
tells it, of redis's scripts we choose it. Such a release waits until its acquire is answered, so acquires and releases
take turns among the permits that a connection has in hand.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from counterd.bench._board cimport text_write
from counterd.bench._memory cimport Hold, Permit, atomic_add, atomic_swap, heap_push, ring_grow
from counterd.bench._random cimport random_exponential, random_mixed
from counterd.bench._words cimport ACQUIRE, INSERT, KEEP, LOWER, PURGE, RELEASE, UPDATE, Op


cdef class Permits(Task):

    # ---- what is asked ----

    cdef int choose(self, Link* link, Op* op, Permit* permit) except -1:
        """The next request of the load on that connection."""
        op[0] = ACQUIRE
        permit.token = 0
        if self.holds:
            link.slots += 1
            permit.name = self.next_name()
        elif self.pairs or self.in_turn:
            self.choose_turn(link, op, permit)
        else:
            op[0] = self.next_op()
            self.choose_drawn(link, op, permit)
        if op[0] == ACQUIRE and self.names_tokens:
            permit.token = self.next_token()
        return 0

    cdef int choose_turn(self, Link* link, Op* op, Permit* permit) except -1:
        """Of acquire and release in turn."""
        if self.in_turn:
            link.raised = not (link.raised and link.held_count)
            if not link.raised:
                op[0] = RELEASE
                permit[0] = self.held_pop(link)
                return self.hold(permit.name, -1)
        elif link.turn == ASKED or link.turn == HOLDING:
            op[0] = RELEASE
            permit.name = link.turn_name
            if link.turn == HOLDING:
                self.hold(permit.name, -1)
            link.turn = TO_ACQUIRE
            return 0
        permit.name = link.turn_name = self.next_name()
        link.turn = ASKED
        return 0

    cdef int choose_drawn(self, Link* link, Op* op, Permit* permit) except -1:
        """Of a mix. It is another request where there is nothing to release, to keep or to purge."""
        if op[0] == UPDATE:  # up and down again, so that no quota comes to its end
            link.raised = not link.raised
            if link.raised:
                link.turn_name = self.next_name()
            else:
                op[0] = LOWER
            permit.name = link.turn_name
            return 0
        if op[0] == PURGE or (op[0] == RELEASE or op[0] == KEEP) and self.track_held:
            if link.held_count:
                permit[0] = self.held_pop(link)
                if op[0] == KEEP:
                    return self.held_push(link, permit[0])
                return 0 if op[0] == PURGE else self.hold(permit.name, -1)
            op[0] = INSERT if op[0] == PURGE else ACQUIRE
        permit.name = self.next_fresh() if op[0] == INSERT else self.next_name()
        return self.held_push(link, permit[0]) if op[0] == INSERT and self.track_inserted else 0

    # ---- what is held ----

    cdef int granted(self, Link* link, const Permit* permit, int64_t now) except -1:
        """A permit of the load's own."""
        cdef Hold ending
        if self.board.tokens != NULL:
            self.tell_once(permit.token)
        if self.holds:
            self.hold(permit.name, 1)
            ending.due_ns = now + <int64_t>(
                self.hold_ns * (random_exponential(&self.random) if self.hold_is_random else 1)
            )
            ending.link = link.index
            ending.generation = link.generation
            ending.permit = permit[0]
            return heap_push(&self.heap, ending)
        if self.pairs:
            if link.turn == ASKED and link.count == 0:
                link.turn = HOLDING
                self.hold(permit.name, 1)
            return 0  # its release is under way already
        self.hold(permit.name, 1)
        return self.held_push(link, permit[0]) if self.track_held else 0

    cdef int let_go(self, Link* link) except -1:
        """All that the connection holds, before the server can know: as soon as it does, others may be granted it."""
        cdef size_t i
        if link.turn == HOLDING:
            self.hold(link.turn_name, -1)
        while link.held_count:
            self.hold(self.held_pop(link).name, -1)
        for i in range(self.heap.size if link.slots and self.board.held != NULL else 0):
            if self.heap.cells[i].link == link.index and self.heap.cells[i].generation == link.generation:
                self.hold(self.heap.cells[i].permit.name, -1)
        return 0

    cdef int hold(self, uint32_t name, int64_t permits) except -1:
        """Permits of that name that are surely held are so many more, or fewer."""
        cdef int64_t sum
        if self.board.held == NULL:
            return 0
        sum = atomic_add(self.board.held + name, permits * self.resources)
        if sum > self.maximum and permits > 0:
            self.exceeded(f"{self.name_of(name)}: {sum} were held at once, with a maximum of {self.maximum}")
        return 0

    cdef int tell_once(self, uint64_t token) except -1:
        """Tokens that were told lately are in a table that all processes share, each in a place of its own mostly."""
        if atomic_swap(self.board.tokens + (random_mixed(token) & (self.board.token_places - 1)), token) == token:
            self.exceeded(f"token {<int64_t>token} was told twice")
        return 0

    cdef int exceeded(self, str text) except -1:
        self.sheet.violations += 1
        if self.sheet.violations == 1:
            text_write(self.sheet.violation, text)
        return 0

    cdef Permit held_pop(self, Link* link) noexcept:
        cdef Permit permit = link.held[link.held_head]
        link.held_head = (link.held_head + 1) & link.held_mask
        link.held_count -= 1
        return permit

    cdef int held_push(self, Link* link, Permit permit) except -1:
        if link.held_count == 0 or link.held_count > link.held_mask:
            ring_grow(<void**>&link.held, &link.held_mask, &link.held_head, link.held_count, sizeof(Permit))
        link.held[(link.held_head + link.held_count) & link.held_mask] = permit
        link.held_count += 1
        return 0
