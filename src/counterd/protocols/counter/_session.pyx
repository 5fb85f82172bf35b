"""The counter protocol without I/O: decodes, executes and answers the requests of a connection.

Floor 2 (ARCHITECTURE.md). Section names are those of the protocol's document ("Counter support").
docs/protocols/counter.md describes all differences from yrmcdsd and the reasons.

A frame is a header of 12 bytes and a body. Framing is lost if the magic is wrong, or if the body is longer than
BODY_MAX, the longest body of any request. _messages.pxd decodes and encodes, and _counters.pxd decides.
"""

from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport INT64_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._core cimport DONE, HALF_CLOSED, LATER, OUTPUT_MAX, REPLY_ROOM, Frame, Session, Store, Why
from counterd.engine.byteorder cimport (
    load_be16, load_be32, load_be64, load_le32, prefetch, store_be16, store_be32,
)
from counterd.engine.debug cimport debug_check
from counterd.engine.list cimport Links
from counterd.engine.permits cimport (
    FULL, GRANTED, REFUSED, Outcome, Permits, ledger_find, ledger_tag, permit_at,
)
from counterd.engine.table cimport RECORD_USED, index_peek, index_prefetch, name_read, name_tag, table_find
from counterd.protocols.counter._charges cimport take_settle
from counterd.protocols.counter._counters cimport (
    NS_PER_TENTH, Counter, Counters, counter_acquire, counter_at, counter_everywhere, counter_exists, counter_get,
    counter_release,
)
from counterd.protocols.counter._items cimport ITEMS_MAX, Decision, Item, item_tag, items_limit, items_repeat
from counterd.protocols.counter._leases cimport session_unblock
from counterd.protocols.counter._messages cimport (
    ACQUIRE, BODY_MAX, CANCEL, DUMP, EVERYWHERE, GET, GOODBYE, HEADER_SIZE, HELD, INVALID_ARGUMENTS, LIMITS, NO_ERROR,
    NOOP, NOT_ACQUIRED, NOT_FOUND, OPCODES, OUT_OF_MEMORY, PERMIT, PRESENT_SIZE, RELEASE, REPLY_MAX, REQUEST_MAGIC,
    RESOURCE_NOT_AVAILABLE, RESUME, RESUME_REPLY_SIZE, RESUME_SIZE, SETTLE, STATS, TAKE, TAKE_HEAD, TAKE_MAX,
    UNKNOWN_COMMAND, WHO, Answer, Request, TakeHead, absence_encode, frame_opaque, grant_encode, head_decode,
    header_encode, item_decode, reply_encode, request_decode, request_kind, success_encode, take_peek, take_simplify,
)
from counterd.protocols.counter._rates cimport FLAG_AWAITED, FLAG_RATE, RATE_TAG, Pace
from counterd.protocols.counter._resumptions cimport (
    CONNECTION_NAME_MAX, TOKEN_SIZE, token_find, token_issue, token_secret, token_write,
)
from counterd.protocols.counter._shares cimport FLAG_SHARED, Blocked, Shares, blocked_add, blocked_remove
from counterd.protocols.counter._store cimport CounterStore
from counterd.protocols.counter._take_fast cimport FastItem, fast_take_fits, fast_take_grant, fast_take_read
from counterd.protocols.counter._takes cimport Takes, items_find, takes_decide

cdef enum:
    UNKNOWN = 255           # in BODY_FIXED
    PENDING = 255           # in place of a Status: the request is executed later
    OTHER = 254             # likewise: the body has another form
    CANCEL_SIZE = 4
    SETTLE_FIXED = 14       # bytes of a Settle before its name
    HELD_SIZE = 4           # bytes of the reply
    DUMP_PIECE = 65536      # bytes of a Dump that one call produces: about 1,700 counters with 16-byte names
    ITEM_STEPS = 8          # an item of a Take: some 0.3 us
    STATS_STEPS = 500       # a Stats takes some 20 us in Python
    LIMIT_SIZE = 4          # bytes of the limit, after the name of a Dump's entry, with LIMITS

# Bytes of each request's body before the name; 0 = the request has no body. Section "Operations".
cdef uint8_t[OPCODES] BODY_FIXED
for _opcode in range(OPCODES):
    BODY_FIXED[<int>_opcode] = UNKNOWN
for _opcode, _fixed in {
    NOOP: 0, GET: 2, ACQUIRE: 10, RELEASE: 6, STATS: 0, DUMP: 0, TAKE: OTHER, CANCEL: OTHER, SETTLE: OTHER,
    RESUME: OTHER, GOODBYE: 0, WHO: OTHER, HELD: 2,
}.items():
    BODY_FIXED[<int>_opcode] = _fixed

# The status for each of the engine's outcomes, in their order.
cdef uint8_t[5] STATUS_OF_OUTCOME = [NO_ERROR, NOT_FOUND, RESOURCE_NOT_AVAILABLE, NOT_ACQUIRED, OUT_OF_MEMORY]

assert REPLY_MAX <= REPLY_ROOM


cdef inline uint8_t* reply(Store store, uint8_t opcode, uint32_t opaque, uint32_t size) noexcept:
    """Appends the header of a reply. Returns where the body of `size` bytes begins."""
    cdef uint8_t* target = store.out + store.out_size
    debug_check(store.out_size + HEADER_SIZE + size <= OUTPUT_MAX + REPLY_MAX)
    store.out_size += HEADER_SIZE + size
    return header_encode(target, opcode, NO_ERROR, opaque, size)


cdef inline uint8_t* grant_reply(CounterSession session, const Frame* frame, uint64_t grant, int count) noexcept:
    """Counts a Take that was granted, and appends its reply. Returns where the amounts that are left go."""
    cdef uint8_t* target = session.store.out + session.store.out_size
    session.asked = 0
    (<CounterStore>session.store).requests[<int>TAKE] += 1
    session.store.out_size += HEADER_SIZE + 8 + 4 * <uint32_t>count
    return grant_encode(target, frame_opaque(frame), grant, count)


cdef inline Outcome acquire(
    CounterSession session, const Frame* frame, const Request* request, uint32_t* left
) noexcept:
    """Executes an Acquire. left: see counter_acquire()."""
    cdef Counters* counters = &(<CounterStore>session.store).counters
    cdef Outcome outcome = counter_acquire(
        counters, session.connection, frame.tag, frame.key, frame.key_size, request.resources, request.maximum,
        <uint32_t>(session.store.now_ns // NS_PER_TENTH), &session.store.budget, left
    )
    if counters.ring.state.sweep_left:
        session.store.has_work = True
    return outcome


cdef inline Outcome decide(
    CounterSession session, const Frame* frame, const Request* request, uint32_t* number
) noexcept:
    """Decides about a request for one counter, or a Noop. number: see Answer, or what is left after a refusal."""
    cdef Counters* counters = &(<CounterStore>session.store).counters
    cdef Outcome outcome = GRANTED
    number[0] = request.maximum
    if request.opcode == ACQUIRE:
        if (<CounterStore>session.store).draining:
            return REFUSED
        outcome = acquire(session, frame, request, number)
        if outcome == GRANTED:
            number[0] = request.resources
    elif request.opcode == RELEASE:
        outcome = counter_release(
            counters, session.connection, frame.tag, frame.key, frame.key_size, request.resources
        )
        if counters.fair.state.ready_first:
            session.store.has_work = True
    elif request.opcode == GET:
        outcome = counter_get(
            counters, frame.tag, frame.key, frame.key_size, frame.data[2] & EVERYWHERE != 0, number
        )
    return outcome


cdef class CounterSession(Session):
    """One connection of the counter protocol."""

    def __cinit__(self, CounterStore store not None):
        store.sessions[self.connection] = <void*>self
        store.peers.keys[self.connection] = 0

    def __dealloc__(self):
        if self.connection and self.store is not None:  # the store must not post to it, even before forget()
            (<CounterStore>self.store).sessions[self.connection] = NULL

    cdef Py_ssize_t parse_frame(self, const uint8_t* data, size_t size, Frame* frame) noexcept:
        cdef uint32_t body
        cdef uint8_t opcode, fixed
        if size < HEADER_SIZE:
            return 0
        body = load_be32(data + 4)
        opcode = data[1]
        fixed = BODY_FIXED[opcode] if opcode < OPCODES else <uint8_t>UNKNOWN
        frame.data = data
        frame.size = HEADER_SIZE
        frame.key_size = 0
        if data[0] != REQUEST_MAGIC:
            frame.parse_result = INVALID_ARGUMENTS
            return -1
        frame.parse_result = UNKNOWN_COMMAND if fixed == UNKNOWN else INVALID_ARGUMENTS     # until the body is right
        if body > BODY_MAX and (opcode != TAKE or body > TAKE_MAX):
            return -1
        if size - HEADER_SIZE < body:
            return 0
        frame.size += body
        if fixed == 0 and body == 0:
            frame.parse_result = NO_ERROR
        elif 0 < fixed < body and fixed < OTHER:
            return self.parse_named(data + HEADER_SIZE, body, opcode, fixed, frame)
        elif opcode == TAKE and body >= TAKE_HEAD and data[HEADER_SIZE] > 1:
            frame.parse_result = NO_ERROR   # take_several() decodes its items
        elif fixed == OTHER:
            return self.parse_other(data + HEADER_SIZE, body, opcode, frame)
        return frame.size

    cdef Py_ssize_t parse_named(
        self, const uint8_t* body, uint32_t size, uint8_t opcode, uint8_t fixed, Frame* frame
    ) noexcept:
        """Parses a body that consists of numbers, the length of the name, and the name.

        See sections "Get", "Acquire" and "Release". It is a method because the compiler would put a function into
        parse_frame, which then would save registers for every Noop.
        """
        cdef uint16_t name_size = load_be16(body + fixed - 2)
        cdef Permits* permits = &(<CounterStore>self.store).counters.permits
        if name_size == 0 or fixed + <uint32_t>name_size != size:
            return frame.size
        if opcode == ACQUIRE and (load_be32(body) == 0 or load_be32(body + 4) < load_be32(body)):
            return frame.size
        frame.parse_result = NO_ERROR
        frame.key = body + fixed
        frame.key_size = name_size
        frame.tag = name_tag(&permits.table, frame.key, name_size)
        index_prefetch(&permits.table.index, frame.tag)
        if opcode != GET:
            index_prefetch(&permits.ledger, ledger_tag(self.connection, frame.tag))
        return frame.size

    cdef Py_ssize_t parse_other(self, const uint8_t* body, uint32_t size, uint8_t opcode, Frame* frame) noexcept:
        """Parses Cancel, Settle, Resume and Who. For a Take of one item, finds only the name."""
        cdef uint8_t kind
        cdef Permits* permits = &(<CounterStore>self.store).counters.permits
        if opcode == TAKE:
            kind = take_peek(body, size, frame)
            if kind == 0:
                frame.key_size = 0
                return frame.size
            frame.parse_result = NO_ERROR
            frame.tag = name_tag(&permits.table, frame.key, frame.key_size) ^ (0 if kind == PERMIT else RATE_TAG)
            index_prefetch(&permits.table.index, frame.tag)
            index_prefetch(&permits.ledger, ledger_tag(self.connection, frame.tag))
        elif opcode == SETTLE:
            if size > SETTLE_FIXED:
                self.parse_named(body, size, opcode, SETTLE_FIXED, frame)
                frame.tag ^= RATE_TAG
        elif opcode == CANCEL:
            frame.parse_result = NO_ERROR if size == CANCEL_SIZE else INVALID_ARGUMENTS
        elif opcode == WHO and 0 < size <= CONNECTION_NAME_MAX:
            frame.parse_result = NO_ERROR
        elif opcode == RESUME and (size == RESUME_SIZE or size == PRESENT_SIZE) and load_be32(body):
            frame.parse_result = NO_ERROR
        return frame.size

    cdef void prefetch_frames(self, const Frame* frames, int count) noexcept:
        cdef Permits* permits = &(<CounterStore>self.store).counters.permits
        cdef Shares* shares = &(<CounterStore>self.store).counters.shares
        cdef uint32_t number
        cdef int i
        for i in range(count):
            if frames[i].key_size == 0:
                continue
            number = index_peek(&permits.table.index, frames[i].tag)
            if number:
                prefetch(permit_at(permits, number))
                if shares.is_on:
                    prefetch(shares.records + number)
            if frames[i].data[1] != GET:
                number = index_peek(&permits.ledger, ledger_tag(self.connection, frames[i].tag))
                if number:
                    prefetch(permits.holdings + number)

    cdef int execute_frame(self, const Frame* frame) except -1:
        cdef CounterStore store = <CounterStore>self.store
        cdef Request request
        cdef Outcome outcome
        cdef uint32_t number
        if frame.parse_result != NO_ERROR:
            return self.refuse(frame, frame.parse_result)
        if frame.data[1] >= STATS:
            if frame.data[1] != TAKE:
                return self.execute_other(frame)
            return self.take_several(frame) if frame.data[HEADER_SIZE] > 1 else self.take_one(frame)
        request = request_decode(frame)
        outcome = decide(self, frame, &request, &number)
        if outcome != GRANTED:
            return self.decline(frame, outcome, number)
        self.asked = 0
        store.requests[request.opcode] += 1
        store.out_size += success_encode(store.out + store.out_size, frame, number)
        return DONE

    cdef int decline(self, const Frame* frame, Outcome outcome, uint32_t left) except -1:
        """Refuses a request for one counter, unless only rights to a shared counter may be missing."""
        cdef Request request = request_decode(frame)
        cdef Answer answer = Answer(STATUS_OF_OUTCOME[<int>outcome], left, NULL)
        if outcome == REFUSED:
            if (<CounterStore>self.store).parting:
                answer.text = b"Draining"
            elif left < request.resources:
                answer.text = b"More than the limit of the server: %"
            if (<CounterStore>self.store).counters.shares.missing:
                if self.ask(request.resources, request.maximum, NULL, 1):
                    return LATER
        self.asked = 0
        (<CounterStore>self.store).requests[request.opcode] += 1
        (<CounterStore>self.store).refusals[request.opcode][answer.status] += 1
        self.store.out_size += reply_encode(self.store.out + self.store.out_size, frame, &answer)
        return DONE

    cdef int take_one(self, const Frame* frame) except -1:
        """Executes a Take of one item. A permit that is available has a short way."""
        cdef Takes* takes = &(<CounterStore>self.store).takes
        cdef Request request
        cdef uint32_t left
        if (<CounterStore>self.store).draining or not take_simplify(frame, &request):
            return self.take(frame)
        if acquire(self, frame, &request, &left) != GRANTED:
            return self.take(frame)
        takes.state.grant += 1
        store_be32(grant_reply(self, frame, takes.state.grant, 1), left)
        return DONE

    cdef int execute_other(self, const Frame* frame) except -1:
        """Executes a valid request whose reply is not about a single counter."""
        cdef CounterStore store = <CounterStore>self.store
        cdef uint8_t opcode = frame.data[1]
        cdef const uint8_t* body = frame.data + HEADER_SIZE
        cdef Answer answer = Answer(NO_ERROR, 0, NULL)
        cdef Outcome outcome
        cdef Item item
        if opcode > SETTLE:
            return self.execute_resumption(frame)
        store.requests[opcode] += 1
        if opcode <= DUMP:
            return self.reply_at_length(frame)
        if opcode == CANCEL:
            if not store.cancel(self, load_le32(body)):
                answer.status = NOT_FOUND
        else:
            item.name, item.name_size, item.tag = frame.key, frame.key_size, frame.tag
            outcome = take_settle(
                &store.takes, self.connection, load_be64(body), &item, load_be32(body + 8), store.now_ns, &store.budget
            )
            answer.status = STATUS_OF_OUTCOME[<int>outcome]
            store.look_again()
        if answer.status != NO_ERROR:
            return self.refuse(frame, answer.status)
        store.out_size += reply_encode(store.out + store.out_size, frame, &answer)
        return DONE

    cdef int execute_resumption(self, const Frame* frame) except -1:
        """Executes Resume, Goodbye, Who and Held. See section "Resume"."""
        cdef CounterStore store = <CounterStore>self.store
        cdef uint8_t opcode = frame.data[1]
        cdef uint32_t opaque = frame_opaque(frame)
        cdef Answer answer = Answer(NO_ERROR, 0, NULL)
        cdef uint8_t* target
        if opcode == RESUME:
            answer = self.resume_decide(frame)
        elif opcode == GOODBYE:
            if not store.give_back(self):
                answer.status = PENDING
        elif opcode == WHO:
            if not store.name_connection(self.connection, frame.data + HEADER_SIZE, frame.size - HEADER_SIZE):
                answer.status = INVALID_ARGUMENTS
        if answer.status == PENDING:
            return LATER
        if answer.status != NO_ERROR:
            store.refusals[opcode][answer.status] += 1
        if answer.status != INVALID_ARGUMENTS:
            store.requests[opcode] += 1
        if answer.status == NO_ERROR and opcode == RESUME:
            target = reply(store, RESUME, opaque, RESUME_REPLY_SIZE)
            token_write(&store.resumptions, self.connection, target)
            store_be32(target + TOKEN_SIZE, store.resumptions.records[self.connection].grace_ms)
        elif answer.status == NO_ERROR and opcode == HELD:
            store_be32(reply(store, HELD, opaque, HELD_SIZE), self.amount_held(frame))
        else:
            store.out_size += reply_encode(store.out + store.out_size, frame, &answer)
        return DONE

    cdef Answer resume_decide(self, const Frame* frame) except *:
        """Gives this connection a token.

        If the request presents a token, also gives it what that token's connection holds.
        """
        cdef CounterStore store = <CounterStore>self.store
        cdef const uint8_t* body = frame.data + HEADER_SIZE
        cdef const uint8_t* token = body + RESUME_SIZE
        cdef uint32_t attempt, number
        if store.draining:
            return Answer(RESOURCE_NOT_AVAILABLE, 0, b"Draining")
        if store.resumptions.state.max_ms == 0:
            return Answer(RESOURCE_NOT_AVAILABLE, 0, NULL)
        store.meet(self)
        if frame.size == HEADER_SIZE + RESUME_SIZE:
            token_issue(&store.resumptions, self.connection, load_be32(body), 0, 0)
            return Answer(NO_ERROR, 0, NULL)
        attempt = load_be32(token + TOKEN_SIZE)
        number = token_find(&store.resumptions, token, attempt)
        if number == self.connection or not store.holds_nothing(self.connection):
            return Answer(INVALID_ARGUMENTS, 0, NULL)
        if number == 0:
            return Answer(NOT_FOUND, 0, NULL)
        if not store.wait_of_ends(number):
            return Answer(PENDING, 0, NULL)
        store.exchange(self, number)
        token_issue(&store.resumptions, number, load_be32(body), token_secret(token), attempt)
        return Answer(NO_ERROR, 0, NULL)

    cdef uint32_t amount_held(self, const Frame* frame) noexcept:
        """Returns how much of a counter this connection holds. See section "Held"."""
        cdef Permits* permits = &(<CounterStore>self.store).counters.permits
        cdef uint32_t number = table_find(&permits.table, frame.tag, frame.key, frame.key_size)
        cdef uint32_t entry = ledger_find(permits, self.connection, number, frame.tag) if number else 0
        return permits.holdings[entry].amount if entry else 0

    cdef int take_several(self, const Frame* frame) except -1:
        """Executes a Take of several items. Permits that are available have a short way."""
        cdef Takes* takes = &(<CounterStore>self.store).takes
        cdef FastItem[ITEMS_MAX] items
        cdef uint8_t* left
        cdef int count
        if (<CounterStore>self.store).draining or takes.counters.limits.generation:
            return self.take(frame)
        count = fast_take_read(&takes.counters.permits.table, frame, items)
        if count == 0 or not fast_take_fits(takes, self.connection, items, count):
            return self.take(frame)
        self.store.budget -= ITEM_STEPS * count
        left = grant_reply(self, frame, takes.state.grant + 1, count)
        fast_take_grant(takes, self.connection, items, count, self.store.now_ns, left)
        return DONE

    cdef bint read_items(self, const Frame* frame, TakeHead* head, Item* items) noexcept:
        """Decodes a Take, and hashes the names of its items. Returns False if the Take is invalid."""
        cdef Permits* permits = &(<CounterStore>self.store).counters.permits
        cdef const uint8_t* end = frame.data + frame.size
        cdef const uint8_t* data = head_decode(frame.data + HEADER_SIZE, frame.size - HEADER_SIZE, head)
        cdef int i = 0
        if data == NULL:
            return False
        for i in range(head.count):
            data = item_decode(data, end, head, &items[i])
            if data == NULL:
                return False
        if data != end:
            return False
        for i in range(head.count):
            items[i].tag = frame.tag if head.count == 1 else item_tag(permits, &items[i])
        return not items_repeat(items, head.count)

    cdef int take(self, const Frame* frame) except -1:
        """Executes a Take: replies, or lets the Take wait. See section "Take"."""
        cdef CounterStore store = <CounterStore>self.store
        cdef Takes* takes = &store.takes
        cdef TakeHead head
        cdef Item[ITEMS_MAX] items
        cdef Decision decision = Decision(REFUSED, 0, False, 0, INT64_MAX)
        cdef uint8_t* target
        cdef uint8_t status
        cdef bint is_limited
        cdef int i
        if not self.read_items(frame, &head, items):
            return self.refuse(frame, INVALID_ARGUMENTS)
        store.counters.shares.missing = 0
        store.requests[<int>TAKE] += 1
        store.budget -= ITEM_STEPS * head.count
        is_limited = head.has_named or store.counters.limits.generation != 0
        if store.draining:
            status = RESOURCE_NOT_AVAILABLE
            items_find(takes, items, head.count)
            if is_limited:
                items_limit(&store.counters, items, head.count, &decision)
                decision.item = 0   # the reply is about the first, whatever is short
        else:
            decision = takes_decide(
                takes, self.connection, items, head.count, is_limited, store.now_ns, &store.budget
            )
            if decision.outcome == REFUSED and head.wait_ms and self.may_wait() and not decision.is_over:
                store.counters.shares.missing = 0
                if store.wait_for(self, frame, &head, items, &decision):
                    return DONE
                decision.outcome = FULL
            elif decision.outcome == REFUSED and self.ask(
                items[decision.item].amount, items[decision.item].maximum,
                &items[decision.item].pace if items[decision.item].pace.period_us else NULL, head.count
            ):
                store.requests[<int>TAKE] -= 1
                return LATER
            self.asked = 0
            status = STATUS_OF_OUTCOME[<int>decision.outcome]
        if head.has_rates or store.counters.ring.state.sweep_left:
            store.look_again()
        if status == NO_ERROR:
            target = grant_encode(store.out + store.out_size, frame_opaque(frame), takes.state.grant, head.count)
            for i in range(head.count):
                store_be32(target + 4 * i, items[i].left)
            store.out_size = target + 4 * head.count - store.out
            return DONE
        if status != RESOURCE_NOT_AVAILABLE and status != NOT_FOUND:
            return self.refuse(frame, status)
        store.refusals[<int>TAKE][status] += 1
        if status == NOT_FOUND:
            store.out_size += absence_encode(store.out + store.out_size, frame_opaque(frame), decision.item)
            return DONE
        store.out_size += store.write_shortage(store.out + store.out_size, frame_opaque(frame), &decision, items)
        return DONE

    cdef bint may_wait(self) noexcept:
        """Returns whether the peer can still get a later reply."""
        return not self.hung_up and not (<CounterStore>self.store).parting

    cdef int refuse(self, const Frame* frame, uint8_t status) noexcept:
        """Replies to a request that is refused."""
        cdef Answer answer = Answer(status, 0, NULL)
        (<CounterStore>self.store).refusals[request_kind(frame)][status] += 1
        self.store.out_size += reply_encode(self.store.out + self.store.out_size, frame, &answer)
        return DONE

    # ---- shared counters ----

    cdef bint ask(self, uint32_t amount, uint32_t most, const Pace* pace, int items) noexcept:
        """Parks the connection if only shared rights or units are missing: the authority is asked for them.

        The request is then executed once more. Returns False if the request has to be refused. most: the maximum. pace:
        of a rate, or NULL. items: of the request; each is asked for once at most.
        """
        cdef CounterStore store = <CounterStore>self.store
        cdef uint32_t number = store.counters.shares.missing
        cdef Blocked asked = Blocked(0, number, amount, most, 0, Links(0, 0), 0)
        cdef uint8_t* flags
        store.counters.shares.missing = 0
        if number:
            flags = &permit_at(&store.counters.permits, number).record.flags
            if self.asked < items and self.may_wait() and not flags[0] & FLAG_AWAITED:
                if pace != NULL:
                    asked.period_us, asked.most, asked.burst = pace.period_us, pace.limit, pace.burst
                self.asked += 1
                blocked_add(&store.counters.shares, self.connection, flags, &asked)
                store.has_work = self.waiting = True
                return True
        self.asked = 0
        return False

    cdef int end_wait(self, Why why) except -1:
        """Implements Session.end_wait: the request is refused, unless it can be granted without asking."""
        cdef CounterStore store = <CounterStore>self.store
        if why == HALF_CLOSED:
            return session_unblock(&store.counters.shares, store.sessions, self.connection)
        blocked_remove(&store.counters.shares, self.connection)
        return 0

    cpdef bytes eof(self, int64_t now_ns):
        """Implements Session.eof.

        Waiting Takes are cancelled, because a program that has ended looks like a program that only stops sending.
        """
        self.awaited = 0
        return Session.eof(self, now_ns)

    cdef int reply_at_length(self, const Frame* frame) except -1:
        """Executes Stats, whose body is made in Python, or begins a Dump."""
        cdef bytes stats
        cdef uint8_t* target
        if frame.data[1] == DUMP:
            self.dump_opaque = frame_opaque(frame)
            self.dump_flags = frame.data[2]
            self.position = 1
            self.produce()
            return DONE
        self.store.budget -= STATS_STEPS
        stats = (<CounterStore>self.store).stats_body()
        if len(stats) > REPLY_MAX - HEADER_SIZE:
            raise ValueError(f"the statistics take {len(stats)} bytes, which is more than a reply can have")
        target = reply(self.store, STATS, frame_opaque(frame), <uint32_t>len(stats))
        memcpy(target, PyBytes_AS_STRING(stats), len(stats))
        return DONE

    cdef int produce(self) except -1:
        """Writes the next piece of a Dump. See section "Dump".

        A Dump goes through the numbers of all records. Records never move, so a counter that exists during the whole
        Dump appears exactly once.
        """
        cdef Store store = self.store
        cdef Counters* counters = &(<CounterStore>store).counters
        cdef size_t end = store.out_size + DUMP_PIECE
        cdef bint limits = self.dump_flags & LIMITS
        cdef bint is_current, tells_all
        cdef uint32_t fixed = 10 + LIMIT_SIZE if limits else 10
        cdef Counter* counter
        cdef uint8_t* body
        while self.position <= counters.permits.table.pool.fresh:
            if store.out_size >= end or store.out_size >= OUTPUT_MAX or store.budget <= 0:
                return 0
            store.budget -= 1
            counter = counter_at(counters, self.position)
            self.position += 1
            if counter.permit.record.flags & (RECORD_USED | FLAG_RATE) != RECORD_USED:
                continue
            if not counter_exists(counters, counter):
                continue
            tells_all = self.dump_flags & EVERYWHERE and counter.permit.record.flags & FLAG_SHARED
            body = reply(
                store, DUMP, self.dump_opaque,
                fixed + counter.permit.record.name_size + (<uint32_t>LIMIT_SIZE if tells_all else 0)
            )
            store_be32(body, counter.permit.consumption)
            is_current = counter.window == counters.state.window
            store_be32(body + 4, counter.peak if is_current else counter.permit.consumption)
            store_be16(body + 8, counter.permit.record.name_size)
            name_read(&counters.permits.table, &counter.permit.record, body + 10)
            body += 10 + counter.permit.record.name_size
            if limits:
                store_be32(body, counter.limit)
                body += LIMIT_SIZE
            if tells_all:
                store_be32(body, counter_everywhere(counters, self.position - 1))
        reply(store, DUMP, self.dump_opaque, 0)
        self.position = 0
        return 0


def open_store(*, make_session=CounterSession, **sizes):
    """Makes a store.

    make_session: makes the sessions; benchmarks and tests have their own. sizes: the arguments of CounterStore.
    """
    return CounterStore(make_session=make_session, **sizes)
