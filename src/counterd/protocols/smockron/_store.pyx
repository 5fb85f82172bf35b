"""The smockron protocol's store: decides how long identifiers have to wait, and notifies the subscribers.

Floor 2 (ARCHITECTURE.md). Section names are those in docs/protocols/smockron.md. Domains and identifiers are in
_throttles.pxd. Subscriptions are not in the region: they are prefixes, and end with their connections.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_RawCalloc, PyMem_RawFree
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from counterd._core cimport SLICE_STEPS, Session, Store, held_size
from counterd.engine.audit cimport audit_chains, audit_list, audit_table, audit_timers
from counterd.engine.chains cimport chains_begin, chains_reserve
from counterd.engine.connections cimport CONNECTIONS_MAX
from counterd.engine.gcra cimport PARTS_MAX as GCRA_PARTS_MAX
from counterd.engine.gcra cimport SPAN_MAX_NS, Rate, Span
from counterd.engine.pool cimport pool_left
from counterd.engine.debug cimport debug_check
from counterd.engine.list cimport Ends
from counterd.engine.region cimport region_reserve
from counterd.engine.table cimport RECORD_USED, Record, name_blocks, name_bytes
from counterd.engine.wheel cimport (
    timer_is_armed, timers_arm, timers_begin, timers_disarm, timers_next_ns, timers_reserve, timers_take,
)
from counterd.protocols.smockron._throttles cimport (
    DOMAIN_RULED, DOMAINS_MAX, IDENTIFIER_INLINE, Domain, Identifier, Throttles, domain_at, domain_find, domain_is_used,
    domain_make, domain_settle, domain_unask, identifier_at, identifier_count, identifier_find, identifier_make,
    identifier_oldest, identifier_remove, identifier_set, identifier_touch, identifiers_by_use, throttles_begin,
    throttles_reserve,
)
from counterd.protocols.smockron._wire cimport (
    AHEAD_MAX_MS, FIRST_BROKEN, MORE, NUMBER_MAX, PARSE_RESULTS, number_write, part_size, part_write,
)

from collections import namedtuple

cdef int64_t NS_PER_MS = 1000000
cdef int64_t WALL_STEP_NS = 10000000    # a smaller change of Unix time is ignored: see set_wall()

cdef enum:
    SUBSCRIPTIONS_MAX = DOMAINS_MAX     # prefixes that a connection can subscribe to: the topics of all domains
    IDENTIFIER_BLOCKS = 128     # more than the longest name of an identifier takes
    CONTROL_MAX = 4608          # bytes: more than a control message can have
    LISTED_MAX = 1048576        # connections in `listeners`: 8 MB
    LEAVE_AT_ONCE = 64          # most subscriptions that are removed at once when a connection ends; ticks remove more
    LEAVE_STEPS = 8             # steps of making or removing a subscription
    DOMAIN_BLOCKS = 16384       # enough for the names of all domains
    EVICTION_STEPS = 4
    CUT_OFF_STEPS = 256         # steps that a tick always has for ending connections, whatever else is due
    QUESTIONS_AT_ONCE = 500     # questions in one call of Redis: it takes 2 ms
    CALLS_AHEAD = 2             # unsettled calls: Redis gets the next one before the last answer is settled
    QUESTIONS_MAX = 4096        # that may wait; if Redis becomes unavailable, all are decided here in one call

OPERATION_NAMES = (
    "accepted", "delayed", "rejected", "forget", "accounting", "subscribe", "cancel", "ping", "handshake",
)
OUTCOME_NAMES = ("ok", "throttled", "unknown_domain", "malformed", "refused", "timed_out")
BROKEN_NAMES = ("", "", "not_zmtp", "old_version", "mechanism", "flags", "too_long", "too_many_frames")

LIMIT_PARTS = GCRA_PARTS_MAX
LIMIT_SPAN_NS = SPAN_MAX_NS
LIMIT_DOMAINS = DOMAINS_MAX


# A request that Redis has to decide. now_ms: when the request was received; moment_ms: its own time, not earlier.
Question = namedtuple("Question", ("operation", "tag", "name", "moment_ms", "now_ms"))


cdef class SmockronStore(Store):
    """The store of the protocol.

    identifiers: the most identifiers in memory. message_max: bytes of a message. See Store for the other arguments.
    """

    def __cinit__(self, *, bytes hash_key, uint32_t identifiers, size_t message_max, **_):
        if identifiers == 0:
            raise ValueError("there must be room for at least one identifier")
        self.message_max = message_max
        self.subscribers, self.prefixes, self.listeners, self.rounded_ms, self.questions = {}, {}, {}, {}, {}
        self.leaving, self.asked, self.parked = [], [], {}
        region_reserve(&self.region, b"smockron", sizeof(SmockronState), <void**>&self.state)
        # One block for each, because many names do not fit into their records.
        chains_reserve(&self.chains, &self.region, <uint64_t>identifiers + IDENTIFIER_BLOCKS)
        chains_reserve(&self.domain_chains, &self.region, DOMAIN_BLOCKS)
        throttles_reserve(&self.throttles, &self.region, identifiers)
        timers_reserve(&self.silences, &self.region, b"silences")
        region_reserve(&self.region, b"links", (CONNECTIONS_MAX + 1) * sizeof(Link), <void**>&self.links)
        self.sessions = <void**>PyMem_RawCalloc(CONNECTIONS_MAX + 1, sizeof(void*))
        if self.sessions == NULL:
            raise MemoryError(f"no room for {CONNECTIONS_MAX} sessions")
        self.map_region(hash_key)
        chains_begin(&self.chains)
        chains_begin(&self.domain_chains)
        throttles_begin(&self.throttles, self.header.key, &self.domain_chains, &self.chains, self.now_ns)
        timers_begin(&self.silences, &self.links.silence, sizeof(Link), self.now_ns)

    def __dealloc__(self):
        PyMem_RawFree(self.sessions)

    cdef void forget(self, uint32_t connection) noexcept:
        self.sessions[connection] = NULL
        timers_disarm(&self.silences, connection)
        if self.prefixes is not None:  # it is None if the store is collected before its sessions
            self.parked.pop(connection, None)
            if len(self.prefixes.get(connection, ())) > LEAVE_AT_ONCE:
                self.leaving.append(connection)
                self.has_work = True
                return
            for prefix in self.prefixes.pop(connection, ()):
                self.leave(connection, prefix)
        Store.forget(self, connection)

    cdef int take_leave(self, int* steps) except -1:
        """Removes the subscriptions of connections that are gone."""
        cdef uint32_t connection
        while self.leaving and steps[0] > 0:
            connection = self.leaving[0]
            prefixes = self.prefixes[connection]
            while prefixes and steps[0] > 0:
                self.leave(connection, prefixes.pop())
                steps[0] -= LEAVE_STEPS
            if not prefixes:
                del self.prefixes[connection]
                del self.leaving[0]
                Store.forget(self, connection)
        return 0

    cdef void count(self, Operation operation, Outcome outcome) noexcept:
        self.state.outcomes[<int>operation][<int>outcome] += 1

    # ---- rules ----

    def load_rules(self, rules not None):
        """Replaces all rules. rules: {domain: rules.Rule}. Raises ValueError if there are too many rules.

        Domains without a rule are unknown from now on. Identifiers of these domains stay until they expire.
        """
        cdef uint32_t number
        with self:
            gone = [number for number in self.used_domains() if self.domain_name(number) not in rules]
            kept = [number for number in gone if domain_is_used(domain_at(&self.throttles, number))]
            if len(kept) + len(rules) > DOMAINS_MAX:
                raise ValueError(f"{DOMAINS_MAX} domains are possible, including those that still have identifiers")
            self.rounded_ms = {}
            self.forget_listeners()
            for number in gone:
                domain_at(&self.throttles, number).record.flags &= <uint8_t>~DOMAIN_RULED
                domain_settle(&self.throttles, number)
            for name, rule in rules.items():
                self.set_rule(name, rule)

    cdef bytes domain_name(self, uint32_t number):
        return name_bytes(&self.throttles.domains, <Record*>domain_at(&self.throttles, number))

    cdef list used_domains(self):
        return [
            number for number in range(1, self.throttles.domains.pool.fresh + 1)
            if domain_at(&self.throttles, number).record.flags & RECORD_USED
        ]

    cdef int set_rule(self, bytes name, rule) except -1:
        cdef const uint8_t* text = <const uint8_t*>PyBytes_AS_STRING(name)
        cdef uint32_t size = <uint32_t>PyBytes_GET_SIZE(name)
        cdef uint32_t number = domain_find(&self.throttles, text, size)
        cdef Domain* domain
        cdef Rate rate
        (rate.interval.ns, rate.interval.part), (rate.burst.ns, rate.burst.part), rate.parts, rounded_ms = rule
        if not (0 < rate.parts <= GCRA_PARTS_MAX and max(rate.interval.part, rate.burst.part) < rate.parts
                and 0 <= rate.interval.ns <= SPAN_MAX_NS and 0 <= rate.burst.ns <= SPAN_MAX_NS):
            raise ValueError(f"an impossible rule: {rule}")
        if number == 0:
            number = domain_make(&self.throttles, text, size)
        domain = domain_at(&self.throttles, number)
        domain.record.flags |= DOMAIN_RULED
        domain.rate = rate
        self.rounded_ms[name] = rounded_ms
        return 0

    # ---- time ----

    cpdef set_wall(self, int64_t unix_ns, int64_t now_ns):
        cdef int64_t wall_ns = unix_ns - now_ns
        # A small difference only comes from reading two clocks one after the other. Times once sent must not move.
        if not -WALL_STEP_NS < wall_ns - self.wall_ns < WALL_STEP_NS:
            self.wall_ns = wall_ns

    cdef int64_t now_ms(self) noexcept:
        """Returns Unix time in whole milliseconds, as the original master uses it."""
        return (self.now_ns + self.wall_ns) // NS_PER_MS

    cdef int64_t due_ns(self) except? -2:
        cdef int64_t identifiers = timers_next_ns(&self.throttles.timers)
        cdef int64_t silences = timers_next_ns(&self.silences)
        if self.leaving or self.questions and not self.asked:
            return 0
        return identifiers if silences < 0 else silences if identifiers < 0 else min(identifiers, silences)

    cdef int run_due(self) except -1:
        cdef int steps = SLICE_STEPS
        cdef uint32_t number = timers_take(&self.throttles.timers, self.now_ns, &steps)
        while number:
            identifier_remove(&self.throttles, number)
            self.throttles.state.expired += 1
            number = timers_take(&self.throttles.timers, self.now_ns, &steps)
        steps = max(steps, <int>CUT_OFF_STEPS)
        self.take_leave(&steps)
        steps = max(steps, <int>CUT_OFF_STEPS)
        number = timers_take(&self.silences, self.now_ns, &steps)
        while number:
            self.cut_off(number)
            number = timers_take(&self.silences, self.now_ns, &steps)
        return 0

    cdef void await_handshake(self, uint32_t connection, int64_t limit_ns) noexcept:
        self.links[connection].is_ready = False
        self.links[connection].patience_ns = limit_ns
        self.heard(connection)

    cdef void heard(self, uint32_t connection) noexcept:
        """Called when a connection has sent something.

        Restarts the timer that ends the connection. See section "Heartbeats".
        """
        cdef Link* link = self.links + connection
        if link.patience_ns:
            timers_arm(&self.silences, connection, self.now_ns + link.patience_ns)
            self.expect(link.silence.due_ns)
        else:
            timers_disarm(&self.silences, connection)

    cdef int cut_off(self, uint32_t connection) except -1:
        cdef Session session
        if self.sessions[connection] == NULL:
            return 0
        session = <Session>self.sessions[connection]
        if self.links[connection].is_ready:
            self.state.silent += 1
        else:
            self.count(HANDSHAKE, TIMED_OUT)
        session.break_off()
        session.update_state()
        return session.mark_dirty()

    # ---- accounting ----

    cdef int account(
        self, uint32_t domain, Operation operation, uint32_t tag, const uint8_t* name, uint32_t size, int64_t moment_ms
    ) except -1:
        """Counts a request that was accepted, or delayed until moment_ms (Unix time). See section "Throttle"."""
        cdef Domain* of = domain_at(&self.throttles, domain)
        cdef int64_t now_ms = self.now_ms()
        if operation == ACCEPTED:
            of.accepted += 1
        else:
            of.delayed += 1
        moment_ms = max(moment_ms, now_ms)
        if self.is_shared:
            return self.ask(domain, Question(operation, tag, name[:size], moment_ms, now_ms))
        return self.decide(domain, operation, tag, name, size, moment_ms, now_ms)

    cdef int decide(
        self, uint32_t domain, Operation operation, uint32_t tag, const uint8_t* name, uint32_t size,
        int64_t moment_ms, int64_t now_ms,
    ) except -1:
        """Decides how long the identifier has to wait now.

        moment_ms: the time of the request. now_ms: when it was received.
        """
        cdef Throttles* throttles = &self.throttles
        cdef Domain* of = domain_at(throttles, domain)
        cdef uint32_t number = identifier_find(throttles, domain, tag, name, size)
        cdef bint is_new = number == 0
        cdef Span until
        if is_new:
            number = self.enter(domain, tag, name, size)
        until = identifier_count(throttles, number, is_new, &of.rate, moment_ms * NS_PER_MS - self.wall_ns)
        self.expect(identifier_at(throttles, number).timer.due_ns)
        # Rounded up, so that a request in that millisecond is not too early.
        return self.tell(
            domain, operation, name, size, now_ms,
            (until.ns + (until.part != 0) + self.wall_ns + NS_PER_MS - 1) // NS_PER_MS,
        )

    cdef uint32_t enter(self, uint32_t domain, uint32_t tag, const uint8_t* name, uint32_t size) except 0:
        """Makes an identifier, and makes room for it."""
        self.make_room(name_blocks(&self.throttles.identifiers, size))
        return identifier_make(&self.throttles, domain, tag, name, size)

    cdef int tell(
        self, uint32_t domain, Operation operation, const uint8_t* name, uint32_t size, int64_t now_ms,
        int64_t until_ms,
    ) except -1:
        """Publishes DELAY_UNTIL if the identifier has to wait."""
        if until_ms <= now_ms:
            self.count(operation, OK)
            return 0
        self.count(operation, THROTTLED)
        domain_at(&self.throttles, domain).told += 1
        return self.publish(domain, b"DELAY_UNTIL", name, size, until_ms)

    # ---- state that is shared with other masters ----

    def share(self, bint is_shared, int64_t now_ns):
        """Sets whether Redis decides from now on: see take_questions().

        If it does not, this store decides about the open questions from its own state.
        """
        with self.at(now_ns):
            self.is_shared, self.is_alone = is_shared, not is_shared
            if not is_shared:
                for domain, questions in reversed(self.asked):
                    self.questions.setdefault(domain, [])[:0] = questions
                self.asked = []
                for domain, questions in self.questions.items():
                    for question in questions:
                        self.decide_late(domain, question)
                    domain_unask(&self.throttles, domain, <uint32_t>len(questions))
                self.questions = {}
                self.asking = 0
                self.unpark()

    def take_questions(self, int64_t now_ns):
        """Returns the next questions: (domain, (interval_ms, burst_ms), [(identifier, moment_ms), ...]).

        Returns None if there are none, or if CALLS_AHEAD calls are not settled yet. A moment of 0 means that the
        identifier is forgotten.
        """
        with self.at(now_ns):
            if len(self.asked) == CALLS_AHEAD or not self.questions:
                return None
            number, questions = next(iter(self.questions.items()))
            del self.questions[number]
            if len(questions) > QUESTIONS_AT_ONCE:  # the rest goes to the end, after the other domains
                self.questions[number], questions = questions[QUESTIONS_AT_ONCE:], questions[:QUESTIONS_AT_ONCE]
            self.asked.append((number, questions))
            name = self.domain_name(number)
            asked = [(one.name, 0 if one.operation == FORGET else one.moment_ms) for one in questions]
            return name, self.rounded_ms.get(name, (1, 0)), asked

    def settle_questions(self, list found not None, int64_t now_ns):
        """Applies the answers to the oldest call: until when each identifier has to wait, in milliseconds, at most
        10**15. Raises ValueError if the number of answers is wrong."""
        with self.at(now_ns):
            number, questions = self.asked[0] if self.asked else (0, [])
            if len(found) != len(questions):
                raise ValueError(f"{len(found)} answers to {len(questions)} questions")
            del self.asked[:1]
            for question, until_ms in zip(questions, found):
                self.settle_question(number, question, until_ms)
            if questions:
                domain_unask(&self.throttles, number, <uint32_t>len(questions))
            self.asking -= <uint32_t>len(questions)
            self.has_work = True
            self.unpark()

    cdef int ask(self, uint32_t domain, question) except -1:
        self.questions.setdefault(domain, []).append(question)
        domain_at(&self.throttles, domain).asked += 1
        self.asking += 1
        self.has_work = True
        return 0

    cdef bint is_full(self) noexcept:
        """Returns whether sessions have to wait until some questions are settled."""
        return self.asking >= QUESTIONS_MAX

    cdef int park(self, uint32_t connection) except -1:
        self.parked[connection] = None
        return 0

    cdef int unpark(self) except -1:
        """Resumes the parked sessions if there is room again."""
        cdef uint32_t connection
        if self.parked and not self.is_full():
            parked, self.parked = self.parked, {}
            for connection in parked:
                (<Session>self.sessions[connection]).resume(None)
        return 0

    cdef int decide_late(self, uint32_t domain, question) except -1:
        cdef bytes name = question.name
        if question.operation == FORGET:
            return self.forget_now(
                domain, question.tag, <const uint8_t*>PyBytes_AS_STRING(name), <uint32_t>PyBytes_GET_SIZE(name)
            )
        return self.decide(
            domain, question.operation, question.tag, <const uint8_t*>PyBytes_AS_STRING(name),
            <uint32_t>PyBytes_GET_SIZE(name), question.moment_ms, question.now_ms,
        )

    cdef int settle_question(self, uint32_t domain, question, int64_t until_ms) except -1:
        """Applies a decision of Redis, and stores it for the time when Redis is unavailable."""
        cdef bytes name = question.name
        cdef const uint8_t* text = <const uint8_t*>PyBytes_AS_STRING(name)
        cdef uint32_t size = <uint32_t>PyBytes_GET_SIZE(name)
        cdef uint32_t number = identifier_find(&self.throttles, domain, question.tag, text, size)
        cdef int64_t now_ms = question.now_ms
        if question.operation == FORGET:
            return self.forget_now(domain, question.tag, text, size)
        until_ms = max(0, min(until_ms, now_ms + AHEAD_MAX_MS))
        if number == 0:
            number = self.enter(domain, question.tag, text, size)
        identifier_set(
            &self.throttles, number, &domain_at(&self.throttles, domain).rate, until_ms * NS_PER_MS - self.wall_ns
        )
        self.expect(identifier_at(&self.throttles, number).timer.due_ns)
        return self.tell(domain, question.operation, text, size, now_ms, until_ms)

    cdef int forget_identifier(self, uint32_t domain, uint32_t tag, const uint8_t* name, uint32_t size) except -1:
        """Executes a FORGET (section "Forget")."""
        cdef int64_t now_ms = self.now_ms()
        if self.is_shared:
            return self.ask(domain, Question(FORGET, tag, name[:size], now_ms, now_ms))
        return self.forget_now(domain, tag, name, size)

    cdef int forget_now(self, uint32_t domain, uint32_t tag, const uint8_t* name, uint32_t size) except -1:
        """Removes an identifier, and publishes FORGET to the gatekeepers that know this word."""
        cdef uint32_t number = identifier_find(&self.throttles, domain, tag, name, size)
        self.count(FORGET, OK)
        self.publish(domain, b"FORGET", name, size, self.now_ms())
        if number:
            identifier_remove(&self.throttles, number)
        return 0

    cdef int reject(self, uint32_t domain, uint32_t tag, const uint8_t* name, uint32_t size) except -1:
        """Counts a rejected request.

        The identifier of the request becomes the last one to be evicted. See section "Accounting".
        """
        cdef uint32_t number = identifier_find(&self.throttles, domain, tag, name, size)
        domain_at(&self.throttles, domain).rejected += 1
        self.count(REJECTED, OK)
        if number:
            identifier_touch(&self.throttles, number)
        return 0

    cdef int make_room(self, uint32_t blocks) except -1:
        """Makes room for an identifier: evicts the identifier that was used the longest time ago.

        If blocks are missing, evicts identifiers with blocks, at most IDENTIFIER_BLOCKS of them, because a name needs
        at most that many blocks.
        """
        cdef Throttles* throttles = &self.throttles
        if pool_left(throttles.identifiers.pool) == 0:
            self.evict(identifier_oldest(throttles))
        while pool_left(self.chains.pool) < blocks:
            self.evict(throttles.state.chained.last)
        return 0

    cdef void evict(self, uint32_t number) noexcept:
        debug_check(number != 0)
        identifier_remove(&self.throttles, number)
        self.throttles.state.evicted += 1
        self.budget -= EVICTION_STEPS

    # ---- control ----

    cdef int publish(
        self, uint32_t domain, const char* command, const uint8_t* name, uint32_t size, int64_t moment_ms
    ) except -1:
        """Posts a control message to all subscribers of the domain. See section "Control"."""
        cdef bytes topic, message
        cdef tuple listeners
        cdef uint8_t[NUMBER_MAX] digits
        cdef int length
        cdef uint8_t* target
        cdef Py_ssize_t end = len(command)
        self.state.published += 1
        if not self.subscribers:
            return 0
        topic, listeners = self.listeners.get(domain) or self.find_listeners(domain)
        if not listeners:
            return 0
        length = number_write(digits, <uint64_t>moment_ms)
        message = PyBytes_FromStringAndSize(
            NULL, part_size(PyBytes_GET_SIZE(topic)) + part_size(end) + part_size(size) + part_size(length)
        )
        target = part_write(
            <uint8_t*>PyBytes_AS_STRING(message), MORE, PyBytes_AS_STRING(topic), PyBytes_GET_SIZE(topic)
        )
        target = part_write(target, MORE, command, end)
        target = part_write(target, MORE, name, size)
        part_write(target, 0, digits, length)
        for connection in listeners:
            self.give(connection, message)
        return 0

    cdef tuple find_listeners(self, uint32_t domain):
        """Returns the topic of a domain and its subscribers, each of them once.

        Stores both in a cache until subscriptions change.
        """
        cdef bytes topic = self.domain_name(domain) + b"\0"
        found = {}
        for end in range(len(topic) + 1):
            found.update(self.subscribers.get(topic[:end], ()))
        self.budget -= len(topic) + len(found)
        if self.listed + len(found) > LISTED_MAX:
            self.forget_listeners()
        self.listed += len(found)
        self.listeners[domain] = topic, tuple(found)
        return self.listeners[domain]

    cdef void forget_listeners(self) noexcept:
        self.listeners.clear()
        self.listed = 0

    cdef int give(self, uint32_t connection, bytes message) except -1:
        """Posts a message to a subscriber. If the subscriber does not read and has no room, the message is lost."""
        cdef Session session
        cdef size_t size = PyBytes_GET_SIZE(message)
        if self.sessions[connection] == NULL:
            return 0
        session = <Session>self.sessions[connection]
        self.budget -= 1
        if session.posted_size and session.posted_size + size > self.posted_max and not is_waited_for(session):
            self.state.lost += 1
            return 0
        session.post(message)
        self.state.delivered += 1
        if not session.can_post(CONTROL_MAX):  # a message more than it may have would drop it
            self.crowded = connection
        return 0

    cdef bint can_publish(self) except -1:
        """Returns False while a subscriber that reads has no room for another message: it first has to fetch its
        messages. The store does not wait for a subscriber that does not read."""
        cdef Session session
        if self.crowded == 0:
            return True
        if self.sessions[self.crowded] != NULL:
            session = <Session>self.sessions[self.crowded]
            if not session.can_post(CONTROL_MAX):
                session.mark_dirty()
                return False
        self.crowded = 0
        return True

    cdef int subscribe(self, uint32_t connection, bytes prefix) except -1:
        """Adds a subscription.

        Returns False if the connection has too many subscriptions. See section "Subscriptions".
        """
        cdef dict subscribers
        mine = self.prefixes.setdefault(connection, set())
        self.budget -= LEAVE_STEPS
        if prefix not in mine:
            if len(mine) >= SUBSCRIPTIONS_MAX:
                return False
            mine.add(prefix)
            self.state.subscriptions += 1
        subscribers = self.subscribers.setdefault(prefix, {})
        if connection not in subscribers:
            self.forget_listeners()
        subscribers[connection] = subscribers.get(connection, 0) + 1
        return True

    cdef int cancel(self, uint32_t connection, bytes prefix) except -1:
        cdef dict subscribers = self.subscribers.get(prefix)
        self.budget -= LEAVE_STEPS
        if subscribers is None or connection not in subscribers:
            return 0
        subscribers[connection] -= 1
        if subscribers[connection] == 0:
            self.leave(connection, prefix)
            self.prefixes[connection].remove(prefix)
        return 0

    cdef void leave(self, uint32_t connection, bytes prefix) noexcept:
        cdef dict subscribers = self.subscribers[prefix]
        del subscribers[connection]
        if not subscribers:
            del self.subscribers[prefix]
        self.forget_listeners()
        self.state.subscriptions -= 1

    # ---- for people ----

    cdef dict figures(self):
        cdef dict figures = Store.figures(self)
        cdef const Throttles* throttles = &self.throttles
        cdef const SmockronState* state = self.state
        figures.update({
            "identifiers": throttles.identifiers.pool.used,
            "identifiers_max": throttles.identifiers.pool.capacity,
            "expired": throttles.state.expired,
            "evicted": throttles.state.evicted,
            "domains": throttles.domains.pool.used,
            "subscriptions": state.subscriptions,
            "published": state.published,
            "delivered": state.delivered,
            "lost": state.lost,
            "silent": state.silent,
            "asking": self.asking,
            "alone": self.is_alone,
            "longest_probe": throttles.identifiers.index.state.longest,
        })
        for parse_result in range(FIRST_BROKEN, PARSE_RESULTS):
            figures[f"broken:{BROKEN_NAMES[parse_result]}"] = state.broken[<int>parse_result]
        return figures

    def outcomes(self):
        """Implements Store.outcomes."""
        with self:
            found = [
                (name, outcome, self.state.outcomes[<int>operation][<int>index])
                for operation, name in enumerate(OPERATION_NAMES)
                for index, outcome in enumerate(OUTCOME_NAMES)
            ]
            broken = sum(self.state.broken[<int>parse_result] for parse_result in range(FIRST_BROKEN, PARSE_RESULTS))
        return [one for one in [*found, ("unknown", "framing_lost", broken)] if one[2]]

    cdef int audit_parts(self) except -1:
        cdef const Throttles* throttles = &self.throttles
        cdef const Identifier* identifier
        cdef const Domain* domain
        cdef uint32_t number, listed
        audit_chains(&self.domain_chains, audit_table(&throttles.domains, "domains"))
        audit_chains(&self.chains, audit_table(&throttles.identifiers, "identifiers"))
        audit_timers(&throttles.timers, throttles.identifiers.pool.fresh)
        audit_timers(&self.silences, self.connections.pool.fresh)
        counted = {number: 0 for number in self.used_domains()}
        for number in range(1, throttles.identifiers.pool.fresh + 1):
            identifier = identifier_at(throttles, number)
            if timer_is_armed(&identifier.timer) != (identifier.record.flags & RECORD_USED != 0):
                raise AssertionError(f"identifier {number}: its timer is wrong")
            if identifier.record.flags & RECORD_USED:
                counted[identifier.domain] += 1
        for number, identifiers in counted.items():
            domain = domain_at(throttles, number)
            if identifiers != domain.identifiers or not (domain_is_used(domain) or domain.record.flags & DOMAIN_RULED):
                raise AssertionError(f"domain {number} has {identifiers} identifiers, {domain.identifiers} counted")
        listed = self.audit_recency(&throttles.state.inlined, False)
        listed += self.audit_recency(&throttles.state.chained, True)
        if listed != throttles.identifiers.pool.used:
            raise AssertionError(f"{listed} identifiers by recency, {throttles.identifiers.pool.used} in all")
        for number in self.parked:
            if self.sessions[number] == NULL or not (<Session>self.sessions[number]).waiting:
                raise AssertionError(f"connection {number} is parked, but does not wait")
        return self.audit_subscribers()

    cdef uint32_t audit_recency(self, const Ends* recency, bint chained) except? 0:
        """Checks a list of identifiers by recency.

        chained: whether its identifiers have blocks. Returns the length of the list.
        """
        cdef const Identifier* identifier
        cdef uint32_t number = recency.first
        cdef uint64_t used = self.throttles.state.uses + 1
        cdef uint32_t listed = audit_list(
            identifiers_by_use(&self.throttles), number, &recency.last, self.throttles.identifiers.pool.fresh
        )
        while number:
            identifier = identifier_at(&self.throttles, number)
            if identifier.used >= used:
                raise AssertionError(f"identifier {number} is in the wrong place of the list by recency")
            if (identifier.record.name_size > IDENTIFIER_INLINE) != chained:
                raise AssertionError(f"identifier {number} is in the wrong list by recency")
            used, number = identifier.used, identifier.links.next
        return listed

    cdef int audit_subscribers(self) except -1:
        """Checks that `subscribers`, `prefixes` and `listeners` agree about subscriptions."""
        mine = {(connection, prefix) for connection, prefixes in self.prefixes.items() for prefix in prefixes}
        theirs = {(connection, prefix) for prefix, found in self.subscribers.items() for connection in found}
        if mine != theirs or len(mine) != self.state.subscriptions:
            told = self.state.subscriptions
            raise AssertionError(f"{len(mine)} subscriptions, {len(theirs)} by prefix, {told} counted")
        used = self.used_domains()
        for number, (topic, listeners) in self.listeners.items():
            if number not in used:  # it has ended: load_rules() empties the cache before it uses the number again
                continue
            wanted = {connection for connection, prefix in mine if topic.startswith(prefix)}
            if topic != self.domain_name(number) + b"\0" or sorted(listeners) != sorted(wanted):
                raise AssertionError(
                    f"{listeners} are stored as the subscribers of {topic}, but {wanted} subscribe to it")
        return 0


cdef inline bint is_waited_for(Session session) noexcept:
    """Returns whether the connection is about to fetch its messages, and nothing prevents it."""
    return not (session.blocked or session.position or held_size(session))
