"""The sentinel room's store: tokens, their leases, who owns them, the sweep, and what is left to extensions.

Floor 2. A token is given back by its release, by the sweep that finds its lease over, or by a release or keep that
comes too late. Until then it counts.
"""

from typing import NamedTuple

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport INT32_MAX, INT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from counterd._audit cimport audit_index, audit_name, audit_pool, audit_region, audit_timers, chain_ends
from counterd._core cimport CONNECTIONS_MAX, SLICE_STEPS, Session, Store, give_back
from counterd._table cimport RECORD_USED, index_prefetch, name_tag, pool_left, pool_take, table_find, table_insert
from counterd._wheel cimport timer_is_armed, timers_next_ns, timers_take
from counterd.byteorder cimport load_be32, load_be64, load_le64, store_be64
from counterd.debug cimport debug_check
from counterd.protocols.sentinel._rates cimport (
    ALREADY_RELEASED, BAD_REQUEST, BLOCKED, FAIL, NO_RULE, NOT_AVAILABLE, OK, RELEASE_OK, RateStore,
)
from counterd.protocols.sentinel._records cimport (
    CONCURRENCY, HOT, ID_SIZE, JUDGED, RULED, Flow, Owner, Records, State, Token, Value, after, flow_at, lease_begun,
    lease_end, owner_drop, owner_free, owner_take, token_arm, token_at, token_free, value_at,
)
from counterd.protocols.sentinel._replies cimport (
    ACQUIRE, FLOW, KEEP, PARAM, PING, RELEASE, REPLY_SIZE, TYPES, reply_call,
)
from counterd.protocols.sentinel._window cimport Samples, Window
from counterd.siphash cimport siphash13

cdef enum:
    CALLS_MAX = 1024        # that a token service has yet to answer; beyond them the answer is 5 at once
    BATCHES_MAX = 16        # that an expire strategy has yet to judge; beyond them the sweep waits
    BATCH_MAX = 256         # tokens in one

TYPE_NAMES = {PING: "ping", FLOW: "flow", PARAM: "param", ACQUIRE: "acquire", RELEASE: "release", KEEP: "keep"}
STATUS_NAMES = (
    "bad_request", "", "too_many_requests", "fail", "ok", "blocked", "should_wait", "no_rule", "no_ref_rule",
    "not_available", "release_ok", "already_released",
)
NS_PER_TENTH = 100000000
KINDS = {ACQUIRE: "request", RELEASE: "release", KEEP: "keep"}


class Call(NamedTuple):
    """A request that a token service is to answer. client: for request_token() and keep_token()."""

    ticket: int
    kind: str
    flow_id: int
    count: int
    prioritized: bool
    token_id: int
    client: int
    address: str


class Lease(NamedTuple):
    """A token whose lease is over, for an expire strategy."""

    token_id: int
    flow_id: int
    count: int
    held_ms: int
    online: bool


cdef class SentinelStore(RateStore):
    """The tokens. Made by open_store() in _room.pyx.

    make_session: called with the store for each connection. token_key: 16 random bytes: what ids are made of.
    """

    def __cinit__(self, *, bytes token_key not None, make_session, **_):
        if len(token_key) != 16:
            raise ValueError(f"token_key must have 16 bytes, not {len(token_key)}")
        self.make_session = make_session
        self.records.state.token_key[0] = load_le64(<const uint8_t*>PyBytes_AS_STRING(token_key))
        self.records.state.token_key[1] = load_le64(<const uint8_t*>PyBytes_AS_STRING(token_key) + 8)
        self.scheduled_ns = INT64_MAX
        self.sweep_began_ns = -1
        self.calls = []
        self.judging = []
        self.pending = {}
        self.abandoned = {}
        self.batches = {}

    def set_limits(self, *, double max_allowed_qps, int64_t sweep_interval_ns, uint32_t sweep_max_tokens,
                   int64_t sweep_max_duration_ns):
        """What may change while it runs. sweep_max_tokens: 0 is no bound."""
        self.qps_max = max_allowed_qps
        self.sweep_interval_ns = sweep_interval_ns
        self.sweep_tokens_max = sweep_max_tokens
        self.sweep_duration_ns = sweep_max_duration_ns

    cpdef Session session(self, int64_t now_ns=0):
        return self.make_session(self)

    # ---- tokens ----

    cdef int acquire(self, uint32_t number, uint32_t count, uint32_t connection, uint8_t* id) noexcept:
        """Section "ACQUIRE", of a rule that there is. connection 0 is nobody, who is always there."""
        cdef Records* records = &self.records
        cdef Flow* flow = flow_at(records, number)
        cdef uint32_t owner = 0, entry
        cdef Token* token
        if <double>(flow.now_calls + count) > self.threshold(flow.threshold, flow.threshold_type, flow.namespace):
            flow.blocked += count
            return BLOCKED
        if self.draining or pool_left(&records.state.tokens) == 0:
            return NOT_AVAILABLE
        if connection:
            owner = self.owner_of(connection)
        entry = self.token_create()
        token = token_at(records, entry)
        token.since_ns = self.now_ns
        token.timer.prev = 0
        token.flow = number
        token.count = count
        token.kept = 0
        owner_take(records, owner, entry)
        flow.now_calls += count
        flow.tokens += 1
        flow.passed += count
        token_arm(records, entry, lease_begun(flow, token, self.now_ns))
        self.expect(token.timer.due_ns)
        memcpy(id, token.id, ID_SIZE)
        return OK

    cdef void foresee(self, uint32_t count) noexcept:
        """Makes the ids of so many tokens to come, which nobody can guess: hashes of a number that only rises, under a
        secret key. Where each will be in the index is asked for, since a table of a million is in no cache.
        """
        cdef State* state = self.records.state
        cdef uint8_t[ID_SIZE] id
        cdef Foreseen* coming
        while self.foreseen_serial < state.serial + min(count, <uint32_t>FORESEEN):
            self.foreseen_serial += 1
            coming = self.foreseen + (self.foreseen_serial & (FORESEEN - 1))
            coming.word = siphash13(state.token_key, <const uint8_t*>&self.foreseen_serial, sizeof(uint64_t))
            store_be64(id, coming.word)
            coming.tag = name_tag(&self.records.tokens, id, ID_SIZE)
            index_prefetch(&self.records.tokens.index, coming.tag)

    cdef uint32_t token_create(self) noexcept:
        """A record under a new id."""
        cdef State* state = self.records.state
        cdef uint8_t[ID_SIZE] id
        cdef Foreseen* next
        while True:
            self.foresee(1)
            state.serial += 1
            next = self.foreseen + (state.serial & (FORESEEN - 1))
            store_be64(id, next.word)
            if next.word and table_find(&self.records.tokens, next.tag, id, ID_SIZE) == 0:
                state.granted += 1
                return table_insert(&self.records.tokens, next.tag, id, ID_SIZE)

    cdef bint is_late(self, uint32_t number) noexcept:
        """Whether a token's lease is over. Where an expire strategy decides, it is over when that has said so."""
        cdef Token* token = token_at(&self.records, number)
        return self.submit_leases is None and lease_end(&self.records, token, self.now_ns) <= self.now_ns

    cdef int release(self, const uint8_t* id, uint32_t tag) noexcept:
        """Section "RELEASE"."""
        cdef Records* records = &self.records
        cdef uint32_t number = table_find(&records.tokens, tag, id, ID_SIZE)
        cdef int status = RELEASE_OK
        if number == 0:
            return ALREADY_RELEASED
        if self.is_late(number):
            self.count_expired(number)
            records.state.late += 1
            status = ALREADY_RELEASED
        elif not self.is_ruled(token_at(records, number).flow):
            status = NO_RULE
        if status != ALREADY_RELEASED:
            records.state.released += 1
        token_free(records, number)
        return status

    cdef int keep(self, const uint8_t* id, uint32_t tag, uint32_t connection, int32_t* left_ms) noexcept:
        """Section "KEEP"."""
        cdef Records* records = &self.records
        cdef uint32_t number = table_find(&records.tokens, tag, id, ID_SIZE)
        cdef uint32_t owner
        cdef Token* token
        cdef int64_t due_ns
        if number == 0:
            return ALREADY_RELEASED
        if self.is_late(number):
            self.count_expired(number)
            records.state.late += 1
            token_free(records, number)
            return ALREADY_RELEASED
        token = token_at(records, number)
        if not self.is_ruled(token.flow):
            return NO_RULE
        owner = self.owner_of(connection) if connection else 0
        if token.owner != owner:
            owner_drop(records, number)
            owner_take(records, owner, number)
        token.kept += 1
        records.state.kept += 1
        due_ns = lease_begun(flow_at(records, token.flow), token, self.now_ns)
        if due_ns > self.now_ns or not token.record.flags & JUDGED:  # else nothing is renewed, and it is judged already
            token.record.flags &= <uint8_t>~JUDGED
            token_arm(records, number, due_ns)
            self.expect(due_ns)
        left_ms[0] = <int32_t>min(max(due_ns - self.now_ns, <int64_t>0) // 1000000, <int64_t>INT32_MAX)
        return OK

    cdef bint is_ruled(self, uint32_t number) noexcept:
        """Whether a flow has a rule for tokens."""
        cdef Flow* flow = flow_at(&self.records, number)
        return flow.record.flags & RULED and flow.grade == CONCURRENCY

    # ---- clients ----

    cdef void client_enter(self, uint32_t connection) noexcept:
        self.records.clients[connection].owner = 0
        self.records.clients[connection].serial += 1

    cdef void client_leave(self, uint32_t connection) noexcept:
        """Its tokens have clientOfflineTime from now on; ticks arm them for that."""
        cdef Records* records = &self.records
        cdef State* state = records.state
        cdef uint32_t number = records.clients[connection].owner
        cdef Owner* owner = records.owners + number
        records.clients[connection].owner = 0
        records.clients[connection].serial += 1
        if number == 0:
            return
        owner.connection = 0
        owner.gone_ns = self.now_ns
        if owner.tokens == 0:
            owner_free(records, number)
            return
        owner.is_leaving = True
        owner.cursor = owner.first
        owner.next = 0
        if state.leaving_last:
            records.owners[state.leaving_last].next = number
        else:
            state.leaving_first = number
        state.leaving_last = number
        self.stirred = True

    cdef uint32_t owner_of(self, uint32_t connection) noexcept:
        """Made when it has its first token. There is room for all connections, and one for each token besides."""
        cdef Records* records = &self.records
        cdef uint32_t number = records.clients[connection].owner
        cdef Owner* owner
        if number:
            return number
        number = pool_take(&records.state.owners, &records.owners.next, sizeof(Owner))
        debug_check(number != 0)
        owner = records.owners + number
        owner.connection = connection
        owner.tokens = 0
        owner.first = 0
        owner.cursor = 0
        owner.is_leaving = False
        owner.gone_ns = 0
        records.clients[connection].owner = number
        return number

    cdef uint64_t handle(self, uint32_t connection) noexcept:
        """Of a connection, for others: its number is given to another one later, its handle is not."""
        return <uint64_t>self.records.clients[connection].serial << 32 | connection

    cdef uint32_t from_handle(self, uint64_t handle) noexcept:
        """0 if that connection has gone."""
        cdef uint32_t connection = <uint32_t>handle
        if connection > CONNECTIONS_MAX or self.handle(connection) != handle:
            return 0
        return connection

    cdef int arm_leavers(self, int steps) noexcept:
        """Arms the tokens of those who have gone for their clientOfflineTime; returns steps left."""
        cdef Records* records = &self.records
        cdef State* state = records.state
        cdef uint32_t number, entry
        cdef Owner* owner
        cdef Token* token
        while steps > 0 and state.leaving_first:
            steps -= 1
            number = state.leaving_first
            owner = records.owners + number
            entry = owner.cursor
            if entry:
                token = token_at(records, entry)
                owner.cursor = token.next_of_owner
                if not token.record.flags & JUDGED:
                    token_arm(records, entry, lease_end(records, token, owner.gone_ns))
                continue
            state.leaving_first = owner.next
            if state.leaving_first == 0:
                state.leaving_last = 0
            owner.is_leaving = False
            if owner.tokens == 0:
                owner_free(records, number)
        return steps

    # ---- time ----

    cpdef int64_t next_deadline(self):
        cdef int64_t due_ns = timers_next_ns(&self.records.token_timers)
        cdef int64_t other_ns = timers_next_ns(&self.records.value_timers)
        if Store.next_deadline(self) == 0 or self.records.state.leaving_first or self.calls or self.judging:
            return 0
        if due_ns >= 0 and self.sweep_began_ns < 0:
            due_ns = max(due_ns, self.sweep_next_ns)
        if due_ns < 0 or 0 <= other_ns < due_ns:
            due_ns = other_ns
        if self.pending or self.batches:
            for waiting in (self.pending, self.batches):
                for other_ns, *_ in waiting.values():
                    if due_ns < 0 or other_ns < due_ns:
                        due_ns = other_ns
                    break
        self.scheduled_ns = due_ns if due_ns >= 0 else INT64_MAX
        return due_ns

    cpdef tick(self, int64_t now_ns):
        """Does due work, a slice of it: what leavers leave, leases that are over, values of which nothing counts."""
        cdef int steps = give_back(&self.region, SLICE_STEPS)
        self.now_ns = now_ns
        steps = self.arm_leavers(steps)
        steps = self.sweep(steps)
        self.expire_values(steps)
        if self.pending or self.batches:
            self.drop_overdue()
        self.submit()

    cdef int sweep(self, int steps) except? -1:
        """Goes on with the sweep, or begins one if it is time and something is due; returns the steps that are left."""
        cdef int64_t due_ns = timers_next_ns(&self.records.token_timers)
        cdef int left = steps
        cdef uint32_t number
        if steps == 0:
            return 0
        if self.sweep_began_ns < 0:
            if due_ns < 0 or due_ns > self.now_ns or self.now_ns < self.sweep_next_ns:
                return steps
            self.sweep_began_ns = self.now_ns
            self.sweep_taken = 0
        if self.submit_leases is not None:
            left = min(left, <int>BATCH_MAX)
            if len(self.batches) >= BATCHES_MAX:
                self.end_sweep()
                return left
        while left > 0 and (self.sweep_tokens_max == 0 or self.sweep_taken < self.sweep_tokens_max):
            number = timers_take(&self.records.token_timers, self.now_ns, &left)
            if number == 0:
                break
            self.sweep_taken += 1
            self.end_lease(number)
        if left > 0 or self.now_ns - self.sweep_began_ns >= self.sweep_duration_ns:
            self.end_sweep()
        return left

    cdef void end_sweep(self) noexcept:
        self.sweep_next_ns = self.sweep_began_ns + self.sweep_interval_ns
        self.sweep_began_ns = -1

    cdef int end_lease(self, uint32_t number) except -1:
        """Of a token that was taken from the wheel."""
        cdef Records* records = &self.records
        cdef Token* token = token_at(records, number)
        cdef int64_t end_ns = lease_end(records, token, self.now_ns)
        if end_ns > self.now_ns:  # the server renews it, or its rule has changed
            token.record.flags &= <uint8_t>~JUDGED
            token_arm(records, number, end_ns)
        elif self.submit_leases is not None and not token.record.flags & JUDGED:
            self.enter_batch(number)
            token.record.flags |= JUDGED
            token_arm(records, number, self.now_ns + self.leases_timeout_ns)
        else:
            self.count_expired(number)
            token_free(records, number)
        return 0

    cdef int count_expired(self, uint32_t number) noexcept:
        cdef Token* token = token_at(&self.records, number)
        cdef Owner* owner = self.records.owners + token.owner
        if token.owner and owner.connection == 0:
            self.records.state.expired_offline += 1
        else:
            self.records.state.expired_lease += 1
        flow_at(&self.records, token.flow).expired += token.count
        return 0

    # ---- extensions ----

    def delegate(self, submit, int64_t timeout_ns=0):
        """Has a token service answer ACQUIRE, RELEASE and KEEP: submit() is given lists of Calls, by tick().

        Each is to be answered by answer(); after timeout_ns it is answered 5. None: the store answers them again.
        """
        self.submit_calls = submit
        self.calls_timeout_ns = timeout_ns

    def delegate_expiry(self, submit, int64_t timeout_ns=0):
        """Has an expire strategy judge tokens whose lease is over: submit() is given a ticket and Leases, by tick().

        Each batch is to be answered by expire(); after timeout_ns all of it goes. None: all go at once.
        """
        self.submit_leases = submit
        self.leases_timeout_ns = timeout_ns

    cdef int delegate_call(
        self, Session session, uint32_t xid, uint8_t message, const uint8_t* body, uint32_t size
    ) except? -1:
        """Notes a request, whose body is sound, for the token service; returns its status if that is known already."""
        cdef int64_t id = <int64_t>load_be64(body)
        cdef bint is_request = message == ACQUIRE
        if len(self.pending) >= CALLS_MAX or is_request and self.draining:
            return NOT_AVAILABLE
        self.ticket += 1
        self.calls.append(Call(
            self.ticket, KINDS[message], id if is_request else 0, load_be32(body + 8) if is_request else 0,
            is_request and size > 12 and body[12] != 0, 0 if is_request else id, self.handle(session.connection),
            session.owner.origin() if session.owner is not None else "",
        ))
        self.pending[self.ticket] = (self.now_ns + self.calls_timeout_ns, session, xid, message)
        session.awaited += 1
        self.stirred = True
        return OK

    def answer(self, uint64_t ticket, int status, int64_t value, int64_t now_ns):
        """What a token service says to a Call: a status, and a token's id or the ms of its lease.

        If nobody waits for a token that it granted, it is asked to release it. What is no status is answered as -1.
        """
        cdef Session session
        self.now_ns = now_ns
        if not STATUS_MIN <= status < STATUS_MIN + STATUSES:
            status = FAIL
        pending = self.pending.pop(ticket, None)
        if pending is None:
            if ticket not in self.abandoned:
                return
            del self.abandoned[ticket]
            session, message = None, ACQUIRE
        else:
            _, session, xid, message = pending
        if session is not None and not session.closing:
            self.reply(session, xid, message, status, value if status == OK else 0)
        elif message == ACQUIRE and status == OK:
            self.ticket += 1
            self.calls.append(Call(self.ticket, "release", 0, 0, False, value, 0, ""))
            self.pending[self.ticket] = (now_ns + self.calls_timeout_ns, None, 0, RELEASE)
            self.stirred = True

    cdef int reply(self, Session session, uint32_t xid, uint8_t message, int status, int64_t value) except -1:
        """Posts what was answered later."""
        cdef uint8_t[REPLY_SIZE] data
        cdef uint32_t size = reply_call(data, xid, message, status, value)
        session.awaited -= 1
        self.answers[message][status - STATUS_MIN] += 1
        session.post(PyBytes_FromStringAndSize(<const char*>data, size))
        return 0

    cdef int enter_batch(self, uint32_t number) except -1:
        """Notes a token for the expire strategy."""
        cdef Token* token = token_at(&self.records, number)
        cdef Owner* owner = self.records.owners + token.owner
        self.judging.append(Lease(
            <int64_t>load_be64(token.id), self.flow_id(token.flow), token.count,
            (self.now_ns - token.since_ns) // 1000000, token.owner == 0 or owner.connection != 0,
        ))
        return 0

    def expire(self, uint64_t ticket, token_ids, int64_t now_ns):
        """What an expire strategy says to a batch: these go, the others have another lease."""
        cdef Records* records = &self.records
        cdef uint32_t number
        cdef Token* token
        self.now_ns = now_ns
        deadline_ns, batch = self.batches.pop(ticket, (0, ()))
        going = set(token_ids)
        for token_id in batch:
            number = self.find(&records.tokens, token_id)
            if number == 0:
                continue  # it was released meanwhile
            token = token_at(records, number)
            if not token.record.flags & JUDGED or token.timer.due_ns != deadline_ns:
                continue  # it was kept, and may be in a later batch
            if token_id in going:
                self.count_expired(number)
                token_free(records, number)
            else:
                token.record.flags &= <uint8_t>~JUDGED
                token_arm(records, number, after(now_ns, 2 * flow_at(records, token.flow).resource_ns))
        self.stirred = True

    cdef int drop_overdue(self) except -1:
        """Answers calls that were not answered in time, and forgets batches: their tokens go by themselves."""
        while self.pending:
            ticket, (deadline_ns, session, xid, message) = next(iter(self.pending.items()))
            if deadline_ns > self.now_ns:
                break
            del self.pending[ticket]
            self.overdue += 1
            if message == ACQUIRE:
                self.abandoned[ticket] = None
                if len(self.abandoned) > CALLS_MAX:
                    del self.abandoned[next(iter(self.abandoned))]
            if session is not None:
                self.reply(session, xid, message, NOT_AVAILABLE, 0)
        while self.batches:
            ticket, (deadline_ns, _) = next(iter(self.batches.items()))
            if deadline_ns > self.now_ns:
                break
            del self.batches[ticket]
            self.overdue += 1
        return 0

    cdef int submit(self) except -1:
        """Hands over what was noted for extensions."""
        calls, leases = self.calls, self.judging
        if not calls and not leases:
            return 0
        self.calls, self.judging = [], []
        self.calling_out = True
        try:
            if calls and self.submit_calls is not None:
                self.submit_calls(calls)
            if leases and self.submit_leases is not None:
                self.ticket += 1
                self.batches[self.ticket] = (
                    self.now_ns + self.leases_timeout_ns, [lease.token_id for lease in leases],
                )
                self.submit_leases(self.ticket, leases)
        finally:
            self.calling_out = False
        return 0

    # ---- the same, for Python: what extensions build on, and tests ----

    def request_token(self, int64_t flow_id, int64_t count, bint _prioritized, uint64_t client, int64_t now_ns):
        """What ACQUIRE does, for a client as in a Call, or 0 for nobody, who never goes: (status, token id)."""
        cdef uint8_t[ID_SIZE] id
        cdef uint32_t number, connection = self.from_handle(client)
        cdef int status
        self.now_ns = now_ns
        if flow_id <= 0 or not 0 < count <= INT32_MAX:
            return BAD_REQUEST, 0
        number = self.find(&self.records.flows, flow_id)
        if number == 0 or not self.is_ruled(number):
            return NO_RULE, 0
        if client and not connection:
            return NOT_AVAILABLE, 0
        status = self.acquire(number, <uint32_t>count, connection, id)
        return status, <int64_t>load_be64(id) if status == OK else 0

    def release_token(self, int64_t token_id, int64_t now_ns):
        """What RELEASE does: a status."""
        cdef uint8_t[ID_SIZE] id
        self.now_ns = now_ns
        store_be64(id, <uint64_t>token_id)
        return self.release(id, name_tag(&self.records.tokens, id, ID_SIZE))

    def keep_token(self, int64_t token_id, uint64_t client, int64_t now_ns):
        """What KEEP does, for a client as request_token(): (status, ms that are left)."""
        cdef uint8_t[ID_SIZE] id
        cdef int32_t left_ms = 0
        cdef uint32_t connection = self.from_handle(client)
        self.now_ns = now_ns
        store_be64(id, <uint64_t>token_id)
        if client and not connection:
            return NOT_AVAILABLE, 0
        status = self.keep(id, name_tag(&self.records.tokens, id, ID_SIZE), connection, &left_ms)
        return status, left_ms

    def flow(self, int64_t flow_id):
        """What there is of a flow, by name; None if there is no such rule and no token of it."""
        cdef uint32_t number = self.find(&self.records.flows, flow_id)
        cdef Flow* flow = flow_at(&self.records, number) if number else NULL
        if flow == NULL:
            return None
        return {
            "ruled": flow.record.flags & RULED != 0,
            "grade": flow.grade,
            "now_calls": flow.now_calls,
            "tokens": flow.tokens,
            "passed": flow.passed,
            "blocked": flow.blocked,
            "waiting": flow.waiting,
            "expired": flow.expired,
        }

    # ---- figures ----

    cpdef dict snapshot(self):
        cdef State* state = self.records.state
        cdef dict figures = Store.snapshot(self)
        cdef uint32_t number, flows = 0
        for number in range(1, state.flows.fresh + 1):
            flows += flow_at(&self.records, number).record.flags & RULED
        figures.update({
            "rules_flow": flows,
            "rules_param": state.params.used,
            "namespaces": self.region.header.records.used,
            "tokens": state.tokens.used,
            "tokens_max": state.tokens.capacity,
            "granted": state.granted,
            "released": state.released,
            "kept": state.kept,
            "late": state.late,
            "expired_offline": state.expired_offline,
            "expired_lease": state.expired_lease,
            "param_values": state.values.used - state.hot,
            "param_values_max": self.values_max,
            "hot_items": state.hot,
            "calls_pending": len(self.pending),
            "calls_overdue": self.overdue,
        })
        return figures

    def outcomes(self):
        """As Store.outcomes: each type and status."""
        cdef int message, status
        names = [*TYPE_NAMES.values(), "unknown"]
        return [
            (names[message], STATUS_NAMES[status], self.answers[message][status])
            for message in range(TYPES + 1) for status in range(STATUSES) if self.answers[message][status]
        ]

    def begin_drain(self):
        self.draining = True

    def held(self):
        """As Store.held: tokens."""
        return self.records.state.tokens.used

    def holdings_of(self, uint32_t connection):
        """As Store.holdings_of: tokens that a connection owns."""
        if connection > CONNECTIONS_MAX:
            return 0
        return self.records.owners[self.records.clients[connection].owner].tokens

    def leases(self, size_t limit):
        """As Store.leases: the first so many tokens. Their names are their flows."""
        cdef Records* records = &self.records
        cdef uint32_t number
        cdef Token* token
        cdef list found = []
        for number in range(1, records.state.tokens.fresh + 1):
            token = token_at(records, number)
            if <size_t>len(found) >= limit:
                break
            if token.record.flags & RECORD_USED:
                name = b"flow %d" % self.flow_id(token.flow)
                found.append((
                    records.owners[token.owner].connection, name, token.count, token.since_ns // NS_PER_TENTH,
                ))
        return found

    def audit(self):
        """As Store.audit: AssertionError at the first broken invariant, of rules, values and tokens too."""
        cdef Records* records = &self.records
        cdef State* state = records.state
        audit_index(&records.tokens.index, &state.tokens, "token index")
        audit_index(&records.flows.index, &state.flows, "flow index")
        audit_index(&records.params.index, &state.params, "param index")
        audit_index(&records.values.index, &state.values, "value index")
        audit_timers(&records.token_timers, state.tokens.fresh)
        audit_timers(&records.value_timers, state.values.fresh)
        audit_pool(&state.owners, &records.owners.next, sizeof(Owner), "owners")
        self.audit_tokens()
        self.audit_owners()
        audit_region(&self.region, self.audit_values())

    cdef int audit_tokens(self) except -1:
        """Each is armed, and a flow has as many as it says."""
        cdef Records* records = &self.records
        cdef uint32_t number
        cdef Token* token
        cdef Flow* flow
        sums = {}
        for number in range(1, records.state.tokens.fresh + 1):
            token = token_at(records, number)
            if timer_is_armed(&token.timer) != (token.record.flags & RECORD_USED != 0):
                raise AssertionError(f"token {number} is armed wrongly")
            if token.record.flags & RECORD_USED:
                count, calls = sums.get(token.flow, (0, 0))
                sums[token.flow] = count + 1, calls + token.count
        for number in range(1, records.state.flows.fresh + 1):
            flow = flow_at(records, number)
            if flow.record.flags & RECORD_USED:
                if (flow.tokens, flow.now_calls) != sums.pop(number, (0, 0)):
                    raise AssertionError(f"flow {number} counts {flow.tokens} tokens of {flow.now_calls}")
                if flow.tokens == 0 and not flow.record.flags & RULED:
                    raise AssertionError(f"flow {number} has neither a rule nor tokens")
                audit_window(&flow.window, &flow.samples, number)
        if sums:
            raise AssertionError(f"there are tokens of flows {list(sums)}, which are none")
        return 0

    cdef int audit_owners(self) except -1:
        """Each token is in the list of its owner, who is there, or on the way out."""
        cdef Records* records = &self.records
        cdef uint32_t number, entry, previous, count, listed = 0, owned = 0
        cdef Owner* owner
        queued = set()
        number = records.state.leaving_first
        while number and number not in queued:
            queued.add(number)
            if not records.owners[number].is_leaving or records.owners[number].connection:
                raise AssertionError(f"owner {number} is in the queue of leavers, and is none")
            number = records.owners[number].next
        for number in range(1, records.state.tokens.fresh + 1):
            entry = token_at(records, number).owner
            owned += token_at(records, number).record.flags & RECORD_USED and entry != 0
        free = set()
        number = records.state.owners.free
        while number:
            free.add(number)
            number = records.owners[number].next
        for number in range(1, records.state.owners.fresh + 1):
            owner = records.owners + number
            if number in free:
                continue
            count = previous = 0
            entry = owner.first
            while entry:
                if token_at(records, entry).owner != number or token_at(records, entry).prev_of_owner != previous:
                    raise AssertionError(f"token {entry} is listed wrongly under owner {number}")
                count += 1
                previous = entry
                entry = token_at(records, entry).next_of_owner
            if count != owner.tokens:
                raise AssertionError(f"owner {number} has {count} tokens, {owner.tokens} counted")
            if owner.connection and records.clients[owner.connection].owner != number:
                raise AssertionError(f"owner {number} is not that of connection {owner.connection}")
            if owner.connection == 0 and owner.tokens == 0 and number not in queued:
                raise AssertionError(f"owner {number} has gone, and nothing is left")
            if owner.is_leaving != (number in queued):
                raise AssertionError(f"owner {number} is on the way out, or is not, and the queue says otherwise")
            listed += count
        if listed != owned:
            raise AssertionError(f"{owned} tokens have owners, who have {listed}")
        return 0

    cdef uint32_t audit_values(self) except? 0xffffffff:
        """Returns how many blocks the values of parameters have."""
        cdef Records* records = &self.records
        cdef uint32_t number, blocks = 0, hot = 0
        cdef Value* value
        for number in range(1, records.state.values.fresh + 1):
            value = value_at(records, number)
            if not value.record.flags & RECORD_USED:
                continue
            if timer_is_armed(&value.timer) == (value.record.flags & HOT != 0):
                raise AssertionError(f"value {number} is armed wrongly")
            hot += value.record.flags & HOT
            blocks += audit_name(&records.values, &value.record, number) + value.blocks
            if not chain_ends(&records.values, &value.tally.samples, value.blocks):
                raise AssertionError(f"the samples of value {number} end in the wrong block")
        if hot != records.state.hot:
            raise AssertionError(f"{hot} hot items, {records.state.hot} counted")
        return blocks


cdef int audit_window(const Window* window, const Samples* samples, uint32_t number) except -1:
    """Its sums are those of its samples."""
    cdef uint64_t passed = 0, waiting = 0
    cdef uint32_t slot
    for slot in range(window.size):
        passed += samples.passed[slot]
        waiting += samples.waiting[slot]
    if passed != window.passed or waiting != window.waiting:
        raise AssertionError(f"the window of flow {number}: {passed}, {waiting}, not {window.passed}, {window.waiting}")
    return 0
